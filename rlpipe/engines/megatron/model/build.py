"""Build what is trained: the model in DDP, its optimizer and its schedule, from the run's
configuration.

`train.megatron` goes by field name to TransformerConfig, OptimizerConfig and
DistributedDataParallelConfig. What cannot be taken is refused by the table that configurations are
checked with (`rlpipe.config.arguments`).

Not here: process groups (`groups`), weights (`bridge`, `checkpoint`).
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
from rlpipe.engines.megatron.model.layers import PolicyModel

_PARALLEL = "train.parallel"
_INIT_METHODS = ("init_method", "output_layer_init_method", "embedding_init_method")
_UNEVEN = frozenset(
    {
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
        "pipeline_model_parallel_layout",
    }
)


@dataclass(slots=True)
class Scorer:
    """A model on this rank that can be run forward."""

    bridge: LLMBridge
    ddp: Any
    """The model as Megatron's schedules take it: in DistributedDataParallel if it is trained."""

    @property
    def model(self) -> PolicyModel:
        module = self.ddp
        while not isinstance(module, PolicyModel):
            module = module.module
        return module


@dataclass(slots=True)
class Trained(Scorer):
    """Everything a checkpoint holds, on this rank."""

    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler


def drop(*models: Scorer | None) -> None:
    """Nothing of these is used any more. With a distributed optimizer Megatron's hooks on
    parameters hold the wrapper in ways that Python's collector cannot follow, and with it the
    model, its memory and its process groups."""
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
) -> Trained:
    """Model with undefined weights, optimizer and scheduler. Process groups must exist. `kind`:
    ValueModel for a critic.

    Raises: ConfigError for a bad `train.megatron` or a size that does not divide.
    """
    dtype = getattr(torch, model.dtype)
    _, for_optimizer, for_ddp = split_arguments(train.megatron)
    bridge = open_model(model_dir, model, train, deterministic=deterministic)
    ddp = _in_ddp(bridge, _bare_model(bridge, dtype, kind), train, for_ddp)
    optimizer = get_megatron_optimizer(optimizer_config(train, dtype, for_optimizer), [ddp])
    bridge.config.grad_scale_func = optimizer.scale_loss
    return Trained(
        bridge, ddp, optimizer, _scheduler(optimizer, train.optimizer, total_optimizer_steps)
    )


def build_scorer(
    model_dir: str, model: ModelConfig, train: TrainConfig, *, deterministic: bool = False
) -> Scorer:
    """A model with undefined weights that is only run forward, in the same layout. Raises:
    ConfigError, as `build`."""
    bridge = open_model(model_dir, model, train, deterministic=deterministic)
    bare = _bare_model(bridge, getattr(torch, model.dtype), PolicyModel)
    for parameter in bare.parameters():
        parameter.requires_grad = False
    return Scorer(bridge, bare)


def open_model(
    model_dir: str,
    model: ModelConfig,
    train: TrainConfig,
    *,
    deterministic: bool,
    sizes: ParallelStates | None = None,
) -> LLMBridge:
    """The bridge of a directory, with Megatron's configuration of the model. `sizes`: as
    `open_bridge`.

    Raises: ConfigError, as `build`; what Megatron-core itself raises for arguments that contradict
    each other.
    """
    for_transformer, _, _ = split_arguments(train.megatron)
    bridge = open_bridge(
        model_dir,
        getattr(torch, model.dtype),
        sizes=sizes,
        pad_to=train.megatron.get(PAD_TO, 1),
        **{
            "sequence_parallel": train.parallel.sequence_parallel,
            "calculate_per_token_loss": True,
            "deallocate_pipeline_outputs": False,
            "deterministic_mode": deterministic,
            "moe_enable_routing_replay": train.replays_routing,
            "use_cpu_initialization": not platform.CUDA_FOUND,
            **dict.fromkeys(_INIT_METHODS, _leave_as_it_is),
            **for_transformer,
        },
    )
    _check_sizes(bridge, train)
    return bridge


def split_arguments(
    megatron: dict[str, Any],
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The entries of `train.megatron` for TransformerConfig, OptimizerConfig and
    DistributedDataParallelConfig.

    Arguments that only say what holds anyway go to none of them, nor do those of a checkout's
    argument provider (`arguments`). Raises: ConfigError for an argument that cannot be taken, as
    the check of the configuration does.
    """
    check_megatron(megatron)
    given = effective("megatron", megatron)
    kinds = (TransformerConfig, MegatronOptimizerConfig, DistributedDataParallelConfig)
    fields = [{field.name for field in dataclasses.fields(kind)} for kind in kinds]
    split = [{name: value for name, value in given.items() if name in known} for known in fields]
    return split[0], split[1], split[2]


def _leave_as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    """Weights are loaded, not drawn. (`perform_initialization: False` would also leave out the
    marks of tensor parallel parameters, and their gradient norm would count one rank only.)"""
    return tensor


def _check_sizes(bridge: LLMBridge, train: TrainConfig) -> None:
    parallel = train.parallel
    if (
        bridge.config.num_moe_experts
        and parallel.tensor_model_parallel_size > 1
        and not parallel.sequence_parallel
    ):
        raise ConfigError(
            "Megatron trains experts on tensor parallel ranks only with sequence parallelism",
            where=f"{_PARALLEL}.sequence_parallel",
            found=f"false, with tensor_model_parallel_size: {parallel.tensor_model_parallel_size}",
            do="set it to true",
        )
    experts = parallel.expert_tensor_parallel_size, parallel.expert_model_parallel_size
    if (
        bridge.config.num_moe_experts
        and parallel.tensor_model_parallel_size != experts[0]
        and experts[1] == 1
    ):
        raise ConfigError(
            "Megatron would not sum the experts' gradients over tensor parallel ranks",
            where=f"{_PARALLEL}.expert_tensor_parallel_size",
            found=f"{experts[0]}, with tensor_model_parallel_size: {parallel.tensor_model_parallel_size}",
            do="make them equal, or set expert_model_parallel_size to more than 1",
        )
    if (
        bridge.config.num_layers % parallel.pipeline_model_parallel_size
        and not _UNEVEN.intersection(train.megatron)
    ):
        raise ConfigError(
            "the layers do not divide into pipeline stages",
            where=f"{_PARALLEL}.pipeline_model_parallel_size",
            found=f"{bridge.config.num_layers} layers over {parallel.pipeline_model_parallel_size} stages",
            do=f"say which stage takes how many with one of train.megatron's {', '.join(sorted(_UNEVEN))}",
        )
    if (bridge.config.virtual_pipeline_model_parallel_size or 1) > 1:
        raise ConfigError(
            "the layout gives a rank several pipeline stages",
            where="train.megatron.pipeline_model_parallel_layout",
            found=f"{bridge.config.virtual_pipeline_model_parallel_size} for each rank",
            expected=f"one for each of {parallel.pipeline_model_parallel_size} (train.parallel.pipeline_model_parallel_size)",
        )


def _bare_model(bridge: LLMBridge, dtype: torch.dtype, kind: type[PolicyModel]) -> torch.nn.Module:
    config = bridge.config
    hf_config: Any = bridge.hf_config
    model = kind(
        config=config,
        transformer_layer_spec=layers_of(bridge),
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=getattr(hf_config, "tie_word_embeddings", False),
        **model_arguments(bridge),
    )
    model.pad(hf_config.vocab_size)
    for parameter in model.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    model.to(platform.device())
    return model if dtype == torch.float32 else Float16Module(config, model)


def _in_ddp(
    bridge: LLMBridge, model: torch.nn.Module, train: TrainConfig, for_ddp: dict[str, Any]
) -> DistributedDataParallel:
    return DistributedDataParallel(
        config=bridge.config, ddp_config=ddp_config(train, for_ddp), module=model
    )


def ddp_config(train: TrainConfig, extra: dict[str, Any]) -> DistributedDataParallelConfig:
    """Megatron's configuration of gradients. `extra`: fields of it from `train.megatron`."""
    ours = {
        "grad_reduce_in_fp32": True,
        "use_distributed_optimizer": train.use_distributed_optimizer,
    }
    return DistributedDataParallelConfig(**{**ours, **extra})


def optimizer_config(
    train: TrainConfig, dtype: torch.dtype, extra: dict[str, Any]
) -> MegatronOptimizerConfig:
    """Megatron's configuration of Adam. `extra`: fields of it from `train.megatron`."""
    ours = train.optimizer
    return MegatronOptimizerConfig(
        optimizer="adam",
        lr=ours.lr,
        min_lr=min(ours.min_lr, ours.lr),
        weight_decay=ours.weight_decay,
        adam_beta1=ours.adam_beta1,
        adam_beta2=ours.adam_beta2,
        adam_eps=ours.adam_eps,
        clip_grad=ours.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=train.use_distributed_optimizer,
        **extra,
    )


def _scheduler(
    optimizer: MegatronOptimizer, config: OptimizerConfig, total_optimizer_steps: int
) -> OptimizerParamScheduler:
    """Counts optimizer steps. The configuration decides the schedule; a checkpoint only says how
    far it is."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=min(config.min_lr, config.lr),
        lr_warmup_steps=config.lr_warmup_steps,
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
