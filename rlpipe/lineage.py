"""How to get to a state: the newest checkpoint before it, and the train nodes from there on.

Not here: doing it (`actors.trainer`).
"""

from __future__ import annotations

from dataclasses import dataclass

from rlpipe.errors import ObjectMissing
from rlpipe.inputs import checkpoint_inputs
from rlpipe.store.nodes import Nodes
from rlpipe.types import Stage


@dataclass(frozen=True)
class Lineage:
    """A checkpoint, and the train nodes since then, oldest first."""

    base_stage: Stage
    base: str
    """Digest of the init node or checkpoint node to load."""
    base_state: str
    """Digest of the node whose state that is: the init node or a train node."""
    init: str
    """Digest of the branch's init node (the reference policy)."""
    replay: tuple[str, ...] = ()

    @property
    def target(self) -> str:
        """The state at the end."""
        return self.replay[-1] if self.replay else self.base_state


def lineage_to(nodes: Nodes, state: str, init: str) -> Lineage:
    """The shortest way to the state that the train node (or init node) `state` made.

    Raises: ObjectMissing if the chain of train nodes does not lead back to a checkpoint or to `init`.
    """
    replay: list[str] = []
    current = state
    while current != init:
        checkpoint = nodes.find(Stage.CHECKPOINT, checkpoint_inputs(current).digest)
        if checkpoint is not None:
            return Lineage(Stage.CHECKPOINT, checkpoint.digest, current, init, tuple(reversed(replay)))
        replay.append(current)
        current = _before(nodes, current, state)
    return Lineage(Stage.INIT, init, init, init, tuple(reversed(replay)))


def _before(nodes: Nodes, train: str, state: str) -> str:
    node = nodes.find(Stage.TRAIN, train)
    if node is None:
        raise ObjectMissing(
            "a state cannot be rebuilt: a train node of its history is missing",
            where=f"nodes/train/{train}.json",
            found=f"needed on the way to {state}",
            do="audit the store; fork from the newest checkpoint that is complete",
        )
    return node.parents["before"]
