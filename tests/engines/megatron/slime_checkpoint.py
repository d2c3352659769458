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
from argparse import Namespace
from collections.abc import Mapping
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
from safetensors.torch import save_file

from rlpipe.system.ports import free_port
from tests.engines.megatron.ranks import PRELOADED
from tests.processes import adopt, fork_server

SAMPLES_PER_STEP = 8
PROMPTS_PER_STEP = 2
SEED = 42
"""slime's default of --rollout-seed."""
LR = 1e-3


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
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    iterations: tuple[int, ...] = (0, 1)
    """Iterations that are saved. One Adam step is taken in each."""
    total_steps: int = 20
    critic: bool = False
    """A value head takes the place of the output layer."""
    trains: bool = True
    """False: the learning rate is 0, and the saved weights are those of `release`."""


class NormLinear(ColumnParallelLinear):
    """The parameters of a linear layer and the norm before it, as in Transformer Engine."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        weight: Any = self._parameters.pop("weight")
        self.layer_norm_weight = torch.nn.Parameter(
            torch.ones(self.input_size, dtype=weight.dtype, device=weight.device)
        )
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(
            self.layer_norm_weight
        )
        self.weight = weight

    def forward(self, *_arguments: Any, **_keywords: Any) -> Any:
        raise NotImplementedError  # gradients come from `_step`


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
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(job.tensor, job.pipeline)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    ddp, optimizer, scheduler = _build(job)
    _load_release(ddp, Path(job.release) / "release")
    optimizer.reload_model_params()
    for iteration in range(max(job.iterations) + 1):
        _step(ddp, optimizer, seed=iteration)
        scheduler.step(increment=SAMPLES_PER_STEP)
        if iteration in job.iterations:
            _save(job, ddp, optimizer, scheduler, iteration)
    torch.distributed.destroy_process_group()


def _build(job: Job) -> tuple[Any, Any, Any]:
    """Return the model in DDP, its optimizer and its schedule."""
    hf: Any = Namespace(**json.loads((Path(job.origin) / "config.json").read_text()))
    config = _config(job, hf)
    model: Any = GPTModel(
        config=config,
        transformer_layer_spec=_layers(job),
        vocab_size=hf.vocab_size,
        max_sequence_length=hf.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=hf.tie_word_embeddings and not job.critic,
        position_embedding_type="rope",
    )
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
    optimizer = get_megatron_optimizer(
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


def _config(job: Job, hf: Any) -> TransformerConfig:
    return TransformerConfig(
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


def _layers(job: Job) -> Any:
    spec: Any = gpt_layer_specs.get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    if job.fused_norms:
        layer = spec.submodules
        layer.input_layernorm = layer.pre_mlp_layernorm = IdentityOp
        layer.self_attention.submodules.linear_qkv = NormLinear
        layer.mlp.submodules.linear_fc1 = NormLinear
        layer.sharded_state_dict_keys_map = {}
    return spec


def _load_release(ddp: Any, release: Path) -> None:
    metadata = {"singleton_local_shards": False}
    model = _unwrapped(ddp)
    sharded = model.sharded_state_dict(metadata=metadata)
    if isinstance(getattr(model, "output_layer", None), torch.nn.Linear):
        sharded = {name: each for name, each in sharded.items() if "output_layer" not in name}
    loaded: Any = dist_checkpointing.load(
        {"model": sharded}, str(release), strict="assume_ok_unexpected"
    )
    model.load_state_dict(loaded["model"], strict=False)


def _unwrapped(ddp: Any) -> Any:
    return ddp if isinstance(ddp, GPTModel) else _unwrapped(ddp.module)


def _step(ddp: Any, optimizer: Any, seed: int) -> None:
    """Take a step on the gradients of a random linear function of all parameters."""
    ddp.zero_grad_buffer()
    optimizer.zero_grad()
    for name, parameter in sorted(_unwrapped(ddp).named_parameters()):
        number = sum(map(ord, name)) + 1000 * seed
        generator = torch.Generator().manual_seed(number)
        parameter.main_grad.copy_(0.01 * torch.randn(parameter.shape, generator=generator))
    ddp.finish_grad_sync()
    optimizer.step()


def _save(job: Job, ddp: Any, optimizer: Any, scheduler: Any, iteration: int) -> None:
    """Save as Megatron-LM's `save_checkpoint`."""
    metadata: dict[str, Any] = {
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
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
            expert_model_parallel_size=1,
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
    _write_expected(job, ddp, optimizer, folder)
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


def _write_expected(job: Job, ddp: Any, optimizer: Any, folder: Path) -> None:
    """Write Adam's tensors of every parameter on a single rank, for comparison."""
    if torch.distributed.get_world_size() > 1:
        return
    names = {parameter: name for name, parameter in _unwrapped(ddp).named_parameters()}
    tensors = {}
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for parameter in part.get_parameters() if job.sharding is None else names:
            if job.sharding is None:
                values = part.optimizer.state[parameter]
                values = {"fp32_param": parameter, **values}
            else:
                values = part._get_main_param_and_optimizer_states(parameter)
                values["fp32_param"] = values.pop("param")
            name = names[parameter]
            for state in ("fp32_param", "exp_avg", "exp_avg_sq"):
                full = values[state].detach().float().reshape(parameter.shape)
                tensors[f"{state}.{name}"] = full.contiguous().clone()
    save_file(tensors, folder / "expected.safetensors")
