"""`WeightStore`: weights as files that trainer ranks write and engines read, in a directory they
share or an object store.

    ROOT/BRANCH/weight_v000003-DIGEST/part-00000.safetensors …       all tensors, or what changed of them
                                      version.json                   `Version`: written last, so it makes the others count

A version has all tensors (full), or changes against the version that it names (`base`). The
versions from a full one to the one that is wanted are its chain; each is right only on top of the
one before. What a killed writer left has no `version.json`.

Not here: what is in the files (`disk`, `delta`), where an engine keeps them (`mirror`).
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

RECORD = "version.json"
HF_INDEX = "model.safetensors.index.json"


class WeightFile(BaseModel):
    """One file of a version."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    size_bytes: int
    sha256: str | None
    """None where the engines read it in place: it crosses no network of ours."""
    tensors: tuple[str, ...]
    """Hugging Face names; none of a file that only lies there for people."""


@dataclass
class Share:
    """What one rank has written of a version."""

    files: list[WeightFile] = field(default_factory=list)
    checksums: dict[str, str] = field(default_factory=dict)
    full_bytes: int = 0
    """Of all tensors of this share, changed or not."""


class Version(BaseModel):
    """The record of a version."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stamp: str
    base: str | None
    """Stamp of the weights that these are changes of; None: this is all of them."""
    links: int
    """Versions in its chain, from the full one to this."""
    encoding: str | None
    """How a change is written; None of a full version. See `delta.ENCODINGS`."""
    checksum: str
    """What `checksums` are made with; "" if there are none. See `delta.CHECKSUMS`."""
    files: tuple[WeightFile, ...]
    checksums: dict[str, str]
    """Tensor → checksum of its new bytes, of every tensor in the files."""
    full_bytes: int
    """Of all tensors of the model as the engines hold them, changed or not."""

    @property
    def size_bytes(self) -> int:
        """Of all files."""
        return sum(file.size_bytes for file in self.files)


def _saved(save: Callable[[Path], None], path: Path) -> None:
    """Let it write. safetensors has an error of its own for what the operating system says."""
    try:
        save(path)
    except SafetensorError as error:
        full = "No space left" in str(error)
        problem = "no space left" if full else "a file of weights could not be written"
        raise (StoreFull if full else StoreError)(problem, where=str(path), found=error) from error


class WeightStore:
    """Versions under a root: a directory, or `s3://bucket/prefix`. Any process may make one.

    Methods raise StoreError, StoreFull, and what else the store says.
    """

    def __init__(self, root: str, *, scratch: Path | None = None) -> None:
        """`scratch`: folder for files on their way to an object store; None is the system's."""
        self.root = root
        self._scratch = scratch
        self._files = Files(root)
        shared = self._files.root.removeprefix("file://")
        self.directory = Path(shared) if shared != self._files.root else None
        """Where others can open the files in place; None of an object store."""

    def folder(self, stamp: str) -> str:
        """A version's folder, relative to the root. Raises: SyncError if it is no stamp."""
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

    def write(
        self, stamp: str, name: str, save: Callable[[Path], None], tensors: Iterable[str] = ()
    ) -> WeightFile:
        """Let `save` write a file of a version that is not published yet, over what another attempt
        may have left."""
        path = f"{self.folder(stamp)}/{name}"
        if self.directory is None:
            with tempfile.TemporaryDirectory(dir=self._scratch) as folder:
                _saved(save, Path(folder, name))
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
            written = Path(temporary_name(str(target)))
            try:
                _saved(save, written)
                written.replace(target)
            finally:
                written.unlink(missing_ok=True)
            return WeightFile(
                name=name, size_bytes=target.stat().st_size, sha256=None, tensors=tuple(tensors)
            )

    def join(
        self, stamp: str, base: Version | None, sync: SyncConfig, shares: Sequence[Share]
    ) -> Version:
        """The version that the shares of all ranks make, on top of another or by itself."""
        delta = sync.transport == "delta"
        return Version(
            stamp=stamp,
            base=base.stamp if base else None,
            links=base.links + 1 if base else 1,
            encoding=sync.update_weight_delta_encoding if base is not None else None,
            checksum=sync.update_weight_delta_checksum if delta else "",
            files=tuple(
                sorted(
                    (file for share in shares for file in share.files), key=lambda file: file.name
                )
            ),
            checksums={
                name: checksum for share in shares for name, checksum in share.checksums.items()
            },
            full_bytes=sum(share.full_bytes for share in shares),
        )

    def publish(self, version: Version) -> None:
        """All its files are there: let it count. Raises: ObjectConflict if it counts already, with
        other files."""
        folder = self.folder(version.stamp)
        if version.base is None:
            where = {tensor: file.name for file in version.files for tensor in file.tensors}
            index = json.dumps(
                {"metadata": {"total_size": version.full_bytes}, "weight_map": where},
                indent=1,
                sort_keys=True,
            )
            self._files.delete(f"{folder}/{HF_INDEX}")
            self._files.create(f"{folder}/{HF_INDEX}", index.encode())
        self._files.create(f"{folder}/{RECORD}", version.model_dump_json().encode())

    def find(self, stamp: str) -> Version | None:
        """The published version of this stamp; None if there is none, or not all of its files (a
        disk that was full, a crash)."""
        try:
            version = Version.model_validate_json(
                self._files.read(f"{self.folder(stamp)}/{RECORD}")
            )
            sizes = [
                self._files.size(f"{self.folder(stamp)}/{file.name}") for file in version.files
            ]
        except ObjectMissing:
            return None
        except ValidationError as error:
            raise SyncError(
                "not the record of a version",
                where=self._files.url(self.folder(stamp)),
                found=error,
            ) from error
        if version.stamp != stamp:
            where = self._files.url(self.folder(stamp))
            raise SyncError(
                "the record of another version", where=where, found=version.stamp, expected=stamp
            )
        return version if sizes == [file.size_bytes for file in version.files] else None

    def chain(self, stamp: str, *, after: str | None = None) -> list[Version]:
        """What leads to these weights, in order: from a full version on, or the changes that follow
        the version `after`.

        Raises: SyncError if a link is missing.
        """
        links: list[Version] = []
        wanted: str | None = stamp
        while wanted not in (None, after):
            assert wanted is not None
            found = self.find(wanted)
            if found is None or found.stamp in {link.stamp for link in links}:
                raise SyncError(
                    "the chain of weights is broken",
                    where=f"{self.root}/{self.folder(stamp)}",
                    found=f"nothing complete for {wanted}",
                    expected="every version from a full one on",
                    do="the next push writes all weights anew",
                )
            links.insert(0, found)
            wanted = found.base
        return links

    def path(self, stamp: str) -> Path:
        """Where a full version can be opened in place, by whoever shares the directory."""
        assert self.directory is not None, "an object store is no directory"
        return self.directory / self.folder(stamp)

    def fetch(self, version: Version, file: WeightFile, local: Path) -> None:
        """Copy a file of a version to this machine. Raises: ObjectMissing; ObjectCorrupt if it is
        not what was written."""
        path = f"{self.folder(version.stamp)}/{file.name}"
        if self.directory is None:
            self._files.get_file(path, local, sha256=file.sha256)
            return
        with named_failures(f"{self.root}/{path}"):
            shutil.copyfile(self.directory / path, local)

    def remove_others(self, version: Version) -> None:
        """Remove all versions of the branch but this full one, and what killed writers left."""
        assert version.base is None, "changes are nothing without the versions before"
        kept = self.folder(version.stamp)
        branch = kept.split("/")[0]
        for folder in sorted(
            {name.rpartition("/")[0] for name in self._files.list(branch)} - {kept}
        ):
            self._remove(folder)

    def remove(self, stamp: str) -> None:
        """Remove one version, published or not."""
        self._remove(self.folder(stamp))

    def _remove(self, folder: str) -> None:
        """The record goes first: from then on the rest does not count."""
        for name in sorted(
            self._files.list(folder), key=lambda name: not name.endswith(f"/{RECORD}")
        ):
            self._files.delete(name)
        if self.directory is not None:
            shutil.rmtree(self.directory / folder, ignore_errors=True)
