"""`RunConfig`: everything one run is, one model per stage."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from rlpipe.config.algorithms import (
    AdvantageConfig,
    contradiction,
    set_surrogate,
    without_comparison,
)
from rlpipe.config.base import Config, Name, Tuning
from rlpipe.config.data import DataConfig, EvaluationConfig, RewardConfig
from rlpipe.config.debug import DebugConfig
from rlpipe.config.external import external_problem
from rlpipe.config.gates import GatesConfig
from rlpipe.config.model import BranchModel, EngineConfig, ModelConfig, ResourcesConfig
from rlpipe.config.models import CriticConfig, ReferenceConfig, TeacherConfig
from rlpipe.config.observe import ObserveConfig
from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.store_root import canonical_root
from rlpipe.config.train import CheckpointConfig, SyncConfig, TrainConfig


class StoreConfig(Config):
    """Where everything that happened is kept."""

    root: str | None = Tuning(None)
    """A directory (`/data/rl`, `file:///data/rl`) or `s3://bucket/prefix`; None is `{home}/store`.
    Credentials come from the environment. Other protocols are refused: that the first writer of a
    name wins is tested for these two only."""

    @field_validator("root")
    @classmethod
    def _is_a_root(cls, value: str | None) -> str | None:
        if value is not None:
            canonical_root(value)
        return value


class StopCondition(Config):
    """End the run early once an evaluation metric is reached."""

    metric: str
    """Metric name, such as `eval/heldout/accuracy`."""
    at_least: float
    """Stop when it is this high."""


class OrchestrationConfig(Config):
    """How iterations become Prefect flow runs."""

    iterations: Literal["in_process", "deployment"] = Tuning("in_process")
    """`in_process`: subflows of the train flow (0.2 s each). `deployment`: a flow run of its own
    for each iteration, with a Retry button; the next one starts up while this one runs."""
    deployment: str = Tuning("iteration/iteration")
    """`flow/deployment` that runs an iteration."""
    retries: int = Tuning(default=3, ge=0)
    """A failed or crashed iteration is put back so many times before the run fails."""
    retry_delay_s: float = Tuning(default=15.0, ge=0)
    """Before the first of them; doubled each time. A worker reports a crash twice, up to 11 s
    apart."""
    timeout_s: float = Tuning(default=4 * 3600.0, gt=0)
    """Deadline of one iteration, waiting for the ones before it included."""


class RunConfig(Config):
    """One run: a branch of the store, from its first weights to `num_rollout` iterations."""

    run: Name
    """Name of the run and of its branch. `store` and `models` are folders of the home, and no names
    of new runs."""
    num_rollout: int = Tuning(..., ge=0, le=99_999_999)
    """Iterations in total. Commits are numbered with eight digits."""
    stop_when: StopCondition | None = Tuning(None)
    """End earlier; None: never."""
    seed: int = 0
    """Seeds everything that has no seed of its own: a made model's weights, data.rollout_seed,
    train.seed."""
    async_buffer_size: int = Field(default=0, ge=0, le=10_000)
    """S: rollouts may run so many iterations ahead of training, and no token older than S weight
    versions is trained. 0 is synchronous. At most 10000: each iteration ahead is open from the
    start of the run, as a flow run with `orchestration.iterations: deployment`."""
    deterministic: bool = False
    """Bit-exact training and replay, and batches that do not depend on which group finished first,
    at some cost in speed. On GPUs the engines sample by each request's seed too."""
    fork_from: BranchModel | None = None
    """Go on from a commit of another run, with its weights, optimizer state and place in the data,
    as a branch of its own under this configuration. Excludes warm_start and model.start_from."""
    warm_start: str | None = None
    """Recipe of a run to finish first, as `{run}.warm_start` in the same store with the same seed;
    its last weights are this run's first."""
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
    """Flags of a command line in slime's style that set no key of their own name, by name. They
    change nothing here, but functions of yours read them as `args.<flag>`."""

    @model_validator(mode="before")
    @classmethod
    def _one_seed_for_all(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values, seed = dict(values), values.get("seed", 0)
        for section, key in (("data", "rollout_seed"), ("train", "seed")):
            if type(seed) is int and isinstance(given := values.get(section, {}), dict):
                values[section] = {key: seed, **given}
        return set_surrogate(values)

    @model_validator(mode="after")
    def _batches_come_out_even(self):
        samples = self.samples_per_iteration
        step = self.train.global_batch_size
        steps = self.train.num_steps_per_rollout
        if samples % (step or steps or 1) or (step and steps and samples != step * steps):
            of = {"train.global_batch_size": step, "train.num_steps_per_rollout": steps}
            raise ValueError(
                f"rollout.rollout_batch_size × rollout.n_samples_per_prompt = {samples} must be "
                f"{'' if step and steps else 'a multiple of '}{' × '.join(f'{key} = {n}' for key, n in of.items() if n)}"
            )
        measured = [f"eval/{dataset.name}/accuracy" for dataset in self.evaluation.datasets]
        if self.stop_when is not None and self.stop_when.metric not in measured:
            raise ValueError(
                f"stop_when.metric: nothing measures {self.stop_when.metric!r}, only {measured or 'nothing'}"
            )
        if self.async_buffer_size < self.sync.update_weights_interval - 1:
            raise ValueError(
                f"async_buffer_size = {self.async_buffer_size} must be at least sync.update_weights_interval - 1 = "
                f"{self.sync.update_weights_interval - 1}: weights that old are sampled from between two pushes"
            )
        over = self.rollout.over_sampling_batch_size
        if over is not None and over < self.rollout.rollout_batch_size:
            raise ValueError(
                f"rollout.over_sampling_batch_size = {over} must be at least rollout.rollout_batch_size = "
                f"{self.rollout.rollout_batch_size}"
            )
        if self.data.prompts is None and self.rollout.data_source_path is None:
            raise ValueError(
                "data.prompts is needed, unless rollout.data_source_path gives prompts"
            )
        ranks = self.resources.trainer_ranks
        model = self.train.parallel.model_ranks
        if ranks % model:
            raise ValueError(
                f"resources.actor_num_nodes × resources.actor_num_gpus_per_node = {ranks} ranks must be a multiple of "
                f"train.parallel's TP × PP × CP = {model}"
            )
        if self.fork_from is not None and self.start_from is not None:
            other = "warm_start" if self.warm_start else "model.start_from"
            raise ValueError(
                f"fork_from and {other}: a fork's first weights are its parent's; leave one of them out"
            )
        if problem := contradiction(self.advantage, self.train.loss, self.num_steps_per_rollout):
            raise ValueError(problem)
        if self.advantage.use_opd and self.teacher.opd_type is None:
            raise ValueError("advantage.use_opd needs a teacher: set teacher.opd_type")
        if (
            self.advantage.use_opd
            and self.teacher.opd_type == "sglang"
            and self.rollout.rollout_temperature != 1
        ):
            raise ValueError(
                f"teacher.opd_type: sglang scores at temperature 1, but rollout.rollout_temperature is "
                f"{self.rollout.rollout_temperature}; use opd_type: megatron"
            )
        if self.teacher_of_samples and self.rollout.type == "dataset":
            raise ValueError(
                "teacher.opd_type: samples needs functions that sample; found rollout.type: dataset"
            )
        if self.reference.ref_update_interval and not self.advantage.reference:
            raise ValueError("reference.ref_update_interval needs advantage.reference: true")
        supervised = self.rollout.type == "dataset"
        wrong_loss = self.train.loss.type == ("policy" if supervised else "sft")
        if wrong_loss or supervised != (self.advantage.advantage_estimator == "none"):
            raise ValueError(
                "supervised runs set all of rollout.type: dataset, train.loss.type: sft (or custom) and "
                "advantage.advantage_estimator: none; found "
                f"{self.rollout.type}, {self.train.loss.type}, {self.advantage.advantage_estimator}"
            )
        return self

    @model_validator(mode="after")
    def _samples_of_a_prompt_can_be_compared(self):
        if self.rollout.n_samples_per_prompt > 1 or self.debug.debug_rollout_only:
            return self
        fans_out = bool(
            self.rollout.custom_generate_function_path or self.rollout.rollout_function_path
        )
        if problem := without_comparison(self.advantage, self.train.loss, fans_out=fans_out):
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _held_out_sets_are_sampled_in_one_way(self):
        whole = self.rollout.eval_function_path or self.rollout.rollout_function_path
        for number, dataset in enumerate(self.evaluation.datasets):
            if dataset.custom_generate_function_path and whole:
                raise ValueError(
                    f"evaluation.datasets.{number}.custom_generate_function_path: held-out sets are sampled by the function "
                    f"{whole} (rollout.eval_function_path, rollout_function_path), which would not call it; leave one out"
                )
        return self

    @model_validator(mode="after")
    def _gates_can_open(self):
        names = [dataset.name for dataset in self.evaluation.datasets]
        for gate in self.gates.bounds:
            if gate.metric.startswith("eval/") and gate.metric.split("/")[1] not in names:
                raise ValueError(
                    f"gates.bounds: nothing measures {gate.metric!r}; held-out sets are {names or 'none'}"
                )
        if self.gates.bounds and self.gates.timeout_s >= self.orchestration.timeout_s:
            raise ValueError(
                f"gates.timeout_s = {self.gates.timeout_s:g} must be less than orchestration.timeout_s = "
                f"{self.orchestration.timeout_s:g}, in which later iterations wait for the one that is paused"
            )
        return self

    @model_validator(mode="after")
    def _shared_gpus_are_used_in_turns(self):
        if self.resources.colocate and self.async_buffer_size:
            raise ValueError(
                f"resources.colocate: engines sleep while the trainer works, so no rollout runs ahead of it; found "
                f"async_buffer_size = {self.async_buffer_size}, expected 0 (or GPUs of their own for the engines)"
            )
        if self.resources.engines_sleep and self.sync.in_flight == "in_place":
            raise ValueError(
                "resources.colocate: requests cannot stay inside an engine that gives up its cache; expected sync.in_flight: "
                "abort or drain, found in_place"
            )
        if self.resources.colocate and self.sync.transport == "distributed":
            raise ValueError(
                "resources.colocate: NCCL joins no two processes on one GPU; expected sync.transport: tensor, disk or delta, "
                "found distributed"
            )
        return self

    @model_validator(mode="after")
    def _critic_has_its_ranks(self):
        ranks = self.resources.critic_ranks
        parallel = self.critic.parallel or self.train.parallel
        if ranks and not self.uses_critic:
            raise ValueError(
                f"resources.critic_num_gpus_per_node: only advantage.advantage_estimator: ppo has a critic; found "
                f"{self.advantage.advantage_estimator} and {ranks} ranks"
            )
        if self.critic.parallel is not None and not ranks:
            raise ValueError(
                "critic.parallel: in the policy's ranks it has their layout; give resources.critic_num_gpus_per_node"
            )
        if ranks % parallel.model_ranks:
            raise ValueError(
                f"resources.critic_num_nodes × resources.critic_num_gpus_per_node = {ranks} ranks must be a multiple of the "
                f"critic's TP × PP × CP = {parallel.model_ranks} (critic.parallel, else train.parallel)"
            )
        return self

    @model_validator(mode="after")
    def _what_others_started_can_be_used(self):
        if problem := external_problem(self.resources, self.engine, self.sync, self.store.root):
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _routing_comes_from_somewhere(self):
        of_engines = self.train.use_rollout_routing_replay
        scored = self.advantage.score_proximal and self.train.loss.type != "sft"
        if self.train.use_routing_replay and not (of_engines or scored):
            raise ValueError(
                "train.use_routing_replay replays the routing of the scoring pass; it needs advantage.score_proximal"
            )
        if of_engines and self.rollout.type == "dataset":
            raise ValueError(
                "train.use_rollout_routing_replay replays the routing of the engines; with rollout.type: dataset none samples"
            )
        return self

    @property
    def teacher_of_samples(self) -> bool:
        """True if samples bring the teacher's log-probs themselves."""
        return self.advantage.use_opd and self.teacher.opd_type == "samples"

    @property
    def start_from(self) -> BranchModel | None:
        """The branch whose last weights are this run's first, if any."""
        return (
            BranchModel(branch=f"{self.run}.warm_start")
            if self.warm_start
            else self.model.start_from
        )

    @property
    def cluster(self) -> str:
        """Name of the actors' cluster: runs of one cluster use the same actors, one run after
        another."""
        return self.resources.cluster or self.run

    @property
    def ref_update_interval(self) -> int | None:
        """Iterations between two refreshes of the reference; None: there is none, or it stays."""
        return self.reference.ref_update_interval if self.advantage.reference else None

    @property
    def uses_critic(self) -> bool:
        """PPO's estimator is the only one that asks for values."""
        return self.advantage.advantage_estimator == "ppo"

    @property
    def total_optimizer_steps(self) -> int:
        """Of the policy: iterations that train only the critic take none."""
        alone = self.critic.num_critic_only_steps if self.uses_critic else 0
        return max(self.num_rollout - alone, 0) * self.num_steps_per_rollout

    @property
    def critic_optimizer_steps(self) -> int:
        return self.num_rollout * self.num_steps_per_rollout

    @property
    def reads_text(self) -> bool:
        """True if the engines need the tokenizer, for the rollouts or for a held-out set's own
        function."""
        own = (dataset.custom_generate_function_path for dataset in self.evaluation.datasets)
        return self.rollout.needs_text or any(own)

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
