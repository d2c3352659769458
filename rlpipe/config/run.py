"""`RunConfig`: the complete configuration of a run, with one model per stage.

`RunConfig` checks combinations of keys of several sections. Each section's model checks its own
keys.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from rlpipe.config.algorithms import (
    SUPERVISED,
    AdvantageConfig,
    algorithm_conflict,
    comparison_problem,
    set_surrogate,
    supervised_conflicts,
)
from rlpipe.config.base import Config, Name, Tuning
from rlpipe.config.data import DataConfig, EvaluationConfig, RewardConfig, needs_environment
from rlpipe.config.draws import curriculum_conflict
from rlpipe.config.model import (
    BranchModel,
    EngineConfig,
    HuggingFaceModel,
    ModelConfig,
    ResourcesConfig,
    external_conflict,
)
from rlpipe.config.observe import GatesConfig, ObserveConfig, StopCondition
from rlpipe.config.peft_directory import adapter_conflict, with_resident_engines
from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.store_root import canonical_root
from rlpipe.config.train import (
    CheckpointConfig,
    CriticConfig,
    ReferenceConfig,
    SyncConfig,
    TeacherConfig,
    TrainConfig,
    nearest_divisor,
)
from rlpipe.errors import ConfigError


class StoreConfig(Config):
    """The object store of all records and rollouts."""

    root: str | None = Tuning(None)
    """A directory (`/data/rl`, `file:///data/rl`) or `s3://bucket/prefix`; None: `{home}/store`.
    Credentials come from the environment. Other protocols are refused: the store needs atomic
    create-if-absent, which is tested for these two only."""

    @field_validator("root")
    @classmethod
    def _is_a_store_root(cls, value: str | None) -> str | None:
        if value is not None:
            canonical_root(value)
        return value


class OrchestrationConfig(Config):
    """Execution of iterations as Prefect flow runs."""

    iterations: Literal["in_process", "deployment"] = Tuning("in_process")
    """`in_process`: subflows of the train flow (0.2 s each). `deployment`: a separate flow run for
    each iteration, with a Retry button; the next flow run starts up during the current
    iteration."""
    deployment: str = Tuning("iteration/iteration")
    """`flow/deployment` that runs an iteration."""
    retries: int = Tuning(default=3, ge=0)
    """Retries of a failed or crashed iteration before the run fails; 0: none."""
    retry_delay_s: float = Tuning(default=15.0, ge=0)
    """Delay before the first retry; doubled for each further retry. Keep it above 11 s: a Prefect
    worker reports a crash twice, up to 11 s apart."""
    timeout_s: float = Tuning(default=4 * 3600.0, gt=0)
    """Deadline of one iteration, including the wait for earlier iterations."""


class DebugConfig(Config):
    """Sampling without training, or training on another run's rollouts.

    The names are slime's. slime's dump files are branches of the store here.
    """

    debug_rollout_only: bool = False
    """Sample and score num_rollout batches with the first weights, without training. The trainer
    only pushes the first weights. Nothing is committed; the store keeps the rollouts as long as the
    run's branch."""
    debug_train_only: bool = False
    """Train on the rollouts of another run, load_debug_rollout_data. No engines start and nothing
    is evaluated."""
    load_debug_rollout_data: Name | None = None
    """Name of the run of those rollouts, in the same store; a trained run or a debug_rollout_only
    run. Iteration k trains on its rollout k, scored by this run's reward. Setting the key also sets
    debug_train_only. All tokens of a debug_rollout_only run have weight version 0, so
    async_buffer_size must be at least num_rollout - 1; otherwise the tokens are stale, which ends
    the run with an error. None: no such run."""

    @model_validator(mode="before")
    @classmethod
    def _loaded_rollouts_imply_train_only(cls, values):
        if isinstance(values, dict) and values.get("load_debug_rollout_data"):
            return {"debug_train_only": True, **values}
        return values

    @model_validator(mode="after")
    def _only_one_part_is_skipped(self):
        if self.debug_rollout_only and self.debug_train_only:
            raise ValueError(
                "debug_rollout_only and debug_train_only exclude each other; choose one"
            )
        if self.debug_train_only != (self.load_debug_rollout_data is not None):
            raise ValueError(
                "debug_train_only needs load_debug_rollout_data: the name of the run with the "
                "rollouts"
            )
        return self


class RunConfig(Config):
    """A run: one branch of the store, from its first weights to `num_rollout` iterations."""

    run: Name
    """Name of the run and of its branch. If a recipe does not set the key: the name of its file,
    without `.yaml`, or for a file `recipe.yaml` the name of its folder. `store` and `models` are
    refused for new runs, because they are folders of the home."""
    num_rollout: int = Tuning(..., ge=0, le=99_999_999)
    """Number of iterations. Commits are numbered with eight digits."""
    start_rollout_id: int = Field(default=0, ge=0)
    """Iterations that slime has done before this run. User functions, `checkpoint.save_hf` and the
    intervals of checkpoints, evaluations, pushes and refreshes of the reference count on from here.
    The store and messages count from 0."""
    stop_when: StopCondition | None = Tuning(None)
    """Condition to end earlier; None: no condition."""
    seed: int = 0
    """Default of all seeds that are not set: data.rollout_seed, train.seed and the weights of a
    made model."""
    async_buffer_size: int = Field(default=0, ge=0, le=10_000)
    """S: rollouts may run this many iterations ahead of training, and no token older than S weight
    versions is trained. 0: synchronous. At most 10000: each iteration ahead is open from the start
    of the run, as a flow run with `orchestration.iterations: deployment`."""
    deterministic: bool = False
    """Bit-exact training and replay, and batches that do not depend on the order in which groups
    finish. Training is slower. On GPUs the engines sample with each request's seed too."""
    fork_from: BranchModel | None = None
    """Commit of another run to continue from, with its weights, optimizer state and data cursor, as
    a new branch with this configuration. Excludes warm_start and model.start_from. None: no
    fork."""
    warm_start: str | None = None
    """Recipe of a run that finishes first, as `{run}.warm_start` in the same store with the same
    seed. Its last weights are this run's first weights. None: no warm start."""
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig
    reward: RewardConfig
    advantage: AdvantageConfig = AdvantageConfig()
    reference: ReferenceConfig = ReferenceConfig()
    train: TrainConfig = TrainConfig()
    critic: CriticConfig = CriticConfig()
    teacher: TeacherConfig = TeacherConfig()
    sync: SyncConfig = SyncConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    engine: EngineConfig = EngineConfig()
    resources: ResourcesConfig = ResourcesConfig()
    store: StoreConfig = StoreConfig()
    observe: ObserveConfig = ObserveConfig()
    gates: GatesConfig = GatesConfig()
    debug: DebugConfig = DebugConfig()
    orchestration: OrchestrationConfig = OrchestrationConfig()
    flags: dict[str, Any] = Tuning(default_factory=dict)
    """Flags of a slime-style command line that set no key, by name. rlpipe does not use them; user
    functions read them as `args.<flag>`."""

    @model_validator(mode="before")
    @classmethod
    def _derive_defaults_across_sections(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = dict(values)
        seed = values.get("seed", 0)
        # Before validation, because models are frozen. A wrong type is left to the field's error.
        for section, key in (("data", "rollout_seed"), ("train", "seed")):
            if type(seed) is int and isinstance(section_values := values.get(section, {}), dict):
                values[section] = {key: seed, **section_values}
        return set_surrogate(with_resident_engines(values))

    @model_validator(mode="after")
    def _batch_sizes_and_ranks_fit(self):
        samples = self.samples_per_iteration
        step = self.train.global_batch_size
        steps = self.train.num_steps_per_rollout
        if samples % (step or steps or 1) or (step and steps and samples != step * steps):
            factors = {"train.global_batch_size": step, "train.num_steps_per_rollout": steps}
            fitting = nearest_divisor(samples, step or steps or 1)
            raise ConfigError(
                f"rollout.rollout_batch_size × rollout.n_samples_per_prompt = {samples} must be "
                f"{'' if step and steps else 'a multiple of '}"
                f"{' × '.join(f'{key} = {number}' for key, number in factors.items() if number)}",
                do="leave out one of the two keys of train; it follows from the other"
                if step and steps
                else f"set {next(key for key, value in factors.items() if value)}={fitting}, or "
                "change the number of samples",
            )
        if self.async_buffer_size < self.sync.update_weights_interval - 1:
            raise ValueError(
                f"async_buffer_size = {self.async_buffer_size} must be at least "
                f"sync.update_weights_interval - 1 = {self.sync.update_weights_interval - 1}: "
                "engines sample with weights of this age between two pushes"
            )
        over = self.rollout.over_sampling_batch_size
        if over is not None and over < self.rollout.rollout_batch_size:
            raise ValueError(
                f"rollout.over_sampling_batch_size = {over} must be at least "
                f"rollout.rollout_batch_size = {self.rollout.rollout_batch_size}"
            )
        ranks = self.resources.trainer_ranks
        model_ranks = self.train.parallel.model_ranks
        if ranks % model_ranks:
            raise ValueError(
                f"resources.actor_num_nodes × resources.actor_num_gpus_per_node = {ranks} ranks "
                f"must be a multiple of train.parallel's TP × PP × CP = {model_ranks}"
            )
        return self

    @model_validator(mode="after")
    def _needed_sections_are_given(self):
        metrics = [f"eval/{dataset.name}/accuracy" for dataset in self.evaluation.datasets]
        if self.stop_when is not None and self.stop_when.metric not in metrics:
            raise ValueError(
                f"stop_when.metric: no evaluation measures {self.stop_when.metric!r}; measured: "
                f"{metrics or 'nothing'}"
            )
        needed = needs_environment(self.data, self.reward, self.evaluation)
        if needed and not self.rollout.samples_by_user_function:
            raise ValueError(f"{needed} needs rollout.environment, or a function that samples")
        if self.data.prompts is None and self.rollout.data_source_path is None:
            raise ValueError(
                "data.prompts is needed, unless rollout.data_source_path gives prompts"
            )
        if self.fork_from is not None and self.start_from is not None:
            other = "warm_start" if self.warm_start else "model.start_from"
            raise ValueError(
                f"fork_from and {other}: the first weights of a fork are its parent's; remove one "
                "of them"
            )
        model = self.model.source
        if self.start_from and isinstance(model, HuggingFaceModel) and model.megatron_optimizer:
            other = "warm_start" if self.warm_start else "model.start_from"
            raise ValueError(
                f"model.source.megatron_optimizer and {other}: weights and optimizer state would "
                "come from different runs; remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _advantage_loss_and_teacher_fit(self):
        conflict = algorithm_conflict(self.advantage, self.train.loss, self.num_steps_per_rollout)
        if conflict:
            raise ValueError(conflict)
        if self.advantage.use_opd and self.teacher.opd_type is None:
            raise ValueError("advantage.use_opd needs a teacher: set teacher.opd_type")
        temperature = self.rollout.rollout_temperature
        scores_at_one = self.advantage.use_opd and self.teacher.opd_type == "sglang"
        if scores_at_one and temperature != 1 and not self.teacher.other_temperature:
            raise ValueError(
                f"teacher.opd_type: sglang scores at temperature 1, but "
                f"rollout.rollout_temperature is {temperature}; use opd_type: megatron, or accept "
                "it with teacher.other_temperature: true"
            )
        supervised = self.rollout.type == "dataset"
        if self.teacher_of_samples and supervised:
            raise ValueError(
                "teacher.opd_type: samples needs functions that sample; found rollout.type: dataset"
            )
        if self.reference.ref_update_interval and not self.advantage.reference:
            raise ValueError("reference.ref_update_interval needs advantage.reference: true")
        if conflicts := list(supervised_conflicts(self)):
            raise ValueError("; and ".join(conflicts))
        return self

    @model_validator(mode="after")
    def _rewards_of_a_prompt_can_be_compared(self):
        if self.rollout.n_samples_per_prompt > 1 or self.debug.debug_rollout_only:
            return self  # rollouts without training need no comparison
        fans_out = bool(
            self.rollout.custom_generate_function_path or self.rollout.rollout_function_path
        )
        if problem := comparison_problem(self.advantage, self.train.loss, fans_out=fans_out):
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _held_out_sets_have_one_sampling_function(self):
        function = self.rollout.eval_function_path or self.rollout.rollout_function_path
        for number, dataset in enumerate(self.evaluation.datasets):
            if dataset.custom_generate_function_path and function:
                raise ValueError(
                    f"evaluation.datasets.{number}.custom_generate_function_path: {function} "
                    "samples all held-out sets (rollout.eval_function_path, rollout_function_path) "
                    "and would not call it; remove one of them"
                )
        return self

    @model_validator(mode="after")
    def _gates_can_be_evaluated(self):
        names = [dataset.name for dataset in self.evaluation.datasets]
        for gate in self.gates.bounds:
            if gate.metric.startswith("eval/") and gate.metric.split("/")[1] not in names:
                raise ValueError(
                    f"gates.bounds: no evaluation measures {gate.metric!r}; held-out sets: "
                    f"{names or 'none'}"
                )
        if self.gates.bounds and self.gates.timeout_s >= self.orchestration.timeout_s:
            raise ValueError(
                f"gates.timeout_s = {self.gates.timeout_s:g} must be less than "
                f"orchestration.timeout_s = {self.orchestration.timeout_s:g}, because later "
                "iterations wait for the paused one"
            )
        return self

    @model_validator(mode="after")
    def _colocated_processes_alternate(self):
        if self.resources.shares_gpus and self.async_buffer_size:
            raise ValueError(
                "resources.colocate: engines sleep while the trainer works, so no rollout runs "
                f"ahead of training; found async_buffer_size = {self.async_buffer_size}, expected "
                "0 (or separate GPUs for the engines)"
            )
        if self.resources.engines_sleep and self.sync.in_flight == "in_place":
            raise ValueError(
                "resources.colocate: an engine that releases its cache cannot keep requests; "
                "expected sync.in_flight: abort or drain, found in_place"
            )
        if self.resources.shares_gpus and self.sync.transport == "distributed":
            raise ValueError(
                "resources.colocate: NCCL cannot connect two processes on one GPU; expected "
                "sync.transport: tensor, disk or delta, found distributed"
            )
        return self

    @model_validator(mode="after")
    def _open_groups_can_continue(self):
        rollout = self.rollout
        if rollout.pool_size is not None and not rollout.pooled:
            raise ValueError("rollout.pool_size needs rollout.selection: first_finished")
        if not rollout.pooled:
            return self
        conflicts = {
            "async_buffer_size: 0, with which the tokens of an open group are too old for the next "
            "iteration; expected 1 or more": self.async_buffer_size == 0,
            "deterministic: true, because the order in which groups finish decides the batch": (
                self.deterministic
            ),
            "rollout.type: dataset, because nothing is sampled": rollout.type == "dataset",
            "rollout.rollout_function_path, which samples whole iterations": (
                rollout.rollout_function_path is not None
            ),
        }
        if found := next((text for text, conflict in conflicts.items() if conflict), None):
            raise ValueError(f"rollout.selection: first_finished cannot be used with {found}")
        return self

    @model_validator(mode="after")
    def _critic_ranks_fit(self):
        ranks = self.resources.critic_ranks
        parallel = self.critic.parallel or self.train.parallel
        if ranks and not self.uses_critic:
            raise ValueError(
                "resources.critic_num_gpus_per_node: only advantage.advantage_estimator: ppo has a "
                f"critic; found {self.advantage.advantage_estimator} and {ranks} ranks"
            )
        if self.critic.parallel is not None and not ranks:
            raise ValueError(
                "critic.parallel: a critic in the policy's ranks has the policy's layout; set "
                "resources.critic_num_gpus_per_node"
            )
        if ranks % parallel.model_ranks:
            raise ValueError(
                "resources.critic_num_nodes × resources.critic_num_gpus_per_node = "
                f"{ranks} ranks must be a multiple of the critic's TP × PP × CP = "
                f"{parallel.model_ranks} (critic.parallel, else train.parallel)"
            )
        return self

    @model_validator(mode="after")
    def _curriculum_can_be_drawn(self):
        if conflict := curriculum_conflict(self):
            raise ValueError(conflict)
        return self

    @model_validator(mode="after")
    def _adapters_can_be_trained(self):
        if conflict := adapter_conflict(self):
            raise ValueError(conflict)
        return self

    @model_validator(mode="after")
    def _frozen_parameters_need_no_state(self):
        sources = {"model.source": self.model.source, "critic": self.critic}
        for where, source in sources.items():
            if self.train.frozen_names and getattr(source, "megatron_optimizer", False):
                raise ValueError(
                    f"train.{next(iter(self.train.frozen_names))} cannot be used with "
                    f"{where}.megatron_optimizer, whose state is of all parameters"
                )
        return self

    @model_validator(mode="after")
    def _external_servers_can_be_used(self):
        if conflict := external_conflict(self.resources, self.engine, self.sync, self.store.root):
            raise ValueError(conflict)
        return self

    @model_validator(mode="after")
    def _replayed_routing_has_a_source(self):
        from_engines = self.train.use_rollout_routing_replay
        supervised = self.train.loss.type in SUPERVISED
        scored = self.advantage.score_proximal is not False and not supervised
        if self.train.use_routing_replay and not (from_engines or scored):
            raise ValueError(
                "train.use_routing_replay replays the routing of the scoring pass; it needs "
                "advantage.score_proximal"
            )
        if from_engines and self.rollout.type == "dataset":
            raise ValueError(
                "train.use_rollout_routing_replay replays the routing of the engines; with "
                "rollout.type: dataset no engine samples"
            )
        return self

    @property
    def teacher_of_samples(self) -> bool:
        """True if samples carry the teacher's log-probs."""
        return self.advantage.use_opd and self.teacher.opd_type == "samples"

    @property
    def start_from(self) -> BranchModel | None:
        """Branch with the weights that the run starts from, if any."""
        if self.warm_start:
            return BranchModel(branch=f"{self.run}.warm_start")
        return self.model.start_from

    @property
    def cluster(self) -> str:
        """Name of the set of actors; runs of one cluster use them one run after another."""
        return self.resources.cluster or self.run

    @property
    def ref_update_offset(self) -> int:
        """Iterations of slime since its last refresh of the reference (`start_rollout_id`)."""
        return self.start_rollout_id % (self.ref_update_interval or 1)

    @property
    def ref_update_interval(self) -> int | None:
        """Iterations between two refreshes of the reference; None: no refresh."""
        return self.reference.ref_update_interval if self.advantage.reference else None

    @property
    def uses_critic(self) -> bool:
        """True for PPO, the only estimator that needs values."""
        return self.advantage.advantage_estimator == "ppo"

    @property
    def total_optimizer_steps(self) -> int:
        """Optimizer steps of the policy; iterations that train only the critic take none."""
        critic_only = self.critic.num_critic_only_steps if self.uses_critic else 0
        return max(self.num_rollout - critic_only, 0) * self.num_steps_per_rollout

    @property
    def critic_optimizer_steps(self) -> int:
        return self.num_rollout * self.num_steps_per_rollout

    @property
    def reads_text(self) -> bool:
        """True if the engines need the tokenizer, for rollouts or for a held-out set's function."""
        functions = (dataset.custom_generate_function_path for dataset in self.evaluation.datasets)
        return self.rollout.needs_text or any(functions)

    @property
    def needs_engines(self) -> bool:
        return not self.debug.debug_train_only and (
            self.rollout.type == "sample" or bool(self.evaluation.datasets)
        )

    @property
    def samples_per_iteration(self) -> int:
        return self.rollout.rollout_batch_size * self.rollout.n_samples_per_prompt

    @property
    def num_steps_per_rollout(self) -> int:
        """Optimizer steps of one iteration."""
        step = self.train.global_batch_size or self.samples_per_iteration
        return self.train.num_steps_per_rollout or self.samples_per_iteration // step
