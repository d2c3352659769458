"""Receipts: that an iteration was committed, and what its commit says. Written right after a commit, and never before one.

    branches/<branch>/receipts/%08d.json

Without it nobody could tell a branch whose newest commit was removed from one that was killed before it. So

    a receipt without its commit    the commit was there, and is gone
    a commit without its receipt    its driver was killed between the two; the iteration counts all the same

A receipt is of what a commit says, not of who wrote it when: an iteration that is committed again with the same result has the
same one. Not here: commits (`branches`), and who misses one (`audit`).
"""

from __future__ import annotations

import re

from rlpipe.errors import ObjectConflict, ObjectCorrupt, ObjectMissing
from rlpipe.store.files import Files
from rlpipe.store.records import digest, seal, unseal
from rlpipe.types import Commit, Record

NAME = re.compile(r"branches/[^/]+/receipts/([0-9]{8})\.json")
WHO_AND_WHEN = {"attempt", "created", "epoch", "packages"}
"""What two records of one result may differ in."""


class Receipt(Record):
    """Iteration k of a branch was committed."""

    format: int = 1
    branch: str
    iteration: int
    commit: str
    """sha256 of what the commit says."""

    @classmethod
    def of(cls, commit: Commit) -> Receipt:
        """Keys at their defaults are left out of the digest: a key that commits get later does not change it."""
        said = commit.model_dump(mode="json", exclude=WHO_AND_WHEN, exclude_defaults=True)
        where = receipt_path(commit.branch, commit.iteration)
        return cls(branch=commit.branch, iteration=commit.iteration, commit=digest(said, where))


class Receipts:
    """The receipts of a store's branches."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def write(self, commit: Commit) -> None:
        """Write the receipt of a commit that is in the store; no error if it is there. Raises: ObjectConflict; StoreError."""
        path = receipt_path(commit.branch, commit.iteration)
        self._files.create(path, seal(Receipt.of(commit), path))

    def find(self, branch: str, iteration: int) -> Receipt | None:
        """The receipt of an iteration, or None. Raises: ObjectCorrupt, also if it is another one's."""
        path = receipt_path(branch, iteration)
        try:
            receipt = unseal(Receipt, self._files.read(path), self._files.url(path))
        except ObjectMissing:
            return None
        if (receipt.branch, receipt.iteration) != (branch, iteration):
            found = f"iteration {receipt.iteration} of {receipt.branch}"
            raise ObjectCorrupt("this is another receipt", where=self._files.url(path), found=found, expected="that of its name")
        return receipt

    def refuse_other(self, commit: Commit) -> None:
        """Raises: ObjectConflict if the iteration was committed with another result; to be asked while it is not committed."""
        found = self.find(commit.branch, commit.iteration)
        if found is not None and found != Receipt.of(commit):
            path = receipt_path(commit.branch, commit.iteration)
            raise ObjectConflict(
                "this iteration was committed before with another result, and that commit is gone",
                where=self._files.url(path),
                found=f"the receipt of a commit {found.commit[:16]}",
                expected=f"none, or that of {Receipt.of(commit).commit[:16]}",
                do="bring the commit back from a copy, or fork from the one before it; to give it up, remove this receipt",
            )


def receipt_path(branch: str, iteration: int) -> str:
    """Where the receipt of an iteration lies."""
    return f"branches/{branch}/receipts/{iteration:08d}.json"
