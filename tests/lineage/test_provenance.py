"""From weights back to what made them, and from a prompt on to the weights that have it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlpipe.batch.files import write_packing
from rlpipe.batch.packing import PackingPlan
from rlpipe.errors import ConfigError, ObjectMissing
from rlpipe.lineage.provenance import (
    backward,
    branch_parts,
    descendants,
    find_prompts,
    forward,
    optimizer_steps,
    trained_on,
)
from rlpipe.lineage.stage_inputs import checkpoint_inputs
from rlpipe.store.branches import Branches
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.store.retention import branch_removal
from rlpipe.store.segments import Segments
from rlpipe.types import FileRecord, Node, Plan, Stage
from tests.store.lineage import Run, make_node


class SteppingRun(Run):
    """A run that trains each sample of an iteration in an optimizer step of its own, from the last
    row on, with packages."""

    def stage_files(
        self, node: Node, shards: list[FileRecord], trained: list[str]
    ) -> list[FileRecord]:
        if node.stage is not Stage.TRAIN:
            return super().stage_files(node, shards, trained)
        rows = 2 * len(trained)
        steps = tuple((((row,),),) for row in reversed(range(rows)))
        return [
            write_packing(
                self.files,
                node.digest,
                PackingPlan(num_samples=rows, data_parallel=1, max_tokens=9, steps=steps),
            )
        ]

    def plan(self, iteration: int, *arguments) -> Plan:
        plan = super().plan(iteration, *arguments)
        groups = tuple(
            group.model_copy(update={"prompt": f"prompt of {group.group_id}"})
            for group in plan.groups
        )
        return plan.model_copy(update={"groups": groups})

    def commit_of(self, *arguments):
        commit = super().commit_of(*arguments)
        return commit.model_copy(
            update={"packages": {"torch": "2" if commit.iteration < 2 else "3"}}
        )


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """A run of four iterations with a checkpoint after iteration 1, a fork of it there, and a run
    that started from it."""
    files = Files(tmp_path / "store")
    run = SteppingRun(files).start()
    for _ in range(4):
        run.iterate()
    weights = Branches(files).read("run", 1).nodes[Stage.TRAIN]
    inputs = checkpoint_inputs(weights)
    Nodes(files).commit(inputs.node(outputs={"version": 2}))
    fork = SteppingRun(files, "fork").start(parent="run/00000001")
    fork.iterate()
    init = Nodes(files).commit(make_node(Stage.INIT, {"start_from": inputs.digest}))
    Branches(files).create("warm", {}, init.digest)
    SteppingRun(files, "warm").iterate()
    return files


def test_weights_are_traced_through_forks_and_warm_starts(files: Files):
    def told(branch: str, iteration: int | None = None) -> list[tuple[str, int, int]]:
        return [
            (part.branch, len(part.commits), part.last)
            for part in branch_parts(files, branch, iteration)
        ]

    assert told("run") == [("run", 4, 3)]
    assert told("run", 1) == [("run", 2, 1)]
    assert told("fork") == [("fork", 1, 2), ("run", 2, 1)]
    assert told("warm") == [("warm", 1, 0), ("run", 2, 1)]
    with pytest.raises(ObjectMissing):
        branch_parts(files, "run", 9)


def test_backward_names_batches_and_code_of_the_weights(files: Files):
    told = backward(files, "run", 1)
    assert told["weights"]["version"] == 2
    assert (
        told["weights"]["checkpoint"]
        == checkpoint_inputs(Branches(files).read("run", 1).nodes[Stage.TRAIN]).digest
    )
    [part] = backward(files, "run")["branches"]
    assert part["packages"] == [
        {"iterations": [0, 1], "value": {"torch": "2"}},
        {"iterations": [2, 3], "value": {"torch": "3"}},
    ]
    assert (part["samples"], part["groups"], part["prompts"], part["reward"]) == (18, 9, 9, 1.0)
    assert part["dropped"] == {"filtered": 2}
    assert part["weight_versions"] == [0, 0] and part["staleness"] == [0, 3]


def test_backward_names_the_parent_of_a_fork_and_the_settings_that_it_changed(files: Files):
    parent = Branches(files).get("run")
    Branches(files).create("faster", {"lr": 1e-3}, parent.init, "run/00000001")
    SteppingRun(files, "faster").iterate()
    fork, run = backward(files, "faster")["branches"]
    assert (fork["forked_from"], fork["changed"]) == ("run/00000001", {"lr": "1e-06 → 0.001"})
    assert (run["forked_from"], run["changed"]) == (None, {})


def test_trained_on_returns_the_rows_of_every_branch(files: Files):
    rows = trained_on(files, "warm").to_pylist()
    assert {(row["branch"], row["iteration"]) for row in rows} == {
        ("run", 0),
        ("run", 1),
        ("warm", 0),
    }
    assert all(row["trained"] for row in rows)


def test_forward_names_the_optimizer_step_and_the_first_weights(files: Files):
    [(name, prompt)] = find_prompts(files, "run", "run:00000001").items()
    assert prompt == "prompt of run:00000001"
    rows, damaged = forward(files, [name])
    assert damaged == {}
    assert [
        (r["branch"], r["iteration"], r["index"], r["optimizer_step"], r["weight_version"])
        for r in rows
    ] == [
        ("run", 0, 0, 3, 1),
        ("run", 0, 1, 2, 1),
    ]
    [waiting] = find_prompts(files, "run", "run:00000009")
    assert [
        (row["trained"], row["optimizer_step"], row["weight_version"])
        for row in forward(files, [waiting])[0]
    ] == [(False, None, None)] * 2
    assert optimizer_steps(files, "run", 0)["run:00000001", 0] == 3


def test_descendants_are_all_branches_with_the_iteration(files: Files):
    assert descendants(files, {"run": 0}) == (["run@3", "fork@2", "warm@0"], {})
    assert descendants(files, {"run": 2}) == (["run@3"], {})
    assert descendants(files, {"run": 2, "fork": 2}) == (["run@3", "fork@2"], {})
    SteppingRun(files, "grandchild").start(parent="fork/00000002")
    assert descendants(files, {"run": 1})[0] == ["run@3", "fork@2", "grandchild@start", "warm@0"]


@pytest.mark.parametrize("broken", ["branches/other/config.json", "branches/other/00000000.json"])
def test_a_damaged_branch_is_named_and_hides_no_other(files: Files, broken: str):
    SteppingRun(files, "other").start().iterate()
    files.delete(broken)
    files.create(broken, b"{}")
    [name] = find_prompts(files, "run", "run:00000001")
    rows, damaged = forward(files, [name])
    assert [(row["branch"], row["iteration"]) for row in rows] == [("run", 0)] * 2
    having, more = descendants(files, {"run": 0})
    assert having == ["run@3", "fork@2", "warm@0"]
    assert list(damaged | more) == ["other"] and broken in (damaged | more)["other"]
    assert [part.branch for part in branch_parts(files, "warm")] == ["warm", "run"]


def test_a_trace_that_needs_a_damaged_branch_names_it(files: Files):
    files.delete("branches/run/00000001.json")
    files.create("branches/run/00000001.json", b"{}")
    with pytest.raises(
        ObjectMissing, match=r"(?s)no branch has made these weights.*run cannot be read"
    ):
        branch_parts(files, "warm")


def test_every_branch_is_read_once(files: Files, monkeypatch: pytest.MonkeyPatch):
    """Forks of forks: requests grow as the branches do, not as their square."""
    first = Branches(files).read("run", 0).nodes[Stage.TRAIN]
    checkpoint = Nodes(files).commit(checkpoint_inputs(first).node(outputs={"version": 1})).digest
    asked = list[str]()
    plain = Files.read
    parent = "fork/00000002"
    counts = list[int]()
    for number in range(8):
        SteppingRun(files, f"fork{number}").start(parent=parent).iterate()
        parent = f"fork{number}/{number + 3:08d}"
        init = Nodes(files).commit(make_node(Stage.INIT, {"start_from": checkpoint}, number=number))
        Branches(files).create(f"warm{number}", {}, init.digest)
        if number in (3, 7):
            asked.clear()
            with monkeypatch.context() as patched:
                patched.setattr(
                    Files,
                    "read",
                    lambda files, path, *rest: asked.append(path) or plain(files, path, *rest),
                )
                assert len(descendants(files, {"run": 0})[0]) == 3 + 2 * (number + 1)
                counts.append(len(asked))
                forward(files, ["nothing"])
                counts.append(len(asked) - counts[-1])
    assert counts[2] < 2.1 * counts[0] and counts[3] < 2.1 * counts[1]


def test_the_weights_of_a_segment_are_traced_to_their_iteration(tmp_path: Path):
    files = Files(tmp_path / "store")
    run = SteppingRun(files).start()
    commits = [run.iterate() for _ in range(2)]
    nodes = Nodes(files)
    recorded = [commit.nodes[Stage.TRAIN] for commit in commits if commit]
    made = nodes.commit(
        make_node(Stage.SEGMENT, {"weights": recorded[0], "base": Branches(files).get("run").init})
    ).digest
    Segments(files).record("run", 1, 1, weights=recorded[0], segment=made)
    checkpoint = nodes.commit(checkpoint_inputs(made).node(outputs={"version": 1})).digest
    Branches(files).create(
        "warm", {}, nodes.commit(make_node(Stage.INIT, {"start_from": checkpoint})).digest
    )
    assert [(part.branch, part.last) for part in branch_parts(files, "warm")] == [
        ("warm", -1),
        ("run", 0),
    ]
    weights = backward(files, "run", 0)["weights"]
    assert (weights["node"], weights["checkpoint"]) == (made, checkpoint)
    assert backward(files, "run", 1)["weights"]["node"] == recorded[1]
    with pytest.raises(ConfigError, match="warm: started from its weights"):
        branch_removal(files, "run")


@pytest.mark.parametrize(
    ("text", "message"),
    [("nowhere", "no prompt of this run has that text"), ("prompt", "too many prompts")],
)
def test_a_text_in_no_prompt_or_in_too_many_is_refused(
    files: Files, monkeypatch: pytest.MonkeyPatch, text: str, message: str
):
    monkeypatch.setattr("rlpipe.lineage.provenance.MAX_PROMPTS", 3)
    with pytest.raises(ConfigError, match=message):
        find_prompts(files, "run", text)
