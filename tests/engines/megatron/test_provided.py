"""A user's function builds the policy (rlpipe.engines.megatron.model.provided)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rlpipe.config.train import TrainConfig
from rlpipe.errors import ConfigError
from rlpipe.system.ports import free_port
from tests.engines.megatron.ranks import engine, make_batch
from tests.engines.megatron.test_engine import PLAIN, one_plan

PROVIDER = """
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

class Louder(GPTModel):
    def forward(self, *args, **keywords):
        return 1.5 * super().forward(*args, **keywords)

def build(kind, config, pre_process, post_process):
    return kind(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(
            qk_layernorm=config.qk_layernorm, normalization=config.normalization
        ),
        vocab_size=VOCABULARY,
        max_sequence_length=64,
        pre_process=pre_process,
        post_process=post_process,
        position_embedding_type="rope",
        rotary_base=ROTARY_BASE,
        share_embeddings_and_output_weights=TIED,
    )

def plain(pre_process=True, post_process=True, vp_stage=None, config=None):
    assert vp_stage is None
    return build(GPTModel, config, pre_process, post_process)

def louder(pre_process, post_process, config):
    return build(Louder, config, pre_process, post_process)

def wrong(pre_process, post_process):
    return torch.nn.Linear(1, 1)

def fails(pre_process, post_process):
    raise KeyError("no such size")
"""


def train_config(folder: Path, model_dir: str, name: str) -> TrainConfig:
    model = json.loads(Path(model_dir, "config.json").read_text())
    theta = model.get("rope_theta") or model["rope_parameters"]["rope_theta"]
    names = {
        "VOCABULARY": model["vocab_size"],
        "ROTARY_BASE": theta,
        "TIED": model["tie_word_embeddings"],
    }
    source = "".join(f"{name} = {value!r}\n" for name, value in names.items()) + PROVIDER
    (folder / "mine.py").write_text(source)
    return PLAIN.model_copy(update={"custom_model_provider_path": f"{folder}/mine.py:{name}"})


def test_a_provided_model_scores_and_trains_as_that_of_the_family(models, tmp_path):
    batch = make_batch()
    results = []
    for name in (None, "plain", "louder"):
        train = PLAIN if name is None else train_config(tmp_path, models["qwen3"], name)
        ours = engine(models["qwen3"], train, 0, 1, free_port())
        try:
            ours.load_hf()
            scores = ours.score(batch)
            scored = batch.with_columns(proximal_log_probs=scores)
            step = ours.train(scored, one_plan(ours, batch), version=0).steps[0]
            weights = {key: value.clone() for key, value in ours.named_hf_tensors()}
        finally:
            ours.close()
        results.append((scores, step["grad_norm"], weights))
    (family, norm, weights), (plain, plain_norm, plain_weights), (louder, _, _) = results
    assert np.abs(plain - family).max() < 1e-5
    assert plain_norm == pytest.approx(norm, rel=1e-4)
    assert weights.keys() == plain_weights.keys()
    assert max((weights[key] - plain_weights[key]).abs().max() for key in weights) < 1e-5
    assert np.abs(louder - family).max() > 1e-2, "the forward of the user's class is used"


@pytest.mark.parametrize(
    ("name", "error"),
    [("wrong", "another type"), ("fails", "the model provider failed"), ("absent", "absent")],
)
def test_a_provider_without_a_model_is_refused(models, tmp_path, name, error):
    train = train_config(tmp_path, models["qwen3"], name)
    with pytest.raises(ConfigError, match=error):
        engine(models["qwen3"], train, 0, 1, free_port())
