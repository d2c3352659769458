"""`Files`: named byte strings on local disk or in S3, written once and never changed.

The first writer of a name wins. A second writer with the same bytes succeeds too: it may be the
first one, after its reply was lost. A second writer with other bytes gets ObjectConflict. No object
is ever overwritten, and no reader sees half an object.

Only these two kinds of store are accepted. Exclusive creation has to be tested against each kind of
store, and no other one is tested.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from rlpipe.config.store_root import canonical_root
from rlpipe.errors import ConfigError, ObjectConflict, ObjectCorrupt, ObjectMissing, StoreError
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
    """Operations of one kind of store.

    `create` and `create_from` return False if the name is taken, and never overwrite.
    """

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

    Paths are relative to the root, with "/" between names. Thread-safe. Pickles as its root, and
    opens the store again in every process, also after a fork. Raises: StoreError for an invalid
    root or path.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = _canonical_root(os.fspath(root))
        self._opened: tuple[int, Backend] | None = None

    def __reduce__(self) -> tuple[type[Files], tuple[str]]:
        return Files, (self.root,)

    def __repr__(self) -> str:
        return f"Files({self.root!r})"

    def url(self, path: str = "") -> str:
        """Return the full URL of an object, or of the root."""
        return self._backend.url(_object_path(path) if path else "")

    def create(self, path: str, data: bytes) -> bool:
        """Write an object.

        Returns True if this call wrote it, and False if it exists with the same bytes: from another
        writer, or from an earlier attempt after a lost reply. Raises: ObjectConflict if it exists
        with other bytes; StoreFull; StoreError.
        """
        checked = _object_path(path)
        return self._create_once(
            path,
            lambda: self._backend.create(checked, data),
            lambda: hashlib.sha256(data).hexdigest(),
        )

    def put_file(self, local: str | os.PathLike[str], path: str) -> FileRecord:
        """Write a large object from a local file, and return its record with sha256.

        The caller may delete the file afterwards, but must not write to it: on the store's file
        system the file itself becomes the object. Raises: as `create`.
        """
        checked = _object_path(path)
        size_bytes, sha256 = _measure(os.fspath(local))
        self._create_once(
            path, lambda: self._backend.create_from(checked, os.fspath(local)), lambda: sha256
        )
        return FileRecord(path=path, size_bytes=size_bytes, sha256=sha256)

    def read(self, path: str, sha256: str | None = None) -> bytes:
        """Return the bytes of an object. `sha256`: the expected digest.

        Raises: ObjectMissing; ObjectCorrupt if the bytes have another digest.
        """
        data = self._backend.read(_object_path(path))
        self._verify(path, hashlib.sha256(data).hexdigest() if sha256 else None, sha256)
        return data

    def get_file(
        self, path: str, local: str | os.PathLike[str], sha256: str | None = None
    ) -> FileRecord:
        """Download a large object to a local file, and return its record.

        The file appears complete or not at all. `sha256`: the expected digest. Raises:
        ObjectMissing; ObjectCorrupt if the bytes have another digest; StoreFull.
        """
        # Download next to the target, so that the rename stays on one file system.
        temporary = Path(temporary_name(os.fspath(local)))
        with named_failures(os.fspath(local)):
            temporary.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._backend.download(_object_path(path), str(temporary))
            size_bytes, found = _measure(str(temporary))
            self._verify(path, found, sha256)
            with named_failures(os.fspath(local)):
                temporary.replace(local)
        finally:
            temporary.unlink(missing_ok=True)
        return FileRecord(path=path, size_bytes=size_bytes, sha256=found)

    def exists(self, path: str) -> bool:
        """True if the object exists."""
        return self._backend.stat(_object_path(path)) is not None

    def size(self, path: str) -> int:
        """Return the size of an object in bytes. Raises: ObjectMissing."""
        if entry := self._backend.stat(_object_path(path)):
            return entry.size_bytes
        raise ObjectMissing("the object does not exist", where=self.url(path))

    def sha256(self, path: str) -> str:
        """Return the sha256 of an object in hex, read in chunks. Raises: ObjectMissing."""
        return self._backend.sha256(_object_path(path))

    def list(self, prefix: str = "") -> list[str]:
        """Return the paths of all objects below a folder, sorted. A missing folder is empty."""
        return sorted(entry.path for entry in self.entries(prefix))

    def entries(self, prefix: str = "", *, temporary: bool = False) -> Iterator[Entry]:
        """Yield path, size and age of all objects below a folder, unordered.

        `temporary`: yield the unfinished files of killed writers instead.
        """
        folder = prefix.rstrip("/")
        entries = self._backend.entries(_object_path(folder) if folder else "")
        return (entry for entry in entries if bool(TEMPORARY.search(entry.path)) == temporary)

    def survey(self, prefix: str = "") -> Iterator[ListedName]:
        """Yield every name below a folder, also links, devices and unfinished files.

        For the audit. Raises: StoreError only if the store does not answer.
        """
        return self._backend.survey(_object_path(prefix) if prefix else "")

    def check_reachable(self) -> None:
        """Check that the store answers. Raises: StoreError."""
        self._backend.stat("branches")

    def delete(self, path: str) -> None:
        """Delete an object. A missing object is no error."""
        # Garbage collection also deletes unfinished files, so temporary names are allowed here.
        self._backend.delete(_safe_path(path))

    @property
    def _backend(self) -> Backend:
        opened = self._opened
        # A backend is not fork-safe, so each process opens its own.
        if opened is None or opened[0] != os.getpid():
            opened = self._opened = (os.getpid(), _open(self.root))
        return opened[1]

    def _create_once(self, path: str, put: Callable[[], bool], sha256: Callable[[], str]) -> bool:
        """Return True if `put` wrote the object, and False if it exists with the same bytes."""
        # A taken name may be free again: its object was deleted, or a multipart upload was aborted.
        for _ in range(ATTEMPTS):
            if put():
                return True
            with suppress(ObjectMissing):
                if (found := self._backend.sha256(path)) == (expected := sha256()):
                    return False
                raise ObjectConflict(
                    "another writer created this object first, with other content",
                    where=self.url(path),
                    found=f"sha256 {found}",
                    expected=f"sha256 {expected}",
                    do="read the object and continue from it, or write under another name",
                )
        raise StoreError(
            "the name is taken, but the object does not exist",
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
        # Imported here: s3fs takes half a second, and a local store does not need it.
        from rlpipe.store.objects.s3 import S3Backend

        return S3Backend(root.removeprefix("s3://"))
    return LocalBackend(root.removeprefix("file://"))


def _canonical_root(root: str) -> str:
    try:
        return canonical_root(root)
    except ConfigError as error:
        raise StoreError(
            error.problem, where=error.where, found=error.found, expected=error.expected
        ) from error


def is_safe(path: str) -> bool:
    """True if a path stays inside the root and is printable."""
    # Keys of S3 and names from a damaged record may be anything, also "..", or control characters.
    return (
        path.isprintable()
        and "\\" not in path
        and not any(name in ("", ".", "..") for name in path.split("/"))
    )


def _safe_path(path: str) -> str:
    """Return the path. Raises: StoreError if it may leave the root."""
    if not is_safe(path):
        raise StoreError(
            "not a path inside the store", where=repr(path), expected="names with '/' between them"
        )
    return path


def _object_path(path: str) -> str:
    """Return the path. Raises: StoreError if no object may have it."""
    if TEMPORARY.search(path):
        raise StoreError("the name is reserved for unfinished files", where=repr(path))
    return _safe_path(path)


def _measure(local: str) -> tuple[int, str]:
    """Return size in bytes and sha256 of a local file. Raises: ObjectMissing, StoreError."""
    with named_failures(local), Path(local).open("rb") as file:
        return os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()
