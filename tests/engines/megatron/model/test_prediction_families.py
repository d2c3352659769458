"""Layers for multi-token prediction of families with experts and mixed attention, against
transformers' layers (rlpipe.engines.megatron.bridges.prediction_names)."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rlpipe.batch.packing import plan
from rlpipe.config.train import TrainConfig
from rlpipe.engines.megatron.checkpoint.conversion.convert import to_hf
from rlpipe.sync.tensors import check_tensors, expected_shapes
from rlpipe.system.ports import free_port
from tests.engines.megatron import reference
from tests.engines.megatron.families import make
from tests.engines.megatron.model.test_prediction import SCALE, prediction_loss
from tests.engines.megatron.ranks import engine, make_batch
from tests.parameters import each

TRAIN: dict[str, Any] = {
    "max_tokens_per_gpu": 64,
    # Without clipping, the policy's gradient does not change the step of the layer.
    "optimizer": {"lr": 1e-3, "clip_grad": 0.0, "adam_eps": 1e-5, "weight_decay": 0.1},
    "megatron": {"mtp_num_layers": 1, "mtp_loss_scaling_factor": SCALE},
}
FAMILIES = {
    "deepseek_v3": ("deepseek_v3.modeling_deepseek_v3", "DeepseekV3"),
    "glm4.5": ("glm4_moe.modeling_glm4_moe", "Glm4Moe"),
    "glm5": ("glm_moe_dsa.modeling_glm_moe_dsa", "GlmMoeDsa"),
    "qwen3_next": ("qwen3_next.modeling_qwen3_next", "Qwen3Next"),
    "qwen3.5": ("qwen3_5.modeling_qwen3_5", "Qwen3_5"),
}
"""Family → transformers' module, and the prefix of its classes."""
_SEPARATE = ("qwen3_next", "qwen3.5")
"""Families whose layer has a prefix of its own in the file."""


class Layer(torch.nn.Module):
    """A layer that reads embedding t + 1 and hidden state t, and predicts token t + 2."""

    def __init__(self, family: str, config: Any) -> None:
        super().__init__()
        module, prefix = FAMILIES[family]
        classes = importlib.import_module(f"transformers.models.{module}")
        norm = getattr(classes, f"{prefix}RMSNorm")
        size = config.hidden_size
        self.family = family
        self.after = config.num_hidden_layers
        self.block = getattr(classes, f"{prefix}DecoderLayer")(config, _last_layer(config))
        self.enorm = norm(size, config.rms_norm_eps)
        self.hnorm = norm(size, config.rms_norm_eps)
        self.norm = norm(size, config.rms_norm_eps)
        self.proj = torch.nn.Linear(2 * size, size, bias=False)

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor, angles: Any) -> torch.Tensor:
        both = self.proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1))
        size = both.shape[1]
        mask = torch.full((1, 1, size, size), float("-inf")).triu(1)
        positions = torch.arange(size)[None]
        out = self.block(
            both, attention_mask=mask, position_embeddings=angles, position_ids=positions
        )
        return self.norm(out[0] if isinstance(out, tuple) else out)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the weights by their names in a file."""
        separate = self.family in _SEPARATE
        layer = "mtp.layers.0" if separate else f"model.layers.{self.after}"
        own = (
            ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm", "mtp.fc")
            if separate
            else tuple(
                f"{layer}.{name}" for name in ("enorm", "hnorm", "shared_head.norm", "eh_proj")
            )
        )
        found = {
            f"{name}.weight": module.weight
            for name, module in zip(
                own, (self.enorm, self.hnorm, self.norm, self.proj), strict=True
            )
        }
        for name, weight in self.block.state_dict(keep_vars=True).items():
            if name == "mlp.experts.gate_up_proj":
                for expert, both in enumerate(weight):
                    gate, up = both.chunk(2)
                    found[f"{layer}.mlp.experts.{expert}.gate_proj.weight"] = gate
                    found[f"{layer}.mlp.experts.{expert}.up_proj.weight"] = up
            elif name == "mlp.experts.down_proj":
                for expert, down in enumerate(weight):
                    found[f"{layer}.mlp.experts.{expert}.down_proj.weight"] = down
            else:
                found[f"{layer}.{name}"] = weight
        return {name: weight.detach().clone() for name, weight in found.items()}


def _last_layer(config: Any) -> int:
    """Return the number of a layer with full attention and experts."""
    kinds = getattr(config, "layer_types", None) or []
    if "linear_attention" in kinds:
        return kinds.index("full_attention")
    indexers = getattr(config, "indexer_types", None)
    if indexers:
        return max(i for i, kind in enumerate(indexers) if kind == "full")
    return config.num_hidden_layers - 1


def make_with_layer(family: str, directory: Path) -> tuple[str, Any, Layer]:
    """Write a model with a layer for multi-token prediction; return also transformers' parts."""
    source = make(family, directory)
    model: Any = reference.load(source)
    layer = Layer(family, model.config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.12, generator=generator)
        for name, buffer in layer.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2, generator=generator)
    stored = load_file(f"{source}/model.safetensors")
    tensors = {name: weight.contiguous() for name, weight in layer.tensors().items()}
    save_file(stored | tensors, f"{source}/model.safetensors", metadata={"format": "pt"})
    path = directory / "config.json"
    config = json.loads(path.read_text())
    key = "mtp_num_hidden_layers" if family in _SEPARATE else "num_nextn_predict_layers"
    path.write_text(json.dumps(config | {key: 1}))
    return source, model, layer


@pytest.mark.parametrize("family", each(FAMILIES, ["deepseek_v3", "qwen3.5"]))
def test_the_layer_is_loaded_trained_and_exported(family, tmp_path):
    directory, model, layer = make_with_layer(family, tmp_path / "model")
    train = TrainConfig.model_validate(TRAIN)
    ours = engine(directory, train, 0, 1, free_port())
    batch = make_batch()
    try:
        ours.load_hf()
        ours.save_hf(tmp_path / "same")
        scores = ours.score(batch)
        assert np.abs(scores - reference.score(model, batch, 0.8)).max() < 1e-5
        batch = batch.with_columns(proximal_log_probs=scores, reference_log_probs=scores)
        packing = plan(batch.lengths, global_batch_size=None, max_tokens=64, data_parallel=1)
        step = ours.train(batch, packing).steps[0]
        ours.save_hf(tmp_path / "trained")
        ours.save_checkpoint(tmp_path / "saved", 3)
        shapes = expected_shapes(directory)
        missing = set(shapes)
        pushed = dict(check_tensors(ours.named_hf_tensors(), shapes, missing))
    finally:
        ours.close()
    stored = load_file(f"{directory}/model.safetensors")
    same = load_file(tmp_path / "same" / "model.safetensors")
    assert same.keys() == stored.keys()
    assert all(torch.equal(same[name], stored[name]) for name in stored)

    expected = prediction_loss(model, layer, batch)
    assert step["mtp_loss"] == pytest.approx(expected.item(), rel=1e-5)
    optimizer = reference.make_optimizer(layer, train)
    (SCALE * expected).backward()
    optimizer.step()
    trained = load_file(tmp_path / "trained" / "model.safetensors")
    for name, weight in layer.tensors().items():
        assert (trained[name] - weight).abs().max() < 1e-4, name
        if weight.is_floating_point() and not name.endswith("e_score_correction_bias"):
            unused = ".indexer." in name or ".experts." in name
            assert unused or not torch.equal(trained[name], stored[name]), name
    assert not missing and pushed.keys() == shapes.keys()

    to_hf(tmp_path / "saved", tmp_path / "converted", origin=Path(directory))
    converted = load_file(tmp_path / "converted" / "model.safetensors")
    assert converted.keys() == trained.keys()
    assert all(torch.equal(converted[name], trained[name]) for name in trained)
