"""Sources of a conversion, and the child process that converts (flows.conversion_job)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config, Qwen2ForCausalLM

from flows.conversion_job import (
    conversion_job,
    fetched_checkpoint,
    run_conversion,
    stored_checkpoint,
)
from rlpipe.errors import ConfigError, ObjectCorrupt, ResourceError, StoreFull
from rlpipe.lineage.stage_inputs import checkpoint_inputs
from rlpipe.store.branches import Branches
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.types import Node, Stage
from tests.store.lineage import Run


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home whose run has two iterations, with a checkpoint after the first."""
    files = Files(tmp_path / "home" / "store")
    folder = tmp_path / "local"
    run = Run(files).start()
    run.iterate()
    run.iterate()
    folder.mkdir()
    for name in (".metadata", "__0_0.distcp"):
        (folder / name).write_text(name)
    inputs = checkpoint_inputs(Branches(files).read("run", 0).nodes[Stage.TRAIN])
    records = [
        files.put_file(path, f"checkpoints/run/iter_0000001/abc/{path.name}")
        for path in sorted(folder.iterdir())
    ]
    Nodes(files).commit(inputs.node(files=tuple(records), outputs={"version": 1}))
    return tmp_path / "home"


@pytest.mark.parametrize("of", ["run", "run@0"])
def test_a_runs_checkpoint_is_found_in_its_store(home, of):
    with stored_checkpoint(home, of) as stored:
        assert sorted(path.name for path in stored.folder.iterdir()) == [
            ".metadata",
            "__0_0.distcp",
        ]
        assert (stored.model_dir, stored.name) == (None, "run@0")


@pytest.mark.parametrize(
    ("of", "message"),
    [
        ("other", "the run does not exist"),
        ("run@1", "were not saved[\\s\\S]*checkpoints of run@0"),
        ("run@2", "has not finished[\\s\\S]*from 0 to 1; after run@1 2 iterations are done"),
        ("run@x", "not the name"),
        ("@1", "not"),
    ],
)
def test_a_missing_checkpoint_is_named(home, of, message):
    with pytest.raises(ConfigError, match=message), stored_checkpoint(home, of):
        pass


def test_a_file_that_was_changed_is_not_converted(home):
    next((home / "store" / "checkpoints").rglob("__0_0.distcp")).write_text("something else")
    changed = pytest.raises(ObjectCorrupt, match="has changed since it was written")
    with changed, stored_checkpoint(home, "run"):
        pass


def test_each_conversion_has_its_own_temporary_folder(home, tmp_path):
    files = Files(home / "store")
    version = "iter_0000001"
    train = Branches(files).read("run", 0).nodes[Stage.TRAIN]
    node: Node = Nodes(files).get(Stage.CHECKPOINT, checkpoint_inputs(train).digest)
    with fetched_checkpoint(files, node, tmp_path / "run") as first:
        with fetched_checkpoint(files, node, tmp_path / "run") as second:
            assert first != second
        assert not second.exists()
        assert sorted(path.name for path in (first / version).iterdir()) == [
            ".metadata",
            "__0_0.distcp",
        ]
    assert list((tmp_path / "run").iterdir()) == []


def test_the_source_decides_the_direction_of_the_conversion(tmp_path):
    settings: dict[str, Any] = {"dtype": None}
    back = conversion_job(tmp_path, tmp_path / "out", None, settings)
    assert back == {
        "to": "huggingface",
        "checkpoint": str(tmp_path),
        "output": str(tmp_path / "out"),
        "dtype": None,
    }
    (tmp_path / "config.json").write_text("{}")
    there = conversion_job(tmp_path, tmp_path / "out", None, settings)
    assert there == {
        "to": "torch_dist",
        "hf_dir": str(tmp_path),
        "save": str(tmp_path / "out"),
        "dtype": None,
    }
    with pytest.raises(ConfigError, match="no adapters to write"):
        conversion_job(tmp_path, tmp_path / "out", None, settings, adapter=True)
    with pytest.raises(ConfigError, match="does not exist"):
        conversion_job(tmp_path / "absent", tmp_path / "out", None, settings)


@pytest.mark.integration
async def test_a_child_process_converts_and_reports_progress(tmp_path):
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    Qwen2ForCausalLM(Qwen2Config(vocab_size=64, num_hidden_layers=1, **sizes)).save_pretrained(
        tmp_path / "model"
    )
    heard: list[dict[str, Any]] = []

    async def tell(message: dict[str, Any]) -> None:
        heard.append(message)

    report = await run_conversion(
        conversion_job(tmp_path / "model", tmp_path / "dist", None, {"shard_bytes": 10_000}), tell
    )
    assert report["files"] > 1 and (tmp_path / "dist" / "release" / ".metadata").is_file()
    assert [message["done"] for message in heard] == sorted(message["done"] for message in heard)
    assert heard[-1]["done"] == heard[-1]["total"] == report["total_bytes"]


@pytest.mark.parametrize(
    ("says", "raised"),
    [
        ('echo \'{"error": {"type": "StoreFull", "text": "no room"}}\'; exit 1', StoreFull),
        ("echo something else; exit 3", ResourceError),
    ],
)
async def test_an_error_of_the_child_process_is_raised(tmp_path, monkeypatch, says, raised):
    process = tmp_path / "python"
    process.write_text(f"#!/bin/sh\n{says}\n")
    process.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(process))

    async def tell(_said: dict[str, Any]) -> None: ...

    with pytest.raises(raised, match=r"no room|without a report"):
        await run_conversion({"to": "torch_dist"}, tell)
