"""`Mirror`: a copy of one weight version on an engine's machine, fetched from a `WeightStore`.

    FOLDER/weights/*.safetensors        files that engines load
           held.json                    version of the files, and the boot of the machine in
                                        which they were written; absent while they are changed
           .lock                        one process at a time: engines of a machine share a mirror

`Mirror.fetch` applies the changes from the held version to the wanted one, in order, in place, and
checks every changed tensor. If the chain is broken or a check fails, it starts from the full
version. The caller makes sure that no engine loads the files meanwhile.

Files are not synced to the disk, because that takes longer than the rest of a push and engines
read them from memory. So they count as absent after another boot of the machine.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
import safetensors.numpy

from rlpipe.errors import DeadlineExceeded, SyncError
from rlpipe.store.objects.local import named_failures
from rlpipe.sync.transports.delta import CHECKSUMS, ELEMENT_SIZES, ENCODINGS, Bytes, apply_change
from rlpipe.sync.transports.disk import WORKERS
from rlpipe.sync.transports.versions import Version, WeightFile, WeightStore

LOCK_INTERVAL_S = 0.05
BOOT = Path("/proc/sys/kernel/random/boot_id")
REFETCH = "push again: the next push writes and fetches all weights"


class TensorPosition(NamedTuple):
    """Position of a tensor's bytes in a safetensors file."""

    file: Path
    start: int
    size_bytes: int
    element_size: int


class Mirror:
    """A folder on this machine. Several processes may construct one for it."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.weights = self.folder / "weights"
        self._record = self.folder / "held.json"

    def held(self) -> str | None:
        """Return the stamp of the held version; None if it is unknown. Raises: StoreError."""
        # After a power cut the record can hold any bytes. The weights are then fetched again.
        with named_failures(str(self._record)), suppress(ValueError, RecursionError):
            record = json.loads(self._record.read_bytes()) if self._record.is_file() else None
            if not isinstance(record, dict) or record.get("boot") != _boot():
                return None
            if isinstance(record.get("stamp"), str):
                return record["stamp"]
        return None

    def fetch(self, store: WeightStore, stamp: str, *, timeout_s: float) -> Path:
        """Fetch a version, and return the folder that an engine can load.

        `timeout_s`: time to wait for other processes.
        Raises: SyncError if the store's files do not give these weights; ObjectCorrupt, StoreFull,
        DeadlineExceeded.
        """
        with named_failures(str(self.folder)):
            self.folder.mkdir(parents=True, exist_ok=True)
        with self._locked(timeout_s):
            if self.held() == stamp:
                return self.weights
            chain = store.chain(stamp, after=self.held())
            if chain[0].base is not None:
                try:
                    return self._apply_all(store, chain)
                except SyncError:  # the mirror's files are damaged
                    self._record.unlink(missing_ok=True)
                chain = store.chain(stamp)
            self._fetch_full(store, chain[0])
            return self._apply_all(store, chain[1:])

    def apply(self, store: WeightStore, version: Version) -> None:
        """Apply one version's changes. Raises: SyncError if the mirror does not hold their base."""
        if version.base is None or self.held() != version.base:
            raise SyncError(
                "changes of other weights than are held",
                where=str(self.folder),
                found=self.held(),
                expected=version.base or "changes, not all weights",
            )
        incoming = self.folder / "incoming"
        shutil.rmtree(incoming, ignore_errors=True)
        files = self._fetch_files(store, version, incoming)
        # From the first changed byte to the last check the mirror holds no version.
        self._record.unlink()
        self._patch(version, files)
        self._write_record(version.stamp)
        shutil.rmtree(incoming, ignore_errors=True)

    def _apply_all(self, store: WeightStore, versions: Sequence[Version]) -> Path:
        for version in versions:
            self.apply(store, version)
        return self.weights

    def _fetch_full(self, store: WeightStore, version: Version) -> None:
        self._record.unlink(missing_ok=True)
        shutil.rmtree(self.weights, ignore_errors=True)
        self._fetch_files(store, version, self.weights)
        if version.checksum:
            tensors = _MappedTensors(self.weights)
            _in_threads(
                tensors.require(version.checksums),
                lambda name: _check(version, name, tensors.bytes_of(name)),
            )
        self._write_record(version.stamp)

    def _fetch_files(self, store: WeightStore, version: Version, folder: Path) -> list[Path]:
        with named_failures(str(folder)):
            folder.mkdir(parents=True, exist_ok=True)

        def fetch(file: WeightFile) -> Path:
            store.fetch(version, file, folder / file.name)
            return folder / file.name

        return _in_threads([file for file in version.files if file.tensors], fetch)

    def _patch(self, version: Version, files: Sequence[Path]) -> None:
        tensors = _MappedTensors(self.weights)
        encoding = version.encoding
        if encoding not in ENCODINGS:
            raise SyncError(
                "changes in an unknown encoding",
                where=version.stamp,
                found=encoding,
                expected=f"one of {ENCODINGS}",
                do=REFETCH,
            )
        for file in files:
            changes = _read_changes(file)

            def patch(name: str, changes: dict[str, Bytes] = changes) -> None:
                data = tensors.bytes_of(name)
                element_size = tensors.positions[name].element_size
                try:
                    apply_change(changes[name], data, element_size, encoding)
                except SyncError as error:
                    error.where = error.where or f"{name} of {version.stamp}"
                    raise
                _check(version, name, data)

            _in_threads(tensors.require(changes), patch)

    def _write_record(self, stamp: str) -> None:
        # Renamed into place: a crash leaves the old record or the new one, never half of one.
        temporary = self._record.with_suffix(".new")
        with named_failures(str(self._record)):
            temporary.write_text(json.dumps({"stamp": stamp, "boot": _boot()}))
            temporary.replace(self._record)

    @contextmanager
    def _locked(self, timeout_s: float) -> Iterator[None]:
        end_s = time.monotonic() + timeout_s
        with (self.folder / ".lock").open("w") as lock:
            while True:
                # A blocking lock has no timeout.
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if time.monotonic() > end_s:
                        raise DeadlineExceeded(
                            "another engine of this machine has not finished fetching weights",
                            where=lock.name,
                            expected=f"done within {timeout_s:g} s",
                        ) from error
                time.sleep(LOCK_INTERVAL_S)
            yield


class _MappedTensors:
    """Tensors of a folder's safetensors files, mapped for writing."""

    def __init__(self, folder: Path) -> None:
        files = sorted(folder.glob("*.safetensors"))
        self.positions = {
            name: position for file in files for name, position in tensor_positions(file)
        }
        with named_failures(str(folder)):
            self._maps = {file: np.memmap(file, np.uint8, "r+") for file in files}

    def bytes_of(self, name: str) -> Bytes:
        position = self.positions[name]
        return self._maps[position.file][position.start : position.start + position.size_bytes]

    def require(self, names: Mapping[str, Any]) -> list[str]:
        """Return the names. Raises: SyncError if one of them has no tensor."""
        if unknown := sorted(names.keys() - self.positions.keys()):
            raise SyncError(
                "the mirror does not have this tensor",
                where=unknown[0],
                found=f"{len(self.positions)} other tensors",
                expected="the tensors of the full version",
                do=REFETCH,
            )
        return list(names)


def _boot() -> str:
    """Return the id of this boot of the machine; "" if the system has none."""
    return BOOT.read_text().strip() if BOOT.exists() else ""


def tensor_positions(file: Path) -> Iterator[tuple[str, TensorPosition]]:
    """Yield name and position of each tensor of a safetensors file.

    The file is 8 bytes size of a JSON header, the header, then the tensors' bytes.
    Raises: SyncError if the header is damaged or points outside the file; ObjectMissing,
    StoreError.
    """
    with named_failures(str(file)), file.open("rb") as stream:
        file_bytes = os.fstat(stream.fileno()).st_size
        header_bytes = int.from_bytes(stream.read(8), "little")
        text = stream.read(min(header_bytes, file_bytes))
    try:
        header: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _unreadable(file, error) from error
    if not isinstance(header, dict):
        raise _unreadable(file, f"a header of type {type(header).__name__}")
    header.pop("__metadata__", None)
    data_bytes = file_bytes - 8 - header_bytes
    for name, entry in header.items():
        try:
            start, end = entry["data_offsets"]
            elements = math.prod(entry["shape"])
            fits = 0 <= start <= end <= data_bytes and min(entry["shape"], default=0) >= 0
            element_size = (end - start) // elements if elements else 1
            fits = fits and elements * element_size == end - start and element_size in ELEMENT_SIZES
        except (KeyError, TypeError, ValueError) as error:
            raise _unreadable(file, f"tensor {name}: {error!r}") from error
        if not fits:
            raise _unreadable(file, f"tensor {name}: {entry} in {data_bytes} bytes")
        yield name, TensorPosition(file, 8 + header_bytes + start, end - start, element_size)


def _unreadable(file: Path, found: object) -> SyncError:
    return SyncError(
        "a file of weights cannot be read",
        where=str(file),
        found=found,
        expected="safetensors: a JSON header with shape and data_offsets, then the tensors' bytes",
        do=REFETCH,
    )


def _read_changes(file: Path) -> dict[str, Bytes]:
    try:
        changes = safetensors.numpy.load_file(file)
    # A dtype that NumPy does not have is a KeyError.
    except (safetensors.SafetensorError, KeyError, ValueError, OSError) as error:
        raise SyncError(
            "a file of changes cannot be read", where=str(file), found=error, do=REFETCH
        ) from error
    for name, change in changes.items():
        if change.dtype != np.uint8:
            raise SyncError(
                "a file of changes cannot be read",
                where=str(file),
                found=f"{name}: {change.dtype}",
                expected="uint8",
            )
    return changes


def _check(version: Version, name: str, data: Bytes) -> None:
    algorithm = CHECKSUMS.get(version.checksum)
    expected = version.checksums.get(name)
    if algorithm is None or expected is None:
        raise SyncError(
            "the changes of a version cannot be checked",
            where=f"{name} of {version.stamp}",
            found=f"checksum {version.checksum!r}: {expected}",
            expected=f"one of {', '.join(CHECKSUMS)}, of every tensor in its files",
            do=REFETCH,
        )
    checksum = algorithm(data)
    if checksum != expected:
        raise SyncError(
            "a tensor differs from the trainer's",
            where=f"{name} of {version.stamp}",
            found=checksum,
            expected=expected,
            do=REFETCH,
        )


def _in_threads(items: Any, work: Callable[[Any], Any]) -> list[Any]:
    with ThreadPoolExecutor(WORKERS) as pool:
        return list(pool.map(work, items))
