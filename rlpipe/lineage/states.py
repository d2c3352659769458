"""Find the shortest way to rebuild a state: a checkpoint, and the batches trained after it.

The node that made a state names it: an init node, a train node, or a segment node. A segment is a
state that a replay made; it has a checkpoint from the start. `lineage_to` walks back from a state
to the newest checkpoint, with two reads for each train node. `Lineages` remembers the last walk,
for a run that publishes every state.

A reference that is refreshed every N iterations is part of the state: weight version v has the
reference of weight version N ⌊v / N⌋ (with `offset` iterations before version 0: of
N ⌊(v + offset) / N⌋ - offset). A checkpoint is a base only if its reference can be loaded as
well: it is its own reference, the reference is the first weights, or the checkpoint of that version
exists. Training the later batches again refreshes the reference at the same iterations.
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
"""Stages whose nodes make a state, the most frequent first."""


@dataclass(frozen=True)
class Reference:
    """A refreshed reference policy: weights of an earlier iteration."""

    checkpoint: str
    """Digest of the checkpoint node that holds the weights."""
    version: int
    """Weight version of the reference."""


@dataclass(frozen=True)
class Lineage:
    """A checkpoint, and the train nodes after it."""

    base_stage: Stage
    base: str
    """Digest of the checkpoint node to load, or of the init node for the first weights."""
    base_state: str
    """Digest of the init, train or segment node that made the state of `base`."""
    init: str
    """Digest of the branch's init node, which made the first reference."""
    replay: tuple[str, ...] = ()
    """Digests of the train nodes to train again, oldest first."""
    segment: str | None = None
    """Name under which the trainer holds a rebuilt state that differs; None: not held."""
    reference: Reference | None = None
    """Reference of `base_state` if it was refreshed; None: the first reference."""

    @property
    def target(self) -> str:
        """Digest of the node that made the last state."""
        return self.replay[-1] if self.replay else self.base_state


def lineage_to(
    nodes: Nodes,
    state: str,
    init: str,
    *,
    ref_update_interval: int | None = None,
    ref_update_offset: int = 0,
) -> Lineage:
    """Return the shortest way to the state of a train, segment or init node.

    `ref_update_interval`: N of the module's docstring, with its offset; None: the reference is
    never refreshed.

    Raises: ObjectMissing if the chain of train nodes does not lead to a checkpoint or to `init`, or
    passes through another configuration, under which the batches cannot be trained again.
    """
    replay: list[Node] = []
    current = state
    while current != init:
        checkpoint = nodes.find(Stage.CHECKPOINT, checkpoint_inputs(current).digest)
        if checkpoint is not None:
            loadable, reference = _reference_of(
                nodes, current, init, ref_update_interval, ref_update_offset
            )
            if loadable:
                return Lineage(
                    Stage.CHECKPOINT,
                    checkpoint.digest,
                    current,
                    init,
                    _oldest_first(replay),
                    reference=reference,
                )
        node = _train_node(nodes, current, state)
        if replay and _train_settings(replay[-1]) != _train_settings(node):
            raise ObjectMissing(
                "a state cannot be rebuilt: the checkpoint where its branch was forked is missing",
                where=f"nodes/checkpoint/{checkpoint_inputs(current).digest}.json",
                found=f"{current}, on the way to {state}, was trained under another configuration",
                do="audit the store; fork again from the same commit",
            )
        replay.append(node)
        current = node.parents["before"]
    # The first weights are not a checkpoint: they are loaded from their model directory again.
    return Lineage(Stage.INIT, init, init, init, _oldest_first(replay))


class Lineages:
    """Find the lineages of one branch, each from the last one where possible.

    This saves the walk when a state follows the last one by at most one iteration. Thread-safe.
    """

    def __init__(
        self,
        nodes: Nodes,
        init: str,
        *,
        ref_update_interval: int | None = None,
        ref_update_offset: int = 0,
    ) -> None:
        self._nodes = nodes
        self._init = init
        self._interval = ref_update_interval
        self._offset = ref_update_offset
        self._last: Lineage | None = None
        self._lock = threading.Lock()

    def to(self, state: str) -> Lineage:
        """Return the lineage of a state, as `lineage_to`.

        If another process recorded a checkpoint since the last walk, the answer may be a longer way
        from an older checkpoint. Raises: as `lineage_to`.
        """
        with self._lock:
            found = self._from_last(state)
            if found is None:
                found = self._last = lineage_to(
                    self._nodes,
                    state,
                    self._init,
                    ref_update_interval=self._interval,
                    ref_update_offset=self._offset,
                )
            return found

    def forget(self) -> None:
        """Forget the last walk: a checkpoint was recorded, so shorter ways may exist."""
        with self._lock:
            self._last = None

    def _from_last(self, state: str) -> Lineage | None:
        last = self._last
        if last is None:
            return None
        from_checkpoint = last.base_stage is Stage.CHECKPOINT
        if from_checkpoint and self._nodes.find(Stage.CHECKPOINT, last.base) is None:
            return None  # garbage collection removed it since
        if state in (states := (last.base_state, *last.replay)):
            return replace(last, replay=last.replay[: states.index(state)])
        node = self._nodes.find(Stage.TRAIN, state)
        if node is None or node.parents["before"] != last.target:
            return None
        if self._nodes.find(Stage.CHECKPOINT, checkpoint_inputs(state).digest) is not None:
            return None
        if last.replay:
            previous = self._nodes.get(Stage.TRAIN, last.target)
            if _train_settings(previous) != _train_settings(node):
                return None
        self._last = replace(last, replay=(*last.replay, state))
        return self._last


def state_node(nodes: Nodes, state: str) -> Node:
    """Return the node that made a state. Raises: ObjectMissing, ObjectCorrupt."""
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
    """Return the node of a state that a replay made, not committed yet.

    `restored`: the answer of the trainer's `restore`.
    """
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
    """Return the weight version of a state. Raises: ObjectMissing, ObjectCorrupt."""
    return int(state_node(nodes, state).outputs.get("version", 0))


def _reference_of(
    nodes: Nodes, state: str, init: str, interval: int | None, offset: int
) -> tuple[bool, Reference | None]:
    """Return whether the reference of a state can be loaded, and the reference if refreshed."""
    if interval is None:
        return True, None
    current = state
    version = weight_version(nodes, state)
    due = (version + offset) // interval * interval - offset
    while due > 0 and version > due and current != init:
        node = state_node(nodes, current)
        if node.stage is not Stage.TRAIN:  # a segment stands for the train node that it replayed
            node = _train_node(nodes, node.parents["weights"], state)
        current = node.parents["before"]
        version = weight_version(nodes, current)
    if due <= 0 or current == init:
        return True, None
    checkpoint = nodes.find(Stage.CHECKPOINT, checkpoint_inputs(current).digest)
    return checkpoint is not None, Reference(checkpoint.digest, due) if checkpoint else None


def _train_settings(node: Node) -> tuple[int, dict[str, Any]]:
    """Return the contract and settings of a train node."""
    return node.contract, node.config


def _oldest_first(replay: list[Node]) -> tuple[str, ...]:
    return tuple(node.digest for node in reversed(replay))


def _train_node(nodes: Nodes, state: str, target: str) -> Node:
    node = nodes.find(Stage.TRAIN, state)
    if node is None and nodes.find(Stage.SEGMENT, state):
        raise ObjectMissing(
            "a state cannot be rebuilt: the checkpoint of a segment is missing",
            where=f"nodes/checkpoint/{checkpoint_inputs(state).digest}.json",
            found=f"needed on the way to {target}; a replay would give other bits",
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
