"""Which uploads of checkpoints a run takes for its own, and what becomes of one that fails
(tasks.uploads)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlpipe.actors.trainer.checkpoints import Upload
from rlpipe.actors.trainer.spec import TrainerSpec
from rlpipe.actors.trainer.trainer import TrainerRank
from rlpipe.errors import StoreError, StoreFull
from rlpipe.lineage.stage_inputs import checkpoint_inputs
from rlpipe.lineage.states import Lineages
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.types import FileRecord, Node, Stage
from tasks.uploads import begin_checkpoint, pending, settle
from tests.actors.trainer.trained import configuration

INPUTS = checkpoint_inputs("w")
CONTENT = {"__0_0.distcp": b"rank 0", "__1_0.distcp": b"rank 1", ".metadata": b"index"}


class Ranks:
    """The first still has an upload of a run, the second has none."""

    def __init__(self, run: str) -> None:
        self.upload = Upload(f"checkpoints/{run}/iter_0000001/a", INPUTS, {"version": 1})

    async def call(self, method: str, *, deadline_s: float) -> list[Any]:
        return [(self.upload, True), None]


@pytest.mark.parametrize(("run", "own"), [("run", True), ("run2", False), ("other", False)])
async def test_an_upload_that_another_run_left_in_the_ranks_is_not_recorded(run: str, own: bool):
    ranks = Ranks(run)
    config = SimpleNamespace(run="run", checkpoint=SimpleNamespace(timeout_s=1.0))
    it: Any = SimpleNamespace(config=config, cluster=SimpleNamespace(trainer=ranks))
    assert await pending(it) == ((ranks.upload, True) if own else None)


class Failing(Files):
    """A store that fails at the first files that are put there."""

    def __init__(self, root: str, errors: Sequence[Exception] = ()) -> None:
        super().__init__(root)
        self.errors = list(errors)

    def put_file(self, local: str | os.PathLike[str], path: str) -> FileRecord:
        if self.errors:
            raise self.errors.pop(0)
        return super().put_file(local, path)


class Trainer:
    """Two ranks in this process, without a model, that hold the state `w`; the first one's store
    fails as told."""

    def __init__(self, folder: Path, errors: Sequence[Exception]) -> None:
        (folder / "saved").mkdir()
        for name, data in CONTENT.items():
            (folder / "saved" / name).write_bytes(data)
        self.ranks: list[Any] = [TrainerRank(number, 2, str(folder)) for number in range(2)]
        config = configuration(str(folder), "run")
        for rank, failing in zip(self.ranks, (errors, ()), strict=True):
            rank._spec = TrainerSpec.of(
                config, model_dir=str(folder), store_root=str(folder / "store"), work_dir=folder
            )
            rank._engine = SimpleNamespace(save_checkpoint=lambda *_: folder / "saved")
            rank._files = Failing(str(folder / "store"), failing)
            rank.held = "w"

    async def call(self, method: str, *, deadline_s: float, **arguments: Any) -> list[Any]:
        return [getattr(rank, method)(**arguments) for rank in self.ranks]


async def saved(folder: Path, errors: Sequence[Exception] = ()) -> Any:
    """A run whose checkpoint of weight version 1 is on local disk, and its upload over, one way or
    the other."""
    files = Files(folder / "store")
    config = SimpleNamespace(run="run", checkpoint=SimpleNamespace(timeout_s=5.0, keep_local=2))
    cluster = SimpleNamespace(trainer=Trainer(folder, errors))
    it: Any = SimpleNamespace(
        config=config, cluster=cluster, files=files, nodes=Nodes(files), directory=folder / "home"
    )
    it.lineages = Lineages(it.nodes, "init")
    await begin_checkpoint(it, INPUTS, "w", 1)
    await ended(it)
    return it


async def ended(it: Any) -> None:
    for rank in it.cluster.trainer.ranks:
        rank._uploads.submit(lambda: None).result(5.0)


def recorded(it: Any) -> Node | None:
    return it.nodes.find(Stage.CHECKPOINT, INPUTS.digest)


@pytest.fixture(autouse=True)
def back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks go to a folder of their own; the test comes back."""
    monkeypatch.chdir(".")


async def test_a_checkpoint_that_is_in_the_store_is_recorded_and_forgotten_by_all_ranks(
    tmp_path: Path,
):
    it = await saved(tmp_path)
    await settle(it)
    node = recorded(it)
    assert (
        node is not None
        and {Path(record.path).name: it.files.read(record.path) for record in node.files} == CONTENT
    )
    assert await pending(it) is None


async def test_a_checkpoint_whose_upload_failed_is_uploaded_again_though_the_stage_is_only_retried(
    tmp_path: Path,
):
    it = await saved(tmp_path, [StoreError("away for longer than anybody waits")])
    with pytest.raises(StoreError, match="away"):
        await settle(it)
    await settle(it)  # the stage's own retry, which goes on whether that has ended by now or not
    await settle(it, wait=True)
    node = recorded(it)
    assert node is not None and len(node.files) == len(CONTENT)
    assert await pending(it) is None


async def test_a_checkpoint_that_is_waited_for_is_not_given_up_while_the_store_is_full(
    tmp_path: Path,
):
    it = await saved(tmp_path, [StoreFull("no space left"), StoreFull("no space left")])
    for _ in range(2):
        with pytest.raises(StoreFull):
            await settle(it, wait=True)
    await settle(it, wait=True)
    assert recorded(it) is not None


async def test_one_that_could_not_be_recorded_is_recorded_by_who_comes_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(_: Node) -> Node:
        raise StoreError("away")

    it = await saved(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(it.nodes, "commit", refuse)
        with pytest.raises(StoreError, match="away"):
            await settle(it)
    await settle(it)
    assert recorded(it) is not None


async def test_one_of_which_a_file_was_removed_before_it_was_recorded_is_none(tmp_path: Path):
    it = await saved(tmp_path)
    it.files.delete(it.files.list("checkpoints")[0])
    await settle(it)
    assert recorded(it) is None and await pending(it) is None
