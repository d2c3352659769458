"""A fork and garbage collection at once: the fork's first checkpoint stays, or its loss is
noticed.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rlpipe.config.run import RunConfig
from rlpipe.errors import Fenced, ObjectMissing
from rlpipe.lineage.stage_inputs import checkpoint_inputs
from rlpipe.observe.progress import Progress
from rlpipe.store.branches import Branches
from rlpipe.store.epochs import Epochs
from rlpipe.store.nodes import Nodes, node_path
from rlpipe.store.objects.files import Files
from rlpipe.types import Commit, Stage
from tasks import fork
from tests.reprocessed import History, configuration


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """A store with a run of two iterations, without checkpoints."""
    files = Files(tmp_path / "store")
    History(files, configuration(tmp_path, num_rollout=5)).iterate(2)
    return files


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """Configuration of a fork of that run."""
    return configuration(
        tmp_path, "new", num_rollout=5, fork_from={"branch": "run", "iteration": 1}
    )


def test_garbage_collection_is_refused_while_a_fork_saves_its_checkpoint(
    files: Files, config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made: list[str] = []

    async def materialise(
        files: Files, config: RunConfig, origin: Commit, state: str, home: Path
    ) -> str:
        with (
            pytest.raises(Fenced, match="is running in another process"),
            Epochs(files).exclusive(),
        ):
            pass
        made.append(Nodes(files).commit(checkpoint_inputs(state).node()).digest)
        return state

    monkeypatch.setattr(fork, "materialise", materialise)

    async def point() -> Commit | None:
        return await fork.fork_point(files, config, tmp_path, Progress("new", 5))

    origin = asyncio.run(point())
    assert origin is not None and origin == Branches(files).read("run", 1) and len(made) == 1
    with Epochs(files).exclusive():
        pass
    fingerprint = Nodes(files).get(Stage.INIT, Branches(files).get("run").init).config["model"]
    files.delete(node_path(Stage.CHECKPOINT, made[0]))
    with pytest.raises(ObjectMissing, match="was removed meanwhile"):
        fork.begin_fork(files, config, origin, fingerprint)
    assert Branches(files).find("new") is None, "the same command begins it"
    asyncio.run(point())
    fork.begin_fork(files, config, origin, fingerprint)
    assert Branches(files).get("new").parent == "run/00000001"
