"""Are the weights what the record says? Every batch of a branch trained again from weight version
0, in a fresh trainer.

A branch's history is a chain of *legs*: stretches of train nodes of one configuration.

    leg            begins with
    root           the model directory, or what a finished warm start left (whose leg comes before)
    fork           the checkpoint of its parent's commit (whose legs come before)

Along a leg nothing is read but the recorded batches and packing plans. Where one leg ends and the
next begins a checkpoint is loaded; that it holds the state that came out of the replay is one of
the checks. A segment (a state that an earlier replay made on another machine) cannot be had by
training again: it is loaded from its checkpoint, compared with what its node says, and the replay
goes on from there.

Not here: whether the batches are right (`store.audit.verification`), or scores and advantages, which are
read as recorded.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlpipe.actors.trainer.alone import lone_trainer
from rlpipe.actors.trainer.group import TrainerGroup
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
class Leg:
    """Train nodes of one branch, one after the other, and what they begin with."""

    branch: str
    config: RunConfig
    init: str
    """Digest of the init node of the branch."""
    begins: str
    """Digest of the node whose state it begins with: `init`, or of a fork the parent's state."""
    trains: tuple[Node, ...]
    next_begins: str | None = None
    """Digest of the state that the next leg loads from its checkpoint, if there is one."""


@dataclass(frozen=True)
class Compared:
    """One state: as it is recorded and as it came out."""

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
    """What came out. It ends with the first difference: all after it would follow from that one."""

    branch: str
    states: list[Compared] = field(default_factory=list)

    @property
    def first_difference(self) -> Compared | None:
        return next((state for state in self.states if not state.equal), None)

    @property
    def equal(self) -> bool:
        return self.first_difference is None

    def as_json(self) -> dict[str, Any]:
        """`{"branch", "equal", "first_difference", "states"}`, plain values."""
        first = self.first_difference
        states = [{**asdict(state), "equal": state.equal} for state in self.states]
        return {
            "branch": self.branch,
            "equal": self.equal,
            "first_difference": asdict(first) if first else None,
            "states": states,
        }


async def replay(
    files: Files, branch: str, *, home: Path, say: Callable[[Compared], None], **options: Any
) -> Replay:
    """Train everything again. `say` hears of every state; `options` are Ray's for the trainer's
    actors.

    Raises: ObjectMissing, ObjectCorrupt, DataError if the history is not whole; whatever keeps a
    trainer from working.
    """
    result = Replay(branch)
    for leg in legs(files, branch):
        async with lone_trainer(
            leg.config, files, home=home, name=f"replay-{branch}", options=options
        ) as trainer:
            await _Leg(files, trainer, leg, result, say).run()
        if not result.equal:
            break
    return result


def legs(files: Files, branch: str) -> list[Leg]:
    """The legs of a branch's history, oldest first. Raises: ObjectMissing, ObjectCorrupt,
    DataError."""
    return _legs(files, branch, list(Branches(files).walk(branch)), None)


def _legs(files: Files, branch: str, commits: list[Commit], next_begins: str | None) -> list[Leg]:
    """`commits`: newest first. `next_begins`: what the leg after these loads."""
    branches = Branches(files)
    nodes = Nodes(files)
    found: list[Leg] = []
    while True:
        record = branches.get(branch)
        own = [commit for commit in commits if commit.branch == branch]
        trains = tuple(
            nodes.get(Stage.TRAIN, commit.nodes[Stage.TRAIN]) for commit in reversed(own)
        )
        commits = commits[len(own) :]
        begins = trains[0].parents["before"] if trains and record.parent else record.init
        if trains or record.parent is None:
            leg = Leg(
                branch, validate_stored(record.config), record.init, begins, trains, next_begins
            )
            found.append(leg)
            next_begins = begins
        if record.parent is None:
            return [*_warm_start(files, found[-1]), *reversed(found)]
        branch = commits[0].branch


def _warm_start(files: Files, root: Leg) -> list[Leg]:
    """The legs of the branch that the first weights came from."""
    nodes = Nodes(files)
    branches = Branches(files)
    start_from = nodes.get(Stage.INIT, root.init).parents.get("start_from")
    source = root.config.start_from
    if start_from is None:
        return []
    weights = nodes.get(Stage.CHECKPOINT, start_from).parents["weights"]
    made = state_node(nodes, weights)
    recorded = made.parents["weights"] if made.stage is Stage.SEGMENT else weights
    commits = list(branches.walk(source.branch)) if source else []
    while commits and commits[0].nodes[Stage.TRAIN] != recorded:
        commits.pop(0)
    if source is None or not commits:
        raise DataError(
            "the branch that the first weights came from is not there",
            where=f"nodes/init/{root.init}.json",
            found=f"no commit of {source.branch if source else 'any branch'} trained {recorded}",
        )
    return _legs(files, source.branch, commits, weights)


class _Leg:
    """One leg, and the trainer that is set up for it."""

    def __init__(
        self,
        files: Files,
        trainer: TrainerGroup,
        leg: Leg,
        result: Replay,
        say: Callable[[Compared], None],
    ) -> None:
        self._nodes = Nodes(files)
        self._trainer = trainer
        self._leg = leg
        self._result = result
        self._say = say
        self._held = ""

    async def run(self) -> None:
        leg = self._leg
        if leg.begins == leg.init:
            await self._first_weights()
        # checked under the parent's configuration; in another layout the same state has another
        # digest
        else:
            await self._load(leg.begins)
        for node in leg.trains:
            if self._result.equal and (before := node.parents["before"]) != self._held:
                await self._take(state_node(self._nodes, before))
            if self._result.equal:
                await self._train(node)
        if self._result.equal and leg.next_begins is not None:
            await self._take(state_node(self._nodes, leg.next_begins))

    async def _first_weights(self) -> None:
        start = time.perf_counter()
        node = self._nodes.get(Stage.INIT, self._leg.init)
        deadline_s = self._leg.config.resources.start_timeout_s
        made = await self._trainer.initialise(
            node.digest, node.parents.get("start_from"), deadline_s=deadline_s
        )
        self._compare(node, 0, made["state_digest"], start)

    async def _train(self, node: Node) -> None:
        start = time.perf_counter()
        answers = await self._trainer.call(
            "train",
            key=node.digest,
            before=node.parents["before"],
            advantage=node.parents["advantage"],
            deadline_s=self._leg.config.train.timeout_s,
        )
        self._compare(node, node.outputs["version"], answers[0]["state_digest"], start)

    async def _take(self, node: Node) -> None:
        """Go on from the checkpoint of the state that is held, or of a segment in its place: is it
        in there?"""
        follows = node.digest == self._held or node.parents.get("weights") == self._held
        if not follows:
            raise DataError(
                "a state of the branch does not follow from the one before",
                where=f"nodes/{node.stage}/{node.digest}.json",
                found=node.parents,
                expected=f"the state of {self._held}, or a segment in its place",
            )
        start = time.perf_counter()
        digest = await self._load(node.digest)
        self._compare(
            node,
            node.outputs.get("version", 0),
            digest,
            start,
            Stage.SEGMENT if node.stage is Stage.SEGMENT else Stage.CHECKPOINT,
        )

    async def _load(self, state: str) -> str:
        checkpoint = self._nodes.find(Stage.CHECKPOINT, checkpoint_inputs(state).digest)
        if checkpoint is None:
            raise ObjectMissing(
                "the checkpoint of a state is not there",
                where=f"state {state}",
                do="audit the store",
            )
        lineage = Lineage(Stage.CHECKPOINT, checkpoint.digest, state, self._leg.init)
        answers = await self._trainer.call(
            "restore", lineage=lineage, deadline_s=self._leg.config.checkpoint.timeout_s
        )
        self._held = state
        return answers[0]["state_digest"]

    def _compare(
        self, node: Node, version: int, found: str, start: float, stage: Stage | None = None
    ) -> None:
        self._held = node.digest
        recorded = node.outputs["state_digest"]
        seconds = time.perf_counter() - start
        state = Compared(
            self._leg.branch,
            str(stage or node.stage),
            version,
            node.digest,
            recorded,
            found,
            seconds,
        )
        self._result.states.append(state)
        self._say(state)
