"""Packing plans and batch columns."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpipe.batch.columns import BatchColumns
from rlpipe.batch.packing import (
    PackingPlan,
    _deal,
    _differenced,
    attention_length,
    check_pairs,
    plan,
    scoring_plan,
)
from rlpipe.errors import ConfigError, DataError

BLOCK = 50
"""Times the costliest sample that a block of a scoring plan costs (`packing.BLOCK_SAMPLES`)."""
lengths_of_samples = st.lists(st.integers(1, 300), min_size=1, max_size=80)


@given(lengths_of_samples, st.integers(1, 40), st.integers(1, 512), st.integers(1, 4))
def test_a_plan_loses_and_doubles_no_sample_and_keeps_ranks_in_step(
    lengths, global_batch_size, max_tokens, data_parallel
):
    made = plan(
        lengths,
        global_batch_size=global_batch_size,
        max_tokens=max_tokens,
        data_parallel=data_parallel,
    )
    made.check(len(lengths), data_parallel)
    sizes = [sum(len(micro) for rank in step for micro in rank) for step in made.steps]
    assert len(sizes) == -(-len(lengths) // global_batch_size)
    assert max(sizes) - min(sizes) <= 1


@given(lengths_of_samples, st.integers(1, 512), st.integers(1, 4))
def test_a_micro_batch_exceeds_max_tokens_only_by_a_sample_that_is_alone(
    lengths, max_tokens, data_parallel
):
    made = plan(lengths, global_batch_size=None, max_tokens=max_tokens, data_parallel=data_parallel)
    for micro in (micro for step in made.steps for rank in step for micro in rank):
        assert len(micro) <= 1 or sum(lengths[i] for i in micro) <= max_tokens


@given(
    lengths_of_samples,
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(1, 4),
    st.booleans(),
    st.randoms(),
)
def test_rollouts_stay_together_in_steps_of_equal_size(
    lengths, num_steps, micro_batch_size, data_parallel, balance_by_flops, random
):
    rollout = [random.randrange(8) for _ in lengths]
    made = plan(
        lengths,
        global_batch_size=None,
        num_steps=num_steps,
        rollout=rollout,
        micro_batch_size=micro_batch_size,
        max_tokens=64,
        data_parallel=data_parallel,
        balance_by_flops=balance_by_flops,
    )
    made.check(len(lengths), data_parallel)
    steps = [{rollout[i] for rank in step for micro in rank for i in micro} for step in made.steps]
    assert len(steps) == min(num_steps, len(set(rollout)))
    assert sorted(number for step in steps for number in step) == sorted(set(rollout))
    assert max(map(len, steps)) - min(map(len, steps)) <= 1
    assert (
        max(len(micro) for step in made.steps for rank in step for micro in rank)
        <= micro_batch_size
    )


@pytest.mark.parametrize("sizes", [(8, None), (None, 4), (8, 4)])
def test_a_batch_that_lost_a_group_keeps_its_number_of_steps(sizes):
    made = plan(
        [5] * 29, global_batch_size=sizes[0], num_steps=sizes[1], max_tokens=100, data_parallel=1
    )
    assert [sum(len(micro) for rank in step for micro in rank) for step in made.steps] == [
        8,
        7,
        7,
        7,
    ]


def test_balancing_by_flops_evens_out_the_square_of_attention_and_by_tokens_the_tokens():
    lengths = np.array([40_000] + [1_000] * 40)
    for balance_by_flops, cost in ((True, lengths * (1 + lengths / 1000.0)), (False, lengths)):
        made = plan(
            lengths,
            global_batch_size=None,
            micro_batch_size=41,
            max_tokens=1,
            data_parallel=2,
            balance_by_flops=balance_by_flops,
            attention_length=1000,
        )
        loads = sorted(cost[[i for micro in rank for i in micro]].sum() for rank in made.steps[0])
        alone = [len(micro) for rank in made.steps[0] for micro in rank if 0 in micro]
        assert alone == [1]
        assert loads == pytest.approx([80_000, 1_640_000] if balance_by_flops else [40_000, 40_000])


def test_the_length_at_which_attention_costs_as_much_as_the_matrices():
    dense = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 8 * 1024 // 3}
    assert attention_length(dense) == pytest.approx(12 * 1024, rel=1e-3)
    sparse = {
        **dense,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 512,
        "num_key_value_heads": 4,
        "head_dim": 128,
    }
    assert attention_length(sparse) == (1024 * 128 * (32 + 8) + 3 * 1024 * 1024) / (16 * 128)


def test_equal_samples_are_shared_evenly_over_ranks():
    made = plan([14] * 256, global_batch_size=128, max_tokens=8192, data_parallel=2)
    assert [[sum(map(len, rank)) for rank in step] for step in made.steps] == [[64, 64], [64, 64]]


def test_ranks_are_balanced_when_lengths_differ():
    lengths = np.random.default_rng(0).integers(10, 2000, 128)
    made = plan(lengths, global_batch_size=None, max_tokens=8192, data_parallel=4)
    loads = [sum(int(lengths[list(micro)].sum()) for micro in rank) for rank in made.steps[0]]
    assert max(loads) / min(loads) < 1.1


def test_samples_go_to_optimizer_steps_in_the_given_order():
    made = plan(
        [5] * 6, global_batch_size=2, max_tokens=100, data_parallel=1, order=[5, 0, 4, 1, 3, 2]
    )
    assert [sorted(i for rank in step for micro in rank for i in micro) for step in made.steps] == [
        [0, 5],
        [1, 4],
        [2, 3],
    ]


def test_fewer_samples_than_ranks_leaves_empty_micro_batches():
    made = plan([3], global_batch_size=None, max_tokens=10, data_parallel=2)
    assert sorted(made.steps[0]) == [((),), ((0,),)]


def test_a_plan_survives_json():
    made = plan([3, 9, 4], global_batch_size=2, max_tokens=10, data_parallel=1)
    assert PackingPlan.model_validate_json(made.model_dump_json()) == made


def test_a_plan_of_another_batch_is_refused():
    made = plan([3, 9, 4], global_batch_size=None, max_tokens=10, data_parallel=1)
    with pytest.raises(DataError, match="another batch"):
        made.check(4, 1)
    doubled = made.model_copy(update={"steps": (((((0, 1, 1)),),),)})
    with pytest.raises(DataError, match="loses or doubles"):
        doubled.check(3, 1)


@pytest.mark.parametrize("lengths", [[], [3, 0]])
def test_nothing_to_pack_is_an_error(lengths):
    with pytest.raises(DataError, match="nothing to pack"):
        plan(lengths, global_batch_size=None, max_tokens=10, data_parallel=1)


def test_bad_sizes_and_orders_are_errors():
    with pytest.raises(ConfigError, match="max_tokens"):
        plan([1], global_batch_size=None, max_tokens=0, data_parallel=1)
    with pytest.raises(DataError, match="order"):
        plan([1, 1], global_batch_size=None, max_tokens=1, data_parallel=1, order=[0, 0])


def three_samples() -> BatchColumns:
    return BatchColumns.from_lists(
        [[1, 2], [3], [4, 5, 6]],
        [[7], [8, 9], []],
        advantages=[[0.5], [1.0, -1.0], []],
        loss_mask=[[1], [1, 0], []],
    )


def test_columns_have_the_values_of_the_lists():
    batch = three_samples()
    assert len(batch) == 3
    assert batch.tokens.tolist() == [1, 2, 7, 3, 8, 9, 4, 5, 6]
    assert batch.lengths.tolist() == [3, 3, 3]
    assert batch.response_lengths.tolist() == [1, 2, 0]
    assert batch.num_response_tokens == 3
    assert [part.tolist() for part in batch.split(np.array([0.5, 1.0, -1.0]))] == [
        [0.5],
        [1.0, -1.0],
        [],
    ]


def test_select_returns_samples_in_the_given_order():
    batch = three_samples().select([2, 1])
    assert batch.tokens.tolist() == [4, 5, 6, 3, 8, 9]
    assert batch.advantages is not None
    assert batch.advantages.tolist() == [1.0, -1.0]
    assert batch.loss_mask.tolist() == [1, 0]
    assert batch.rollout_log_probs is None
    fanned = three_samples().with_columns(rollout=np.array([4, 4, 9])).select([2, 1])
    assert fanned.rollouts.tolist() == [9, 4]
    routed = (
        three_samples()
        .with_columns(routed_experts=np.arange(18, dtype=np.uint16).reshape(9, 2))
        .select([2, 1])
    )
    assert routed.routed_experts is not None
    assert routed.routed_experts[:, 0].tolist() == [12, 14, 16, 6, 8, 10]
    assert three_samples().rollouts.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("rollouts", "micro_batches"),
    [
        ([0, 0, 1, 1], [[2, 3], [0, 1]]),
        ([0, 0, 1], [[0, 1], [2]]),
        ([0, 0, 1, 2], [[0, 1], [2, 3]]),
        ([0, 0, 0, 0], [[0, 1], [2, 3]]),
        ([0, 0, 1, 1], [[0, 2], [1, 3]]),
        ([0, 0, 1, 1], [[0, 1, 2], [3]]),
    ],
)
def test_each_two_samples_are_one_pair_in_one_micro_batch(rollouts, micro_batches):
    batch = BatchColumns.from_lists([[1]] * len(rollouts), [[2]] * len(rollouts))
    batch = batch.with_columns(rollout=np.array(rollouts, np.int64))
    steps = ((tuple(map(tuple, micro_batches)),),)
    packing = PackingPlan(num_samples=len(rollouts), data_parallel=1, max_tokens=99, steps=steps)
    if micro_batches == [[2, 3], [0, 1]]:
        check_pairs(batch, packing)
        return
    with pytest.raises(DataError, match="not of preference pairs"):
        check_pairs(batch, packing)


def test_a_rollout_number_for_every_sample_or_none():
    with pytest.raises(DataError, match="one value per sample"):
        three_samples().with_columns(rollout=np.zeros(2, np.int64))


def test_a_loss_mask_is_all_ones_unless_given():
    assert BatchColumns.from_lists([[1]], [[2, 3]]).loss_mask.tolist() == [1, 1]


def test_a_column_of_another_raggedness_is_refused_with_the_sample():
    with pytest.raises(DataError, match=r"advantages\[1\]"):
        BatchColumns.from_lists([[1], [2]], [[2, 3], [4]], advantages=[[0.0, 0.0], [0.0, 0.0]])
    with pytest.raises(DataError, match="advantages"):
        three_samples().with_columns(advantages=np.zeros(2, np.float32))


def test_an_empty_prompt_is_refused_with_the_sample():
    with pytest.raises(DataError, match=r"prompt_lengths\[1\]"):
        BatchColumns.from_lists([[1], []], [[2], [4]])


def karmarkar_karp(costs: list[float], num_bins: int) -> float:
    """The largest bin of Karmarkar and Karp's differencing method, written with whole sorted
    lists."""
    parts = [sorted([cost] + [0.0] * (num_bins - 1)) for cost in costs]
    while len(parts) > 1:
        parts.sort(key=lambda part: part[-1] - part[0])
        one = parts.pop()
        other = parts.pop()
        parts.append(sorted(a + b for a, b in zip(one, reversed(other), strict=True)))
    return parts[0][-1]


def micro_batches(made: PackingPlan) -> list[tuple[int, ...]]:
    return [micro for step in made.steps for rank in step for micro in rank]


@given(
    st.lists(st.integers(1, 4000), min_size=1, max_size=40), st.integers(1, 4), st.integers(1, 4)
)
def test_the_largest_micro_batch_is_never_larger_than_karmarkar_karps(lengths, bins, data_parallel):
    """With room for every partition: as many samples in a bin as there are."""
    lengths = np.array(lengths)
    for balance_by_flops, cost in (
        (True, lengths * (1 + lengths / 1000.0)),
        (False, lengths.astype(float)),
    ):
        made = plan(
            lengths,
            global_batch_size=None,
            max_tokens=max(-(-int(lengths.sum()) // (bins * data_parallel)), int(lengths.max())),
            data_parallel=data_parallel,
            balance_by_flops=balance_by_flops,
            attention_length=1000,
        )
        made.check(len(lengths), data_parallel)
        batches = micro_batches(made)
        assert max(int(lengths[list(micro)].sum()) for micro in batches) <= made.max_tokens
        largest = max(cost[list(micro)].sum() for micro in batches)
        unbounded = karmarkar_karp(cost.tolist(), len(batches))
        differenced = _differenced(np.lexsort((np.arange(len(cost)), -cost)), cost, len(batches), 1)
        found = max(cost[members].sum() for members in differenced)
        assert sorted(i for members in differenced for i in members) == list(range(len(lengths)))
        if all(lengths[members].sum() <= made.max_tokens for members in differenced):
            assert largest <= found * (1 + 1e-12)
        assert found == pytest.approx(unbounded, rel=0.2), "ties may be broken otherwise"


def test_sixteen_samples_are_shared_better_than_costliest_first_into_the_cheapest_bin():
    random = np.random.default_rng(1)
    better = 0
    for _ in range(50):
        lengths = random.integers(500, 2000, 16)
        made = plan(
            lengths,
            global_batch_size=None,
            max_tokens=10_000,
            data_parallel=4,
            balance_by_flops=False,
        )
        batches = micro_batches(made)
        largest = max(int(lengths[list(micro)].sum()) for micro in batches)
        assert len(batches) == 4
        assert largest <= karmarkar_karp(lengths.tolist(), 4)
        better += largest < max(lengths[b].sum() for b in costliest_first(lengths, 4))
    assert better > 25


def costliest_first(lengths: np.ndarray, num_bins: int) -> list[list[int]]:
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    for sample in np.argsort(-lengths, kind="stable").tolist():
        min(bins, key=lambda members: lengths[members].sum()).append(sample)
    return bins


@given(lengths_of_samples, st.integers(1, 6), st.integers(1, 4))
def test_with_micro_batch_size_the_numbers_of_samples_stay_even(
    lengths, micro_batch_size, data_parallel
):
    lengths = np.array(lengths)
    made = plan(
        lengths,
        global_batch_size=None,
        micro_batch_size=micro_batch_size,
        max_tokens=1,
        data_parallel=data_parallel,
    )
    made.check(len(lengths), data_parallel)
    batches = micro_batches(made)
    assert max(map(len, batches)) <= micro_batch_size
    cost = lengths * (1 + lengths / 12_288)
    differenced = _differenced(
        np.lexsort((np.arange(len(cost)), -cost)), cost, len(batches), len(batches)
    )
    assert max(map(len, differenced)) <= -(-len(lengths) // len(batches))
    largest = max(cost[list(micro)].sum() for micro in batches)
    assert largest <= max(cost[members].sum() for members in differenced) * (1 + 1e-12)


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=40),
    st.integers(1, 12),
    st.integers(1, 200),
    st.integers(1, 3),
    st.sampled_from([None, 1, 3, 4]),
)
def test_whole_rollouts_stay_in_one_micro_batch(
    pairs, global_batch_size, max_tokens, data_parallel, micro_batch_size
):
    lengths = np.array(pairs).reshape(-1)
    made = plan(
        lengths,
        global_batch_size=global_batch_size,
        max_tokens=max_tokens,
        data_parallel=data_parallel,
        rollout=np.repeat(np.arange(len(pairs)), 2),
        micro_batch_size=micro_batch_size,
        whole_rollouts=True,
    )
    made.check(len(lengths), data_parallel)
    assert len(made.steps) == -(-len(pairs) // global_batch_size)
    for micro in (micro for step in made.steps for rank in step for micro in rank):
        assert [i + 1 for i in micro[::2]] == list(micro[1::2])
        size = len(micro) if micro_batch_size else sum(int(lengths[i]) for i in micro)
        assert len(micro) <= 2 or size <= (micro_batch_size or max_tokens)


def test_the_same_batch_gives_the_same_plan():
    lengths = np.random.default_rng(2).integers(1, 50, 400)
    plans = [
        plan(lengths, global_batch_size=None, max_tokens=700, data_parallel=2) for _ in range(2)
    ]
    assert plans[0] == plans[1]


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=24),
    st.integers(1, 5),
    st.integers(1, 3),
)
def test_each_bin_goes_to_the_rank_with_the_least_cost_that_has_room(
    lengths, data_parallel, per_rank
):
    cost = np.array(lengths, float)
    bins = [[sample] for sample in range(min(len(lengths), data_parallel * per_rank))]
    bins += [[] for _ in range(data_parallel * per_rank - len(bins))]
    ranks: list[list[tuple[int, ...]]] = [[] for _ in range(data_parallel)]
    load = [0.0] * data_parallel
    for members in sorted(bins, key=lambda members: -float(cost[members].sum())):
        free = [rank for rank in range(data_parallel) if len(ranks[rank]) < per_rank]
        target = min(free, key=lambda rank: (load[rank], rank))
        ranks[target].append(tuple(members))
        load[target] += float(cost[members].sum())
    assert _deal(bins, cost, data_parallel, per_rank) == tuple(map(tuple, ranks))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=1500),
    st.integers(64, 512),
    st.integers(1, 9),
    st.randoms(use_true_random=False),
)
def test_a_scoring_plan_gives_ranks_neighbours_of_about_equal_cost(
    lengths, max_tokens, data_parallel, random
):
    order = np.array(random.sample(range(len(lengths)), len(lengths)), np.int64)
    step = scoring_plan(
        np.array(lengths), max_tokens=max_tokens, data_parallel=data_parallel, order=order
    )
    assert sorted(i for rank in step for micro in rank for i in micro) == [*range(len(lengths))]
    assert len(step) == data_parallel and len({len(rank) for rank in step}) == 1
    assert all(sum(lengths[i] for i in micro) <= max_tokens for rank in step for micro in rank)
    place = np.argsort(order)
    places = [sorted(place[i] for micro in rank for i in micro) for rank in step]
    cost = np.array([length * (1 + length / 12_288) for length in lengths])
    costs = [cost[order[rank]].sum() for rank in places]
    if cost.sum() >= BLOCK * cost.max() * data_parallel:
        # Every rank is a block.
        assert np.array_equal(np.concatenate(places), np.arange(len(lengths)))
        assert max(costs) - min(costs) <= 2 * cost.max()
    if cost.sum() < 2 * BLOCK * cost.max():
        # One block of all ranks, packed as a training step.
        whole = plan(
            lengths, global_batch_size=None, max_tokens=max_tokens, data_parallel=data_parallel
        )
        assert step == whole.steps[0]


def test_a_scoring_plan_of_few_samples_a_rank_has_blocks_of_several_ranks():
    lengths = np.full(16 * 32, 100)
    order = np.arange(len(lengths))[::-1].copy()
    step = scoring_plan(lengths, max_tokens=1000, data_parallel=32, order=order)
    held = [sorted(i for micro in rank for i in micro) for rank in step]
    # 10 blocks of 3 or 4 ranks: each has neighbours, and all ranks have equal costs.
    assert {len(rank) for rank in held} == {16}
    assert max(rank[-1] - rank[0] for rank in held) < 4 * 16
    assert max(i for rank in held[:4] for i in rank) == len(lengths) - 1
