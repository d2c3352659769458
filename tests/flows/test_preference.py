"""Whole runs of preference pairs, with a kill, a replay and a fork."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from rlpipe.store.audit.verification import check_branch
from rlpipe.store.objects.files import Files
from tests.flows.live_run import REPOSITORY, LiveRun, command
from tests.flows.test_train import committed

HELD_OUT = REPOSITORY / "deployments/recipes/preferences/heldout.jsonl"


def held_out_rows() -> list[dict[str, str]]:
    return [json.loads(line) for line in HELD_OUT.read_text().splitlines()]


def train_through_a_kill(home: Path, recipe: str, iterations: int) -> None:
    """Run a recipe on two data parallel ranks, one of which is killed."""
    overrides = ("resources.actor_num_gpus_per_node=2", f"num_rollout={iterations}")
    with LiveRun(home, "--recipe", recipe, *overrides) as run:
        run.wait_until(lambda: committed(home, recipe) >= 3)
        run.kill_part("ray::TrainerRank")
        assert run.finish(900) == 0, run.output
    assert committed(home, recipe) == iterations


@torch.no_grad()
def log_prob(model, tokenizer, prompt: str, response: str) -> float:
    """Return the log-prob of a response and the end of sequence after a prompt."""
    before = tokenizer.encode(prompt, add_special_tokens=False)
    after = [*tokenizer.encode(response, add_special_tokens=False), tokenizer.eos_token_id]
    logits = model(torch.tensor([before + after])).logits[0, len(before) - 1 : -1]
    return float(torch.log_softmax(logits, -1).gather(1, torch.tensor(after)[:, None]).sum())


@pytest.fixture(autouse=True)
def one_thread():
    """Many small products are slow with several threads on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.long
@pytest.mark.integration
@pytest.mark.timeout(1800)
def test_dpo_learns_held_out_preferences_through_a_kill_and_is_replayed_and_forked(tmp_path):
    home = tmp_path / "home"
    train_through_a_kill(home, "dpo", 8)
    assert check_branch(Files(home / "store"), "dpo") == []
    assert "bit for bit" in command(home, "replay", "dpo")

    command(home, "convert", "dist2hf", "--of", "dpo", "--output-dir", str(tmp_path / "hf"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    right = [
        log_prob(model, tokenizer, row["prompt"], row["chosen"])
        > log_prob(model, tokenizer, row["prompt"], row["rejected"])
        for row in held_out_rows()
    ]
    assert sum(right) / len(right) >= 0.9

    command(home, "fork", "dpo@6", "--run", "ipo", "train.loss.dpo.loss_type=ipo")
    assert check_branch(Files(home / "store"), "ipo") == []


@pytest.mark.long
@pytest.mark.integration
@pytest.mark.timeout(1800)
def test_a_reward_model_learns_held_out_preferences_through_a_kill_and_transformers_loads_it(
    tmp_path,
):
    home = tmp_path / "home"
    train_through_a_kill(home, "reward_model", 16)
    assert check_branch(Files(home / "store"), "reward_model") == []
    assert "bit for bit" in command(home, "replay", "reward_model")

    target = tmp_path / "hf"
    command(home, "convert", "dist2hf", "--of", "reward_model", "--output-dir", str(target))
    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForSequenceClassification.from_pretrained(target, dtype=torch.float32)
    assert model.num_labels == 1

    @torch.no_grad()
    def reward(row: dict[str, str], key: str) -> float:
        ids = tokenizer.encode(row["prompt"] + row[key], add_special_tokens=False)
        return float(model(torch.tensor([[*ids, tokenizer.eos_token_id]])).logits[0, 0])

    right = [reward(row, "chosen") > reward(row, "rejected") for row in held_out_rows()]
    assert sum(right) / len(right) >= 0.9
