"""Settings of one rollout or evaluation, for the sampler.

Entry points: `RolloutSettings`, and `rollout_settings` for those of a configuration.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlpipe.config.data import EvalDataset, RewardConfig
from rlpipe.config.rollout import RolloutConfig


@dataclass(frozen=True)
class RolloutSettings:
    """Settings of a rollout."""

    batch_size: int
    """Number of groups to accept."""
    static: bool
    """True if part 0 is the whole plan, also if groups fail."""
    in_order: bool
    """True to accept groups in the order of the plan, for results that do not depend on timing. No
    group is cut off then."""
    partial: bool
    """True if a group that is cut off continues from its tokens later; False if it starts again."""
    max_rounds: int
    """Largest number of parts."""
    timeout_s: float
    flush_interval_s: float
    min_completed_fraction: float = 1.0
    """The rollout fails if a smaller fraction of its groups did not fail."""
    groups_per_round: int | None = None
    """With a pool: number of judged groups after which rejected groups may fill the batch
    (fallbacks). None: all planned groups."""
    oldest_version: int | None = None
    """With a pool: a group with an older token is dropped (`stale`). None: no limit."""
    mask_stale: bool = False
    """True to keep such a group if it has a token that is recent enough."""


def rollout_settings(
    config: RolloutConfig,
    *,
    groups: int | None = None,
    in_order: bool = False,
    oldest_version: int | None = None,
) -> RolloutSettings:
    """Return the settings of `run_rollout`.

    `groups`: sample exactly this number, whatever their result. `oldest_version`: of a token that
    the iteration may train on, for a rollout with a pool.
    """
    return RolloutSettings(
        batch_size=config.rollout_batch_size if groups is None else groups,
        static=config.static or groups is not None,
        in_order=in_order,
        partial=config.partial_rollout and not config.pooled,
        max_rounds=config.max_sampling_rounds,
        timeout_s=config.timeout_s,
        flush_interval_s=config.flush_interval_s,
        min_completed_fraction=config.min_completed_fraction,
        groups_per_round=config.groups_per_round if config.pooled else None,
        oldest_version=oldest_version,
        mask_stale=config.mask_offpolicy_in_partial_rollout,
    )


def evaluation_settings(
    dataset: EvalDataset, rollout: RolloutConfig, reward: RewardConfig
) -> tuple[RolloutConfig, RewardConfig]:
    """Return the sampling and reward settings of a held-out set: its own, else the run's.

    The temperature is passed separately, because it may be 0.
    """
    return rollout.model_copy(update=dataset.sampling()), dataset.reward or reward
