"""Rows of a rollout as arrays, and the samples that one rank scores (rlpipe.batch.rows)."""

from __future__ import annotations

import pickle
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpipe.batch.build import ChosenRows, fix_batch
from rlpipe.batch.columns import BatchColumns
from rlpipe.batch.files import read_samples
from rlpipe.batch.packing import plan
from rlpipe.batch.rows import RolloutRows
from rlpipe.errors import ObjectCorrupt, ObjectMissing
from rlpipe.rewards.reward_rows import RewardRow
from rlpipe.store.columns import KIND
from rlpipe.store.objects.files import Files
from rlpipe.store.parquet.shards import ShardWriter, write_data
from rlpipe.store.routed_experts import NOT_ROUTED, one_per_token
from rlpipe.types import FileRecord, Node, Sample, Stage, Status

VERSION = 3
WIDTH = 2
Groups = list[list[Sample]]


@st.composite
def groups(draw: st.DrawFn) -> Groups:
    """Groups of samples of any lengths, masks, versions and statuses; experts of width 2."""
    return [
        [draw(samples(f"run:{number:08d}", index)) for index in range(draw(st.integers(1, 3)))]
        for number in range(draw(st.integers(1, 4)))
    ]


@st.composite
def samples(draw: st.DrawFn, group_id: str, index: int) -> Sample:
    length = draw(st.integers(1, 6))
    prompt = draw(st.lists(st.integers(0, 99), min_size=1, max_size=4))
    mask = st.lists(st.integers(0, 1), min_size=length, max_size=length)
    first = draw(st.integers(0, length))
    runs = [(first, draw(st.integers(1, VERSION))), (length - first, VERSION)]
    rows = draw(st.integers(0, len(prompt) + length - 1))
    return Sample(
        group_id=group_id,
        index=index,
        prompt_ids=prompt,
        response_ids=draw(st.lists(st.integers(0, 99), min_size=length, max_size=length)),
        rollout_log_probs=[-draw(st.integers(0, 8)) / 4 for _ in range(length)],
        loss_mask=draw(st.none() | mask),
        weight_versions=draw(st.sampled_from([[], [run for run in runs if run[0]]])),
        status=draw(st.sampled_from([Status.COMPLETED] * 4 + [Status.ABORTED])),
        rollout_id=draw(st.none() | st.integers(0, 1)),
        remove_sample=draw(st.booleans()),
        rollout_routed_experts=draw(st.none() | st.just(np.ones((rows, WIDTH), np.uint16))),
    )


def stored(folder: str, rows: Groups) -> tuple[Files, Node]:
    """Store a group a shard, and the first group again in a last shard of another attempt."""
    files = Files(folder)
    writer = ShardWriter(files, "plans/p/groups", 0, "a")
    records = [writer.write([group]) for group in rows]
    again = [replace(sample, prompt_ids=[7, 7], rollout_routed_experts=None) for sample in rows[0]]
    records.append(ShardWriter(files, "plans/p/groups", 0, "b").write([again]))
    return files, node(records)


def of_version_1(files: Files, record: FileRecord) -> FileRecord:
    """The same shard, as the release before the columns with lengths wrote it."""
    table = pq.read_table(pa.BufferReader(files.read(record.path)))
    table = table.drop_columns(["prompt_tokens", "response_tokens"])
    sink = pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata({KIND: b"samples/1"}), sink)
    data = sink.getvalue().to_pybytes()
    return write_data(files, "plans/p/groups", "old.parquet", data, table.num_rows)


def node(records: list[FileRecord]) -> Node:
    return Node(stage=Stage.ROLLOUT, digest="d" * 64, files=tuple(records))


def chosen(files: Files, rollout: Node, **options: Any) -> ChosenRows:
    rows = RolloutRows.of_node(files, rollout, routed=options.get("routed", False))
    return fix_batch(
        rows,
        [],
        accepted=set(rows.scalars.group_ids),
        scored=False,
        version=VERSION,
        **options,
    )


def mask_of(sample: Sample, oldest: int | None) -> list[int]:
    mask = sample.loss_mask or [1] * len(sample.response_ids)
    if sample.remove_sample:
        return [0] * len(mask)
    versions = [version for tokens, version in sample.weight_versions for _ in range(tokens)]
    if oldest is None or not versions:
        return mask
    return [value * (of >= oldest) for value, of in zip(mask, versions, strict=True)]


@settings(max_examples=60, deadline=None)
@given(
    rows=groups(),
    mask_stale=st.booleans(),
    routed=st.booleans(),
    ranks=st.integers(1, 8),
    old=st.booleans(),
)
def test_a_rank_reads_of_its_samples_what_the_whole_batch_has(
    rows: Groups, mask_stale: bool, routed: bool, ranks: int, old: bool
):
    rows[0][0] = replace(
        rows[0][0],
        status=Status.COMPLETED,
        weight_versions=[],
        rollout_routed_experts=np.ones((9, WIDTH), np.uint16)[: len(rows[0][0].tokens) - 1],
    )
    rows[0][1:] = []
    with tempfile.TemporaryDirectory() as folder:
        files, rollout = stored(folder, rows)
        if old:
            rollout = node([of_version_1(files, record) for record in rollout.files])
        batch = chosen(files, rollout, mask_stale=mask_stale, routed=routed)
        whole = batch.batch(with_samples=True)
        packing = plan(
            batch.sizes.lengths, global_batch_size=None, max_tokens=12, data_parallel=ranks
        )
        parts = [
            batch.columns(np.array(sorted(i for micro in rank for i in micro), np.int64))
            for rank in packing.steps[0]
        ]
    # Against the samples as objects, as written.
    written = {(sample.group_id, sample.index): sample for group in rows for sample in group}
    kept = [written[key] for key in zip(whole.group_ids, whole.indices, strict=True)]
    columns = whole.columns
    oldest = VERSION if mask_stale else None
    assert columns.tokens.tolist() == [token for sample in kept for token in sample.tokens]
    assert columns.loss_mask.tolist() == [m for sample in kept for m in mask_of(sample, oldest)]
    assert columns.rollout_log_probs is not None
    assert columns.rollout_log_probs.tolist() == [
        value for sample in kept for value in sample.rollout_log_probs or ()
    ]
    assert [sample.response_ids for sample in whole.samples] == [
        sample.response_ids for sample in kept
    ]
    if routed:
        assert columns.routed_experts is not None
        experts = [
            np.zeros((0, WIDTH), np.uint16)
            if sample.rollout_routed_experts is None
            else sample.rollout_routed_experts
            for sample in kept
        ]
        assert np.array_equal(
            columns.routed_experts,
            np.concatenate(
                [
                    one_per_token(of, len(sample.tokens))
                    for of, sample in zip(experts, kept, strict=True)
                ]
            ),
        )
        assert columns.routed_experts.max() in (1, NOT_ROUTED)
    for part in parts:
        assert_part(part, columns)
    assert sum(len(part) for part in parts) == len(columns)


def assert_part(part: BatchColumns, whole: BatchColumns) -> None:
    """The part has the same tokens, masks and experts, and knows their places in the batch."""
    assert part.part is not None
    held = part.part.samples
    expected = whole.select(held)
    for name in ("tokens", "offsets", "prompt_lengths", "loss_mask", "rollout", "routed_experts"):
        found = getattr(part, name)
        want = getattr(expected, name)
        assert (found is None) == (want is None) and (found is None or found.dtype == want.dtype)
        assert found is None or np.array_equal(found, want), name
    assert np.array_equal(whole.tokens[part.token_index()], part.tokens)
    assert np.array_equal(whole.loss_mask[part.response_index()], part.loss_mask)
    assert np.array_equal(part.sizes.lengths, whole.lengths)
    assert np.array_equal(part.sizes.rollouts, whole.rollouts)
    assert part.positions(held).tolist() == [*range(len(held))]


def test_removed_samples_of_the_node_have_no_tokens_in_the_loss(tmp_path: Path):
    rows = [[Sample("g", index, "", [1], response_ids=[2, 3]) for index in range(2)]]
    for sample in rows[0]:
        sample.status = Status.COMPLETED
    files, rollout = stored(str(tmp_path), rows)
    rollout = rollout.model_copy(update={"outputs": {"removed": [["g", 1]]}})
    whole = chosen(files, rollout).batch(with_samples=True)
    assert whole.columns.loss_mask.tolist() == [1, 1, 0, 0]
    assert [sample.remove_sample for sample in whole.samples] == [False, True]
    assert [sample.loss_mask for sample in whole.samples] == [None, [0, 0]]
    assert [of.loss_mask for of in read_samples(files, rollout)[:2]] == [None, [0, 0]]


def test_rows_of_a_rollout_without_tokens_in_the_ranks_share_are_none(tmp_path: Path):
    sample = Sample("g", 0, "", [1], response_ids=[2, 3], status=Status.COMPLETED)
    files, rollout = stored(str(tmp_path), [[sample]])
    empty = chosen(files, rollout).columns(np.zeros(0, np.int64))
    assert len(empty) == 0 and len(empty.tokens) == 0 and len(empty.sizes) == 1


def test_another_process_reads_only_the_shards_of_its_samples(tmp_path: Path):
    rows = [
        [
            Sample(
                f"g{number}", index, "", [number], response_ids=[index] * 3, status=Status.COMPLETED
            )
            for index in range(2)
        ]
        for number in (2, 0, 1)  # the order in which the groups have finished
    ]
    files, rollout = stored(str(tmp_path), rows)
    batch = chosen(files, rollout)
    assert batch.sizes.stored_order is not None
    assert batch.sizes.stored_order.tolist() == [4, 5, 0, 1, 2, 3]
    sent = pickle.dumps(batch)
    whole = batch.batch().columns
    for number in (0, 2, 3):  # all but the shard of g0, which has samples 0 and 1
        Path(files.url(rollout.files[number].path).removeprefix("file://")).unlink()
    got: ChosenRows = pickle.loads(sent)
    assert_part(got.columns(np.array([0, 1])), whole)
    with pytest.raises(ObjectMissing):
        got.columns(np.array([2]))
    Path(files.url(rollout.files[1].path).removeprefix("file://")).unlink()
    assert_part(got.columns(np.array([1])), whole)  # read before


def test_a_changed_byte_of_a_shard_is_found_wherever_it_is(tmp_path: Path):
    sample = Sample("g", 0, "", [1], response_ids=[2, 3], status=Status.COMPLETED)
    files, rollout = stored(str(tmp_path), [[sample]])
    path = Path(files.url(rollout.files[0].path).removeprefix("file://"))
    data = path.read_bytes()
    path.chmod(0o644)
    for place in range(0, len(data), 97):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(ObjectCorrupt):
            RolloutRows.of_node(files, rollout)


def test_rewards_of_another_table_are_no_rows(tmp_path: Path):
    from rlpipe.batch.files import write_rewards

    files = Files(tmp_path)
    record = write_rewards(files, "d" * 64, [RewardRow("g", 0, 1.0)])
    with pytest.raises(ObjectCorrupt, match=r"(?s)another schema.*prompt"):
        RolloutRows.of_node(files, node([record]))
