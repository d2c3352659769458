"""Nodes: the immutable result of a stage, found by the digest of its inputs.

Same inputs, same node: a stage that finds its node has nothing to do. Two attempts at one node may
race; the first record wins and both go on from it, because what it says was computed from the same
inputs.

Not here: what belongs into a stage's config (`Config.identity`) or how a hook's source is hashed
(`rlpipe.config.hooks`).
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
"""Stages about weights, which no commit names and from which nothing is made along the branch. They
have receipts."""


def input_digest(
    stage: Stage,
    parents: Mapping[str, str],
    config: Mapping[str, Any],
    hooks: Mapping[str, str],
    contract: int = 1,
) -> str:
    """sha256 over everything that decides a stage's result. The order of keys does not matter.

    `contract`: version of the stage's contract. Raises: DataError if an input is not JSON.
    """
    parts = {"parents": dict(parents), "config": dict(config), "hooks": dict(hooks)}
    return digest({"stage": str(stage), "contract": contract, **parts}, f"inputs of {stage}")


def refuse_unknown_contract(stage: Stage, version: int, where: str) -> None:
    """Raises: ObjectCorrupt for a version of a stage's contract that this rlpipe does not have."""
    if not 1 <= version <= CONTRACTS[stage]:
        raise ObjectCorrupt(
            f"the contract of the stage {stage} has a version that this rlpipe does not know",
            where=where,
            found=f"contract {version}",
            expected=f"1 to {CONTRACTS[stage]}",
            do="use the version of rlpipe that wrote the store, or a later one",
        )


def node_path(stage: Stage, digest: str) -> str:
    """Where the node of this stage and digest lives."""
    return f"nodes/{stage}/{digest}.json"


class Nodes:
    """The nodes of a store."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def find(self, stage: Stage, digest: str) -> Node | None:
        """The node, or None. One request. Raises: ObjectCorrupt if it is not a node of these
        inputs."""
        try:
            return self.get(stage, digest)
        except ObjectMissing:
            return None

    def get(self, stage: Stage, digest: str) -> Node:
        """The node. Raises: ObjectMissing; ObjectCorrupt if it is not a node of these inputs."""
        path = node_path(stage, digest)
        node = unseal(Node, self._files.read(path), self._files.url(path))
        refuse_unknown_contract(node.stage, node.contract, self._files.url(path))
        found = input_digest(node.stage, node.parents, node.config, node.hooks, node.contract)
        if node.stage != stage or not node.digest == digest == found:
            found = f"{node.stage}/{node.digest} with inputs {found}"
            raise ObjectCorrupt(
                "this is another node",
                where=self._files.url(path),
                found=found,
                expected=f"{stage}/{digest}",
            )
        return node

    def commit(self, node: Node) -> Node:
        """Record a node once its files are written; returns the one that counts: ours, or that of
        whoever was first.

        `attempt` and `created` are filled in if they are empty; compare `attempt` to see who won.
        Raises: ValueError if the digest is not that of the inputs; DataError if outputs are not
        JSON.
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
            node = self.get(node.stage, node.digest)
        if node.stage in LEAVES:
            Receipts(self._files).write_node(node)
        return node
