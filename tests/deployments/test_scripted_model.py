"""The model of smoke tests writes what its script says (deployments.recipes.scripted_model)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from deployments.recipes.scripted_model import make_scripted_model

CALL = '<call>{"code": "print(2)"}</call>'
SCRIPT = {"\n": [CALL], "ok: ": ["3", "4"], "3": ["."], "4": ["."]}


def test_a_token_is_followed_by_one_of_its_script_and_any_other_by_the_end(tmp_path: Path):
    make_scripted_model(str(tmp_path), script=SCRIPT, seed=1)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "2 + 2?"}],
        tokenize=False,
        add_generation_prompt=True,
        tools=[{"name": "code"}],
    )
    assert '<tools>{"name": "code"}</tools>' in prompt.replace("\n", "")
    assert prompt.endswith("assistant\n")

    def next_tokens(text: str) -> dict[str, float]:
        ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
        with torch.no_grad():
            chances = model(ids).logits[0, -1].softmax(-1)
        top = chances.topk(2)
        likely = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        return {tokenizer.decode([token]): chance for token, chance in likely if chance > 0.1}

    assert list(next_tokens(prompt)) == [CALL]
    assert sorted(next_tokens("ok: ")) == ["3", "4"]
    assert next_tokens("ok: ")["3"] > 0.49
    assert list(next_tokens("3")) == ["."]
    assert list(next_tokens(".")) == list(next_tokens("x")) == ["<eos>"]


def test_only_the_layers_depend_on_the_seed(tmp_path: Path):
    weights = []
    for seed in (1, 2):
        folder = tmp_path / str(seed)
        make_scripted_model(str(folder), script=SCRIPT, seed=seed)
        model = AutoModelForCausalLM.from_pretrained(folder)
        weights.append({name: value.clone() for name, value in model.named_parameters()})
    first, second = weights
    equal = Counter(bool(torch.equal(first[name], second[name])) for name in first)
    assert torch.equal(first["lm_head.weight"], second["lm_head.weight"])
    assert equal[False] > 0
    assert len(first["model.embed_tokens.weight"]) % 32 == 0
