"""Plans: what an iteration will sample, written before the first request, named by its own content.

Not here: making one (`rlpipe.data`), or its groups' rows (`shards`).
"""

from __future__ import annotations

import hashlib

from rlpipe.store.files import Files
from rlpipe.store.records import seal, unseal
from rlpipe.types import Plan


def plan_path(digest: str) -> str:
    """Where the plan of this digest lives."""
    return f"plans/{digest}/plan.json"


class Plans:
    """The plans of a store."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def write(self, plan: Plan) -> str:
        """Store a plan; returns its digest. An equal plan has the same digest, and is there already. Raises: DataError."""
        data = _sealed(plan)
        digest = hashlib.sha256(data).hexdigest()
        self._files.create(plan_path(digest), data)
        return digest

    def find(self, plan: Plan) -> str | None:
        """Digest of an equal plan that is there already, or None. Raises: DataError."""
        digest = hashlib.sha256(_sealed(plan)).hexdigest()
        return digest if self._files.exists(plan_path(digest)) else None

    def read(self, digest: str) -> Plan:
        """The plan of this digest. Raises: ObjectMissing, ObjectCorrupt."""
        path = plan_path(digest)
        return unseal(Plan, self._files.read(path, sha256=digest), self._files.url(path))

    @staticmethod
    def groups_prefix(digest: str) -> str:
        """The folder of the plan's finished groups."""
        return f"plans/{digest}/groups"

    @staticmethod
    def cut_prefix(digest: str) -> str:
        """The folder of what there was of groups that were cut off."""
        return f"plans/{digest}/cut"


def plan_of_rows(path: str) -> str | None:
    """Digest of the plan below which this data file lies; None for a file of another stage."""
    folder, digest, *_ = path.split("/")
    return digest if folder == "plans" else None


def _sealed(plan: Plan) -> bytes:
    return seal(plan, f"plan {plan.branch}/{plan.iteration:08d} part {plan.part}")
