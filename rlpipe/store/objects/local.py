"""Objects as files of a directory: complete or absent, written once, durable on return.

A file is written under a temporary name, synced, and then linked to its final name. `link` refuses
a taken name, and no reader sees half a file. `open(..., "x")` alone would be exclusive too, but
readers would see the file while it grows.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, NamedTuple
from uuid import uuid4

from rlpipe.errors import ObjectCorrupt, ObjectMissing, StoreError, StoreFull

TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{32}$")
CHUNK_BYTES = 32 * 1024**2
UNLINKABLE = {errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS}
"""Errors of `link` on a file system or for a user without hard links. The file is copied then."""
KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
"""Names in a directory that are not objects."""
DIRECTORY = "a directory"


class ListedName(NamedTuple):
    """One name in the store, of an object or of anything else."""

    path: str
    size_bytes: int
    modified_s: float
    kind: str | None = None
    """Description; None for an object."""
    identity: tuple[int, int] | None = None
    """Device and inode of a file with several names; None for a file with one name, and in S3."""


class Entry(NamedTuple):
    """One object."""

    path: str
    """Path relative to the root."""
    size_bytes: int
    modified_s: float
    """Time of the last write, in seconds since the epoch."""


@contextmanager
def named_failures(where: str) -> Iterator[None]:
    """Turn an OSError in the block into ObjectMissing, StoreFull or StoreError at `where`."""
    try:
        yield
    except FileNotFoundError as error:
        raise ObjectMissing("the object does not exist", where=where) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFull(
                "no space left",
                where=where,
                found=error.strerror,
                do="free disk space (`rlpipe gc` lists garbage) and repeat the command, "
                "or move store.root",
            ) from error
        raise StoreError(
            "file system operation failed", where=where, found=error.strerror or error
        ) from error


def temporary_name(path: str) -> str:
    """Return a name in the folder of `path` that listings leave out."""
    return f"{path}.tmp-{uuid4().hex}"


class LocalBackend:
    """Objects under one directory. Methods are atomic, also between processes."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)

    def url(self, path: str) -> str:
        return f"file://{self._directory / path}"

    def create(self, path: str, data: bytes) -> bool:
        """Write an object durably. False if the name is taken. Raises: StoreFull, StoreError."""
        return self._publish(path, lambda file: file.write(data))

    def create_from(self, path: str, local: str) -> bool:
        """Write an object from the file `local`. False if the name is taken.

        On the same file system the file itself becomes the object, so that a checkpoint takes disk
        space once. Nothing may write to the file afterwards.
        """

        def copy(file: BinaryIO) -> None:
            with Path(local).open("rb") as source:
                shutil.copyfileobj(source, file, CHUNK_BYTES)

        created = self._link(path, Path(local))
        return self._publish(path, copy) if created is None else created

    def read(self, path: str) -> bytes:
        with named_failures(self.url(path)), self._open(path) as file:
            return file.read()

    def sha256(self, path: str) -> str:
        with named_failures(self.url(path)), self._open(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def download(self, path: str, local: str) -> None:
        with (
            named_failures(self.url(path)),
            self._open(path) as file,
            Path(local).open("wb") as target,
        ):
            shutil.copyfileobj(file, target, CHUNK_BYTES)

    def stat(self, path: str) -> Entry | None:
        with named_failures(self.url(path)):
            try:
                status = (self._directory / path).stat()
            except (FileNotFoundError, NotADirectoryError):
                return None
            except OSError as error:
                if error.errno == errno.ELOOP:  # a symbolic link to itself is not an object
                    return None
                raise
        if not stat.S_ISREG(status.st_mode):
            return None
        return Entry(path, status.st_size, status.st_mtime)

    def entries(self, folder: str) -> Iterator[Entry]:
        """Yield every file below `folder`, unordered, temporary ones included.

        A missing folder is empty.
        """
        with named_failures(self.url(folder)):
            for directory, _, names in os.walk(self._directory / folder, onerror=_unless_missing):
                for name in names:
                    path = Path(directory, name).relative_to(self._directory).as_posix()
                    if entry := self.stat(path):
                        yield entry

    def survey(self, folder: str) -> Iterator[ListedName]:
        """Yield every name below `folder`, in order, without following links.

        Unlike `entries`, the listing continues after an error, and yields the folder or name that
        cannot be read. The audit reports it.
        """
        waiting = [folder]
        while waiting:
            current = waiting.pop()
            try:
                with os.scandir(self._directory / current) as scan:
                    names = sorted(scan, key=lambda name: name.name)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                yield ListedName(
                    current, 0, 0.0, f"a directory that cannot be listed ({error.strerror})"
                )
                continue
            inner = []
            for name in names:
                path = f"{current}/{name.name}" if current else name.name
                try:
                    status = name.stat(follow_symlinks=False)
                except FileNotFoundError:  # deleted since the listing
                    continue
                except OSError as error:
                    yield ListedName(
                        path, 0, 0.0, f"a name that cannot be inspected ({error.strerror})"
                    )
                    continue
                if stat.S_ISDIR(status.st_mode):
                    inner.append(path)
                yield _listed(path, status)
            waiting += reversed(inner)

    def delete(self, path: str) -> None:
        target = self._directory / path
        with named_failures(self.url(path)):
            try:
                target.unlink()
            except FileNotFoundError:
                return
            _sync_directory(target.parent)

    def _open(self, path: str) -> BufferedReader:
        """Open an object for reading. Raises: ObjectCorrupt if it is not a regular file."""
        target = self._directory / path
        expected = "a regular file, written by rlpipe"
        try:
            # A FIFO would block until a process writes to it, and a device such as /dev/zero has no
            # end. The name may change between `stat` and `open`, hence O_NONBLOCK and `fstat`.
            if stat.S_ISREG(target.stat().st_mode):
                descriptor = os.open(target, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                if stat.S_ISREG(os.fstat(descriptor).st_mode):
                    return os.fdopen(descriptor, "rb")
                os.close(descriptor)
        except NotADirectoryError as error:  # a file has the name of a folder
            raise ObjectMissing("the object does not exist", where=self.url(path)) from error
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
        raise ObjectCorrupt("not a regular file", where=self.url(path), expected=expected)

    def _link(self, path: str, local: Path) -> bool | None:
        """Link a local file to its name in the store, as `create`.

        None if hard links are not possible, as between two file systems.
        """
        target = self._directory / path
        with named_failures(self.url(path)):
            _make_directory(target.parent)
            with local.open("rb") as file:
                os.fsync(file.fileno())
            try:
                # Garbage collection spares young objects. Its age begins now.
                os.utime(local)
                target.hardlink_to(local)
                # The file is an object now, and objects never change.
                local.chmod(0o444)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno in UNLINKABLE:
                    return None
                raise
            finally:
                _sync_directory(target.parent)
        return True

    def _publish(self, path: str, write: Callable[[BinaryIO], object]) -> bool:
        target = self._directory / path
        temporary = Path(temporary_name(str(target)))
        with named_failures(self.url(path)):
            _make_directory(target.parent)
            try:
                created = not target.exists() and _write_and_link(temporary, target, write)
            finally:
                temporary.unlink(missing_ok=True)
            # Also if the object existed: its writer may have been killed before this line.
            _sync_directory(target.parent)
        return created


def _write_and_link(temporary: Path, target: Path, write: Callable[[BinaryIO], object]) -> bool:
    with temporary.open("xb") as file:
        write(file)
        # The bytes must be on disk before the name. Otherwise a crash could leave an empty object.
        file.flush()
        os.fsync(file.fileno())
    try:
        target.hardlink_to(temporary)
    except FileExistsError:
        return False
    return True


def _listed(path: str, status: os.stat_result) -> ListedName:
    """Describe a name in a directory."""
    identity = None
    if stat.S_ISREG(status.st_mode):
        kind = None
        if status.st_nlink > 1:
            identity = (status.st_dev, status.st_ino)
    elif stat.S_ISDIR(status.st_mode):
        kind = DIRECTORY
    else:
        kind = KINDS.get(stat.S_IFMT(status.st_mode), "no file")
    return ListedName(path, status.st_size, status.st_mtime, kind, identity)


def _unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _make_directory(path: Path) -> None:
    """Make `path` and its parents, and sync each new name in its directory."""
    if not path.is_dir():
        _make_directory(path.parent)
        path.mkdir(exist_ok=True)
        _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
