"""Receipts: that an iteration was committed, or a checkpoint recorded. Written right after the
record, and never before it.

    branches/<branch>/receipts/%08d.json     of a commit
    receipts/<stage>/<digest>.json           of a node that no commit names: a checkpoint, an evaluation

Without it nobody could tell a branch whose newest commit was removed from one that was killed
before it. So

    a receipt without its commit    the commit was there, and is gone
    a commit without its receipt    its driver was killed between the two; the iteration counts all the same

    receipts/<stage>/<digest>-<sha256[:16]>.removed.json     garbage collection removed a node of these bytes, whose weights stay

The commit that follows writes the receipt that is missing, so only the newest commit of a branch
may be without one. The same holds for nodes, but that nothing follows them. Garbage collection
removes a receipt before its node, and of a checkpoint that it takes from a run it writes down first
which bytes go: a commit may have named them.

A receipt is of what a commit says, not of who wrote it when: an iteration that is committed again
with the same result has the same one. Not here: commits (`branches`), and who misses one (`audit`).
"""

from __future__ import annotations

import re
from contextlib import suppress

from rlpipe.errors import ObjectConflict, ObjectCorrupt, ObjectMissing
from rlpipe.store.objects.files import Files
from rlpipe.store.records import digest, now, seal, unseal
from rlpipe.types import Commit, Node, Stage, VersionedRecord

RECEIPT_NAME = re.compile(r"branches/[^/]+/receipts/([0-9]{8})\.json")
NODE_RECEIPT_NAME = re.compile(r"receipts/([a-z]+)/([0-9a-f]{64})\.json")
REMOVAL_NAME = re.compile(r"receipts/([a-z]+)/([0-9a-f]{64})-([0-9a-f]{16})\.removed\.json")
PROVENANCE_KEYS = {"attempt", "created", "epoch", "packages"}
"""What two records of one result may differ in."""
CHAIN_KEYS = {"format", "parent_sha256", "records", "leaves", "awaited"}
"""Keys of a commit that are about bytes, and so about who wrote other records when (`chain`)."""


class Receipt(VersionedRecord):
    """Iteration k of a branch was committed."""

    branch: str
    iteration: int
    commit: str
    """sha256 of what the commit says."""

    @classmethod
    def of(cls, commit: Commit) -> Receipt:
        """Keys at their defaults are left out of the digest: a key that commits get later does not
        change it.

        So are the keys of the chain. A commit that was removed with its parent and made again names
        another parent's bytes.
        """
        said = commit.model_dump(
            mode="json", exclude=PROVENANCE_KEYS | CHAIN_KEYS, exclude_defaults=True
        )
        where = receipt_path(commit.branch, commit.iteration)
        return cls(branch=commit.branch, iteration=commit.iteration, commit=digest(said, where))


class NodeReceipt(VersionedRecord):
    """A node was recorded that no commit names."""

    stage: Stage
    digest: str
    record: str
    """sha256 of what the node says, without `PROVENANCE_KEYS` and keys at their defaults."""

    @classmethod
    def of(cls, node: Node) -> NodeReceipt:
        """The receipt of a node that is in the store."""
        content = node.model_dump(mode="json", exclude=PROVENANCE_KEYS, exclude_defaults=True)
        where = node_receipt_path(node.stage, node.digest)
        return cls(stage=node.stage, digest=node.digest, record=digest(content, where))


class RemovedNode(VersionedRecord):
    """Garbage collection removed a node that a commit may have named."""

    stage: Stage
    digest: str
    sha256_of_record: str
    """sha256 of the record's bytes."""
    weights: str
    """Digest of the state that the node was about."""
    removed: str


class Receipts:
    """The receipts of a store's branches."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def write(self, commit: Commit) -> None:
        """Write the receipt of a commit that is in the store; no error if it is there. Raises:
        ObjectConflict; StoreError."""
        path = receipt_path(commit.branch, commit.iteration)
        self._files.create(path, seal(Receipt.of(commit), path))

    def write_missing(self, commit: Commit) -> None:
        """Write the receipt of a commit that is in the store unless it is there. Raises: as
        `write`."""
        if not self._files.exists(receipt_path(commit.branch, commit.iteration)):
            self.write(commit)

    def write_node(self, node: Node) -> None:
        """Write the receipt of a node that is in the store; no error if there is one. Raises:
        StoreError.

        A receipt of other content stays: somebody removed the node, and it was made again with
        another result. The run continues, and the audit names the difference.
        """
        path = node_receipt_path(node.stage, node.digest)
        with suppress(ObjectConflict):
            self._files.create(path, seal(NodeReceipt.of(node), path))

    def get_node(self, path: str) -> NodeReceipt:
        """The receipt of a node. Raises: ObjectMissing; ObjectCorrupt, also if it is another
        one's."""
        receipt = unseal(NodeReceipt, self._files.read(path), self._files.url(path))
        if node_receipt_path(receipt.stage, receipt.digest) != path:
            found = f"{receipt.stage} {receipt.digest}"
            raise ObjectCorrupt(
                "this is another receipt",
                where=self._files.url(path),
                found=found,
                expected="that of its name",
            )
        return receipt

    def write_removed(self, node: Node, sha256: str) -> None:
        """Write down that a node, whose record has this sha256, is about to be removed. Raises:
        StoreError."""
        path = removed_path(node.stage, node.digest, sha256)
        removed = RemovedNode(
            stage=node.stage,
            digest=node.digest,
            sha256_of_record=sha256,
            weights=node.parents.get("weights", ""),
            removed=now(),
        )
        with suppress(ObjectConflict):  # a removal that was killed half-way, and is done again
            self._files.create(path, seal(removed, path))

    def get_removed(self, path: str) -> RemovedNode:
        """That a node was removed. Raises: ObjectMissing; ObjectCorrupt, also if it is about
        another one."""
        found = unseal(RemovedNode, self._files.read(path), self._files.url(path))
        if removed_path(found.stage, found.digest, found.sha256_of_record) != path:
            said = f"{found.stage} {found.digest}"
            raise ObjectCorrupt(
                "this is another removal",
                where=self._files.url(path),
                found=said,
                expected="that of its name",
            )
        return found

    def was_removed(self, stage: Stage, digest: str, sha256: str) -> bool:
        """True if garbage collection removed a node whose record had this sha256. Raises:
        ObjectCorrupt."""
        try:
            return self.get_removed(removed_path(stage, digest, sha256)).sha256_of_record == sha256
        except ObjectMissing:
            return False

    def find(self, branch: str, iteration: int) -> Receipt | None:
        """The receipt of an iteration, or None. Raises: ObjectCorrupt, also if it is another
        one's."""
        path = receipt_path(branch, iteration)
        try:
            receipt = unseal(Receipt, self._files.read(path), self._files.url(path))
        except ObjectMissing:
            return None
        if (receipt.branch, receipt.iteration) != (branch, iteration):
            found = f"iteration {receipt.iteration} of {receipt.branch}"
            raise ObjectCorrupt(
                "this is another receipt",
                where=self._files.url(path),
                found=found,
                expected="that of its name",
            )
        return receipt

    def refuse_other(self, commit: Commit) -> None:
        """Raises: ObjectConflict if the iteration was committed with another result; to be asked
        while it is not committed."""
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


def node_receipt_path(stage: Stage, digest: str) -> str:
    """Where the receipt of a node lies."""
    return f"receipts/{stage}/{digest}.json"


def removed_path(stage: Stage, digest: str, sha256: str) -> str:
    """Where it is written down that a node was removed, whose record had this sha256."""
    return f"receipts/{stage}/{digest}-{sha256[:16]}.removed.json"
