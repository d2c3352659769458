"""The models beside the policy: the reference, the critic of PPO, the teacher of on-policy
distillation.

Not here: the policy itself (`model`), and what is computed from their answers (`train`).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rlpipe.config.base import Config, Tuning
from rlpipe.config.train import LARGEST_LR, OptimizerConfig, ParallelConfig


class ReferenceConfig(Config):
    """The reference policy of `advantage.reference`: the first weights of the run, until it is
    refreshed."""

    ref_update_interval: int | None = Field(default=None, ge=1)
    """After every this many iterations the policy as it is then becomes the reference, and a
    checkpoint of it is due. Counted by weight version, so a fork goes on with the reference of its
    parent. None: never."""


class CriticConfig(Config):
    """The value model of `advantage.advantage_estimator: ppo`: a decoder with a value head, and an
    optimizer of its own.

    It lives in the policy's ranks, or with `resources.critic_num_gpus_per_node` in ranks of its
    own. In both its state is part of the run's: held, saved and replayed together with the
    policy's."""

    hf_checkpoint: str | None = None
    """Hugging Face directory of the critic's first weights; any architecture with the policy's
    tokens. Where it has `score.weight` [1, hidden], as a reward model does, that is the value head;
    else values begin at 0. None: a copy of the policy's first weights."""
    optimizer: OptimizerConfig | None = None
    """Adam and its schedule; None: as the policy's `train.optimizer`."""
    lr: float | None = Field(default=None, ge=0, le=LARGEST_LR)
    """Learning rate; None: as its optimizer says."""
    lr_warmup_steps: int | None = Field(default=None, ge=0)
    """Optimizer steps of linear warm-up from 0; None: as its optimizer says."""
    parallel: ParallelConfig | None = None
    """Parallel sizes in ranks of its own; None: as the policy's `train.parallel`."""
    value_clip: float | None = Field(default=0.2, gt=0)
    """How far a value may move from what it was before the iteration until its loss stops counting;
    None: no clipping."""
    value_loss_coef: float = Field(default=0.5, gt=0)
    """Factor of the value loss. slime's is 1; with Adam it matters only to clip_grad and
    adam_eps."""
    num_critic_only_steps: int = Field(default=0, ge=0)
    """Iterations at the beginning of the run, counted by weight version, in which only the critic
    is trained. The policy's learning rate schedule waits for their end."""

    def optimizer_beside(self, policy: OptimizerConfig) -> OptimizerConfig:
        """Its Adam and schedule, where this is the policy's."""
        own = {"lr": self.lr, "lr_warmup_steps": self.lr_warmup_steps}
        given = {name: value for name, value in own.items() if value is not None}
        return (self.optimizer or policy).model_copy(update=given)


class TeacherConfig(Config):
    """The teacher of `advantage.use_opd`. Its tokens must be the policy's."""

    opd_type: Literal["sglang", "megatron", "samples"] | None = None
    """`megatron`: a model in the trainer's ranks. `sglang`: a server of yours, which scores at
    temperature 1 only. `samples`: your generate function or sample hook sets
    `sample.teacher_log_probs`, at the rollout's temperature. None: no teacher."""
    opd_teacher_load: str | None = None
    """`megatron`: Hugging Face directory of the teacher; any architecture and size. The records
    name it by this path: do not change what lies there during a run. (slime's is a Megatron
    checkpoint of the policy's architecture.)"""
    url: str | None = None
    """`sglang`: address of the server or router, such as `http://10.0.0.5:30000` (slime:
    `--rm-url`)."""
    timeout_s: float = Tuning(default=600.0, gt=0)
    """`sglang`: deadline of scoring one batch."""

    @model_validator(mode="after")
    def _says_where(self):
        if self.opd_type == "megatron" and not self.opd_teacher_load:
            raise ValueError(
                "opd_type: megatron needs opd_teacher_load, the teacher's Hugging Face directory"
            )
        if self.opd_type == "sglang" and not self.url:
            raise ValueError("opd_type: sglang needs url, the address of the teacher's server")
        return self
