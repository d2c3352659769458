"""Write and read the data files of the stages.

| node      | file                                      | rows                                     |
|-----------|-------------------------------------------|------------------------------------------|
| rollout   | `plans/<plan>/groups/*.parquet`           | samples (written during the rollout)     |
| reward    | `data/reward/<digest>/rewards-*.parquet`  | rewards                                  |
| advantage | `data/advantage/<digest>/batch-*.parquet` | all that `train` needs, one row a sample |
|           |                                           | (several files if the batch is large)    |
| train     | `data/train/<digest>/packing-*.json`      | the packing plan                         |
|           | `data/train/<digest>/adapters-*           | the adapters after the steps, with       |
|           | .safetensors`                             | `train.lora`                             |
| eval      | `data/eval/<digest>/samples-*.parquet`    | samples with their rewards               |

A file name has a piece of the content's sha256, so two attempts at a node write two files. The
node's record names the file that counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pydantic import ValidationError

from rlpipe.batch.build import Batch
from rlpipe.batch.columns import RESPONSE_COLUMNS, BatchColumns, BatchPart, BatchSizes
from rlpipe.batch.images import batch_images
from rlpipe.batch.packing import PackingPlan
from rlpipe.errors import ObjectCorrupt
from rlpipe.rewards.reward_rows import RewardRow
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.store.parquet.arrays import from_experts, from_ragged, lengths, ragged, to_numpy
from rlpipe.store.parquet.rows import (
    EXPERTS,
    TOKEN_COLUMNS,
    image_values,
    rewards_to_table,
    samples_to_table,
    table_to_rewards,
    table_to_samples,
    to_images,
)
from rlpipe.store.parquet.schema import BATCH, REWARDS, SAMPLES, StoredTable, make_table
from rlpipe.store.parquet.shards import (
    data_folder,
    open_tables,
    read_rows,
    split_by_size,
    write_data,
    write_table,
)
from rlpipe.types import FileRecord, Node, Sample, Stage

FLOAT_COLUMNS = tuple(name for name in RESPONSE_COLUMNS if name != "loss_mask")
"""Response columns of a batch that are float32 and may be missing."""
FILE_BYTES = 64 * 2**20
"""Bytes of a batch file before encoding, at most, if it has more than one share."""
ROWS = "rows"
"""Output of an advantage node with several batch files: the sizes of all samples."""
SIZES = ("prompt_len", "response_len", "loss_tokens")


def read_samples(
    files: Files, rollout: Node, *, routed: bool = False, tokens: bool = True
) -> list[Sample]:
    """Return all samples of a rollout or evaluation node, removed ones included.

    No token of a removed sample counts in a loss; its reward counts in its group. `routed`: with
    the experts that the engine chose for its tokens, which may be most of the data. `tokens`: with
    token ids and all else about single tokens, which become Python lists (about 100 bytes a token).

    Raises: ObjectMissing, ObjectCorrupt.
    """
    removed = {(group_id, index) for group_id, index in rollout.outputs.get("removed", ())}
    unread = () if routed else (EXPERTS,) if tokens else TOKEN_COLUMNS
    columns = [name for name in SAMPLES.names if name not in unread]
    samples = table_to_samples(read_rows(files, rollout.files, columns))
    for sample in samples:
        if sample.remove_sample or (sample.group_id, sample.index) in removed:
            sample.remove_sample = True
            sample.loss_mask = [0] * len(sample.response_ids)
    return samples


def write_rewards(files: Files, digest: str, rows: Sequence[RewardRow]) -> FileRecord:
    """Write the rows of a reward node that have a reward or an error.

    A row with neither had nothing to score.
    """
    scored = [row for row in rows if row.reward is not None or row.error is not None]
    folder = data_folder(Stage.REWARD, digest)
    return write_table(files, folder, "rewards", rewards_to_table(scored))


def read_rewards(files: Files, reward: Node) -> list[RewardRow]:
    """Return the rows of a reward node. Raises: ObjectMissing, ObjectCorrupt."""
    rows = table_to_rewards(read_rows(files, reward.files, REWARDS.names))
    return [RewardRow(**row) for row in rows]


def read_scored(files: Files, rollout: Node, reward: Node) -> list[Sample]:
    """Return the samples of the accepted groups of a rollout, with their rewards, in order.

    Raises: ObjectMissing, ObjectCorrupt.
    """
    accepted = set(rollout.outputs["accepted"])
    reward_of = {(row.group_id, row.index): row for row in read_rewards(files, reward)}
    samples = [sample for sample in read_samples(files, rollout) if sample.group_id in accepted]
    samples.sort(key=lambda sample: (sample.group_id, sample.index))
    rows = [reward_of.get((sample.group_id, sample.index)) for sample in samples]
    return [
        _with_reward(sample, row) if row else sample
        for sample, row in zip(samples, rows, strict=True)
    ]


class WrittenBatch(NamedTuple):
    """A batch in the store."""

    files: tuple[FileRecord, ...]
    outputs: dict[str, Any]
    """Further outputs of the advantage node: ROWS, if the batch has several files."""


def write_batch(
    files: Files,
    digest: str,
    batch: Batch,
    columns: BatchColumns,
    shares: Sequence[Sequence[int]] | None = None,
) -> WrittenBatch:
    """Write the batch of an advantage node.

    `columns`: the columns of the batch with log-probs and advantages. `shares`: samples that the
    ranks will read, each sample in one share. A share is a row group of a file, or several. A large
    batch has several files of whole shares, and a rank reads only those of its samples.
    """
    shares = [share for share in shares or [range(len(columns))] if len(share)]
    order = np.array([sample for share in shares for sample in share], np.int64)
    assert np.array_equal(np.sort(order), np.arange(len(columns))), "shares of another batch"
    in_order = bool((np.diff(order) > 0).all())
    folder = data_folder(Stage.ADVANTAGE, digest)
    records = []
    for part in _files_of(shares, columns):
        samples = np.array([sample for share in part for sample in share], np.int64)
        table = _batch_table(batch, columns, samples, in_order=in_order)
        row_groups = [len(share) for share in part]
        records.append(write_table(files, folder, "batch", table, row_groups))
    outputs = {ROWS: _recorded_rows(columns, order)} if len(records) > 1 else {}
    return WrittenBatch(tuple(records), outputs)


def _files_of(
    shares: Sequence[Sequence[int]], columns: BatchColumns
) -> Iterator[list[Sequence[int]]]:
    """Return the shares of each file: at most FILE_BYTES, or one share."""
    present = sum(getattr(columns, name) is not None for name in FLOAT_COLUMNS)
    sizes = 4 * columns.lengths + (1 + 4 * present) * columns.response_lengths
    if (experts := columns.routed_experts) is not None:
        sizes = sizes + columns.lengths * experts.itemsize * experts.shape[1]
    # A batch without samples has a file too.
    of_shares = [int(sizes[np.array(share)].sum()) for share in shares]
    return split_by_size(shares, of_shares, FILE_BYTES)


def _batch_table(
    batch: Batch, columns: BatchColumns, samples: np.ndarray, *, in_order: bool
) -> pa.Table:
    """Return the rows of these samples. `in_order`: the batch's rows are in order of samples."""
    loss_tokens = columns.sizes.loss_tokens
    assert loss_tokens is not None
    if not np.array_equal(samples, np.arange(len(columns))):
        columns = columns.select(samples)
    offsets = columns.response_offsets
    values = {
        "group_id": [batch.group_ids[sample] for sample in samples],
        "index": [batch.indices[sample] for sample in samples],
        "tokens": from_ragged(columns.tokens, columns.offsets, pa.int32()),
        "prompt_len": columns.prompt_lengths.astype(np.int32),
        "rollout": columns.rollout,
        "loss_mask": from_ragged(columns.loss_mask.astype(np.uint8), offsets, pa.uint8()),
        "response_len": columns.response_lengths.astype(np.int32),
        "loss_tokens": loss_tokens[samples].astype(np.int32),
        "row": None if in_order else samples.astype(np.int32),
    }
    for name in FLOAT_COLUMNS:
        if (column := getattr(columns, name)) is not None:
            values[name] = from_ragged(column, offsets, pa.float32())
    if columns.images is not None:
        values["images"] = image_values(columns.images.references())
    if columns.routed_experts is not None:
        rows = np.split(columns.routed_experts, columns.offsets[1:-1])
        values["routed_experts"] = from_experts(rows)
    return make_table(BATCH, values, "batch")


def _recorded_rows(columns: BatchColumns, order: np.ndarray) -> dict[str, Any]:
    """Return what a rank must know of samples that it does not read: their sizes.

    Lists are in the order of the rows of all files.
    """
    sizes = columns.sizes
    assert sizes.loss_tokens is not None
    return {
        "sample": order.tolist(),
        "prompt_len": sizes.prompt_lengths[order].tolist(),
        "response_len": sizes.response_lengths[order].tolist(),
        "loss_tokens": sizes.loss_tokens[order].tolist(),
        "rollout": None if sizes.rollout is None else sizes.rollout[order].tolist(),
        "scored": columns.proximal_log_probs is not None,
    }


class StoredBatch:
    """The batch of an advantage node: the sizes of all samples, and the columns of some.

    Files with such samples are read as a whole, and have the recorded sha256. Samples are decoded
    by row groups, and the rules of the table are checked on the samples that are read.
    """

    def __init__(self, files: Files, advantage: Node) -> None:
        """Raises: ObjectMissing, ObjectCorrupt."""
        self.digest = advantage.digest
        self._files = files
        self._records = advantage.files
        self._tables: dict[int, StoredTable] = {}
        """The files that were read, by number."""
        rows = advantage.outputs.get(ROWS)
        if rows is None:
            table = self._table(0)
            self.sizes, row = _sizes(table)
            self.scored = table.has(["proximal_log_probs"])
            self._ends = np.array([table.num_rows])
        else:
            self.sizes, row = _sizes_of_rows(rows, files.url(f"nodes/advantage/{self.digest}.json"))
            self.scored = bool(rows["scored"])
            self._ends = np.cumsum([record.rows or 0 for record in self._records])
        if (len(self._records) > 1) != (rows is not None) or self._ends[-1] != len(row):
            raise ObjectCorrupt(
                "the files of a batch have not the recorded rows",
                where=files.url(self._records[0].path),
                found=f"{len(self._records)} files with {self._ends[-1]} rows",
                expected=f"{len(row)} rows",
            )
        self._place = np.argsort(row)
        """[N]: row of each sample, counted over all files."""

    sizes: BatchSizes
    """Sizes of all samples, with `loss_tokens`."""
    scored: bool
    """True if the batch has proximal log-probs."""

    def __len__(self) -> int:
        return len(self.sizes)

    def keys(self) -> list[tuple[str, int]]:
        """Return (group id, index) of each sample. Reads all files."""
        keys = self._rows(np.arange(len(self)), []).take(pa.array(self._place))
        return list(zip(keys["group_id"].to_pylist(), keys["index"].to_pylist(), strict=True))

    def columns(self, samples: np.ndarray | None = None) -> BatchColumns:
        """Return these samples, or the whole batch. Raises: ObjectCorrupt.

        `samples`: their numbers, ascending.
        """
        if samples is None:
            return self._read(np.arange(len(self)))
        part = BatchPart(self.sizes, samples)
        if len(samples) == 0 and len(self):
            # A column that is null is null in every row, which no row would not show.
            return replace(self._read(np.arange(1)).select([]), part=part)
        return replace(self._read(samples), part=part)

    def _read(self, samples: np.ndarray) -> BatchColumns:
        places = self._place[samples]
        table = self._rows(np.sort(places), BATCH.names)
        if (np.diff(places) < 0).any():
            table = table.take(pa.array(np.argsort(np.argsort(places))))
        columns = _batch_columns(table)
        expected = (self.sizes.prompt_lengths[samples], self.sizes.response_lengths[samples])
        if not np.array_equal([columns.prompt_lengths, columns.response_lengths], expected):
            raise ObjectCorrupt(
                "samples of a batch have other lengths than recorded",
                where=self._files.url(f"nodes/{Stage.ADVANTAGE}/{self.digest}.json"),
            )
        return columns

    def _rows(self, rows: np.ndarray, names: Sequence[str]) -> pa.Table:
        """Return columns of these rows, ascending numbers over all files."""
        number = np.searchsorted(self._ends, rows, side="right")
        tables = [
            self._table(each).read_part(
                names, rows[number == each] - (self._ends[each - 1] if each else 0)
            )
            for each in np.unique(number).tolist() or [0]
        ]
        return pa.concat_tables(tables).combine_chunks()

    def _table(self, number: int) -> StoredTable:
        if number not in self._tables:
            (table,) = open_tables(self._files, self._records[number : number + 1])
            table.require(BATCH)
            self._tables[number] = table
        return self._tables[number]


def _sizes_of_rows(rows: dict[str, Any], where: str) -> tuple[BatchSizes, np.ndarray]:
    """Return the recorded sizes of all samples, and the number of each row's sample.

    Raises: ObjectCorrupt.
    """
    row = np.array(rows["sample"], np.int64)
    _require_each_once(row, where)
    place = np.argsort(row)
    sizes = (np.array(rows[name], np.int64)[place] for name in SIZES)
    prompts, responses, loss_tokens = sizes
    rollout = None if rows["rollout"] is None else np.array(rows["rollout"])[place]
    return BatchSizes(prompts, responses, rollout, loss_tokens), row


def _require_each_once(row: np.ndarray, where: str) -> None:
    """Raises: ObjectCorrupt unless each sample has one row."""
    if not np.array_equal(np.sort(row), np.arange(len(row))):
        raise ObjectCorrupt("rows of a batch have not each number once", where=where)


def _sizes(table: StoredTable) -> tuple[BatchSizes, np.ndarray]:
    """Return the sizes of all samples, by their numbers, and the number of each row's sample."""
    scalars = table.read_part(["prompt_len", "rollout", "response_len", "loss_tokens", "row"])
    if table.num_rows and scalars["response_len"].null_count:
        lists = table.read_part(["tokens", "prompt_len", "loss_mask"])
        prompts = to_numpy(lists["prompt_len"]).astype(np.int64)
        responses = lengths(lists["tokens"]) - prompts
        mask, offsets = ragged(lists["loss_mask"])
        loss_tokens = np.diff(np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])[offsets])
    else:
        prompts = to_numpy(scalars["prompt_len"]).astype(np.int64)
        responses = to_numpy(scalars["response_len"]).astype(np.int64)
        loss_tokens = to_numpy(scalars["loss_tokens"]).astype(np.int64)
    rollout = None if scalars["rollout"].null_count else to_numpy(scalars["rollout"])
    if scalars["row"].null_count or table.num_rows == 0:
        return BatchSizes(prompts, responses, rollout, loss_tokens), np.arange(table.num_rows)
    row = to_numpy(scalars["row"]).astype(np.int64)
    _require_each_once(row, table.where)
    place = np.argsort(row)
    sizes = BatchSizes(
        prompts[place],
        responses[place],
        None if rollout is None else rollout[place],
        loss_tokens[place],
    )
    return sizes, row


def read_batch(files: Files, advantage: Node) -> BatchColumns:
    """Return the batch of an advantage node. Raises: ObjectMissing, ObjectCorrupt."""
    return StoredBatch(files, advantage).columns()


def read_keys(files: Files, advantage: Node) -> list[tuple[str, int]]:
    """Return (group id, index) of each sample of a batch. Raises: ObjectMissing, ObjectCorrupt."""
    return StoredBatch(files, advantage).keys()


def _batch_columns(table: pa.Table) -> BatchColumns:
    tokens, offsets = ragged(table["tokens"])
    floats: dict[str, Any] = {
        name: ragged(table[name])[0] for name in FLOAT_COLUMNS if table[name].null_count == 0
    }
    return BatchColumns(
        tokens=tokens,
        offsets=offsets,
        prompt_lengths=table["prompt_len"].to_numpy().astype(np.int64),
        loss_mask=ragged(table["loss_mask"])[0].astype(np.float32),
        rollout=None if table["rollout"].null_count else table["rollout"].to_numpy(),
        routed_experts=_experts(table, len(tokens)),
        images=batch_images(to_images(table["images"])),
        **floats,
    )


def _experts(table: pa.Table, num_tokens: int) -> np.ndarray | None:
    column = table["routed_experts"]
    if num_tokens == 0 or column.null_count:
        return None
    return ragged(column)[0].reshape(num_tokens, -1)


def write_packing(
    files: Files, digest: str, packing: PackingPlan, *, critic: bool = False
) -> FileRecord:
    """Write the packing plan of a train node.

    `critic`: the plan of a critic with ranks of its own.
    """
    name = "critic-packing.json" if critic else "packing.json"
    data = packing.model_dump_json().encode()
    return write_data(files, data_folder(Stage.TRAIN, digest), name, data)


ADAPTERS = "adapters"


def write_adapters(files: Files, digest: str, data: bytes) -> FileRecord:
    """Write the adapters of a train node. `data`: bytes of a safetensors file."""
    return write_data(files, data_folder(Stage.TRAIN, digest), f"{ADAPTERS}.safetensors", data)


def adapters_of(nodes: Nodes, state: str) -> FileRecord | None:
    """Return the file with the adapters of a state; None for a state without such a file.

    `state`: digest of the node that made the state. Segments and first weights have no file.
    """
    train = nodes.find(Stage.TRAIN, state)
    found = (record for record in (train.files if train else ()) if _is_adapters(record))
    return next(found, None)


def _is_adapters(record: FileRecord) -> bool:
    return record.path.rpartition("/")[2].startswith(f"{ADAPTERS}-")


def read_packing(files: Files, train: Node, *, critic: bool = False) -> PackingPlan:
    """Return the packing plan of a train node.

    `critic`: the critic's plan, which is the policy's if the critic has no ranks of its own.

    Raises: ObjectMissing, ObjectCorrupt.
    """
    do = "audit the run; fork it from the commit before"
    if not train.files:
        where = files.url(f"nodes/{train.stage}/{train.digest}.json")
        raise ObjectCorrupt(
            "a train node without a packing plan", where=where, found="no files", do=do
        )
    record = train.files[-1 if critic else 0]
    data = files.read(record.path, sha256=record.sha256)
    try:
        return PackingPlan.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        raise ObjectCorrupt(
            "not a packing plan",
            where=files.url(record.path),
            found=f"{'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}",
            expected=f"JSON of {', '.join(PackingPlan.model_fields)}",
            do=do,
        ) from error


def write_evaluation(
    files: Files,
    digest: str,
    iteration: int,
    samples: Sequence[Sample],
    rewards: Sequence[RewardRow],
) -> FileRecord:
    """Write the samples of an evaluation with their rewards."""
    reward_of = {(row.group_id, row.index): row for row in rewards}
    rows = [_with_reward(sample, reward_of[sample.group_id, sample.index]) for sample in samples]
    rows.sort(key=lambda sample: (sample.group_id, sample.index))
    table = samples_to_table(rows, iteration)
    return write_table(files, data_folder(Stage.EVAL, digest), "samples", table)


def _with_reward(sample: Sample, row: RewardRow) -> Sample:
    return replace(
        sample,
        reward=row.reward,
        reward_parts=dict(row.parts),
        error=sample.error or row.error,
    )
