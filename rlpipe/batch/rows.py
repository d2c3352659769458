"""`RolloutRows`: rows of a rollout as arrays, without Python lists of tokens.

Scalars and lengths of all rows are read first. Values of single tokens are decoded only in shards
that have chosen rows, and only those of chosen rows are kept. Compressed shards stay in memory
between the two. Another process that gets the rows reads the shards that have its own rows.

N rows in the order of the shards, R response tokens of the chosen rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pyarrow as pa

from rlpipe.batch.columns import gather_index
from rlpipe.store.objects.files import Files
from rlpipe.store.parquet.arrays import lengths, ragged, to_numpy
from rlpipe.store.parquet.rows import EXPERTS
from rlpipe.store.parquet.schema import SAMPLES, StoredTable
from rlpipe.store.parquet.shards import open_tables
from rlpipe.store.routed_experts import NOT_ROUTED
from rlpipe.types import FileRecord, Node

DECODERS = 2
"""Threads that decode shards. With 8 threads, 64 shards of 65k tokens took three times the CPU time
of one thread and no less time."""
SCALARS = ("status", "weight_versions", "rollout_id", "remove_sample")
"""Columns that are read of all rows, besides their lengths."""
COUNTS = ("prompt_tokens", "response_tokens")
"""Lengths of all rows."""
LISTS = ("prompt_ids", "response_ids")
"""Lists of which the lengths are kept, in shards without COUNTS."""


@dataclass(frozen=True, eq=False)
class RowScalars:
    """Scalars and lengths of N rows."""

    group_ids: np.ndarray
    """[N] str."""
    indices: np.ndarray
    """[N] int64: number of the sample in its group."""
    statuses: np.ndarray
    """[N] str."""
    rollout_ids: np.ndarray
    """[N] int64: `Sample.rollout_id`, or the index where it is None."""
    removed: np.ndarray
    """[N] bool: no token counts in the loss."""
    prompt_lengths: np.ndarray
    """[N] int64."""
    response_lengths: np.ndarray
    """[N] int64."""
    num_runs: np.ndarray
    """[N] int64: runs of tokens that one weight version sampled."""
    run_tokens: np.ndarray
    """[sum of num_runs] int64."""
    run_versions: np.ndarray
    """[sum of num_runs] int64."""
    routed_tokens: np.ndarray
    """[N] int64: tokens with known experts; 0 unless experts are read."""
    experts_width: np.ndarray
    """[N] int64: experts of a token; 0 where none are recorded or read."""

    def select(self, rows: np.ndarray) -> RowScalars:
        """Return these rows, in this order."""
        runs = gather_index(_offsets(self.num_runs), rows)
        index = {"run_tokens": runs, "run_versions": runs}
        return RowScalars(
            **{of.name: getattr(self, of.name)[index.get(of.name, rows)] for of in fields(self)}
        )

    @property
    def keys(self) -> list[tuple[str, int]]:
        """Return (group id, index) of each row."""
        return list(zip(self.group_ids.tolist(), self.indices.tolist(), strict=True))

    def token_versions(self, default: int) -> np.ndarray:
        """Return the weight version that sampled each response token: [R] int64.

        `default`: the version of samples without recorded versions.
        """
        unknown = self.num_runs == 0
        runs = np.where(unknown, 1, self.num_runs)
        first = _offsets(runs)[:-1][unknown]
        is_run = np.ones(int(runs.sum()), bool)
        is_run[first] = False
        tokens = np.zeros(len(is_run), np.int64)
        versions = np.full(len(is_run), default, np.int64)
        tokens[is_run] = self.run_tokens
        tokens[first] = self.response_lengths[unknown]
        versions[is_run] = self.run_versions
        return np.repeat(versions, tokens)

    def oldest_versions(self) -> np.ndarray:
        """Return the oldest weight version of each row: [N] float64, infinite if none is known."""
        oldest = np.full(len(self.num_runs), np.inf)
        row_of_run = np.repeat(np.arange(len(self.num_runs)), self.num_runs)
        np.minimum.at(oldest, row_of_run, self.run_versions)
        return oldest


class Shards:
    """Shards of a rollout. Each is read when it is first needed. Pickles without those."""

    def __init__(self, files: Files, records: Sequence[FileRecord]) -> None:
        self._files = files
        self._records = tuple(records)
        self._tables: dict[int, StoredTable] = {}

    def __reduce__(self) -> tuple[type[Shards], tuple[Files, tuple[FileRecord, ...]]]:
        return Shards, (self._files, self._records)

    def tables(self, numbers: Sequence[int]) -> list[StoredTable]:
        """Return these shards, with the recorded sha256. Raises: ObjectMissing, ObjectCorrupt."""
        if missing := [number for number in numbers if number not in self._tables]:
            opened = open_tables(self._files, [self._records[number] for number in missing])
            self._tables.update(zip(missing, opened, strict=True))
        return [self._tables[number] for number in numbers]


@dataclass(frozen=True, eq=False)
class RolloutRows:
    """Rows of a rollout. If several shards have a group, the first shard counts."""

    scalars: RowScalars
    shards: Shards
    shard: np.ndarray
    """[N]: number of the shard."""
    row: np.ndarray
    """[N]: number of the row in its shard."""

    @classmethod
    def of_node(cls, files: Files, rollout: Node, *, routed: bool = False) -> RolloutRows:
        """Return all rows of a rollout node. Reads all shards.

        `routed`: count the tokens with known experts. Raises: ObjectMissing, ObjectCorrupt.
        """
        removed = {(group_id, index) for group_id, index in rollout.outputs.get("removed", ())}
        if not rollout.files:
            raise ValueError("a node without data files has no rows")
        shards = Shards(files, rollout.files)
        tables = shards.tables(range(len(rollout.files)))
        for table in tables:
            table.require(SAMPLES)
        with ThreadPoolExecutor(DECODERS) as pool:
            scalars = list(pool.map(lambda table: _scalars(table, routed), tables))
        fresh = list(_first_of_each_group(scalars))
        parts = [part.select(rows) for part, rows in zip(scalars, fresh, strict=True)]
        joined = RowScalars(
            **{
                of.name: np.concatenate([getattr(part, of.name) for part in parts])
                for of in fields(RowScalars)
            }
        )
        if removed:
            joined.removed[[key in removed for key in joined.keys]] = True
        return cls(
            scalars=joined,
            shards=shards,
            shard=np.repeat(np.arange(len(tables)), [len(rows) for rows in fresh]),
            row=np.concatenate(fresh),
        )

    def select(self, rows: np.ndarray) -> RolloutRows:
        """Return these rows, in this order."""
        return replace(
            self, scalars=self.scalars.select(rows), shard=self.shard[rows], row=self.row[rows]
        )

    def stored_order(self) -> np.ndarray:
        """Return the numbers of all rows in the order in which the shards hold them. [N] int64."""
        return np.lexsort((self.row, self.shard))

    def numbers_of(self, keys: Sequence[tuple[str, int]]) -> np.ndarray:
        """Return the numbers of the rows with these (group id, index)."""
        number_of = {key: row for row, key in enumerate(self.scalars.keys)}
        return np.array([number_of[key] for key in keys], np.int64)

    def read(self, rows: np.ndarray, names: Sequence[str]) -> pa.Table:
        """Return columns of these rows, with the keys, in this order. Raises: ObjectCorrupt."""
        order = np.lexsort((self.row[rows], self.shard[rows]))
        sorted_rows = rows[order]
        changes = np.flatnonzero(np.diff(self.shard[sorted_rows])) + 1

        parts = np.split(sorted_rows, changes)
        shards = self.shards.tables(
            [int(self.shard[part[0]]) if len(part) else 0 for part in parts]
        )
        with ThreadPoolExecutor(DECODERS) as pool:
            tables = list(
                pool.map(lambda shard, part: shard.read_part(names, self.row[part]), shards, parts)
            )
        table = pa.concat_tables(tables).combine_chunks()
        if (order == np.arange(len(order))).all():
            return table
        return table.take(pa.array(np.argsort(order))).combine_chunks()


def joined_tokens(table: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """Return prompt and response of each row, one after another: tokens [S] int32, offsets."""
    prompts, prompt_offsets = ragged(table["prompt_ids"])
    responses, response_offsets = ragged(table["response_ids"])
    sizes = np.stack([np.diff(prompt_offsets), np.diff(response_offsets)], axis=1)
    is_response = np.repeat(np.tile([False, True], len(sizes)), sizes.reshape(-1))
    tokens = np.empty(len(is_response), np.int32)
    tokens[is_response] = responses
    tokens[~is_response] = prompts
    return tokens, _offsets(sizes.sum(axis=1))


def ragged_or(
    column: pa.ChunkedArray, row_lengths: np.ndarray, default: Any, dtype: Any
) -> np.ndarray:
    """Return the flat values of a list column, with `default` for each value of a null list."""
    values, _ = ragged(column)
    if column.null_count == 0:
        return values.astype(dtype)
    result = np.full(int(row_lengths.sum()), default, dtype)
    result[np.repeat(to_numpy(column.is_valid()), row_lengths)] = values
    return result


def _scalars(shard: StoredTable, routed: bool) -> RowScalars:
    if not routed and shard.has(COUNTS):
        table = shard.read_part([*SCALARS, *COUNTS])
        prompts, responses = (to_numpy(table[name]).astype(np.int64) for name in COUNTS)
    else:
        # The rules compare experts with the lists.
        table = shard.read_part([*SCALARS, *LISTS, *([EXPERTS] if routed else [])])
        prompts, responses = (lengths(table[name]).astype(np.int64) for name in LISTS)
    runs = table["weight_versions"].combine_chunks()
    run_tokens, run_versions = (
        to_numpy(part).astype(np.int64) for part in runs.flatten().flatten()
    )
    index = to_numpy(table["index"]).astype(np.int64)
    none = np.zeros(len(index), np.int64)
    routed_tokens, width = _routing(table, prompts + responses) if routed else (none, none)
    return RowScalars(
        group_ids=_texts(table["group_id"]),
        indices=index,
        statuses=_texts(table["status"]),
        rollout_ids=np.where(
            to_numpy(table["rollout_id"].is_null()),
            index,
            to_numpy(table["rollout_id"].fill_null(0)),
        ).astype(np.int64),
        removed=to_numpy(table["remove_sample"].fill_null(False)).copy(),
        prompt_lengths=prompts,
        response_lengths=responses,
        num_runs=lengths(runs).astype(np.int64),
        run_tokens=run_tokens,
        run_versions=run_versions,
        routed_tokens=routed_tokens,
        experts_width=width,
    )


def _routing(table: pa.Table, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens with known experts, and the experts of a token, of each row."""
    values, offsets = ragged(table[EXPERTS])
    width = np.diff(offsets) // np.maximum(tokens, 1)
    known = np.array(
        [
            np.count_nonzero(values[start:end:step] != NOT_ROUTED) if step else 0
            for start, end, step in zip(offsets[:-1], offsets[1:], width, strict=True)
        ],
        np.int64,
    )
    return known, width.astype(np.int64)


def _first_of_each_group(parts: Sequence[RowScalars]) -> Iterator[np.ndarray]:
    """Yield, for each shard, the rows of groups that no earlier shard has."""
    seen: set[str] = set()
    for part in parts:
        groups = part.group_ids.tolist()
        yield np.flatnonzero([group not in seen for group in groups])
        seen.update(groups)


def _texts(column: pa.ChunkedArray) -> np.ndarray:
    return np.array(column.to_pylist(), object)


def _offsets(row_lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(row_lengths, dtype=np.int64)])
