"""Where weights come from, and where a prompt went.

Backward, from the weights after an iteration: the legs of their history (a branch, what it was
forked from, the run whose weights it started with), and for each what was trained, by whose
rewards, with which code, packages, engines and weight versions. Forward, from a prompt: each of its
samples in any branch, the optimizer steps that trained on it, and what descends from them.

Not here: whether the records are true (`store.audit.verification`), or the numbers right (replay).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rlpipe.batch.files import read_packing
from rlpipe.errors import ConfigError, ObjectCorrupt, ObjectMissing
from rlpipe.lineage.stage_inputs import checkpoint_inputs
from rlpipe.lineage.states import state_node
from rlpipe.store.branches import Branch, Branches, commit_name, parse_commit_name
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.store.parquet.shards import read_rows
from rlpipe.store.plans import Plans
from rlpipe.store.segments import Segments, current_state
from rlpipe.store.tables import scalars
from rlpipe.store.tables.scalar_rows import prompt_name
from rlpipe.types import Commit, Node, Stage

MOST_PROMPTS = 50
"""That a piece of text may name."""
SHOWN = (
    "branch",
    "iteration",
    "group_id",
    "index",
    "prompt",
    "status",
    "reward",
    "advantage",
    "trained",
    "drop_reason",
)
"""Of a sample on its way forward."""


@dataclass
class Leg:
    """A branch's own part of a history: its commits, oldest first, and the node of the first
    weights it began with."""

    branch: str
    init: Node
    commits: list[Commit] = field(default_factory=list)

    @property
    def last(self) -> int:
        """Its last iteration that counts; -1 if there is none."""
        return self.commits[-1].iteration if self.commits else -1


class Makers:
    """Which iteration of which branch made the weights of a checkpoint; each branch is read once at
    most, the likely ones first.

    `damaged`: name of each branch that could not be read, and why.
    """

    def __init__(self, files: Files) -> None:
        self._nodes, self._branches = Nodes(files), Branches(files)
        self._unread: list[str] | None = None
        self._places: dict[str, tuple[str, int]] = {}
        self.damaged: dict[str, str] = {}

    def of(self, checkpoint: str) -> tuple[str, int]:
        """Branch and iteration; -1: the first weights of the branch.

        Raises: ObjectMissing if no branch that can be read has made them; ObjectCorrupt.
        """
        node = self._nodes.get(Stage.CHECKPOINT, checkpoint)
        weights = node.parents["weights"]
        state = state_node(self._nodes, weights)
        recorded = state.parents["weights"] if state.stage is Stage.SEGMENT else weights
        if self._unread is None:
            self._unread = self._branches.names()
        folders = {folder for record in node.files for folder in record.path.split("/")}
        self._unread.sort(key=lambda name: (name not in folders, name))
        while recorded not in self._places and self._unread:
            self._read(self._unread.pop(0))
        if recorded not in self._places:
            found = ", ".join(
                [recorded, *(f"{name} cannot be read: {why}" for name, why in self.damaged.items())]
            )
            where = f"nodes/checkpoint/{checkpoint}.json"
            raise ObjectMissing("no branch has made these weights", where=where, found=found)
        return self._places[recorded]

    def _read(self, branch: str) -> None:
        try:
            record = self._branches.get(branch)
            if record.parent is None:
                self._places.setdefault(record.init, (branch, -1))
            for k in self._branches.committed(branch):
                if train := self._branches.read(branch, k).nodes.get(Stage.TRAIN):
                    self._places.setdefault(train, (branch, k))
        except (ObjectMissing, ObjectCorrupt) as error:
            self.damaged[branch] = str(error)


def legs(files: Files, branch: str, iteration: int | None = None) -> list[Leg]:
    """The history of the weights after an iteration (None: the newest), newest leg first, through
    forks and warm starts.

    Raises: ObjectMissing if there is no such branch or commit; ObjectCorrupt.
    """
    branches = Branches(files)
    nodes = Nodes(files)
    makers = Makers(files)
    found: list[Leg] = []
    place: tuple[str, int | None] | None = (branch, iteration)
    while place is not None:
        began = len(found)
        for commit in _back_from(branches, *place):
            if len(found) == began or found[-1].branch != commit.branch:
                found.append(
                    Leg(commit.branch, nodes.get(Stage.INIT, branches.get(commit.branch).init))
                )
            found[-1].commits.insert(0, commit)
        if len(found) == began:
            found.append(Leg(place[0], nodes.get(Stage.INIT, branches.get(place[0]).init)))
        started = found[-1].init.parents.get("start_from")
        place = makers.of(started) if started else None
    return found


def backward(files: Files, branch: str, iteration: int | None = None) -> dict[str, Any]:
    """What made the weights after an iteration (None: the newest), as plain values.

    `weights` (digests of state and checkpoint, version), and `legs`, newest first. Raises: as
    `legs`.
    """
    chain = legs(files, branch, iteration)
    return {"weights": _weights(files, chain[0]), "legs": [_said_of(files, leg) for leg in chain]}


def trained_on(files: Files, branch: str, iteration: int | None = None) -> pa.Table:
    """Every sample that the weights after an iteration were trained on, as rows of
    `scalar_rows.SAMPLES`, oldest first."""
    return pa.concat_tables(
        [_trained(files, leg) for leg in reversed(legs(files, branch, iteration))]
    )


def find_prompts(files: Files, branch: str, text: str) -> dict[str, str]:
    """Prompts of a branch's history that contain a text: name → prompt. Raises: ConfigError if none
    does, or too many do."""
    plans = Plans(files)
    found = {}
    for commit in Branches(files).walk(branch):
        for group in (group for digest in commit.plans for group in plans.read(digest).groups):
            shown = (
                group.prompt
                if isinstance(group.prompt, str)
                else json.dumps(group.prompt, ensure_ascii=False)
            )
            if text in shown:
                found[prompt_name(json.dumps(group.prompt, separators=(",", ":")))] = shown
    if not found or len(found) > MOST_PROMPTS:
        raise ConfigError(
            "no prompt of this run has that text"
            if not found
            else "too many prompts have that text",
            where="prompt",
            found=f"{text!r}: {len(found)} prompts",
            expected=f"at most {MOST_PROMPTS}",
            do="give a piece of the prompt as the samples have it (after the chat template), or a longer one",
        )
    return found


def forward(files: Files, prompts: Sequence[str]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Every sample of these prompts (by name) in any branch, with the optimizer step that trained
    on it; and the branches that cannot be read, each with why.

    Keys: SHOWN of the samples table; `optimizer_step` of the iteration, from 0, and
    `weight_version`, the first that has it, both None if it was not trained. Ordered by branch and
    iteration.
    """
    answer = list[dict[str, Any]]()
    damaged = {}
    for branch in Branches(files).names():
        try:
            rows = scalars.read(files, branch, ancestors=False)
            found = rows.filter(pc.field("prompt").isin(prompts)).to_pylist()
            steps = {
                k: optimizer_steps(files, branch, k)
                for k in {row["iteration"] for row in found if row["trained"]}
            }
            answer += [_forward_row(row, steps) for row in found]
        except (ObjectMissing, ObjectCorrupt) as error:
            damaged[branch] = str(error)
    return sorted(
        answer, key=lambda row: (row["branch"], row["iteration"], row["group_id"], row["index"])
    ), damaged


def descendants(files: Files, first: Mapping[str, int]) -> tuple[list[str], dict[str, str]]:
    """`RUN@K` of each branch's newest weights that descend from those after an iteration of a
    branch (`first`), these branches first; and the branches that cannot be read, each with why.
    Each branch is looked at once."""
    branches = Branches(files)
    makers = Makers(files)
    children: dict[str, list[tuple[str, int]]] = {}
    for name in branches.names():
        try:
            if origin := _began_from(files, branches.get(name), makers):
                children.setdefault(origin[0], []).append((name, origin[1]))
        except (ObjectMissing, ObjectCorrupt) as error:
            makers.damaged[name] = str(error)
    having = dict(first)
    waiting = list(first)
    while waiting:
        origin = waiting.pop()
        for name, k in children.get(origin, ()):
            if k >= having[origin] and having.get(name) != -1:
                having[name] = -1
                waiting.append(name)
    ordered = [*first, *sorted(having.keys() - first.keys())]
    newest = {name: max(branches.committed(name), default="start") for name in ordered}
    return [f"{name}@{newest[name]}" for name in ordered], makers.damaged


def _began_from(files: Files, branch: Branch, makers: Makers) -> tuple[str, int] | None:
    """Branch and iteration whose weights a branch began with; None if they were nobody's."""
    if branch.parent:
        return parse_commit_name(branch.parent)
    started = Nodes(files).get(Stage.INIT, branch.init).parents.get("start_from")
    return makers.of(started) if started else None


def _forward_row(
    row: dict[str, Any], steps: dict[int, dict[tuple[str, int], int]]
) -> dict[str, Any]:
    step = steps[row["iteration"]].get((row["group_id"], row["index"])) if row["trained"] else None
    version = row["iteration"] + 1 if row["trained"] else None
    return {
        **{name: row[name] for name in SHOWN},
        "optimizer_step": step,
        "weight_version": version,
    }


def optimizer_steps(files: Files, branch: str, iteration: int) -> dict[tuple[str, int], int]:
    """(group_id, index) → number of the optimizer step of the iteration that trained on it, from
    0."""
    commit = Branches(files).read(branch, iteration)
    nodes = Nodes(files)
    if Stage.TRAIN not in commit.nodes or Stage.ADVANTAGE not in commit.nodes:
        return {}
    batch = nodes.get(Stage.ADVANTAGE, commit.nodes[Stage.ADVANTAGE])
    train = nodes.get(Stage.TRAIN, commit.nodes[Stage.TRAIN])
    if not batch.files or not train.files:
        return {}
    table = read_rows(files, batch.files, ["group_id", "index"])
    keys = list(zip(table["group_id"].to_pylist(), table["index"].to_pylist(), strict=True))
    steps = read_packing(files, train).steps
    return {
        keys[row]: number
        for number, step in enumerate(steps)
        for rank in step
        for micro in rank
        for row in micro
    }


def _back_from(branches: Branches, branch: str, iteration: int | None) -> Iterator[Commit]:
    commit = (
        branches.newest(branch)
        if iteration is None
        else branches.read(branch, iteration)
        if iteration >= 0
        else None
    )
    while commit is not None:
        yield commit
        commit = branches.read(*parse_commit_name(commit.parent)) if commit.parent else None


def _weights(files: Files, leg: Leg) -> dict[str, Any]:
    nodes = Nodes(files)
    recorded = leg.commits[-1].nodes[Stage.TRAIN] if leg.commits else leg.init.digest
    state = current_state(Segments(files), leg.branch, leg.last + 1, recorded)
    checkpoint = nodes.find(Stage.CHECKPOINT, checkpoint_inputs(state).digest)
    return {
        "branch": leg.branch,
        "iteration": leg.last if leg.commits else None,
        "version": leg.last + 1,
        "node": state,
        "state_digest": state_node(nodes, state).outputs.get("state_digest"),
        "checkpoint": checkpoint.digest if checkpoint else None,
        "files": [record.path for record in checkpoint.files] if checkpoint else [],
    }


def _said_of(files: Files, leg: Leg) -> dict[str, Any]:
    """What there is to say of a leg."""
    rows = _trained(files, leg)
    rewards = rows["reward"].drop_null().to_pylist()
    nodes = Nodes(files)
    rewarded = [
        (c.iteration, nodes.get(Stage.REWARD, c.nodes[Stage.REWARD]))
        for c in leg.commits
        if Stage.REWARD in c.nodes
    ]
    config = Branches(files).config(leg.branch)
    return {
        "branch": leg.branch,
        "commits": [
            commit_name(c.branch, c.iteration) for c in (leg.commits[:1] + leg.commits[-1:])
        ],
        "iterations": len(leg.commits),
        "samples": rows.num_rows,
        "groups": len(set(rows["group_id"].to_pylist())),
        "prompts": len(set(rows["prompt"].to_pylist())),
        "dropped": dict(
            Counter(reason for commit in leg.commits for reason in commit.dropped.values())
        ),
        "reward": sum(rewards) / len(rewards) if rewards else None,
        "rewards": _spans(
            (k, {"function": node.config.get("function"), "hooks": node.hooks})
            for k, node in rewarded
        ),
        "weight_versions": _range(rows["newest_version"]),
        "staleness": _range(rows["staleness"]),
        "engines": sorted(set(rows["engine"].to_pylist()) - {None, ""}),
        "packages": _spans((commit.iteration, commit.packages) for commit in leg.commits),
        "configurations": _spans(
            (commit.iteration, commit.config_digest) for commit in leg.commits
        ),
        "drivers": _spans((commit.iteration, commit.epoch) for commit in leg.commits),
        "code": _hooks(nodes, leg),
        "model": {**leg.init.config, "source": (config.get("model") or {}).get("source")},
    }


def _hooks(nodes: Nodes, leg: Leg) -> dict[str, list[str]]:
    """Path of a function of the user → sha256 of each source that was used."""
    found: dict[str, list[str]] = {}
    for commit in leg.commits:
        for stage, digest in commit.nodes.items():
            for path, sha256 in nodes.get(stage, digest).hooks.items():
                if sha256 not in found.setdefault(path, []):
                    found[path].append(sha256)
    return found


def _trained(files: Files, leg: Leg) -> pa.Table:
    rows = scalars.read(files, leg.branch, ancestors=False)
    return rows.filter(pc.field("trained") & (pc.field("iteration") <= leg.last))


def _range(column: pa.ChunkedArray) -> list[int] | None:
    known = column.drop_null().to_pylist()
    return [min(known), max(known)] if known else None


def _spans(values: Iterable[tuple[int, Any]]) -> list[dict[str, Any]]:
    """Equal values that follow each other, with the first and the last iteration of each."""
    spans: list[dict[str, Any]] = []
    for k, value in values:
        if spans and spans[-1]["value"] == value:
            spans[-1]["iterations"][1] = k
        else:
            spans.append({"iterations": [k, k], "value": value})
    return spans
