"""Garbage: what no branch reaches.

Reached are all branches and their commits, the plans and nodes they name, their parents, and the
files of those nodes. Checkpoints and evaluations of reached weights are reached too: they are
recorded beside the commits, some after them. Kept as well is what a branch may still adopt when it
goes on: plans of iterations it has not committed, their finished groups, and nodes grown from them.
So a crashed run loses nothing, however long it lies. All else goes once it is older than the grace
period, which must outlast a checkpoint's upload: draws of plans that go, and what is left of a run
whose removal was killed, too. Of who drives a branch only the renewals of leases go, all but the
one that counts; the epochs of a run that was removed stay, half a kilobyte each, so that a driver
that slept meanwhile is refused.

Garbage may be adopted by whoever begins: its inputs are the same as then. So nothing is removed
beside a driver. Who removes is alone in the store (`Epochs.exclusive`): it is refused while anyone
drives a branch, whoever begins meanwhile is refused, and it asks before every single removal
whether that still holds. The promise: what a commit names is there. The window: a collector whose
machine stands still for longer than its lease, between that question and the request after it,
removes that one object.

Listing comes first and reading the branches second: what is committed in between was either young
or is seen. Not here: parts of S3 uploads that were killed (a bucket's lifecycle rule), and anything
outside the store's own folders.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence

from rlpipe.errors import ObjectMissing
from rlpipe.store.branches import Branches, config_path, is_commit
from rlpipe.store.epochs import EPOCH_NAME, superseded_renewals
from rlpipe.store.nodes import LEAVES, Nodes, node_path
from rlpipe.store.notes import noted_iterations, read_note
from rlpipe.store.objects.files import Files
from rlpipe.store.objects.local import Entry
from rlpipe.store.plans import Plans, plan_path
from rlpipe.store.receipts import NODE_RECEIPT_NAME, REMOVAL_NAME, Receipts
from rlpipe.store.segments import Segments
from rlpipe.types import Node, Stage

NAMING = ("draws", "rollouts", "gates")
"""Folders of what branches say, beside their own."""
FOLDERS = (*NAMING, "receipts", "nodes", "plans", "data", "checkpoints")
"""In the order of removal: a record goes before what it names."""


def unreachable(files: Files, grace_s: float, leaving: Collection[str] = ()) -> list[str]:
    """Names of all objects that may go: reached by nothing and older than the grace period
    (seconds).

    `leaving`: records that are about to be removed (`retention`), and reach nothing any more.
    Raises: ObjectMissing, ObjectCorrupt if a record cannot be read: who knows what it reaches, so
    nothing may go.
    """
    now = time.time()
    entries = [entry for folder in FOLDERS for entry in files.entries(folder)]
    records = list(files.entries("branches"))
    renewals = superseded_renewals(entry.path for entry in records)
    reached = _Reached(files, {entry.path for entry in (*entries, *records)}, leaving)
    candidates = [
        *files.entries(temporary=True),
        *(entry for entry in entries if entry.path not in reached.paths),
        *(entry for entry in records if entry.path in renewals or entry.path in reached.left),
    ]
    return sorted((entry.path for entry in _older(candidates, now - grace_s)), key=_removal_order)


def remove(
    files: Files,
    paths: Sequence[str],
    check: Callable[[], object],
    say: Callable[[int, int], object] | None = None,
) -> None:
    """Remove objects, in this order; killed half-way it can be done again. `check` is called before
    each, and raises if nothing may be removed any more (`Epochs.exclusive`). `say` is told how many are
    done, and of how many.
    """
    for number, path in enumerate(paths, start=1):
        check()
        files.delete(path)
        if say is not None:
            say(number, len(paths))


class _Reached:
    """The closure over one listing of the store: `paths` may not go. `left`: records of branches
    that are there no more."""

    def __init__(self, files: Files, names: set[str], leaving: Collection[str] = ()) -> None:
        self._files, self._nodes, self._plans, self._branches = (
            files,
            Nodes(files),
            Plans(files),
            Branches(files),
        )
        self._homes = {
            _digest(name): name for name in names.difference(leaving) if name.startswith("nodes/")
        }
        self._next: dict[str, int] = {}
        self.paths: set[str] = set()
        known = self._branches.names()
        for branch in known:
            if config_path(branch) not in leaving:
                self._add_branch(branch)
        self.left = self._left(names.difference(leaving), set(known))
        plans = {
            name.split("/")[1]
            for name in names
            if name.startswith("plans/") and name.endswith("/plan.json")
        }
        self._add_pending({digest for digest in plans if self._is_open(digest)})
        self._add_leaves()
        for name in names:
            if (
                receipt := NODE_RECEIPT_NAME.fullmatch(name)
            ) and f"nodes/{receipt[1]}/{receipt[2]}.json" in self.paths:
                self.paths.add(name)
            if (
                REMOVAL_NAME.fullmatch(name)
                and self._homes.get(Receipts(files).get_removed(name).weights) in self.paths
            ):
                self.paths.add(name)
            folder, _, rest = name.partition("/")
            if (folder == "draws" and plan_path(self._plans.drawn_in(name)) in self.paths) or (
                folder in ("rollouts", "gates") and rest.split("/")[0] in known
            ):
                self.paths.add(name)

    def _left(self, names: Iterable[str], known: Collection[str]) -> set[str]:
        """Records of branches without a configuration, but epochs. Raises: ObjectMissing if commits
        are among them."""
        left = {
            name
            for name in names
            if name.startswith("branches/") and name.split("/")[1] not in known
        }
        if lost := next((name for name in sorted(left) if is_commit(name)), None):
            branch = lost.split("/")[1]
            where = self._files.url(config_path(branch))
            do = f"bring it back from a copy, or remove the run: --remove {branch}"
            raise ObjectMissing(
                "a run has commits and no configuration", where=where, found=lost, do=do
            )
        return {name for name in left if not EPOCH_NAME.fullmatch(name)}

    def _add_branch(self, branch: str) -> None:
        self._add_named(Stage.INIT, self._branches.get(branch).init)
        newest = self._branches.newest(branch)
        self._next[branch] = newest.iteration + 1 if newest else 0
        for commit in self._branches.walk(branch):
            if commit.branch != branch:
                break  # the rest is another branch's own
            self.paths.update(map(plan_path, commit.plans))
            for stage, digest in commit.nodes.items():
                self._add_named(stage, digest)
        for segment in Segments(self._files).of(branch):
            self._add_named(Stage.SEGMENT, segment.segment)
        for k in noted_iterations(self._files, branch):
            for stage, digest in read_note(self._files, branch, k).items():
                self._add_noted(stage, digest)

    def _add_named(self, stage: Stage, digest: str) -> None:
        """A node that a branch's own records name. Raises: ObjectMissing if it is lost: its files
        are not garbage yet."""
        if digest not in self._homes:
            self._nodes.get(stage, digest)
            self._homes[digest] = node_path(stage, digest)
        self._add(digest)

    def _add_noted(self, stage: Stage, digest: str) -> None:
        """A node of an iteration that was sampled or reprocessed, but not trained; with the scores
        that a filter chose by."""
        self._add_named(stage, digest)
        if stage is Stage.ROLLOUT:
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
        while grown := [
            path for path, node in loose.items() if growing & set(node.parents.values())
        ]:
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
