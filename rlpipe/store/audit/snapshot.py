"""The store as the audit sees it: one listing of every name, then reads that are bounded and stop
at nothing.

`Snapshot.take` lists the whole store once. What is listed later (records of branches) may refer to
what is listed earlier, so a run that goes on meanwhile is seen as it was: its branches are listed a
second time, last. Everything that lists a folder of a snapshot is answered from memory; everything
that reads asks the store.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Iterator

from rlpipe.errors import DataError, ObjectCorrupt, StoreError
from rlpipe.store.objects.files import Files, is_safe
from rlpipe.store.objects.local import DIRECTORY, TEMPORARY, Entry, ListedName
from rlpipe.store.records import canonical

MOST_BYTES = 4 * 1024**3
"""The largest object that is read at once. A sparse file may claim any size, and would take all
memory."""
READ_LAST = ("branches", "rollouts")
"""Folders of the records that refer to all others."""
SPELLED = ("branches", "nodes", "receipts", "rollouts")
"""Folders of sealed records. The bytes of a plan are those of its name."""
FILE_SUFFIXES = (".json", ".parquet")


class Snapshot(Files):
    """The store of `Files`, with one listing. Reads raise ObjectCorrupt for what is too large, or
    is spelled in another way."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.seen: dict[str, ListedName] = {}
        """Every object by its name."""
        self.unfinished: list[ListedName] = []
        """What writers that were killed, or still write, have under temporary names."""
        self.odd: list[ListedName] = []
        """What is no object: links, devices, folders under the name of a file."""
        self._names: list[str] = []
        self._digests: dict[str, str] = {}

    @classmethod
    def take(cls, files: Files) -> Snapshot:
        """List the store. Raises: StoreError if it does not answer."""
        snapshot = cls(files.root)
        for prefix in ("", *READ_LAST):
            for seen in files.survey(prefix):
                snapshot._add(seen)
        snapshot.odd = list(dict.fromkeys(snapshot.odd))
        snapshot.unfinished = list({seen.path: seen for seen in snapshot.unfinished}.values())
        snapshot._names = sorted(snapshot.seen)
        return snapshot

    def _add(self, seen: ListedName) -> None:
        if not seen.path:
            raise StoreError("the store cannot be listed", where=self.root, found=seen.kind)
        if seen.kind is None and not is_safe(seen.path):
            seen = seen._replace(kind="a name that no object can have")
        if seen.kind == DIRECTORY:
            if seen.path.endswith(FILE_SUFFIXES):
                self.odd.append(seen._replace(size_bytes=0, modified_s=0.0))
        elif seen.kind is not None:
            self.odd.append(seen._replace(size_bytes=0, modified_s=0.0))
        elif TEMPORARY.search(seen.path):
            self.unfinished.append(seen)
        else:
            self.seen[seen.path] = seen

    def entries(self, prefix: str = "", *, temporary: bool = False) -> Iterator[Entry]:
        """As of `Files`, from the listing."""
        folder = prefix.rstrip("/")
        if temporary:
            found = [
                seen for seen in self.unfinished if not folder or seen.path.startswith(f"{folder}/")
            ]
        else:
            first = bisect_left(self._names, f"{folder}/") if folder else 0
            last = (
                bisect_left(self._names, f"{folder}0") if folder else len(self._names)
            )  # "0" follows "/"
            found = [self.seen[name] for name in self._names[first:last]]
        return (Entry(seen.path, seen.size_bytes, seen.modified_s) for seen in found)

    def names_below(self, folder: str) -> bool:
        """True if there is anything below a folder, be it an object or not."""
        return any(self.entries(folder)) or any(
            odd.path.startswith(f"{folder}/") or odd.path == folder for odd in self.odd
        )

    def size(self, path: str) -> int:
        """As of `Files`, from the listing if the object was there."""
        seen = self.seen.get(path)
        return super().size(path) if seen is None else seen.size_bytes

    def read(self, path: str, sha256: str | None = None) -> bytes:
        """As of `Files`. Raises: ObjectCorrupt also for an object that is too large, or a record in
        another spelling."""
        self.refuse_large(path)
        data = super().read(path, sha256)
        if path.endswith(".json") and path.split("/")[0] in SPELLED and not _spelled(data):
            raise ObjectCorrupt(
                "these are not the bytes that were written",
                where=self.url(path),
                found="another spelling",
            )
        if path.endswith(".json"):
            self._digests[path] = hashlib.sha256(data).hexdigest()
        return data

    def digest_of(self, path: str) -> str:
        """sha256 of a record, which is not read again if it was. Raises: ObjectMissing,
        ObjectCorrupt."""
        if path not in self._digests:
            self.read(path)
        return self._digests[path]

    def refuse_large(self, path: str) -> None:
        """Raises: ObjectCorrupt if the object is larger than any that is read at once."""
        if path in self.seen and self.seen[path].size_bytes > MOST_BYTES:
            raise ObjectCorrupt(
                "too large to be read",
                where=self.url(path),
                found=f"{self.seen[path].size_bytes} bytes",
                expected=f"at most {MOST_BYTES}",
            )

    def shown(self, path: str) -> str:
        """The URL of any name, as text that can be printed on one line."""
        escaped = path if path.isprintable() else ascii(path)[1:-1]
        return f"{self.root}/{escaped}"


def _spelled(data: bytes) -> bool:
    """True if a record's bytes are the one spelling of its content, or no JSON at all: its reader
    says that."""
    try:
        return canonical(json.loads(data), "record") + b"\n" == data
    except (ValueError, DataError, RecursionError):
        return True
