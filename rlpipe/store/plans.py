"""Plans: what an iteration will sample, written before the first request, named by its own content.

    plans/<digest>/plan.json     the plan
    draws/<state>                which plan was drawn first from a state, where asking again could give another one

Not here: making one (`rlpipe.data`), or its groups' rows (`shards`).
"""

from __future__ import annotations

import hashlib
import re

from rlpipe.errors import ObjectConflict, ObjectCorrupt
from rlpipe.store.objects.files import Files
from rlpipe.store.records import seal, unseal
from rlpipe.types import DataState, Plan

DRAW_NAME = re.compile(r"draws/[0-9a-f]{64}")


def plan_path(digest: str) -> str:
    """Where the plan of this digest lives."""
    return f"plans/{digest}/plan.json"


class Plans:
    """The plans of a store."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def write(self, plan: Plan) -> str:
        """Store a plan; returns its digest. An equal plan has the same digest, and is there
        already. Raises: DataError."""
        data = _sealed(plan)
        digest = hashlib.sha256(data).hexdigest()
        self._files.create(plan_path(digest), data)
        return digest

    def find(self, plan: Plan) -> str | None:
        """Digest of an equal plan that is there already, or None. Raises: DataError."""
        digest = hashlib.sha256(_sealed(plan)).hexdigest()
        return digest if self._files.exists(plan_path(digest)) else None

    def drawn(self, branch: str, iteration: int, part: int, before: DataState) -> str | None:
        """Digest of the plan that was drawn first from this state, where a draw cannot be repeated;
        None: nothing was.

        Raises: ObjectCorrupt.
        """
        path = draw_path(branch, iteration, part, before)
        return self.drawn_in(path) if self._files.exists(path) else None

    def drawn_in(self, path: str) -> str:
        """Digest of the plan that the record of a draw names. Raises: ObjectMissing,
        ObjectCorrupt."""
        said = self._files.read(path)
        if not re.fullmatch(rb"[0-9a-f]{64}", said):
            raise ObjectCorrupt(
                "not the digest of a plan", where=self._files.url(path), found=said[:80]
            )
        return said.decode()

    def draw(self, plan: Plan) -> str:
        """Store a plan that a user's function drew, unless one was drawn before from the same
        state: the digest that counts."""
        digest = self.write(plan)
        path = draw_path(plan.branch, plan.iteration, plan.part, plan.before)
        try:
            self._files.create(path, digest.encode())
        except ObjectConflict:
            return self.drawn_in(path)
        return digest

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


def draw_path(branch: str, iteration: int, part: int, before: DataState) -> str:
    """Where the draw from a state is recorded."""
    state = hashlib.sha256(
        f"{branch}/{iteration}/{part}/{before.model_dump_json()}".encode()
    ).hexdigest()
    return f"draws/{state}"


def _sealed(plan: Plan) -> bytes:
    return seal(plan, f"plan {plan.branch}/{plan.iteration:08d} part {plan.part}")
