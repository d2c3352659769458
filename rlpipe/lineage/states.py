"""How to get to a state: the newest checkpoint before it, and the train nodes from there on.

A state is named by the node that made it: an init node, a train node, or a segment node (a state
that a replay made anew, which has a checkpoint of its own from the start).

A reference that is refreshed every N iterations is part of the state: that of weight version v is
weight version N ⌊v / N⌋. So a base counts only if its reference can be had too: it is its own
reference, the first weights, or that version's checkpoint is there. Training the batches after the
base again refreshes the reference where they did it.

To walk there is two reads for every state since. A run that publishes each of its states goes on
from the way to the one before (`Lineages`). Not here: doing it (`actors.trainer.trainer`,
`actors.trainer.states`).
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlpipe.errors import ObjectMissing
from rlpipe.lineage.stage_inputs import Inputs, checkpoint_inputs
from rlpipe.store.nodes import Nodes
from rlpipe.types import Node, Stage

STATES = (Stage.TRAIN, Stage.SEGMENT, Stage.INIT)
"""The stages whose nodes make a state, the most frequent first."""


@dataclass(frozen=True)
class Reference:
    """A reference policy that is weights of the branch."""

    checkpoint: str
    """Digest of the checkpoint node that holds them."""
    version: int
    """Their weight version."""


@dataclass(frozen=True)
class Lineage:
    """A checkpoint, and the train nodes since then, oldest first."""

    base_stage: Stage
    base: str
    """Digest of the checkpoint node to load, or of the init node: first weights are loaded from
    where they came from."""
    base_state: str
    """Digest of the node whose state that is: the init node, a train node or a segment node."""
    init: str
    """Digest of the branch's init node (the first reference)."""
    replay: tuple[str, ...] = ()
    segment: str | None = None
    """Name under which a state is held that comes out different from the recorded one; None: it is
    not held at all."""
    reference: Reference | None = None
    """The reference of `base_state`, if it has been refreshed; None: the first one."""

    @property
    def target(self) -> str:
        """The state at the end."""
        return self.replay[-1] if self.replay else self.base_state


def lineage_to(
    nodes: Nodes, state: str, init: str, *, ref_update_interval: int | None = None
) -> Lineage:
    """The shortest way to the state that a train node (or segment or init node) made.
    `ref_update_interval`: see the module.

    Raises: ObjectMissing if the chain of train nodes does not lead back to a checkpoint or to
    `init`, or leads through another configuration, under which it could not be trained again.
    """
    replay: list[Node] = []
    current = state
    while current != init:
        checkpoint = nodes.find(Stage.CHECKPOINT, checkpoint_inputs(current).digest)
        if checkpoint is not None:
            there, reference = _reference_of(nodes, current, init, ref_update_interval)
            if there:
                return Lineage(
                    Stage.CHECKPOINT,
                    checkpoint.digest,
                    current,
                    init,
                    _names(replay),
                    reference=reference,
                )
        node = _trained(nodes, current, state)
        if replay and _setting(replay[-1]) != _setting(node):
            raise ObjectMissing(
                "a state cannot be rebuilt: the checkpoint where its branch was forked is missing",
                where=f"nodes/checkpoint/{checkpoint_inputs(current).digest}.json",
                found=f"{current} trained under another configuration than what came after, on the way to {state}",
                do="audit the store; fork again from the same commit",
            )
        replay.append(node)
        current = node.parents["before"]
    return Lineage(Stage.INIT, init, init, init, _names(replay))


class Lineages:
    """The ways to the states of one branch: each found from the last one, if that leads there or
    one step before. Thread-safe."""

    def __init__(self, nodes: Nodes, init: str, *, ref_update_interval: int | None = None) -> None:
        self._nodes = nodes
        self._init = init
        self._interval = ref_update_interval
        self._last: Lineage | None = None
        self._lock = threading.Lock()

    def to(self, state: str) -> Lineage:
        """What `lineage_to` answers. Where another process recorded a checkpoint since, it may be
        the longer way from the one before. Raises: as `lineage_to`."""
        with self._lock:
            found = self._from_last(state)
            if found is None:
                found = self._last = lineage_to(
                    self._nodes, state, self._init, ref_update_interval=self._interval
                )
            return found

    def forget(self) -> None:
        """A checkpoint was recorded: the way from there is shorter, or there is a reference where
        there was none."""
        with self._lock:
            self._last = None

    def _from_last(self, state: str) -> Lineage | None:
        last = self._last
        if last is None or (
            last.base_stage is Stage.CHECKPOINT
            and self._nodes.find(Stage.CHECKPOINT, last.base) is None
        ):
            return None
        if state in (states := (last.base_state, *last.replay)):
            return replace(last, replay=last.replay[: states.index(state)])
        node = self._nodes.find(Stage.TRAIN, state)
        if node is None or node.parents["before"] != last.target:
            return None
        if self._nodes.find(Stage.CHECKPOINT, checkpoint_inputs(state).digest) is not None:
            return None
        if last.replay and _setting(self._nodes.get(Stage.TRAIN, last.target)) != _setting(node):
            return None
        self._last = replace(last, replay=(*last.replay, state))
        return self._last


def state_node(nodes: Nodes, state: str) -> Node:
    """The node that made a state. Raises: ObjectMissing, ObjectCorrupt."""
    found = next((node for stage in STATES if (node := nodes.find(stage, state))), None)
    return found or nodes.get(STATES[0], state)


def segment_node(
    nodes: Nodes,
    inputs: Inputs,
    restored: Mapping[str, Any],
    *,
    version: int,
    packages: Mapping[str, str],
) -> Node:
    """The node of a state that a replay made: what `restore` answered, beside what had been
    recorded. Not committed yet."""
    recorded = nodes.get(Stage.TRAIN, inputs.parents["weights"])
    outputs = {
        "state_digest": restored["state_digest"],
        "recorded": recorded.outputs["state_digest"],
        "version": version,
        "replayed": restored["replayed"],
        "first_difference": restored["mismatch"],
        "packages": dict(packages),
        "host": socket.gethostname(),
    }
    return inputs.node(outputs=outputs)


def weight_version(nodes: Nodes, state: str) -> int:
    """Of a state: the number of iterations trained. Raises: ObjectMissing, ObjectCorrupt."""
    return int(state_node(nodes, state).outputs.get("version", 0))


def _reference_of(
    nodes: Nodes, state: str, init: str, interval: int | None
) -> tuple[bool, Reference | None]:
    """Whether the reference of a state can be loaded, and where it is (None: it is the first
    one)."""
    if interval is None:
        return True, None
    current = state
    version = weight_version(nodes, state)
    due = version // interval * interval
    while due and version > due and current != init:
        made = state_node(nodes, current)
        recorded = (
            made if made.stage is Stage.TRAIN else _trained(nodes, made.parents["weights"], state)
        )
        current = recorded.parents["before"]
        version = weight_version(nodes, current)
    if not due or current == init:
        return True, None
    checkpoint = nodes.find(Stage.CHECKPOINT, checkpoint_inputs(current).digest)
    return checkpoint is not None, Reference(checkpoint.digest, due) if checkpoint else None


def _setting(node: Node) -> tuple[int, dict[str, Any]]:
    """What a train node was trained under."""
    return node.contract, node.config


def _names(replay: list[Node]) -> tuple[str, ...]:
    return tuple(node.digest for node in reversed(replay))


def _trained(nodes: Nodes, state: str, target: str) -> Node:
    node = nodes.find(Stage.TRAIN, state)
    if node is None and nodes.find(Stage.SEGMENT, state):
        raise ObjectMissing(
            "a state cannot be rebuilt: the checkpoint of a segment is missing",
            where=f"nodes/checkpoint/{checkpoint_inputs(state).digest}.json",
            found=f"needed on the way to {target}; training the batches again would give other bits",
            do="audit the store; fork from a commit before it",
        )
    if node is None:
        raise ObjectMissing(
            "a state cannot be rebuilt: a train node of its history is missing",
            where=f"nodes/train/{state}.json",
            found=f"needed on the way to {target}",
            do="audit the store; fork from the newest checkpoint that is complete",
        )
    return node
