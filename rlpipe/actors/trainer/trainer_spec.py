"""`TrainerSpec`: the part of a run's configuration that the trainer ranks are built from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlpipe.actors.specs import ClusterSpec
from rlpipe.config.algorithms import AdvantageConfig
from rlpipe.config.megatron_hooks import megatron_hook_paths
from rlpipe.config.model import ModelConfig
from rlpipe.config.observe import ObserveConfig
from rlpipe.config.run import RunConfig
from rlpipe.config.train import CheckpointConfig, CriticConfig, TeacherConfig, TrainConfig
from rlpipe.lineage.source_weights import (
    WeightSource,
    adam_directory,
    local_directory,
    weight_sources,
)
from rlpipe.lineage.stage_inputs import scores_proximal
from rlpipe.model_dir import directory_here
from rlpipe.slime.args import slime_args


@dataclass(frozen=True)
class TrainerSpec:
    """Settings of a group of trainer ranks. Ranks with equal specs have the same engine."""

    model_dir: str
    store_root: str
    work_dir: str
    """Local folder for checkpoints."""
    model: ModelConfig
    train: TrainConfig
    advantage: AdvantageConfig
    rollout_temperature: float
    total_optimizer_steps: int
    sources: Mapping[str, WeightSource]
    """Models whose weights come from files of their own, by role."""
    ref_update_interval: int | None
    """Iterations between refreshes of the reference; None: never."""
    ref_update_offset: int
    """Iterations of slime since its last refresh of the reference."""
    critic: CriticConfig | None
    """None: the estimator uses no values."""
    critic_optimizer_steps: int
    critic_ranks: int
    """Ranks of the critic alone; 0: the critic shares the policy's ranks."""
    teacher: TeacherConfig | None
    """None: no distillation."""
    engine_tensor_parallel_size: int
    engine_quantization: str | None
    """Quantization of the weights in the engines; None: as trained."""
    engines_sleep: bool
    """True if engines stay paused after a push, because they get their KV cache back later."""
    world_size: int
    """Ranks of the policy."""
    threads: int
    score_proximal: bool | None = None
    """True: the policy scores every batch before it is trained. False: it scores none. None: only
    batches of more than one optimizer step."""
    deterministic: bool = False
    # Not compared: another profile needs no other engine.
    observe: ObserveConfig = field(default=ObserveConfig(), compare=False)
    """Settings of the profiler."""
    hook_args: Any = None
    """`args` for user functions: the run's configuration under slime's names. None: no such
    functions."""
    adam_dir: str | None = None
    """Optimizer state of another run that this run continues, on this node (`here`). None: Adam
    starts fresh."""
    critic_adam_dir: str | None = None
    """The same for the critic."""
    start_rollout_id: int = field(default=0, compare=False)
    """Number of the first iteration in names of Hugging Face directories."""
    reference_dir: str | None = None
    """Model directory of the first reference on this node (`here`); None: the first weights."""
    checkpoint: CheckpointConfig = field(default=CheckpointConfig(), compare=False)
    """Settings of the Hugging Face directories."""
    upload_timeout_s: float = 3600.0
    """Deadline for the upload of a checkpoint, and for its download."""

    @property
    def exchange_timeout_s(self) -> float:
        """Seconds that the policy's and the critic's ranks wait for each other.

        As long as training, or the transfer of a checkpoint, may take.
        """
        return max(self.train.timeout_s, self.upload_timeout_s)

    @classmethod
    def of(
        cls, config: RunConfig, *, model_dir: str, store_root: str, work_dir: Path
    ) -> TrainerSpec:
        """Return the trainer's settings of a run's configuration."""
        return cls(
            model_dir=model_dir,
            store_root=store_root,
            work_dir=str(work_dir),
            model=config.model,
            train=config.train,
            advantage=config.advantage,
            rollout_temperature=config.rollout.rollout_temperature,
            total_optimizer_steps=config.total_optimizer_steps,
            sources=weight_sources(config),
            ref_update_interval=config.ref_update_interval,
            ref_update_offset=config.ref_update_offset,
            critic=config.critic if config.uses_critic else None,
            critic_optimizer_steps=config.critic_optimizer_steps,
            critic_ranks=config.resources.critic_ranks,
            teacher=config.teacher if config.advantage.use_opd else None,
            engine_tensor_parallel_size=config.resources.rollout_num_gpus_per_engine,
            engine_quantization=config.engine.quantization,
            engines_sleep=config.resources.engines_sleep,
            world_size=config.resources.trainer_ranks,
            threads=config.resources.threads_per_process,
            score_proximal=scores_proximal(config),
            deterministic=config.deterministic,
            observe=config.observe,
            hook_args=slime_args(config) if _has_user_functions(config) else None,
            start_rollout_id=config.start_rollout_id,
            checkpoint=config.checkpoint,
            upload_timeout_s=config.checkpoint.timeout_s,
        )

    @classmethod
    def of_cluster(cls, spec: ClusterSpec) -> TrainerSpec:
        """Return the trainer's settings of a cluster's run."""
        work_dir = Path(spec.home) / spec.config.run
        return cls.of(
            spec.config, model_dir=spec.model_dir, store_root=spec.store_root, work_dir=work_dir
        )

    def here(self) -> TrainerSpec:
        """Return the spec with model directories of this node; see `directory_here`.

        Raises: ConfigError, ResourceError if a model cannot be downloaded; errors of a conversion.
        """
        critic, teacher = self.critic, self.teacher
        home = Path(self.work_dir).parent
        model_dir = directory_here(self.model_dir, self.model.source)
        paths = {
            role: local_directory(source, model_dir, home)
            for role, source in self.sources.items()
            if role not in ("policy", "adapter")
        }
        if critic is not None and "critic" in paths:
            critic = critic.model_copy(update={"hf_checkpoint": paths["critic"]})
        if teacher is not None and "teacher" in paths:
            teacher = teacher.model_copy(update={"opd_teacher_load": paths["teacher"]})
        return replace(
            self,
            model_dir=model_dir,
            critic=critic,
            teacher=teacher,
            adam_dir=adam_directory(self.sources.get("policy"), model_dir, home),
            critic_adam_dir=adam_directory(self.sources.get("critic"), model_dir, home),
            reference_dir=paths.get("reference"),
        )


def _has_user_functions(config: RunConfig) -> bool:
    return bool(
        config.advantage.hooks
        or config.train.loss.hooks
        or megatron_hook_paths(config.train)
        or config.sync.custom_update_weight_post_write_path
    )
