"""Errors of a configuration are found before anything starts (rlpipe.preflight)."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.recipes.tiny_models import character_tokenizer
from rlpipe.config.load import load_run, validate
from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.run import RunConfig
from rlpipe.config.text import dump
from rlpipe.engines.sglang import served_models
from rlpipe.errors import ActorLost, ConfigError, DataError, ResourceError, StoreError
from rlpipe.preflight import FULL_BYTES, MIN_FREE_BYTES, check, note_full_disk
from rlpipe.store.branches import Branches
from rlpipe.store.objects.files import Files
from rlpipe.store.run_file import RunFile, write_run
from tests.model_files import write_model
from tools.slime_counts.stand_ins import write_model as write_stand_in

CHAT = {"apply_chat_template": True}
ROW = '{"prompt": "1 + 1 =", "answer": "2"}\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with everything that a run needs."""
    write_model(tmp_path / "model")
    for name in ("train", "held"):
        (tmp_path / f"{name}.jsonl").write_text(ROW * 3)
    (tmp_path / "mine.py").write_text(
        "def reward(sample):\n    return 1.0\n\n\ndef make(directory):\n    raise AssertionError\n"
    )
    return tmp_path


def prompts(folder: Path, name: str) -> dict[str, Any]:
    return {"type": "file", "paths": [str(folder / name)], "label_key": "answer"}


def config(folder: Path, held_reward: dict[str, Any] | None = None, **sections: Any) -> RunConfig:
    held = {"name": "held", "prompts": prompts(folder, "held.jsonl"), "reward": held_reward}
    values = {
        "run": "run",
        "num_rollout": 1,
        "model": {"source": {"type": "huggingface", "hf_checkpoint": str(folder / "model")}},
        "data": {"prompts": prompts(folder, "train.jsonl")},
        "rollout": {"rollout_batch_size": 1, "n_samples_per_prompt": 2},
        "reward": {"function": {"type": "math"}},
        "evaluation": {"datasets": [held]},
    }
    return validate({**values, **sections})


def python(folder: Path, name: str) -> dict[str, Any]:
    return {"function": {"type": "python", "path": f"{folder}/mine.py:{name}"}}


def test_a_model_without_experts_has_no_routing_to_replay(folder: Path):
    with pytest.raises(
        ConfigError, match=r"train\.use_rollout_routing_replay: the model has no experts"
    ):
        check(config(folder, train={"use_rollout_routing_replay": True}), folder / "home")


def test_a_quantized_model_needs_engines_with_the_same_quantization(folder: Path):
    quantised = {
        "model_type": "qwen2",
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }
    (folder / "model" / "config.json").write_text(json.dumps(quantised))
    with pytest.raises(
        ConfigError, match=r"(?s)engine\.quantization.*fp8 in the model's config\.json"
    ):
        check(config(folder), folder / "home")
    check(config(folder, engine={"quantization": "fp8"}), folder / "home")


def test_a_model_that_sglang_cannot_serve_here_is_refused_if_engines_start_here(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(served_models, "local_device", lambda: "cpu")
    shutil.rmtree(folder / "model")
    write_stand_in("qwen3_next", folder / "model")
    with pytest.raises(ConfigError, match=r"config\.json: SGLang .* on CPUs"):
        check(config(folder), folder / "home")
    elsewhere = {"external_engines": ["http://h:1"]}
    remote = config(folder, resources=elsewhere, sync={"transport": "distributed"})
    check(remote, folder / "home")


def test_a_complete_run_passes_and_no_file_is_made(folder: Path):
    before = sorted(folder.iterdir())
    check(config(folder), folder / "home")
    check(config(folder, reward=python(folder, "reward")), folder / "home")
    check(
        config(folder, model={"source": {"type": "made", "maker": f"{folder}/mine.py:make"}}),
        folder / "home",
    )
    assert [path for path in sorted(folder.iterdir()) if path.name != "__pycache__"] == before


@pytest.mark.parametrize("name", ["train", "held"])
def test_the_error_of_a_missing_column_names_the_key_of_its_set(folder: Path, name: str):
    (folder / f"{name}.jsonl").write_text('{"question": "1", "answer": "2"}\n')
    with pytest.raises(DataError) as caught:
        check(config(folder), folder)
    key = {"train": "data.prompts", "held": "evaluation.datasets.0.prompts"}[name]
    assert str(caught.value.do).startswith(f"set {key}.input_key to a column of this file")


@pytest.mark.parametrize("name", ["train", "held"])
def test_the_error_of_a_bad_prompt_row_names_file_and_line(folder: Path, name: str):
    (folder / f"{name}.jsonl").write_text(ROW + '{"prompt": 0.5, "answer": "2"}\n')
    with pytest.raises(DataError) as caught:
        check(config(folder), folder)
    assert caught.value.where == f"{folder}/{name}.jsonl:2, column 'prompt'"
    assert ("in evaluation.datasets of name held" in str(caught.value)) == (name == "held")


@pytest.mark.parametrize("name", ["train", "held"])
def test_the_error_of_a_missing_or_empty_prompt_file_names_it(folder: Path, name: str):
    (folder / f"{name}.jsonl").write_text("")
    with pytest.raises(DataError, match=rf"{name}\.jsonl: the prompt file is empty"):
        check(config(folder), folder)
    (folder / f"{name}.jsonl").unlink()
    with pytest.raises(DataError, match=rf"{name}\.jsonl: the prompt file cannot be read"):
        check(config(folder), folder)


def test_the_error_of_a_missing_reward_function_names_it(folder: Path):
    with pytest.raises(ConfigError, match="the module has no 'rewrad'"):
        check(config(folder, reward=python(folder, "rewrad")), folder)
    with pytest.raises(ConfigError, match="the module has no 'rewrad'"):
        check(config(folder, python(folder, "rewrad")), folder)


MESSAGES = '{"prompt": [{"role": "user", "content": "1 + 1 ="}], "answer": "2"}\n'


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (ROW, ("the prompts are text", "data.apply_chat_template=false")),
        (MESSAGES, ("messages with the fields role, content", "chat_template.jinja")),
    ],
)
def test_a_chat_template_is_needed_before_anything_starts(
    folder: Path, row: str, words: tuple[str, ...]
):
    for name in ("train", "held"):
        (folder / f"{name}.jsonl").write_text(row)
    chat = config(folder, data={"prompts": prompts(folder, "train.jsonl")} | CHAT)
    with pytest.raises(ConfigError) as caught:
        check(chat, folder)
    assert caught.value.where == "data.apply_chat_template"
    assert [word for word in (*words, f"{folder}/model") if word not in str(caught.value)] == []
    (folder / "model/tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    check(chat, folder)
    (folder / "model/tokenizer_config.json").write_text("{}")
    (folder / "model/chat_template.jinja").touch()
    check(chat, folder)


@pytest.mark.parametrize("name", ["train", "held"])
@pytest.mark.parametrize("chat", [False, True])
def test_a_prompt_longer_than_the_models_context_is_refused(folder: Path, name: str, chat: bool):
    tokenizer = character_tokenizer("prefix")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}" if chat else None
    write_model(folder / "model", model_type="qwen3", max_position_embeddings=100)
    tokenizer.save_pretrained(folder / "model")
    data = {"prompts": prompts(folder, "train.jsonl"), "apply_chat_template": chat}

    def write(characters: int, text: str = "1") -> None:
        row = json.dumps({"prompt": text * characters, "answer": "2"})
        (folder / f"{name}.jsonl").write_text(ROW * 20 + row)

    write(99)
    check(config(folder, data=data), folder / "home")
    write(17, "prefix")  # 17 tokens
    check(config(folder, data=data), folder / "home")
    write(100)
    with pytest.raises(DataError, match=r"(?s)the prompt is too long.*100 tokens") as caught:
        check(config(folder, data=data), folder / "home")
    assert caught.value.where == f"{folder}/{name}.jsonl:21"
    assert "use a model with a longer context" in str(caught.value.do)
    if name == "train":
        limited = {**data, "rollout_max_prompt_len": 50}
        with pytest.raises(DataError, match=r"raise data\.rollout_max_prompt_len"):
            check(config(folder, data=limited), folder / "home")
    check(config(folder, data={**data, "overlong_prompts": "drop"}), folder / "home")


def test_messages_need_apply_chat_template(folder: Path):
    (folder / "held.jsonl").write_text(MESSAGES)
    with pytest.raises(DataError) as caught:
        check(config(folder), folder)
    assert caught.value.where == f"{folder}/held.jsonl:1"
    assert "data.apply_chat_template=true" in str(caught.value)
    (folder / "mine.py").write_text(
        "async def generate(args, sample, sampling_params):\n    return sample\n"
    )
    generate = {"custom_generate_function_path": f"{folder}/mine.py:generate"}
    sizes = {"rollout_batch_size": 1, "n_samples_per_prompt": 2}
    check(config(folder, rollout={**sizes, **generate}), folder)
    held = {"name": "held", "prompts": prompts(folder, "held.jsonl")}
    check(config(folder, evaluation={"datasets": [{**held, **generate}]}), folder)


def test_the_error_of_a_missing_column_of_trls_form_names_it(folder: Path):
    (folder / "mine.py").write_text("def reward(completions, answer, level, **kwargs):\n    ...\n")
    with pytest.raises(ConfigError, match=r"needs the column 'level'[\s\S]*have answer\n"):
        check(config(folder, reward=python(folder, "reward")), folder)
    (folder / "renamed.py").write_text("def reward(completions, solution, **kwargs):\n    ...\n")
    renamed = {"function": {"type": "python", "path": f"{folder}/renamed.py:reward"}}
    with pytest.raises(ConfigError, match=r"do: .*rename the parameter solution to answer, or"):
        check(config(folder, reward=renamed), folder)
    row = {"prompt": "1 + 1 =", "answer": "2", "solution": "2"}
    (folder / "train.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ConfigError, match=r"do: .*set data\.prompts\.label_key=solution, or"):
        check(config(folder, reward=renamed), folder)
    row = {"prompt": "1 + 1 =", "answer": "2", "metadata": {"level": 1}}
    for name in ("train", "held"):
        (folder / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    check(config(folder, reward=python(folder, "reward")), folder)


def test_the_error_of_a_missing_maker_names_it(folder: Path):
    with pytest.raises(ConfigError, match="the module has no 'mak'"):
        check(
            config(folder, model={"source": {"type": "made", "maker": f"{folder}/mine.py:mak"}}),
            folder,
        )


def test_the_error_of_a_missing_model_directory_names_it(folder: Path):
    shutil.rmtree(folder / "model")
    with pytest.raises(ConfigError) as caught:
        check(config(folder), folder)
    assert caught.value.where == "model.source.hf_checkpoint"
    assert str(folder / "model") in str(caught.value.found)


SLIDING = json.dumps(
    {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 0,
    }
)


def test_a_model_that_the_trainer_would_compute_differently_is_refused(
    folder: Path,
):
    (folder / "model" / "config.json").write_text(SLIDING)
    with pytest.raises(ConfigError) as caught:
        check(config(folder), folder / "home")
    expected = f"model.source.hf_checkpoint: {folder}/model/config.json: use_sliding_window"
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
def test_the_directories_of_critic_and_teacher_are_checked(
    folder: Path, key: str, sections: dict[str, Any]
):
    other = folder / "other"
    filled = json.loads(json.dumps(sections).replace("OTHER", str(other)))
    with pytest.raises(ConfigError, match=rf"{key}: not a Hugging Face model directory"):
        check(config(folder, **filled), folder / "home")
    write_model(other, **json.loads(SLIDING))
    with pytest.raises(ConfigError, match=rf"{key}: .*other/config\.json: use_sliding_window"):
        check(config(folder, **filled), folder / "home")
    (other / "config.json").write_text('{"model_type": "llama"}')
    check(config(folder, **filled), folder / "home")


@pytest.mark.parametrize("disk", ["home", "store"])
def test_too_little_free_disk_space_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, disk: str
):
    free = {folder / name: MIN_FREE_BYTES for name in ("home", "store")}
    for path in free:
        path.mkdir()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free[Path(path)]))
    store = {"root": str(folder / "store" / "not" / "made")}
    home = folder / "home" / "not" / "made"
    check(config(folder, store=store), home)
    free[folder / disk] -= 1
    with pytest.raises(ResourceError, match="512 MiB free") as caught:
        check(config(folder, store=store), home)
    assert caught.value.where == str(folder / disk)


def test_a_generate_function_with_another_signature_is_refused(folder: Path, tmp_path: Path):
    (folder / "mine.py").write_text("async def generate(args):\n    return None\n")
    rollout = {
        "rollout_batch_size": 1,
        "n_samples_per_prompt": 2,
        "custom_generate_function_path": str(folder / "mine.py"),
    }
    wrong = config(folder).model_copy(update={"rollout": RolloutConfig(**rollout)})
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
def test_the_error_of_a_log_function_gives_the_expected_signature(
    folder: Path, key: str, source: str, expected: str
):
    (folder / "log.py").write_text(source)
    with pytest.raises(ConfigError) as caught:
        check(config(folder, observe={key: f"{folder}/log.py"}), folder / "home")
    assert caught.value.where == f"observe.{key}"
    assert expected in str(caught.value.expected)


def test_an_error_on_a_full_disk_gets_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    messages = []
    for free in (FULL_BYTES, FULL_BYTES - 1):
        monkeypatch.setattr(
            shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free)
        )
        error = ActorLost("the actor's process is gone", where="trainer.address")
        note_full_disk(error, tmp_path / "home")
        messages.append(str(error))
    assert messages[0] == "trainer.address: the actor's process is gone"
    assert (
        messages[1] == f"{messages[0]}\n  (the disk is full: 16 MiB free at {tmp_path}; "
        "free disk space and run the same command again)"
    )


def test_a_store_without_credentials_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(folder / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(folder / "none"))
    with pytest.raises(
        StoreError, match=r"(?s)s3://bucket/runs.*Unable to locate credentials.*AWS_ACCESS_KEY_ID"
    ):
        check(config(folder, store={"root": "s3://bucket/runs"}), folder)


@pytest.mark.parametrize(
    ("transport", "key"),
    [
        ("disk", "update_weight_disk_dir"),
        ("delta", "update_weight_disk_dir"),
        ("delta", "update_weight_local_checkpoint_dir"),
    ],
)
def test_a_folder_of_weight_files_that_is_not_writable_is_refused(
    folder: Path, transport: str, key: str
):
    (folder / "file").write_text("")
    sync = {"transport": transport, key: str(folder / "file" / "weights")}
    with pytest.raises(ConfigError, match="this folder is not writable") as caught:
        check(config(folder, sync=sync), folder / "home")
    assert caught.value.where == f"sync.{key}" and "not a folder" in str(caught.value.found)
    # Another machine may have the folder.
    away = {"ray_address": "head:6379"}
    check(config(folder, sync=sync, resources=away), folder / "home")


def test_a_taken_name_is_refused_before_anything_starts(folder: Path):
    home = folder / "home"
    branches = Branches(Files(home / "store"))
    branches.create("run", config(folder).model_dump(mode="json"), "init")
    check(config(folder, num_rollout=7), home)
    with pytest.raises(ConfigError, match="another configuration") as caught:
        check(config(folder, seed=3), home)
    assert caught.value.where == "run=run" and "seed: was 0, now 3" in str(caught.value.found)


def test_a_taken_name_of_a_warm_start_is_refused_before_anything_starts(folder: Path):
    home = folder / "home"
    first = folder / "first.yaml"
    first.write_text(dump(config(folder).model_dump(mode="json")))
    warm = load_run(str(first), [], "run.warm_start")
    started = {**warm.model_dump(mode="json"), "seed": 3}
    Branches(Files(home / "store")).create("run.warm_start", started, "init")
    with pytest.raises(ConfigError, match="another configuration") as caught:
        check(config(folder, warm_start=str(first)), home)
    assert caught.value.where == "run=run.warm_start"


def test_a_name_that_differs_only_in_capitals_is_refused_if_the_file_system_ignores_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    (folder / "home" / "RUN").mkdir(parents=True)
    check(config(folder), folder / "home")
    exists = Path.exists
    monkeypatch.setattr(
        Path, "exists", lambda path: path.name == "run" or exists(path)
    )  # as on a file system of macOS
    with pytest.raises(ConfigError, match=r"(?s)run=run: .*capitals.*RUN"):
        check(config(folder), folder / "home")


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
def test_a_context_longer_than_the_models_is_refused(
    folder: Path, key: str, found: str, sections: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    shutil.rmtree(folder / "model")
    write_model(folder / "model", max_position_embeddings=2048)
    monkeypatch.setenv("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1")
    with pytest.raises(
        ConfigError, match=rf"{key}: the context is longer than the model's"
    ) as caught:
        check(config(folder, **sections), folder / "home")
    assert caught.value.found == f"{found} tokens"
    assert "at most 2048" in str(caught.value.expected) and "rope_scaling" in str(caught.value.do)
    fits = {"engine": {"sglang": {"context_length": "2Ki"}}}
    check(config(folder, **fits), folder / "home")


def test_a_context_of_an_evaluation_set_longer_than_the_models_is_refused(folder: Path):
    shutil.rmtree(folder / "model")
    write_model(folder / "model", max_position_embeddings=2048)
    held_out = {"name": "held", "prompts": prompts(folder, "held.jsonl"), "max_context_len": 2048}
    check(config(folder, evaluation={"datasets": [held_out]}), folder / "home")
    longer = {"datasets": [held_out | {"max_context_len": 2049}]}
    with pytest.raises(
        ConfigError, match=r"evaluation\.datasets\.0\.max_context_len: the context is longer"
    ):
        check(config(folder, evaluation=longer), folder / "home")


def test_a_folder_of_a_run_in_another_store_is_not_used_for_a_new_run(folder: Path):
    plain = config(folder)
    home = folder / "home"
    recorded = RunFile(store=str(folder / "first"), config={})
    write_run(home, plain.run, recorded)
    with pytest.raises(ConfigError, match=r"another store[\s\S]*continue that run: store\.root="):
        check(plain, home)
    check(config(folder, store={"root": str(folder / "first")}), home)
