"""Nodes: immutable results of stages, each named by the digest of its inputs.

Equal inputs give the same node, so a stage that finds its node has nothing to do. If two attempts
write one node, the first record wins. Both attempts continue with that record, because both
results come from the same inputs. `Config.identity` selects the keys of a stage's config.

Entry points: `Nodes`, `input_digest`, `node_path`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from rlpipe.errors import ObjectConflict, ObjectCorrupt, ObjectMissing
from rlpipe.store.objects.files import Files
from rlpipe.store.receipts import Receipts
from rlpipe.store.records import digest, now, seal, unseal
from rlpipe.types import CONTRACTS, Node, Stage

LEAVES = (Stage.CHECKPOINT, Stage.EVAL)
"""Stages about weights. Commits do not name their nodes, so these nodes have receipts."""


def input_digest(
    stage: Stage,
    parents: Mapping[str, str],
    config: Mapping[str, Any],
    hooks: Mapping[str, str],
    contract: int = 1,
) -> str:
    """Return the sha256 of all inputs that decide a stage's result.

    The order of keys does not matter. `contract`: version of the stage's contract. Raises:
    DataError if an input is not JSON.
    """
    parts = {"parents": dict(parents), "config": dict(config), "hooks": dict(hooks)}
    return digest({"stage": str(stage), "contract": contract, **parts}, f"inputs of {stage}")


def checkpoint_digest(weights: str) -> str:
    """Return the digest of the checkpoint node of a state. `weights`: digest of its node."""
    return input_digest(Stage.CHECKPOINT, {"weights": weights}, {}, {})


def refuse_unknown_contract(stage: Stage, version: int, where: str) -> None:
    """Refuse a version of a stage's contract that this rlpipe does not have.

    Raises: ObjectCorrupt.
    """
    if not 1 <= version <= CONTRACTS[stage]:
        raise ObjectCorrupt(
            f"this version of rlpipe does not know the contract of the stage {stage}",
            where=where,
            found=f"contract {version}",
            expected=f"1 to {CONTRACTS[stage]}",
            do="use the version of rlpipe that wrote the store, or a later one",
        )


def node_path(stage: Stage, digest: str) -> str:
    """Return the path of a node's record."""
    return f"nodes/{stage}/{digest}.json"


class Nodes:
    """The nodes of a store."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def find(self, stage: Stage, digest: str) -> Node | None:
        """Return the node, or None if it is missing. Costs one request.

        Raises: ObjectCorrupt if the record belongs to other inputs.
        """
        try:
            return self.get(stage, digest)
        except ObjectMissing:
            return None

    def get(self, stage: Stage, digest: str) -> Node:
        """Return the node.

        Raises: ObjectMissing; ObjectCorrupt if the record belongs to other inputs.
        """
        path = node_path(stage, digest)
        url = self._files.url(path)
        node = unseal(Node, self._files.read(path), url)
        refuse_unknown_contract(node.stage, node.contract, url)
        inputs = input_digest(node.stage, node.parents, node.config, node.hooks, node.contract)
        if node.stage != stage or not node.digest == digest == inputs:
            raise ObjectCorrupt(
                "the record belongs to another node",
                where=url,
                found=f"{node.stage}/{node.digest} with inputs {inputs}",
                expected=f"{stage}/{digest}",
            )
        return node

    def commit(self, node: Node) -> Node:
        """Record a node after its files are written, and return the record that counts.

        The result is this node, or the node of an earlier writer: compare `attempt`. Empty
        `attempt` and `created` are filled in. Raises: ValueError if the digest does not match the
        inputs; DataError if the outputs are not JSON.
        """
        expected = input_digest(node.stage, node.parents, node.config, node.hooks, node.contract)
        if node.digest != expected:
            raise ValueError(
                f"{node.stage} node: digest {node.digest} is not that of its inputs, {expected}"
            )
        node = node.model_copy(
            update={"attempt": node.attempt or uuid4().hex[:12], "created": node.created or now()}
        )
        path = node_path(node.stage, node.digest)
        try:
            self._files.create(path, seal(node, path))
        except ObjectConflict:
            # Times and attempts differ, and so do samples. The first record counts for both.
            node = self.get(node.stage, node.digest)
        if node.stage in LEAVES:
            # Also after a conflict: the first writer may have been killed before its receipt.
            Receipts(self._files).write_node(node)
        return node
