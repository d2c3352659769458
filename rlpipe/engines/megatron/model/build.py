"""Build a model, its DDP wrapper, optimizer and schedule from the run's configuration.

`build` makes a policy or critic, `build_scoring_model` a model without an optimizer, and
`open_model` only Megatron's configuration. The entries of `train.megatron` go by field name to
TransformerConfig, OptimizerConfig and DistributedDataParallelConfig. `rlpipe.config.arguments` has
the table of refused arguments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from rlpipe.config.arguments.check import check_megatron, effective
from rlpipe.config.arguments.names import LAYERS_PER_CHUNK, PAD_TO
from rlpipe.config.model import ModelConfig
from rlpipe.config.train import LoraConfig, OptimizerConfig, TrainConfig
from rlpipe.engines.megatron import platform
from rlpipe.errors import ConfigError

# isort: split
from mbridge.core import LLMBridge
from mbridge.core.parallel_states import ParallelStates
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from rlpipe.engines.megatron.bridges.bridge import (
    layers_of,
    model_arguments,
    model_class,
    open_bridge,
)
from rlpipe.engines.megatron.model.float32_parameters import order_states
from rlpipe.engines.megatron.model.freezing import for_frozen, freeze
from rlpipe.engines.megatron.model.layers import TRANSFORMER_ENGINE, PolicyModel
from rlpipe.engines.megatron.model.lora import add_adapters, check_adapters
from rlpipe.engines.megatron.model.prediction import check_prediction, prediction_spec
from rlpipe.engines.megatron.model.provided import provided_model
from rlpipe.engines.megatron.model.value_model import RewardModel, ValueModel
from rlpipe.engines.megatron.model.vision import check_vision

_PARALLEL = "train.parallel"
_INIT_METHODS = ("init_method", "output_layer_init_method", "embedding_init_method")
_UNEVEN = frozenset(
    {
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
        "pipeline_model_parallel_layout",
    }
)
_CHUNK_NAMES = frozenset({"virtual_pipeline_model_parallel_size", "pipeline_model_parallel_layout"})

OFFLOADING = ("optimizer_cpu_offload", "use_torch_optimizer_for_cpu_offload")
"""Arguments that move the optimizer from a GPU to the CPU."""


@dataclass(slots=True)
class ScoringModel:
    """A model on this rank for forward passes."""

    bridge: LLMBridge
    chunks: list[Any]
    """The model's chunks on this rank for Megatron's schedules, in the order of their layers.

    One chunk without virtual pipelining. A chunk is in DistributedDataParallel if it is trained.
    """

    @property
    def models(self) -> list[PolicyModel]:
        """The chunks without their wrappers."""
        return [_unwrapped(chunk) for chunk in self.chunks]

    @property
    def last_model(self) -> PolicyModel:
        """The last chunk without its wrappers: on the last stage it has the output layer."""
        return _unwrapped(self.chunks[-1])


@dataclass(slots=True)
class TrainedModel(ScoringModel):
    """A trained model on this rank: everything that a checkpoint holds."""

    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    lora: LoraConfig | None = None
    """The adapters, which are all that is trained; None: all weights are."""
    frozen: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The key that freezes parameters and its patterns; {}: none is frozen."""


def _unwrapped(module: Any) -> PolicyModel:
    while not isinstance(module, PolicyModel):
        module = module.module
    return module


def release_models(*models: ScoringModel | None) -> None:
    """Break the references to these models, so that their memory and process groups are freed.

    With a distributed optimizer, Megatron's parameter hooks hold the DDP wrapper in cycles that
    Python's collector cannot see.
    """
    for model in filter(None, models):
        for chunk in model.chunks:
            vars(chunk).clear()


def build(
    model_dir: str,
    model: ModelConfig,
    train: TrainConfig,
    total_optimizer_steps: int,
    *,
    deterministic: bool = False,
    kind: type[PolicyModel] = PolicyModel,
) -> TrainedModel:
    """Build a model with undefined weights, optimizer and scheduler. Process groups must be open.

    `kind`: ValueModel for a critic. A run that trains a reward model has a RewardModel. Raises:
    ConfigError for a bad `train.megatron` or a size that does not divide.
    """
    if train.loss.type == "reward_model":
        kind = RewardModel
    dtype = getattr(torch, model.dtype)
    _, for_optimizer, for_ddp = split_arguments(train.megatron)
    bridge = open_model(model_dir, model, train, deterministic=deterministic)
    is_policy = not issubclass(kind, ValueModel)
    provider = train.custom_model_provider_path if is_policy else None
    lora = train.lora if is_policy else None
    adapt = None
    if lora is not None:
        check_adapters(bridge, train)
        adapt = partial(add_adapters, lora=lora, seed=train.seed)
    bare = _bare_chunks(bridge, dtype, kind, provider, adapt)
    freeze(bridge, bare, train)
    chunks: list[Any] = [
        DistributedDataParallel(
            config=bridge.config,
            ddp_config=ddp_config(train, for_ddp),
            module=chunk,
            # As Megatron-LM: gradients of later chunks are reduced while earlier ones compute.
            disable_bucketing=number > 0,
        )
        for number, chunk in enumerate(bare)
    ]
    optimizer = get_megatron_optimizer(optimizer_config(train, dtype, for_optimizer), chunks)
    if train.frozen_names:
        optimizer = for_frozen(optimizer)
    order_states(optimizer)
    bridge.config.grad_scale_func = optimizer.scale_loss
    scheduler = _scheduler(optimizer, train.optimizer, total_optimizer_steps)
    return TrainedModel(bridge, chunks, optimizer, scheduler, lora, train.frozen_names)


def build_scoring_model(
    model_dir: str, model: ModelConfig, train: TrainConfig, *, deterministic: bool = False
) -> ScoringModel:
    """Build a model with undefined weights for forward passes, in the same layout.

    Raises: ConfigError, as `build`.
    """
    bridge = open_model(model_dir, model, train, deterministic=deterministic)
    chunks = _bare_chunks(bridge, getattr(torch, model.dtype), PolicyModel)
    for chunk in chunks:
        chunk.requires_grad_(False)
    return ScoringModel(bridge, chunks)


def open_model(
    model_dir: str,
    model: ModelConfig,
    train: TrainConfig,
    *,
    deterministic: bool,
    sizes: ParallelStates | None = None,
) -> LLMBridge:
    """Return the bridge of a directory, with Megatron's configuration of the model.

    `sizes`: as `open_bridge`. Raises: ConfigError, as `build`; Megatron-core's own errors for
    arguments that contradict each other.
    """
    for_transformer, _, _ = split_arguments(train.megatron)
    bridge = open_bridge(
        model_dir,
        getattr(torch, model.dtype),
        sizes=sizes,
        pad_to=train.megatron.get(PAD_TO, 1),
        **{
            "sequence_parallel": train.parallel.sequence_parallel,
            # Our losses carry their weights, so gradients are sums: Megatron must not average over
            # micro-batches or ranks.
            "calculate_per_token_loss": True,
            "deallocate_pipeline_outputs": False,
            "deterministic_mode": deterministic,
            "moe_enable_routing_replay": train.replays_routing,
            "use_cpu_initialization": not platform.CUDA_FOUND,
            **dict.fromkeys(_INIT_METHODS, _keep_undefined),
            # mbridge would take both from the model that was built before.
            "virtual_pipeline_model_parallel_size": None,
            "overlap_p2p_comm": False,
            **for_transformer,
        },
    )
    _check_implementation(bridge)
    _set_chunks(bridge, train)
    _check_sizes(bridge, train)
    check_prediction(bridge)
    check_vision(bridge, train)
    return bridge


def split_arguments(
    megatron: dict[str, Any],
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Split `train.megatron` for TransformerConfig, OptimizerConfig and
    DistributedDataParallelConfig.

    Arguments without effect go to none of them, nor do those of a checkout's argument provider
    (`arguments`). Raises: ConfigError for a refused argument, like the check of the configuration.
    """
    check_megatron(megatron)
    arguments = effective("megatron", megatron)

    def fields_of(kind: type) -> dict[str, Any]:
        names = {field.name for field in dataclasses.fields(kind)}
        return {name: value for name, value in arguments.items() if name in names}

    return (
        fields_of(TransformerConfig),
        fields_of(MegatronOptimizerConfig),
        fields_of(DistributedDataParallelConfig),
    )


def _keep_undefined(tensor: torch.Tensor) -> torch.Tensor:
    """Replace random initialisation: weights are loaded later."""
    # `perform_initialization: False` would also skip the marks of tensor parallel parameters. Their
    # gradient norm would then count one rank only.
    return tensor


def _check_implementation(bridge: LLMBridge) -> None:
    """Raises: ConfigError for layers that are not installed or not supported for this model."""
    config = bridge.config
    where = "train.megatron.transformer_impl"
    if config.transformer_impl == "local":
        return
    if config.transformer_impl != TRANSFORMER_ENGINE:
        raise ConfigError(
            "the trainer does not support this implementation of layers",
            where=where,
            found=config.transformer_impl,
            expected=f"local or {TRANSFORMER_ENGINE}",
        )
    if getattr(config, "multi_latent_attention", False) or hasattr(bridge, "adapted"):
        hf_config: Any = bridge.hf_config
        raise ConfigError(
            "the layers of this family are local layers only",
            where=where,
            found=f"{TRANSFORMER_ENGINE}, with model_type: {hf_config.model_type}",
            do="remove the key",
        )
    if not gpt_layer_specs.HAVE_TE:
        raise ConfigError(
            "Transformer Engine cannot be imported",
            where=where,
            found=TRANSFORMER_ENGINE,
            do="install it on a machine with CUDA's toolkit and cuDNN (pip install "
            "--no-build-isolation 'transformer_engine[pytorch]'), or remove the key: local layers "
            "have the same parameters and formulas",
        )


def _set_chunks(bridge: LLMBridge, train: TrainConfig) -> None:
    """Set the number of chunks of a rank in Megatron's configuration: None is one chunk.

    Raises: ConfigError for a number that does not divide the layers, or one stage.
    """
    config = bridge.config
    stages = train.parallel.pipeline_model_parallel_size
    layers = config.num_layers
    name = next(iter(_CHUNK_NAMES.intersection(train.megatron)), "")
    of_chunk = train.megatron.get(LAYERS_PER_CHUNK)
    if of_chunk is not None:
        if clashing := sorted((_CHUNK_NAMES | _UNEVEN).intersection(train.megatron)):
            raise ConfigError(
                "two arguments decide the layers of a chunk",
                where=f"train.megatron.{LAYERS_PER_CHUNK}",
                found=f"{of_chunk}, with {', '.join(clashing)}",
                do="remove it; train.megatron.virtual_pipeline_model_parallel_size sets the number "
                "of chunks of each rank",
            )
        name = LAYERS_PER_CHUNK
        if of_chunk < 1 or layers % (stages * of_chunk):
            raise _uneven_chunks(name, of_chunk, layers, stages)
        config.virtual_pipeline_model_parallel_size = layers // (stages * of_chunk)
    if config.virtual_pipeline_model_parallel_size == 1:
        config.virtual_pipeline_model_parallel_size = None
    chunks = config.virtual_pipeline_model_parallel_size
    if chunks is None:
        return
    if stages == 1:
        raise ConfigError(
            "a rank can only hold several chunks of the model with several pipeline stages",
            where=f"train.megatron.{name}",
            found=f"{chunks} chunks on one stage",
            do=f"remove it, or set {_PARALLEL}.pipeline_model_parallel_size above 1",
        )
    # Without overlap Megatron sends activations and gradients together. With two stages the
    # previous and the next stage are the same rank, which would confuse the two.
    config.overlap_p2p_comm = True
    if chunks < 1 or (layers % (stages * chunks) and not _UNEVEN.intersection(train.megatron)):
        raise _uneven_chunks(name, chunks, layers, stages)
    group = config.microbatch_group_size_per_vp_stage
    if group < stages:
        raise ConfigError(
            "a chunk takes at least as many micro-batches in a row as there are pipeline stages",
            where="train.megatron.microbatch_group_size_per_vp_stage",
            found=group,
            expected=f"{stages} or more",
        )


def _uneven_chunks(name: str, value: int, layers: int, stages: int) -> ConfigError:
    return ConfigError(
        "the layers do not divide into chunks of the pipeline stages",
        where=f"train.megatron.{name}",
        found=f"{value}, for {layers} layers over {stages} stages",
        expected="a number that divides the layers of a stage",
    )


def _check_sizes(bridge: LLMBridge, train: TrainConfig) -> None:
    config = bridge.config
    parallel = train.parallel
    tensor_parallel_size = parallel.tensor_model_parallel_size
    stages = parallel.pipeline_model_parallel_size
    if config.num_moe_experts and tensor_parallel_size > 1 and not parallel.sequence_parallel:
        raise ConfigError(
            "Megatron trains experts on tensor parallel ranks only with sequence parallelism",
            where=f"{_PARALLEL}.sequence_parallel",
            found=f"false, with tensor_model_parallel_size: {tensor_parallel_size}",
            do="set it to true",
        )
    expert_tensor_size = parallel.expert_tensor_parallel_size
    if (
        config.num_moe_experts
        and tensor_parallel_size != expert_tensor_size
        and parallel.expert_model_parallel_size == 1
    ):
        raise ConfigError(
            "Megatron would not sum the experts' gradients over tensor parallel ranks",
            where=f"{_PARALLEL}.expert_tensor_parallel_size",
            found=f"{expert_tensor_size}, with tensor_model_parallel_size: {tensor_parallel_size}",
            do="make them equal, or set expert_model_parallel_size to more than 1",
        )
    if config.num_layers % stages and not _UNEVEN.intersection(train.megatron):
        raise ConfigError(
            "the layers do not divide into pipeline stages",
            where=f"{_PARALLEL}.pipeline_model_parallel_size",
            found=f"{config.num_layers} layers over {stages} stages",
            do="set the layers of each stage with one of train.megatron's "
            f"{', '.join(sorted(_UNEVEN))}",
        )


def _bare_chunks(
    bridge: LLMBridge,
    dtype: torch.dtype,
    kind: type[PolicyModel],
    provider: str | None = None,
    adapt: Callable[[PolicyModel], None] | None = None,
) -> list[torch.nn.Module]:
    """Build this rank's chunks of the model, one without virtual pipelining.

    `provider`: path of a function that builds them (`provided`). `adapt`: adds adapters.
    """
    number = bridge.config.virtual_pipeline_model_parallel_size
    # Megatron reads the number of chunks here. `passes` sets it again for the model that runs.
    parallel_state.set_virtual_pipeline_model_parallel_world_size(number)
    return [
        _bare_chunk(bridge, dtype, kind, chunk, provider, adapt) for chunk in chunk_numbers(bridge)
    ]


def chunk_numbers(bridge: LLMBridge) -> list[int] | list[None]:
    """Return the number of each chunk of a rank; None for the only one."""
    number = bridge.config.virtual_pipeline_model_parallel_size
    return [*range(number)] if number else [None]


def _bare_chunk(
    bridge: LLMBridge,
    dtype: torch.dtype,
    kind: type[PolicyModel],
    chunk: int | None,
    provider: str | None,
    adapt: Callable[[PolicyModel], None] | None,
) -> torch.nn.Module:
    config = bridge.config
    hf_config: Any = bridge.hf_config
    place: dict[str, Any] = {
        "pre_process": parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
        "post_process": parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
        "vp_stage": chunk,
    }
    if issubclass(kind, ValueModel):
        config.mtp_num_layers = None
    if provider is not None:
        model = provided_model(provider, config, **place)
    else:
        block = layers_of(bridge, chunk=chunk)
        further = {}
        if config.mtp_num_layers:
            further["mtp_block_spec"] = prediction_spec(config, block.layer_specs[-1])
        model = model_class(bridge, kind)(
            config=config,
            transformer_layer_spec=block,
            share_embeddings_and_output_weights=getattr(hf_config, "tie_word_embeddings", False),
            **place,
            **model_arguments(bridge),
            **further,
        )
    model.set_vocabulary(hf_config.vocab_size)
    if adapt is not None:
        adapt(model)
    # Megatron's gradient norm reads these attributes of every parameter.
    for parameter in model.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    model.to(platform.device())
    return model if dtype == torch.float32 else Float16Module(config, model)


def ddp_config(train: TrainConfig, extra: dict[str, Any]) -> DistributedDataParallelConfig:
    """Return Megatron's DDP configuration. `extra`: its fields from `train.megatron`."""
    defaults = {
        "grad_reduce_in_fp32": True,
        "use_distributed_optimizer": train.use_distributed_optimizer,
    }
    return DistributedDataParallelConfig(**{**defaults, **extra})


def optimizer_config(
    train: TrainConfig, dtype: torch.dtype, extra: dict[str, Any]
) -> MegatronOptimizerConfig:
    """Return Megatron's configuration of Adam. `extra`: its fields from `train.megatron`."""
    config = train.optimizer
    if not platform.CUDA_FOUND:
        # A CPU has nothing to move the optimizer to, and Megatron's way to do so needs CUDA.
        extra = {name: value for name, value in extra.items() if name not in OFFLOADING}
    return MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        # Megatron requires a minimum of at most the learning rate.
        min_lr=min(config.min_lr, config.lr),
        weight_decay=config.weight_decay,
        adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2,
        adam_eps=config.adam_eps,
        clip_grad=config.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=train.use_distributed_optimizer,
        **extra,
    )


def _scheduler(
    optimizer: MegatronOptimizer, config: OptimizerConfig, num_steps: int
) -> OptimizerParamScheduler:
    # The configuration decides the schedule. A checkpoint restores only the number of steps.
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=min(config.min_lr, config.lr),
        lr_warmup_steps=config.lr_warmup_steps,
        # Megatron requires more decay steps than warm-up steps.
        lr_decay_steps=max(config.lr_decay_steps or num_steps, config.lr_warmup_steps + 1),
        lr_decay_style=config.lr_decay_style,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
