"""slime's flags for the model and its checkpoints (rlpipe.slime.model_flags)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rlpipe.slime.command_line import read_flags
from rlpipe.slime.flag_keys import differences
from rlpipe.slime.model_flags import iterations_done
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


def test_layers_for_multi_token_prediction_are_trained_if_model_and_layout_have_them(
    tmp_path: Path,
):
    words = f"--hf-checkpoint {tmp_path} --mtp-num-layers 1 --enable-mtp-training"
    for config, expected in (
        ('{"num_nextn_predict_layers": 1}', 1),
        ('{"mtp_num_hidden_layers": 1}', 1),
        ('{"num_nextn_predict_layers": 2}', None),
        ("{}", None),
    ):
        (tmp_path / "config.json").write_text(config)
        found = keys(words)
        assert found.get("train.megatron.mtp_num_layers") == expected
        if expected:
            assert found["train.megatron.mtp_loss_scaling_factor"] == 0.2
        noted = any("keep their weights" in note for note in differences(read_flags(words.split())))
        assert noted is (expected is None)
    (tmp_path / "config.json").write_text('{"num_nextn_predict_layers": 1}')
    assert (
        keys(f"{words} --mtp-loss-scaling-factor 0.3")["train.megatron.mtp_loss_scaling_factor"]
        == 0.3
    )
    split = keys(f"{words} --pipeline-model-parallel-size 2 --num-layers 4")
    assert "train.megatron.mtp_num_layers" not in split


def slime_folder(folder: Path, iteration: int = 20) -> Path:
    """Make the files that identify a folder of checkpoints."""
    (folder / f"iter_{iteration:07d}").mkdir(parents=True)
    (folder / f"iter_{iteration:07d}" / ".metadata").touch()
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return folder


BASE = "--hf-checkpoint /data/Qwen3-4B --ref-load /data/Qwen3-4B_torch_dist"


def test_a_checkpoint_in_load_continues_its_optimizer_and_its_iterations(tmp_path: Path):
    load = slime_folder(tmp_path / "run")
    checkpoint = MODEL | {"megatron_checkpoint": str(load), "megatron_checkpoint_step": None}
    for save in ("/elsewhere", load):
        words = f"{BASE} --load {load} --save {save}"
        assert keys(words)["model.source"] == checkpoint | {"megatron_optimizer": True}
        assert keys(words)["store.root"] == str(load / "rlpipe" if save == load else save)
        assert iterations_done(read_flags(words.split()).own) == 21
        (sentence,) = differences(read_flags(words.split()))
        assert "21 iterations" in sentence
    assert iterations_done(read_flags(f"{words} --start-rollout-id 7".split()).own) == 7
    fresh = f"{words} --no-load-optim --no-load-rng"
    assert keys(fresh)["model.source"] == checkpoint
    assert iterations_done(read_flags(fresh.split()).own) == 21
    tuned = f"{words} --finetune"
    assert keys(tuned)["model.source"] == checkpoint
    assert iterations_done(read_flags(tuned.split()).own) == 0
    assert differences(read_flags(tuned.split())) == []


def test_ckpt_step_chooses_the_checkpoint_in_load(tmp_path: Path):
    load = slime_folder(slime_folder(tmp_path / "run", 5), 20)
    words = f"{BASE} --load {load} --ckpt-step 5"
    assert keys(words)["model.source"]["megatron_checkpoint_step"] == 5
    assert iterations_done(read_flags(words.split()).own) == 6
    missing = f"{BASE} --load {load} --ckpt-step 6"
    assert refused(missing).where == "--load"


def test_converted_weights_in_load_have_no_optimizer_and_no_iteration(tmp_path: Path):
    (tmp_path / "release").mkdir()
    (tmp_path / "release" / ".metadata").touch()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    words = f"{BASE} --load {tmp_path}"
    source = keys(words)["model.source"]
    assert source["megatron_checkpoint"] == str(tmp_path)
    assert "megatron_optimizer" not in source
    assert iterations_done(read_flags(words.split()).own) == 0


def test_a_model_directory_in_load_has_the_first_weights(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    for save in ("/elsewhere", tmp_path):
        words = f"{BASE} --load {tmp_path} --save {save}"
        assert keys(words)["model.source"] == MODEL | {"hf_checkpoint": str(tmp_path)}
    assert keys(f"--hf-checkpoint {tmp_path} --load {tmp_path}").keys() == {"model.source"}


@pytest.mark.parametrize("kl", ["--use-kl-loss --kl-loss-coef 0.1", "--kl-coef 0.1"])
def test_the_reference_is_ref_load_where_first_weights_come_from_load(tmp_path: Path, kl: str):
    load = slime_folder(tmp_path / "run")
    words = f"--hf-checkpoint /data/Qwen3-4B --load {load} {kl}"
    with_reference = keys(f"{words} --ref-load /data/ref --ref-ckpt-step 3")
    assert with_reference["reference.ref_load"] == "/data/ref"
    assert with_reference["reference.ref_ckpt_step"] == 3
    assert "reference.ref_load" not in keys(f"{words} --ref-load {load}")
    assert refused(words).where == "--ref-load"
    unused = keys(f"--hf-checkpoint /data/Qwen3-4B --load {load} --ref-load /data/ref")
    assert "reference.ref_load" not in unused
    first = keys(f"--hf-checkpoint /data/Qwen3-4B --ref-load /data/ref {kl}")
    assert "reference.ref_load" not in first


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


def test_a_teacher_may_be_a_megatron_checkpoint():
    words = "--use-opd --opd-type megatron --opd-teacher-load /teacher --opd-teacher-ckpt-step 9"
    found = keys(words)
    assert found["teacher.opd_teacher_load"] == "/teacher"
    assert found["teacher.opd_teacher_ckpt_step"] == 9


def test_save_hf_sets_the_directories_of_exported_weights():
    assert keys("--save-hf /models/{rollout_id}") == {"checkpoint.save_hf": "/models/{rollout_id}"}


def test_a_critic_starts_from_a_model_directory_or_continues_with_its_run(tmp_path: Path):
    critic = slime_folder(tmp_path / "critic")
    weights = {"critic.megatron_checkpoint": str(critic), "critic.megatron_checkpoint_step": None}
    for save in ("/elsewhere", critic):
        found = keys(f"--critic-load {critic} --critic-save {save}")
        assert found == weights | {"critic.megatron_optimizer": True}
    for fresh in ("--finetune", "--no-load-optim"):
        assert keys(f"--critic-load {critic} {fresh}") == weights
    # slime counts iterations by the critic, which also trains where the policy does not.
    load = slime_folder(tmp_path / "run", 18)
    words = f"{BASE} --load {load} --critic-load {critic}"
    assert iterations_done(read_flags(words.split()).own) == 19
    assert iterations_done(read_flags(f"{words} --advantage-estimator ppo".split()).own) == 21
    shutil.rmtree(critic)
    critic.mkdir()
    assert keys(f"--critic-load {critic} --critic-save {critic}") == {}
    (critic / "config.json").write_text("{}")
    assert keys(f"--critic-load {critic} --hf-checkpoint {critic}").keys() == {"model.source"}
    assert keys(f"--critic-load {critic}") == {"critic.hf_checkpoint": str(critic)}
    assert keys("--save s3://bucket/run") == {"store.root": "s3://bucket/run"}
