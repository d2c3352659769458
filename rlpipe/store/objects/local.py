"""Objects as files of a directory: complete or absent, written once, on disk before we say so.

A file is written under a temporary name, synced, and then linked to its own name: `link` refuses a
name that is taken, and nobody ever sees half a file. `open(..., "x")` alone would be exclusive but
show the file while it grows.

Not here: comparing with what another writer wrote (`files`).
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
"""Where a file cannot have a second name, or not by us: it is copied."""


KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
"""What may have a name in a directory, and is no object."""
DIRECTORY = "a directory"


class ListedName(NamedTuple):
    """One name in the store, whatever it names."""

    path: str
    size_bytes: int
    modified_s: float
    kind: str | None = None
    """What it is in words; None for an object."""
    identity: tuple[int, int] | None = None
    """Device and inode of a file that has several names; None for one with a single name, and on
    S3."""


class Entry(NamedTuple):
    """One object: its name relative to the root, its size, and when it was last written (seconds
    since the epoch)."""

    path: str
    size_bytes: int
    modified_s: float


@contextmanager
def named_failures(where: str) -> Iterator[None]:
    """Turns what the operating system says into ObjectMissing, StoreFull or StoreError at
    `where`."""
    try:
        yield
    except FileNotFoundError as error:
        raise ObjectMissing("there is no such object", where=where) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            do = "make room (`python -m tools.gc` says what may go) or move store.root"
            raise StoreFull("no space left", where=where, found=error.strerror, do=do) from error
        raise StoreError(
            "the file system said no", where=where, found=error.strerror or error
        ) from error


def temporary_name(path: str) -> str:
    """A name beside `path` that no listing shows."""
    return f"{path}.tmp-{uuid4().hex}"


class LocalBackend:
    """Objects under one directory. Methods are atomic; any number of processes may use one
    directory."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)

    def url(self, path: str) -> str:
        return f"file://{self._directory / path}"

    def create(self, path: str, data: bytes) -> bool:
        """True: written and durable. False: the name is taken. Raises: StoreFull, StoreError."""
        return self._publish(path, lambda file: file.write(data))

    def create_from(self, path: str, local: str) -> bool:
        """`create` with the file `local`: its content, or on the same file system the file itself,
        so that a checkpoint takes its room once. It must not be written to any more."""

        def copy(file: BinaryIO) -> None:
            with Path(local).open("rb") as source:
                shutil.copyfileobj(source, file, CHUNK_BYTES)

        given = self._give(path, Path(local))
        return self._publish(path, copy) if given is None else given

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
                found = (self._directory / path).stat()
            except (FileNotFoundError, NotADirectoryError):
                return None
            except OSError as error:
                if (
                    error.errno == errno.ELOOP
                ):  # a symbolic link that leads to itself names no object
                    return None
                raise
        return Entry(path, found.st_size, found.st_mtime) if stat.S_ISREG(found.st_mode) else None

    def entries(self, folder: str) -> Iterator[Entry]:
        """Every file below `folder`, unordered, temporary ones included; none if there is no such
        folder."""
        with named_failures(self.url(folder)):
            for directory, _, names in os.walk(self._directory / folder, onerror=_unless_gone):
                for name in names:
                    path = Path(directory, name).relative_to(self._directory).as_posix()
                    if entry := self.stat(path):
                        yield entry

    def survey(self, folder: str) -> Iterator[ListedName]:
        """Every name below `folder`, top folders by name, links not followed. A folder that cannot
        be listed is one of the names.

        Unlike `entries`, the listing goes on after whatever it meets: it is for the audit, which
        names it.
        """
        waiting = [folder]
        while waiting:
            here = waiting.pop()
            try:
                with os.scandir(self._directory / here) as found:
                    names = sorted(found, key=lambda one: one.name)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                yield ListedName(
                    here, 0, 0.0, f"a directory that cannot be listed ({error.strerror})"
                )
                continue
            inner = []
            for one in names:
                path = f"{here}/{one.name}" if here else one.name
                try:
                    said = one.stat(follow_symlinks=False)
                except FileNotFoundError:  # removed since the listing
                    continue
                except OSError as error:
                    yield ListedName(
                        path, 0, 0.0, f"a name that cannot be looked at ({error.strerror})"
                    )
                    continue
                if stat.S_ISDIR(said.st_mode):
                    inner.append(path)
                yield _seen(path, said)
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
        """Open an object for reading. Raises: ObjectCorrupt if the name is not a regular file's.

        A FIFO would block until somebody writes to it, and a link to a device such as /dev/zero has
        no end.
        """
        target = self._directory / path
        expected = "a file that a writer of the store made"
        try:
            if stat.S_ISREG(target.stat().st_mode):
                descriptor = os.open(target, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                if stat.S_ISREG(os.fstat(descriptor).st_mode):
                    return os.fdopen(descriptor, "rb")
                os.close(descriptor)
        except NotADirectoryError as error:  # a file where a folder should be
            raise ObjectMissing("there is no such object", where=self.url(path)) from error
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
        raise ObjectCorrupt("not a regular file", where=self.url(path), expected=expected)

    def _give(self, path: str, local: Path) -> bool | None:
        """As `create`; None where a file cannot have two names, as between two file systems."""
        target = self._directory / path
        with named_failures(self.url(path)):
            _make_directory(target.parent)
            with local.open("rb") as file:
                os.fsync(file.fileno())
            try:
                os.utime(local)  # an object is as old as it is an object
                target.hardlink_to(local)
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
            _sync_directory(
                target.parent
            )  # also when it was there: its writer may have died before this line
        return created


def _write_and_link(temporary: Path, target: Path, write: Callable[[BinaryIO], object]) -> bool:
    with temporary.open("xb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    try:
        target.hardlink_to(temporary)
    except FileExistsError:
        return False
    return True


def _seen(path: str, said: os.stat_result) -> ListedName:
    """What a name in a directory is."""
    regular = stat.S_ISREG(said.st_mode)
    kind = (
        DIRECTORY if stat.S_ISDIR(said.st_mode) else KINDS.get(stat.S_IFMT(said.st_mode), "no file")
    )
    identity = (said.st_dev, said.st_ino) if regular and said.st_nlink > 1 else None
    return ListedName(path, said.st_size, said.st_mtime, None if regular else kind, identity)


def _unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _make_directory(path: Path) -> None:
    """Make `path` and its parents; each new name is synced in the directory that holds it."""
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
