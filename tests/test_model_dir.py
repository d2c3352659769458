"""The model directory of a run is checked, or made once (rlpipe.model_dir)."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from rlpipe.config.model import EngineConfig, HuggingFaceModel, MadeModel, ModelConfig
from rlpipe.config.rollout import RolloutConfig
from rlpipe.errors import ConfigError, HookError
from rlpipe.model_dir import (
    check_context_len,
    check_stop_ids,
    end_ids,
    model_directory,
    model_directory_if_present,
    model_fingerprint,
)

MAKER = """\
import os
import time
from pathlib import Path

def make(directory, *, seed=0, size=1, pause_s=0.0):
    time.sleep(pause_s)
    if size < 0:
        (Path(directory) / "half").write_text("half")
        raise ValueError("negative size")
    made = Path(directory).parent.parent / "made.log"
    with made.open("a") as log:
        log.write(f"{os.getpid()}\\n")
    (Path(directory) / "config.json").write_text(f'{{"seed": {seed}, "size": {size}}}')

def without_seed(directory):
    (Path(directory) / "config.json").write_text("{}")
"""


@pytest.fixture
def maker(tmp_path: Path) -> Path:
    path = tmp_path / "makers.py"
    path.write_text(MAKER)
    return path


def make_model(
    maker: Path, home: Path, seed: int = 0, name: str = "make", **arguments: Any
) -> Path:
    source = MadeModel(type="made", maker=f"{maker}:{name}", arguments=arguments)
    return Path(model_directory(ModelConfig(source=source), home, seed=seed))


def given_model(path: str, home: Path) -> str:
    return model_directory(
        ModelConfig(source=HuggingFaceModel(type="huggingface", hf_checkpoint=path)), home, seed=0
    )


def count_made(home: Path) -> int:
    return len((home / "made.log").read_text().splitlines())


def test_a_given_directory_is_absolute_wherever_it_was_given_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("m", "./m", "~/m", str(tmp_path / "m")):
        assert given_model(path, tmp_path) == str(tmp_path / "m")


def test_a_directory_that_is_no_model_is_refused_with_what_is_wrong(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"no directory .*nowhere") as caught:
        given_model(str(tmp_path / "nowhere"), tmp_path)
    assert caught.value.where == "model.source.hf_checkpoint"
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"no config\.json in .*empty"):
        given_model(str(tmp_path / "empty"), tmp_path)


def test_a_model_is_made_once_and_kept_under_home(maker: Path, tmp_path: Path):
    home = tmp_path / "home"
    first = make_model(maker, home, seed=3, size=2)
    assert first.parent == home / "models"
    assert (first / "config.json").read_text() == '{"seed": 3, "size": 2}'
    assert make_model(maker, home, seed=3, size=2) == first
    assert count_made(home) == 1
    assert [path.name for path in (home / "models").iterdir()] == [first.name]


def test_a_directory_that_must_be_made_or_converted_first_is_not_present(
    maker: Path, tmp_path: Path
):
    def present(source: MadeModel | HuggingFaceModel) -> str | None:
        return model_directory_if_present(ModelConfig(source=source), tmp_path / "home", seed=0)

    source = MadeModel(type="made", maker=f"{maker}:make")
    assert present(source) is None
    made = make_model(maker, tmp_path / "home")
    assert present(source) == str(made)
    given = {"type": "huggingface", "hf_checkpoint": str(made)}
    assert present(HuggingFaceModel.model_validate(given)) == str(made)
    converted = {**given, "megatron_checkpoint": "/slime"}
    assert present(HuggingFaceModel.model_validate(converted)) is None
    absent = {**given, "hf_checkpoint": "owner/name"}
    assert present(HuggingFaceModel.model_validate(absent)) is None


def test_another_seed_argument_function_or_source_makes_another_model(maker: Path, tmp_path: Path):
    home = tmp_path / "home"
    directories = [
        make_model(maker, home),
        make_model(maker, home, seed=1),
        make_model(maker, home, size=2),
        make_model(maker, home, name="without_seed"),
    ]
    maker.write_text(MAKER.replace('"seed"', '"the seed"'))
    directories.append(make_model(maker, home))
    assert len(set(directories)) == 5


def test_a_copied_maker_makes_the_same_model(maker: Path, tmp_path: Path):
    first = make_model(maker, tmp_path / "home")
    copy = tmp_path / "copies"
    copy.mkdir()
    assert make_model(maker.rename(copy / "makers.py"), tmp_path / "home") == first


def test_a_seed_in_the_arguments_replaces_the_seed_of_the_run(maker: Path, tmp_path: Path):
    source = MadeModel(type="made", maker=f"{maker}:make", arguments={"seed": 7})
    directory = model_directory(ModelConfig(source=source), tmp_path / "home", seed=1)
    assert (Path(directory) / "config.json").read_text() == '{"seed": 7, "size": 1}'


def test_a_failed_maker_leaves_no_model(maker: Path, tmp_path: Path):
    home = tmp_path / "home"
    with pytest.raises(HookError, match="negative size"):
        make_model(maker, home, size=-1)
    assert [path for path in (home / "models").iterdir() if ".partial-" not in path.name] == []
    with pytest.raises(HookError, match="negative size"):
        make_model(maker, home, size=-1)


def test_processes_that_make_a_model_at_once_get_one_model(maker: Path, tmp_path: Path):
    home = tmp_path / "home"
    with ProcessPoolExecutor(4, mp_context=get_context("fork")) as pool:
        found = list(pool.map(partial(make_model, pause_s=0.2), [maker] * 8, [home] * 8))
    assert len(set(found)) == 1
    assert [path.name for path in (home / "models").iterdir()] == [found[0].name]
    assert (found[0] / "config.json").is_file()


def test_a_missing_maker_is_a_configuration_error(maker: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="the module has no 'mak'"):
        make_model(maker, tmp_path, name="mak")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text('{"hidden_size": 8}')
    (directory / "model.safetensors").write_bytes(b"12345678")
    return directory


def fingerprint(model: Path) -> str:
    return model_fingerprint(str(model), model.parent / "home" / "fingerprints.json")


def test_a_copied_model_has_the_same_fingerprint(model: Path, tmp_path: Path):
    copy = shutil.copytree(model, tmp_path / "copy")
    (copy / ".cache").mkdir()
    (copy / ".gitattributes").write_text("*")
    (copy / "README.md").write_text("about it")
    assert fingerprint(copy) == fingerprint(model)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", '{"hidden_size": 9}'),
        ("chat_template.jinja", "{{ messages }}"),
        ("tokenizer.model", "1"),
        ("model.safetensors", "87654321"),
        ("model-00002.safetensors", "12345678"),
    ],
)
def test_a_model_with_another_file_has_another_fingerprint(model: Path, name: str, content: str):
    before = fingerprint(model)
    (model / name).write_text(content)
    assert fingerprint(model) != before


def test_a_renamed_file_gives_another_fingerprint(model: Path):
    before = fingerprint(model)
    (model / "model.safetensors").rename(model / "weights.safetensors")
    assert fingerprint(model) != before


def test_unchanged_files_are_not_read_again(model: Path):
    before = fingerprint(model)
    weights = model / "model.safetensors"
    changed = weights.stat().st_mtime_ns
    weights.write_bytes(b"87654321")
    os.utime(weights, ns=(changed, changed))
    assert fingerprint(model) == before, "same path, size and time: the file is not read"
    os.utime(weights, ns=(changed, changed + 1))
    assert fingerprint(model) != before


def test_a_stop_token_that_a_made_model_does_not_have_is_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 10}}')
    rollout = RolloutConfig(rollout_batch_size=1, rollout_stop_token_ids=(9,))
    check_stop_ids(rollout, (), str(tmp_path))
    with pytest.raises(ConfigError, match=r"(?s)rollout_stop_token_ids.*10.*0 to 9"):
        check_stop_ids(
            rollout.model_copy(update={"rollout_stop_token_ids": (9, 10)}), (), str(tmp_path)
        )


def test_a_context_longer_than_that_of_a_made_model_is_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"text_config": {"max_position_embeddings": 64}}')
    rollout = RolloutConfig(rollout_batch_size=1, rollout_max_context_len=64)
    check_context_len(EngineConfig(sglang={"context_length": 64}), rollout, (), str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"engine\.sglang\.context_length: [\s\S]*1000 tokens[\s\S]*at most 64"
    ):
        check_context_len(EngineConfig(sglang={"context_length": "1k"}), rollout, (), str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    check_context_len(EngineConfig(sglang={"context_length": "1k"}), rollout, (), str(tmp_path))


def test_end_tokens_come_from_model_generation_settings_and_tokenizer(tmp_path):
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert end_ids(str(tmp_path), 5) == {2, 3, 4, 5}
    assert end_ids(str(tmp_path / "nowhere"), None) == set()
