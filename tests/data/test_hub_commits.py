"""Runs record the commits of models and data files on the Hub (rlpipe.data.hub_commits)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlpipe.config.load import validate
from rlpipe.config.model import HuggingFaceModel
from rlpipe.config.run import RunConfig
from rlpipe.data.hub_commits import as_recorded, pinned
from rlpipe.data.prompts import file_digests, load_prompts
from rlpipe.errors import ConfigError
from rlpipe.model_dir import directory_here, model_directory, model_fingerprint, present_directory
from rlpipe.store.branches import Branches
from rlpipe.store.objects.files import Files
from tests.hub import Hub, HubRepo, hub_server, use_hub

TINY = Path(__file__).parents[1] / "stores" / "model"
ROWS = "hf://datasets/org/rows/train.jsonl"
TEST = "hf://datasets/org/rows@v1/test.jsonl@[0:1]"


def row(prompt: str) -> bytes:
    return f'{{"prompt": "{prompt}", "label": "1"}}\n'.encode()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    rows = HubRepo({"train.jsonl": row("a"), "test.jsonl": row("t") + row("u")}, kind="dataset")
    rows.tags["v1"] = rows.commit
    model = HubRepo({path.name: path.read_bytes() for path in TINY.iterdir()})
    repos = {"org/tiny": model, "org/teacher": HubRepo(dict(model.files)), "org/rows": rows}
    with hub_server(repos) as hub:
        hub.use(monkeypatch, tmp_path / "hf")
        yield hub


def run_config(run: str = "r", **changes: Any) -> RunConfig:
    return validate(
        {
            "run": run,
            "num_rollout": 1,
            "model": {"source": {"type": "huggingface", "hf_checkpoint": "org/tiny"}},
            "data": {"prompts": {"type": "file", "paths": [ROWS]}},
            "rollout": {"rollout_batch_size": 1, "n_samples_per_prompt": 2},
            "reward": {"function": {"type": "random"}},
            "advantage": {"use_opd": True},
            "teacher": {"opd_type": "megatron", "opd_teacher_load": "org/teacher"},
            "evaluation": {
                "datasets": [{"name": "test", "prompts": {"type": "file", "paths": [TEST]}}]
            },
            **changes,
        }
    )


def checkpoint(config: RunConfig) -> str:
    assert isinstance(config.model.source, HuggingFaceModel)
    return config.model.source.hf_checkpoint


def store(config: RunConfig, home: Path) -> None:
    Branches(Files(home / "store")).create(config.run, config.model_dump(mode="json"), "0" * 64)


@pytest.mark.parametrize(("scores", "tokens"), [(True, 8192), (None, None)])
def test_a_run_keeps_the_defaults_that_it_started_with(
    hub: Hub, tmp_path: Path, scores: bool | None, tokens: int | None
):
    advantage = {"use_opd": True, "score_proximal": scores}
    store(run_config(advantage=advantage, train={"max_tokens_per_gpu": tokens}), tmp_path)
    resumed = as_recorded(run_config(), tmp_path)
    assert (resumed.advantage.score_proximal, resumed.train.max_tokens_per_gpu) == (scores, tokens)
    for name, fork in (("new", None), ("fork", {"branch": "r", "iteration": 0})):
        other = as_recorded(run_config(name, **{"fork_from": fork} if fork else {}), tmp_path)
        assert other.advantage.score_proximal is None
        assert other.train.max_tokens_per_gpu is None


def test_every_address_gets_the_hash_of_its_commit(hub: Hub, tmp_path: Path):
    config = pinned(run_config(), tmp_path)
    commits = {name: repo.commit for name, repo in hub.repos.items()}
    assert checkpoint(config) == f"org/tiny@{commits['org/tiny']}"
    assert config.teacher.opd_teacher_load == f"org/teacher@{commits['org/teacher']}"
    assert config.data.prompts is not None
    rows = f"hf://datasets/org/rows@{commits['org/rows']}"
    assert config.data.prompts.model_dump()["paths"] == (f"{rows}/train.jsonl",)
    held_out = config.evaluation.datasets[0].prompts
    assert held_out.model_dump()["paths"] == (f"{rows}/test.jsonl@[0:1]",)
    assert pinned(config, tmp_path) == config


def test_a_run_and_its_forks_keep_the_commits_that_it_began_with(hub: Hub, tmp_path: Path):
    first = pinned(run_config(), tmp_path)
    store(first, tmp_path)
    hub.repos["org/tiny"].files["config.json"] += b" "
    hub.repos["org/rows"].files["train.jsonl"] = row("b")
    assert pinned(run_config(), tmp_path) == first
    fork = pinned(run_config("f", fork_from={"branch": "r"}), tmp_path)
    assert (fork.model, fork.data) == (first.model, first.data)
    assert checkpoint(pinned(run_config("new"), tmp_path)) != checkpoint(first)
    source = {"type": "huggingface", "hf_checkpoint": "org/tiny@main"}
    moved = pinned(run_config(model={"source": source}), tmp_path)
    assert checkpoint(moved) == f"org/tiny@{hub.repos['org/tiny'].commit}"


def test_a_stored_address_without_a_commit_stays_as_it_is(hub: Hub, tmp_path: Path):
    store(run_config(), tmp_path)
    assert pinned(run_config(), tmp_path) == run_config()


def test_a_run_without_addresses_needs_no_hub_and_no_store(hub: Hub, tmp_path: Path):
    config = run_config(
        model={"source": {"type": "huggingface", "hf_checkpoint": str(TINY)}},
        data={"prompts": {"type": "file", "paths": ["train.jsonl"]}},
        advantage={},
        teacher={},
        evaluation={},
    )
    assert pinned(config, tmp_path) is config
    assert not hub.requests
    assert not (tmp_path / "store").exists()


def test_a_downloaded_model_has_the_identity_of_a_copy(hub: Hub, tmp_path: Path):
    config = pinned(run_config(), tmp_path)
    directory = model_directory(config.model, tmp_path, seed=0)
    shutil.copytree(directory, tmp_path / "copy")
    prints = {
        model_fingerprint(path, tmp_path / "cache.json")
        for path in (directory, str(tmp_path / "copy"))
    }
    assert len(prints) == 1


def test_another_node_downloads_the_same_commit(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = pinned(run_config(), tmp_path)
    driver_dir = model_directory(config.model, tmp_path, seed=0)
    hub.repos["org/tiny"].files["config.json"] = b"{}"
    hub.use(monkeypatch, tmp_path / "cache of another node")
    assert present_directory(checkpoint(config)) is None
    here = directory_here(driver_dir, config.model.source)
    assert here.startswith(str(tmp_path / "cache of another node"))
    assert (Path(here) / "config.json").read_bytes() == (TINY / "config.json").read_bytes()
    assert present_directory(checkpoint(config)) == here
    assert directory_here("/models/m", None) == "/models/m"


def test_rows_of_the_hub_are_read_like_rows_of_a_file(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    prompts = run_config().evaluation.datasets[0].prompts
    rows = load_prompts(prompts)
    assert [each.prompt for each in rows] == ["t"]
    assert load_prompts(prompts, streaming=True)[0] == rows[0]
    digests = file_digests(prompts)
    use_hub(monkeypatch, hub.url, tmp_path / "hf", offline=True)
    assert file_digests(prompts) == digests
    wrong = prompts.model_copy(update={"paths": ("hf://datasets/org/rows/tset.jsonl",)})
    hub.use(monkeypatch, tmp_path / "hf")
    with pytest.raises(ConfigError, match="the repository has no such file"):
        load_prompts(wrong)
