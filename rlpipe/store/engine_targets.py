"""Engine targets: the number of engines that a person requested for a run.

    branches/<branch>/engines/%08d.json     the n-th request, from 0; the last one counts

Requests are written once and stay, as a history. The conductor of a running run reads the next
number every few seconds (one request for a missing object); a start of the run reads the newest.

Entry points: `EngineTargets`, `EngineTarget`.
"""

from __future__ import annotations

import re

from rlpipe.errors import ObjectConflict, ObjectMissing
from rlpipe.store.objects.files import Files
from rlpipe.store.records import now, seal, unseal
from rlpipe.types import VersionedRecord

TARGET_NAME = re.compile(r"branches/([^/]+)/engines/(\d{8})\.json")
ADVICE = "request the number again: rlpipe engines RUN N"


class EngineTarget(VersionedRecord):
    """A requested number of engines."""

    branch: str
    number: int
    """Number of the request, from 0."""
    engines: int
    configured: int
    """Engines of the run's configuration at the request. A start with another number replaces the
    request."""
    created: str

    def of(self, configured: int) -> int:
        """Return the number of engines for a run that is configured for this number."""
        return self.engines if configured == self.configured else configured


class EngineTargets:
    """The engine targets of a store's branches."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def request(self, branch: str, engines: int, *, configured: int) -> EngineTarget:
        """Write a request, and return it. Raises: StoreError."""
        while True:
            newest = self.newest(branch)
            number = newest.number + 1 if newest else 0
            target = EngineTarget(
                branch=branch, number=number, engines=engines, configured=configured, created=now()
            )
            path = target_path(branch, number)
            try:
                self._files.create(path, seal(target, path))
            except ObjectConflict:  # another request was faster; this one follows it
                continue
            return target

    def newest(self, branch: str) -> EngineTarget | None:
        """Return the request that counts, or None without any. Raises: ObjectCorrupt."""
        names = [
            name
            for name in self._files.list(f"branches/{branch}/engines")
            if TARGET_NAME.fullmatch(name)
        ]
        return self._read(max(names)) if names else None

    def following(self, branch: str, known: EngineTarget | None) -> EngineTarget | None:
        """Return the newest request, given the newest one before. Raises: ObjectCorrupt."""
        while True:
            number = known.number + 1 if known else 0
            try:
                known = self._read(target_path(branch, number))
            except ObjectMissing:
                return known

    def _read(self, path: str) -> EngineTarget:
        return unseal(EngineTarget, self._files.read(path), self._files.url(path), do=ADVICE)


def target_path(branch: str, number: int) -> str:
    """Return the path of a request."""
    return f"branches/{branch}/engines/{number:08d}.json"
