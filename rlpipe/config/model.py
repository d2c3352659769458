"""Which model, where its weights start, and how many processes hold it."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from rlpipe.config.base import MOST_GPUS, MOST_PROCESSES, Config, Name, Tuning


class HuggingFaceModel(Config):
    """A Hugging Face model directory: config.json, safetensors, tokenizer."""

    type: Literal["huggingface"]
    hf_checkpoint: str = Tuning(...)
    """The directory. Gives the engines and the trainer their architecture, tokenizer and first
    weights. Where it lies does not matter to a run's records, what is in it does."""
    trust_remote_code: bool = False
    """Run Python code that the directory brings along. Off unless you trust it."""


class MadeModel(Config):
    """A model directory made by a function the first time it is needed, then kept under
    `{home}/models`."""

    type: Literal["made"]
    maker: str
    """`path/to/file.py:function` or `module.function`, called as `function(directory,
    **arguments)`, with the run's `seed` if it takes one."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """JSON-able keyword arguments of the function."""


class BranchModel(Config):
    """The weights at the end of another branch of the same store (a warm start); optimizer state
    starts fresh."""

    branch: Name
    """Name of the branch, that is of the run."""
    iteration: int | None = Field(default=None, ge=0)
    """Which of its commits; None is the newest."""


ModelSource = Annotated[HuggingFaceModel | MadeModel, Field(discriminator="type")]


class ModelConfig(Config):
    """Architecture, tokenizer and first weights."""

    source: ModelSource
    """Where the model directory comes from."""
    start_from: BranchModel | None = None
    """Take the first weights from another branch instead of from `source` (which still gives the
    architecture)."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of the parameters and activations in trainer and engines, a warm start's too. Without CUDA,
    float32 is the tested choice; engines on GPUs refuse it."""


def _address(value: str) -> str:
    """`host:port` as a URL. Raises: ValueError."""
    url = urlsplit(value if "://" in value else f"http://{value}")
    if (
        url.scheme not in ("http", "https")
        or not url.hostname
        or url.port is None
        or url.path.rstrip("/")
    ):
        raise ValueError(f"expected http://host:port or host:port, found {value!r}")
    return f"{url.scheme}://{url.netloc}"


Address = Annotated[str, AfterValidator(_address)]
"""`http://host:port`; `host:port` is taken too."""


class ResourcesConfig(Config):
    """Processes and GPUs. Names are slime's; on a machine without CUDA a "GPU" is a CPU process."""

    actor_num_nodes: int = Tuning(default=1, ge=1, le=MOST_GPUS)
    """Nodes the trainer spans."""
    actor_num_gpus_per_node: int = Tuning(default=1, ge=1, le=MOST_GPUS)
    """Trainer ranks on each of those nodes."""
    critic_num_nodes: int = Tuning(default=1, ge=1, le=MOST_GPUS)
    """Nodes that the critic's own ranks span, if it has any."""
    critic_num_gpus_per_node: int = Tuning(default=0, ge=0, le=MOST_GPUS)
    """With `advantage.advantage_estimator: ppo`: ranks of the critic's own on each of those nodes,
    on GPUs of their own, where it scores and trains while the policy does so in its ranks. 0: it
    lives in the policy's ranks."""
    rollout_num_gpus: int = Tuning(default=1, ge=1, le=MOST_GPUS)
    """GPUs of all inference engines together. With `colocate`, if it is not given, as many as the
    trainer has."""
    rollout_num_gpus_per_engine: int = Tuning(default=1, ge=1, le=MOST_GPUS)
    """GPUs of one engine (its tensor parallel size). One of more than num_gpus_per_node spans
    nodes: a server process on each of them, of which the first answers requests. They live and die
    together."""
    num_gpus_per_node: int = Tuning(default=8, ge=1, le=MOST_GPUS)
    """Most GPUs that an engine has on one node; one of more has so many on each of several. Set it
    where nodes have not 8."""
    external_engines: tuple[Address, ...] = Tuning(())
    """SGLang servers (0.5.15 or later) that others start and end, by address; the run starts none
    then, and does not use rollout_num_gpus. (): the run's own engines.

    Each is asked what it serves before it gets weights, and again when it has been away:
    architecture, dtype and quantization of the run, tp_size = rollout_num_gpus_per_engine, dp_size
    and pp_size 1, no disaggregation; the model's sizes too, where its directory can be seen from
    here; and what the run needs of the tokenizer, of routed experts, of deterministic inference.
    All its weights are replaced, so it must serve this run alone, which is not checked. One that
    does not answer is left out, and taken in once it does; one that hangs, or got no weights, is
    left out, never ended. A run begins if one of them is there.

    Supported are plain addresses, no API keys and no path behind the port. engine.sglang is refused
    (they have their arguments already), and so is colocate. Elsewhere than on this machine, weights
    get there with sync.transport distributed; with disk or delta if a directory is shared with
    their machines; not with tensor. An evaluation by a flow run of its own uses engines of its own
    instead."""
    colocate: bool = Tuning(False)
    """Trainer and engines lie on the same GPUs and use them in turns: engine j on those of the
    ranks from j × rollout_num_gpus_per_engine on; GPUs beyond the trainer's are the engines' alone.
    What one of them holds is out of the way while the other works. Not with async_buffer_size, nor
    with sync.in_flight: in_place. Some of a GPU is left to what stays in any case (CUDA, NCCL):
    engine.sglang.mem_fraction_static is 0.8 unless it is given, and 0.4 if one of the two stays."""
    offload_train: bool | None = Tuning(None)
    """With `colocate`: while engines sample, the trainer's weights and optimizer state lie in
    pinned CPU memory. None: yes."""
    offload_rollout: bool | None = Tuning(None)
    """With `colocate`: while the trainer works, engines keep neither weights nor cache nor CUDA
    graphs. None: yes. With neither of the two, all of it has to fit on the GPU at once."""
    cluster: Name | None = Tuning(None)
    """Name under which the actors live; runs of the same name share them one after another. None is
    the run's own name."""
    ray_address: str | None = Tuning(None)
    """Ray cluster to join; None: that of RAY_ADDRESS, else a local one is started, which ends with
    the flow and serves only who has its token, on this machine."""
    exclusive_gpus: bool = Tuning(True)
    """On a Ray of its own: no other run of this user on this machine uses the GPUs that it sees.
    Who comes second waits for `start_timeout_s`, then fails with the name of the first. With
    `false` both use them at once: see that the memory suffices."""
    keep_idle_s: float | None = Tuning(default=3600.0, gt=0)
    """On a Ray cluster that was joined: how long the actors of a run that nobody drives any more
    (it failed; or it has ended, and `cluster` names them) keep their places for a Retry or the next
    run. Later both start others, from the store. None: until there is one, or a Cancel."""
    threads_per_process: int = Tuning(default=1, ge=1, le=MOST_PROCESSES)
    """CPU threads of each trainer rank and engine on a machine without CUDA."""
    stop_grace_s: float = Tuning(default=20.0, ge=0)
    """After SIGTERM, how long a running iteration may take to finish before it is abandoned; a
    checkpoint follows."""
    start_timeout_s: float = Tuning(default=600.0, gt=0)
    """How long actors and servers may take to come up."""
    import_timeout_s: float = Tuning(default=120.0, gt=0)
    """How long one file of yours (a reward function, a hook) may take to be imported when the run
    starts."""

    @property
    def trainer_ranks(self) -> int:
        return self.actor_num_nodes * self.actor_num_gpus_per_node

    @property
    def critic_ranks(self) -> int:
        """Those that the critic has to itself; 0: it lives in the policy's."""
        return self.critic_num_nodes * self.critic_num_gpus_per_node

    @property
    def num_engines(self) -> int:
        return (
            len(self.external_engines) or self.rollout_num_gpus // self.rollout_num_gpus_per_engine
        )

    @property
    def engine_nodes(self) -> int:
        """Nodes that one engine spans, as far as the run starts it."""
        return (
            1
            if self.external_engines
            else -(-self.rollout_num_gpus_per_engine // self.num_gpus_per_node)
        )

    @property
    def engine_gpus_per_node(self) -> int:
        """GPUs of one engine on each of its nodes."""
        return self.rollout_num_gpus_per_engine // self.engine_nodes

    @property
    def trainer_sleeps(self) -> bool:
        """Does the trainer give up GPU memory to engines?"""
        return self.colocate and self.offload_train is not False

    @property
    def engines_sleep(self) -> bool:
        """Do engines give up GPU memory to the trainer?"""
        return self.colocate and self.offload_rollout is not False

    @model_validator(mode="before")
    @classmethod
    def _as_many_engines_as_ranks(cls, values: Any) -> Any:
        if (
            not isinstance(values, dict)
            or values.get("colocate") is not True
            or "rollout_num_gpus" in values
        ):
            return values
        nodes, each = (
            values.get(name, 1) for name in ("actor_num_nodes", "actor_num_gpus_per_node")
        )
        known = isinstance(nodes, int) and isinstance(each, int)
        return {**values, "rollout_num_gpus": nodes * each} if known else values

    @model_validator(mode="after")
    def _critic_s_nodes_have_ranks(self):
        if self.critic_num_nodes > 1 and not self.critic_num_gpus_per_node:
            raise ValueError(
                f"critic_num_nodes: {self.critic_num_nodes} nodes of no rank; give critic_num_gpus_per_node, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _engines_fill_their_gpus(self):
        if self.external_engines and self.colocate:
            raise ValueError(
                "colocate: external engines are on no GPUs of the run; leave one of the two out"
            )
        if len(set(self.external_engines)) < len(self.external_engines):
            raise ValueError("external_engines: an address stands there twice")
        if not self.external_engines and self.rollout_num_gpus % self.rollout_num_gpus_per_engine:
            raise ValueError(
                f"rollout_num_gpus ({self.rollout_num_gpus}) must be a multiple of "
                f"rollout_num_gpus_per_engine ({self.rollout_num_gpus_per_engine})"
            )
        if self.engine_nodes > 1 and self.rollout_num_gpus_per_engine % self.num_gpus_per_node:
            raise ValueError(
                f"rollout_num_gpus_per_engine ({self.rollout_num_gpus_per_engine}), which is more than a node has, must be a "
                f"multiple of num_gpus_per_node ({self.num_gpus_per_node}); set that to what your nodes have"
            )
        if self.colocate and self.actor_num_gpus_per_node % self.engine_gpus_per_node:
            raise ValueError(
                f"colocate: the {self.engine_gpus_per_node} GPUs that an engine has on one node (rollout_num_gpus_per_engine, "
                f"num_gpus_per_node) would lie on two nodes of actor_num_gpus_per_node = {self.actor_num_gpus_per_node}; take a "
                f"divisor of it"
            )
        if self.colocate and self.trainer_ranks % self.rollout_num_gpus_per_engine:
            raise ValueError(
                f"colocate: an engine of rollout_num_gpus_per_engine = {self.rollout_num_gpus_per_engine} GPUs would lie on some "
                f"of the trainer's {self.trainer_ranks} GPUs and on others beside; take a divisor of them"
            )
        moved = [name for name in ("offload_train", "offload_rollout") if getattr(self, name)]
        if moved and not self.colocate:
            raise ValueError(
                f"{' and '.join(moved)}: trainer and engines have GPUs of their own; leave it out, or set colocate"
            )
        return self


class EngineConfig(Config):
    """The SGLang servers and their router."""

    sglang: dict[str, Any] = Tuning(default_factory=dict)
    """SGLang server arguments by their own names (`mem_fraction_static: 0.8`), passed through
    untouched.

    `context_length` also bounds prompt + response of a sample. Above the model's
    max_position_embeddings it is an error: SGLang 0.5.21 refuses it too, unless
    SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN is set, and the trainer reads config.json."""
    router: dict[str, Any] = Tuning(default_factory=dict)
    """sglang-router arguments by their own names (`policy: cache_aware`)."""
    router_url: Address | None = Tuning(None)
    """An sglang-router that others start and end, by address, for external engines or the run's
    own. None: the run starts one.

    The run registers its engines there (`/workers`) and takes them off while they have no known
    weights. It must serve this run alone: a run does not begin while it routes to a living engine
    of others, and takes off any other that it finds there later. Supported are plain addresses, no
    API keys. engine.router is refused: it has its arguments already, of which one matters. Its
    health check must be answered by a paused engine (`--health-check-endpoint /model_info`, not the
    default `/health`), or it takes engines off during pushes. On another machine than the engines
    it has to reach them: set engine.host. With train.use_rollout_routing_replay generation requests
    go past it, to the engines that it lists."""
    server_concurrency: int = Tuning(default=512, ge=1)
    """Requests in flight per engine. On GPUs of 60 GiB and more it has CUDA graphs of decoding for
    as many (`cuda_graph_max_bs_decode`, if `engine.sglang` does not give it)."""
    request_timeout_s: float = Tuning(default=600.0, gt=0)
    """Deadline of one generation request."""
    rollout_health_check_interval: float = Tuning(default=30.0, gt=0)
    """Seconds between two tests, during a rollout, whether each engine still generates. A dead
    process is seen at once."""
    rollout_health_check_timeout: float = Tuning(default=60.0, gt=0)
    """An engine that has not generated one token in so many seconds is replaced."""
    host: str | None = Tuning(None)
    """Address that every server and the router bind to, and are reached at. None: 127.0.0.1 while
    the Ray cluster is one machine; else the address of the machine each of them runs on."""
    quantization: Literal["fp8"] | None = Field(default=None)
    """`fp8`: engines sample with weights in FP8 (blocks of 128 × 128), made of the trained ones in
    every push; None: with the trained ones. CUDA only. The trainer and its log-probs stay in
    model.dtype: corrections by importance (`train.loss.use_tis`) are for the difference."""
