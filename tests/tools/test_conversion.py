"""The conversion commands: their arguments, and convert_to_hf under torchrun."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlpipe.errors import ConfigError
from tools import convert_hf_to_torch_dist, convert_to_hf, convert_torch_dist_to_hf
from tools.command import parsers
from tools.conversion import size_bytes

TRAINING = (
    "--prompt-data rows.jsonl --rm-type math --rollout-batch-size 4 --n-samples-per-prompt 2 "
    "--num-rollout 1 model.dtype=float32"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "qwen2"
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture
def call(monkeypatch):
    def run(command, *words: object) -> int:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        monkeypatch.setattr(sys, "argv", [command.__name__, *map(str, words)])
        return command.main()

    return run


@pytest.mark.integration
def test_the_commands_convert_both_directions_and_compare(model, call, tmp_path, capsys):
    there = ("--hf-checkpoint", model, "--save", tmp_path / "dist", "--max-shard-size", "20KB")
    assert call(convert_hf_to_torch_dist, *there, "--num-layers", "2", "--hidden-size", "32") == 0
    back = (
        "--load",
        tmp_path / "dist" / "release",
        "--save",
        tmp_path / "back",
        "--origin-hf-dir",
        model,
    )
    assert call(convert_torch_dist_to_hf, *back, "--check-same") == 0
    assert "every bit is the same" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "back")
    assert call(convert_torch_dist_to_hf, *back, "--check-same", "--dtype", "bfloat16") == 1
    assert "float32[64, 32] and bfloat16[64, 32]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("parser", "source"),
    [(parsers.hf2dist, "--hf-checkpoint"), (parsers.dist2hf, "--load")],
)
def test_both_directions_take_the_same_names_and_those_of_slime(parser, source):
    common = parser().parse_args(["--input-dir", "in", "--output-dir", "out"])
    assert (common.input_dir, common.output_dir) == ("in", "out")
    assert parser().parse_args([source, "in", "--save", "out"]) == common


def test_flags_of_another_model_are_refused(model, call, tmp_path, capsys):
    assert (
        call(
            convert_hf_to_torch_dist,
            "--hf-checkpoint",
            model,
            "--save",
            tmp_path / "dist",
            "--num-layers",
            "40",
        )
        == 2
    )
    assert "num_hidden_layers is 2" in capsys.readouterr().err


def test_a_conversion_needs_one_source(call, capsys, tmp_path):
    assert call(convert_torch_dist_to_hf, "--output-dir", tmp_path / "out") == 2
    assert "one checkpoint is needed" in capsys.readouterr().err
    assert (
        call(
            convert_torch_dist_to_hf,
            "--of",
            "absent",
            "--output-dir",
            tmp_path / "out",
            "--home",
            tmp_path,
        )
        == 2
    )
    assert "the run does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 1024**3), ("500 MB", 500 * 1024**2), ("1.5GiB", 3 * 512 * 1024**2)],
)
def test_sizes(text, size):
    assert size_bytes(text) == size


@pytest.mark.parametrize("text", ["", "much", "0GB", "-1MB"])
def test_an_invalid_size_is_refused(text):
    with pytest.raises(ConfigError, match="not a size"):
        size_bytes(text)


def as_torchrun(rank: int, world_size: int, port: int, words: list[str]) -> int:
    """Run the command as one of the ranks."""
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    with patch.dict(os.environ, variables), patch("sys.argv", ["convert_to_hf.py", *words]):
        return convert_to_hf.main()


@pytest.mark.integration
def test_ranks_convert_checkpoints_of_both_formats(model, call, tmp_path, two_ranks):
    from tests.engines.megatron.conversion_jobs import in_old_format

    assert (
        call(convert_hf_to_torch_dist, "--hf-checkpoint", model, "--save", tmp_path / "dist") == 0
    )
    in_old_format(model, tmp_path / "old" / "iter_0000007", 2, 1, 1, padded_rows=0)
    (tmp_path / "old" / "latest_checkpointed_iteration.txt").write_text("7")
    for load, layout in (
        ("dist", "--pipeline-model-parallel-size"),
        ("old", "--tensor-model-parallel-size"),
    ):
        words = (
            f"--load {tmp_path / load} --output-dir {tmp_path / f'{load}-hf'} --check-same "
            f"--hf-checkpoint {model}"
        )
        words = [*words.split(), layout, "2", *TRAINING.split()]
        assert two_ranks.run(as_torchrun, words) == [0, 0]
    assert (tmp_path / "old-hf" / "config.json").is_file()
