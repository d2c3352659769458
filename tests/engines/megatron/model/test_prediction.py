"""Layers for multi-token prediction against torch (rlpipe.engines.megatron.model.prediction)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm

from rlpipe.batch.packing import plan
from rlpipe.config.train import TrainConfig
from rlpipe.engines.megatron.checkpoint.conversion.convert import to_adam_state, to_hf
from rlpipe.errors import ConfigError
from rlpipe.system.ports import free_port
from tests.engines.megatron import reference
from tests.engines.megatron.families import make
from tests.engines.megatron.ranks import (
    _train,
    engine,
    make_batch,
    save_and_resume,
    score_and_train,
)
from tests.engines.megatron.test_provided import train_config

SCALE = 0.3
PREFIX = "model.mtp_layers.0."
TRAIN: dict[str, Any] = {
    "max_tokens_per_gpu": 64,
    "loss": {"eps_clip_high": 0.28},
    "optimizer": {"lr": 1e-3, "clip_grad": 0.5, "adam_eps": 1e-5},
    "megatron": {"mtp_num_layers": 1, "mtp_loss_scaling_factor": SCALE},
}


class MiMoLayer(torch.nn.Module):
    """The layer of MiMo's own code: reads hidden state t and embedding t + 1, predicts t + 2."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size = config.hidden_size
        self.block = Qwen2DecoderLayer(config, 0)
        self.token_layernorm = Qwen2RMSNorm(size, config.rms_norm_eps)
        self.hidden_layernorm = Qwen2RMSNorm(size, config.rms_norm_eps)
        self.final_layernorm = Qwen2RMSNorm(size, config.rms_norm_eps)
        self.input_proj = torch.nn.Linear(2 * size, size, bias=False)

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor, angles: Any) -> torch.Tensor:
        both = torch.cat([self.hidden_layernorm(hidden), self.token_layernorm(embedded)], -1)
        out = self.block(self.input_proj(both), position_embeddings=angles)
        return self.final_layernorm(out[0] if isinstance(out, tuple) else out)

    def tensors(self) -> dict[str, torch.Tensor]:
        own = self.state_dict()
        return {PREFIX + name.removeprefix("block."): weight for name, weight in own.items()}


@pytest.fixture(scope="module")
def mimo(tmp_path_factory) -> Path:
    """A tiny MiMo: a Qwen2 with one layer for multi-token prediction."""
    directory = Path(make("qwen2", tmp_path_factory.mktemp("mimo")))
    layer = MiMoLayer(reference.load(str(directory)).config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.12, generator=generator)
    stored = load_file(directory / "model.safetensors")
    save_file(stored | layer.tensors(), directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    config |= {"model_type": "mimo", "num_nextn_predict_layers": 1}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def as_qwen2(directory: Path, target: Path) -> str:
    """Copy the model without its prediction layer, for transformers."""
    target.mkdir()
    config = json.loads((directory / "config.json").read_text()) | {"model_type": "qwen2"}
    (target / "config.json").write_text(json.dumps(config))
    stored = load_file(directory / "model.safetensors")
    save_file(
        {name: weight for name, weight in stored.items() if not name.startswith(PREFIX)},
        target / "model.safetensors",
        metadata={"format": "pt"},
    )
    return str(target)


def prediction_loss(model: Any, layer: torch.nn.Module, batch: Any) -> torch.Tensor:
    """Return the mean over all masked-in response tokens that the layer predicts."""
    losses = []
    for i in range(len(batch)):
        tokens = torch.from_numpy(batch.tokens[batch.offsets[i] : batch.offsets[i + 1]]).long()
        with torch.no_grad():
            hidden = model.model(tokens[None]).last_hidden_state
            embedded = model.model.embed_tokens(tokens[None, 1:])
            angles = model.model.rotary_emb(hidden, torch.arange(len(tokens) - 1)[None])
        if len(tokens) < 3:
            continue
        out = layer(hidden[:, :-1], embedded, angles)
        logits = out[0, :-1] @ model.lm_head.weight.detach().T
        every = cross_entropy(logits, tokens[2:], reduction="none")
        mask = torch.zeros(len(tokens))
        here = slice(batch.response_offsets[i], batch.response_offsets[i + 1])
        mask[batch.prompt_lengths[i] :] = torch.from_numpy(batch.loss_mask[here]).float()
        losses.append(every[mask[2:] > 0])
    return torch.cat(losses).mean()


def test_a_step_trains_the_layer_and_leaves_the_policy_gradient_as_it_is(mimo, tmp_path):
    model: Any = reference.load(as_qwen2(mimo, tmp_path / "qwen2"))
    layer = MiMoLayer(model.config)
    stored = load_file(mimo / "model.safetensors")
    names = {name: PREFIX + name.removeprefix("block.") for name in layer.state_dict()}
    layer.load_state_dict({name: stored[full] for name, full in names.items()})
    train = TrainConfig.model_validate(TRAIN)
    ours = engine(str(mimo), train, 0, 1, free_port())
    batch = make_batch()
    try:
        ours.load_hf()
        found = {name: weight.clone() for name, weight in ours.named_hf_tensors()}
        assert all(torch.equal(found[name], stored[name]) for name in stored)
        scores = ours.score(batch)
        assert np.abs(scores - reference.score(model, batch, 0.8)).max() < 1e-5
        batch = batch.with_columns(proximal_log_probs=scores, reference_log_probs=scores)
        packing = plan(batch.lengths, global_batch_size=None, max_tokens=64, data_parallel=1)
        step = ours.train(batch, packing).steps[0]
        after = {name: weight.clone() for name, weight in ours.named_hf_tensors()}
        ours.save_hf(tmp_path / "out")
    finally:
        ours.close()

    expected = prediction_loss(model, layer, batch)
    assert step["mtp_loss"] == pytest.approx(expected.item(), rel=1e-5)
    every = torch.nn.ModuleList([model, layer])
    optimizer = reference.make_optimizer(every, train)
    (SCALE * expected).backward()
    gradients = [weight.grad for weight in layer.parameters() if weight.grad is not None]
    own = torch.nn.utils.get_total_norm(gradients).item()
    (policy,) = reference.train(model, _Keeps(optimizer), batch, packing, _unclipped(train), 0.8)
    assert step["loss"] == pytest.approx(policy["loss"], rel=1e-4)
    total = math.hypot(policy["grad_norm"], own)
    assert step["grad_norm"] == pytest.approx(total, rel=1e-4)
    torch.nn.utils.clip_grad_norm_(every.parameters(), train.optimizer.clip_grad)
    optimizer.step()
    weights = {**model.state_dict(), **layer.tensors()}
    for name, weight in after.items():
        assert (weight - weights[name]).abs().max() < 2e-5, name
        assert not torch.equal(weight, stored[name])
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(written[name], weight) for name, weight in after.items())


class _Keeps:
    """An optimizer that neither clears gradients nor steps."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.param_groups = optimizer.param_groups

    def zero_grad(self) -> None:
        return

    def step(self) -> None:
        return


def _unclipped(train: TrainConfig) -> TrainConfig:
    optimizer = train.optimizer.model_copy(update={"clip_grad": 1e9})
    return train.model_copy(update={"optimizer": optimizer})


@pytest.mark.parametrize(("family", "layers"), [("qwen3", 1), ("qwen2", 1)])
def test_layers_that_the_model_does_not_have_are_refused(family: str, layers: int, tmp_path):
    train = TrainConfig.model_validate({"megatron": {"mtp_num_layers": layers}})
    with pytest.raises(ConfigError, match="mtp_num_layers"):
        engine(make(family, tmp_path), train, 0, 1, free_port())


def test_a_provided_model_without_the_layer_is_refused(mimo, tmp_path):
    train = TrainConfig.model_validate(TRAIN)
    path = train_config(tmp_path, str(mimo), "plain").custom_model_provider_path
    train = train.model_copy(update={"custom_model_provider_path": path})
    with pytest.raises(ConfigError, match="mtp_block_spec"):
        engine(str(mimo), train, 0, 1, free_port())


def test_the_layer_is_saved_and_training_continues_bit_for_bit(mimo, tmp_path):
    found = save_and_resume(
        0, 1, free_port(), str(mimo), TRAIN, str(tmp_path / "saved"), free_port()
    )
    assert found["loaded"] == found["saved"]
    assert found["resumed"] == found["straight"]


def test_a_converted_optimizer_state_has_the_layer(mimo, tmp_path):
    train = TrainConfig.model_validate(TRAIN)
    digests = []
    for source in ("trained", "continued"):
        model_dir = str(mimo) if source == "trained" else str(tmp_path / "weights")
        ours = engine(model_dir, train, 0, 1, free_port())
        try:
            ours.load_hf()
            if source == "trained":
                _train(ours, [0, 1])
                ours.save_checkpoint(tmp_path / "saved", 1)
            else:
                ours.load_adam_state(tmp_path / "adam")
            digests.append((ours.state_digest(), _train(ours, [2])))
        finally:
            ours.close()
        if source == "trained":
            to_hf(tmp_path / "saved", tmp_path / "weights", origin=mimo)
            to_adam_state(tmp_path / "saved", tmp_path / "adam", origin=mimo)
    assert digests[0] == digests[1]


@pytest.mark.long
@pytest.mark.integration
def test_two_tensor_parallel_ranks_train_the_layer_like_one_rank(mimo, two_ranks):
    train = TRAIN | {"loss": {"kl_loss_coef": 0.05}}
    layout = {"parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True}}
    alone = score_and_train(0, 1, free_port(), str(mimo), train, 1)
    together = two_ranks.run(score_and_train, str(mimo), train | layout, 1)[0]
    for step, expected in zip(together["steps"], alone["steps"], strict=True):
        assert step["mtp_loss"] == pytest.approx(expected["mtp_loss"], rel=1e-5)
        assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    for name, weight in alone["after"].items():
        assert np.abs(together["after"][name] - weight).max() < 2e-5, name
