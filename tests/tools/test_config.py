"""The config command: the source of each value (tools.config)."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlpipe.config.load import load_run
from rlpipe.config.text import dump, parse
from tools import config

RECIPE = """\
num_rollout: 3
preset: qwen3-4b
model: {source: {type: huggingface, hf_checkpoint: /models/m}}
data:
  prompts: {type: file, paths: [train.jsonl]}
rollout:
  rollout_batch_size: 4
  n_samples_per_prompt: 2
reward:
  function: {type: math}
evaluation:
  eval_interval: 1
  datasets:
  - name: one
    prompts: {type: file, paths: [one.jsonl]}
"""
Command = Callable[..., str]


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """Run the command in the recipe's folder; return its output."""
    (tmp_path / "mine.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["rlpipe config", *words])
        assert config.main() == 0
        return capsys.readouterr().out

    return run


def sources(output: str) -> dict[str, str]:
    """Return dotted key → comment of an output."""
    _, lines = parse(output, "output")
    comments = output.splitlines()
    return {key: comments[line - 1].partition(" # ")[2] for key, line in lines.items()}


def test_each_value_has_its_source(command: Command):
    found = sources(command("mine.yaml", "rollout.n_samples_per_prompt=8", "--run", "other"))
    assert found["num_rollout"] == "mine.yaml:1"
    assert found["rollout.rollout_batch_size"] == "mine.yaml:7"
    assert found["rollout.n_samples_per_prompt"] == "override rollout.n_samples_per_prompt"
    assert found["run"] == "override run"
    preset = found["train.parallel.tensor_model_parallel_size"]
    assert re.search(r"models/qwen3-4b\.yaml:\d+$", preset)
    assert found["train.optimizer.lr"] == "default"
    assert found["evaluation.datasets.0.name"] == "mine.yaml:14"
    assert found["evaluation.datasets.0.temperature"] == "default"


def test_an_override_replaces_the_sources_of_the_keys_below_it(command: Command):
    found = sources(command("mine.yaml", "reward.function={type: f1}"))
    assert found["reward.function.type"] == "override reward.function"
    assert sources(command("mine.yaml"))["reward.function.type"] == "mine.yaml:10"


def test_the_output_is_a_recipe_with_the_same_configuration(command: Command, tmp_path: Path):
    for number, words in enumerate([(), ("--plain",), ("--changed",), ("--changed", "--plain")]):
        copy = tmp_path / f"copy{number}.yaml"
        copy.write_text(command("mine.yaml", "seed=7", *words))
        assert load_run(copy, (), "mine") == load_run("mine.yaml", ["seed=7"], "mine"), words
    assert "loss_mask_type" not in (tmp_path / "copy2.yaml").read_text()


def test_flags_of_slime_are_sources(command: Command):
    words = [
        *("--hf-checkpoint", "/models/m", "--prompt-data", "train.jsonl", "--rm-type", "math"),
        *("--num-rollout", "3", "--rollout-batch-size", "4", "--n-samples-per-prompt", "2"),
        *("--lr", "1e-6", "--sglang-mem-fraction-static", "0.7", "--recompute-num-layers", "1"),
        "train.optimizer.adam_beta1=0.8",
    ]
    found = sources(command(*words))
    assert found["train.optimizer.lr"] == "slime: --lr"
    assert found["engine.sglang.mem_fraction_static"] == "slime: --sglang-mem-fraction-static"
    assert found["train.megatron.recompute_num_layers"] == "slime: --recompute-num-layers"
    assert found["model.source.hf_checkpoint"] == "slime: --hf-checkpoint"
    assert found["reward.function.type"] == "slime: --rm-type"
    assert found["train.optimizer.adam_beta1"] == "override train.optimizer.adam_beta1"
    assert found["flags.rm_type"] == "slime: --rm-type"


def test_weights_name_the_flag_of_their_folder(command: Command, tmp_path: Path):
    for name in ("load", "reference", "critic"):
        (tmp_path / name / "iter_0000020").mkdir(parents=True)
        (tmp_path / name / "iter_0000020" / ".metadata").touch()
        (tmp_path / name / "latest_checkpointed_iteration.txt").write_text("20")
    words = [
        *("--hf-checkpoint", "/models/m", "--prompt-data", "train.jsonl", "--rm-type", "math"),
        *("--num-rollout", "30", "--rollout-batch-size", "4", "--n-samples-per-prompt", "2"),
        *("--ref-load", "reference"),
    ]
    source = "model.source"
    found = sources(command(*words))
    assert found[f"{source}.hf_checkpoint"] == "slime: --hf-checkpoint"
    assert found[f"{source}.megatron_checkpoint"] == "slime: --ref-load"
    # A folder of --load without a checkpoint gives no weights.
    found = sources(command(*words, "--load", "new", "--save", "new"))
    assert found[f"{source}.megatron_checkpoint"] == "slime: --ref-load"
    of_ppo = ("--advantage-estimator", "ppo", "--critic-load", "critic")
    found = sources(command(*words, "--load", "load", "--ckpt-step", "20", *of_ppo))
    assert found[f"{source}.megatron_checkpoint"] == "slime: --load"
    assert found[f"{source}.megatron_optimizer"] == "slime: --load"
    assert found[f"{source}.megatron_checkpoint_step"] == "slime: --ckpt-step"
    assert found["critic.megatron_checkpoint"] == "slime: --critic-load"
    other = f"{source}={{type: huggingface, hf_checkpoint: /other}}"
    found = sources(command(*words, other))
    assert found[f"{source}.hf_checkpoint"] == f"override {source}"
    assert found["advantage.fan_out_baseline"] == "slime: default"


def test_wrong_input_gives_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    monkeypatch.chdir(tmp_path)
    for words, printed in (
        (["no_such"], "the project has no such recipe"),
        ([], "nothing to train"),
        (["spell_backward", "num_rolout=1"], "num_rollout"),
    ):
        monkeypatch.setattr(sys, "argv", ["rlpipe config", *words])
        assert config.main() == 2
        assert printed in capsys.readouterr().err


def test_values_of_several_lines_keep_their_text():
    values = {"a": "x\ny", "b": [], "c": {"d": "word " * 40}}
    assert parse(config.annotated(values, {}), "text")[0] == values == parse(dump(values), "t")[0]
