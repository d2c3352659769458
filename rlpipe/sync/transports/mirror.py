"""`Mirror`: weights of one version on an engine's machine, brought there from a `WeightStore`.

    FOLDER/weights/*.safetensors        what engines load
           held.json                    which version that is; absent while it is none
           .lock                        one process at a time: several engines of a machine share a mirror

It takes the changes that lead from what it holds to what is wanted, in order, each in place and
checked; if there is no such way, or the result is not what the trainer has, it starts over from the
full version.

Not here: when an engine loads it, and that none does meanwhile (the fleet pushes once at a time).
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
from rlpipe.sync.transports.delta import CHECKSUMS, ELEMENT_SIZES, ENCODINGS, Bytes, apply
from rlpipe.sync.transports.versions import Version, WeightFile, WeightStore

WORKERS = min(8, os.cpu_count() or 1)
LOOK_INTERVAL_S = 0.05
SUFFIX = ".safetensors"
ANEW = "the next push of all weights writes and fetches them anew"


class Place(NamedTuple):
    """Where a tensor's bytes lie in a safetensors file."""

    file: Path
    start: int
    size_bytes: int
    element_size: int


class Mirror:
    """A folder of this machine. Any process may make one for it."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.weights = self.folder / "weights"
        self._record = self.folder / "held.json"

    def held(self) -> str | None:
        """Stamp of what it holds; None if nobody can say, as after a power cut: it is brought anew
        then. Raises: StoreError."""
        with named_failures(str(self._record)), suppress(ValueError, RecursionError):
            said = json.loads(self._record.read_bytes()) if self._record.is_file() else None
            if isinstance(said, dict) and isinstance(said.get("stamp"), str):
                return said["stamp"]
        return None

    def bring(self, store: WeightStore, stamp: str, *, timeout_s: float) -> Path:
        """Hold this version; the folder that an engine can load. `timeout_s`: how long to wait for
        other processes.

        Raises: SyncError if the store's files do not give these weights; ObjectCorrupt, StoreFull,
        DeadlineExceeded.
        """
        with named_failures(str(self.folder)):
            self.folder.mkdir(parents=True, exist_ok=True)
        with self._alone(timeout_s):
            if self.held() == stamp:
                return self.weights
            chain = store.chain(stamp, after=self.held())
            if chain[0].base is not None:
                try:
                    return self._apply(store, chain)
                except SyncError:  # what lies here is not what it should be
                    self._record.unlink(missing_ok=True)
                chain = store.chain(stamp)
            self._start_over(store, chain[0])
            return self._apply(store, chain[1:])

    def apply(self, store: WeightStore, version: Version) -> None:
        """Put one version's changes on top of what is held. Raises: SyncError if that is not their
        base; as `bring`."""
        if version.base is None or self.held() != version.base:
            raise SyncError(
                "changes of other weights than are held",
                where=str(self.folder),
                found=self.held(),
                expected=version.base or "changes, not all weights",
            )
        incoming = self.folder / "incoming"
        shutil.rmtree(incoming, ignore_errors=True)
        local = self._fetched(store, version, incoming)
        # from the first changed byte on, until all are right, it holds nothing
        self._record.unlink()
        self._patch(version, local)
        self._hold(version.stamp)
        shutil.rmtree(incoming, ignore_errors=True)

    def _apply(self, store: WeightStore, versions: Sequence[Version]) -> Path:
        for version in versions:
            self.apply(store, version)
        return self.weights

    def _start_over(self, store: WeightStore, version: Version) -> None:
        self._record.unlink(missing_ok=True)
        shutil.rmtree(self.weights, ignore_errors=True)
        self._fetched(store, version, self.weights)
        if version.checksum:
            memory = _Memory(self.weights)
            _each(
                memory.require(version.checksums),
                lambda name: _check(version, name, memory.of(name)),
            )
        self._hold(version.stamp)

    def _fetched(self, store: WeightStore, version: Version, folder: Path) -> list[Path]:
        with named_failures(str(folder)):
            folder.mkdir(parents=True, exist_ok=True)

        def fetch(file: WeightFile) -> Path:
            store.fetch(version, file, folder / file.name)
            return folder / file.name

        return _each([file for file in version.files if file.tensors], fetch)

    def _patch(self, version: Version, files: Sequence[Path]) -> None:
        memory = _Memory(self.weights)
        encoding = version.encoding
        if encoding not in ENCODINGS:
            raise SyncError(
                "changes in an unknown form",
                where=version.stamp,
                found=encoding,
                expected=f"one of {ENCODINGS}",
                do=ANEW,
            )
        for file in files:
            changes = _changes(file)

            def patch(name: str, changes: dict[str, Bytes] = changes) -> None:
                try:
                    apply(
                        changes[name], memory.of(name), memory.places[name].element_size, encoding
                    )
                except SyncError as error:
                    error.where = error.where or f"{name} of {version.stamp}"
                    raise
                _check(version, name, memory.of(name))

            _each(memory.require(changes), patch)
        memory.flush()

    def _hold(self, stamp: str) -> None:
        written = self._record.with_suffix(".new")
        with named_failures(str(self._record)):
            written.write_text(json.dumps({"stamp": stamp}))
            written.replace(self._record)

    @contextmanager
    def _alone(self, timeout_s: float) -> Iterator[None]:
        end_s = time.monotonic() + timeout_s
        with (self.folder / ".lock").open("w") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if time.monotonic() > end_s:
                        raise DeadlineExceeded(
                            "another engine of this machine does not finish bringing weights",
                            where=lock.name,
                            expected=f"done within {timeout_s:g} s",
                        ) from error
                time.sleep(LOOK_INTERVAL_S)
            yield


class _Memory:
    """The tensors of a folder's safetensors files, mapped for writing."""

    def __init__(self, folder: Path) -> None:
        files = sorted(folder.glob(f"*{SUFFIX}"))
        self.places = {name: place for file in files for name, place in places(file)}
        with named_failures(str(folder)):
            self._maps = {file: np.memmap(file, np.uint8, "r+") for file in files}

    def of(self, name: str) -> Bytes:
        place = self.places[name]
        return self._maps[place.file][place.start : place.start + place.size_bytes]

    def require(self, names: Mapping[str, Any]) -> list[str]:
        """These names. Raises: SyncError if one is of no tensor."""
        if unknown := sorted(names.keys() - self.places.keys()):
            raise SyncError(
                "a tensor that is not here",
                where=unknown[0],
                found=f"{len(self.places)} others in the mirror",
                expected="the tensors of the full version",
                do=ANEW,
            )
        return list(names)

    def flush(self) -> None:
        for mapped in self._maps.values():
            mapped.flush()


def places(file: Path) -> Iterator[tuple[str, Place]]:
    """Where each tensor of a safetensors file lies: 8 bytes size of a JSON header, the header, the
    bytes.

    Raises: SyncError if the header is none, or an entry of it is of no bytes that are there;
    ObjectMissing, StoreError.
    """
    with named_failures(str(file)), file.open("rb") as stream:
        room = os.fstat(stream.fileno()).st_size
        size = int.from_bytes(stream.read(8), "little")
        text = stream.read(min(size, room))
    try:
        header: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _unreadable(file, error) from error
    if not isinstance(header, dict):
        raise _unreadable(file, f"a header that is a {type(header).__name__}")
    header.pop("__metadata__", None)
    for name, entry in header.items():
        try:
            start, end = entry["data_offsets"]
            elements = math.prod(entry["shape"])
            fits = 0 <= start <= end <= room - 8 - size and min(entry["shape"], default=0) >= 0
            element_size = (end - start) // elements if elements else 1
            fits = fits and elements * element_size == end - start and element_size in ELEMENT_SIZES
        except (KeyError, TypeError, ValueError) as error:
            raise _unreadable(file, f"tensor {name}: {error!r}") from error
        if not fits:
            raise _unreadable(file, f"tensor {name}: {entry} in {room - 8 - size} bytes")
        yield name, Place(file, 8 + size + start, end - start, element_size)


def _unreadable(file: Path, found: object) -> SyncError:
    expected = "a safetensors file: a JSON header with shape and data_offsets of every tensor, then their bytes"
    return SyncError(
        "a file of weights cannot be read", where=str(file), found=found, expected=expected, do=ANEW
    )


def _changes(file: Path) -> dict[str, Bytes]:
    try:
        found = safetensors.numpy.load_file(file)
    except (
        safetensors.SafetensorError,
        KeyError,
        ValueError,
        OSError,
    ) as error:  # a dtype that NumPy has not is a KeyError
        raise SyncError(
            "a file of changes cannot be read", where=str(file), found=error, do=ANEW
        ) from error
    if other := next((name for name, change in found.items() if change.dtype != np.uint8), None):
        raise SyncError(
            "a file of changes cannot be read",
            where=str(file),
            found=f"{other}: {found[other].dtype}",
            expected="uint8",
        )
    return found


def _check(version: Version, name: str, data: Bytes) -> None:
    checksum = CHECKSUMS.get(version.checksum)
    expected = version.checksums.get(name)
    if checksum is None or expected is None:
        raise SyncError(
            "a version whose changes cannot be checked",
            where=f"{name} of {version.stamp}",
            found=f"checksum {version.checksum!r}: {expected}",
            expected=f"one of {', '.join(CHECKSUMS)}, of every tensor in its files",
            do=ANEW,
        )
    if (found := checksum(data)) != expected:
        raise SyncError(
            "a tensor is not what the trainer has",
            where=f"{name} of {version.stamp}",
            found=found,
            expected=expected,
            do=ANEW,
        )


def _each(items: Any, work: Callable[[Any], Any]) -> list[Any]:
    with ThreadPoolExecutor(WORKERS) as pool:
        return list(pool.map(work, items))
