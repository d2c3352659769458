"""Trace weights back to their batches, and prompts forward to the weights that trained on them.

`backward` starts from the weights after an iteration. It returns the branches of their history (the
branch, its parent, the run whose weights it started with) and for each of them the batches,
verifiers, code, packages, engines and weight versions. `forward` starts from a prompt.
It returns each sample of it in any branch, with the optimizer step that trained on it.
`descendants` returns the newest weights that descend from an iteration.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rlpipe.batch.files import read_keys, read_packing
from rlpipe.errors import ConfigError, ObjectCorrupt, ObjectMissing
from rlpipe.lineage.continuation import changed_settings
from rlpipe.lineage.stage_inputs import checkpoint_inputs
from rlpipe.lineage.states import state_node
from rlpipe.store.branches import Branch, Branches, commit_name, parse_commit_name
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.store.plans import Plans
from rlpipe.store.segments import Segments, current_state
from rlpipe.store.tables import scalars
from rlpipe.store.tables.scalar_rows import prompt_name
from rlpipe.types import Commit, FileRecord, Node, Stage

MAX_PROMPTS = 50
"""Prompts that one search may return."""
FORWARD_COLUMNS = (
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
"""Columns of the samples table in the answer of `forward`."""


@dataclass
class BranchPart:
    """The commits of one branch in a history, oldest first, and the node of its first weights."""

    branch: str
    init: Node
    commits: list[Commit] = field(default_factory=list)

    @property
    def last(self) -> int:
        """Last iteration of the part; -1 for a part without commits."""
        return self.commits[-1].iteration if self.commits else -1


class Origins:
    """Find the branch and iteration that made first weights of other branches.

    Each branch is read at most once; branches that the checkpoint's files name are read first.
    `damaged`: branch → reason, for branches that cannot be read.
    """

    def __init__(self, files: Files) -> None:
        self._nodes = Nodes(files)
        self._branches = Branches(files)
        self._unread: list[str] | None = None
        self._made_by: dict[str, tuple[str, int]] = {}
        self.damaged: dict[str, str] = {}

    def of(self, init: Node) -> tuple[str, int] | None:
        """Return branch and iteration of a node's first weights; None for those of a model.

        The iteration is -1 for the first weights of the branch. Raises: ObjectMissing if no
        readable branch made these weights; ObjectCorrupt.
        """
        if adapter := init.parents.get("adapter"):
            return self._found(adapter, f"nodes/train/{adapter}.json", ())
        checkpoint = init.parents.get("start_from")
        if checkpoint is None:
            return None
        node = self._nodes.get(Stage.CHECKPOINT, checkpoint)
        weights = node.parents["weights"]
        state = state_node(self._nodes, weights)
        recorded = state.parents["weights"] if state.stage is Stage.SEGMENT else weights
        return self._found(recorded, f"nodes/checkpoint/{checkpoint}.json", node.files)

    def _found(self, recorded: str, where: str, files: Sequence[FileRecord]) -> tuple[str, int]:
        """Return branch and iteration of a train or init node. `files` name likely branches."""
        if self._unread is None:
            self._unread = self._branches.names()
        folders = {folder for record in files for folder in record.path.split("/")}
        self._unread.sort(key=lambda name: (name not in folders, name))
        while recorded not in self._made_by and self._unread:
            self._read(self._unread.pop(0))
        if recorded not in self._made_by:
            unreadable = [f"{name} cannot be read: {why}" for name, why in self.damaged.items()]
            raise ObjectMissing(
                "no branch has made these weights",
                where=where,
                found=", ".join([recorded, *unreadable]),
            )
        return self._made_by[recorded]

    def _read(self, branch: str) -> None:
        try:
            record = self._branches.get(branch)
            if record.parent is None:
                self._made_by.setdefault(record.init, (branch, -1))
            for k in self._branches.committed(branch):
                if train := self._branches.read(branch, k).nodes.get(Stage.TRAIN):
                    self._made_by.setdefault(train, (branch, k))
        except (ObjectMissing, ObjectCorrupt) as error:
            self.damaged[branch] = str(error)


def branch_parts(files: Files, branch: str, iteration: int | None = None) -> list[BranchPart]:
    """Return the history of the weights after an iteration (None: the newest), by branch.

    The newest branch is first. The history passes through forks and warm starts. Raises:
    ObjectMissing if the branch or the commit does not exist; ObjectCorrupt.
    """
    branches = Branches(files)
    nodes = Nodes(files)
    origins = Origins(files)

    def new_part(name: str) -> BranchPart:
        return BranchPart(name, nodes.get(Stage.INIT, branches.get(name).init))

    found: list[BranchPart] = []
    origin: tuple[str, int | None] | None = (branch, iteration)
    while origin is not None:
        first = len(found)
        for commit in _back_from(branches, *origin):
            if len(found) == first or found[-1].branch != commit.branch:
                found.append(new_part(commit.branch))
            found[-1].commits.insert(0, commit)
        if len(found) == first:  # weights before the first iteration
            found.append(new_part(origin[0]))
        origin = origins.of(found[-1].init)
    return found


def backward(files: Files, branch: str, iteration: int | None = None) -> dict[str, Any]:
    """Return what made the weights after an iteration (None: the newest), as plain values.

    Keys: `weights` (version, digests of state and checkpoint) and `branches`, newest first. Raises:
    as `branch_parts`.
    """
    chain = branch_parts(files, branch, iteration)
    return {
        "weights": _weights(files, chain[0]),
        "branches": [_part_values(files, part) for part in chain],
    }


def trained_on(files: Files, branch: str, iteration: int | None = None) -> pa.Table:
    """Return every sample that trained the weights after an iteration, oldest first.

    The columns are those of the SQL table `samples`.
    """
    return pa.concat_tables(
        [_trained(files, part) for part in reversed(branch_parts(files, branch, iteration))]
    )


def find_prompts(files: Files, branch: str, text: str) -> dict[str, str]:
    """Return the prompts of a branch's history that contain a text: name → prompt.

    Raises: ConfigError if no prompt or too many prompts contain it.
    """
    plans = Plans(files)
    found = {}
    for commit in Branches(files).walk(branch):
        for group in (group for digest in commit.plans for group in plans.read(digest).groups):
            prompt = group.prompt
            shown = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)
            if text in shown:
                found[prompt_name(json.dumps(prompt, separators=(",", ":")))] = shown
    if not found or len(found) > MAX_PROMPTS:
        raise ConfigError(
            "too many prompts have that text" if found else "no prompt of this run has that text",
            where="prompt",
            found=f"{text!r}: {len(found)} prompts",
            expected=f"at most {MAX_PROMPTS}",
            do="give a piece of the prompt as the samples have it (after the chat template), or a "
            "longer piece",
        )
    return found


def forward(files: Files, prompts: Sequence[str]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return every sample of these prompts (by name) in any branch, and the unreadable branches.

    Keys of a sample: FORWARD_COLUMNS, `optimizer_step` (of the iteration, from 0) and
    `weight_version` (the first that trained on the sample); both are None for a sample that was not
    trained. Samples are sorted by branch and iteration. Unreadable branches: name → reason.
    """
    samples: list[dict[str, Any]] = []
    damaged = {}
    for branch in Branches(files).names():
        try:
            table = scalars.read(files, branch, ancestors=False)
            rows = table.filter(pc.field("prompt").isin(prompts)).to_pylist()
            trained = {row["iteration"] for row in rows if row["trained"]}
            steps = {k: optimizer_steps(files, branch, k) for k in trained}
            samples += [_forward_row(row, steps) for row in rows]
        except (ObjectMissing, ObjectCorrupt) as error:
            damaged[branch] = str(error)
    samples.sort(key=lambda row: (row["branch"], row["iteration"], row["group_id"], row["index"]))
    return samples, damaged


def descendants(files: Files, first: Mapping[str, int]) -> tuple[list[str], dict[str, str]]:
    """Return `RUN@K` of the newest weights of each descending branch, and the unreadable branches.

    `first`: branch → iteration from which weights descend; these branches come first. Each branch
    is read once. Unreadable branches: name → reason.
    """
    branches = Branches(files)
    origins = Origins(files)
    children: dict[str, list[tuple[str, int]]] = {}
    for name in branches.names():
        try:
            if origin := _began_from(files, branches.get(name), origins):
                children.setdefault(origin[0], []).append((name, origin[1]))
        except (ObjectMissing, ObjectCorrupt) as error:
            origins.damaged[name] = str(error)
    descends_from = dict(first)  # branch → first iteration that descends; -1: all of it
    waiting = list(first)
    while waiting:
        origin = waiting.pop()
        for name, k in children.get(origin, ()):
            if k >= descends_from[origin] and descends_from.get(name) != -1:
                descends_from[name] = -1
                waiting.append(name)
    ordered = [*first, *sorted(descends_from.keys() - first.keys())]
    newest = {name: max(branches.committed(name), default="start") for name in ordered}
    return [f"{name}@{newest[name]}" for name in ordered], origins.damaged


def _began_from(files: Files, branch: Branch, origins: Origins) -> tuple[str, int] | None:
    """Return the branch and iteration whose weights a branch began with; None for a model."""
    if branch.parent:
        return parse_commit_name(branch.parent)
    return origins.of(Nodes(files).get(Stage.INIT, branch.init))


def _forward_row(
    row: dict[str, Any], steps: dict[int, dict[tuple[str, int], int]]
) -> dict[str, Any]:
    values = {name: row[name] for name in FORWARD_COLUMNS}
    if not row["trained"]:
        return {**values, "optimizer_step": None, "weight_version": None}
    step = steps[row["iteration"]].get((row["group_id"], row["index"]))
    return {**values, "optimizer_step": step, "weight_version": row["iteration"] + 1}


def optimizer_steps(files: Files, branch: str, iteration: int) -> dict[tuple[str, int], int]:
    """Return (group_id, index) → optimizer step of the iteration that trained on it, from 0."""
    commit = Branches(files).read(branch, iteration)
    nodes = Nodes(files)
    if Stage.TRAIN not in commit.nodes or Stage.ADVANTAGE not in commit.nodes:
        return {}
    batch = nodes.get(Stage.ADVANTAGE, commit.nodes[Stage.ADVANTAGE])
    train = nodes.get(Stage.TRAIN, commit.nodes[Stage.TRAIN])
    if not batch.files or not train.files:
        return {}
    keys = read_keys(files, batch)
    steps = read_packing(files, train).steps
    return {
        keys[row]: number
        for number, step in enumerate(steps)
        for rank in step
        for micro in rank
        for row in micro
    }


def _back_from(branches: Branches, branch: str, iteration: int | None) -> Iterator[Commit]:
    if iteration is None:
        commit = branches.newest(branch)
    else:
        commit = branches.read(branch, iteration) if iteration >= 0 else None
    while commit is not None:
        yield commit
        commit = branches.read(*parse_commit_name(commit.parent)) if commit.parent else None


def _weights(files: Files, part: BranchPart) -> dict[str, Any]:
    nodes = Nodes(files)
    recorded = part.commits[-1].nodes[Stage.TRAIN] if part.commits else part.init.digest
    state = current_state(Segments(files), part.branch, part.last + 1, recorded)
    checkpoint = nodes.find(Stage.CHECKPOINT, checkpoint_inputs(state).digest)
    return {
        "branch": part.branch,
        "iteration": part.last if part.commits else None,
        "version": part.last + 1,
        "node": state,
        "state_digest": state_node(nodes, state).outputs.get("state_digest"),
        "checkpoint": checkpoint.digest if checkpoint else None,
        "files": [record.path for record in checkpoint.files] if checkpoint else [],
    }


def _part_values(files: Files, part: BranchPart) -> dict[str, Any]:
    rows = _trained(files, part)
    rewards = rows["reward"].drop_null().to_pylist()
    nodes = Nodes(files)
    rewarded = [
        (c.iteration, nodes.get(Stage.REWARD, c.nodes[Stage.REWARD]))
        for c in part.commits
        if Stage.REWARD in c.nodes
    ]
    branch = Branches(files).get(part.branch)
    return {
        "branch": part.branch,
        "forked_from": branch.parent,
        "changed": _changed_from_parent(files, branch),
        "commits": [
            commit_name(c.branch, c.iteration) for c in (part.commits[:1] + part.commits[-1:])
        ],
        "iterations": len(part.commits),
        "samples": rows.num_rows,
        "groups": len(set(rows["group_id"].to_pylist())),
        "prompts": len(set(rows["prompt"].to_pylist())),
        "dropped": dict(
            Counter(reason for commit in part.commits for reason in commit.dropped.values())
        ),
        "reward": sum(rewards) / len(rewards) if rewards else None,
        "rewards": _spans(
            (k, {"function": node.config.get("function"), "hooks": node.hooks})
            for k, node in rewarded
        ),
        "weight_versions": _range(rows["newest_version"]),
        "staleness": _range(rows["staleness"]),
        "engines": sorted(set(rows["engine"].to_pylist()) - {None, ""}),
        "packages": _spans((commit.iteration, commit.packages) for commit in part.commits),
        "configurations": _spans(
            (commit.iteration, commit.config_digest) for commit in part.commits
        ),
        "drivers": _spans((commit.iteration, commit.epoch) for commit in part.commits),
        "code": _hooks(nodes, part),
        "first_weights": {
            **{key: value for key, value in part.init.config.items() if key != "optimizer"},
            "source": (branch.config.get("model") or {}).get("source"),
        },
        "sources": part.init.outputs.get("sources", {}),
    }


def _changed_from_parent(files: Files, branch: Branch) -> dict[str, str]:
    """Return the settings of a fork that differ from its parent's; empty for other runs."""
    if branch.parent is None:
        return {}
    parent, _ = parse_commit_name(branch.parent)
    return changed_settings(Branches(files).config(parent), branch.config)


def _hooks(nodes: Nodes, part: BranchPart) -> dict[str, list[str]]:
    """Return path of a user function → sha256 of each source that was used."""
    found: dict[str, list[str]] = {}
    for commit in part.commits:
        for stage, digest in commit.nodes.items():
            for path, sha256 in nodes.get(stage, digest).hooks.items():
                if sha256 not in found.setdefault(path, []):
                    found[path].append(sha256)
    return found


def _trained(files: Files, part: BranchPart) -> pa.Table:
    rows = scalars.read(files, part.branch, ancestors=False)
    return rows.filter(pc.field("trained") & (pc.field("iteration") <= part.last))


def _range(column: pa.ChunkedArray) -> list[int] | None:
    known = column.drop_null().to_pylist()
    return [min(known), max(known)] if known else None


def _spans(values: Iterable[tuple[int, Any]]) -> list[dict[str, Any]]:
    """Return runs of equal values, each with its first and last iteration."""
    spans: list[dict[str, Any]] = []
    for k, value in values:
        if spans and spans[-1]["value"] == value:
            spans[-1]["iterations"][1] = k
        else:
            spans.append({"iterations": [k, k], "value": value})
    return spans
