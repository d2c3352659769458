"""Upload and download of checkpoint directories (rlpipe.actors.trainer.checkpoints)."""

from __future__ import annotations

import fcntl
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.actors.trainer.checkpoints import (
    CRITIC,
    TRACKER,
    fetch_checkpoint,
    prune,
    shares_complete,
    upload_share,
)
from rlpipe.errors import DeadlineExceeded, ObjectConflict, ObjectCorrupt, ObjectMissing
from rlpipe.lineage.stage_inputs import checkpoint_inputs
from rlpipe.store.objects.files import Files
from rlpipe.types import FileRecord, Node

CONTENT = {
    "__0_0.distcp": b"rank 0",
    "__0_1.distcp": b"rank 0 again",
    "__1_0.distcp": b"rank 1",
    "__12_0.distcp": b"rank 12",
    "common.pt": b"common",
    "metadata.json": b"{}",
    ".metadata": b"index",
}
RANKS = 13


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path / "store")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint directory of 13 ranks."""
    return fill(tmp_path / "saved", CONTENT)


def fill(directory: Path, content: dict[str, bytes]) -> Path:
    directory.mkdir()
    for name, data in content.items():
        (directory / name).write_bytes(data)
    return directory


def upload(files: Files, directory: Path) -> Node:
    shares = [
        upload_share(files, directory, "checkpoints/run/iter_0000003/a", rank)
        for rank in range(RANKS)
    ]
    records = [record for share in shares for record in share]
    return recorded(records)


def recorded(records: list[FileRecord], version: int = 3) -> Node:
    return checkpoint_inputs("weights").node(files=tuple(records), outputs={"version": version})


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_all_shares_together_are_the_directory_and_each_file_is_uploaded_once(
    files: Files, saved: Path
):
    node = upload(files, saved)
    names = [Path(record.path).name for record in node.files]
    assert sorted(names) == sorted(CONTENT)
    assert {Path(path).name: files.read(path) for path in files.list("checkpoints")} == CONTENT


def test_each_rank_uploads_its_files_and_rank_0_the_index_last(files: Files, saved: Path):
    def share(rank: int) -> list[str]:
        return [Path(record.path).name for record in upload_share(files, saved, "p", rank)]

    assert share(1) == ["__1_0.distcp"]
    assert share(12) == ["__12_0.distcp"]
    assert share(2) == []
    files_of_0 = share(0)
    assert set(files_of_0) == {
        "__0_0.distcp",
        "__0_1.distcp",
        "common.pt",
        "metadata.json",
        ".metadata",
    }
    assert files_of_0[-1] == ".metadata"


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 3)), unique=True, max_size=8))
def test_every_file_has_exactly_one_rank_that_uploads_it(
    tmp_path_factory, written: list[tuple[int, int]]
):
    root = tmp_path_factory.mktemp("checkpoint")
    directory = fill(
        root / "saved",
        {f"__{rank}_{part}.distcp": b"x" for rank, part in written} | {"common.pt": b"x"},
    )
    shares = {
        rank: upload_share(Files(root / "store"), directory, "p", rank)
        for rank in {rank for rank, _ in written} | {0}
    }
    found = sorted(
        (rank, Path(record.path).name) for rank, share in shares.items() for record in share
    )
    assert found == sorted(
        [(rank, f"__{rank}_{part}.distcp") for rank, part in written] + [(0, "common.pt")]
    )


def test_an_upload_of_other_content_under_the_same_prefix_is_refused(files: Files, saved: Path):
    assert upload(files, saved) == upload(files, saved)
    (saved / "__1_0.distcp").unlink()
    (saved / "__1_0.distcp").write_bytes(b"other")
    with pytest.raises(ObjectConflict):
        upload(files, saved)


def test_an_uploaded_checkpoint_is_downloaded_as_a_loadable_directory(
    files: Files, saved: Path, tmp_path: Path
):
    root = fetch_checkpoint(files, upload(files, saved), tmp_path / "checkpoints")
    assert content(root / "iter_0000003") == CONTENT
    assert (root / TRACKER).read_text() == "3"


def test_an_existing_checkpoint_is_not_downloaded_again(files: Files, saved: Path, tmp_path: Path):
    node = upload(files, saved)
    root = fetch_checkpoint(files, node, tmp_path / "checkpoints")
    for path in files.list("checkpoints"):
        files.delete(path)
    assert fetch_checkpoint(files, node, tmp_path / "checkpoints") == root
    assert content(root / "iter_0000003") == CONTENT


def test_a_killed_download_is_completed_by_the_next(files: Files, saved: Path, tmp_path: Path):
    node = upload(files, saved)
    root = fetch_checkpoint(files, node, tmp_path / "checkpoints")
    (root / TRACKER).unlink()
    fetch_checkpoint(files, node, tmp_path / "checkpoints")
    assert (root / TRACKER).read_text() == "3"
    (root / "iter_0000003").rename(root / "iter_0000003.partial")
    (root / "iter_0000003.partial" / "left_over").write_bytes(b"?")
    fetch_checkpoint(files, node, tmp_path / "checkpoints")
    assert content(root / "iter_0000003") == CONTENT


def test_the_part_of_a_critic_with_its_own_ranks_is_in_a_subfolder(
    files: Files, saved: Path, tmp_path: Path
):
    of_critic = fill(tmp_path / "critic", {"__0_0.distcp": b"critic", ".metadata": b"index"})
    shares = [upload_share(files, saved, "p", rank) for rank in range(RANKS)]
    shares.append(upload_share(files, of_critic, f"p/{CRITIC}", 0))
    records = shares_complete(shares)
    assert records is not None
    node = recorded(list(records))
    folder = tmp_path / "checkpoints"
    root = fetch_checkpoint(files, node, folder)
    parts = [content(root / "iter_0000003"), content(root / CRITIC / "iter_0000003")]
    assert parts == [CONTENT, content(of_critic)]
    (root / "iter_0000003").rename(root / "iter_0000003.partial")  # killed after the critic's part
    fetch_checkpoint(files, node, folder)
    assert [content(root / "iter_0000003"), content(root / CRITIC / "iter_0000003")] == parts


def test_without_the_share_of_a_rank_a_checkpoint_is_incomplete(files: Files, saved: Path):
    shares = [upload_share(files, saved, "p", rank) for rank in range(RANKS)]
    assert shares_complete([*shares, None]) is None
    assert shares_complete(shares[1:]) is None, "without rank 0 the index is missing"
    assert shares_complete(shares) == tuple(record for share in shares for record in share)


def test_ranks_of_one_machine_download_at_once_and_each_finds_a_complete_checkpoint(
    files: Files, saved: Path, tmp_path: Path
):
    class Slow(Files):
        def get_file(self, *arguments: Any, **keywords: Any) -> FileRecord:
            time.sleep(0.01)
            return super().get_file(*arguments, **keywords)

    node = upload(files, saved)
    slow = Slow(files.root)

    def fetch(_: int) -> dict[str, bytes]:
        return content(fetch_checkpoint(slow, node, tmp_path / "checkpoints") / "iter_0000003")

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(fetch, range(16))) == [CONTENT] * 16


def test_a_checkpoint_with_a_damaged_file_does_not_appear(
    files: Files, saved: Path, tmp_path: Path
):
    node = upload(files, saved)
    damaged = Path(files.url(node.files[-1].path).removeprefix("file://"))
    sound = damaged.read_bytes()
    damaged.write_bytes(b"?" * len(sound))
    with pytest.raises(ObjectCorrupt):
        fetch_checkpoint(files, node, tmp_path / "checkpoints")
    assert not list((tmp_path / "checkpoints").rglob("iter_0000003"))
    damaged.write_bytes(sound)
    root = fetch_checkpoint(files, node, tmp_path / "checkpoints")
    assert content(root / "iter_0000003") == CONTENT, (
        "files of the failed attempt are not part of it"
    )


def test_a_missing_file_of_a_checkpoint_is_named(files: Files, saved: Path, tmp_path: Path):
    node = upload(files, saved)
    files.delete(node.files[0].path)
    with pytest.raises(ObjectMissing, match=r"__0_0\.distcp"):
        fetch_checkpoint(files, node, tmp_path / "checkpoints")


def test_a_node_without_files_is_refused(files: Files, tmp_path: Path):
    node = recorded([])
    with pytest.raises(ObjectMissing) as caught:
        fetch_checkpoint(files, node, tmp_path / "checkpoints")
    assert caught.value.where == f"nodes/checkpoint/{node.digest}.json"


def test_two_checkpoints_of_one_version_have_separate_directories(
    files: Files, saved: Path, tmp_path: Path
):
    """Two branches have a version 3 each."""
    own = upload(files, saved)
    other = files.put_file(saved / "common.pt", "checkpoints/other/iter_0000003/b/common.pt")
    foreign = checkpoint_inputs("weights of another branch").node(
        files=(other,), outputs={"version": 3}
    )
    first, second = (
        fetch_checkpoint(files, node, tmp_path / "checkpoints") for node in (own, foreign)
    )
    assert content(first / "iter_0000003") == CONTENT
    assert content(second / "iter_0000003") == {"common.pt": b"common"}


def test_pruning_keeps_the_newest_and_deletes_downloads(files: Files, saved: Path, tmp_path: Path):
    folder = tmp_path / "checkpoints"
    fetch_checkpoint(files, upload(files, saved), folder)
    for version in (9, 100, 25, 1000):
        (folder / f"iter_{version:07d}").mkdir()
    (folder / TRACKER).write_text("1000")
    prune(folder, 2)
    assert sorted(path.name for path in folder.iterdir()) == [
        "iter_0000100",
        "iter_0001000",
        TRACKER,
    ]
    prune(folder, 5)
    assert sorted(path.name for path in folder.iterdir()) == [
        "iter_0000100",
        "iter_0001000",
        TRACKER,
    ]


def test_pruning_keeps_the_same_number_of_critic_checkpoints(tmp_path: Path):
    for version in (1, 2, 3):
        (tmp_path / f"iter_{version:07d}").mkdir()
        (tmp_path / CRITIC / f"iter_{version:07d}").mkdir(parents=True)
    prune(tmp_path, 2)
    kept = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("iter_*")}
    assert kept == {
        f"{part}iter_{version:07d}" for part in ("", f"{CRITIC}/") for version in (2, 3)
    }


def test_pruning_a_missing_folder_does_nothing(tmp_path: Path):
    prune(tmp_path / "none", 1)
    assert list(tmp_path.iterdir()) == []


def test_the_wait_for_the_download_of_another_rank_has_a_deadline(
    files: Files, saved: Path, tmp_path: Path
):
    node = upload(files, saved)
    root = tmp_path / "checkpoints" / "fetched" / node.digest[:16]
    root.mkdir(parents=True)
    with (root / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DeadlineExceeded, match=f"checkpoint {node.digest[:12]} not there"):
            fetch_checkpoint(files, node, tmp_path / "checkpoints", timeout_s=0.1)
    assert (
        content(
            fetch_checkpoint(files, node, tmp_path / "checkpoints", timeout_s=0.1) / "iter_0000003"
        )
        == CONTENT
    )
