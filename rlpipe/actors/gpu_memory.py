"""Decide the memory of GPUs from the sizes of a run: residency, KV cache and CUDA graphs.

    fitted(config, model_dir, gpu_bytes) → configuration of the actors, and a line about it

On GPUs that trainer and engines share, the idle side keeps its memory if both fit:

| trainer | engines | largest use of a GPU                                                       |
|---------|---------|----------------------------------------------------------------------------|
| stays   | stay    | state + activations + engine                                               |
| stays   | sleep   | state + the larger one of activations and engine                           |
| sleeps  | sleep   | the larger one of state + activations and engine                           |

`state`: weights, gradients and optimizer. `engine`: weights, KV cache, and `ENGINE_WORK_BYTES`. The
first row that fits is taken, because every move costs time: 1 s of 7.3 s an iteration (0.6B, one
H200). A row fits if its KV cache is as large as the engine can use: all requests in flight at full
length, or as much as it has without a trainer. A trainer that sleeps while engines stay needs as
much memory as the first row.

The decision depends on the configuration, the files of the weights and the GPU's total memory. So
it is the same for a run and its resume on the same kind of machine. All processes of one epoch
decide from the same GPUs (`cluster_gpus`). Keys of the configuration have
precedence: `resources.offload_train`, `resources.offload_rollout`, `engine.sglang` and
`train.max_tokens_per_gpu`.

Micro-batches are as large as fits without moving more memory, because a GPU waits for the launches
of a small one: an optimizer step of 0.6B over 164k tokens took 1.89 s with micro-batches of 16k
tokens, 1.56 s with 32k and 1.49 s with 64k (H200, 2026-11-29).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open

from rlpipe.config.run import RunConfig
from rlpipe.config.train import DEFAULT_MICRO_BATCH_TOKENS

GIB = 1024**3
RESERVED_BYTES = 3 * GIB
"""CUDA contexts, libraries and NCCL of trainer and engine, and fragmentation."""
ENGINE_WORK_BYTES = 4 * GIB
"""CUDA graphs of an engine, and activations of its prefill."""
TRAINER_WORK_BYTES = 2 * GIB
"""Logits of a chunk of tokens, and buckets of a push."""
ACTIVATION_MARGIN = 1.25
"""Activations are estimated from the layers' sizes; the estimate is multiplied by this.

| model, H200, 2026-11-20 | measured a token and layer | estimate |
|---|---|---|
| Qwen3-0.6B, micro-batches of 16k tokens | 36 kB | 37 kB |
| Qwen3-4B, micro-batches of 16k tokens | 83 kB | 94 kB |
"""
MICRO_BATCH_TOKENS = (32768, 16384, DEFAULT_MICRO_BATCH_TOKENS, 4096, 2048)
"""Tokens of micro-batches to try. Those below the default are for GPUs too small for it."""
CACHE_MARGIN = 1.25
"""Cache of an engine that stays, relative to the requests in flight: pages and prompts in reuse."""
ALONE_FRACTION = 0.8
"""Share of the GPU for weights and cache of an engine that does not share its memory."""
RESIDENT_FRACTION = 0.9
"""`mem_fraction_static` where `max_total_tokens` limits the cache."""
UNKNOWN_PROMPT_TOKENS = 2048
"""Assumed longest prompt, where the configuration has no limit."""
GRAPH_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 224, 256, 320, 384, 448)
"""Batches with a CUDA graph of decoding, up to the requests of an engine. SGLang captures one for
every 8 (16 above 256), which took 67 s of a start for 512 requests."""
LARGE_GPU_BYTES = 60 * GIB
"""SGLang captures fewer graphs on GPUs with less memory than this; its choice stays there."""
IMBALANCE = 1.5
"""Most requests of an engine, relative to an equal distribution over all engines."""
GRAPH_KEYS = (
    "cuda_graph_bs_decode",
    "cuda_graph_max_bs_decode",
    "cuda_graph_config",
    "cuda_graph_backend_decode",
    "disable_cuda_graph",
    "speculative_algorithm",
)


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters in the files of the weights."""

    dense: int
    experts: int
    embeddings: int
    sides: int = 0
    """Rows and columns of all matrices of dense layers: times the rank, the most that adapters can
    have."""

    @property
    def total(self) -> int:
        return self.dense + self.experts + self.embeddings


@dataclass(frozen=True)
class Sizes:
    """Bytes on one GPU of trainer and engines."""

    state: int
    """The trainer's weights, gradients and optimizer."""
    activations: int
    engine_weights: int
    cache_token: int
    """KV cache of one token."""
    wanted_tokens: int
    """Tokens of all requests in flight at full length."""


class Residency(NamedTuple):
    """The sides that keep their memory, and the engine's cache in tokens."""

    trainer_stays: bool
    engines_stay: bool
    cache_tokens: int


class Fitted(NamedTuple):
    """The configuration with which actors are started."""

    config: RunConfig
    line: str | None
    """The sizes and the decision, for people; None if nothing was decided."""


def fitted(config: RunConfig, model_dir: str, gpu_bytes: int | None) -> Fitted:
    """Return the configuration of a run's actors. `gpu_bytes`: of the smallest GPU; None: no GPU.

    Without GPUs, and where sizes are unknown, it is the run's own.
    """
    if gpu_bytes is None:
        return Fitted(config, None)
    own_engines = config.needs_engines and not config.resources.external_engines
    if own_engines:
        config = _with_graph_sizes(config, gpu_bytes)
    model = json.loads((Path(model_dir) / "config.json").read_text())
    parameters = count_parameters(model_dir)
    config = with_micro_batches(config, model, parameters, gpu_bytes)
    tokens = f"micro-batches of {config.train.micro_batch_tokens} tokens"
    if not (own_engines and config.resources.shares_gpus):
        return Fitted(config, tokens)
    sizes = sizes_of(config, model, parameters)
    if sizes is None:
        return Fitted(config, tokens)
    choice = decide(sizes, gpu_bytes, config)
    line = f"{_line(sizes, gpu_bytes, choice)}; {tokens}"
    if choice is None:
        return Fitted(config, line)
    resources = config.resources.model_copy(
        update={
            "offload_train": not choice.trainer_stays,
            "offload_rollout": not choice.engines_stay,
        }
    )
    sglang = config.engine.sglang
    if choice.trainer_stays and "mem_fraction_static" not in sglang:
        cache = {"max_total_tokens": choice.cache_tokens, **sglang}
        config = _with_arguments(config, {**cache, "mem_fraction_static": RESIDENT_FRACTION})
    return Fitted(config.model_copy(update={"resources": resources}), line)


def with_micro_batches(
    config: RunConfig, model: Mapping[str, Any], parameters: Parameters | None, gpu_bytes: int
) -> RunConfig:
    """Return the configuration with the largest micro-batches that fit, if it gives no size.

    Not where memory was never measured (experts, images, a user's loss or model), where several
    micro-batches fill a pipeline, and where the run has to be the same on every GPU
    (`deterministic`).
    """
    train = config.train
    # A user's loss may read whole logits: 20 GB for 32k tokens of a vocabulary of 152k.
    is_own = train.loss.custom_loss_function_path or train.custom_model_provider_path
    unknown = "vision_config" in model or _text_model(model).get("num_experts_per_tok") or is_own
    is_pipeline = train.parallel.pipeline_model_parallel_size > 1
    given = train.max_tokens_per_gpu is not None or train.micro_batch_size is not None
    if given or unknown or is_pipeline or config.deterministic:
        return config

    def with_tokens(tokens: int) -> RunConfig:
        sized = train.model_copy(update={"max_tokens_per_gpu": tokens})
        return config.model_copy(update={"train": sized})

    def residency(tokens: int) -> Any:
        """Return what stays in memory; None if the trainer does not fit or sizes are unknown."""
        sizes = sizes_of(with_tokens(tokens), model, parameters)
        if sizes is None or _training_bytes_left(sizes, gpu_bytes) < 0:
            return None
        shares = config.resources.shares_gpus
        choice = decide(sizes, gpu_bytes, config) if shares else None
        return choice and choice[:2], shares

    small = (tokens for tokens in MICRO_BATCH_TOKENS if tokens <= DEFAULT_MICRO_BATCH_TOKENS)
    wanted = next(filter(None, map(residency, small)), None)
    fitting = (tokens for tokens in MICRO_BATCH_TOKENS if wanted and residency(tokens) == wanted)
    return with_tokens(next(fitting, DEFAULT_MICRO_BATCH_TOKENS))


def decide(sizes: Sizes, gpu_bytes: int, config: RunConfig) -> Residency | None:
    """Return the first row of the module's table that fits and that the configuration allows.

    The last row is taken without a check, because no other uses less. None if the configuration
    excludes all that fit.
    """
    resources = config.resources
    for trainer_stays, engines_stay in ((True, True), (True, False), (False, False)):
        allowed = resources.offload_train in (None, not trainer_stays) and (
            resources.offload_rollout in (None, not engines_stay)
        )
        cache = _cache_bytes(sizes, gpu_bytes, trainer_stays, engines_stay)
        needed = _needed_cache_bytes(sizes, gpu_bytes, config.engine.sglang)
        if allowed and (cache >= needed or not trainer_stays):
            wanted = math.ceil(sizes.wanted_tokens * CACHE_MARGIN)
            most = min(max(cache, 0), _cache_alone_bytes(sizes, gpu_bytes)) // sizes.cache_token
            tokens = min(wanted, most)
            return Residency(trainer_stays, engines_stay, tokens)
    return None


def _cache_bytes(sizes: Sizes, gpu_bytes: int, trainer_stays: bool, engines_stay: bool) -> int:
    """Return the bytes left for the KV cache; negative if the models alone do not fit."""
    usable = gpu_bytes - RESERVED_BYTES
    training = _training_bytes_left(sizes, gpu_bytes)
    engine = sizes.engine_weights + ENGINE_WORK_BYTES
    if trainer_stays and engines_stay:
        return training - engine
    if training < 0:
        return -1
    return usable - engine - (sizes.state if trainer_stays else 0)


def _training_bytes_left(sizes: Sizes, gpu_bytes: int) -> int:
    """Return the bytes left while the trainer works; negative if it does not fit."""
    used = sizes.state + sizes.activations + TRAINER_WORK_BYTES
    return gpu_bytes - RESERVED_BYTES - used


def _needed_cache_bytes(sizes: Sizes, gpu_bytes: int, sglang: Mapping[str, Any]) -> int:
    """Return the cache that an engine uses: as configured, else for all requests in flight."""
    if (tokens := sglang.get("max_total_tokens")) is not None:
        return int(tokens) * sizes.cache_token
    if (fraction := sglang.get("mem_fraction_static")) is not None:
        return int(float(fraction) * gpu_bytes) - sizes.engine_weights
    return min(sizes.wanted_tokens * sizes.cache_token, _cache_alone_bytes(sizes, gpu_bytes))


def _cache_alone_bytes(sizes: Sizes, gpu_bytes: int) -> int:
    """Return the cache of an engine whose GPU has no trainer in memory."""
    fixed = sizes.engine_weights + RESERVED_BYTES + ENGINE_WORK_BYTES
    return max(int(ALONE_FRACTION * gpu_bytes) - fixed, 0)


def sizes_of(
    config: RunConfig, model: Mapping[str, Any], parameters: Parameters | None
) -> Sizes | None:
    """Return the sizes on one shared GPU; None if they do not follow from the model's files.

    `model`: content of config.json. Unknown are mixed layers (sliding windows, linear attention),
    weights in other files than safetensors, and a teacher on the trainer's ranks.
    """
    cache_token = cache_bytes_per_token(model, config.resources.rollout_num_gpus_per_engine)
    layer = _activation_bytes_per_token(_text_model(model))
    on_ranks = config.advantage.use_opd and config.teacher.opd_type == "megatron"
    if parameters is None or cache_token is None or layer is None or on_ranks:
        return None
    longest = longest_sample(config, model)
    return Sizes(
        state=trainer_state_bytes(config, parameters),
        activations=_activations(config, _text_model(model), layer, longest),
        engine_weights=2 * parameters.total // config.resources.rollout_num_gpus_per_engine,
        cache_token=cache_token,
        wanted_tokens=_wanted_tokens(config, longest),
    )


def count_parameters(model_dir: str) -> Parameters | None:
    """Return the numbers of parameters in a directory's safetensors files; None without any."""
    counts = {"dense": 0, "experts": 0, "embeddings": 0, "sides": 0}
    files = sorted(Path(model_dir).glob("*.safetensors"))
    for file in files:
        with safe_open(file, framework="np") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                kind = "experts" if ".experts." in name else "dense"
                if "embed_tokens" in name or "lm_head" in name:
                    kind = "embeddings"
                shape = tensors.get_slice(name).get_shape()
                counts[kind] += math.prod(shape)
                if kind == "dense" and len(shape) == 2:
                    counts["sides"] += sum(shape)
    return Parameters(**counts) if files else None


def trainer_state_bytes(config: RunConfig, parameters: Parameters) -> int:
    """Return the bytes of weights, gradients and Adam on one rank.

    A parameter has 2 bytes of weight, 4 of gradient (2 without `grad_reduce_in_fp32`) and 12 of
    optimizer: a main copy and two moments. With `train.lora` only adapters have gradients and
    optimizer. Parameters that are frozen by name count as trained. Pipeline stages have equal
    numbers of layers; the first and the last have an embedding.
    """
    parallel = config.train.parallel
    ranks = config.resources.trainer_ranks
    tensor = parallel.tensor_model_parallel_size
    pipeline = parallel.pipeline_model_parallel_size
    expert = parallel.expert_model_parallel_size * parallel.expert_tensor_parallel_size
    embeddings = parameters.embeddings // (tensor * min(pipeline, 2))
    dense = parameters.dense // (tensor * pipeline) + embeddings
    experts = parameters.experts // (expert * pipeline)
    sharded = config.train.use_distributed_optimizer
    gradient = 4 if config.train.megatron.get("grad_reduce_in_fp32", True) else 2

    def state(count: int, replicas: int) -> int:
        return count * (2 + gradient) + count * 12 // (replicas if sharded else 1)

    if (lora := config.train.lora) is not None:
        adapters = lora.rank * parameters.sides // pipeline
        return 2 * (dense + experts) + state(adapters, max(ranks // (tensor * pipeline), 1))
    both = state(dense, max(ranks // (tensor * pipeline), 1))
    both += state(experts, max(ranks // (expert * pipeline), 1))
    has_critic = config.uses_critic and not config.resources.critic_ranks
    return 2 * both if has_critic else both


def cache_bytes_per_token(model: Mapping[str, Any], tensor_parallel: int) -> int | None:
    """Return the bytes of a token's keys and values on one GPU in 16 bit; None for mixed layers."""
    text = _text_model(model)
    layers = text.get("num_hidden_layers")
    kinds: Iterable[str] = text.get("layer_types") or ()
    mixed = any(kind != "full_attention" for kind in kinds) or "linear_num_value_heads" in text
    if mixed or not isinstance(layers, int):
        return None
    if rank := text.get("kv_lora_rank"):  # latent attention: equal on all ranks
        return 2 * layers * (rank + text.get("qk_rope_head_dim", 0))
    attention = _attention(text)
    if attention is None:
        return None
    _, kv_heads, head = attention
    return 2 * 2 * layers * max(kv_heads // tensor_parallel, 1) * head


def _wanted_tokens(config: RunConfig, longest: int) -> int:
    """Return the tokens of an engine's requests at full length. A group's prompt is cached once."""
    requests = requests_per_engine(config)
    groups = -(-requests // config.rollout.n_samples_per_prompt)
    prompt = min(config.data.rollout_max_prompt_len or UNKNOWN_PROMPT_TOKENS, longest)
    return groups * prompt + requests * (longest - prompt)


def longest_sample(config: RunConfig, model: Mapping[str, Any]) -> int:
    """Return the most tokens of prompt and response."""
    rollout = config.rollout
    prompt = config.data.rollout_max_prompt_len or UNKNOWN_PROMPT_TOKENS
    limits = (
        rollout.rollout_max_context_len,
        config.engine.sglang.get("context_length"),
        _text_model(model).get("max_position_embeddings"),
        prompt + rollout.rollout_max_response_len,
    )
    return min(int(limit) for limit in limits if limit)


def requests_per_engine(config: RunConfig) -> int:
    """Return the most requests that one engine gets at once."""
    rollout = config.rollout
    groups = max(rollout.rollout_batch_size, rollout.over_sampling_batch_size or 0)
    requests = groups * rollout.n_samples_per_prompt * (1 + config.async_buffer_size)
    engines = config.resources.num_engines
    if engines > 1:
        requests = min(requests, math.ceil(IMBALANCE * requests / engines))
    most = config.engine.server_concurrency
    # A user function may send any number.
    unknown = rollout.custom_generate_function_path or rollout.rollout_function_path
    return most if unknown else min(requests, most)


def graph_sizes(requests: int) -> list[int]:
    """Return the batches with a CUDA graph of an engine with at most this number of requests."""
    return [*(size for size in GRAPH_SIZES if size < requests), requests]


def _with_graph_sizes(config: RunConfig, gpu_bytes: int) -> RunConfig:
    if gpu_bytes < LARGE_GPU_BYTES or any(key in config.engine.sglang for key in GRAPH_KEYS):
        return config
    # Evaluations send as many requests as an engine takes.
    evaluates = bool(config.evaluation.datasets)
    most = config.engine.server_concurrency if evaluates else requests_per_engine(config)
    graphs = {"cuda_graph_bs_decode": graph_sizes(most), "cuda_graph_max_bs_decode": most}
    return _with_arguments(config, graphs)


def _with_arguments(config: RunConfig, arguments: dict[str, Any]) -> RunConfig:
    engine = config.engine.model_copy(update={"sglang": {**config.engine.sglang, **arguments}})
    return config.model_copy(update={"engine": engine})


def _text_model(model: Mapping[str, Any]) -> Mapping[str, Any]:
    text = model.get("text_config")
    return text if isinstance(text, dict) else model


def _attention(text: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """Return (heads, KV heads, head size); None if config.json does not give them."""
    heads = text.get("num_attention_heads")
    head = text.get("head_dim") or text.get("hidden_size", 0) // (heads or 1)
    return (heads, text.get("num_key_value_heads") or heads, head) if heads and head else None


def _activation_bytes_per_token(text: Mapping[str, Any]) -> int | None:
    """Return the bytes that one layer keeps of a token for the backward pass; None if unknown.

    Three vectors of the hidden size, queries, keys, values and the output of attention, and three
    vectors of the MLP, in 16 bit.
    """
    attention = _attention(text)
    hidden = text.get("hidden_size")
    if attention is None or not hidden:
        return None
    heads, kv_heads, head = attention
    routed = text.get("num_experts_per_tok") or 0
    expert = text.get("moe_intermediate_size") or 0
    mlp = routed * (expert + hidden // 2) if routed and expert else text.get("intermediate_size", 0)
    mlp += (text.get("n_shared_experts") or 0) * expert
    return 2 * (3 * hidden + 2 * (heads + kv_heads) * head + 3 * mlp)


def _activations(config: RunConfig, text: Mapping[str, Any], layer: int, longest: int) -> int:
    """Return the bytes of the activations of one micro-batch on one rank."""
    train = config.train
    context = train.parallel.context_parallel_size
    longest = -(-longest // context)
    tokens = max(train.micro_batch_tokens, longest)
    if train.micro_batch_size is not None:
        tokens = train.micro_batch_size * longest
    layers = text["num_hidden_layers"]
    per_token = layers * layer
    if train.megatron.get("recompute_granularity") == "full":
        per_token = layers * 2 * text["hidden_size"] + layer
    if train.parallel.sequence_parallel:
        per_token //= train.parallel.tensor_model_parallel_size
    return int(tokens * per_token * ACTIVATION_MARGIN)


def _line(sizes: Sizes, gpu_bytes: int, choice: Residency | None) -> str:
    def gib(size: int) -> str:
        return f"{size / GIB:.1f}"

    wanted = sizes.wanted_tokens * sizes.cache_token
    parts = (
        f"GPU memory {gib(gpu_bytes)} GiB: trainer {gib(sizes.state)} "
        f"+ {gib(sizes.activations + TRAINER_WORK_BYTES)} for activations, engine weights "
        f"{gib(sizes.engine_weights)}, cache for all requests {gib(wanted)} "
        f"({sizes.wanted_tokens} tokens)"
    )
    if choice is None:
        return f"{parts}; resources.offload_train and offload_rollout apply as they are"
    trainer = "stays" if choice.trainer_stays else "moves to CPU memory while engines sample"
    engines = "stay" if choice.engines_stay else "release their memory while the trainer works"
    return f"{parts}; the trainer {trainer}, engines {engines}"
