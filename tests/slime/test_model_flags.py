"""slime's flags for the model and its checkpoints (rlpipe.slime.model_flags)."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlpipe.slime.command_line import read_flags
from rlpipe.slime.flag_keys import differences
from tests.slime.test_flag_keys import keys, refused

MODEL = {"type": "huggingface", "hf_checkpoint": "/data/Qwen3-4B"}


def test_first_weights_come_from_the_reference_checkpoint_as_in_slime(tmp_path: Path):
    words = "--hf-checkpoint /data/Qwen3-4B --ref-load /data/Qwen3-4B_torch_dist"
    source = MODEL | {
        "megatron_checkpoint": "/data/Qwen3-4B_torch_dist",
        "megatron_checkpoint_step": None,
    }
    assert keys(words) == {"model.source": source}
    assert keys(f"{words} --load {tmp_path} --save {tmp_path}") == {
        "model.source": source,
        "store.root": str(tmp_path),
    }
    source["megatron_checkpoint_step"] = 7
    assert keys(f"{words} --ref-ckpt-step 7")["model.source"] == source


def test_a_reference_in_hugging_faces_format_has_the_first_weights(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    source = keys(f"--hf-checkpoint /data/Qwen3-4B --ref-load {tmp_path}")["model.source"]
    assert source == MODEL | {"hf_checkpoint": str(tmp_path)}
    same = keys("--hf-checkpoint /data/Qwen3-4B --ref-load /data/Qwen3-4B/")
    assert same == {"model.source": MODEL}


@pytest.mark.parametrize(
    "name", ["latest_checkpointed_iteration.txt", "iter_0000020/.metadata", ".metadata"]
)
def test_first_weights_come_from_a_checkpoint_in_load(tmp_path: Path, name: str):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("20")
    base = "--hf-checkpoint /data/Qwen3-4B --ref-load /data/Qwen3-4B_torch_dist"
    for save in ("/elsewhere", tmp_path):
        words = f"{base} --load {tmp_path} --save {save} --ckpt-step 20"
        assert keys(words)["model.source"] == MODEL | {
            "megatron_checkpoint": str(tmp_path),
            "megatron_checkpoint_step": 20,
        }
        assert any("--load" in sentence for sentence in differences(read_flags(words.split())))
        assert differences(read_flags(f"{words} --finetune".split())) == []


def test_another_reference_than_the_first_weights_is_refused_only_where_it_is_used(tmp_path: Path):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20")
    words = f"--hf-checkpoint /data/Qwen3-4B --ref-load /data/ref --load {tmp_path}"
    assert refused(f"{words} --use-kl-loss --kl-loss-coef 0.1").where == "--ref-load"
    assert refused(f"{words} --kl-coef 0.1").where == "--ref-load"
    assert keys(words)["model.source"]["megatron_checkpoint"] == str(tmp_path)


def test_other_weights_in_load_are_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    for save in ("/elsewhere", tmp_path):
        error = refused(f"--hf-checkpoint /m --load {tmp_path} --save {save}")
        assert (error.where, error.found) == ("--load", str(tmp_path))
    assert keys(f"--hf-checkpoint {tmp_path} --load {tmp_path}").keys() == {"model.source"}


def test_load_may_be_the_folder_of_save_before_and_after_a_run(tmp_path: Path):
    folder = tmp_path / "run"
    words = f"--load {folder} --save {folder}"
    expected = {"store.root": str(folder)}
    assert keys(words) == expected
    folder.mkdir()
    assert keys(words) == keys(f"--load {folder}/ --save {folder}") == expected
    (folder / "branches").mkdir()
    assert keys(words) == expected
    error = refused(f"--load {folder} --save /elsewhere")
    assert (error.where, "--fork" in str(error.do)) == ("--load", True)
    assert keys("--load s3://bucket/run --save s3://bucket/run") == {
        "store.root": "s3://bucket/run"
    }
    assert refused("--load s3://bucket/run --save /elsewhere").where == "--load"


def test_a_teacher_that_is_a_megatron_checkpoint_is_refused(tmp_path: Path):
    error = refused(f"--use-opd --opd-type megatron --opd-teacher-load {tmp_path}")
    assert (error.where, error.expected) == ("--opd-teacher-load", "a Hugging Face directory")


def test_a_critic_starts_from_a_model_directory_or_continues_with_its_run(tmp_path: Path):
    critic = tmp_path / "critic"
    critic.mkdir()
    (critic / "latest_checkpointed_iteration.txt").touch()
    assert refused(f"--critic-load {critic} --critic-save /elsewhere").where == "--critic-load"
    assert refused(f"--critic-load {critic} --critic-save {critic}").where == "--critic-load"
    (critic / "latest_checkpointed_iteration.txt").unlink()
    assert keys(f"--critic-load {critic} --critic-save {critic}") == {}
    (critic / "config.json").write_text("{}")
    assert keys(f"--critic-load {critic} --hf-checkpoint {critic}").keys() == {"model.source"}
    assert keys(f"--critic-load {critic}") == {"critic.hf_checkpoint": str(critic)}
    assert keys("--save s3://bucket/run") == {"store.root": "s3://bucket/run"}
