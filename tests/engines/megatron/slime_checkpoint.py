"""Write a torch_dist checkpoint in slime's layout, with Megatron-core alone.

A model of Megatron's own classes loads a converted directory, takes Adam steps on random tokens,
and is saved as `megatron.training.checkpointing.save_checkpoint` saves it: the same keys, content
metadata and folders. Nothing of rlpipe's trainer is used but `platform`, which lets Megatron-core
run without CUDA.

Entry points: `Job`, `write`.
"""

from __future__ import annotations

import json
import os
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import rlpipe.engines.megatron.platform  # noqa: F401

# isort: split
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import FileSystemReader

from rlpipe.engines.megatron.bridges.bridge import model_arguments, open_bridge
from rlpipe.engines.megatron.checkpoint.conversion.stored_names import StoredNames
from rlpipe.system.ports import free_port
from tests.engines.megatron.ranks import PRELOADED
from tests.processes import adopt, fork_server

SAMPLES_PER_STEP = 8
PROMPTS_PER_STEP = 2
SEED = 42
"""slime's default of --rollout-seed."""
LR = 1e-3
TOTAL_STEPS = 20
FURTHER = 100
"""Seed of the gradients of a step after the last saved one."""
FURTHER_SCALE = 1e-4
"""Their size. Gradient norms depend on the layout, so these are below the limit of clipping."""
STATES = ("fp32_param", "exp_avg", "exp_avg_sq")
_EXPERT = re.compile(
    r"experts\.(?:local_experts\.(\d+)\.(linear_fc\d)\.weight|(linear_fc\d)\.weight(\d+))"
)
_FUSED = {
    "self_attention.linear_q_up_proj.layer_norm_": "self_attention.q_layernorm.",
    "self_attention.linear_kv_up_proj.layer_norm_": "self_attention.kv_layernorm.",
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}


@dataclass(frozen=True)
class Job:
    """A checkpoint to write."""

    origin: str
    """Hugging Face directory, for its config.json."""
    release: str
    """The same weights in torch_dist format, `to_torch_dist`."""
    save: str
    dtype: str = "float32"
    sharding: str | None = "dp_reshardable"
    """`distrib_optim_sharding_type`; None: Adam is not sharded."""
    fused_norms: bool = True
    """Norms are parameters of the linear layer after them, as in Transformer Engine."""
    grouped_experts: bool = True
    """Experts have the parameters of Transformer Engine's grouped linear layers."""
    chained_prefix: bool = False
    """Tensors of two optimizers are numbered, as before Megatron-core 0.15."""
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: int = 1
    """Expert parallel ranks. They are part of the tensor and data parallel ones."""
    expert_tensor: int | None = None
    """Tensor parallel ranks of an expert; None: as of other layers."""
    iterations: tuple[int, ...] = (0, 1)
    """Iterations that are saved. One Adam step is taken in each."""
    total_steps: int = TOTAL_STEPS
    bridged: bool = False
    """Model and configuration come from rlpipe's bridge, for other families than Qwen3."""
    critic: bool = False
    """A value head takes the place of the output layer."""
    trains: bool = True
    """False: the learning rate is 0, and the saved weights are those of `release`."""


class NormLinear(ColumnParallelLinear):
    """The parameters of a linear layer and the norm before it, as in Transformer Engine."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        weight: Any = self._parameters.pop("weight")
        bias: Any = self._parameters.pop("bias", None)
        self.layer_norm_weight = torch.nn.Parameter(
            torch.ones(self.input_size, dtype=weight.dtype, device=weight.device)
        )
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(
            self.layer_norm_weight
        )
        self.weight = weight
        self.register_parameter("bias", bias)

    def forward(self, *_arguments: Any, **_keywords: Any) -> Any:
        raise NotImplementedError  # gradients come from `_step`


class GroupedExperts(SequentialMLP):
    """The parameters of Transformer Engine's grouped linear layers, in their order."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        experts: Any = self._modules.pop("local_experts")
        for linear in ("linear_fc1", "linear_fc2"):
            grouped = torch.nn.Module()
            for number, expert in enumerate(experts):
                grouped.register_parameter(f"weight{number}", getattr(expert, linear).weight)
            self.register_module(linear, grouped)
        self.local_experts = experts


def write(job: Job) -> None:
    """Write the checkpoint in processes of their own, one for each rank."""
    port = free_port()
    world = job.tensor * job.pipeline * job.data
    context = fork_server(*PRELOADED)
    ranks = []
    for rank in range(world):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        ranks.append(context.Process(target=_write_rank, args=(job, environment), daemon=True))
        ranks[-1].start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0] * world


def _write_rank(job: Job, environment: Mapping[str, str]) -> None:
    adopt(environment)
    rank = environment["RANK"]
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        job.tensor,
        job.pipeline,
        expert_model_parallel_size=job.expert,
        expert_tensor_parallel_size=job.expert_tensor,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    ddp, optimizer, scheduler = _build(job)
    _load_release(ddp, Path(job.release) / "release")
    optimizer.reload_model_params()
    folder = Path(job.save)
    for iteration in range(max(job.iterations) + 1):
        _step(ddp, optimizer, seed=iteration)
        scheduler.step(increment=SAMPLES_PER_STEP)
        if iteration in job.iterations:
            folder = _save(job, ddp, optimizer, scheduler, iteration)
            _write_expected(ddp, optimizer, folder / f"expected_{rank}.safetensors")
    _step(ddp, optimizer, seed=FURTHER, scale=FURTHER_SCALE)
    _write_expected(ddp, optimizer, folder / f"further_{rank}.safetensors")
    torch.distributed.destroy_process_group()


def _build(job: Job) -> tuple[Any, Any, Any]:
    """Return the model in DDP, its optimizer and its schedule."""
    model, config = _bridged(job) if job.bridged else _qwen3(job)
    if job.critic and model.post_process:
        model.output_layer = torch.nn.Linear(config.hidden_size, 1, dtype=config.params_dtype)
    for parameter in model.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    sharded = job.sharding is not None
    ddp = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=sharded),
        Float16Module(config, model) if config.bf16 else model,
    )
    optimizer: Any = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=LR if job.trains else 0.0,
            min_lr=0.0,
            weight_decay=0.1,
            bf16=config.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=sharded,
        ),
        [ddp],
    )
    for group in optimizer.param_groups:
        # As rlpipe's trainer, for equal bits.
        group |= {"fused": True, "foreach": False}
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=LR if job.trains else 0.0,
        min_lr=0.0,
        lr_warmup_steps=0,
        lr_decay_steps=job.total_steps * SAMPLES_PER_STEP,
        lr_decay_style="linear",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=job.total_steps * SAMPLES_PER_STEP,
        wd_incr_style="constant",
    )
    return ddp, optimizer, scheduler


def _qwen3(job: Job) -> tuple[Any, TransformerConfig]:
    hf: Any = Namespace(**json.loads((Path(job.origin) / "config.json").read_text()))
    config = _config(job, hf)
    model = GPTModel(
        config=config,
        transformer_layer_spec=_layers(job, config.num_moe_experts),
        vocab_size=hf.vocab_size,
        max_sequence_length=hf.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=hf.tie_word_embeddings and not job.critic,
        position_embedding_type="rope",
    )
    return model, config


def _bridged(job: Job) -> tuple[Any, TransformerConfig]:
    bridge = open_bridge(job.origin, getattr(torch, job.dtype), use_cpu_initialization=True)
    block: Any = gpt_layer_specs.get_gpt_decoder_block_spec(
        bridge.config, use_transformer_engine=False, normalization=bridge.config.normalization
    )
    for layer in {id(layer): layer for layer in block.layer_specs}.values():
        _adapt(job, layer.submodules)
    hf: Any = bridge.hf_config
    model = GPTModel(
        config=bridge.config,
        transformer_layer_spec=block,
        share_embeddings_and_output_weights=hf.tie_word_embeddings,
        **model_arguments(bridge),
    )
    return model, bridge.config


def _config(job: Job, hf: Any) -> TransformerConfig:
    experts: dict[str, Any] = {}
    if hasattr(hf, "num_local_experts"):
        experts = {
            "num_moe_experts": hf.num_local_experts,
            "moe_router_topk": hf.num_experts_per_tok,
            "moe_ffn_hidden_size": hf.moe_intermediate_size,
            "expert_model_parallel_size": job.expert,
            "expert_tensor_parallel_size": job.expert_tensor,
        }
    return TransformerConfig(
        **experts,
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=hf.intermediate_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=hf.head_dim,
        qk_layernorm=True,
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=job.dtype == "bfloat16",
        params_dtype=getattr(torch, job.dtype),
        pipeline_dtype=getattr(torch, job.dtype),
        tensor_model_parallel_size=job.tensor,
        pipeline_model_parallel_size=job.pipeline,
        use_cpu_initialization=True,
    )


def _layers(job: Job, experts: int | None) -> Any:
    spec: Any = gpt_layer_specs.get_gpt_layer_local_spec(
        num_experts=experts, qk_layernorm=True, normalization="RMSNorm"
    )
    _adapt(job, spec.submodules)
    return spec


def _adapt(job: Job, layer: Any) -> None:
    """Give a layer the parameters of Transformer Engine's layers."""
    has_experts = layer.mlp.module is MoELayer
    attention = layer.self_attention.submodules
    if job.fused_norms:
        layer.sharded_state_dict_keys_map = {}
        if hasattr(attention, "linear_qkv"):
            layer.input_layernorm = IdentityOp
            attention.linear_qkv = NormLinear
        else:  # latent attention
            attention.core_attention = IdentityOp  # Megatron's needs Transformer Engine
            attention.q_layernorm = attention.kv_layernorm = IdentityOp
            attention.linear_q_up_proj = attention.linear_kv_up_proj = NormLinear
        if not has_experts:
            layer.pre_mlp_layernorm = IdentityOp
            layer.mlp.submodules.linear_fc1 = NormLinear
    if has_experts and job.grouped_experts:
        layer.mlp.submodules.experts.module = GroupedExperts


def _load_release(ddp: Any, release: Path) -> None:
    metadata = {"singleton_local_shards": False}
    model = _unwrapped(ddp)
    sharded = {
        name: each
        for name, each in model.sharded_state_dict(metadata=metadata).items()
        if not name.endswith("_extra_state")
    }
    if isinstance(getattr(model, "output_layer", None), torch.nn.Linear):
        sharded = {name: each for name, each in sharded.items() if "output_layer" not in name}
    # The release has the names of local layers.
    stored = StoredNames(FileSystemReader(release).read_metadata().state_dict_metadata)
    for each in sharded.values():
        each.key = stored.key(each.key)
    loaded: Any = dist_checkpointing.load(
        {"model": sharded}, str(release), strict="assume_ok_unexpected"
    )
    model.load_state_dict(loaded["model"], strict=False)


def _unwrapped(ddp: Any) -> Any:
    return ddp if isinstance(ddp, GPTModel) else _unwrapped(ddp.module)


def _step(ddp: Any, optimizer: Any, seed: int, scale: float = 0.01) -> None:
    """Take a step on the gradients of a random linear function of all parameters."""
    ddp.zero_grad_buffer()
    optimizer.zero_grad()
    for name, parameter in named_parameters(_unwrapped(ddp)):
        # As reduced over the ranks.
        parameter.main_grad.copy_(gradient(name, parameter.shape, seed, scale))
    optimizer.step()


def gradient(name: str, shape: torch.Size, seed: int, scale: float) -> torch.Tensor:
    """Return the gradient of a parameter, by its name in a model of local layers."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)) + 1000 * seed)
    return scale * torch.randn(shape, generator=generator)


def named_parameters(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield this rank's parameters by their names in a whole model of local layers."""
    ranks = parallel_state.get_expert_model_parallel_world_size()
    first = parallel_state.get_expert_model_parallel_rank() * (
        (model.config.num_moe_experts or 0) // ranks
    )
    for name, parameter in model.named_parameters():
        for fused, plain in _FUSED.items():
            name = name.replace(fused, plain)
        if match := _EXPERT.search(name):
            number = first + int(match[1] or match[4])
            linear = match[2] or match[3]
            name = f"{name[: match.start()]}experts.local_experts.{number}.{linear}.weight"
        yield name, parameter


def _save(job: Job, ddp: Any, optimizer: Any, scheduler: Any, iteration: int) -> Path:
    """Save as Megatron-LM's `save_checkpoint`. Return the folder."""
    metadata: dict[str, Any] = {
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": not job.chained_prefix,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    if job.sharding is not None:
        metadata["distrib_optim_sharding_type"] = job.sharding
    if job.sharding == "fully_reshardable":
        metadata["distrib_optim_fully_reshardable_mem_efficient"] = False
    state: dict[str, Any] = {
        "args": Namespace(
            tensor_model_parallel_size=job.tensor,
            pipeline_model_parallel_size=job.pipeline,
            expert_model_parallel_size=job.expert,
            expert_tensor_parallel_size=job.expert_tensor,
            global_batch_size=SAMPLES_PER_STEP,
            use_distributed_optimizer=job.sharding is not None,
            transformer_impl="transformer_engine" if job.fused_norms else "local",
            iteration=iteration,
            rollout_seed=SEED,
            rollout_shuffle=True,
            rollout_max_prompt_len=None,
            params_dtype=getattr(torch, job.dtype),
        ),
        "checkpoint_version": 3.0,
        "iteration": iteration,
        "num_floating_point_operations_so_far": 0,
        "model": _unwrapped(ddp).sharded_state_dict(metadata=metadata),
    }
    state["optimizer"] = optimizer.sharded_state_dict(state, metadata=metadata)
    state["opt_param_scheduler"] = scheduler.state_dict()
    save = Path(job.save)
    folder = save / f"iter_{iteration:07d}"
    if torch.distributed.get_rank() == 0:
        folder.mkdir(parents=True)
    torch.distributed.barrier()
    stored = {name: value for name, value in metadata.items() if name != "dp_cp_group"}
    dist_checkpointing.save(state, str(folder), content_metadata=stored)
    if torch.distributed.get_rank() == 0:
        (save / "latest_checkpointed_iteration.txt").write_text(str(iteration))
        cursor = save / "rollout" / f"global_dataset_state_dict_{iteration}.pt"
        cursor.parent.mkdir(exist_ok=True)
        drawn = (iteration + 1) * PROMPTS_PER_STEP
        position = {
            "sample_offset": drawn,
            "epoch_id": 0,
            "sample_group_index": drawn,
            "sample_index": (iteration + 1) * SAMPLES_PER_STEP,
            "metadata": {},
        }
        torch.save(position, cursor)
    return folder


def _write_expected(ddp: Any, optimizer: Any, path: Path) -> None:
    """Write Adam's tensors on this rank, with the place of each in its flat parameter."""
    tensors = {}
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for name, parameter in named_parameters(_unwrapped(ddp)):
            values, start = adam_tensors(part, parameter)
            for state, tensor in values.items():
                tensors[f"{state}.{name}@{start}"] = tensor.detach().float().flatten().clone()
    save_file(tensors, path)


def adam_tensors(part: Any, parameter: Any) -> tuple[dict[str, torch.Tensor], int]:
    """Return Adam's tensors of a parameter in an optimizer of this rank, and where they start.

    {} for a parameter of another optimizer.
    """
    start = 0
    if hasattr(part, "gbuf_ranges"):
        if parameter not in part.model_param_gbuf_map:
            return {}, start
        start = part._get_model_param_range_map(parameter)["param"].start
        values = dict(part._get_main_param_and_optimizer_states(parameter))
        main = values["param"]
    else:
        main = getattr(parameter, "main_param", parameter)
        values = part.optimizer.state.get(main, {})
    found = {"fp32_param": main, **values} if values else {}
    return {state: found[state] for state in STATES if state in found}, start
