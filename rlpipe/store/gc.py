"""Garbage: what no branch reaches.

Reached are all branches and their commits, the plans and nodes they name, their parents, and the files of those nodes.
Checkpoints and evaluations of reached weights are reached too: they are recorded beside the commits, some after them. Kept as
well is what a branch may still adopt when it goes on: plans of iterations it has not committed, their finished groups, and
nodes grown from them. So a crashed run loses nothing, however long it lies. All else goes once it is older than
the grace period, which must outlast a re-scoring (its nodes are bound to no plan) and a checkpoint's upload. Of who drives a
branch only the renewals of leases go, all but the one that counts.

Listing comes first and reading the branches second: what is committed in between was either young or is seen. Who deletes holds
all branches meanwhile (`nobody_at_work`): a run that goes on, or begins, may take in what has lain there as garbage until then.
Not here: parts of S3 uploads that were killed (a bucket's lifecycle rule), and anything outside the store's own folders.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from rlpipe.store.branches import Branches, config_path
from rlpipe.store.epochs import Epochs, superseded
from rlpipe.store.files import Files
from rlpipe.store.local import Entry
from rlpipe.store.nodes import Nodes
from rlpipe.store.notes import noted, noted_iterations
from rlpipe.store.plans import Plans, plan_path
from rlpipe.store.segments import Segments
from rlpipe.types import Node, Stage

FOLDERS = ("nodes", "plans", "data", "checkpoints")
"""In the order of removal: a record goes before what it names."""
LEAVES = (Stage.CHECKPOINT, Stage.EVAL)
"""Stages about weights, from which nothing is made along the branch."""


def unreachable(files: Files, grace_s: float, leaving: Collection[str] = ()) -> list[str]:
    """Names of all objects that may go: reached by nothing and older than the grace period (seconds).

    `leaving`: records that are about to be removed (`retention`), and reach nothing any more.
    Raises: ObjectMissing, ObjectCorrupt if a record cannot be read: who knows what it reaches, so nothing may go.
    """
    now = time.time()
    entries = [entry for folder in FOLDERS for entry in files.entries(folder)]
    reached = _Reached(files, {entry.path for entry in entries}, leaving)
    records = list(files.entries("branches"))
    renewals = superseded(entry.path for entry in records)
    candidates = [
        *files.entries(temporary=True),
        *(entry for entry in entries if entry.path not in reached.paths),
        *(entry for entry in records if entry.path in renewals),
    ]
    return sorted((entry.path for entry in _older(candidates, now - grace_s)), key=_removal_order)


@contextmanager
def nobody_at_work(files: Files) -> Iterator[None]:
    """Hold every branch for as long as the block takes, so that no driver goes on with one.

    Raises: Fenced if one is driven now. Not held are branches that begin meanwhile: start no run.
    """
    epochs = Epochs(files)
    with ExitStack() as held:
        for branch in Branches(files).names():
            epoch = epochs.acquire(branch)
            held.callback(epoch.release)
            epoch.keep()
        yield


def collect(files: Files, grace_s: float, *, dry_run: bool) -> list[str]:
    """Remove what `unreachable` names, or only say what would go. Killed half-way it can simply be run again."""
    paths = unreachable(files, grace_s)
    if not dry_run:
        remove(files, paths)
    return paths


def remove(files: Files, paths: Sequence[str], say: Callable[[int, int], object] | None = None) -> None:
    """Remove objects, in this order. `say` is told how many are done, and of how many."""
    for number, path in enumerate(paths, start=1):
        files.delete(path)
        if say is not None:
            say(number, len(paths))


class _Reached:
    """The closure over one listing of the store: `paths` may not go."""

    def __init__(self, files: Files, names: set[str], leaving: Collection[str] = ()) -> None:
        self._files, self._nodes, self._plans, self._branches = files, Nodes(files), Plans(files), Branches(files)
        self._homes = {_digest(name): name for name in names.difference(leaving) if name.startswith("nodes/")}
        self._next: dict[str, int] = {}
        self.paths: set[str] = set()
        for branch in self._branches.names():
            if config_path(branch) not in leaving:
                self._add_branch(branch)
        plans = {name.split("/")[1] for name in names if name.startswith("plans/") and name.endswith("/plan.json")}
        self._add_pending({digest for digest in plans if self._is_open(digest)})
        self._add_leaves()

    def _add_branch(self, branch: str) -> None:
        self._add(self._branches.get(branch).init)
        newest = self._branches.newest(branch)
        self._next[branch] = newest.iteration + 1 if newest else 0
        for commit in self._branches.walk(branch):
            if commit.branch != branch:
                break  # the rest is another branch's own
            self.paths.update(map(plan_path, commit.plans))
            self._add(*commit.nodes.values())
        self._add(*(segment.segment for segment in Segments(self._files).of(branch)))
        for k in noted_iterations(self._files, branch):
            for stage, digest in noted(self._files, branch, k).items():
                self._add_noted(stage, digest)

    def _add_noted(self, stage: Stage, digest: str) -> None:
        """A node of an iteration that was sampled or reprocessed, but not trained; with the scores that a filter chose by."""
        self._add(digest)
        if stage is Stage.ROLLOUT and digest in self._homes:
            config = self._read(self._homes[digest]).config
            self._add(*(config[key] for key in ("of", "judged_by") if key in config))

    def _add(self, *digests: str) -> None:
        """Nodes (or plans) of these digests, with all they were made of."""
        waiting = list(digests)
        while waiting:
            digest = waiting.pop()
            path = self._homes.get(digest, plan_path(digest))
            if path not in self.paths and digest in self._homes:
                node = self._read(path)
                waiting.extend(node.parents.values())
                self.paths.update(record.path for record in node.files)
            self.paths.add(path)

    def _add_pending(self, growing: set[str]) -> None:
        """Open plans, their rows, and the nodes that grew from them."""
        for digest in growing:
            self.paths.add(plan_path(digest))
            for folder in (Plans.groups_prefix(digest), Plans.cut_prefix(digest)):
                self.paths.update(self._files.list(folder))
        loose = {path: self._read(path) for path in self._homes.values() if path not in self.paths}
        while grown := [path for path, node in loose.items() if growing & set(node.parents.values())]:
            for digest in [loose.pop(path).digest for path in grown]:
                growing.add(digest)
                self._add(digest)

    def _add_leaves(self) -> None:
        """Checkpoints and evaluations of weights that are reached."""
        for digest, path in self._homes.items():
            if path.split("/")[1] in LEAVES and path not in self.paths:
                parents = self._read(path).parents.values()
                if all(self._homes.get(parent) in self.paths for parent in parents):
                    self._add(digest)

    def _is_open(self, digest: str) -> bool:
        """Is it the plan of an iteration that its branch has still to commit?"""
        if plan_path(digest) in self.paths:
            return False
        plan = self._plans.read(digest)
        return plan.branch in self._next and plan.iteration >= self._next[plan.branch]

    def _read(self, path: str) -> Node:
        return self._nodes.get(Stage(path.split("/")[1]), _digest(path))


def _digest(path: str) -> str:
    return path.rsplit("/", 1)[1].removesuffix(".json")


def _older(entries: Iterable[Entry], before_s: float) -> Iterable[Entry]:
    return (entry for entry in entries if entry.modified_s < before_s)


def _removal_order(path: str) -> tuple[int, str]:
    folder = path.split("/")[0]
    return (FOLDERS.index(folder) if folder in FOLDERS else len(FOLDERS), path)
