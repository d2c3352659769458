"""What is wrong with a run is found before anything is started (rlpipe.preflight)."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlpipe.config.load import validate
from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.run import RunConfig
from rlpipe.errors import ActorLost, ConfigError, DataError, ResourceError, StoreError
from rlpipe.preflight import FULL_BYTES, MIN_FREE_BYTES, check, note_full_disk
from tests.model_files import write_model

ROW = '{"prompt": "1 + 1 =", "answer": "2"}\n'


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with all that a run needs."""
    write_model(tmp_path / "model")
    for name in ("train", "held"):
        (tmp_path / f"{name}.jsonl").write_text(ROW * 3)
    (tmp_path / "mine.py").write_text(
        "def reward(sample):\n    return 1.0\n\n\ndef make(directory):\n    raise AssertionError\n"
    )
    return tmp_path


def prompts(place: Path, name: str) -> dict[str, Any]:
    return {"type": "file", "paths": [str(place / name)], "label_key": "answer"}


def config(place: Path, held_reward: dict[str, Any] | None = None, **sections: Any) -> RunConfig:
    held = {"name": "held", "prompts": prompts(place, "held.jsonl"), "reward": held_reward}
    values = {
        "run": "run",
        "num_rollout": 1,
        "model": {"source": {"type": "huggingface", "hf_checkpoint": str(place / "model")}},
        "data": {"prompts": prompts(place, "train.jsonl")},
        "rollout": {"rollout_batch_size": 1, "n_samples_per_prompt": 2},
        "reward": {"function": {"type": "math"}},
        "evaluation": {"datasets": [held]},
    }
    return validate({**values, **sections})


def python(place: Path, name: str) -> dict[str, Any]:
    return {"function": {"type": "python", "path": f"{place}/mine.py:{name}"}}


def test_a_model_without_experts_has_no_routing_to_replay(place: Path):
    with pytest.raises(
        ConfigError, match=r"train\.use_rollout_routing_replay: the model has no experts"
    ):
        check(config(place, train={"use_rollout_routing_replay": True}), place / "home")


def test_quantised_weights_are_for_engines_that_get_quantised_ones(place: Path):
    quantised = {
        "model_type": "qwen2",
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }
    (place / "model" / "config.json").write_text(json.dumps(quantised))
    with pytest.raises(
        ConfigError, match=r"(?s)engine\.quantization.*fp8 in the model's config\.json"
    ):
        check(config(place), place / "home")
    check(config(place, engine={"quantization": "fp8"}), place / "home")


def test_a_run_that_has_all_it_needs_passes_and_nothing_is_made(place: Path):
    before = sorted(place.iterdir())
    check(config(place), place / "home")
    check(config(place, reward=python(place, "reward")), place / "home")
    check(
        config(place, model={"source": {"type": "made", "maker": f"{place}/mine.py:make"}}),
        place / "home",
    )
    assert [path for path in sorted(place.iterdir()) if path.name != "__pycache__"] == before


@pytest.mark.parametrize("name", ["train", "held"])
def test_a_bad_row_of_any_prompt_file_is_named_with_its_line(place: Path, name: str):
    (place / f"{name}.jsonl").write_text(ROW + '{"prompt": 3, "answer": "2"}\n')
    with pytest.raises(DataError) as caught:
        check(config(place), place)
    assert caught.value.where == f"{place}/{name}.jsonl:2"


@pytest.mark.parametrize("name", ["train", "held"])
def test_a_prompt_file_that_is_missing_or_empty_is_named(place: Path, name: str):
    (place / f"{name}.jsonl").write_text("")
    with pytest.raises(DataError, match=rf"{name}\.jsonl: the prompt file is empty"):
        check(config(place), place)
    (place / f"{name}.jsonl").unlink()
    with pytest.raises(DataError, match=rf"{name}\.jsonl: the prompt file cannot be read"):
        check(config(place), place)


def test_a_reward_function_that_is_not_there_is_named(place: Path):
    with pytest.raises(ConfigError, match="the module has no 'rewrad'"):
        check(config(place, reward=python(place, "rewrad")), place)
    with pytest.raises(ConfigError, match="the module has no 'rewrad'"):
        check(config(place, python(place, "rewrad")), place)


def test_a_maker_that_is_not_there_is_named(place: Path):
    with pytest.raises(ConfigError, match="the module has no 'mak'"):
        check(
            config(place, model={"source": {"type": "made", "maker": f"{place}/mine.py:mak"}}),
            place,
        )


def test_a_missing_model_directory_is_named(place: Path):
    shutil.rmtree(place / "model")
    with pytest.raises(ConfigError) as caught:
        check(config(place), place)
    assert caught.value.where == "model.source.hf_checkpoint"
    assert str(place / "model") in str(caught.value.found)


SLIDING = json.dumps(
    {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 0,
    }
)


def test_a_model_that_the_trainer_would_compute_otherwise_is_refused_before_anything_starts(
    place: Path,
):
    (place / "model" / "config.json").write_text(SLIDING)
    with pytest.raises(ConfigError) as caught:
        check(config(place), place / "home")
    expected = f"model.source.hf_checkpoint: {place}/model/config.json: use_sliding_window"
    assert caught.value.where == expected


@pytest.mark.parametrize(
    ("key", "sections"),
    [
        (
            "critic.hf_checkpoint",
            {"advantage": {"advantage_estimator": "ppo"}, "critic": {"hf_checkpoint": "OTHER"}},
        ),
        (
            "teacher.opd_teacher_load",
            {
                "advantage": {"use_opd": True},
                "teacher": {"opd_type": "megatron", "opd_teacher_load": "OTHER"},
            },
        ),
    ],
)
def test_the_critic_s_and_the_teacher_s_directory_are_checked_too(
    place: Path, key: str, sections: dict[str, Any]
):
    other = place / "other"
    filled = json.loads(json.dumps(sections).replace("OTHER", str(other)))
    with pytest.raises(ConfigError, match=rf"{key}: not a Hugging Face model directory"):
        check(config(place, **filled), place / "home")
    write_model(other, **json.loads(SLIDING))
    with pytest.raises(ConfigError, match=rf"{key}: .*other/config\.json: use_sliding_window"):
        check(config(place, **filled), place / "home")
    (other / "config.json").write_text('{"model_type": "llama"}')
    check(config(place, **filled), place / "home")


@pytest.mark.parametrize(
    ("free", "enough"), [(MIN_FREE_BYTES, True), (MIN_FREE_BYTES - 1, False)]
)
def test_too_little_room_on_the_disk_is_an_error(
    place: Path, monkeypatch: pytest.MonkeyPatch, free: int, enough: bool
):
    asked: list[Path] = []

    def disk_usage(path: Path) -> Any:
        asked.append(Path(path))
        return SimpleNamespace(total=10 * free, used=9 * free, free=free)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    home = place / "not" / "made" / "yet"
    if enough:
        check(config(place), home)
    else:
        with pytest.raises(ResourceError, match="512 MiB free") as caught:
            check(config(place), home)
        assert caught.value.where == str(place)
    assert asked == [place]


def test_a_generate_function_of_another_form_is_found_before_anything_starts(
    place: Path, tmp_path: Path
):
    (place / "mine.py").write_text("async def generate(args):\n    return None\n")
    rollout = {
        "rollout_batch_size": 1,
        "n_samples_per_prompt": 2,
        "custom_generate_function_path": str(place / "mine.py"),
    }
    wrong = config(place).model_copy(update={"rollout": RolloutConfig(**rollout)})
    with pytest.raises(
        ConfigError, match=r"(?s)custom_generate_function_path.*generate\(args\).*sampling_params"
    ):
        check(wrong, tmp_path)


@pytest.mark.parametrize(
    ("key", "source", "expected"),
    [
        (
            "custom_rollout_log_function_path",
            "def f(rollout_id, args, samples):\n    ...\n",
            "extra_metrics, rollout_time) -> bool",
        ),
        (
            "custom_eval_rollout_log_function_path",
            "async def f(*all):\n    ...\n",
            "(rollout_id, args, data, extra_metrics) -> bool",
        ),
    ],
)
def test_a_function_that_logs_is_told_what_it_will_get(
    place: Path, key: str, source: str, expected: str
):
    (place / "log.py").write_text(source)
    with pytest.raises(ConfigError) as caught:
        check(config(place, observe={key: f"{place}/log.py"}), place / "home")
    assert caught.value.where == f"observe.{key}"
    assert expected in str(caught.value.expected)


def test_what_fails_on_a_full_disk_says_that_it_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    said = []
    for free in (FULL_BYTES, FULL_BYTES - 1):
        monkeypatch.setattr(
            shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free)
        )
        error = ActorLost("the actor's process is gone", where="trainer.address")
        note_full_disk(error, tmp_path / "home")
        said.append(str(error))
    assert said[0] == "trainer.address: the actor's process is gone"
    assert (
        said[1]
        == f"{said[0]}\n  (the disk is full: 16 MiB free at {tmp_path}; "
        "free disk space and run the same command again)"
    )


def test_a_store_that_does_not_know_us_is_said_before_anything_starts(
    place: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(place / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(place / "none"))
    with pytest.raises(
        StoreError, match=r"(?s)s3://bucket/runs.*Unable to locate credentials.*AWS_ACCESS_KEY_ID"
    ):
        check(config(place, store={"root": "s3://bucket/runs"}), place)


def test_a_name_that_differs_in_capitals_only_is_refused_where_files_do_not_tell_them_apart(
    place: Path, monkeypatch: pytest.MonkeyPatch
):
    (place / "home" / "RUN").mkdir(parents=True)
    check(config(place), place / "home")
    exists = Path.exists
    monkeypatch.setattr(
        Path, "exists", lambda path: path.name == "run" or exists(path)
    )  # as a file system of macOS answers
    with pytest.raises(ConfigError, match=r"(?s)run=run: .*capitals.*RUN"):
        check(config(place), place / "home")


@pytest.mark.parametrize(
    ("key", "found", "sections"),
    [
        ("engine.sglang.context_length", "2049", {"engine": {"sglang": {"context_length": 2049}}}),
        ("engine.sglang.context_length", "4096", {"engine": {"sglang": {"context_length": "4Ki"}}}),
        (
            "rollout.rollout_max_context_len",
            "4000",
            {
                "rollout": {
                    "rollout_batch_size": 1,
                    "n_samples_per_prompt": 2,
                    "rollout_max_context_len": 4000,
                }
            },
        ),
    ],
)
def test_a_context_that_is_longer_than_the_models_is_refused(
    place: Path, key: str, found: str, sections: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    shutil.rmtree(place / "model")
    write_model(place / "model", max_position_embeddings=2048)
    monkeypatch.setenv("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1")
    with pytest.raises(
        ConfigError, match=rf"{key}: the context is longer than the model's"
    ) as caught:
        check(config(place, **sections), place / "home")
    assert caught.value.found == f"{found} tokens"
    assert "at most 2048" in str(caught.value.expected) and "rope_scaling" in str(caught.value.do)
    fits = {"engine": {"sglang": {"context_length": "2Ki"}}}
    check(config(place, **fits), place / "home")


def test_a_context_of_a_held_out_set_that_is_longer_than_the_models_is_refused(place: Path):
    shutil.rmtree(place / "model")
    write_model(place / "model", max_position_embeddings=2048)
    held_out = {"name": "held", "prompts": prompts(place, "held.jsonl"), "max_context_len": 2048}
    check(config(place, evaluation={"datasets": [held_out]}), place / "home")
    longer = {"datasets": [held_out | {"max_context_len": 2049}]}
    with pytest.raises(
        ConfigError, match=r"evaluation\.datasets\.0\.max_context_len: the context is longer"
    ):
        check(config(place, evaluation=longer), place / "home")
