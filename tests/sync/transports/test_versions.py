"""Ranks write versions of the weights and mirrors fetch them.

Covers `disk`, `delta`, `versions` and `mirror` of rlpipe.sync.transports."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlpipe.config.train import SyncConfig
from rlpipe.errors import StoreError, StoreFull, SyncError
from rlpipe.sync.transports.base import Push
from rlpipe.sync.transports.mirror import Mirror
from rlpipe.sync.transports.registry import TRANSPORTS
from rlpipe.sync.transports.versions import HF_INDEX, RECORD, Version, WeightStore
from rlpipe.types import WeightVersion
from tests.live_engine import make_model
from tests.servers import seaweed
from tests.sync.setups import transport_setup

RANKS = 2


def stamp(version: int) -> str:
    return WeightVersion(branch="run", version=version, digest=f"{version:032x}").stamp()


class Trainer:
    """Two ranks that write the weights of one model."""

    def __init__(self, folder: Path, root: str | None = None, **sync: Any) -> None:
        self.model = make_model(folder / "model", seed=0)
        self.sync = SyncConfig.model_validate({"update_weight_buffer_size": 20_000, **sync})
        files_root = root or str(folder / "shared")
        self.store = WeightStore(files_root, scratch=folder)
        self.writers: list[Any] = [
            TRANSPORTS[self.sync.transport](
                transport_setup(
                    folder / "model",
                    sync=self.sync,
                    rank=rank,
                    world_size=RANKS,
                    files_root=files_root,
                    scratch=folder,
                )
            )
            for rank in range(RANKS)
        ]

    def step(self, names: str = "") -> None:
        """Change the last bits of the tensors with `names` in their name."""
        for name, tensor in self.model.state_dict().items():
            if names in name:
                tensor.mul_(1.0001)

    def write(self, version: int, base: int | None = None) -> Version:
        based = None if base is None else stamp(base)
        push = Push(stamp(version), base=based)
        shares = [writer.send(self.tensors(), push) for writer in self.writers]
        made = self.store.join(
            stamp(version), self.store.find(based) if based else None, self.sync, shares
        )
        self.store.publish(made)
        return made

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.model.state_dict().items()

    def matches(self, folder: Path) -> bool:
        """True if the folder holds exactly these weights."""
        found = read(folder)
        expected = {name: tensor for name, tensor in self.tensors() if name != "lm_head.weight"}
        return found.keys() == expected.keys() and all(
            torch.equal(found[name], tensor) for name, tensor in expected.items()
        )


def read(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
    return tensors


def test_a_full_version_is_a_directory_that_an_engine_can_load(tmp_path):
    trainer = Trainer(tmp_path, transport="disk")
    made = trainer.write(1)
    folder = trainer.store.path(stamp(1))
    assert trainer.matches(folder)
    assert (folder / HF_INDEX).is_file() and not (folder / "config.json").exists()
    assert len(made.files) > RANKS, "the ranks take turns"
    assert made.full_bytes == sum(
        t.nbytes for name, t in trainer.tensors() if name != "lm_head.weight"
    )
    assert trainer.store.chain(stamp(1)) == [made]
    # Engines of another user read the files too.
    readers = folder.stat().st_mode & 0o666
    assert {(folder / file.name).stat().st_mode & 0o777 for file in made.files} == {readers}


def test_what_is_kept_can_be_opened_as_a_model(tmp_path):
    trainer = Trainer(tmp_path, transport="disk", update_weight_disk_keep_files=True)
    trainer.write(1)
    assert (trainer.store.path(stamp(1)) / "config.json").read_bytes() == (
        tmp_path / "model/config.json"
    ).read_bytes()


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_a_mirror_follows_the_chain_whatever_it_holds(tmp_path, encoding):
    trainer = Trainer(tmp_path, transport="delta", update_weight_delta_encoding=encoding)
    near = Mirror(tmp_path / "near")
    far = Mirror(tmp_path / "far")
    trainer.write(1)
    assert trainer.matches(near.fetch(trainer.store, stamp(1), timeout_s=5))
    trainer.step("layers.1")
    changes = trainer.write(2, base=1)
    assert set(changes.checksums) == {name for name, _ in trainer.tensors() if "layers.1" in name}
    assert changes.size_bytes < changes.full_bytes
    assert trainer.matches(near.fetch(trainer.store, stamp(2), timeout_s=5))
    for version in (3, 4):
        trainer.step()
        trainer.write(version, base=version - 1)
    for mirror in (near, far, far):
        assert trainer.matches(mirror.fetch(trainer.store, stamp(4), timeout_s=5))
        assert mirror.held() == stamp(4)


@pytest.mark.integration
def test_an_object_store_holds_versions(tmp_path, monkeypatch):
    with seaweed(tmp_path / "s3") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        trainer = Trainer(tmp_path, f"s3://{server.bucket}/weights", transport="delta")
        mirror = Mirror(tmp_path / "m")
        assert trainer.store.directory is None
        trainer.writers[0].send(trainer.tensors(), Push(stamp(1)))
        trainer.step()
        made = trainer.write(1)
        assert {len(file.sha256 or "") for file in made.files} == {64}
        assert trainer.matches(mirror.fetch(trainer.store, stamp(1), timeout_s=5))
        trainer.step()
        trainer.write(2, base=1)
        assert trainer.matches(mirror.fetch(trainer.store, stamp(2), timeout_s=5))
        trainer.store.remove_others(trainer.write(3))
        assert trainer.store.find(stamp(2)) is None
        assert trainer.matches(mirror.fetch(trainer.store, stamp(3), timeout_s=5))
        assert list(tmp_path.glob("tmp*")) == [], "no temporary file is left"


def test_a_version_without_changes_has_no_files(tmp_path):
    trainer = Trainer(tmp_path, transport="delta")
    trainer.write(1)
    assert trainer.write(2, base=1).files == ()
    assert trainer.matches(Mirror(tmp_path / "m").fetch(trainer.store, stamp(2), timeout_s=5))


def test_changes_of_other_weights_are_refused(tmp_path):
    trainer = Trainer(tmp_path, transport="delta")
    mirror = Mirror(tmp_path / "m")
    trainer.write(1)
    mirror.fetch(trainer.store, stamp(1), timeout_s=5)
    for version in (2, 3):
        trainer.step()
        trainer.write(version, base=version - 1)
    last = trainer.store.chain(stamp(3))[-1]
    with pytest.raises(
        SyncError, match=rf"(?s)changes of other weights than are held.*{stamp(1)}.*{stamp(2)}"
    ):
        mirror.apply(trainer.store, last)
    assert mirror.held() == stamp(1)


def test_a_mirror_with_wrong_bytes_is_fetched_again(tmp_path):
    trainer = Trainer(tmp_path, transport="delta")
    mirror = Mirror(tmp_path / "m")
    trainer.write(1)
    mirror.fetch(trainer.store, stamp(1), timeout_s=5)
    trainer.step()
    trainer.write(2, base=1)
    for file in mirror.weights.iterdir():
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    assert trainer.matches(mirror.fetch(trainer.store, stamp(2), timeout_s=5))


def test_a_mirror_killed_while_applying_changes_starts_over(tmp_path, monkeypatch):
    trainer = Trainer(tmp_path, transport="delta")
    mirror = Mirror(tmp_path / "m")
    trainer.write(1)
    mirror.fetch(trainer.store, stamp(1), timeout_s=5)
    trainer.step()
    trainer.write(2, base=1)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(mirror, "_write_record", killed)
        with pytest.raises(KeyboardInterrupt):
            mirror.fetch(trainer.store, stamp(2), timeout_s=5)
    assert mirror.held() is None
    assert trainer.matches(mirror.fetch(trainer.store, stamp(2), timeout_s=5))


def test_a_mirror_refuses_files_with_wrong_bytes(tmp_path):
    trainer = Trainer(tmp_path, transport="delta")
    mirror = Mirror(tmp_path / "m")
    made = trainer.write(1)
    file = trainer.store.path(stamp(1)) / made.files[0].name
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(SyncError, match="a tensor differs from the trainer's"):
        mirror.fetch(trainer.store, stamp(1), timeout_s=5)
    assert mirror.held() is None


def test_a_mirror_with_truncated_files_is_fetched_again(tmp_path):
    trainer = Trainer(tmp_path, transport="delta")
    mirror = Mirror(tmp_path / "m")
    trainer.write(1)
    mirror.fetch(trainer.store, stamp(1), timeout_s=5)
    trainer.step()
    trainer.write(2, base=1)
    for file in mirror.weights.iterdir():
        file.write_bytes(b"\xff" * 100)
    assert trainer.matches(mirror.fetch(trainer.store, stamp(2), timeout_s=5))
    trainer.step()
    made = trainer.write(3, base=2)
    changes = trainer.store.path(stamp(3)) / made.files[0].name
    changes.write_bytes(b"\xff" * changes.stat().st_size)
    with pytest.raises(SyncError, match="a file of changes cannot be read"):
        mirror.fetch(trainer.store, stamp(3), timeout_s=5)
    assert mirror.held() is None


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), StoreFull),
        (
            SafetensorError(
                "Error while serializing: I/O error: No space left on device (os error 28)"
            ),
            StoreFull,
        ),
        (
            SafetensorError("Error while serializing: I/O error: Input/output error (os error 5)"),
            StoreError,
        ),
    ],
)
def test_a_full_disk_is_reported_and_leaves_no_file(tmp_path, error, expected):
    store = WeightStore(str(tmp_path))

    def save(path: Path) -> None:
        path.write_bytes(b"half")
        raise error

    with pytest.raises(expected):
        store.write(stamp(1), "part-00000.safetensors", save)
    assert list(store.path(stamp(1)).iterdir()) == []


def test_an_unfinished_version_does_not_count_and_breaks_the_chain(tmp_path):
    trainer = Trainer(tmp_path, transport="delta")
    trainer.write(1)
    trainer.step()
    made = trainer.write(2, base=1)
    assert trainer.store.find(stamp(3)) is None
    (trainer.store.path(stamp(1)) / RECORD).unlink()
    with pytest.raises(SyncError, match=rf"(?s)chain of weights is broken.*{stamp(1)}"):
        trainer.store.chain(stamp(2))
    (trainer.store.path(stamp(2)) / made.files[0].name).write_bytes(b"half")
    assert trainer.store.find(stamp(2)) is None


def test_a_full_version_allows_removing_the_others(tmp_path):
    trainer = Trainer(tmp_path, transport="delta")
    trainer.write(1)
    trainer.step()
    assert trainer.write(2, base=1).links == 2
    trainer.writers[0].send(trainer.tensors(), Push(stamp(9)))
    newest = trainer.write(3)
    trainer.store.remove_others(newest)
    assert [folder.name for folder in trainer.store.path(stamp(1)).parent.iterdir()] == [
        trainer.store.path(stamp(3)).name
    ]
    assert trainer.store.chain(stamp(3)) == [newest]


def test_a_rank_that_does_not_remember_the_base_writes_no_changes(tmp_path):
    trainer = Trainer(tmp_path, transport="delta")
    with pytest.raises(SyncError, match="not remembered"):
        trainer.write(2, base=1)
    trainer.write(1)
    assert [writer.remembered for writer in trainer.writers] == [stamp(1)] * RANKS
    read: list[str] = []

    def broken() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in trainer.model.state_dict().items():
            read.append(name)
            yield name, tensor[:-1] if name == "model.norm.weight" else tensor

    with pytest.raises(SyncError, match="differs from what the engines hold"):
        trainer.writers[0].send(broken(), Push(stamp(2), base=stamp(1)))
    assert read == list(trainer.model.state_dict()), "the stream is read to its end"
    assert trainer.writers[0].remembered is None


def test_a_share_without_all_tensors_is_refused(tmp_path):
    trainer = Trainer(tmp_path, transport="disk")
    some = list(trainer.model.state_dict().items())[:-2]
    with pytest.raises(SyncError, match=r"(?s)tensors are missing.*model.norm.weight"):
        trainer.writers[0].send(some, Push(stamp(1)))


def test_a_second_attempt_overwrites_files_of_the_first(tmp_path):
    trainer = Trainer(tmp_path, transport="disk")
    trainer.writers[0].send(trainer.tensors(), Push(stamp(1)))
    trainer.step()
    trainer.write(1)
    assert trainer.matches(trainer.store.path(stamp(1)))


def test_remembered_bytes_are_a_copy_of_the_parameters(tmp_path):
    trainer = Trainer(tmp_path, transport="delta")
    trainer.write(1)
    trainer.step()
    assert len(trainer.write(2, base=1).checksums) == len(trainer.writers[0].expected)
