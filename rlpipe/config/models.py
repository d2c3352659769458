"""The models beside the policy: the reference, the critic of PPO.

Not here: the policy itself (`model`), and what is computed from their answers (`train`).
"""

from __future__ import annotations

from pydantic import Field

from rlpipe.config.base import Config
from rlpipe.config.train import OptimizerConfig


class ReferenceConfig(Config):
    """The reference policy of `advantage.reference`: the first weights of the run, until it is refreshed."""

    ref_update_interval: int | None = Field(default=None, ge=1)
    """After every this many iterations the policy as it is then becomes the reference, and a checkpoint of it is due. Counted by
    weight version, so a fork goes on with the reference of its parent. None: never."""


class CriticConfig(Config):
    """The value model of `advantage.advantage_estimator: ppo`: a decoder with a value head, and an optimizer of its own.

    It lives in the policy's ranks, in the same parallel layout. (Ranks of its own would need a second group of trainer ranks,
    whose state is held, saved and replayed together with the policy's, and values that travel between the two.)"""

    hf_checkpoint: str | None = None
    """Hugging Face directory of the critic's first weights; any architecture with the policy's tokens. Where it has
    `score.weight` [1, hidden], as a reward model does, that is the value head; else values begin at 0. None: a copy of the
    policy's first weights."""
    optimizer: OptimizerConfig | None = None
    """Adam and its schedule; None: as the policy's `train.optimizer`."""
    value_clip: float | None = Field(default=0.2, gt=0)
    """How far a value may move from what it was before the iteration until its loss stops counting; None: no clipping."""
    value_loss_coef: float = Field(default=0.5, gt=0)
    """Factor of the value loss. slime's is 1; with Adam it matters only to clip_grad and adam_eps."""
    num_critic_only_steps: int = Field(default=0, ge=0)
    """Iterations at the beginning of the run, counted by weight version, in which only the critic is trained. The policy's
    learning rate schedule waits for their end."""
