"""Jobs and files for tests of conversion: a trained checkpoint, and one in the older format."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlpipe.batch.packing import plan
from rlpipe.config.train import TrainConfig
from rlpipe.engines.megatron.checkpoint.conversion.hf_files import HfWeights
from rlpipe.engines.megatron.checkpoint.conversion.meta_model import (
    MetaModel,
    single_process_groups,
)
from tests.engines.megatron.ranks import engine, make_batch


def save_and_tell(
    rank: int, world_size: int, port: int, model_dir: str, train: dict, directory: str
) -> dict[str, np.ndarray]:
    """Train a step, save iteration 3 and return the weights by Hugging Face name."""
    ours = engine(model_dir, TrainConfig.model_validate(train), rank, world_size, port)
    ours.load_hf()
    batch = make_batch()
    packing = plan(
        batch.lengths, global_batch_size=None, max_tokens=64, data_parallel=ours.data_parallel
    )
    ours.train(batch, packing)
    ours.save_checkpoint(directory, 3)
    weights = {name: tensor.clone().numpy() for name, tensor in ours.named_hf_tensors()}
    ours.close()
    return weights


def in_old_format(
    model_dir: Path, folder: Path, tensor: int, pipeline: int, expert: int, *, padded_rows: int
) -> None:
    """Write the model like ranks of Megatron-LM with Transformer Engine's layers.

    The files have Megatron-LM's names and folders. The vocabulary ends with `padded_rows`.
    """
    with single_process_groups():
        meta_model = MetaModel(model_dir, torch.float32)
        weights = HfWeights(model_dir)
        whole = {
            meta_model.mbridge_names[name]: (
                meta_model.parameter(name),
                meta_model.from_hf(
                    name, [weights.read(each) for each in meta_model.hf_names(name)]
                ),
            )
            for name in meta_model.tensors
        }
        layers = meta_model.bridge.config.num_layers // pipeline
        experts = (meta_model.bridge.config.num_moe_experts or 0) // expert
        for stage in range(pipeline):
            for part in range(expert):
                states: list[dict[str, Any]] = [{} for _ in range(tensor)]
                for name, (parameter, value) in whole.items():
                    local = _local(name, stage, part, layers, experts, last=pipeline - 1)
                    for rank, piece in enumerate(
                        _pieces(
                            meta_model, name, parameter, _padded(name, value, padded_rows), tensor
                        )
                    ):
                        if local is not None:
                            states[rank][local] = piece.clone()
                for rank, state in enumerate(states):
                    name = (
                        f"mp_rank_{rank:02d}"
                        + (f"_{stage:03d}" if pipeline > 1 else "")
                        + (f"_{part:03d}" if expert > 1 else "")
                    )
                    (folder / name).mkdir(parents=True)
                    args = Namespace(
                        tensor_model_parallel_size=tensor,
                        pipeline_model_parallel_size=pipeline,
                        expert_model_parallel_size=expert,
                    )
                    torch.save(
                        {"args": args, "model": state, "iteration": 7},
                        folder / name / "model_optim_rng.pt",
                    )


def _padded(name: str, value: torch.Tensor, rows: int) -> torch.Tensor:
    vocabulary = name in ("embedding.word_embeddings.weight", "output_layer.weight")
    return torch.cat([value, value.new_zeros(rows, value.shape[1])]) if vocabulary else value


def _pieces(
    meta_model: MetaModel, name: str, parameter: Any, value: torch.Tensor, tensor: int
) -> list[torch.Tensor]:
    if not getattr(parameter, "tensor_model_parallel", False):
        return [value] * tensor
    shape = list(value.shape)
    shape[parameter.partition_dim] //= tensor
    target = torch.empty(shape, device="meta")
    return list(meta_model.bridge._weight_split_across_tp(name, value, target, tensor))


def _local(name: str, stage: int, part: int, layers: int, experts: int, *, last: int) -> str | None:
    """Return a rank's name of a tensor, None if the rank does not have it."""
    if name.startswith("decoder.layers."):
        _, _, number, rest = name.split(".", 3)
        if int(number) // layers != stage:
            return None
        name = f"decoder.layers.{int(number) % layers}.{rest}"
        head, found, expert = (
            name.partition(".weight") if ".experts.linear_fc" in name else (name, "", "")
        )
        if not found:
            return name
        return f"{head}.weight{int(expert) % experts}" if int(expert) // experts == part else None
    return name if stage == (0 if name.startswith("embedding.") else last) else None
