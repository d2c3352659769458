"""slime's data sets, data sources and loss masks (rlpipe.data.slime_data)."""

from __future__ import annotations

import json
from argparse import Namespace

import pytest

from deployments.recipes.agents import CHATML
from deployments.recipes.tiny_models import character_tokenizer
from rlpipe.data import slime_data
from rlpipe.slime.sample import Sample

TOKENIZER = character_tokenizer("abcdefgh")
TOKENIZER.chat_template = CHATML


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [{"q": letter, "a": "1", "metadata": {"source_name": "s"}} for letter in "abcd"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def arguments(**values):
    given = {
        "rollout_global_dataset": True,
        "buffer_filter_path": None,
        "n_samples_per_prompt": 2,
        "rollout_max_prompt_len": None,
        "input_key": "q",
        "label_key": "a",
        "metadata_key": "metadata",
        "tool_key": None,
        "rollout_seed": 1,
        "rollout_shuffle": False,
    }
    return Namespace(**{**given, **values})


def test_a_data_set_has_samples_in_an_order_that_follows_seed_and_epoch(prompts):
    data = slime_data.Dataset(prompts, TOKENIZER, None, 100, prompt_key="q", label_key="a")
    assert [sample.prompt for sample in data.samples] == list("abcd")
    assert slime_data.get_source(data[0]) == "s"
    assert slime_data.get_source(Sample()) == "unknown"
    data.shuffle(1)
    first = [sample.prompt for sample in data.samples]
    data.shuffle(2)
    data.shuffle(1)
    assert [sample.prompt for sample in data.samples] == first and sorted(first) == list("abcd")


def test_a_data_set_applies_the_chat_template_and_drops_long_prompts(prompts):
    options = {"prompt_key": "q", "apply_chat_template": True}
    data = slime_data.Dataset(prompts, TOKENIZER, None, None, **options)
    assert "<|im_start|>user" in data[0].prompt
    assert len(slime_data.Dataset(prompts, TOKENIZER, None, 3, **options)) == 0
    with pytest.raises(ValueError, match="multimodal_keys"):
        slime_data.Dataset(prompts, TOKENIZER, None, None, multimodal_keys={"image": "i"})


def test_slices_of_files_are_read(prompts):
    assert [row["q"] for row in slime_data.read_file(f"{prompts}@[1:-1]")] == ["b", "c"]
    assert slime_data._parse_generalized_path("a.jsonl@[:2]") == ("a.jsonl", slice(None, 2))
    assert slime_data._parse_generalized_path("a.jsonl") == ("a.jsonl", None)


def test_a_data_source_repeats_its_prompts_and_numbers_groups(prompts, tmp_path):
    TOKENIZER.save_pretrained(tmp_path / "model")
    source = slime_data.RolloutDataSource(
        arguments(prompt_data=prompts, hf_checkpoint=str(tmp_path / "model"))
    )
    groups = source.get_samples(5)
    assert [group[0].prompt for group in groups] == list("abcda")
    assert [group[1].group_index for group in groups] == list(range(5))
    assert (len(source), source.epoch_id) == (4, 1)
    with pytest.raises(RuntimeError, match="read-only"):
        source.add_samples(groups)


def test_a_buffer_is_drawn_first():
    source = slime_data.RolloutDataSourceWithBuffer(arguments(prompt_data=None))
    given = [[Sample(prompt="x"), Sample(prompt="x")], [Sample(prompt="y"), Sample(prompt="y")]]
    source.add_samples(given)
    assert source.get_samples(1) == given[:1] and source.get_buffer_length() == 1
    assert [group[0].prompt for group in source.get_samples(2)] == ["y", ""]
    with pytest.raises(ValueError, match="a group of 1 samples, expected 2"):
        source.add_samples([[Sample()]])
    source.update_metadata({"0": ["i"]})
    assert source.get_metadata() == {"0": ["i"]}


def test_all_answers_of_a_conversation_are_trained():
    messages = [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "cd"},
        {"role": "user", "content": "e"},
        {"role": "assistant", "content": "f"},
    ]
    generator = slime_data.MultiTurnLossMaskGenerator(TOKENIZER, tokenizer_type="qwen3")
    ids, mask = generator.get_loss_mask(messages)
    assert len(ids) == len(mask)
    texts = generator.get_text_from_loss_mask(ids, mask)
    assert [text.split("<|")[0] for text in texts] == ["cd", "f"]
    assert generator.get_response_lengths([mask]) == [len(mask) - mask.index(1)]
    assert slime_data.get_response_lengths([[0, 0]]) == [0]


def test_a_model_of_text_has_no_processor(tmp_path):
    assert slime_data.load_processor(str(tmp_path)) is None
