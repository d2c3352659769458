"""Build a model, its DDP wrapper, optimizer and schedule from the run's configuration.

`build` makes a policy or critic, `build_scoring_model` a model without an optimizer, and
`open_model` only Megatron's configuration. The entries of `train.megatron` go by field name to
TransformerConfig, OptimizerConfig and DistributedDataParallelConfig. `rlpipe.config.arguments` has
the table of refused arguments.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from rlpipe.config.arguments.check import check_megatron, effective
from rlpipe.config.arguments.names import PAD_TO
from rlpipe.config.model import ModelConfig
from rlpipe.config.train import OptimizerConfig, TrainConfig
from rlpipe.engines.megatron import platform
from rlpipe.errors import ConfigError

# isort: split
from mbridge.core import LLMBridge
from mbridge.core.parallel_states import ParallelStates
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from rlpipe.engines.megatron.bridges.bridge import layers_of, model_arguments, open_bridge
from rlpipe.engines.megatron.model.layers import PolicyModel, ValueModel
from rlpipe.engines.megatron.model.prediction import check_prediction, prediction_spec

_PARALLEL = "train.parallel"
_INIT_METHODS = ("init_method", "output_layer_init_method", "embedding_init_method")
_UNEVEN = frozenset(
    {
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
        "pipeline_model_parallel_layout",
    }
)

OFFLOADING = ("optimizer_cpu_offload", "use_torch_optimizer_for_cpu_offload")
"""Arguments that move the optimizer from a GPU to the CPU."""


@dataclass(slots=True)
class ScoringModel:
    """A model on this rank for forward passes."""

    bridge: LLMBridge
    ddp: Any
    """The model for Megatron's schedules: in DistributedDataParallel if it is trained."""

    @property
    def model(self) -> PolicyModel:
        """The model without its wrappers."""
        module = self.ddp
        while not isinstance(module, PolicyModel):
            module = module.module
        return module


@dataclass(slots=True)
class TrainedModel(ScoringModel):
    """A trained model on this rank: everything that a checkpoint holds."""

    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler


def release_models(*models: ScoringModel | None) -> None:
    """Break the references to these models, so that their memory and process groups are freed.

    With a distributed optimizer, Megatron's parameter hooks hold the DDP wrapper in cycles that
    Python's collector cannot see.
    """
    for model in filter(None, models):
        vars(model.ddp).clear()


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

    `kind`: ValueModel for a critic. Raises: ConfigError for a bad `train.megatron` or a size that
    does not divide.
    """
    dtype = getattr(torch, model.dtype)
    _, for_optimizer, for_ddp = split_arguments(train.megatron)
    bridge = open_model(model_dir, model, train, deterministic=deterministic)
    ddp = DistributedDataParallel(
        config=bridge.config,
        ddp_config=ddp_config(train, for_ddp),
        module=_bare_model(bridge, dtype, kind),
    )
    optimizer = get_megatron_optimizer(optimizer_config(train, dtype, for_optimizer), [ddp])
    bridge.config.grad_scale_func = optimizer.scale_loss
    return TrainedModel(
        bridge, ddp, optimizer, _scheduler(optimizer, train.optimizer, total_optimizer_steps)
    )


def build_scoring_model(
    model_dir: str, model: ModelConfig, train: TrainConfig, *, deterministic: bool = False
) -> ScoringModel:
    """Build a model with undefined weights for forward passes, in the same layout.

    Raises: ConfigError, as `build`.
    """
    bridge = open_model(model_dir, model, train, deterministic=deterministic)
    bare = _bare_model(bridge, getattr(torch, model.dtype), PolicyModel)
    for parameter in bare.parameters():
        parameter.requires_grad = False
    return ScoringModel(bridge, bare)


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
            **for_transformer,
        },
    )
    _check_sizes(bridge, train)
    check_prediction(bridge)
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
    virtual_stages = config.virtual_pipeline_model_parallel_size or 1
    if virtual_stages > 1:
        raise ConfigError(
            "the layout gives a rank several pipeline stages",
            where="train.megatron.pipeline_model_parallel_layout",
            found=f"{virtual_stages} for each rank",
            expected=f"one for each of {stages} (train.parallel.pipeline_model_parallel_size)",
        )


def _bare_model(bridge: LLMBridge, dtype: torch.dtype, kind: type[PolicyModel]) -> torch.nn.Module:
    config = bridge.config
    hf_config: Any = bridge.hf_config
    block = layers_of(bridge)
    further = {}
    if issubclass(kind, ValueModel):
        config.mtp_num_layers = None
    elif config.mtp_num_layers:
        further["mtp_block_spec"] = prediction_spec(config, block.layer_specs[-1])
    model = kind(
        config=config,
        transformer_layer_spec=block,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=getattr(hf_config, "tie_word_embeddings", False),
        **model_arguments(bridge),
        **further,
    )
    model.set_vocabulary(hf_config.vocab_size)
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
    optimizer: MegatronOptimizer, config: OptimizerConfig, total_optimizer_steps: int
) -> OptimizerParamScheduler:
    # The configuration decides the schedule. A checkpoint restores only the number of steps.
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=min(config.min_lr, config.lr),
        lr_warmup_steps=config.lr_warmup_steps,
        # Megatron requires more decay steps than warm-up steps.
        lr_decay_steps=max(
            config.lr_decay_steps or total_optimizer_steps, config.lr_warmup_steps + 1
        ),
        lr_decay_style=config.lr_decay_style,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
