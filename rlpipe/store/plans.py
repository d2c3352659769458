"""Plans: prompts, group ids and seeds of an iteration, written before the first request.

A plan is named by the sha256 of its bytes.

    plans/<digest>/plan.json     the plan
    draws/<state>                digest of the plan that was drawn first from a data state

A draw is recorded only if a repeated draw could give another plan, as with a user's function.

Entry points: `Plans`, `plan_path`.
"""

from __future__ import annotations

import hashlib
import re

from rlpipe.errors import ObjectConflict, ObjectCorrupt
from rlpipe.store.objects.files import Files
from rlpipe.store.records import seal, unseal
from rlpipe.types import DataState, Plan

PLAN_NAME = re.compile(r"plans/([0-9a-f]{64})/plan\.json")
DRAW_NAME = re.compile(r"draws/[0-9a-f]{64}")


def plan_path(digest: str) -> str:
    """Return the path of a plan."""
    return f"plans/{digest}/plan.json"


class Plans:
    """The plans of a store."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def write(self, plan: Plan) -> str:
        """Store a plan and return its digest. An equal plan has the same digest.

        Raises: DataError.
        """
        data = _sealed(plan)
        digest = hashlib.sha256(data).hexdigest()
        self._files.create(plan_path(digest), data)
        return digest

    def find(self, plan: Plan) -> str | None:
        """Return the digest of an equal plan in the store, or None. Raises: DataError."""
        digest = hashlib.sha256(_sealed(plan)).hexdigest()
        return digest if self._files.exists(plan_path(digest)) else None

    def drawn(self, branch: str, iteration: int, part: int, before: DataState) -> str | None:
        """Return the digest of the plan that was drawn first from a data state, or None.

        Raises: ObjectCorrupt.
        """
        path = draw_path(branch, iteration, part, before)
        return self.drawn_in(path) if self._files.exists(path) else None

    def drawn_in(self, path: str) -> str:
        """Return the digest of the plan that the record of a draw names.

        Raises: ObjectMissing, ObjectCorrupt.
        """
        digest = self._files.read(path)
        if not re.fullmatch(rb"[0-9a-f]{64}", digest):
            raise ObjectCorrupt(
                "the record of a draw is not the digest of a plan",
                where=self._files.url(path),
                found=digest[:80],
            )
        return digest.decode()

    def draw(self, plan: Plan) -> str:
        """Store a plan that a user's function drew, and return the digest that counts.

        An earlier plan that was drawn from the same data state wins.
        """
        digest = self.write(plan)
        path = draw_path(plan.branch, plan.iteration, plan.part, plan.before)
        try:
            self._files.create(path, digest.encode())
        except ObjectConflict:
            # An earlier attempt was killed after its draw, and may have samples of that plan.
            return self.drawn_in(path)
        return digest

    def read(self, digest: str) -> Plan:
        """Return the plan of a digest. Raises: ObjectMissing, ObjectCorrupt."""
        path = plan_path(digest)
        return unseal(Plan, self._files.read(path, sha256=digest), self._files.url(path))

    @staticmethod
    def groups_prefix(digest: str) -> str:
        """Return the folder of the plan's finished groups."""
        return f"plans/{digest}/groups"

    @staticmethod
    def cut_prefix(digest: str) -> str:
        """Return the folder with the tokens of groups that were cut off."""
        return f"plans/{digest}/cut"


def plan_of_rows(path: str) -> str | None:
    """Return the digest of the plan above a data file; None for a file of another stage."""
    folder, digest, *_ = path.split("/")
    return digest if folder == "plans" else None


def draw_path(branch: str, iteration: int, part: int, before: DataState) -> str:
    """Return the path of the record of a draw."""
    state = hashlib.sha256(
        f"{branch}/{iteration}/{part}/{before.model_dump_json()}".encode()
    ).hexdigest()
    return f"draws/{state}"


def _sealed(plan: Plan) -> bytes:
    return seal(plan, f"plan {plan.branch}/{plan.iteration:08d} part {plan.part}")
