"""Runs that are only half of one: sampling without training, or training on what another run has
sampled.

Not here: what a run leaves to look at, which is everything (`rlpipe.store`; `python -m
tools.rollouts` shows it).
"""

from __future__ import annotations

from pydantic import model_validator

from rlpipe.config.base import Config, Name


class DebugConfig(Config):
    """Which half. slime's names; its dumps are branches of the store here."""

    debug_rollout_only: bool = False
    """Sample and score num_rollout batches with the first weights, and train nothing. (The trainer
    only gives engines their weights.) Nothing is committed; the rollouts stay as long as the run's
    branch."""
    debug_train_only: bool = False
    """Train on the rollouts of another run, load_debug_rollout_data: no engines are started, and
    nothing is evaluated."""
    load_debug_rollout_data: Name | None = None
    """Name of that run, in the same store, trained or debug_rollout_only. Iteration k trains on its
    rollout k, scored by this run's reward. Sets debug_train_only. All tokens of a run that only
    sampled are of weight version 0, so async_buffer_size must be num_rollout - 1 or more to train
    on them; otherwise they are stale, which ends the run with an error."""

    @model_validator(mode="before")
    @classmethod
    def _loading_is_training_only(cls, values):
        if isinstance(values, dict) and values.get("load_debug_rollout_data"):
            return {"debug_train_only": True, **values}
        return values

    @model_validator(mode="after")
    def _one_half(self):
        if self.debug_rollout_only and self.debug_train_only:
            raise ValueError(
                "debug_rollout_only and debug_train_only leave nothing of a run; choose one"
            )
        if self.debug_train_only != (self.load_debug_rollout_data is not None):
            raise ValueError(
                "debug_train_only needs load_debug_rollout_data: the run whose rollouts are trained on"
            )
        return self
