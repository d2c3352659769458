"""Replay a branch: train every batch again from weight version 0, and compare every state.

A branch's history is divided into spans: train nodes of one configuration.

    span           begins with
    root           the model directory, or the checkpoint of a finished warm start; the spans of
                   the warm start come before
    fork           the checkpoint of its parent's commit; the parent's spans come before

Within a span only the recorded batches and packing plans are read; scores and advantages are taken
as recorded. Between two spans a checkpoint is loaded; the replay compares its state too. A segment
(a state that an earlier replay made on another machine) cannot be trained again. It is loaded from
its checkpoint, compared with its node, and the replay continues from it.

Entry point: `replay`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlpipe.actors.trainer.group import TrainerGroup
from rlpipe.actors.trainer.standalone import standalone_trainer
from rlpipe.config.load import validate_stored
from rlpipe.config.run import RunConfig
from rlpipe.errors import DataError, ObjectMissing
from rlpipe.lineage.stage_inputs import checkpoint_inputs
from rlpipe.lineage.states import Lineage, state_node
from rlpipe.store.branches import Branches
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.types import Commit, Node, Stage


@dataclass(frozen=True)
class Span:
    """Consecutive train nodes of one branch, and the states before and after them."""

    branch: str
    config: RunConfig
    init: str
    """Digest of the branch's init node."""
    first_state: str
    """Digest of the node that made the first state: `init`, or for a fork the parent's state."""
    trains: tuple[Node, ...]
    next_first_state: str | None = None
    """Digest of the state that the next span loads from its checkpoint, if one follows."""


@dataclass(frozen=True)
class ComparedState:
    """The recorded and the replayed digest of one state."""

    branch: str
    stage: str
    version: int
    node: str
    recorded: str
    found: str
    seconds: float

    @property
    def equal(self) -> bool:
        return self.recorded == self.found


@dataclass
class Replay:
    """Result of a replay, which ends with the first difference: later states follow from it."""

    branch: str
    states: list[ComparedState] = field(default_factory=list)

    @property
    def first_difference(self) -> ComparedState | None:
        return next((state for state in self.states if not state.equal), None)

    @property
    def equal(self) -> bool:
        return self.first_difference is None

    def as_json(self) -> dict[str, Any]:
        """Return `{"branch", "equal", "first_difference", "states"}` with plain values."""
        first = self.first_difference
        states = [{**asdict(state), "equal": state.equal} for state in self.states]
        return {
            "branch": self.branch,
            "equal": self.equal,
            "first_difference": asdict(first) if first else None,
            "states": states,
        }


async def replay(
    files: Files,
    branch: str,
    *,
    home: Path,
    on_state: Callable[[ComparedState], None],
    ray_address: str | None = None,
    **options: Any,
) -> Replay:
    """Train all batches of a branch again.

    `on_state` is called for every state. `ray_address`: the Ray to use; None: the run's, `local`:
    one of this process. `options` are Ray options of the ranks. Raises: ObjectMissing,
    ObjectCorrupt, DataError if the history is incomplete; errors of the trainer.
    """
    result = Replay(branch)
    for span in history_spans(files, branch):
        config = _on_ray(span.config, ray_address)
        async with standalone_trainer(
            config, files, home=home, name=f"replay-{branch}", options=options
        ) as trainer:
            await _SpanReplay(files, trainer, span, result, on_state).run()
        if not result.equal:
            break  # later states follow from the different one
    return result


def _on_ray(config: RunConfig, address: str | None) -> RunConfig:
    """Return the configuration with another Ray, whose nodes may have other labels."""
    if address is None:
        return config
    other = {"ray_address": None if address == "local" else address, "trainer_labels": {}}
    return config.model_copy(update={"resources": config.resources.model_copy(update=other)})


def history_spans(files: Files, branch: str) -> list[Span]:
    """Return the spans of a branch's history, oldest first.

    Raises: ObjectMissing, ObjectCorrupt, DataError.
    """
    return _spans(files, branch, list(Branches(files).walk(branch)), None)


def _spans(
    files: Files, branch: str, commits: list[Commit], next_first_state: str | None
) -> list[Span]:
    """Return the spans of these commits, oldest first.

    `commits`: newest first. `next_first_state`: state that the span after these loads.
    """
    branches = Branches(files)
    nodes = Nodes(files)
    spans: list[Span] = []
    while True:
        record = branches.get(branch)
        own = [commit for commit in commits if commit.branch == branch]
        trains = tuple(
            nodes.get(Stage.TRAIN, commit.nodes[Stage.TRAIN]) for commit in reversed(own)
        )
        commits = commits[len(own) :]
        first_state = trains[0].parents["before"] if trains and record.parent else record.init
        if trains or record.parent is None:
            config = validate_stored(record.config)
            spans.append(Span(branch, config, record.init, first_state, trains, next_first_state))
            next_first_state = first_state
        if record.parent is None:
            return [*_warm_start_spans(files, spans[-1]), *reversed(spans)]
        branch = commits[0].branch


def _warm_start_spans(files: Files, root: Span) -> list[Span]:
    """Return the spans of the branch that gave the first weights; [] for a model directory."""
    nodes = Nodes(files)
    branches = Branches(files)
    parents = nodes.get(Stage.INIT, root.init).parents
    start_from = parents.get("start_from")
    adapter = parents.get("adapter")
    source = root.config.start_from
    if adapter is not None:
        weights = adapter
    elif start_from is not None:
        weights = nodes.get(Stage.CHECKPOINT, start_from).parents["weights"]
    else:
        return []
    weights_node = state_node(nodes, weights)
    # commits name the recorded state, and not the segment that replaced it
    recorded = weights_node.parents["weights"] if weights_node.stage is Stage.SEGMENT else weights
    commits = list(branches.walk(source.branch)) if source else []
    while commits and commits[0].nodes[Stage.TRAIN] != recorded:
        commits.pop(0)
    if source is None or not commits:
        raise DataError(
            "the branch that the first weights came from is missing",
            where=f"nodes/init/{root.init}.json",
            found=f"no commit of {source.branch if source else 'any branch'} trained {recorded}",
        )
    # The adapters of a state have no checkpoint that a replay could load and compare.
    return _spans(files, source.branch, commits, weights if adapter is None else None)


class _SpanReplay:
    """Replay of one span, on a trainer that is set up for it."""

    def __init__(
        self,
        files: Files,
        trainer: TrainerGroup,
        span: Span,
        result: Replay,
        on_state: Callable[[ComparedState], None],
    ) -> None:
        self._nodes = Nodes(files)
        self._trainer = trainer
        self._span = span
        self._result = result
        self._on_state = on_state
        self._held = ""

    async def run(self) -> None:
        span = self._span
        if span.first_state == span.init:
            await self._first_weights()
        else:
            # The parent's span has compared this state. Its digest may differ in another layout.
            await self._load(span.first_state)
        for node in span.trains:
            if self._result.equal and (before := node.parents["before"]) != self._held:
                await self._load_and_compare(state_node(self._nodes, before))
            if self._result.equal:
                await self._train(node)
        if self._result.equal and span.next_first_state is not None:
            await self._load_and_compare(state_node(self._nodes, span.next_first_state))

    async def _first_weights(self) -> None:
        start = time.perf_counter()
        node = self._nodes.get(Stage.INIT, self._span.init)
        deadline_s = self._span.config.resources.start_timeout_s
        answer = await self._trainer.initialise(
            node.digest,
            node.parents.get("start_from"),
            node.parents.get("adapter"),
            deadline_s=deadline_s,
        )
        self._compare(node, 0, answer["state_digest"], start)

    async def _train(self, node: Node) -> None:
        start = time.perf_counter()
        answers = await self._trainer.call(
            "train",
            key=node.digest,
            before=node.parents["before"],
            advantage=node.parents["advantage"],
            deadline_s=self._span.config.train.timeout_s,
        )
        self._compare(node, node.outputs["version"], answers[0]["state_digest"], start)

    async def _load_and_compare(self, node: Node) -> None:
        """Load the checkpoint of the held state, or of a segment in its place, and compare it."""
        follows = node.digest == self._held or node.parents.get("weights") == self._held
        if not follows:
            raise DataError(
                "a state of the branch does not follow from the state before",
                where=f"nodes/{node.stage}/{node.digest}.json",
                found=node.parents,
                expected=f"the state of {self._held}, or a segment in its place",
            )
        start = time.perf_counter()
        digest = await self._load(node.digest)
        stage = Stage.SEGMENT if node.stage is Stage.SEGMENT else Stage.CHECKPOINT
        self._compare(node, node.outputs.get("version", 0), digest, start, stage)

    async def _load(self, state: str) -> str:
        """Load the checkpoint of a state; return the digest of the loaded state."""
        checkpoint = self._nodes.find(Stage.CHECKPOINT, checkpoint_inputs(state).digest)
        if checkpoint is None:
            raise ObjectMissing(
                "the checkpoint of a state is missing",
                where=f"state {state}",
                do="audit the store",
            )
        lineage = Lineage(Stage.CHECKPOINT, checkpoint.digest, state, self._span.init)
        answers = await self._trainer.call(
            "restore", lineage=lineage, deadline_s=self._span.config.checkpoint.timeout_s
        )
        self._held = state
        return answers[0]["state_digest"]

    def _compare(
        self, node: Node, version: int, digest: str, start: float, stage: Stage | None = None
    ) -> None:
        self._held = node.digest
        state = ComparedState(
            branch=self._span.branch,
            stage=str(stage or node.stage),
            version=version,
            node=node.digest,
            recorded=node.outputs["state_digest"],
            found=digest,
            seconds=time.perf_counter() - start,
        )
        self._result.states.append(state)
        self._on_state(state)
