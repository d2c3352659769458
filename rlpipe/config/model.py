"""The model of a run, its processes and GPUs, and its inference engines."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from rlpipe.config.base import MOST_GPUS, MOST_PROCESSES, Config, Name, Tuning
from rlpipe.config.train import SyncConfig
from rlpipe.errors import ConfigError

LOOPBACK = ("127.0.0.1", "localhost", "::1")


class HuggingFaceModel(Config):
    """A Hugging Face model: config.json, safetensors, tokenizer."""

    type: Literal["huggingface"]
    hf_checkpoint: str = Tuning(...)
    """Model directory, or the name of a model on the Hugging Face Hub: `org/name` or
    `org/name@revision`. Engines and trainer read their architecture, tokenizer and first weights
    from it. The run's records depend on the content of the directory, not on its path.

    A model of the Hub is downloaded into the cache of `huggingface_hub` on each node that needs it;
    HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE apply. The stored configuration has the commit
    of its files, and later starts of the run use the same commit."""
    megatron_checkpoint: str | None = Tuning(None)
    """Megatron checkpoint with the first weights: a folder such as `iter_0000100`, or its parent
    with `latest_checkpointed_iteration.txt`; formats torch_dist and torch, any layout. It is
    converted once, into `{home}/models`. Architecture and tokenizer come from `hf_checkpoint`.
    None: `hf_checkpoint` has the weights, too."""
    megatron_checkpoint_step: int | None = Tuning(None)
    """Iteration to take if `megatron_checkpoint` is such a parent; None: the newest."""
    megatron_optimizer: bool = False
    """Continue with the optimizer state of `megatron_checkpoint` and its position in the learning
    rate schedule, not only with its weights. It is converted once, into `{home}/models`. The format
    is torch_dist, and model.dtype is that of its weights. Iterations count from 0 again. A critic
    continues with `critic.megatron_optimizer`."""
    trust_remote_code: bool = False
    """Run the Python code that comes with the directory. Set true only for code that you trust."""

    @model_validator(mode="after")
    def _optimizer_has_a_checkpoint(self):
        if self.megatron_optimizer and self.megatron_checkpoint is None:
            raise ValueError("megatron_optimizer needs megatron_checkpoint, which has its state")
        return self


class MadeModel(Config):
    """A model directory that a function writes on first use. It is kept under `{home}/models`."""

    type: Literal["made"]
    maker: str
    """`path/to/file.py:function` or `module.function`. Called as `function(directory,
    **arguments)`, with the run's `seed` if the function has that parameter. An attribute `check` of
    the function is called without arguments before anything starts: it raises an error if, for
    example, a package is missing."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """JSON-able keyword arguments of the function."""


class BranchModel(Config):
    """A commit of another branch of the same store.

    `model.start_from` takes only its weights (a warm start); optimizer state starts fresh.
    `fork_from` takes its optimizer state and data cursor too.
    """

    branch: Name
    """Name of the branch, which is the name of its run."""
    iteration: int | None = Field(default=None, ge=0)
    """Iteration of the commit to start from; None: the newest commit."""


ModelSource = Annotated[HuggingFaceModel | MadeModel, Field(discriminator="type")]


class ModelConfig(Config):
    """Architecture, tokenizer and first weights."""

    source: ModelSource
    """Source of the model directory."""
    start_from: BranchModel | None = None
    """Take the first weights from another branch. The architecture still comes from `source`.
    None: weights come from `source` too."""
    adapter: str | None = None
    """Directory of PEFT with the first adapters of `train.lora`: adapter_config.json and
    adapter_model.safetensors. The run's records depend on its content. The first reference has
    these adapters too. None: adapters that change nothing."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype of parameters and activations in trainer and engines, also after a warm start. Without
    CUDA, float32 is the tested choice. Engines on GPUs refuse float32."""


def _address(value: str) -> str:
    """Return `host:port` as a URL. Raises: ConfigError."""
    url = urlsplit(value if "://" in value else f"http://{value}")
    if (
        url.scheme not in ("http", "https")
        or not url.hostname
        or url.port is None
        or url.path.rstrip("/")
    ):
        raise ConfigError("not an address", found=value, expected="http://host:port or host:port")
    return f"{url.scheme}://{url.netloc}"


Address = Annotated[str, AfterValidator(_address)]
"""`http://host:port`, or `host:port` for the same."""


class ResourcesConfig(Config):
    """Processes and GPUs. Names are slime's. Without CUDA a "GPU" is a CPU process."""

    actor_num_nodes: int = Tuning(default=1, ge=1, le=MOST_GPUS)
    """Nodes of the trainer."""
    actor_num_gpus_per_node: int = Tuning(default=1, ge=1, le=MOST_GPUS)
    """Trainer ranks on each of these nodes."""
    critic_num_nodes: int = Tuning(default=1, ge=1, le=MOST_GPUS)
    """Nodes of the critic's own ranks, if the critic has any."""
    critic_num_gpus_per_node: int = Tuning(default=0, ge=0, le=MOST_GPUS)
    """With `advantage.advantage_estimator: ppo`: ranks on each of these nodes that hold only the
    critic, on separate GPUs. The critic then scores and trains while the policy does. 0: the
    policy's ranks hold the critic too."""
    rollout_num_gpus: int = Tuning(default=1, ge=1, le=MOST_GPUS)
    """GPUs of all inference engines together. If the key is not set, `colocate: true` makes it the
    number of trainer ranks. So does `colocate: auto` on shared GPUs if the key is 1."""
    rollout_num_gpus_per_engine: int = Tuning(default=1, ge=1, le=MOST_GPUS)
    """GPUs of one engine (its tensor parallel size). An engine of more than num_gpus_per_node GPUs
    spans nodes: each node runs one server process, and the first process answers requests. If one
    of these processes ends, all of them are replaced."""
    num_gpus_per_node: int = Tuning(default=8, ge=1, le=MOST_GPUS)
    """Most GPUs of one engine on one node. A larger engine uses this number on each of several
    nodes. Set it if your nodes do not have 8 GPUs."""
    trainer_labels: dict[str, str] = Tuning(default_factory=dict)
    """Labels of the Ray nodes for trainer ranks and for the processes without a GPU, such as
    `{ray.io/market-type: on-demand}` (`ray start --labels`). `{}`: any node. Values may be
    conditions of Ray, such as `in(h100,h200)` or `!spot`."""
    engine_labels: dict[str, str] = Tuning(default_factory=dict)
    """The same for engines that the run starts, such as `{ray.io/market-type: spot}`. If a node
    vanishes, its engines wait for room on another such node, and the run continues with the rest.
    On shared GPUs engines are where the trainer is."""
    external_engines: tuple[Address, ...] = Tuning(())
    """Addresses of SGLang servers (0.5.15 or later) that others start and end. The run then starts
    no engines and does not use rollout_num_gpus. `[]`: the run starts its own engines.

    The run checks each server before it pushes weights, and again after an interruption. Required
    are the run's architecture, dtype and quantization, tp_size = rollout_num_gpus_per_engine,
    dp_size 1, pp_size 1 and no disaggregation. Model sizes are compared if the server's model
    directory is readable here. The run's needs for tokenizer, routed experts and deterministic
    inference are checked too. All weights of a server are replaced, so it must serve this run
    alone; this is not checked. A server that does not answer is left out until it answers. A
    server that hangs or missed a push is left out, and never ended. A run begins if at least one
    server is available.

    Only plain addresses are supported: no API keys, no path after the port. engine.sglang and
    colocate are refused, because the servers have their arguments and GPUs already. Servers on
    other machines get weights with sync.transport distributed, or with disk or delta if they share
    a directory; not with tensor. An evaluation in a separate flow run starts its own engines
    instead."""
    colocate: bool | Literal["auto"] = Tuning("auto")
    """Trainer and engines alternate on the same GPUs. `auto`: only if the Ray cluster has too few
    GPUs for both, and nothing below forbids it; the start of a run says so. Without GPUs they are
    separate processes.

    Engine j uses the GPUs of the ranks from j × rollout_num_gpus_per_engine. GPUs beyond the
    trainer's belong to engines alone. Where memory does not suffice for both, the idle side moves
    its memory off the GPU. Not with async_buffer_size, nor with sync.in_flight: in_place, nor with
    sync.transport: distributed. CUDA and NCCL keep some memory, so
    engine.sglang.mem_fraction_static is 0.8 unless given. If the trainer stays in memory, the
    engines' cache is limited (`max_total_tokens`) to what remains."""
    offload_train: bool | None = Tuning(None)
    """With `colocate`: move the trainer's weights and optimizer state to pinned CPU memory while
    engines sample. None: only if the sizes of model, layout, requests and GPU require it
    (`rlpipe.actors.gpu_memory`); the start of a run says so."""
    offload_rollout: bool | None = Tuning(None)
    """With `colocate`: engines release weights, cache and CUDA graphs while the trainer works.
    None: decided as offload_train. If both offload keys are false, everything must fit on the GPU
    at once."""
    cluster: Name | None = Tuning(None)
    """Name of the set of actors. Runs with the same cluster name use its actors one run after
    another. None: the run's own name."""
    ray_address: str | None = Tuning(None)
    """Ray cluster to join. None: the cluster of RAY_ADDRESS; without it, a local Ray is started.
    The local Ray ends with the flow and accepts only processes of this machine that have its
    token."""
    exclusive_gpus: bool = Tuning(True)
    """With a local Ray: no other run of this user on this machine uses the same GPUs. A second run
    waits for `start_timeout_s`, then fails with the name of the first. False: both runs use the
    GPUs at once, and you must make sure that memory suffices."""
    keep_idle_s: float | None = Tuning(default=3600.0, gt=0)
    """On a joined Ray cluster: seconds that actors without a driver keep their GPUs for a Retry or
    for the next run. This concerns failed runs, and finished runs that set `cluster`. A later Retry
    starts new actors from the store. None: until the next run or a Cancel."""
    threads_per_process: int = Tuning(default=1, ge=1, le=MOST_PROCESSES)
    """CPU threads of each trainer rank and engine on a machine without CUDA."""
    stop_grace_s: float = Tuning(default=20.0, ge=0)
    """Seconds after SIGTERM that a running iteration may take to finish. Then it is abandoned. A
    checkpoint follows in both cases."""
    start_timeout_s: float = Tuning(default=600.0, gt=0)
    """Deadline for the start of actors and servers."""
    import_timeout_s: float = Tuning(default=120.0, gt=0)
    """Deadline for the import of one user file (a reward function, a hook) when the run starts."""

    @property
    def trainer_ranks(self) -> int:
        """Ranks that hold the policy."""
        return self.actor_num_nodes * self.actor_num_gpus_per_node

    @property
    def critic_ranks(self) -> int:
        """Ranks that hold only the critic; 0 if the policy's ranks hold it."""
        return self.critic_num_nodes * self.critic_num_gpus_per_node

    @property
    def num_engines(self) -> int:
        return (
            len(self.external_engines) or self.rollout_num_gpus // self.rollout_num_gpus_per_engine
        )

    @property
    def engine_nodes(self) -> int:
        """Nodes of one engine that the run starts; 1 for external engines."""
        if self.external_engines:
            return 1
        return -(-self.rollout_num_gpus_per_engine // self.num_gpus_per_node)

    @property
    def engine_gpus_per_node(self) -> int:
        """GPUs of one engine on each of its nodes."""
        return self.rollout_num_gpus_per_engine // self.engine_nodes

    @property
    def shares_gpus(self) -> bool:
        """True if trainer and engines use the same GPUs.

        False for `auto`, which `rlpipe.actors.ray.layout.placed` decides when actors start.
        """
        return self.colocate is True

    @property
    def resizable(self) -> bool:
        """True if engines may join and leave while the run continues."""
        return not (self.shares_gpus or self.external_engines)

    @property
    def trainer_sleeps(self) -> bool:
        """True if the trainer releases GPU memory while engines sample."""
        return self.shares_gpus and self.offload_train is not False

    @property
    def engines_sleep(self) -> bool:
        """True if engines release GPU memory while the trainer works."""
        return self.shares_gpus and self.offload_rollout is not False

    @model_validator(mode="before")
    @classmethod
    def _colocated_engines_use_all_trainer_gpus(cls, values: Any) -> Any:
        if (
            not isinstance(values, dict)
            or values.get("colocate") is not True
            or "rollout_num_gpus" in values
        ):
            return values
        nodes = values.get("actor_num_nodes", 1)
        gpus_per_node = values.get("actor_num_gpus_per_node", 1)
        if not (isinstance(nodes, int) and isinstance(gpus_per_node, int)):
            return values  # the field validation reports the wrong type
        return {**values, "rollout_num_gpus": nodes * gpus_per_node}

    @model_validator(mode="after")
    def _critic_nodes_have_ranks(self):
        if self.critic_num_nodes > 1 and not self.critic_num_gpus_per_node:
            raise ValueError(
                f"critic_num_nodes: {self.critic_num_nodes} nodes without ranks; set "
                "critic_num_gpus_per_node, or remove critic_num_nodes"
            )
        return self

    @model_validator(mode="after")
    def _engines_fit_gpus(self):
        if self.external_engines and self.shares_gpus:
            raise ValueError(
                "colocate: external engines do not use GPUs of the run; remove one of the two"
            )
        if len(set(self.external_engines)) < len(self.external_engines):
            raise ValueError("external_engines: the list has the same address twice")
        if not self.external_engines and self.rollout_num_gpus % self.rollout_num_gpus_per_engine:
            raise ValueError(
                f"rollout_num_gpus ({self.rollout_num_gpus}) must be a multiple of "
                f"rollout_num_gpus_per_engine ({self.rollout_num_gpus_per_engine})"
            )
        if self.engine_nodes > 1 and self.rollout_num_gpus_per_engine % self.num_gpus_per_node:
            raise ValueError(
                f"rollout_num_gpus_per_engine ({self.rollout_num_gpus_per_engine}) is larger than "
                f"one node, so it must be a multiple of num_gpus_per_node "
                f"({self.num_gpus_per_node}); set num_gpus_per_node to the GPUs of your nodes"
            )
        if self.engine_labels and (self.shares_gpus or self.external_engines):
            raise ValueError(
                "engine_labels: the run places no engines of its own, as they are external or on "
                "the trainer's GPUs; remove the key, or use trainer_labels"
            )
        if self.shares_gpus:
            self._check_colocated_engines()
        offloaded = [name for name in ("offload_train", "offload_rollout") if getattr(self, name)]
        if offloaded and self.colocate is False:
            raise ValueError(
                f"{' and '.join(offloaded)}: trainer and engines use separate GPUs; remove it, or "
                "set colocate"
            )
        return self

    def _check_colocated_engines(self) -> None:
        if self.actor_num_gpus_per_node % self.engine_gpus_per_node:
            raise ValueError(
                f"colocate: one engine has {self.engine_gpus_per_node} GPUs on a node "
                "(rollout_num_gpus_per_engine, num_gpus_per_node), which would be GPUs of two "
                f"nodes of actor_num_gpus_per_node = {self.actor_num_gpus_per_node}; use a divisor "
                "of actor_num_gpus_per_node"
            )
        if self.trainer_ranks % self.rollout_num_gpus_per_engine:
            raise ValueError(
                f"colocate: an engine of rollout_num_gpus_per_engine = "
                f"{self.rollout_num_gpus_per_engine} GPUs would share only some GPUs with the "
                f"trainer's {self.trainer_ranks} ranks; use a divisor of the number of ranks"
            )


class EngineConfig(Config):
    """The SGLang servers and their router."""

    sglang: dict[str, Any] = Tuning(default_factory=dict)
    """SGLang server arguments by their own names (`mem_fraction_static: 0.8`), passed on unchanged.

    `context_length` also bounds prompt + response of a sample. A value above the model's
    max_position_embeddings is an error. SGLang 0.5.21 refuses it too, unless
    SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN is set, and the trainer reads config.json."""
    router: dict[str, Any] = Tuning(default_factory=dict)
    """sglang-router arguments by their own names (`policy: cache_aware`)."""
    router_url: Address | None = Tuning(None)
    """Address of an sglang-router that others start and end. It serves external engines or the
    run's own. None: the run starts a router.

    The run registers its engines at the router (`/workers`) and removes an engine while its weights
    are unknown. The router must serve this run alone: a run does not begin while the router routes
    to a living engine of others. A foreign engine that appears later is removed. Only plain
    addresses are supported, no API keys. engine.router is refused, because the router has its
    arguments already. One argument matters: a paused engine must answer the health check. Use
    `--health-check-endpoint /model_info`; with the default `/health` the router removes engines
    during pushes. If the router runs on another machine, set engine.host so that it can reach the
    engines. With train.use_rollout_routing_replay, generation requests bypass the router and go
    directly to the engines that it lists."""
    server_concurrency: int = Tuning(default=512, ge=1)
    """Requests in flight per engine. An engine on GPUs of 60 GiB or more builds CUDA graphs of
    decoding up to this number, or to the number of samples that a run has in flight
    (`cuda_graph_bs_decode`, unless `engine.sglang` sets it)."""
    request_timeout_s: float = Tuning(default=600.0, gt=0)
    """Deadline of one generation request."""
    rollout_health_check_interval: float = Tuning(default=30.0, gt=0)
    """Seconds between two generation tests of each engine during a rollout. The end of an engine's
    process is detected at once."""
    rollout_health_check_timeout: float = Tuning(default=60.0, gt=0)
    """Replace an engine that has not generated one token in this number of seconds."""
    host: str | None = Tuning(None)
    """Address that every server and the router bind to and are reached at. None: 127.0.0.1 if the
    Ray cluster is one machine, else the address of each process's machine."""
    quantization: Literal["fp8"] | None = Field(default=None)
    """`fp8`: engines sample with FP8 weights (blocks of 128 × 128) that every push quantizes. None:
    engines sample with the trained weights. CUDA only. The trainer and its log-probs stay in
    model.dtype; importance corrections (`train.loss.use_tis`) compensate for the difference."""


def external_conflict(
    resources: ResourcesConfig, engine: EngineConfig, sync: SyncConfig, store_root: str | None
) -> str | None:
    """Describe why external engines or an external router cannot be used; None if they can.

    `rlpipe.engines.sglang.external` checks at run time that they serve the right model.
    """
    if engine.router_url is not None and engine.router:
        return (
            f"engine.router = {engine.router} is for a router that the run starts, but "
            "engine.router_url names an external router; remove one of them"
        )
    if not resources.external_engines:
        return None
    if engine.sglang:
        return (
            f"engine.sglang = {engine.sglang} is for engines that the run starts, not for "
            "resources.external_engines; remove one of them"
        )
    remote = [url for url in resources.external_engines if urlsplit(url).hostname not in LOOPBACK]
    if not remote:
        return None
    if sync.transport == "tensor":
        return (
            f"sync.transport: tensor uses memory of this machine, but engines are at "
            f"{', '.join(remote)}; use distributed, or disk with a directory that their machines "
            "share"
        )
    directory = sync.update_weight_disk_dir or store_root or ""
    object_store = "://" in directory.removeprefix("file://")
    copied = sync.transport == "delta" or (sync.transport == "disk" and object_store)
    if copied and sync.update_weight_local_checkpoint_dir is None:
        return (
            f"sync.transport: {sync.transport} copies files to the engines' machines, but the run "
            f"has no process there for {', '.join(remote)}; name a directory that these machines "
            "share in sync.update_weight_local_checkpoint_dir"
        )
    return None
