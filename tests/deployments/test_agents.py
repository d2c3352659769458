"""The model of the recipes with tools, and the recipes' data files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from deployments.recipes import search_data
from deployments.recipes.agents import make_agent_model
from rlpipe.config.load import load_run
from rlpipe.rollout.retrieval import Retrieval
from rlpipe.types import Sample


def test_each_tag_is_one_token_and_decoding_restores_the_text(tmp_path):
    make_agent_model(
        str(tmp_path), tools=["calc"], hidden_size=16, num_layers=1, intermediate_size=16
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "12 * 3 = <calc>12 * 3</calc><result>36</result>36"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == 23 and tokenizer.decode(ids, skip_special_tokens=True) == text
    assert (
        json.loads((tmp_path / "config.json").read_text())["vocab_size"] == len(tokenizer)
        and len(tokenizer) % 8 == 0
    )
    messages = [{"role": "user", "content": "hi"}]
    shown = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert shown == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("recipe", ["calculator", "search"])
def test_a_recipe_and_its_warm_start_use_the_same_model_and_tools(recipe):
    run = load_run(recipe)
    first = load_run(str(run.warm_start))
    assert (
        run.model == first.model and run.rollout.tools == first.rollout.tools and run.rollout.tools
    )


def test_the_files_of_search_equal_generated_ones(tmp_path, monkeypatch):
    shipped = {path.name: path.read_text() for path in search_data.FOLDER.iterdir()}
    monkeypatch.setattr(search_data, "FOLDER", tmp_path)
    search_data.main()
    assert {path.name: path.read_text() for path in Path(tmp_path).iterdir()} == shipped


def test_a_search_for_the_island_answers_every_held_out_question():
    corpus = Retrieval(str(search_data.FOLDER / "corpus.jsonl"), topk=1)
    seen = {
        json.loads(line)["prompt"]
        for line in (search_data.FOLDER / "train.jsonl").read_text().splitlines()
    }
    for line in (search_data.FOLDER / "heldout.jsonl").read_text().splitlines():
        question = json.loads(line)
        fact, _, island = question["prompt"].removesuffix("? ").partition(" of ")
        assert f"{fact} {question['label']}" in corpus(island) and question["prompt"] not in seen


@pytest.mark.parametrize(
    ("response", "reward", "searched"),
    [
        ("<search>a</search><result>x</result>oak", 1.0, 1.0),
        ("<result>x</result>elm", 0.0, 1.0),
        ("oak", 0.0, 0.0),
    ],
)
def test_only_an_answer_after_a_result_counts(response, reward, searched):
    assert search_data.reward(Sample(label="oak", response=response)) == {
        "reward": reward,
        "searched": searched,
    }
