"""`TrainerSpec`: what a run's configuration says about its trainer.

Not here: what a rank does with it (`trainer`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlpipe.actors.specs import ClusterSpec
from rlpipe.config.algorithms import AdvantageConfig
from rlpipe.config.megatron_hooks import megatron_hook_paths
from rlpipe.config.model import ModelConfig
from rlpipe.config.models import CriticConfig, TeacherConfig
from rlpipe.config.observe import ObserveConfig
from rlpipe.config.run import RunConfig
from rlpipe.config.train import TrainConfig
from rlpipe.slime.args import slime_args


@dataclass(frozen=True)
class TrainerSpec:
    """What a group of trainer ranks is built from. Equal specs are the same engine."""

    model_dir: str
    store_root: str
    work_dir: str
    """Local folder for checkpoints."""
    model: ModelConfig
    train: TrainConfig
    advantage: AdvantageConfig
    rollout_temperature: float
    total_optimizer_steps: int
    ref_update_interval: int | None
    """None: the reference stays what it was first."""
    critic: CriticConfig | None
    """None: the estimator asks for no values."""
    critic_optimizer_steps: int
    critic_ranks: int
    """Those that it has to itself; 0: it lives in the policy's."""
    teacher: TeacherConfig | None
    """None: nothing is distilled."""
    engine_tensor_parallel_size: int
    engine_quantization: str | None
    """How engines hold the weights; None: as they are."""
    engines_sleep: bool
    """A push leaves engines paused: they get their cache back later."""
    world_size: int
    """The policy's ranks."""
    threads: int
    deterministic: bool = False
    observe: ObserveConfig = field(default=ObserveConfig(), compare=False)
    """What is profiled; no other engine for it."""
    hook_args: Any = None
    """What functions of the user get as `args`: slime's names for the run's configuration, if it
    has such functions."""
    upload_timeout_s: float = 3600.0
    """Deadline of a checkpoint's way to the store, and of one from it."""

    @property
    def patience_s(self) -> float:
        """How long the policy's ranks and the critic's own wait for each other: as training, or a
        checkpoint's way, may take."""
        return max(self.train.timeout_s, self.upload_timeout_s)

    @classmethod
    def of(
        cls, config: RunConfig, *, model_dir: str, store_root: str, work_dir: Path
    ) -> TrainerSpec:
        """What a run's configuration says about its trainer."""
        return cls(
            model_dir=model_dir,
            store_root=store_root,
            work_dir=str(work_dir),
            model=config.model,
            train=config.train,
            advantage=config.advantage,
            rollout_temperature=config.rollout.rollout_temperature,
            total_optimizer_steps=config.total_optimizer_steps,
            ref_update_interval=config.ref_update_interval,
            critic=config.critic if config.uses_critic else None,
            critic_optimizer_steps=config.critic_optimizer_steps,
            critic_ranks=config.resources.critic_ranks,
            teacher=config.teacher if config.advantage.use_opd else None,
            engine_tensor_parallel_size=config.resources.rollout_num_gpus_per_engine,
            engine_quantization=config.engine.quantization,
            engines_sleep=config.resources.engines_sleep,
            world_size=config.resources.trainer_ranks,
            threads=config.resources.threads_per_process,
            deterministic=config.deterministic,
            observe=config.observe,
            hook_args=slime_args(config) if _has_functions(config) else None,
            upload_timeout_s=config.checkpoint.timeout_s,
        )


def trainer_spec(spec: ClusterSpec) -> TrainerSpec:
    """What a cluster's run says about its trainer."""
    work_dir = Path(spec.home) / spec.config.run
    return TrainerSpec.of(
        spec.config, model_dir=spec.model_dir, store_root=spec.store_root, work_dir=work_dir
    )


def _has_functions(config: RunConfig) -> bool:
    return bool(
        config.advantage.hooks or config.train.loss.hooks or megatron_hook_paths(config.train)
    )
