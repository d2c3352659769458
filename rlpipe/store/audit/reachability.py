"""Reports the objects of a store that no run explains.

An object is explained if a record of some run leads to it:

    records of a run        its configuration, commits, notes, segments, epochs, receipts, tables
    nodes, plans            those records name them, or an explained node was made from them
    open plans              plans of iterations without a commit, and nodes made from them, or from
                            rollouts that a run loads: the run may adopt them when it continues
    checkpoints, evaluations, pushes       of explained weights
    data files, shards      an explained node names them; shards of an open plan
    draws, receipts         of an explained plan or node
    images                  of an explained plan or evaluation
    states of rows          of an explained plan
    weight files            of pushes of a run, present or removed; engines read them

All other objects are reported. An object is a leftover, a note of the report, if killed or replaced
attempts of a known run leave such objects, or if it belongs to a removed run until garbage
collection deletes it. Leftovers are unfinished files, plans of an iteration that was committed with
other plans, nodes made from these plans, and complete files that no node names. Any other object is
a finding: a node or plan of no run, an unknown name, a link, a device, a file with two names.

An unreadable object is a finding too, and objects that only it names are reported as unexplained.
One file because all judgements read the same links between records.

Entry points: `report_unexplained`, `runs_of`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import NamedTuple

from rlpipe.errors import ObjectCorrupt
from rlpipe.store.audit import unexpected_files
from rlpipe.store.audit.bookkeeping import check_epochs
from rlpipe.store.audit.findings import Content, Finding, Report, read_or_report
from rlpipe.store.audit.snapshot import Snapshot
from rlpipe.store.audit.unexpected_files import UNKNOWN_NAME
from rlpipe.store.branches import COMMIT_NAME, Branches, commit_name, config_path, parse_commit_name
from rlpipe.store.epochs import COLLECTOR, EPOCH_NAME, SKEW_S, Epochs
from rlpipe.store.images import IMAGE_NAME, images_of_node, images_of_plan
from rlpipe.store.nodes import LEAVES, Nodes, node_path
from rlpipe.store.notes import noted_iterations, read_note
from rlpipe.store.objects.files import is_safe
from rlpipe.store.plans import DRAW_NAME, PLAN_NAME, Plans, draw_path, plan_path
from rlpipe.store.receipts import NODE_RECEIPT_NAME, REMOVAL_NAME, NodeReceipt, Receipts
from rlpipe.store.row_states import ROW_STATES_NAME, row_states_of_plan
from rlpipe.store.segments import Segments
from rlpipe.types import DataState, Plan, Stage

NODE_NAME = re.compile(r"nodes/([a-z]+)/([0-9a-f]{64})\.json")
SHARD_FOLDER = re.compile(r"plans/([0-9a-f]{64})/(?:groups|cut)/")
DATA_FOLDER = re.compile(r"data/([a-z]+)/([0-9a-f]{64})/")
CHECKPOINT_FILE = re.compile(r"checkpoints/([^/]+)/iter_[0-9]{7,}/[0-9a-f]{12}/(?:[^/]+/)*[^/]+")
WEIGHT_STAGES = (*LEAVES, Stage.SYNC)
"""Stages about weights. Their nodes may exist before any commit names them."""
RECORD_FOLDERS = ("branches", "rollouts", "gates", "nodes")
"""Folders without other objects than records."""
READERS = 8
UNEXPLAINED = "unexplained: no record of any run refers to it (`rlpipe gc` removes it)"
LEFTOVER = "left over from a killed or replaced attempt, or a removed run; `tools.gc` removes it"

Cursor = tuple[int, int, int]
"""Position of the data source: epoch, offset, draws."""


class NodeLinks(NamedTuple):
    """The objects that a node refers to."""

    stage: Stage
    parents: tuple[str, ...]
    """Digests of the parents; of a rollout also its source and the scores of a filter."""
    files: tuple[str, ...]
    plans: tuple[str, ...]
    after: Cursor | None
    """Position of the data source after a rollout."""
    images: frozenset[str] = frozenset()
    """Images of an evaluation."""


def report_unexplained(files: Snapshot, report: Report) -> None:
    """Report every object that no run explains.

    Raises: StoreError if the store does not answer.
    """
    _Explainer(files, report).run()


def runs_of(files: Snapshot) -> list[str]:
    """Return the names of the runs: folders among the branches with more content than epochs."""
    runs = set()
    odd = [name.path for name in files.odd if name.path.startswith("branches/")]
    for path in filter(is_safe, (*files.list("branches"), *odd)):
        if path.count("/") > 1 and not EPOCH_NAME.fullmatch(path):
            runs.add(path.split("/")[1])
    return sorted(runs - {COLLECTOR})


class _Explainer:
    """The explained and left over objects of one listing."""

    def __init__(self, files: Snapshot, report: Report) -> None:
        self._files = files
        self._report = report
        self._nodes = Nodes(files)
        self._branches = Branches(files)
        self._plans = Plans(files)
        self._runs = runs_of(files)
        self._removed_runs: set[str] = set()
        """Names of branches that have only epochs."""
        self._loading: set[str] = set()
        """Weights of runs that load rollouts, which have no plans of their own."""
        self._loaded: set[str] = set()
        """Names of the runs whose rollouts they load."""
        self._rollouts: dict[str, set[str]] = defaultdict(set)
        """Rollouts that the commits and notes of each run name."""
        self._links: dict[str, NodeLinks] = {}
        """Readable nodes by digest."""
        self._children: dict[str, list[str]] = defaultdict(list)
        self._next: dict[str, int] = {}
        """First iteration that a branch has not committed."""
        self._cursors: set[Cursor] = {_cursor(DataState())}
        """Positions of the data source at which a plan may start."""
        self._named: set[str] = set()
        """Digests that the records of runs name."""
        self._explained: set[str] = set()
        """Digests of explained nodes and plans."""
        self._left: set[str] = set()
        """Digests of nodes and plans that are left over."""
        self._read_plans: dict[str, Plan | None] = {}

    def run(self) -> None:
        self._report_odd_names()
        self._read_nodes()
        for branch in self._runs:
            self._read_run(branch)
        self._check_branch_folders()
        self._add_ancestors(self._named, self._explained)
        self._judge_plans()
        self._judge_nodes()
        self._judge_files()

    def _add_finding(self, path: str, problem: str) -> None:
        """Report an object, unless another check did."""
        where = self._files.shown(path)
        if not any(where == one.where or where in one.problem for one in self._report.findings):
            self._report.add_finding("unexplained", where, problem)

    def _add_leftover(self, path: str, problem: str = LEFTOVER) -> None:
        where = self._files.shown(path)
        if not any(where == one.where for one in self._report.findings):
            self._report.add_note("leftover", where, problem)

    def _read_optional(self, path: str, read: Callable[[], Content]) -> Content | None:
        """Return the content of an object; None if it is missing, or unreadable and reported."""
        problems: list[Finding] = []
        content = read_or_report(self._files, problems, "records", path, read, required=False)
        for problem in problems:
            self._add_finding(path, problem.problem)
        return content

    def _read_record(self, where: str, read: Callable[[], Content]) -> Content | None:
        """Return a record of a run. A missing or unreadable one is a finding, as in its audit."""
        return read_or_report(self._files, self._report.findings, "records", where, read)

    def _report_odd_names(self) -> None:
        for odd in self._files.odd:
            self._add_finding(odd.path, f"this is {odd.kind}, and a store has only files")
        for unfinished in self._files.unfinished:
            problem = "an unfinished file: its writer is active, or was killed"
            self._add_leftover(unfinished.path, problem)
        names = defaultdict(list)
        for seen in self._files.seen.values():
            if seen.identity is not None:
                names[seen.identity].append(seen.path)
        for paths in names.values():
            # Hard links: a change of one name changes the other object too.
            for path in sorted(paths)[1:]:
                other = self._files.shown(min(paths))
                self._add_finding(path, f"the same file has another name in the store: {other}")

    def _read_nodes(self) -> None:
        wanted: list[tuple[Stage, str]] = []
        for path in self._files.list("nodes"):
            match = NODE_NAME.fullmatch(path)
            if match is None or match[1] not in set(Stage):
                self._add_finding(path, UNKNOWN_NAME)
            else:
                wanted.append((Stage(match[1]), match[2]))
        with ThreadPoolExecutor(READERS) as pool:
            reads = pool.map(lambda key: self._read_links(*key), wanted)
            for (stage, digest), (links, problems) in zip(wanted, reads, strict=True):
                for problem in problems:
                    self._add_finding(node_path(stage, digest), problem.problem)
                if links is not None:
                    self._links[digest] = links
                    for parent in links.parents:
                        self._children[parent].append(digest)

    def _read_links(self, stage: Stage, digest: str) -> tuple[NodeLinks | None, list[Finding]]:
        # Runs in threads, so it returns problems instead of reporting them.
        problems: list[Finding] = []
        read = partial(self._nodes.get, stage, digest)
        path = node_path(stage, digest)
        node = read_or_report(self._files, problems, "records", path, read, required=False)
        if node is None:
            return None, problems
        parents = list(node.parents.values())
        plans: list[str] = []
        if stage is Stage.ROLLOUT:
            inputs = [node.config.get(key) for key in ("of", "judged_by")]
            parents += [digest for digest in inputs if isinstance(digest, str)]
            named = node.outputs.get("plans")
            plans = (
                [plan for plan in named if isinstance(plan, str)] if isinstance(named, list) else []
            )
        files = tuple(record.path for record in node.files)
        after = _recorded_cursor(node.outputs.get("after"))
        images = frozenset(images_of_node(node))
        return NodeLinks(stage, tuple(parents), files, tuple(plans), after, images), problems

    def _read_run(self, branch: str) -> None:
        """Collect the digests that the records of a run name."""
        record = self._read_record(branch, partial(self._branches.get, branch))
        if record is not None:
            self._named.add(record.init)
        committed = self._branches.committed(branch)
        with ThreadPoolExecutor(READERS) as pool:
            reads = pool.map(
                lambda k: self._read_record(
                    commit_name(branch, k), partial(self._branches.read, branch, k)
                ),
                committed,
            )
            commits = [commit for commit in reads if commit is not None]
        for commit in commits:
            self._named.update(commit.plans, commit.nodes.values())
            self._cursors.add(_cursor(commit.data))
        origin = parse_commit_name(record.parent)[1] if record is not None and record.parent else -1
        loads = record and record.config.get("debug", {}).get("load_debug_rollout_data")
        if record is not None and loads:
            trained = (commit.nodes.get(Stage.TRAIN, "") for commit in commits)
            self._loading.update({record.init, *trained} - {""})
            self._loaded.add(loads)
        self._rollouts[branch].update(commit.nodes.get(Stage.ROLLOUT, "") for commit in commits)
        self._next[branch] = max(committed, default=origin) + 1
        segments = self._read_record(
            f"segments of {branch}", partial(Segments(self._files).of, branch)
        )
        for segment in segments or ():
            self._named.add(segment.segment)
        for k in noted_iterations(self._files, branch):
            nodes = self._read_record(
                commit_name(branch, k), partial(read_note, self._files, branch, k)
            )
            self._named.update((nodes or {}).values())
            self._rollouts[branch].add((nodes or {}).get(Stage.ROLLOUT, ""))
        for unexpected in unexpected_files.of_branch(self._files, branch):
            self._add_finding(unexpected.path, unexpected.problem)

    def _check_branch_folders(self) -> None:
        """Check the epochs that belong to no run, and records that belong to no branch."""
        with_epochs = {
            path.split("/")[1]
            for path in self._files.list("branches")
            if EPOCH_NAME.fullmatch(path)
        }
        for branch in sorted(with_epochs - set(self._runs)):
            check_epochs(self._files, self._report, branch)
            if branch != COLLECTOR:
                self._removed_runs.add(branch)
                where = self._files.shown(f"branches/{branch}")
                problem = "only epochs: the run was removed, or never began"
                self._report.add_note("leftover", where, problem)
        for path in self._files.list(f"branches/{COLLECTOR}"):
            if not EPOCH_NAME.fullmatch(path):
                self._add_finding(path, UNKNOWN_NAME)
        for folder in ("branches", "rollouts", "gates"):
            for path in self._files.list(folder):
                branch, _, name = path.removeprefix(f"{folder}/").partition("/")
                if not name:
                    self._add_finding(path, UNKNOWN_NAME)
                elif folder != "branches" and branch not in self._runs:
                    self._add_finding(path, "unexplained: no run has this name")
        for branch in self._runs:
            if not self._files.exists(config_path(branch)) and any(
                COMMIT_NAME.fullmatch(path) for path in self._files.list(f"branches/{branch}")
            ):
                self._add_finding(config_path(branch), "a run has commits and no configuration")

    def _add_ancestors(self, digests: Iterable[str], into: set[str]) -> None:
        """Add nodes and plans with all that they were made from."""
        waiting = list(digests)
        while waiting:
            digest = waiting.pop()
            if digest in into:
                continue
            into.add(digest)
            if (links := self._links.get(digest)) is not None:
                waiting += [*links.parents, *links.plans]
                if links.after is not None and into is self._explained:
                    self._cursors.add(links.after)

    def _add_descendants(self, digests: Iterable[str], into: set[str]) -> None:
        """Add nodes and plans with all that was made from them, and the ancestors of these."""
        waiting = list(digests)
        visited = set[str]()
        while waiting:
            digest = waiting.pop()
            if digest not in visited:
                visited.add(digest)
                self._add_ancestors([digest], into)
                waiting += self._children.get(digest, ())

    def _add_leaves(self, into: set[str]) -> None:
        """Add checkpoints, evaluations and pushes of weights."""
        for digest, links in self._links.items():
            is_leaf = links.stage in WEIGHT_STAGES and bool(links.parents)
            if is_leaf and all(
                parent in into or parent in self._explained for parent in links.parents
            ):
                into.add(digest)

    def _judge_plans(self) -> None:
        """Sort the plans that no record names: of an open iteration, left over, or unexplained."""
        open_plans = set[str]()
        left = set[str]()
        loose: dict[str, Plan] = {}
        for path in self._files.list("plans"):
            match = PLAN_NAME.fullmatch(path)
            if match is None or match[1] in self._explained:
                continue
            plan = self._plan(match[1])
            if plan is None:
                continue
            if plan.branch in self._removed_runs:
                left.add(match[1])
            elif plan.branch in self._next:
                loose[match[1]] = plan
            else:
                problem = f"unexplained: it is a plan of {plan.branch!r}, and no run has this name"
                self._add_finding(path, problem)
        # A part starts where the part before it ends, and that part may be loose too. So repeat
        # until no plan starts at a known position.
        while found := [
            digest for digest, plan in loose.items() if _cursor(plan.before) in self._cursors
        ]:
            for digest in found:
                plan = loose.pop(digest)
                (open_plans if plan.iteration >= self._next[plan.branch] else left).add(digest)
                self._cursors.add(_cursor(plan.after))
        for digest in loose:
            problem = "unexplained: no iteration of its run left the data source where it starts"
            self._add_finding(plan_path(digest), problem)
        self._add_descendants(open_plans, self._explained)
        if self._loading:
            self._add_of_loaded_rollouts()
        self._add_leaves(self._explained)
        self._add_descendants(left, self._left)
        self._add_leaves(self._left)
        self._left -= self._explained

    def _add_of_loaded_rollouts(self) -> None:
        """Add the open iterations of runs that load rollouts: rewards, batches, what follows."""
        rollouts = set[str]().union(*(self._rollouts[run] for run in self._loaded))
        self._explained.update(self._made_from(rollouts, Stage.REWARD))
        batches = self._made_from(self._loading, Stage.ADVANTAGE)
        self._add_descendants(batches, self._explained)

    def _made_from(self, parents: set[str], stage: Stage) -> list[str]:
        """Return the nodes of a stage with one of these parents, and no unexplained one."""
        return [
            digest
            for digest, links in self._links.items()
            if links.stage is stage
            and parents.intersection(links.parents)
            and self._explained.issuperset(links.parents)
        ]

    def _plan(self, digest: str) -> Plan | None:
        if digest not in self._read_plans:
            read = partial(self._plans.read, digest)
            self._read_plans[digest] = self._read_optional(plan_path(digest), read)
        return self._read_plans[digest]

    def _judge_nodes(self) -> None:
        # A run that begins now writes its first weights before its configuration.
        may_begin = self._removed_runs or self._is_driven()
        for digest, links in self._links.items():
            path = node_path(links.stage, digest)
            if digest in self._explained:
                continue
            if digest in self._left:
                self._add_leftover(path)
            elif links.stage is Stage.INIT and may_begin:
                problem = "first weights of a run that was removed, never began, or begins now"
                self._add_leftover(path, problem)
            elif (
                links.stage is Stage.SEGMENT
                and links.parents
                and all(parent in self._explained for parent in links.parents)
            ):
                self._add_leftover(path, "a segment that no run continued from")
            else:
                self._add_finding(path, UNEXPLAINED)
                continue
            self._left.add(digest)

    def _is_driven(self) -> bool:
        """True if a driver is active. A node may then exist before the record that names it."""
        epochs = Epochs(self._files)
        leases = [
            read_or_report(self._files, [], "epochs", run, partial(epochs.newest, run))
            for run in {*self._runs, *self._removed_runs}
        ]
        return any(lease is not None and not lease.expired(SKEW_S) for lease in leases)

    def _judge_files(self) -> None:
        explained = set[str]()
        left = set[str]()
        for digest, links in self._links.items():
            (explained if digest in self._explained else left).update(links.files)
        judges = {
            "plans": self._judge_shard,
            "data": self._judge_data,
            "checkpoints": self._judge_checkpoint,
            "draws": self._judge_draw,
            "receipts": self._judge_receipt,
            "weights": self._judge_weights,
            "images": partial(
                self._judge_content, IMAGE_NAME, "no plan or evaluation names this image"
            ),
            "row_states": partial(
                self._judge_content, ROW_STATES_NAME, "no plan names these states of rows"
            ),
        }
        for path in self._files.list():
            folder = path.partition("/")[0]
            if path in explained or (folder in RECORD_FOLDERS and "/" in path):
                continue
            if path in left:
                self._add_leftover(path)
            elif "/" not in path or folder not in judges:
                self._add_finding(path, f"unexplained: {UNKNOWN_NAME}")
            else:
                judges[folder](path)

    def _judge_shard(self, path: str) -> None:
        """Judge a plan, or a shard of a plan that no rollout names."""
        if match := PLAN_NAME.fullmatch(path):
            if match[1] in self._left and match[1] not in self._explained:
                self._add_leftover(path)
            return
        match = SHARD_FOLDER.match(path)
        if match is None:
            self._add_finding(path, UNKNOWN_NAME)
        elif not self._files.exists(plan_path(match[1])):
            self._add_finding(path, "its plan is missing, and a plan is written before its shards")
        elif problem := unexpected_files.misnamed(self._files, path, unexpected_files.SHARD):
            self._add_finding(path, problem)
        # An explained plan that no record names is open: shards are still added to it.
        elif match[1] not in self._explained - self._named:
            self._add_leftover(path)

    def _judge_data(self, path: str) -> None:
        match = DATA_FOLDER.match(path)
        if problem := unexpected_files.misnamed(self._files, path, unexpected_files.DATA):
            self._add_finding(path, problem)
        elif match is None or match[1] not in set(Stage):
            self._add_finding(path, UNKNOWN_NAME)
        else:
            problem = (
                "no node names it: its attempt is active, killed or replaced, or its node gone"
            )
            self._add_leftover(path, problem)

    def _judge_checkpoint(self, path: str) -> None:
        match = CHECKPOINT_FILE.fullmatch(path)
        if match is None or match[1] not in {*self._runs, *self._removed_runs}:
            self._add_finding(path, f"unexplained: {UNKNOWN_NAME}")
        else:
            problem = "no checkpoint names it: its upload is active or killed, or its node is gone"
            self._add_leftover(path, problem)

    def _judge_weights(self, path: str) -> None:
        if problem := unexpected_files.of_weights(path, {*self._runs, *self._removed_runs}):
            self._add_finding(path, problem)

    def _judge_content(self, pattern: re.Pattern[str], problem: str, path: str) -> None:
        """Judge an object named by its content, which is written before the plan that names it."""
        match = pattern.fullmatch(path)
        if match is None:
            self._add_finding(path, UNKNOWN_NAME)
        elif match[1] not in self._named_content:
            self._add_leftover(path, problem)

    @cached_property
    def _named_content(self) -> set[str]:
        """Images of explained plans and evaluations, and states of rows of explained plans."""
        named = set[str]()
        for digest in self._explained:
            if (links := self._links.get(digest)) is not None:
                named |= links.images
            elif (plan := self._plan(digest)) is not None:
                named |= images_of_plan(plan) | row_states_of_plan(plan)
        return named

    def _judge_draw(self, path: str) -> None:
        if not DRAW_NAME.fullmatch(path):
            self._add_finding(path, UNKNOWN_NAME)
            return
        digest = self._read_optional(path, partial(self._plans.drawn_in, path))
        if digest is None:
            return
        if not self._files.exists(plan_path(digest)):
            self._add_finding(path, f"it names plan {digest}, which is missing")
        elif (plan := self._plan(digest)) is not None:
            if draw_path(plan.branch, plan.iteration, plan.part, plan.before) != path:
                problem = f"it names plan {digest}, which was drawn from another state"
                self._add_finding(path, problem)
            elif digest in self._left:
                self._add_leftover(path)
            elif digest not in self._explained:
                self._add_finding(path, UNEXPLAINED)

    def _judge_receipt(self, path: str) -> None:
        match = NODE_RECEIPT_NAME.fullmatch(path)
        receipts = Receipts(self._files)
        if REMOVAL_NAME.fullmatch(path):
            self._read_record(path, partial(receipts.get_removed, path))
        elif match is None or match[1] not in LEAVES:
            self._add_finding(path, UNKNOWN_NAME)
        else:
            receipt = self._read_optional(path, partial(receipts.get_node, path))
            if receipt is not None:
                self._compare_receipt(path, receipt)

    def _compare_receipt(self, path: str, receipt: NodeReceipt) -> None:
        """Compare a receipt with its node."""
        name = f"{receipt.stage} {receipt.digest}"
        if not self._files.exists(node_path(receipt.stage, receipt.digest)):
            # Garbage collection removes the receipt first. If it is gone, both are being removed.
            if self._files.exists(path):
                self._add_finding(path, f"{name} was recorded, and its node is gone")
        elif receipt.digest in self._links:
            try:
                node = self._nodes.get(receipt.stage, receipt.digest)
            except ObjectCorrupt:  # reported already
                return
            if NodeReceipt.of(node) != receipt:
                problem = f"another record of {name} was here: its receipt does not match this one"
                self._add_finding(path, problem)


def _cursor(state: DataState) -> Cursor:
    return state.epoch, state.offset, state.draws


def _recorded_cursor(state: object) -> Cursor | None:
    """Return the position in the outputs of a rollout; None if it is malformed."""
    if not isinstance(state, dict):
        return None
    epoch, offset, draws = (state.get(key, 0) for key in ("epoch", "offset", "draws"))
    if all(isinstance(value, int) for value in (epoch, offset, draws)):
        return epoch, offset, draws
    return None
