"""Pack the samples of a batch into balanced micro-batches.

`plan` makes a `PackingPlan`: the optimizer step, the data parallel rank and the micro-batch of each
sample. The plan is small JSON and is stored with the train node, so a replay packs alike. The loss
does not depend on the plan; only speed does.

N samples. Costs are floats without a unit, proportional to FLOPs.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np

from rlpipe.batch.columns import BatchColumns
from rlpipe.errors import ConfigError, DataError
from rlpipe.system.model_files import text_model
from rlpipe.types import Record

MicroBatch = tuple[int, ...]
"""Indices of samples; empty where a rank has fewer micro-batches than another."""
Step = tuple[tuple[MicroBatch, ...], ...]
"""`step[data parallel rank][micro-batch]`."""
Bin = tuple[float, list[int]]
"""Cost, and indices of samples."""
ATTENTION_LENGTH = 12_288.0
"""Default of `attention_length`: a model with a hidden size of 1,024."""
BLOCK_SAMPLES = 50
"""Costs of the costliest sample that a block of a scoring plan has at least. Blocks then differ by
up to 2 % of their cost."""


class PackingPlan(Record):
    """`steps[optimizer step][data parallel rank][micro-batch]` = indices of samples."""

    num_samples: int
    data_parallel: int
    max_tokens: int
    steps: tuple[Step, ...]

    def check(self, num_samples: int, data_parallel: int) -> None:
        """Check that the plan is for this batch and layout and holds every sample exactly once.

        Raises: DataError otherwise.
        """
        if (self.num_samples, self.data_parallel) != (num_samples, data_parallel):
            raise DataError(
                "a packing plan of another batch or layout",
                where="PackingPlan",
                found=f"{self.num_samples} samples on {self.data_parallel} data parallel ranks",
                expected=f"{num_samples} samples on {data_parallel} data parallel ranks",
                do="make a plan for this batch with rlpipe.batch.packing.plan",
            )
        packed = sorted(i for step in self.steps for rank in step for micro in rank for i in micro)
        uneven = any(
            len(step) != data_parallel or len({len(rank) for rank in step}) != 1
            for step in self.steps
        )
        if packed != list(range(num_samples)) or uneven:
            raise DataError(
                "a packing plan loses or doubles samples, or its ranks have unequal numbers of "
                "micro-batches",
                where="PackingPlan.steps",
                found=f"{len(packed)} entries, {len(set(packed))} different",
                expected=f"each of {num_samples} samples once",
            )


def plan(
    lengths: Sequence[int] | np.ndarray,
    *,
    global_batch_size: int | None,
    max_tokens: int,
    data_parallel: int,
    num_steps: int | None = None,
    rollout: Sequence[int] | np.ndarray | None = None,
    micro_batch_size: int | None = None,
    balance_by_flops: bool = True,
    order: Sequence[int] | np.ndarray | None = None,
    attention_length: float = ATTENTION_LENGTH,
    whole_rollouts: bool = False,
) -> PackingPlan:
    """Split a batch into optimizer steps, and each step into micro-batches of about equal cost.

    `lengths` [N]: tokens of each sample. `rollout` [N]: samples with equal numbers stay in one
    step; None: each sample is its own rollout. There are `num_steps` steps or, if that is None,
    ceil(rollouts / global_batch_size). Their sizes differ by at most one rollout: a batch that lost
    a group to an error keeps its number of steps. (slime drops rollouts that do not fill a step.)

    Rollouts go to steps in the `order` of their samples (default 0..N-1). A bin (micro-batch) holds
    `max_tokens` tokens, and a longer sample is alone in its bin; with `micro_batch_size` it holds
    that many samples of any length. A step has as few bins as possible. A sample of L tokens costs
    L (1 + L / attention_length), or L without `balance_by_flops`. Two packings are made: costliest
    sample first into the cheapest bin, and the largest differencing method of Karmarkar and Karp.
    The packing with the cheaper largest bin is taken.

    With `whole_rollouts` the samples of a rollout stay in one bin, alone if they exceed it.

    Raises: DataError for an empty batch or a bad `order`; ConfigError for sizes below 1.
    """
    lengths = np.asarray(lengths, np.int64)
    order = np.arange(len(lengths)) if order is None else np.asarray(order, np.int64)
    sizes = {
        "global_batch_size": global_batch_size,
        "num_steps_per_rollout": num_steps,
        "micro_batch_size": micro_batch_size,
        "max_tokens": max_tokens,
        "data_parallel": data_parallel,
    }
    _check_arguments(lengths, order, sizes)
    numbers = np.arange(len(lengths)) if rollout is None else np.asarray(rollout)
    rollouts = _rollouts_in_order(order, numbers)
    steps = number_of_steps(len(rollouts), global_batch_size, num_steps)
    cost = lengths * (1 + lengths / attention_length) if balance_by_flops else lengths.astype(float)
    size = np.minimum(lengths, max_tokens) if micro_batch_size is None else np.ones_like(lengths)
    capacity = max_tokens if micro_batch_size is None else micro_batch_size
    parts = np.array_split(np.arange(len(rollouts)), min(steps, len(rollouts)))
    if whole_rollouts:
        cost = np.array([cost[samples].sum() for samples in rollouts])
        size = np.minimum([size[samples].sum() for samples in rollouts], capacity)
    else:
        parts = [np.concatenate([rollouts[i] for i in part]) for part in parts]
    packed = tuple(_pack_step(part, cost, size, capacity, data_parallel) for part in parts)
    if whole_rollouts:
        packed = tuple(_samples_of(step, rollouts) for step in packed)
    return PackingPlan(
        num_samples=len(lengths), data_parallel=data_parallel, max_tokens=max_tokens, steps=packed
    )


def scoring_plan(
    lengths: np.ndarray, *, max_tokens: int, data_parallel: int, order: np.ndarray | None = None
) -> Step:
    """Split a batch for a scoring pass, in which a rank gets neighbours in the `order` of storage.

    Arguments as `plan`. Samples go in order to blocks of as few ranks as `BLOCK_SAMPLES` allows,
    in proportion to the ranks, and each block is packed by `plan`. All ranks have the same number
    of micro-batches. So a rank reads few files, and its cost is about that of every other rank.
    With few samples a rank there is one block of all ranks, packed as a training step.

    Raises: as `plan`.
    """
    lengths = np.asarray(lengths, np.int64)
    order = np.arange(len(lengths)) if order is None else order
    cost = lengths * (1 + lengths / ATTENTION_LENGTH)
    at_least = BLOCK_SAMPLES * float(cost.max(initial=1))
    ranks = np.array_split(
        np.arange(data_parallel), max(1, min(data_parallel, int(cost.sum() / at_least)))
    )
    ends = np.cumsum([len(block) for block in ranks])[:-1] * cost.sum() / data_parallel
    # A sample belongs to the block in which its middle is.
    middles = np.cumsum(cost[order]) - cost[order] / 2
    step: list[tuple[MicroBatch, ...]] = []
    for block, samples in zip(ranks, np.split(order, np.searchsorted(middles, ends)), strict=True):
        samples = np.sort(samples)
        packed = plan(
            lengths[samples],
            global_batch_size=None,
            max_tokens=max_tokens,
            data_parallel=len(block),
        ).steps[0]
        step += [tuple(tuple(samples[list(micro)].tolist()) for micro in rank) for rank in packed]
    most = max(map(len, step))
    return tuple((*rank, *[()] * (most - len(rank))) for rank in step)


def step_samples(step: Step) -> np.ndarray:
    """Return the samples that all ranks train in a step, ascending. int64."""
    return np.sort(np.array([i for rank in step for micro in rank for i in micro], np.int64))


def check_pairs(batch: BatchColumns, packing: PackingPlan) -> None:
    """Check that each two samples are a pair, one rollout, and in one micro-batch.

    Raises: DataError otherwise.
    """
    rollouts = batch.sizes.rollouts
    first = rollouts[::2]
    pairs = len(rollouts) % 2 == 0 and (first == rollouts[1::2]).all()
    micro_batches = (np.array(m, np.int64) for step in packing.steps for rank in step for m in rank)
    split = any(len(m) % 2 or (m[::2] + 1 != m[1::2]).any() for m in micro_batches)
    if not pairs or len(np.unique(first)) != len(first) or split:
        raise DataError(
            "the batch or its packing is not of preference pairs",
            where="train/batch",
            found=f"{len(rollouts)} samples of {len(np.unique(rollouts))} rollouts"
            + (", split pairs" if split else ""),
            expected="two samples a rollout, chosen and rejected, in one micro-batch",
            do="train rows with data.prompts.rejected_key",
        )


def shares_of(packing: PackingPlan) -> list[list[int]]:
    """Return the samples of each data parallel rank in all steps, ascending."""
    return [
        sorted(i for step in packing.steps for micro in step[rank] for i in micro)
        for rank in range(packing.data_parallel)
    ]


def number_of_steps(rollouts: int, global_batch_size: int | None, num_steps: int | None) -> int:
    """Return the optimizer steps of a batch of `rollouts` rollouts; see `plan`."""
    return num_steps or math.ceil(rollouts / (global_batch_size or rollouts))


def attention_length(config: Mapping[str, Any]) -> float:
    """Return the length at which a sample's attention costs as many FLOPs as its dense layers.

    `config`: a Hugging Face config.json. A token's matrices cost 2 P FLOPs a layer, P parameters
    used; its attention to on average L / 2 tokens costs 2 L h d, h heads of size d. They are equal
    at L = P / (h d), which is 12 × hidden size for P = 12 × hidden². Of a mixture of experts only
    the chosen experts count.
    """
    config = text_model(config)
    hidden = config["hidden_size"]
    heads = config["num_attention_heads"]
    head_size = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    projections = hidden * head_size * (2 * heads + 2 * kv_heads)
    width = config.get("intermediate_size") or 4 * hidden
    if experts := config.get("num_experts_per_tok"):
        width = experts * (config.get("moe_intermediate_size") or width)
    return (projections + 3 * hidden * width) / (heads * head_size)


def _rollouts_in_order(order: np.ndarray, rollout: np.ndarray) -> list[np.ndarray]:
    """Return the samples of each rollout, sorted by the position of their first sample."""
    _, first, number = np.unique(rollout[order], return_index=True, return_inverse=True)
    by_rollout = order[np.argsort(number, kind="stable")]
    parts = np.split(by_rollout, np.cumsum(np.bincount(number))[:-1])
    return [parts[i] for i in np.argsort(first)]


def _check_arguments(lengths: np.ndarray, order: np.ndarray, sizes: dict[str, int | None]) -> None:
    if len(lengths) == 0 or lengths.min() < 1:
        raise DataError(
            "nothing to pack",
            where="packing.plan",
            found=f"{len(lengths)} samples",
            expected="samples with tokens",
        )
    if not np.array_equal(np.sort(order), np.arange(len(lengths))):
        raise DataError(
            "not an order of the batch",
            where="packing.plan(order)",
            expected=f"a permutation of {len(lengths)}",
        )
    for name, value in sizes.items():
        if value is not None and value < 1:
            raise ConfigError("must be at least 1", where=f"train.{name}", found=value)


def _pack_step(
    samples: np.ndarray, cost: np.ndarray, size: np.ndarray, capacity: int, data_parallel: int
) -> Step:
    samples = samples[np.lexsort((samples, -cost[samples]))]  # costliest first
    per_rank = max(1, math.ceil(int(size[samples].sum()) / (data_parallel * capacity)))
    while (greedy := _fill(samples, cost, size, capacity, per_rank * data_parallel)) is None:
        per_rank += 1
    packings = [greedy]
    # If the capacity is a number of samples, differencing whole rows of samples keeps the numbers
    # of samples in the bins even.
    at_a_time = len(greedy) if (size[samples] == 1).all() else 1
    differenced = _differenced(samples, cost, len(greedy), at_a_time)
    # Karmarkar and Karp know no capacity.
    if all(int(size[members].sum()) <= capacity for members in differenced):
        packings.append(differenced)
    steps = (_deal(bins, cost, data_parallel, per_rank) for bins in packings)
    return min(steps, key=lambda step: _largest_costs(step, cost))


def _samples_of(step: Step, rollouts: list[np.ndarray]) -> Step:
    """Return a step of rollouts as a step of their samples."""
    return tuple(
        tuple(tuple(sorted(i for r in micro for i in rollouts[r].tolist())) for micro in rank)
        for rank in step
    )


def _largest_costs(step: Step, cost: np.ndarray) -> tuple[float, float]:
    """Return the cost of the costliest micro-batch and of the costliest rank."""
    costs = [[float(cost[list(micro)].sum()) for micro in rank] for rank in step]
    return max(map(max, costs)), max(map(sum, costs))


def _fill(
    samples: np.ndarray, cost: np.ndarray, size: np.ndarray, capacity: int, num_bins: int
) -> list[list[int]] | None:
    """Put each sample into the cheapest bin that has room. Return None if one fits nowhere."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    load = np.zeros(num_bins)
    used = np.zeros(num_bins, np.int64)
    for sample in samples:
        needed = int(size[sample])
        target = int(np.argmin(np.where(used + needed <= capacity, load, np.inf)))
        if used[target] + needed > capacity:
            return None
        bins[target].append(int(sample))
        load[target] += cost[sample]
        used[target] += needed
    return bins


def _differenced(
    samples: np.ndarray, cost: np.ndarray, num_bins: int, at_a_time: int
) -> list[list[int]]:
    """Partition samples by the largest differencing method, without a capacity.

    A partition is a list of bins, costliest first; missing bins are empty. At first every
    `at_a_time` samples form a partition. The two partitions with the largest difference between
    their bins are joined, the costliest bin of one with the cheapest of the other, until one
    partition is left. With `at_a_time` = `num_bins` no bin gets more than one sample of each
    partition. Source: Karmarkar and Karp, 1982.
    """
    partitions: list[tuple[float, int, list[Bin]]] = []
    for first in range(0, len(samples), at_a_time):
        part: list[Bin] = [(float(cost[i]), [int(i)]) for i in samples[first : first + at_a_time]]
        partitions.append((-_difference(part, num_bins), first, part))
    heapify(partitions)
    while len(partitions) > 1:
        _, number, one = heappop(partitions)
        _, _, other = heappop(partitions)
        joined = _joined(one, other, num_bins)
        heappush(partitions, (-_difference(joined, num_bins), number, joined))
    bins = [members for _, members in partitions[0][2]]
    return bins + [[] for _ in range(num_bins - len(bins))]


def _difference(bins: list[Bin], num_bins: int) -> float:
    return bins[0][0] - (bins[-1][0] if len(bins) == num_bins else 0.0)


def _joined(one: list[Bin], other: list[Bin], num_bins: int) -> list[Bin]:
    """Join bin i of one partition with bin num_bins - 1 - i of the other. May change `one`."""
    if len(other) == 1:  # the usual case: only one bin moves
        added = other[0]
        if len(one) == num_bins:
            least, members = one.pop()
            added = (least + added[0], members + added[1])
        insort(one, added, key=lambda bin_: -bin_[0])
        return one
    alone = one[: num_bins - len(other)] + other[: num_bins - len(one)]
    pairs = ((one[i], other[num_bins - 1 - i]) for i in range(num_bins - len(other), len(one)))
    both = [(a + b, left + right) for (a, left), (b, right) in pairs]
    return sorted(alone + both, key=lambda bin_: -bin_[0])


def _deal(bins: list[list[int]], cost: np.ndarray, data_parallel: int, per_rank: int) -> Step:
    """Give each rank `per_rank` bins, the costliest bin first to the rank with the least cost."""
    ranks: list[list[MicroBatch]] = [[] for _ in range(data_parallel)]
    # A heap of (cost, rank): a scan of all ranks for each bin was half of a plan for 512 ranks.
    free = [(0.0, rank) for rank in range(data_parallel)]
    costs = [(float(cost[members].sum()), members) for members in bins]
    for bin_cost, members in sorted(costs, key=lambda item: -item[0]):
        load, target = heappop(free)
        ranks[target].append(tuple(sorted(members)))
        if len(ranks[target]) < per_rank:
            heappush(free, (load + bin_cost, target))
    return tuple(tuple(rank) for rank in ranks)
