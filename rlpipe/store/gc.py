"""Garbage collection: removal of objects that no branch reaches.

Reachable are all branches and their commits, the plans and nodes that these name, the nodes'
parents, the files of those nodes, the images of plans and evaluations, and the states of rows of
plans. Checkpoints and evaluations of reachable weights are reachable too, because commits do not
name them. Also kept are objects that a branch may still adopt: plans of iterations that it has not
committed, their finished groups, and nodes made from them. So a crashed run loses nothing, however
old it is.

All other objects are removed once they are older than the grace period, which must be longer than
the upload of a checkpoint. This includes draws of removed plans, and the rest of a partly removed
run. Of the epochs only superseded renewals are removed. Epochs of removed runs stay, half a
kilobyte each, so that a suspended driver is still refused.

A new driver may adopt garbage, because its inputs may be equal. So removal never runs while a
driver is active. `Epochs.exclusive` refuses a collection while a branch is driven, refuses new
drivers during a collection, and is checked before every removal. Promise: every object that a
commit names exists. Remaining risk: if the collector's machine is suspended for longer than its
lease between that check and the following request, that one object is removed.

Parts of killed S3 uploads are not objects; use a lifecycle rule of the bucket for them.

Entry points: `unreachable`, `remove`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence

from rlpipe.errors import ObjectMissing
from rlpipe.store.branches import Branches, config_path, is_commit
from rlpipe.store.epochs import EPOCH_NAME, superseded_renewals
from rlpipe.store.images import FOLDER as IMAGES
from rlpipe.store.images import image_path, images_of_node, images_of_plan
from rlpipe.store.nodes import LEAVES, Nodes, node_path
from rlpipe.store.notes import noted_iterations, read_note
from rlpipe.store.objects.files import Files
from rlpipe.store.plans import PLAN_NAME, Plans, plan_path
from rlpipe.store.receipts import NODE_RECEIPT_NAME, REMOVAL_NAME, Receipts
from rlpipe.store.row_states import FOLDER as ROW_STATES
from rlpipe.store.row_states import row_states_of_plan, row_states_path
from rlpipe.store.segments import Segments
from rlpipe.types import Node, Stage

FOLDERS = (
    "draws",
    "rollouts",
    "gates",
    "receipts",
    "nodes",
    "plans",
    "data",
    "checkpoints",
    "images",
    "row_states",
)
"""Folders in the order of removal: a record is removed before the objects that it names."""


def unreachable(files: Files, grace_s: float, leaving: Collection[str] = ()) -> list[str]:
    """Return the paths of all unreachable objects that are older than the grace period.

    `leaving`: records that are about to be removed (`retention`), and reach nothing any more.
    Raises: ObjectMissing, ObjectCorrupt if a record cannot be read, because it may name any object.
    """
    now = time.time()
    # List the objects before the branches are read. An object that is committed in between is
    # either young or found to be reachable.
    entries = [entry for folder in FOLDERS for entry in files.entries(folder)]
    records = list(files.entries("branches"))
    renewals = superseded_renewals(entry.path for entry in records)
    reachable = _Reachable(files, {entry.path for entry in (*entries, *records)}, leaving)
    candidates = [
        *files.entries(temporary=True),
        *(entry for entry in entries if entry.path not in reachable.paths),
        *(
            entry
            for entry in records
            if entry.path in renewals or entry.path in reachable.abandoned
        ),
    ]
    old = (entry.path for entry in candidates if entry.modified_s < now - grace_s)
    return sorted(old, key=_removal_order)


def remove(
    files: Files,
    paths: Sequence[str],
    check: Callable[[], object],
    say: Callable[[int, int], object] | None = None,
) -> None:
    """Remove objects in this order. A call that was killed can be repeated.

    `check` is called before each removal, and raises if removal is not allowed any more (`check` of
    the epoch from `Epochs.exclusive`). `say` gets the number of removed objects and the total.
    """
    for number, path in enumerate(paths, start=1):
        check()
        files.delete(path)
        if say is not None:
            say(number, len(paths))


class _Reachable:
    """The reachable objects of one listing of the store.

    `paths` must stay. `abandoned` are records of branches that do not exist any more.
    """

    def __init__(self, files: Files, names: set[str], leaving: Collection[str] = ()) -> None:
        self._files = files
        self._nodes = Nodes(files)
        self._plans = Plans(files)
        self._branches = Branches(files)
        self._node_paths = {
            _digest(name): name for name in names.difference(leaving) if name.startswith("nodes/")
        }
        self._next: dict[str, int] = {}
        """First iteration that a branch has not committed."""
        self._with_late_groups: set[str] = set()
        """Plans of groups that are open after the newest commit of a branch. A group that finished
        since then has a shard below its plan, and the next rollout adopts the group."""
        self.paths: set[str] = set()
        branches = self._branches.names()
        for branch in branches:
            if config_path(branch) not in leaving:
                self._add_branch(branch)
        self.abandoned = self._abandoned(names.difference(leaving), set(branches))
        plans = {
            name.split("/")[1]
            for name in names
            if name.startswith("plans/") and name.endswith("/plan.json")
        }
        self._add_open_plans({digest for digest in plans if self._is_open(digest)})
        for digest in self._with_late_groups & plans:
            self.paths.update(self._files.list(Plans.groups_prefix(digest)))
        self._add_leaves()
        self.paths |= {name for name in names if self._belongs(name, branches)}
        if any(name.startswith((f"{IMAGES}/", f"{ROW_STATES}/")) for name in names):
            self._add_content_of_plans()

    def _belongs(self, name: str, branches: Collection[str]) -> bool:
        """True for a receipt, removal, draw, note or gate of a reachable object."""
        if receipt := NODE_RECEIPT_NAME.fullmatch(name):
            return f"nodes/{receipt[1]}/{receipt[2]}.json" in self.paths
        if REMOVAL_NAME.fullmatch(name):
            weights = Receipts(self._files).get_removed(name).weights
            return self._node_paths.get(weights) in self.paths
        folder, _, rest = name.partition("/")
        if folder == "draws":
            return plan_path(self._plans.drawn_in(name)) in self.paths
        return folder in ("rollouts", "gates") and rest.split("/")[0] in branches

    def _abandoned(self, names: Iterable[str], branches: Collection[str]) -> set[str]:
        """Return the records, without epochs, of branches that have no configuration.

        Raises: ObjectMissing if commits are among them.
        """
        abandoned = {
            name
            for name in names
            if name.startswith("branches/") and name.split("/")[1] not in branches
        }
        if commit := next((name for name in sorted(abandoned) if is_commit(name)), None):
            branch = commit.split("/")[1]
            raise ObjectMissing(
                "a run has commits and no configuration",
                where=self._files.url(config_path(branch)),
                found=commit,
                do=f"restore it from a copy, or remove the run: --remove {branch}",
            )
        return {name for name in abandoned if not EPOCH_NAME.fullmatch(name)}

    def _add_branch(self, branch: str) -> None:
        self._add_named(Stage.INIT, self._branches.get(branch).init)
        newest = self._branches.newest(branch)
        self._next[branch] = newest.iteration + 1 if newest else 0
        buffer = newest.data.buffer if newest else ()
        self._with_late_groups |= {open_.plan for open_ in buffer if open_.finished is None}
        for commit in self._branches.walk(branch):
            if commit.branch != branch:
                break  # the branch of that commit adds the rest
            self.paths.update(map(plan_path, commit.plans))
            for stage, digest in commit.nodes.items():
                self._add_named(stage, digest)
        for segment in Segments(self._files).of(branch):
            self._add_named(Stage.SEGMENT, segment.segment)
        for k in noted_iterations(self._files, branch):
            for stage, digest in read_note(self._files, branch, k).items():
                self._add_noted(stage, digest)

    def _add_named(self, stage: Stage, digest: str) -> None:
        """Add a node that a record of a branch names.

        Raises: ObjectMissing if the node is lost. Its files are no garbage then.
        """
        if digest not in self._node_paths:
            self._nodes.get(stage, digest)
            self._node_paths[digest] = node_path(stage, digest)
        self._add(digest)

    def _add_noted(self, stage: Stage, digest: str) -> None:
        """Add a node of an iteration without a commit, with the scores that a filter used."""
        self._add_named(stage, digest)
        if stage is Stage.ROLLOUT:
            config = self._read(self._node_paths[digest]).config
            self._add(*(config[key] for key in ("of", "judged_by") if key in config))

    def _add(self, *digests: str) -> None:
        """Add nodes or plans with all their ancestors and files."""
        waiting = list(digests)
        while waiting:
            digest = waiting.pop()
            path = self._node_paths.get(digest, plan_path(digest))
            if path not in self.paths and digest in self._node_paths:
                node = self._read(path)
                waiting.extend(node.parents.values())
                self.paths.update(record.path for record in node.files)
            self.paths.add(path)

    def _add_open_plans(self, adoptable: set[str]) -> None:
        """Add plans that a branch may adopt, their shards, and the nodes made from them."""
        # Shards of an open plan are named by no record, so its folders are listed.
        for digest in adoptable:
            self.paths.add(plan_path(digest))
            for folder in (Plans.groups_prefix(digest), Plans.cut_prefix(digest)):
                self.paths.update(self._files.list(folder))
        loose = {
            path: self._read(path) for path in self._node_paths.values() if path not in self.paths
        }
        while descendants := [
            path for path, node in loose.items() if adoptable & set(node.parents.values())
        ]:
            for digest in [loose.pop(path).digest for path in descendants]:
                adoptable.add(digest)
                self._add(digest)

    def _add_leaves(self) -> None:
        """Add checkpoints and evaluations of reachable weights."""
        # No commit names the node of a leaf before it is recorded, so leaves are found by weights.
        for digest, path in self._node_paths.items():
            if path.split("/")[1] in LEAVES and path not in self.paths:
                parents = self._read(path).parents.values()
                if all(self._node_paths.get(parent) in self.paths for parent in parents):
                    self._add(digest)

    def _add_content_of_plans(self) -> None:
        """Add the images of reachable plans and evaluations, and the states of rows of plans."""
        images = set[str]()
        states = set[str]()
        for path in self.paths:
            if match := PLAN_NAME.fullmatch(path):
                plan = self._plans.read(match[1])
                images |= images_of_plan(plan)
                states |= row_states_of_plan(plan)
            elif path.startswith(f"nodes/{Stage.EVAL}/"):
                images |= images_of_node(self._read(path))
        self.paths |= {*map(image_path, images), *map(row_states_path, states)}

    def _is_open(self, digest: str) -> bool:
        """True if the plan belongs to an iteration that its branch has not committed."""
        if plan_path(digest) in self.paths:
            return False
        # A plan of a committed iteration that the commit does not name lost a race.
        plan = self._plans.read(digest)
        return plan.branch in self._next and plan.iteration >= self._next[plan.branch]

    def _read(self, path: str) -> Node:
        return self._nodes.get(Stage(path.split("/")[1]), _digest(path))


def _digest(path: str) -> str:
    return path.rsplit("/", 1)[1].removesuffix(".json")


def _removal_order(path: str) -> tuple[int, str]:
    folder = path.split("/")[0]
    return (FOLDERS.index(folder) if folder in FOLDERS else len(FOLDERS), path)
