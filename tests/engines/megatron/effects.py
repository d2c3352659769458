"""What each of Megatron's arguments changes in a tiny model on a CPU: the measurement behind the
table of refused arguments.

    python -m tests.engines.megatron.effects OUTPUT.json [NAME ...] [--cases CASE ...]

Every field of TransformerConfig, OptimizerConfig and DistributedDataParallelConfig is set to other
values than the one that it has, in a dense model, a mixture of experts and a model with latent
attention. Scores, gradients, parameters and optimizer state after two optimizer steps are compared
bit for bit with those of the same model without the argument.
"""

from __future__ import annotations

import argparse
import ast
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from rlpipe.batch.packing import plan
from rlpipe.config.arguments import names
from rlpipe.config.arguments.table import TABLE
from rlpipe.config.train import TrainConfig
from rlpipe.engines.megatron.checkpoint.state import named_state
from rlpipe.system.ports import free_port
from tests.engines.megatron.families import make
from tests.engines.megatron.ranks import engine, make_batch, near


@dataclass(frozen=True)
class Case:
    """A model and the settings that it is trained with."""

    family: str
    dtype: str = "float32"
    distributed: bool = False
    megatron: tuple[tuple[str, Any], ...] = ()
    """Further arguments that the measured argument needs."""


CASES = {
    "dense": Case("qwen3"),
    "dense bf16": Case("qwen3", dtype="bfloat16"),
    "dense sharded": Case("qwen2", distributed=True),
    "experts": Case("glm4.5"),
    "experts together": Case("qwen3_moe", megatron=(("moe_grouped_gemm", True),)),
    "latent": Case("deepseek_v3"),
}

VALUES: dict[str, list[Any]] = {
    "recompute_granularity": ["full", "selective"],
    "recompute_modules": [["mlp"], ["layernorm"]],
    "window_size": [[2, 0]],
    "window_attn_skip_freq": [2],
    "no_rope_freq": [2, [1, 0]],
    "linear_attention_freq": [2],
    "moe_layer_freq": [2],
    "cp_comm_type": ["a2a", "p2p"],
    "pipeline_model_parallel_layout": ["Et|tL"],
    "hierarchical_context_parallel_sizes": [[1, 1]],
    "moe_router_load_balancing_type": ["aux_loss", "sinkhorn"],
    "moe_aux_loss_coeff": [0.5],
    "moe_z_loss_coeff": [0.5],
    "mrope_section": [[2, 3, 3]],
    "data_parallel_sharding_strategy": ["optim", "optim_grads_params"],
    "outer_dp_sharding_strategy": ["optim"],
    "optimizer": ["sgd", "muon", "lion"],
    "muon_scale_mode": ["unit_rms_norm"],
    "muon_fp32_matmul_prec": ["high"],
    "muon_tp_mode": ["duplicated"],
    "cuda_graph_scope": ["attn", "full_iteration"],
    "config_logger_dir": ["/tmp/mg/logged"],
    "offload_modules": [["attn_norm"]],
    "optimizer_offload_fraction": [1.0],
    "bucket_size": [1000],
    "suggested_communication_unit_size": [1000],
    "mtp_num_layers": [1],
    "num_layers": [4],
    "moe_expert_capacity_factor": [0.5],
    "moe_router_topk_limited_devices": [1],
    "num_microbatches_with_partial_activation_checkpoints": [1],
    "recompute_num_layers": [2],
    "loss_scale": [4.0],
    "softmax_scale": [0.5],
    "activation_func_clamp_value": [0.1],
    "decoupled_lr": [0.5],
    "decoupled_min_lr": [0.001],
    "fp8_quantizer_factory": ["builtins.dict"],
    "fp4_quantizer_factory": ["builtins.dict"],
    "quant_recipe": [],
    "inference_sampling_seed": [7],
}
REQUIRED_ARGUMENTS: dict[str, dict[str, Any]] = {
    "qk_clip_alpha": {"qk_clip": True},
    "recompute_method": {"recompute_granularity": "full", "recompute_num_layers": 1},
    "recompute_num_layers": {"recompute_granularity": "full", "recompute_method": "uniform"},
    "recompute_modules": {"recompute_granularity": "selective"},
    "distribute_saved_activations": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "use_torch_optimizer_for_cpu_offload": {
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": 1.0,
    },
    "window_attn_skip_freq": {"window_size": [2, 0]},
    "moe_pad_expert_input_to_capacity": {"moe_expert_capacity_factor": 0.5},
    "moe_token_drop_policy": {"moe_expert_capacity_factor": 0.5},
    "decoupled_min_lr": {"decoupled_lr": 0.5},
}
"""Argument → further arguments without which it is refused or has no effect."""


def off_default(spelled: str, now: Any) -> list[Any]:
    """Return values of a type of the tables that differ from the current one."""
    found: list[Any] = []
    for part in spelled.split(" | "):
        if part == "bool":
            found += [True, False]
        elif part == "int":
            found += [2, 3] if not isinstance(now, int) else [now + 1, 2 * now + 2]
        elif part == "float":
            found += [0.25, 0.5] if not now else [now / 2, now * 2]
        elif part not in ("None", "list", "dict", "str", names.OBJECT):
            found.append(ast.literal_eval(part))
    return [
        value for value in found if value != now or isinstance(value, bool) != isinstance(now, bool)
    ]


def train(model_dir: str, case: Case, megatron: dict[str, Any]) -> dict[str, str]:
    """Return a digest of each part of a model after two optimizer steps."""
    settings: dict[str, Any] = {
        "max_tokens_per_gpu": 64,
        "optimizer": {"lr": 1e-2, "weight_decay": 0.1, "lr_decay_style": "linear"},
        "loss": {"entropy_coef": 0.01},
        "use_distributed_optimizer": case.distributed,
        "megatron": {**dict(case.megatron), **megatron},
    }
    ours = engine(
        model_dir, TrainConfig.model_validate(settings), 0, 1, free_port(), dtype=case.dtype
    )
    try:
        ours.load_hf()
        batch = make_batch()
        scores = ours.score(batch)
        batch = batch.with_columns(
            proximal_log_probs=near(scores, 0.2, 0), rollout_log_probs=near(scores, 0.2, 1)
        )
        packing = plan(
            batch.lengths, global_batch_size=12, max_tokens=ours.max_tokens, data_parallel=1
        )
        steps = ours.train(batch, packing).steps
        state = dict(named_state(ours.trained))
        gradients = {
            name: getattr(one, "main_grad")  # noqa: B009 (Megatron sets it; torch does not know it)
            for name, one in ours.trained.last_model.named_parameters()
            if hasattr(one, "main_grad")
        }
        return {
            "scores": _digest(torch.from_numpy(np.asarray(scores))),
            "gradients": " ".join(_digest(gradients[name]) for name in sorted(gradients)),
            "steps": json.dumps(steps),
            "parameters": " ".join(
                f"{name} {_digest(state[name])}" for name in state if name.startswith("model.")
            ),
            "optimizer": " ".join(
                f"{name} {_digest(state[name])}" for name in state if name.startswith("optimizer.")
            ),
        }
    finally:
        ours.close()


def _digest(tensor: torch.Tensor) -> str:
    plain = tensor.detach().cpu().contiguous()
    content = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{plain.dtype}{tuple(plain.shape)}{xxhash.xxh3_64_hexdigest(content)}"


def measure(
    name: str, entry: dict[str, Any], case: Case, model_dir: str, plain: dict[str, str], now: Any
) -> dict[str, str]:
    """Return value → the parts that it changes, `nothing`, or the error."""
    found: dict[str, str] = {}
    values = VALUES[name] if name in VALUES else off_default(entry["type"], now)
    for value in values:
        required = REQUIRED_ARGUMENTS.get(name, {})
        try:
            expected = train(model_dir, case, required) if required else plain
            got = train(model_dir, case, {**required, name: value})
        except BaseException as error:  # noqa: BLE001 - Megatron asserts, raises and exits
            text = " ".join(str(error).split())
            found[json.dumps(value)] = f"error: {type(error).__name__}: {text[:160]}"
            continue
        changed = [part for part in got if got[part] != expected[part]]
        found[json.dumps(value)] = ", ".join(changed) or "nothing"
    return found


def sweep(
    only: list[str], cases: dict[str, Case], root: Path
) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Return (name, case, effect of each value) of every name in every case."""
    from rlpipe.engines.megatron.bridges import bridge as bridges  # noqa: F401

    known = names.entries("megatron")
    for label, case in cases.items():
        model_dir = make(case.family, root / label.replace(" ", "_"))
        plain = train(model_dir, case, {})
        assert train(model_dir, case, {}) == plain, f"{label} is not repeatable"
        current = _current(model_dir, case)
        for name in only or list(known):
            yield (
                name,
                label,
                measure(
                    name,
                    known[name],
                    case,
                    model_dir,
                    plain,
                    current.get(name, known[name]["default"]),
                ),
            )


def _current(model_dir: str, case: Case) -> dict[str, Any]:
    """Return the values of the built configurations."""
    settings: Any = {"megatron": dict(case.megatron), "use_distributed_optimizer": case.distributed}
    ours = engine(
        model_dir, TrainConfig.model_validate(settings), 0, 1, free_port(), dtype=case.dtype
    )
    try:
        configs = (
            ours.trained.chunks[0].ddp_config,
            ours.trained.optimizer.config,
            ours.trained.bridge.config,
        )
        return {name: value for config in configs for name, value in vars(config).items()}
    finally:
        ours.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="What each of Megatron's arguments changes.")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("output", type=Path, help="JSON file, to which names and cases are added")
    parser.add_argument("names", nargs="*", help="only these")
    arguments = parser.parse_args()
    TABLE["megatron"].clear()
    with tempfile.TemporaryDirectory() as root:
        cases = {label: CASES[label] for label in arguments.cases}
        for name, label, outcome in sweep(arguments.names, cases, Path(root)):
            print(label, name, outcome, flush=True)
            found = json.loads(arguments.output.read_text()) if arguments.output.is_file() else {}
            found.setdefault(name, {})[label] = outcome
            arguments.output.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
