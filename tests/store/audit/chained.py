"""A run whose commits form a chain with leaves, for the tests of the chain and of signatures."""

from __future__ import annotations

from rlpipe.store.audit.findings import Report
from rlpipe.store.branches import Branches
from rlpipe.store.chain import leaf_paths
from rlpipe.store.objects.files import Files
from rlpipe.types import Commit, Plan, Stage
from tests.store.audit.faulty import WholeRun
from tests.store.audit.forging import LAST
from tests.store.lineage import Run, make_node


class Chained(WholeRun):
    """A run whose commits await leaves that arrive one iteration later."""

    def commit_of(self, plan: Plan, *arguments) -> Commit:
        made = super().commit_of(plan, *arguments)
        measured = make_node(
            Stage.EVAL, {"weights": made.nodes[Stage.TRAIN]}, dataset="heldout"
        ).digest
        return made.model_copy(
            update={"awaited": tuple(leaf_paths(made.nodes[Stage.TRAIN], [measured]))}
        )

    def go(self, iterations: int) -> Chained:
        for _ in range(iterations):
            made = self.iterate()
            assert made is not None
            self.keep(made.nodes[Stage.TRAIN], made.iteration + 1)
        return self


class Undrawn(Chained):
    """A run whose plans are not draws, so that a forgery does not change their names."""

    def plan(self, *arguments) -> Plan:
        return Run.plan(self, *arguments)


def head(files: Files, k: int = LAST, branch: str = "run") -> str:
    return Branches(files).read_stored(branch, k)[1]


def texts(report: Report) -> list[str]:
    return [f"{one.where} {one.problem}" for one in report.findings]
