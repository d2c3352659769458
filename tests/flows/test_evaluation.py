"""Configuration and weights of an evaluation, before actors start (flows.derived_runs)."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.derived_runs import evaluation_config, saved_weights
from rlpipe.batch.files import write_adapters
from rlpipe.config.load import validate
from rlpipe.config.model import BranchModel
from rlpipe.data.prompts import load_prompts
from rlpipe.errors import ConfigError
from rlpipe.lineage.stage_inputs import Inputs, checkpoint_inputs
from rlpipe.slime.command_line import read_flags
from rlpipe.slime.flag_keys import overrides_of
from rlpipe.store.branches import Branches
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.types import Commit, DataState, Stage
from tests.model_files import write_model
from tools import evaluate

HELD = {"name": "held", "prompts": {"type": "reasoning_gym", "task": "chain_sum", "size": 4}}
RUN: dict[str, Any] = {
    "run": "old",
    "num_rollout": 50,
    "model": {"source": {"type": "huggingface", "hf_checkpoint": "model"}},
    "data": {"prompts": {"type": "file", "paths": ["a.jsonl"]}},
    "rollout": {"rollout_batch_size": 4, "n_samples_per_prompt": 2},
    "reward": {"function": {"type": "math"}},
    "train": {"optimizer": {"lr_decay_style": "cosine"}},
    "stop_when": {"metric": "eval/held/accuracy", "at_least": 0.5},
    "evaluation": {"datasets": [HELD], "skip_eval_before_train": True},
    "resources": {"cluster": "shared"},
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with the run `old`: three iterations, with checkpoints after the first two."""
    (tmp_path / "old").mkdir()
    for name in ("a.jsonl", "aime.jsonl"):
        (tmp_path / name).write_text('{"prompt": "1 + 1", "input": "1 + 1", "label": "2"}\n')
    write_model(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    record = {"store": str(tmp_path / "store"), "config": validate(RUN).model_dump(mode="json")}
    (tmp_path / "old" / "run.json").write_text(json.dumps(record))
    files = Files(tmp_path / "store")
    branches = Branches(files)
    nodes = Nodes(files)
    branches.create("old", RUN, init="init")
    for k in range(3):
        parent = branches.parent_name("old", k)
        commit = Commit(
            branch="old",
            iteration=k,
            parent=parent,
            plans=(),
            nodes={Stage.TRAIN: f"w{k}"},
            data=DataState(),
            config_digest="",
        )
        branches.commit(commit)
        if k < 2:
            nodes.commit(checkpoint_inputs(f"w{k}").node(files=(), outputs={}))
    return tmp_path


def test_the_newest_saved_weights_are_evaluated_by_default(home: Path):
    files = Files(home / "store")
    assert saved_weights(files, "old", None) == BranchModel(branch="old", iteration=1)
    assert saved_weights(files, "old", 0) == BranchModel(branch="old", iteration=0)
    with pytest.raises(ConfigError, match="these weights were not saved"):
        saved_weights(files, "old", 2)


def test_adapters_in_the_store_are_saved_weights_of_a_run_with_adapters(home: Path):
    files = Files(home / "store")
    nodes = Nodes(files)
    branches = Branches(files)
    inputs = Inputs(Stage.TRAIN, {"before": "w2"})
    record = write_adapters(files, inputs.digest, b"adapters")
    nodes.commit(inputs.node(files=(record,), outputs={"version": 4}))
    commit = branches.read("old", 2)
    parent = branches.parent_name("old", 3)
    following = {"iteration": 3, "parent": parent, "nodes": {Stage.TRAIN: inputs.digest}}
    branches.commit(commit.model_copy(update=following))
    assert saved_weights(files, "old", None).iteration == 1
    assert saved_weights(files, "old", None, adapters=True).iteration == 3
    with pytest.raises(ConfigError, match="these weights were not saved"):
        saved_weights(files, "old", 2, adapters=True)
    run = json.loads((home / "old" / "run.json").read_text())
    assert evaluation_config(home, run="old").run == "old.eval-1"
    run["config"]["train"]["lora"] = {"rank": 4}
    (home / "old" / "run.json").write_text(json.dumps(run))
    run["config"]["sync"]["transport"] = "adapter"
    (home / "old" / "run.json").write_text(json.dumps(run))
    config = evaluation_config(home, run="old")
    assert (config.run, config.sync.transport) == ("old.eval-3", "tensor")


def test_an_evaluation_is_a_separate_run_without_training(home: Path):
    config = evaluation_config(
        home, run="old", overrides=["evaluation.datasets.0.n_samples_per_eval_prompt=16"]
    )
    assert (config.run, config.num_rollout, config.start_from) == (
        "old.eval-1",
        0,
        BranchModel(branch="old", iteration=1),
    )
    assert (config.stop_when, config.warm_start, config.resources.cluster) == (None, None, None)
    assert config.evaluation.skip_eval_before_train is False
    assert config.evaluation.datasets[0].n_samples_per_eval_prompt == 16
    assert config.reward == validate(RUN).reward


def test_saved_weights_with_adapters_replace_the_first_adapters_of_the_run(home: Path):
    record = json.loads((home / "old" / "run.json").read_text())
    record["config"]["train"]["lora"] = {"rank": 4}
    record["config"]["model"]["adapter"] = str(home / "adapter")
    (home / "old" / "run.json").write_text(json.dumps(record))
    config = evaluation_config(home, run="old")
    assert config.start_from == BranchModel(branch="old", iteration=1)
    assert config.model.adapter is None
    assert config.train.lora is not None


def test_the_model_of_a_recipe_is_evaluated_without_a_run(home: Path):
    recipe = home / "mine.yaml"
    recipe.write_text(json.dumps({key: value for key, value in RUN.items() if key != "run"}))
    config = evaluation_config(home, run=None, recipe=str(recipe), name="x")
    assert (config.run, config.start_from, config.num_rollout) == ("x", None, 0)


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ({"run": None}, "no weights to evaluate"),
        ({"run": "new"}, "there is no such run"),
        ({"run": "old", "overrides": ["evaluation.datasets=[]"]}, "no held-out set to evaluate"),
        ({"run": "old", "iteration": 2}, "these weights were not saved"),
    ],
)
def test_wrong_input_is_refused_at_once(home: Path, asked: dict[str, Any], problem: str):
    with pytest.raises(ConfigError, match=problem):
        evaluation_config(home, **asked)


def test_a_reward_model_is_not_evaluated_and_no_held_out_set_is_advised(home: Path):
    scores = {
        **{key: RUN[key] for key in ("num_rollout", "model")},
        "run": "scores",
        "data": {
            "prompts": {**RUN["data"]["prompts"], "label_key": "label", "rejected_key": "rejected"}
        },
        "rollout": {"type": "dataset", "rollout_batch_size": 4, "n_samples_per_prompt": 1},
        "reward": {"function": {"type": "none"}},
        "advantage": {"advantage_estimator": "none"},
        "train": {"loss": {"type": "reward_model"}},
    }
    (home / "scores").mkdir()
    record = {"store": str(home / "store"), "config": validate(scores).model_dump(mode="json")}
    (home / "scores" / "run.json").write_text(json.dumps(record))
    for overrides in ((), (f"evaluation.datasets={json.dumps([HELD])}",)):
        with pytest.raises(ConfigError, match="a reward model generates no text") as caught:
            evaluation_config(home, run="scores", overrides=overrides)
        assert "dist2hf" in str(caught.value.do)


def test_the_advice_without_held_out_sets_can_be_followed(home: Path):
    none = "evaluation.datasets=[]"
    with pytest.raises(ConfigError) as caught:
        evaluation_config(home, run="old", overrides=[none])
    flags, key = re.findall(r"--eval-[^,]*|(?<=')evaluation.*(?=')", str(caught.value.do))
    (home / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    words = [text.replace("FILE.jsonl", f"{home}/rows.jsonl") for text in (flags, key)]
    for overrides in (overrides_of(read_flags(words[0].split())), [words[1]]):
        config = evaluation_config(home, run="old", overrides=[none, *overrides])
        (held,) = config.evaluation.datasets
        (row,) = load_prompts(held.prompts)
        assert (row.prompt, row.label) == ("1+1=", "2")


@pytest.fixture
def command(home: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run `tools.evaluate` up to the flow; return the exit code."""

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["tools.evaluate", "--home", str(home), *arguments])
        metrics = {"eval/held/pass@4": 0.5, "eval/held/accuracy": 0.25}
        summary = {"run": "old.eval-0", "evaluation": metrics}
        monkeypatch.setattr(evaluate, "finish", lambda _, **_more: (0, summary))
        return evaluate.main()

    return run


def test_the_command_prints_every_metric(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str]
):
    assert command("--of", "old@0", "--eval-prompt-data", "aime", "aime.jsonl") == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["eval/held/accuracy", "0.2500"],
        ["eval/held/pass@4", "0.5000"],
    ]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--of", "old@last"], "not the name of a commit"),
        (["--of", "absent"], "there is no such run"),
        ([], "no weights to evaluate"),
        (["--of", "old", "--off", "x"], "unknown flag"),
    ],
)
def test_the_command_refuses_wrong_input(
    command: Callable[..., int],
    arguments: list[str],
    problem: str,
    capsys: pytest.CaptureFixture[str],
):
    assert command(*arguments) == 2
    assert problem in capsys.readouterr().err
