"""Models and files are downloaded from a hub on loopback (rlpipe.system.hub)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub.utils import enable_progress_bars

from rlpipe.errors import ConfigError, ResourceError, RlpipeError
from rlpipe.system.hub import (
    HubReference,
    fetched_file,
    fetched_model,
    file_reference,
    model_reference,
    resolved,
)
from tests.hub import TOKEN, Hub, HubRepo, hub_server, use_hub

KEY = "model.source.hf_checkpoint"
FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "README.md": b"text",
    "pytorch_model.bin": b"pickles",
    "consolidated.safetensors": b"the weights once more",
    "original/params.json": b"{}",
}
ROWS = "hf://datasets/org/rows/data/train.jsonl"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    repos = {
        "org/model": HubRepo(dict(FILES)),
        "org/gated": HubRepo(dict(FILES), gated=True),
        "org/pickles": HubRepo({"config.json": b"{}", "pytorch_model.bin": b"pickles"}),
        "org/rows": HubRepo({"data/train.jsonl": b'{"prompt": "1"}\n'}, kind="dataset"),
    }
    with hub_server(repos) as hub:
        hub.use(monkeypatch, tmp_path / "hf")
        yield hub


def model(name: str) -> HubReference:
    reference = model_reference(name)
    assert reference is not None
    return reference


def message(error: pytest.ExceptionInfo[RlpipeError]) -> str:
    return str(error.value)


def test_a_model_is_downloaded_once_without_files_that_no_part_reads(hub: Hub):
    directory = fetched_model(model("org/model"), KEY)
    names = sorted(path.name for path in directory.iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (directory / "model.safetensors").read_bytes() == b"weights"
    assert directory.name == hub.repos["org/model"].commit
    downloads = hub.requests.total()
    assert fetched_model(model("org/model"), KEY) == directory
    # The second time only asks for the commit of the default branch.
    assert hub.requests.total() == downloads + 1


def test_a_revision_chooses_the_files(hub: Hub):
    repo = hub.repos["org/model"]
    repo.tags["v1"] = first = repo.commit
    repo.files["model.safetensors"] = b"other weights"
    for revision, content in (("v1", b"weights"), ("main", b"other weights"), (first, b"weights")):
        directory = fetched_model(model(f"org/model@{revision}"), KEY)
        assert (directory / "model.safetensors").read_bytes() == content
    assert resolved(model("org/model@v1"), KEY).revision == first
    assert str(resolved(model("org/model"), KEY)) == f"org/model@{repo.commit}"


def test_the_cache_needs_no_network(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    directory = fetched_model(model("org/model"), KEY)
    rows = file_reference(ROWS)
    assert rows is not None
    path = fetched_file(rows, "data.prompts")
    pinned = resolved(model("org/model"), KEY)
    requests = hub.requests.total()
    for url, offline in ((hub.url, True), ("http://127.0.0.1:9", False)):
        use_hub(monkeypatch, url, tmp_path / "hf", offline=offline)
        assert fetched_model(model("org/model"), KEY) == directory
        assert fetched_model(pinned, KEY) == directory
        assert fetched_file(rows, "data.prompts") == path
    assert hub.requests.total() == requests


def test_without_network_and_cache_the_error_says_what_to_do(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    use_hub(monkeypatch, "http://127.0.0.1:9", tmp_path / "empty")
    for reference in (model("org/model"), model(f"org/model@{'a' * 40}")):
        with pytest.raises(ResourceError, match="no directory of this path, and") as error:
            fetched_model(reference, KEY)
        assert "http://127.0.0.1:9 does not answer" in message(error)
        assert "hf download org/model" in message(error)
    use_hub(monkeypatch, hub.url, tmp_path / "empty", offline=True)
    with pytest.raises(ResourceError, match="HF_HUB_OFFLINE is set"):
        fetched_model(model("org/model"), KEY)
    assert not hub.requests


def test_half_a_download_is_no_model(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    directory = fetched_model(model("org/model"), KEY)
    (directory / "model.safetensors").unlink()
    use_hub(monkeypatch, hub.url, tmp_path / "hf", offline=True)
    with pytest.raises(ResourceError, match="the cache does not have all files"):
        fetched_model(model("org/model"), KEY)
    hub.use(monkeypatch, tmp_path / "hf")
    fetched_model(model("org/model"), KEY)
    assert (directory / "model.safetensors").read_bytes() == b"weights"


def test_a_gated_model_needs_a_token(hub: Hub, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="access to this model is restricted") as error:
        fetched_model(model("org/gated"), KEY)
    assert f"accept the terms at {hub.url}/org/gated, then set HF_TOKEN" in message(error)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert (fetched_model(model("org/gated"), KEY) / "model.safetensors").exists()


def test_wrong_names_are_refused_with_the_page_to_look_at(hub: Hub):
    with pytest.raises(ConfigError, match="the Hub has no such model") as error:
        fetched_model(model("org/mode1"), KEY)
    assert f"{hub.url}/org/mode1" in message(error)
    assert error.value.where == KEY
    with pytest.raises(ConfigError, match="no such revision"):
        fetched_model(model("org/model@v9"), KEY)
    with pytest.raises(ConfigError, match="no safetensors files"):
        fetched_model(model("org/pickles"), KEY)
    for text, problem in (
        ("hf://datasets/org/rows/data/test.jsonl", "no such file"),
        ("hf://datasets/org/row/data/train.jsonl", "the Hub has no such data set"),
    ):
        reference = file_reference(text)
        assert reference is not None
        with pytest.raises(ConfigError, match=problem):
            fetched_file(reference, "data.prompts")


def test_addresses_are_told_from_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert str(model("Qwen/Qwen3-0.6B")) == "Qwen/Qwen3-0.6B"
    assert model("Qwen/Qwen3-0.6B@refs/pr/3").revision == "refs/pr/3"
    assert model("hf://Qwen/Qwen3-0.6B@main") == HubReference("Qwen/Qwen3-0.6B", "main")
    for path in ("/models/Qwen", "./models/Qwen", "~/Qwen", "Qwen3-0.6B", "a/b/c", "../a/b"):
        assert model_reference(path) is None
    (tmp_path / "models" / "mine").mkdir(parents=True)
    assert model_reference("models/mine") is None
    file = file_reference("hf://datasets/org/rows@refs/convert/parquet/a/b.parquet")
    assert file == HubReference("org/rows", "refs/convert/parquet", "dataset", "a/b.parquet")
    assert file_reference("train.jsonl") is None
    for text in ("hf://datasets/org/rows", "hf://x", "hf://spaces/org/name/a.py"):
        with pytest.raises(ConfigError):
            file_reference(text)
    with pytest.raises(ConfigError, match="not the address of a model"):
        model_reference("hf://datasets/org/rows")


def test_a_download_prints_its_progress_as_lines(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    enable_progress_bars()  # makers of small models disable them for the whole process
    fetched_model(model("org/model"), KEY)
    assert capsys.readouterr().err == ""  # it took less than two seconds
    monkeypatch.setattr("rlpipe.system.hub.PROGRESS_DELAY_S", 0)
    monkeypatch.setattr("rlpipe.system.hub.PROGRESS_INTERVAL_S", 0)
    hub.repos["org/model"].files["model.safetensors"] = b"0" * 10**6
    fetched_model(model("org/model"), KEY)
    lines = capsys.readouterr().err.splitlines()
    assert "100%" in lines[-1] and "1.00M" in lines[-1]
    assert not [line for line in lines if "\x1b" in line or not line.strip()]
