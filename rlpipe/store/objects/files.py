"""`Files`: named byte strings that are written once and never changed, on local disk or S3.

The first writer of a name wins. A second one with the same bytes is told so and goes on (it may be
the first one, whose reply was lost); one with other bytes gets ObjectConflict. Nothing is ever
overwritten, and nobody sees half an object.

Not here: what the objects mean, caching, or any other protocol: exclusive creation is a promise of
each store that has to be tested against it, so a third one is refused until it is.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from rlpipe.config.store_root import EXPECTED, canonical_root
from rlpipe.errors import ObjectConflict, ObjectCorrupt, ObjectMissing, StoreError
from rlpipe.store.objects.local import (
    TEMPORARY,
    Entry,
    ListedName,
    LocalBackend,
    named_failures,
    temporary_name,
)
from rlpipe.types import FileRecord

ATTEMPTS = 3


class Backend(Protocol):
    """What a store must promise. `create` and `create_from` answer False when the name is taken,
    and never overwrite."""

    def url(self, path: str) -> str: ...
    def create(self, path: str, data: bytes) -> bool: ...
    def create_from(self, path: str, local: str) -> bool: ...
    def read(self, path: str) -> bytes: ...
    def sha256(self, path: str) -> str: ...
    def download(self, path: str, local: str) -> None: ...
    def stat(self, path: str) -> Entry | None: ...
    def entries(self, folder: str) -> Iterator[Entry]: ...
    def survey(self, folder: str) -> Iterator[ListedName]: ...
    def delete(self, path: str) -> None: ...


class Files:
    """Objects under a root: a directory (`/data/store`, `file:///data/store`) or
    `s3://bucket/prefix`.

    Paths are relative to the root, with "/" between names. Thread-safe; pickles as its root and
    opens anew in every process, also after a fork. Raises: StoreError for a root or path that
    cannot be one.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = _canonical_root(os.fspath(root))
        self._opened: tuple[int, Backend] | None = None

    def __reduce__(self) -> tuple[type[Files], tuple[str]]:
        return Files, (self.root,)

    def __repr__(self) -> str:
        return f"Files({self.root!r})"

    def url(self, path: str = "") -> str:
        """The full URL of an object, or of the root."""
        return self._backend.url(_checked(path) if path else "")

    def create(self, path: str, data: bytes) -> bool:
        """Write an object. True: we wrote it. False: it is there already, with these very bytes:
        somebody's, or ours from an attempt whose answer was lost.

        Raises: ObjectConflict if it is there with other bytes; StoreFull; StoreError.
        """
        checked = _checked(path)
        return self._first(
            path,
            lambda: self._backend.create(checked, data),
            lambda: hashlib.sha256(data).hexdigest(),
        )

    def put_file(self, local: str | os.PathLike[str], path: str) -> FileRecord:
        """Write a large object from a local file; returns its record with sha256. Raises: as
        `create`.

        The file may be deleted afterwards, but not written to: on the store's own file system it
        becomes the object.
        """
        checked, (size_bytes, sha256) = _checked(path), _measure(os.fspath(local))
        self._first(
            path, lambda: self._backend.create_from(checked, os.fspath(local)), lambda: sha256
        )
        return FileRecord(path=path, size_bytes=size_bytes, sha256=sha256)

    def read(self, path: str, sha256: str | None = None) -> bytes:
        """The bytes of an object. Raises: ObjectMissing; ObjectCorrupt if they do not have the
        given sha256."""
        data = self._backend.read(_checked(path))
        self._verify(path, hashlib.sha256(data).hexdigest() if sha256 else None, sha256)
        return data

    def get_file(
        self, path: str, local: str | os.PathLike[str], sha256: str | None = None
    ) -> FileRecord:
        """Fetch a large object to a local file, which appears complete or not at all; returns its
        record.

        Raises: ObjectMissing; ObjectCorrupt if the bytes do not have the given sha256; StoreFull.
        """
        temporary = Path(temporary_name(os.fspath(local)))
        with named_failures(os.fspath(local)):
            temporary.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._backend.download(_checked(path), str(temporary))
            size_bytes, found = _measure(str(temporary))
            self._verify(path, found, sha256)
            with named_failures(os.fspath(local)):
                temporary.replace(local)
        finally:
            temporary.unlink(missing_ok=True)
        return FileRecord(path=path, size_bytes=size_bytes, sha256=found)

    def exists(self, path: str) -> bool:
        """Is there such an object?"""
        return self._backend.stat(_checked(path)) is not None

    def size(self, path: str) -> int:
        """Bytes of an object. Raises: ObjectMissing."""
        if entry := self._backend.stat(_checked(path)):
            return entry.size_bytes
        raise ObjectMissing("there is no such object", where=self.url(path))

    def sha256(self, path: str) -> str:
        """sha256 of an object, in hex, read in chunks. Raises: ObjectMissing."""
        return self._backend.sha256(_checked(path))

    def list(self, prefix: str = "") -> list[str]:
        """Names of all objects below the folder `prefix`, relative to the root, sorted. An absent
        folder is empty."""
        return sorted(entry.path for entry in self.entries(prefix))

    def entries(self, prefix: str = "", *, temporary: bool = False) -> Iterator[Entry]:
        """Name, size and age of all objects below a folder, unordered; or of what killed writers
        left (`temporary`)."""
        folder = prefix.rstrip("/")
        found = self._backend.entries(_checked(folder) if folder else "")
        return (entry for entry in found if bool(TEMPORARY.search(entry.path)) == temporary)

    def survey(self, prefix: str = "") -> Iterator[ListedName]:
        """Every name below a folder, whatever it names: also links, devices and unfinished files.
        For the audit.

        Raises: StoreError only if the store does not answer.
        """
        return self._backend.survey(_checked(prefix) if prefix else "")

    def check_reachable(self) -> None:
        """Return if the store answers at all. Raises: StoreError."""
        self._backend.stat("branches")

    def delete(self, path: str) -> None:
        """Remove an object; no error if there is none."""
        self._backend.delete(_safe(path))

    @property
    def _backend(self) -> Backend:
        opened = self._opened
        if opened is None or opened[0] != os.getpid():
            opened = self._opened = (os.getpid(), _open(self.root))
        return opened[1]

    def _first(self, path: str, put: Callable[[], bool], sha256: Callable[[], str]) -> bool:
        """Were we the first to write? A name that was taken and is free again (its object was
        removed, or an upload in parts was aborted) is written after all."""
        for _ in range(ATTEMPTS):
            if put():
                return True
            with suppress(ObjectMissing):
                if (found := self._backend.sha256(path)) == (expected := sha256()):
                    return False
                raise ObjectConflict(
                    "another writer was first, with other content",
                    where=self.url(path),
                    found=f"sha256 {found}",
                    expected=f"sha256 {expected}",
                    do="read the object and go on from it, or write under another name",
                )
        raise StoreError(
            "a name is taken, and nothing is there",
            where=self.url(path),
            found=f"{ATTEMPTS} times",
            do="try again",
        )

    def _verify(self, path: str, found: str | None, sha256: str | None) -> None:
        if sha256 and found != sha256:
            raise ObjectCorrupt(
                "these are not the bytes that were written",
                where=self.url(path),
                found=f"sha256 {found}",
                expected=f"sha256 {sha256}",
                do="restore the object from a copy, or delete it and run its stage again",
            )


def _open(root: str) -> Backend:
    if root.startswith("s3://"):
        from rlpipe.store.objects.s3 import (
            S3Backend,
        )  # half a second of imports that a local store does not need

        return S3Backend(root.removeprefix("s3://"))
    return LocalBackend(root.removeprefix("file://"))


def _canonical_root(root: str) -> str:
    try:
        return canonical_root(root)
    except ValueError as error:
        raise StoreError(
            "not a root the store can live under", where="store.root", found=root, expected=EXPECTED
        ) from error


def is_safe(path: str) -> bool:
    """True if a path can only name something inside the root, and can be printed."""
    return (
        path.isprintable()
        and "\\" not in path
        and not any(name in ("", ".", "..") for name in path.split("/"))
    )


def _safe(path: str) -> str:
    """`path` itself, if it can only name something inside the root."""
    if not is_safe(path):
        raise StoreError(
            "not a path inside the store", where=repr(path), expected="names with '/' between them"
        )
    return path


def _checked(path: str) -> str:
    """`path` itself, if it can be the name of an object."""
    if TEMPORARY.search(path):
        raise StoreError("this name is kept for unfinished files", where=repr(path))
    return _safe(path)


def _measure(local: str) -> tuple[int, str]:
    """Size in bytes and sha256 of a local file. Raises: ObjectMissing, StoreError."""
    with named_failures(local), Path(local).open("rb") as file:
        return os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()
