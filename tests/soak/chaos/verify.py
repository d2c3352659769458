"""The proof at the end of a soak.

The audit is clean, no finished group is lost, no group was trained twice, and a replay is equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath
from typing import Any

from rlpipe.errors import RlpipeError
from rlpipe.store.audit.verification import check_branch
from rlpipe.store.branches import Branches
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.store.parquet.schema import decode
from rlpipe.store.parquet.shards import read_rows
from rlpipe.store.plans import Plans
from rlpipe.types import Commit, Stage


@dataclass
class Replay:
    """Result of training all batches again from v = 0 in a fresh trainer."""

    versions: int
    equal: bool
    first_difference: str | None = None


Replayer = Callable[[Files, str], Replay]
"""Replays a branch of a store."""


@dataclass
class Proof:
    """The defects of a run."""

    iterations: int = 0
    findings: list[str] = field(default_factory=list)
    """Findings of the audit."""
    lost: list[str] = field(default_factory=list)
    """Missing shards, and finished groups that are in no rollout."""
    twice: list[str] = field(default_factory=list)
    """Groups that were trained more than once."""
    shards_seen: int = 0
    groups_seen: int = 0
    replay: Replay | None = None
    error: str | None = None
    """Error that ended the proof."""

    @property
    def clean(self) -> bool:
        """True if everything was checked and nothing is wrong."""
        return (
            not (self.findings or self.lost or self.twice or self.error)
            and self.replay is not None
            and self.replay.equal
        )

    def record(self) -> dict[str, Any]:
        return asdict(self)


class Ledger:
    """Every shard of finished groups that was ever seen in the store."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self.seen: set[str] = set()

    def look(self) -> None:
        """Record the shards that exist now; skip if the store is down."""
        try:
            names = self._files.list("plans")
        except RlpipeError:
            return
        self.seen |= {name for name in names if PurePosixPath(name).suffix == ".parquet"}


def prove(files: Files, branch: str, ledger: Ledger, replay: Replayer) -> Proof:
    """Check everything that a branch stored. Errors of the store are in `error`."""
    proof = Proof(shards_seen=len(ledger.seen))
    try:
        commits = list(Branches(files).walk(branch))
        proof.iterations = len(commits)
        proof.findings = [" | ".join(finding) for finding in check_branch(files, branch)]
        trained = Counter(group for commit in commits for group in commit.trained)
        proof.twice = sorted(group for group, count in trained.items() if count > 1)
        proof.lost, proof.groups_seen = lost(files, commits, ledger.seen)
        proof.replay = replay(files, branch)
    except (RlpipeError, RuntimeError) as error:
        proof.error = f"{type(error).__name__}: {error}"
    return proof


def lost(files: Files, commits: list[Commit], seen: set[str]) -> tuple[list[str], int]:
    """Return the losses among the seen shards, and the number of groups checked.

    A loss is a missing shard, or a group that the committed rollout of its iteration does not have.
    A group that the commit leaves open may be in the rollout of the next iteration instead. For
    iterations without a commit only missing shards count.
    """
    by_iteration = {commit.iteration: commit for commit in commits}
    present = set(files.list("plans"))
    found = []
    groups_seen = 0
    found += [f"{name} is gone" for name in sorted(seen - present)]
    for digest, shards in sorted(_by_plan(seen & present).items()):
        plan = Plans(files).read(digest)
        commit = by_iteration.get(plan.iteration)
        # No commit yet, or a shard of an earlier soak.
        if commit is None or commit.branch != plan.branch:
            continue
        recorded = _recorded(files, commit)
        if (following := by_iteration.get(plan.iteration + 1)) is not None:
            still_open = {waiting.group_id for waiting in commit.data.buffer}
            recorded |= still_open & _recorded(files, following)
        else:
            recorded |= {waiting.group_id for waiting in commit.data.buffer}
        for shard in shards:
            groups = set(decode(files.read(shard), shard, ["group_id"])["group_id"].to_pylist())
            groups_seen += len(groups)
            found += [
                f"{group} of {shard} is not in the rollout of iteration {commit.iteration}"
                for group in groups - recorded
            ]
    return found, groups_seen


def _recorded(files: Files, commit: Commit) -> set[str]:
    """Return the groups with rows in the rollout of a commit."""
    node = Nodes(files).get(Stage.ROLLOUT, commit.nodes[Stage.ROLLOUT])
    return set(read_rows(files, list(node.files), ["group_id"])["group_id"].to_pylist())


def _by_plan(shards: set[str]) -> dict[str, list[str]]:
    plans: dict[str, list[str]] = {}
    for shard in sorted(shards):
        plans.setdefault(PurePosixPath(shard).parts[1], []).append(shard)
    return plans
