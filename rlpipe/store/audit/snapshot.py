"""The store during an audit: one listing of every name, and reads of limited size.

`Snapshot.take` lists the whole store once. A run may continue during the listing. Records of
branches refer to all other objects, so these folders are listed again at the end. Listings of a
snapshot come from memory, and reads come from the store.
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
"""The largest object that is read at once. A sparse file may have any size, and would take all
memory."""
LISTED_LAST = ("branches", "rollouts")
"""Folders of the records that refer to all others."""
SEALED_FOLDERS = ("branches", "nodes", "receipts", "rollouts")
"""Folders of sealed records. Plans are not among them, because the name of a plan is its digest."""
FILE_SUFFIXES = (".json", ".parquet")


class Snapshot(Files):
    """A store with one listing.

    Reads raise ObjectCorrupt also for objects that are too large, and for records that are not in
    the canonical form.
    """

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.seen: dict[str, ListedName] = {}
        """Every object by its path."""
        self.unfinished: list[ListedName] = []
        """Temporary files of active or killed writers."""
        self.odd: list[ListedName] = []
        """Names that are not objects: links, devices, folders with the name of a file."""
        self._names: list[str] = []
        self._digests: dict[str, str] = {}

    @classmethod
    def take(cls, files: Files) -> Snapshot:
        """List the store. Raises: StoreError if the store does not answer."""
        snapshot = cls(files.root)
        for prefix in ("", *LISTED_LAST):
            for seen in files.survey(prefix):
                snapshot._add(seen)
        # Some folders were listed twice.
        snapshot.odd = list(dict.fromkeys(snapshot.odd))
        snapshot.unfinished = list({seen.path: seen for seen in snapshot.unfinished}.values())
        snapshot._names = sorted(snapshot.seen)
        return snapshot

    def _add(self, seen: ListedName) -> None:
        # A backend reports a folder that it cannot list as a name. Here that is the root.
        if not seen.path:
            raise StoreError("listing of the store failed", where=self.root, found=seen.kind)
        if seen.kind is None and not is_safe(seen.path):
            seen = seen._replace(kind="an invalid name for an object")
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
        """Do `Files.entries` with the listing."""
        folder = prefix.rstrip("/")
        if temporary:
            selected = [
                seen for seen in self.unfinished if not folder or seen.path.startswith(f"{folder}/")
            ]
        elif folder:
            # "0" is the character after "/".
            first = bisect_left(self._names, f"{folder}/")
            end = bisect_left(self._names, f"{folder}0")
            selected = [self.seen[name] for name in self._names[first:end]]
        else:
            selected = [self.seen[name] for name in self._names]
        return (Entry(seen.path, seen.size_bytes, seen.modified_s) for seen in selected)

    def names_below(self, folder: str) -> bool:
        """True if a folder has any content, objects or other names."""
        return any(self.entries(folder)) or any(
            odd.path.startswith(f"{folder}/") or odd.path == folder for odd in self.odd
        )

    def size(self, path: str) -> int:
        """Do `Files.size` with the listing if it has the object."""
        seen = self.seen.get(path)
        return super().size(path) if seen is None else seen.size_bytes

    def read(self, path: str, sha256: str | None = None) -> bytes:
        """Do `Files.read`.

        Raises: ObjectCorrupt also for an object that is too large, or a record that is not in the
        canonical form.
        """
        self.refuse_large(path)
        data = super().read(path, sha256)
        if path.endswith(".json"):
            # The seal covers the content only. Added spaces or reordered keys do not break it.
            if path.split("/")[0] in SEALED_FOLDERS and not _is_canonical(data):
                raise ObjectCorrupt(
                    "these are not the bytes that were written",
                    where=self.url(path),
                    found="a record that is not in the canonical form",
                )
            self._digests[path] = hashlib.sha256(data).hexdigest()
        return data

    def digest_of(self, path: str) -> str:
        """Return the sha256 of a record. Reads it only once. Raises: ObjectMissing,
        ObjectCorrupt."""
        if path not in self._digests:
            self.read(path)
        return self._digests[path]

    def refuse_large(self, path: str) -> None:
        """Refuse an object that is too large to be read at once. Raises: ObjectCorrupt."""
        if path in self.seen and self.seen[path].size_bytes > MOST_BYTES:
            raise ObjectCorrupt(
                "the object is too large",
                where=self.url(path),
                found=f"{self.seen[path].size_bytes} bytes",
                expected=f"at most {MOST_BYTES}",
            )

    def shown(self, path: str) -> str:
        """Return the URL of any name, as printable text on one line."""
        escaped = path if path.isprintable() else ascii(path)[1:-1]
        return f"{self.root}/{escaped}"


def _is_canonical(data: bytes) -> bool:
    """True if a record is in the canonical form, or is not JSON."""
    try:
        return canonical(json.loads(data), "record") + b"\n" == data
    except (ValueError, DataError, RecursionError):
        return True  # `unseal` reports bytes that are not JSON
