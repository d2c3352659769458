"""A batch as flat columns, and the plan that packs its samples into balanced micro-batches.

`BatchColumns` is what the train stage reads: ragged arrays, stored flat. `PackingPlan` says which
optimizer step, which data parallel rank and which micro-batch holds each sample; it is small JSON
and is stored with the train node, so that a replay packs alike. The loss does not depend on the
plan, only speed does.

N samples, S = sum of prompt + response lengths, R = sum of response lengths.

Not here: tensors, devices, context parallel slices (`engines.megatron.train.batch`).
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np

from rlpipe.errors import ConfigError, DataError
from rlpipe.types import Record

COLUMNS = (
    "loss_mask",
    "rollout_log_probs",
    "proximal_log_probs",
    "reference_log_probs",
    "teacher_log_probs",
    "advantages",
    "values",
    "returns",
)


@dataclass(slots=True, frozen=True, eq=False)
class BatchColumns:
    """N samples. Prompt and response ids stand one after another; everything else is per response
    token.

    Sample i owns `tokens[offsets[i]:offsets[i + 1]]` and
    `column[response_offsets[i]:response_offsets[i + 1]]`. Raises: DataError if the lengths do not
    fit together.
    """

    tokens: np.ndarray
    """[S] int32."""
    offsets: np.ndarray
    """[N + 1] int64, from 0 to S."""
    prompt_lengths: np.ndarray
    """[N] int64, at least 1."""
    loss_mask: np.ndarray
    """[R] float32, 1 where a response token counts."""
    rollout_log_probs: np.ndarray | None = None
    """[R] float32: behaviour log-probs, from the engine."""
    proximal_log_probs: np.ndarray | None = None
    """[R] float32: the trainer's, before the first optimizer step of the iteration."""
    reference_log_probs: np.ndarray | None = None
    """[R] float32: the reference policy's."""
    teacher_log_probs: np.ndarray | None = None
    """[R] float32: the teacher's, for on-policy distillation."""
    advantages: np.ndarray | None = None
    """[R] float32."""
    values: np.ndarray | None = None
    """[R] float32: the critic's, of the state before each token, before the first optimizer step of
    the iteration."""
    returns: np.ndarray | None = None
    """[R] float32: what the critic is to learn."""
    rollout: np.ndarray | None = None
    """[N] int64: samples with equal numbers are of one rollout that fanned out, and share a
    denominator. None: each its own."""
    routed_experts: np.ndarray | None = None
    """[S, W] uint16: the experts of every token, W = layers with experts × experts a token;
    `routed.NOT_ROUTED` of one that no engine read. None: each pass routes for itself."""

    def __post_init__(self) -> None:
        if (
            len(self.offsets) != len(self.prompt_lengths) + 1
            or self.offsets[0] != 0
            or self.offsets[-1] != len(self.tokens)
        ):
            raise DataError(
                "offsets do not span the tokens",
                where="BatchColumns.offsets",
                found=f"{len(self.offsets)} offsets, {len(self.prompt_lengths)} prompts, {len(self.tokens)} tokens",
                expected="one more offset than prompts, the first 0 and the last the number of tokens",
            )
        if len(self) and (self.prompt_lengths.min() < 1 or self.response_lengths.min() < 0):
            bad = int(np.argmax((self.prompt_lengths < 1) | (self.response_lengths < 0)))
            raise DataError(
                "a prompt must have a token and fit into its sample",
                where=f"BatchColumns.prompt_lengths[{bad}]",
                found=f"prompt {self.prompt_lengths[bad]} of {self.lengths[bad]} tokens",
                expected="1 <= prompt <= tokens of the sample",
            )
        other = {"rollout": (len(self), "sample"), "routed_experts": (len(self.tokens), "token")}
        for name in (*COLUMNS, *other):
            column, (expected, of) = (
                getattr(self, name),
                other.get(name, (self.num_response_tokens, "response token")),
            )
            if column is not None and len(column) != expected:
                raise DataError(
                    f"a column must have one value per {of}",
                    where=f"BatchColumns.{name}",
                    found=len(column),
                    expected=expected,
                )

    @classmethod
    def from_lists(
        cls,
        prompt_ids: Sequence[Sequence[int]],
        response_ids: Sequence[Sequence[int]],
        **columns: Sequence[Sequence[float]] | None,
    ) -> BatchColumns:
        """From one list per sample. `columns`: any of the per-response-token ones, ragged like
        `response_ids`; `loss_mask` defaults to ones. Raises: DataError if a column is ragged
        differently."""
        pairs = list(zip(prompt_ids, response_ids, strict=True))
        rows = [np.asarray([*prompt, *response], np.int32) for prompt, response in pairs]
        responses = np.array([len(response) for _, response in pairs], np.int64)
        flat: dict[str, np.ndarray] = {
            name: _flatten(name, column, responses)
            for name, column in columns.items()
            if column is not None
        }
        flat.setdefault("loss_mask", np.ones(int(responses.sum()), np.float32))
        return cls(
            tokens=np.concatenate(rows) if rows else np.zeros(0, np.int32),
            offsets=_offsets(np.array([len(row) for row in rows], np.int64)),
            prompt_lengths=np.array([len(prompt) for prompt, _ in pairs], np.int64),
            **flat,
        )

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    @property
    def lengths(self) -> np.ndarray:
        """[N] tokens of prompt + response."""
        return np.diff(self.offsets)

    @property
    def response_lengths(self) -> np.ndarray:
        """[N]."""
        return self.lengths - self.prompt_lengths

    @property
    def response_offsets(self) -> np.ndarray:
        """[N + 1], from 0 to R."""
        return _offsets(self.response_lengths)

    @property
    def rollouts(self) -> np.ndarray:
        """[N] int64: the number of each sample's rollout."""
        return np.arange(len(self)) if self.rollout is None else self.rollout

    @property
    def sample_of(self) -> np.ndarray:
        """[R] int64: the sample of each response token."""
        return np.repeat(np.arange(len(self)), self.response_lengths)

    @property
    def num_response_tokens(self) -> int:
        """R."""
        return len(self.tokens) - int(self.prompt_lengths.sum())

    def with_columns(self, **columns: np.ndarray | None) -> BatchColumns:
        """The same samples with other per-token columns."""
        return replace(self, **columns)

    def select(self, samples: Sequence[int] | np.ndarray) -> BatchColumns:
        """Those samples, in that order."""
        samples = np.asarray(samples, np.int64)
        responses = gather_index(self.response_offsets, samples)
        columns = {name: getattr(self, name) for name in COLUMNS}
        picked: dict[str, Any] = {
            name: None if column is None else column[responses] for name, column in columns.items()
        }
        tokens = gather_index(self.offsets, samples)
        return BatchColumns(
            tokens=self.tokens[tokens],
            offsets=_offsets(self.lengths[samples]),
            prompt_lengths=self.prompt_lengths[samples],
            rollout=None if self.rollout is None else self.rollout[samples],
            routed_experts=None if self.routed_experts is None else self.routed_experts[tokens],
            **picked,
        )

    def split(self, column: np.ndarray) -> list[np.ndarray]:
        """A flat [R] column as one array per sample."""
        return np.split(column, self.response_offsets[1:-1]) if len(self) else []


def gather_index(offsets: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """Flat positions of the ragged rows `samples`, one row after another: int64."""
    starts = offsets[samples]
    lengths = offsets[samples + 1] - offsets[samples]
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(total)


def _offsets(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def _flatten(name: str, column: Sequence[Sequence[float]], lengths: np.ndarray) -> np.ndarray:
    found = np.array([len(row) for row in column], np.int64)
    if len(found) != len(lengths) or (found != lengths).any():
        bad = next(
            (i for i, (a, b) in enumerate(zip(found, lengths, strict=False)) if a != b),
            min(len(found), len(lengths)),
        )
        raise DataError(
            "a column must be as ragged as the responses",
            where=f"BatchColumns.{name}[{bad}]",
            found=f"{len(found)} rows; {found[bad] if bad < len(found) else 'none'} values here",
            expected=f"{len(lengths)} rows; {lengths[bad] if bad < len(lengths) else 'none'} values here",
        )
    return (
        np.concatenate([np.asarray(row, np.float32) for row in column])
        if len(found)
        else np.zeros(0, np.float32)
    )


class PackingPlan(Record):
    """`steps[optimizer step][data parallel rank][micro-batch]` = indices of samples; a micro-batch
    may be empty."""

    num_samples: int
    data_parallel: int
    max_tokens: int
    steps: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]

    def check(self, num_samples: int, data_parallel: int) -> None:
        """Raises: DataError unless the plan is for this batch and layout and holds every sample
        exactly once."""
        if (self.num_samples, self.data_parallel) != (num_samples, data_parallel):
            raise DataError(
                "a packing plan of another batch or layout",
                where="PackingPlan",
                found=f"{self.num_samples} samples on {self.data_parallel} data parallel ranks",
                expected=f"{num_samples} samples on {data_parallel} data parallel ranks",
                do="make a plan for this batch with rlpipe.batch.packing.plan",
            )
        held = sorted(i for step in self.steps for rank in step for micro in rank for i in micro)
        uneven = any(
            len(step) != data_parallel or len({len(rank) for rank in step}) != 1
            for step in self.steps
        )
        if held != list(range(num_samples)) or uneven:
            raise DataError(
                "a packing plan that loses or doubles samples, or whose ranks have unequal numbers of micro-batches",
                where="PackingPlan.steps",
                found=f"{len(held)} entries, {len(set(held))} different",
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
    attention_length: float = 12_288,
) -> PackingPlan:
    """Optimizer steps, each packed into micro-batches that cost the ranks about the same. Every
    sample is in exactly one.

    There are `num_steps` steps, or if that is None ceil(B / global_batch_size) for B rollouts
    (samples with equal numbers in `rollout`, which stay together; None: each sample its own), whose
    sizes differ by at most one rollout: a batch that lost a group to an error keeps its number of
    steps, and no rollout trails behind. (slime drops those that do not fill a step.)

    Rollouts go to steps in `order` of their samples (default 0..N-1). A bin (micro-batch) takes
    `max_tokens` tokens, a longer sample is alone in one; or with `micro_batch_size` that many
    samples of any length. A step has as few bins as possible. Samples are spread over them twice:
    costliest first into the cheapest bin, and by the largest differencing method of Karmarkar and
    Karp. The way whose largest bin costs less is taken. A sample of L tokens costs L (1 + L /
    attention_length), or L without `balance_by_flops`.

    Raises: DataError for an empty batch or a bad `order`; ConfigError for sizes below 1.
    """
    lengths = np.asarray(lengths, np.int64)
    order = np.arange(len(lengths)) if order is None else np.asarray(order, np.int64)
    sizes = {
        "global_batch_size": global_batch_size,
        "num_steps_per_rollout": num_steps,
        "micro_batch_size": micro_batch_size,
    }
    _check_arguments(
        lengths, order, {**sizes, "max_tokens": max_tokens, "data_parallel": data_parallel}
    )
    together = _rollouts_in_order(
        order, np.arange(len(lengths)) if rollout is None else np.asarray(rollout)
    )
    steps = num_steps or math.ceil(len(together) / (global_batch_size or len(together)))
    cost = lengths * (1 + lengths / attention_length) if balance_by_flops else lengths.astype(float)
    room = np.minimum(lengths, max_tokens) if micro_batch_size is None else np.ones_like(lengths)
    capacity = max_tokens if micro_batch_size is None else micro_batch_size
    packed = tuple(
        _pack_step(np.concatenate([together[i] for i in part]), cost, room, capacity, data_parallel)
        for part in np.array_split(np.arange(len(together)), min(steps, len(together)))
    )
    return PackingPlan(
        num_samples=len(lengths), data_parallel=data_parallel, max_tokens=max_tokens, steps=packed
    )


def attention_length(config: Mapping[str, Any]) -> float:
    """Length at which a sample's attention costs as many FLOPs as its dense layers, from a Hugging
    Face config.json.

    A token's matrices cost 2 P FLOPs a layer, P parameters used; its attention to on average L / 2
    tokens 2 L h d, h heads of size d. Equal at L = P / (h d), which is 12 × hidden size for P = 12
    × hidden². Of a mixture of experts the chosen ones count.
    """
    hidden = config["hidden_size"]
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    projections = hidden * size * (2 * heads + 2 * (config.get("num_key_value_heads") or heads))
    width = config.get("intermediate_size") or 4 * hidden
    if experts := config.get("num_experts_per_tok"):
        width = experts * (config.get("moe_intermediate_size") or width)
    return (projections + 3 * hidden * width) / (heads * size)


def _rollouts_in_order(order: np.ndarray, rollout: np.ndarray) -> list[np.ndarray]:
    """Samples of each rollout, by where in `order` its first sample stands."""
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
    samples: np.ndarray, cost: np.ndarray, room: np.ndarray, capacity: int, data_parallel: int
) -> tuple:
    samples = samples[np.lexsort((samples, -cost[samples]))]
    per_rank = max(1, math.ceil(int(room[samples].sum()) / (data_parallel * capacity)))
    while (filled := _fill(samples, cost, room, capacity, per_rank * data_parallel)) is None:
        per_rank += 1
    ways = [filled]
    # Every sample has room 1 where a number of samples is the capacity. Whole rows of samples then
    # keep the numbers even.
    at_a_time = len(filled) if (room[samples] == 1).all() else 1
    differenced = _differenced(samples, cost, len(filled), at_a_time)
    if all(int(room[members].sum()) <= capacity for members in differenced):
        ways.append(differenced)
    return min(
        (_deal(bins, cost, data_parallel, per_rank) for bins in ways),
        key=lambda step: _balance(step, cost),
    )


def _balance(step: tuple, cost: np.ndarray) -> tuple[float, float]:
    """Cost of the largest micro-batch and of the largest rank."""
    costs = [[float(cost[list(micro)].sum()) for micro in rank] for rank in step]
    return max(map(max, costs)), max(map(sum, costs))


Bin = tuple[float, list[int]]
"""Cost and samples."""


def _differenced(
    samples: np.ndarray, cost: np.ndarray, num_bins: int, at_a_time: int
) -> list[list[int]]:
    """The largest differencing method of Karmarkar and Karp (1982) for `num_bins` bins, whatever
    their capacity.

    A partition is a list of bins, costliest first; bins that it lacks are empty. At first every
    `at_a_time` samples are a partition of their own. The two partitions of the largest difference
    between their bins become one, in which the costliest bin of one is joined with the cheapest of
    the other, and so on, until one is left. With `at_a_time` = `num_bins` no bin gets more than one
    sample of each partition.
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
    """Bin i of one with bin num_bins - 1 - i of the other. May change `one`."""
    if len(other) == 1:  # the usual case, in which only one bin changes its place
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


def _fill(
    samples: np.ndarray, cost: np.ndarray, room: np.ndarray, capacity: int, num_bins: int
) -> list[list[int]] | None:
    """Costliest first into the bin of the least cost that has room; None if one has room
    nowhere."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    load = np.zeros(num_bins)
    used = np.zeros(num_bins, np.int64)
    for sample in samples:
        size = int(room[sample])
        target = int(np.argmin(np.where(used + size <= capacity, load, np.inf)))
        if used[target] + size > capacity:
            return None
        bins[target].append(int(sample))
        load[target] += cost[sample]
        used[target] += size
    return bins


def _deal(bins: list[list[int]], cost: np.ndarray, data_parallel: int, per_rank: int) -> tuple:
    """Costliest bin first to the rank of the least cost that still takes one; each rank gets
    `per_rank`."""
    ranks: list[list[tuple[int, ...]]] = [[] for _ in range(data_parallel)]
    load = np.zeros(data_parallel)
    for weight, samples in sorted(
        ((float(cost[b].sum()), b) for b in bins), key=lambda item: -item[0]
    ):
        target = min(
            (r for r in range(data_parallel) if len(ranks[r]) < per_rank),
            key=lambda r: (load[r], r),
        )
        ranks[target].append(tuple(sorted(samples)))
        load[target] += weight
    return tuple(tuple(rank) for rank in ranks)
