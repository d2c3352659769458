"""Record and repeat uploads of checkpoints (tasks.uploads)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest

from rlpipe.actors.trainer.checkpoints import Upload
from rlpipe.actors.trainer.group import RANK_0_METHODS
from rlpipe.actors.trainer.rank_actors import TrainerRank
from rlpipe.actors.trainer.trainer_spec import TrainerSpec
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
    """Two ranks: the first one has an upload of a run."""

    def __init__(self, run: str) -> None:
        self.upload = Upload(f"checkpoints/{run}/iter_0000001/a", INPUTS, {"version": 1})

    async def call(self, method: str, *, deadline_s: float) -> list[Any]:
        return [self.upload.prefix] if method in RANK_0_METHODS else [(self.upload, True), None]


@pytest.mark.parametrize(("run", "own"), [("run", True), ("run2", False), ("other", False)])
async def test_an_upload_of_another_run_is_not_recorded(run: str, own: bool):
    ranks = Ranks(run)
    config = SimpleNamespace(run="run", checkpoint=SimpleNamespace(timeout_s=1.0))
    ctx: Any = SimpleNamespace(config=config, cluster=SimpleNamespace(trainer=ranks))
    assert await pending(ctx) == ((ranks.upload, True) if own else None)


class Failing(Files):
    """A store that fails at the first uploaded files."""

    def __init__(self, root: str, errors: Sequence[Exception] = ()) -> None:
        super().__init__(root)
        self.errors = list(errors)

    def put_file(self, local: str | os.PathLike[str], path: str) -> FileRecord:
        if self.errors:
            raise self.errors.pop(0)
        return super().put_file(local, path)


class Trainer:
    """Two ranks in this process, without a model, that hold the state `w`. The first one's store
    fails.
    """

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
        ranks = self.ranks[:1] if method in RANK_0_METHODS else self.ranks
        return [getattr(rank, method)(**arguments) for rank in ranks]


async def saved(folder: Path, errors: Sequence[Exception] = ()) -> Any:
    """A run with weight version 1 on local disk and a finished upload, complete or failed."""
    files = Files(folder / "store")
    config = SimpleNamespace(run="run", checkpoint=SimpleNamespace(timeout_s=5.0, keep_local=2))
    cluster = SimpleNamespace(trainer=Trainer(folder, errors))
    ctx: Any = SimpleNamespace(
        config=config, cluster=cluster, files=files, nodes=Nodes(files), directory=folder / "home"
    )
    ctx.lineages = Lineages(ctx.nodes, "init")
    await begin_checkpoint(ctx, INPUTS, "w", 1)
    await ended(ctx)
    return ctx


async def ended(ctx: Any) -> None:
    for rank in ctx.cluster.trainer.ranks:
        rank._uploads.submit(lambda: None).result(5.0)


def recorded(ctx: Any) -> Node | None:
    return ctx.nodes.find(Stage.CHECKPOINT, INPUTS.digest)


@pytest.fixture(autouse=True)
def working_directory_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks change their working directory; restore the test's."""
    monkeypatch.chdir(".")


async def test_a_complete_upload_is_recorded_and_forgotten_by_all_ranks(
    tmp_path: Path,
):
    ctx = await saved(tmp_path)
    await settle(ctx)
    node = recorded(ctx)
    assert (
        node is not None
        and {Path(record.path).name: ctx.files.read(record.path) for record in node.files}
        == CONTENT
    )
    assert await pending(ctx) is None


async def test_the_store_is_asked_for_several_files_of_a_checkpoint_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    ctx = await saved(tmp_path)
    together = Barrier(len(CONTENT), timeout=20.0)
    exists = Files.exists

    def waits(files: Files, path: str) -> bool:
        together.wait()
        return exists(files, path)

    monkeypatch.setattr(Files, "exists", waits)
    await settle(ctx)
    monkeypatch.undo()
    assert recorded(ctx) is not None


async def test_a_failed_upload_is_repeated_when_the_stage_is_retried(
    tmp_path: Path,
):
    ctx = await saved(tmp_path, [StoreError("away for longer than anybody waits")])
    with pytest.raises(StoreError, match="away"):
        await settle(ctx)
    await settle(ctx)  # the stage's retry, whether the upload has ended or not
    await settle(ctx, wait=True)
    node = recorded(ctx)
    assert node is not None and len(node.files) == len(CONTENT)
    assert await pending(ctx) is None


async def test_waiting_for_an_upload_continues_while_the_store_is_full(
    tmp_path: Path,
):
    ctx = await saved(tmp_path, [StoreFull("no space left"), StoreFull("no space left")])
    for _ in range(2):
        with pytest.raises(StoreFull):
            await settle(ctx, wait=True)
    await settle(ctx, wait=True)
    assert recorded(ctx) is not None


async def test_an_upload_that_could_not_be_recorded_is_recorded_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(_: Node) -> Node:
        raise StoreError("away")

    ctx = await saved(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(ctx.nodes, "commit", refuse)
        with pytest.raises(StoreError, match="away"):
            await settle(ctx)
    await settle(ctx)
    assert recorded(ctx) is not None


async def test_an_upload_with_a_removed_file_is_not_recorded(tmp_path: Path):
    ctx = await saved(tmp_path)
    ctx.files.delete(ctx.files.list("checkpoints")[0])
    await settle(ctx)
    assert recorded(ctx) is None and await pending(ctx) is None
