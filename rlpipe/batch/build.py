"""Choose the batch of an iteration from scored samples, and read it.

`fix_batch` decides which accepted groups are trained. A group is dropped whole if one of its
samples cannot be trained; the commit names the reason:

| reason         | a sample of the group ...                                                     |
|----------------|-------------------------------------------------------------------------------|
| `reward_error` | has no reward                                                                 |
| `failed`       | failed while it was sampled                                                   |
| `aborted`      | was aborted                                                                   |
| `empty`        | has no response                                                               |
| `stale`        | has a token in the loss that too old weights sampled                          |
| `unrouted`     | has a token in the loss without known experts (use_rollout_routing_replay)    |

`fix_batch` reads only the tokens that a rule needs. Each rank then reads the samples that
it scores (`ChosenRows.columns`), and the rank that writes the batch reads all of it.

N samples, R response tokens, S tokens of prompts and responses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from rlpipe.batch.columns import BatchColumns, BatchPart, BatchSizes
from rlpipe.batch.images import batch_images
from rlpipe.batch.rows import RolloutRows, RowScalars, joined_tokens, ragged_or
from rlpipe.errors import DataError, one_line
from rlpipe.rewards.reward_rows import RewardRow
from rlpipe.store.parquet.arrays import ragged, to_numpy
from rlpipe.store.parquet.rows import EXPERTS, table_to_samples, to_images
from rlpipe.store.parquet.schema import SAMPLES
from rlpipe.store.routed_experts import NOT_ROUTED
from rlpipe.types import Sample, Status

UNROUTED_HELP = (
    "unrouted: ask args.sglang_router_ip:port in your generate function, or set "
    "sample.rollout_routed_experts; rollouts from before train.use_rollout_routing_replay have "
    "none: use train.use_routing_replay"
)
HELP = {
    "failed": "failed: the generate function raised; `rlpipe rollouts` shows the errors",
    "aborted": "aborted: samples were cut off and not continued; with rollout.partial_rollout "
    "later iterations continue them",
    "empty": "empty: a sample of the group has no response tokens; look at it with `rlpipe "
    "rollouts`, and drop such groups with rollout.dynamic_sampling_filter_path",
    "stale": "stale: tokens are older than async_buffer_size iterations; raise it, or set "
    "rollout.mask_offpolicy_in_partial_rollout to train on the newer tokens only",
    "reward_error": "reward_error: the reward function failed for a sample of each group; "
    "`rlpipe rollouts` shows the errors; reward.on_error sets a reward for such samples",
    "unrouted": UNROUTED_HELP,
}
"""What to do, by the reason for which a group is left out."""
SCORED_COLUMNS = ("prompt_ids", "response_ids", "loss_mask")
"""Stored columns about single tokens that every scoring pass reads."""
UNFINISHED = (Status.ABORTED.value, Status.PENDING.value)


@dataclass(frozen=True, eq=False)
class Batch:
    """The samples that an iteration trains on, sorted by group id and index."""

    columns: BatchColumns
    group_ids: tuple[str, ...]
    """[N]."""
    indices: tuple[int, ...]
    """[N]: number of the sample in its group."""
    rewards: np.ndarray
    """[N] float64; zeros in a supervised batch."""
    dropped: dict[str, str]
    """Group id → reason, for the accepted groups that are not trained."""
    staleness: np.ndarray | None = None
    """[R] int64: weight version trained − weight version that sampled; None in supervised rows."""
    samples: tuple[Sample, ...] = field(default=(), repr=False)
    """[N] for user functions: each with its reward and without its experts. Empty if not read."""

    @property
    def groups(self) -> tuple[str, ...]:
        """The group ids without repetition, in order."""
        return tuple(dict.fromkeys(self.group_ids))


@dataclass(frozen=True, eq=False)
class ChosenRows:
    """The rows of a rollout that an iteration trains on, sorted by group id and index.

    Pickles without the data of the shards.
    """

    rows: RolloutRows
    """[N]: only these rows."""
    sizes: BatchSizes
    rewards: np.ndarray
    """As in `Batch`."""
    dropped: dict[str, str]
    version: int
    """The weight version that is trained."""
    oldest: int | None
    """Tokens that older weights sampled have loss mask 0; None: no token is masked."""
    routed: bool
    """True: columns include the experts that the engines chose."""
    own_teacher: bool
    """True: columns include the teacher's log-probs that the samples bring."""

    @property
    def scalars(self) -> RowScalars:
        """Scalars of the rows."""
        return self.rows.scalars

    def columns(self, samples: np.ndarray) -> BatchColumns:
        """Return what scoring passes read of these samples: tokens, loss mask and experts.

        `samples`: ascending numbers of samples in the batch.
        """
        names = [*SCORED_COLUMNS, "images", *([EXPERTS] if self.routed else [])]
        table = self.rows.read(samples, names)
        return replace(self._scored_columns(table, samples), part=BatchPart(self.sizes, samples))

    def batch(self, *, with_samples: bool = False) -> Batch:
        """Return the whole batch. `with_samples`: as objects, for user functions.

        Raises: DataError if a sample lacks a value that the batch needs.
        """
        names = [*SCORED_COLUMNS, "images", "rollout_log_probs"]
        if self.routed:
            names.append(EXPERTS)
        if self.own_teacher:
            names.append("teacher_log_probs")
        every = np.arange(len(self.sizes))
        table = self.rows.read(every, names)
        log_probs = self._log_probs(table["rollout_log_probs"])
        columns = self._scored_columns(table, every).with_columns(
            rollout_log_probs=log_probs,
            teacher_log_probs=self._teacher_log_probs(table) if self.own_teacher else None,
        )
        supervised = log_probs is None
        return Batch(
            columns=columns,
            group_ids=tuple(self.scalars.group_ids.tolist()),
            indices=tuple(self.scalars.indices.tolist()),
            rewards=self.rewards,
            dropped=self.dropped,
            staleness=None if supervised else staleness_of(self.scalars, self.version),
            samples=self._samples(columns) if with_samples else (),
        )

    def _scored_columns(self, table: pa.Table, samples: np.ndarray) -> BatchColumns:
        scalars = self.scalars.select(samples)
        tokens, offsets = joined_tokens(table)
        rollout = self.sizes.rollout
        return BatchColumns(
            tokens=tokens,
            offsets=offsets,
            prompt_lengths=scalars.prompt_lengths,
            loss_mask=_loss_mask(table, scalars, self.oldest),
            rollout=None if rollout is None else rollout[samples],
            routed_experts=self._experts(table, scalars) if self.routed else None,
            images=batch_images(to_images(table["images"])),
        )

    def _log_probs(self, column: pa.ChunkedArray) -> np.ndarray | None:
        """Return [R] float32; None for supervised samples, which have none."""
        if column.null_count == len(column):
            return None
        if column.null_count:
            without = np.flatnonzero(to_numpy(column.is_null()))
            raise DataError(
                "some samples have log-probs of the engine and some have none",
                where=self._where(without[0]),
                found=f"{len(without)} of {len(column)} without",
                expected="all or none: a batch is sampled or supervised",
            )
        return ragged(column)[0]

    def _teacher_log_probs(self, table: pa.Table) -> np.ndarray:
        """Return [R] float32. Raises: DataError naming a sample without them."""
        column = table["teacher_log_probs"]
        if column.null_count:
            raise DataError(
                "a sample has no log-probs of the teacher",
                where=self._where(int(np.argmax(to_numpy(column.is_null())))),
                expected="sample.teacher_log_probs, one for each response token "
                "(teacher.opd_type: samples)",
                do="set them in the generate function or in a sample hook",
            )
        return ragged(column)[0]

    def _experts(self, table: pa.Table, scalars: RowScalars) -> np.ndarray:
        """Return [S, W] uint16: the experts of every token, NOT_ROUTED where no engine read it.

        Raises: DataError if no sample of the batch has experts, so that W is unknown.
        """
        width = int(self.scalars.experts_width.max())
        if width == 0:
            raise DataError(
                "no sample names the experts that sampled it",
                where="advantage",
                found=f"{len(self.sizes)} samples",
                do=UNROUTED_HELP,
            )
        values = (scalars.prompt_lengths + scalars.response_lengths) * width
        return ragged_or(table[EXPERTS], values, NOT_ROUTED, np.uint16).reshape(-1, width)

    def _samples(self, columns: BatchColumns) -> tuple[Sample, ...]:
        names = [name for name in SAMPLES.names if name != EXPERTS]
        samples = table_to_samples(self.rows.read(np.arange(len(self.sizes)), names))
        masks = columns.split(columns.loss_mask.astype(np.int64))
        rewards = self.rewards.tolist()
        removed = self.scalars.removed.tolist()
        for sample, mask, reward, is_removed in zip(samples, masks, rewards, removed, strict=True):
            sample.reward = reward
            sample.remove_sample = is_removed
            if is_removed or self.oldest is not None:
                sample.loss_mask = mask.tolist()
        return tuple(samples)

    def _where(self, sample: int) -> str:
        return f"advantage/{self.scalars.group_ids[sample]}/{self.scalars.indices[sample]}"


def fix_batch(
    rows: RolloutRows,
    rewards: Sequence[RewardRow],
    *,
    accepted: Collection[str],
    scored: bool,
    version: int,
    max_staleness: int = 0,
    mask_stale: bool = False,
    routed: bool = False,
    own_teacher: bool = False,
) -> ChosenRows:
    """Return the batch of the groups that the rollout `accepted`.

    `scored`: a sample without a reward drops its group; supervised rows have no rewards.
    `version`: the weight version that is trained. A token that a version below
    `version - max_staleness` sampled drops its group. With `mask_stale` the token gets loss mask 0
    instead, and the group is dropped only if no token in the loss is left. `routed`: the batch has
    the experts that the engines chose; `rows` must know the routed tokens. `own_teacher`: the batch
    has the teacher's log-probs that the samples bring.

    Raises: DataError if no group is left.
    """
    oldest = version - max_staleness
    ordered = _ordered(rows, accepted)
    scalars = rows.scalars.select(ordered)
    keys = scalars.keys
    assert len(set(keys)) == len(keys), "a sample appears twice"
    reward_of = {(row.group_id, row.index): row.reward for row in rewards}
    values = [reward_of.get(key) if scored else 0.0 for key in keys]
    masks = _Masks(rows, ordered, scalars, oldest if mask_stale else None)
    is_stale = scalars.oldest_versions() < oldest
    flags = _drop_flags(scalars, values)
    if not mask_stale:
        flags["stale"] = masks.with_token_older_than(oldest, is_stale)
    if routed:
        flags["unrouted"] = masks.with_unrouted_token()
    dropped = _dropped(keys, flags)
    if mask_stale:
        masked_out = _groups_without_tokens(scalars.group_ids, is_stale, masks) - dropped.keys()
        dropped |= dict.fromkeys(sorted(masked_out), "stale")
    kept = np.flatnonzero([group not in dropped for group, _ in keys])
    if len(kept) == 0:
        raise _nothing_left(dropped, next((row.error for row in rewards if row.error), None))
    chosen = rows.select(ordered[kept])
    return ChosenRows(
        rows=chosen,
        sizes=BatchSizes(
            chosen.scalars.prompt_lengths,
            chosen.scalars.response_lengths,
            rollout=_rollout_numbers(chosen.scalars),
            stored_order=chosen.stored_order(),
        ),
        rewards=np.array([values[sample] for sample in kept.tolist()], np.float64),
        dropped=dropped,
        version=version,
        oldest=oldest if mask_stale else None,
        routed=routed,
        own_teacher=own_teacher,
    )


def _ordered(rows: RolloutRows, accepted: Collection[str]) -> np.ndarray:
    """Return the rows of these groups, sorted by group id and index. int64."""
    groups = set(accepted)
    names = rows.scalars.group_ids.tolist()
    indices = rows.scalars.indices.tolist()
    members = (row for row, group in enumerate(names) if group in groups)
    return np.array(sorted(members, key=lambda row: (names[row], indices[row])), np.int64)


class _Masks:
    """Loss masks of candidate rows. Only the rows that a rule needs are read."""

    def __init__(
        self, rows: RolloutRows, candidates: np.ndarray, scalars: RowScalars, oldest: int | None
    ) -> None:
        self._rows = rows
        self._candidates = candidates
        self._scalars = scalars
        self._oldest = oldest

    def with_tokens(self, chosen: np.ndarray) -> np.ndarray:
        """Return one flag per candidate: it is in `chosen` and has a token in the loss."""
        sample, _ = self._tokens_in_loss(chosen)
        return np.bincount(sample, minlength=len(self._candidates)) > 0

    def with_token_older_than(self, oldest: int, chosen: np.ndarray) -> np.ndarray:
        """As `with_tokens`, for a token in the loss that weights older than `oldest` sampled."""
        sample, token = self._tokens_in_loss(chosen)
        versions = self._scalars.select(np.flatnonzero(chosen)).token_versions(oldest)
        return np.bincount(sample[versions[token] < oldest], minlength=len(self._candidates)) > 0

    def with_unrouted_token(self) -> np.ndarray:
        """Return one flag per candidate: a token in the loss has no known experts."""
        scalars = self._scalars
        sample, token = self._tokens_in_loss(np.ones(len(self._candidates), bool))
        starts = np.cumsum(scalars.response_lengths) - scalars.response_lengths
        # Token t is sampled from the row of token t - 1.
        needed = scalars.prompt_lengths[sample] + token - starts[sample]
        unrouted = scalars.routed_tokens[sample] < needed
        return np.bincount(sample[unrouted], minlength=len(self._candidates)) > 0

    def _tokens_in_loss(self, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens in the loss of the `chosen` candidates.

        The first array has the candidate of each token, the second its number among the tokens of
        the chosen candidates.
        """
        samples = np.flatnonzero(chosen)
        if len(samples) == 0:
            return samples, samples
        scalars = self._scalars.select(samples)
        table = self._rows.read(self._candidates[samples], ["response_ids", "loss_mask"])
        token = np.flatnonzero(_loss_mask(table, scalars, self._oldest))
        return np.repeat(samples, scalars.response_lengths)[token], token


def _drop_flags(scalars: RowScalars, rewards: Sequence[float | None]) -> dict[str, np.ndarray]:
    """Return one flag per sample for each reason, in the order in which reasons are named."""
    none = np.zeros(len(rewards), bool)
    return {
        "failed": scalars.statuses == Status.FAILED.value,
        "aborted": np.isin(scalars.statuses.astype(str), UNFINISHED),
        "empty": scalars.response_lengths == 0,
        "stale": none,
        "reward_error": np.array([reward is None for reward in rewards], bool),
        "unrouted": none,
    }


def _dropped(keys: list[tuple[str, int]], flags: dict[str, np.ndarray]) -> dict[str, str]:
    """Return group id → reason: of a group's first sample with a flag, the first such flag."""
    columns = np.stack([*flags.values()])
    first = np.array([*flags])[np.argmax(columns, axis=0)]
    dropped: dict[str, str] = {}
    for sample in np.flatnonzero(columns.any(axis=0)).tolist():
        dropped.setdefault(keys[sample][0], str(first[sample]))
    return dropped


def _groups_without_tokens(groups: np.ndarray, is_stale: np.ndarray, masks: _Masks) -> set[str]:
    """Return the groups with a stale sample in which masking left no token in the loss."""
    stale = set(groups[is_stale].tolist())
    chosen = np.array([group in stale for group in groups.tolist()], bool)
    return stale - set(groups[masks.with_tokens(chosen)].tolist())


def _nothing_left(dropped: dict[str, str], reward_error: str | None) -> DataError:
    reasons = sorted(Counter(dropped.values()).items())
    counts = ", ".join(f"{number} {reason}" for reason, number in reasons)
    first = (
        f"; the first error of the reward function: {one_line(reward_error)}"
        if reward_error
        else ""
    )
    most = max(reasons, key=lambda reason: reason[1])[0] if reasons else None
    return DataError(
        "no group is left to train on",
        where="advantage",
        found=f"{len(dropped)} groups left out: {counts}{first}",
        expected="at least one accepted group whose samples were all generated and scored",
        do=HELP.get(most) if most else None,
    )


def _loss_mask(table: pa.Table, scalars: RowScalars, oldest: int | None) -> np.ndarray:
    """Return [R] float32 of the rows of a table. `oldest`: as `ChosenRows.oldest`."""
    mask = ragged_or(table["loss_mask"], scalars.response_lengths, 1, np.float32)
    # A removed sample stays in its group, where its reward counts, but none of its tokens does.
    if scalars.removed.any():
        mask[np.repeat(scalars.removed, scalars.response_lengths)] = 0
    if oldest is not None and (scalars.run_versions < oldest).any():
        mask[scalars.token_versions(oldest) < oldest] = 0
    return mask


def staleness_of(scalars: RowScalars, version: int) -> np.ndarray:
    """Return `Batch.staleness` of these rows. `version`: the weight version that is trained."""
    # A sample without recorded versions counts as sampled by the weights that are trained.
    return version - scalars.token_versions(version)


def _rollout_numbers(scalars: RowScalars) -> np.ndarray:
    """Return [N] int64: equal numbers for the samples that one rollout fanned out into."""
    keys = list(zip(scalars.group_ids.tolist(), scalars.rollout_ids.tolist(), strict=True))
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return np.array([numbers[key] for key in keys], np.int64)
