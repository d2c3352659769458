"""A mirror with damaged files gives the right weights or one named error.

A power cut, or another process, can leave any bytes (rlpipe.sync.transports.mirror)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.config.train import SyncConfig
from rlpipe.errors import RlpipeError, SyncError
from rlpipe.sync.transports.delta import CHECKSUMS, apply_change, encode
from rlpipe.sync.transports.mirror import Mirror, tensor_positions
from rlpipe.sync.transports.versions import RECORD, Share, Version, WeightStore
from rlpipe.types import WeightVersion

OLD = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.ones(4, np.float16),
    "empty": np.zeros((0, 3), np.float32),
}
NEW = {**OLD, "a": OLD["a"] + 1}
SYNC = SyncConfig.model_validate({"transport": "delta"})


def stamp(version: int) -> str:
    return WeightVersion(branch="run", version=version, digest=f"{version:032x}").stamp()


def raw(tensor: np.ndarray) -> np.ndarray:
    return tensor.reshape(-1).view(np.uint8)


def checksum(tensor: np.ndarray) -> str:
    return CHECKSUMS[SYNC.update_weight_delta_checksum](raw(tensor))


def publish(
    store: WeightStore,
    version: int,
    tensors: dict[str, np.ndarray],
    checksums: dict[str, str],
    base: Version | None,
):
    share = Share(checksums=checksums)
    share.files.append(
        store.write(
            stamp(version),
            "part.safetensors",
            lambda p: safetensors.numpy.save_file(tensors, p),
            tensors,
        )
    )
    made = store.join(stamp(version), base, SYNC, [share])
    store.publish(made)
    return made


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    """A store with a full version and a delta version."""
    store = WeightStore(str(tmp_path / "shared"))
    first = publish(store, 1, OLD, {name: checksum(tensor) for name, tensor in OLD.items()}, None)
    change = encode(raw(NEW["a"]), raw(OLD["a"]), 4, SYNC.update_weight_delta_encoding)
    assert change is not None
    publish(store, 2, {"a": change}, {"a": checksum(NEW["a"])}, first)
    return store


def rewrite(store: WeightStore, version: int, **changes: Any) -> None:
    """Change the record of a version."""
    path = store.path(stamp(version)) / RECORD
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def held(mirror: Mirror) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(mirror.weights / "part.safetensors")


def test_a_mirror_fetches_the_published_version(store: WeightStore, tmp_path: Path):
    mirror = Mirror(tmp_path / "m")
    mirror.fetch(store, stamp(2), timeout_s=5)
    assert all(np.array_equal(held(mirror)[name], NEW[name]) for name in NEW)


@pytest.mark.parametrize(
    "record", [b"", b"{", b"[]", b"{}", b'{"stamp": 7}', b"\xff\xfe", b"[" * 100_000]
)
def test_a_mirror_with_a_damaged_record_is_fetched_again(
    store: WeightStore, tmp_path: Path, record: bytes
):
    mirror = Mirror(tmp_path / "m")
    mirror.fetch(store, stamp(1), timeout_s=5)
    (mirror.folder / "held.json").write_bytes(record)
    assert mirror.held() is None
    mirror.fetch(store, stamp(2), timeout_s=5)
    assert mirror.held() == stamp(2) and np.array_equal(held(mirror)["a"], NEW["a"])


def test_a_mirror_of_another_boot_of_the_machine_is_fetched_again(
    store: WeightStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    mirror = Mirror(tmp_path / "m")
    mirror.fetch(store, stamp(2), timeout_s=5)
    monkeypatch.setattr("rlpipe.sync.transports.mirror.BOOT", tmp_path / "boot")
    (tmp_path / "boot").write_text("another\n")
    assert mirror.held() is None
    (mirror.weights / "part.safetensors").write_bytes(b"lost in a power cut")
    mirror.fetch(store, stamp(2), timeout_s=5)
    assert mirror.held() == stamp(2) and np.array_equal(held(mirror)["a"], NEW["a"])


def file_of(folder: Path, header: Any, room: int = 64) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(room))
    return path


ENTRY = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    "header",
    [
        [],
        7,
        {"t": []},
        {"t": None},
        {"t": {"dtype": "F32"}},
        *(
            {"t": {**ENTRY, "data_offsets": offsets}}
            for offsets in ([0], [0, "16"], [16, 0], [-16, 0], [0, 999], [0, 14], 3)
        ),
        *(
            {"t": {**ENTRY, "shape": shape}}
            for shape in (None, ["2"], [0, 4], [-2, -2], [2**70], [1, 1])
        ),
        b"[" * 100_000,
    ],
)
def test_the_error_of_a_damaged_header_names_the_file(tmp_path: Path, header: Any):
    path = file_of(tmp_path, header)
    with pytest.raises(SyncError, match="a file of weights cannot be read") as caught:
        list(tensor_positions(path))
    assert (
        caught.value.where == str(path)
        and caught.value.expected is not None
        and caught.value.do is not None
    )


@given(st.binary(max_size=64), st.integers(0, 100))
def test_a_file_of_any_bytes_is_read_or_refused_with_its_name(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, place: int
):
    path = tmp_path_factory.mktemp("any") / "x.safetensors"
    good = safetensors.numpy.save(OLD)
    path.write_bytes(good[:place] + data + good[place + len(data) :])
    try:
        found = list(tensor_positions(path))
    except SyncError:
        return
    assert all(
        0 <= one.start <= one.start + one.size_bytes <= path.stat().st_size for _, one in found
    )


def test_the_error_of_a_missing_file_names_it(tmp_path: Path):
    with pytest.raises(RlpipeError, match="does not exist"):
        list(tensor_positions(tmp_path / "gone.safetensors"))


@pytest.mark.parametrize(
    ("version", "changes", "problem"),
    [
        (2, {"checksums": {}}, "cannot be checked"),
        (2, {"checksum": "crc"}, "cannot be checked"),
        (2, {"encoding": "plus"}, "unknown encoding"),
        (2, {"base": "nonsense"}, "not the stamp of weights"),
        (2, {"stamp": stamp(7)}, "the record of another version"),
        (1, {"checksums": {"other": "0"}}, "the mirror does not have this tensor"),
    ],
)
def test_a_record_that_does_not_fit_its_files_is_refused(
    store: WeightStore, tmp_path: Path, version: int, changes: dict[str, Any], problem: str
):
    rewrite(store, version, **changes)
    with pytest.raises(SyncError, match=problem):
        Mirror(tmp_path / "m").fetch(store, stamp(2), timeout_s=5)


def test_changes_of_another_dtype_than_uint8_are_refused(store: WeightStore, tmp_path: Path):
    path = store.path(stamp(2)) / "part.safetensors"
    safetensors.numpy.save_file({"a": np.ones(3, np.float32)}, path)
    rewrite(
        store,
        2,
        files=[
            {"name": path.name, "size_bytes": path.stat().st_size, "sha256": None, "tensors": ["a"]}
        ],
    )
    with pytest.raises(SyncError, match=r"(?s)a file of changes cannot be read.*float32"):
        Mirror(tmp_path / "m").fetch(store, stamp(2), timeout_s=5)


def test_the_error_of_a_wrong_change_names_the_tensor(store: WeightStore, tmp_path: Path):
    path = store.path(stamp(2)) / "part.safetensors"
    safetensors.numpy.save_file({"a": np.frombuffer(zstandard.compress(b"\x01"), np.uint8)}, path)
    rewrite(
        store,
        2,
        files=[
            {"name": path.name, "size_bytes": path.stat().st_size, "sha256": None, "tensors": ["a"]}
        ],
    )
    with pytest.raises(SyncError, match=rf"a of {stamp(2)}: a change of a tensor is incomplete"):
        Mirror(tmp_path / "m").fetch(store, stamp(2), timeout_s=5)


def test_a_change_that_claims_a_huge_size_is_refused():
    frame = bytearray(zstandard.ZstdCompressor().compress(b"x" * 300))
    frame[5:7] = b"\xff\xff"
    huge = (
        zstandard.MAGIC_NUMBER.to_bytes(4, "little")
        + bytes([0b11100000])
        + (2**62).to_bytes(8, "little")
        + bytes(frame[7:])
    )
    with pytest.raises(SyncError, match="a change of a tensor cannot be read"):
        apply_change(np.frombuffer(huge, np.uint8), np.zeros(16, np.uint8), 4, "xor")
