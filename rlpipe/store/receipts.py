"""Receipts: evidence that a commit, a checkpoint or an evaluation existed.

    branches/<branch>/receipts/%08d.json     of a commit
    receipts/<stage>/<digest>.json           of a node that no commit names: checkpoint, evaluation
    receipts/<stage>/<digest>-<sha256[:16]>.removed.json
                                             garbage collection removed a node with these bytes

A receipt is written right after its record, and never before it. The chain of digests does not
replace receipts: it fixes the history below a commit, but the newest commit has no successor that
names it. Without a receipt, a branch without its newest commit would look like a branch with a
driver that was killed before that commit. So

    a receipt without its commit    the commit existed and was removed
    a commit without its receipt    its driver was killed between the two; the iteration counts

The next commit writes a missing receipt, so only the newest commit of a branch may have none. The
same holds for checkpoints and evaluations, except that no later write adds their receipts. Garbage
collection removes a receipt before its node. Before it removes a checkpoint of a run that stays, it
records the bytes in question, because a commit may name them.

A receipt covers the result of a commit, but not its writer and time. An iteration that is committed
again with an equal result has an equal receipt.

Entry points: `Receipts`, `Receipt`, `NodeReceipt`.
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
"""Keys of any record in which two records of one result may differ."""
TIMING_KEYS = {"leaves", "awaited"}
"""Keys of a commit that depend on its time. Two commits with equal results differ in them if a
checkpoint was recorded between the two."""
CHAIN_KEYS = TIMING_KEYS | {"format", "parent_sha256", "records"}
"""Keys of a commit that are not its result: its format, and digests of other records' bytes."""


class Receipt(VersionedRecord):
    """Evidence that iteration k of a branch was committed."""

    branch: str
    iteration: int
    commit: str
    """sha256 of the commit's result."""

    @classmethod
    def of(cls, commit: Commit) -> Receipt:
        """Return the receipt of a commit.

        The digest leaves out keys at their defaults, so keys that commits get later do not change
        it. The default of a stored key must therefore never change. It also leaves out the keys of
        the chain: a commit that was removed with its parent and committed again names another
        parent's bytes.
        """
        result = commit.model_dump(
            mode="json", exclude=PROVENANCE_KEYS | CHAIN_KEYS, exclude_defaults=True
        )
        where = receipt_path(commit.branch, commit.iteration)
        return cls(branch=commit.branch, iteration=commit.iteration, commit=digest(result, where))


class NodeReceipt(VersionedRecord):
    """Evidence that a node which no commit names was recorded."""

    stage: Stage
    digest: str
    record: str
    """sha256 of the node without `PROVENANCE_KEYS` and keys at their defaults."""

    @classmethod
    def of(cls, node: Node) -> NodeReceipt:
        """Return the receipt of a node in the store."""
        result = node.model_dump(mode="json", exclude=PROVENANCE_KEYS, exclude_defaults=True)
        where = node_receipt_path(node.stage, node.digest)
        return cls(stage=node.stage, digest=node.digest, record=digest(result, where))


class RemovedNode(VersionedRecord):
    """Record that garbage collection removed a node which a commit may name."""

    stage: Stage
    digest: str
    sha256_of_record: str
    """sha256 of the node's bytes."""
    weights: str
    """Digest of the state that the node belonged to."""
    removed: str


class Receipts:
    """The receipts of a store."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def write(self, commit: Commit) -> None:
        """Write the receipt of a stored commit unless it exists.

        Raises: ObjectConflict if another receipt exists; StoreError.
        """
        path = receipt_path(commit.branch, commit.iteration)
        self._files.create(path, seal(Receipt.of(commit), path))

    def write_missing(self, commit: Commit) -> None:
        """Write the receipt of a stored commit if no receipt exists. Raises: as `write`."""
        if not self._files.exists(receipt_path(commit.branch, commit.iteration)):
            self.write(commit)

    def write_node(self, node: Node) -> None:
        """Write the receipt of a stored node unless one exists. Raises: StoreError."""
        path = node_receipt_path(node.stage, node.digest)
        # A receipt with other content means that the node was removed, and that a later attempt
        # gave another result. The run continues, and the audit reports the difference.
        with suppress(ObjectConflict):
            self._files.create(path, seal(NodeReceipt.of(node), path))

    def get_node(self, path: str) -> NodeReceipt:
        """Return the receipt of a node.

        Raises: ObjectMissing; ObjectCorrupt, also if the record belongs to another node.
        """
        receipt = unseal(NodeReceipt, self._files.read(path), self._files.url(path))
        if node_receipt_path(receipt.stage, receipt.digest) != path:
            raise self._misplaced(path, f"{receipt.stage} {receipt.digest}")
        return receipt

    def write_removed(self, node: Node, sha256: str) -> None:
        """Record that a node is about to be removed. `sha256`: digest of its bytes.

        Raises: StoreError.
        """
        path = removed_path(node.stage, node.digest, sha256)
        removed = RemovedNode(
            stage=node.stage,
            digest=node.digest,
            sha256_of_record=sha256,
            weights=node.parents.get("weights", ""),
            removed=now(),
        )
        # A collection that was killed and started again writes another time.
        with suppress(ObjectConflict):
            self._files.create(path, seal(removed, path))

    def get_removed(self, path: str) -> RemovedNode:
        """Return the record of a removal.

        Raises: ObjectMissing; ObjectCorrupt, also if the record belongs to another node.
        """
        removed = unseal(RemovedNode, self._files.read(path), self._files.url(path))
        if removed_path(removed.stage, removed.digest, removed.sha256_of_record) != path:
            raise self._misplaced(path, f"{removed.stage} {removed.digest}")
        return removed

    def was_removed(self, stage: Stage, digest: str, sha256: str) -> bool:
        """True if garbage collection removed a node with this sha256. Raises: ObjectCorrupt."""
        # The path has only 16 digits of the sha256.
        try:
            return self.get_removed(removed_path(stage, digest, sha256)).sha256_of_record == sha256
        except ObjectMissing:
            return False

    def find(self, branch: str, iteration: int) -> Receipt | None:
        """Return the receipt of an iteration, or None.

        Raises: ObjectCorrupt, also if the record belongs to another iteration.
        """
        path = receipt_path(branch, iteration)
        try:
            receipt = unseal(Receipt, self._files.read(path), self._files.url(path))
        except ObjectMissing:
            return None
        if (receipt.branch, receipt.iteration) != (branch, iteration):
            raise self._misplaced(path, f"iteration {receipt.iteration} of {receipt.branch}")
        return receipt

    def refuse_other(self, commit: Commit) -> None:
        """Refuse a commit that differs from a removed commit of the same iteration.

        Call it while the iteration is not committed. Raises: ObjectConflict.
        """
        receipt = self.find(commit.branch, commit.iteration)
        if receipt is not None and receipt != Receipt.of(commit):
            path = receipt_path(commit.branch, commit.iteration)
            raise ObjectConflict(
                "this iteration was committed before with another result, and that commit is gone",
                where=self._files.url(path),
                found=f"the receipt of a commit {receipt.commit[:16]}",
                expected=f"no receipt, or that of {Receipt.of(commit).commit[:16]}",
                do="restore the commit from a copy, or fork from the commit before it; to abandon "
                "it, remove this receipt",
            )

    def _misplaced(self, path: str, found: str) -> ObjectCorrupt:
        return ObjectCorrupt(
            "the receipt belongs to another record",
            where=self._files.url(path),
            found=found,
            expected="the record of its name",
        )


def receipt_path(branch: str, iteration: int) -> str:
    """Return the path of a commit's receipt."""
    return f"branches/{branch}/receipts/{iteration:08d}.json"


def node_receipt_path(stage: Stage, digest: str) -> str:
    """Return the path of a node's receipt."""
    return f"receipts/{stage}/{digest}.json"


def removed_path(stage: Stage, digest: str, sha256: str) -> str:
    """Return the path of the record that a node with this sha256 was removed."""
    return f"receipts/{stage}/{digest}-{sha256[:16]}.removed.json"
