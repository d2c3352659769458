"""Weights as files in a directory or an object store: `WeightStore`, `Version`, `Share`.

    ROOT/BRANCH/weight_v000003-DIGEST/part-00000.safetensors …   all tensors, or changes of them
                                      version.json               `Version`, written last

A version is published once it has a `version.json`; files of a killed writer have none. A full
version has all tensors. A delta version has changes against the version that it names as `base`,
and is right only on top of that one. The versions from a full one to a given one are its chain.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError

from rlpipe.config.train import SyncConfig
from rlpipe.errors import ObjectMissing, StoreError, StoreFull, SyncError
from rlpipe.store.objects.files import Files
from rlpipe.store.objects.local import named_failures, temporary_name
from rlpipe.system.tensor_files import share_with_folder

RECORD = "version.json"
HF_INDEX = "model.safetensors.index.json"


class WeightFile(BaseModel):
    """One file of a version."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    size_bytes: int
    sha256: str | None
    """None in a shared directory: engines read the file in place."""
    tensors: tuple[str, ...]
    """Hugging Face names; empty for configuration and tokenizer files."""


@dataclass
class Share:
    """Files of a version that one rank has written."""

    files: list[WeightFile] = field(default_factory=list)
    checksums: dict[str, str] = field(default_factory=dict)
    full_bytes: int = 0
    """Bytes of all tensors of this share, changed or not."""


class Version(BaseModel):
    """Record of a version."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stamp: str
    base: str | None
    """Stamp of the weights that the changes apply to; None for a full version."""
    links: int
    """Number of versions in the chain, from the full one to this."""
    encoding: str | None
    """Encoding of the changes (`delta.ENCODINGS`); None for a full version."""
    checksum: str
    """Algorithm of `checksums` (`delta.CHECKSUMS`); "" without checksums."""
    files: tuple[WeightFile, ...]
    checksums: dict[str, str]
    """Tensor → checksum of its new bytes, for every tensor in the files."""
    full_bytes: int
    """Bytes of all tensors of the model as engines hold them, changed or not."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size_bytes for file in self.files)


class WeightStore:
    """Versions under a root: a directory or `s3://bucket/prefix`. Any process may construct one.

    Methods raise StoreError, StoreFull, and other errors of the store.
    """

    def __init__(self, root: str, *, scratch: Path | None = None) -> None:
        """`scratch`: folder for files that are being uploaded; None is the system's."""
        self.root = root
        self._scratch = scratch
        self._files = Files(root)
        local = self._files.root.removeprefix("file://")
        self.directory = Path(local) if local != self._files.root else None
        """Directory in which engines open the files in place; None for an object store."""

    def folder(self, stamp: str) -> str:
        """Return a version's folder, relative to the root. Raises: SyncError for a bad stamp."""
        try:
            branch, version, digest = stamp.rsplit("@", 2)
            return f"{quote(branch, safe='')}/weight_v{int(version):06d}-{quote(digest, safe='')}"
        except ValueError as error:
            raise SyncError(
                "not the stamp of weights",
                where=self.root,
                found=stamp,
                expected="branch@version@digest",
            ) from error

    def location(self, stamp: str) -> str:
        """Return the path or URL of a version's folder."""
        return f"{self.directory or self.root.rstrip('/')}/{self.folder(stamp)}"

    def write(
        self, stamp: str, name: str, save: Callable[[Path], None], tensors: Iterable[str] = ()
    ) -> WeightFile:
        """Write a file of an unpublished version, over the file of an earlier attempt.

        `save` writes the content to the path that it is given.
        """
        path = f"{self.folder(stamp)}/{name}"
        if self.directory is None:
            with tempfile.TemporaryDirectory(dir=self._scratch) as folder:
                _save(save, Path(folder, name))
                # Objects are created once: an earlier attempt's file would be a conflict.
                self._files.delete(path)
                record = self._files.put_file(Path(folder, name), path)
            return WeightFile(
                name=name,
                size_bytes=record.size_bytes,
                sha256=record.sha256,
                tensors=tuple(tensors),
            )
        target = self.directory / path
        with named_failures(str(target)):
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = Path(temporary_name(str(target)))
            try:
                _save(save, temporary)
                share_with_folder(temporary)
                temporary.replace(target)
            finally:
                temporary.unlink(missing_ok=True)
            return WeightFile(
                name=name, size_bytes=target.stat().st_size, sha256=None, tensors=tuple(tensors)
            )

    def join(
        self, stamp: str, base: Version | None, sync: SyncConfig, shares: Sequence[Share]
    ) -> Version:
        """Return the version of the shares of all ranks. `base` None makes a full version."""
        is_delta = sync.transport == "delta"
        files = [file for share in shares for file in share.files]
        checksums = {
            name: checksum for share in shares for name, checksum in share.checksums.items()
        }
        return Version(
            stamp=stamp,
            base=base.stamp if base else None,
            links=base.links + 1 if base else 1,
            encoding=sync.update_weight_delta_encoding if base is not None else None,
            checksum=sync.update_weight_delta_checksum if is_delta else "",
            files=tuple(sorted(files, key=lambda file: file.name)),
            checksums=checksums,
            full_bytes=sum(share.full_bytes for share in shares),
        )

    def publish(self, version: Version) -> None:
        """Publish a version whose files are written.

        Raises: ObjectConflict if it is published already, with other files.
        """
        folder = self.folder(version.stamp)
        if version.base is None:
            weight_map = {tensor: file.name for file in version.files for tensor in file.tensors}
            index = json.dumps(
                {"metadata": {"total_size": version.full_bytes}, "weight_map": weight_map},
                indent=1,
                sort_keys=True,
            )
            self._files.delete(f"{folder}/{HF_INDEX}")
            self._files.create(f"{folder}/{HF_INDEX}", index.encode())
        self._files.create(f"{folder}/{RECORD}", version.model_dump_json().encode())

    def find(self, stamp: str) -> Version | None:
        """Return the published version of a stamp; None without one.

        A version with missing or incomplete files (full disk, crash) counts as none.
        """
        folder = self.folder(stamp)
        try:
            version = Version.model_validate_json(self._files.read(f"{folder}/{RECORD}"))
            sizes = [self._files.size(f"{folder}/{file.name}") for file in version.files]
        except ObjectMissing:
            return None
        except ValidationError as error:
            raise SyncError(
                "not the record of a version", where=self._files.url(folder), found=error
            ) from error
        if version.stamp != stamp:
            raise SyncError(
                "the record of another version",
                where=self._files.url(folder),
                found=version.stamp,
                expected=stamp,
            )
        return version if sizes == [file.size_bytes for file in version.files] else None

    def chain(self, stamp: str, *, after: str | None = None) -> list[Version]:
        """Return the versions that lead to a stamp, in order.

        The first is a full version, or the one that follows `after`.
        Raises: SyncError if a version is missing.
        """
        links: list[Version] = []
        needed: str | None = stamp
        while needed not in (None, after):
            assert needed is not None
            version = self.find(needed)
            # A damaged record could name a version of its own chain as base.
            if version is None or version.stamp in {link.stamp for link in links}:
                raise SyncError(
                    "the chain of weights is broken",
                    where=f"{self.root}/{self.folder(stamp)}",
                    found=f"nothing complete for {needed}",
                    expected="every version from a full one to this",
                    do="push again: the next push writes all weights",
                )
            links.insert(0, version)
            needed = version.base
        return links

    def path(self, stamp: str) -> Path:
        """Return the folder of a full version in a shared directory."""
        assert self.directory is not None, "an object store is no directory"
        return self.directory / self.folder(stamp)

    def fetch(self, version: Version, file: WeightFile, local: Path) -> None:
        """Copy a file of a version to this machine.

        Raises: ObjectMissing; ObjectCorrupt if its bytes differ from the written ones.
        """
        path = f"{self.folder(version.stamp)}/{file.name}"
        if self.directory is None:
            self._files.get_file(path, local, sha256=file.sha256)
            return
        with named_failures(f"{self.root}/{path}"):
            shutil.copyfile(self.directory / path, local)

    def remove_others(self, version: Version) -> None:
        """Remove all other versions of the branch, and files of killed writers.

        `version` must be full.
        """
        assert version.base is None, "a delta version needs the versions before it"
        kept = self.folder(version.stamp)
        branch = kept.split("/")[0]
        folders = {name.rpartition("/")[0] for name in self._files.list(branch)}
        for folder in sorted(folders - {kept}):
            self._remove(folder)

    def remove(self, stamp: str) -> None:
        """Remove one version, published or not."""
        self._remove(self.folder(stamp))

    def _remove(self, folder: str) -> None:
        # The record first: without it the other files belong to no version.
        names = sorted(self._files.list(folder), key=lambda name: not name.endswith(f"/{RECORD}"))
        for name in names:
            self._files.delete(name)
        if self.directory is not None:
            shutil.rmtree(self.directory / folder, ignore_errors=True)


def _save(save: Callable[[Path], None], path: Path) -> None:
    try:
        save(path)
    # safetensors wraps errors of the operating system in its own class.
    except SafetensorError as error:
        is_full = "No space left" in str(error)
        problem = "no space left" if is_full else "a file of weights could not be written"
        error_type = StoreFull if is_full else StoreError
        raise error_type(problem, where=str(path), found=error) from error
