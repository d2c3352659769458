"""The chain: the digest of a commit reveals every change below it (rlpipe.store.chain,
rlpipe.store.audit.chain_check)."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from rlpipe.errors import ConfigError, ObjectConflict, ObjectCorrupt, StoreError
from rlpipe.store.audit.verification import check_store
from rlpipe.store.branches import Branches, commit_path
from rlpipe.store.chain import leaf_paths
from rlpipe.store.nodes import Nodes, node_path
from rlpipe.store.notes import gate_path
from rlpipe.store.objects.files import Files
from rlpipe.store.objects.local import LocalBackend
from rlpipe.store.plans import Plans
from rlpipe.store.segments import Segments
from rlpipe.store.tables import scalars
from rlpipe.types import Commit, Stage
from tests.store.audit.chained import Chained, head, texts
from tests.store.audit.faulty import build
from tests.store.audit.forging import FORGERIES, LAST, Forger, Forgery
from tests.store.lineage import Run, make_node
from tests.store.test_branches import commit
from tools import gc


def test_an_unchanged_store_is_proved_and_newer_records_are_named(sound: Path):
    files = Files(sound)
    report = check_store(files, "run", head=head(files))
    assert report.findings == []
    assert str(report.proof) == (
        f"run/00000003 has the digest {head(files)}: it proves 4 commits "
        "down to run/00000000, and 28 records with their files"
    )
    newest = leaf_paths(Branches(files).read("run", LAST).nodes[Stage.TRAIN])[0]
    assert any(newest in note.where for note in report.notes)
    assert len(report.notes) == 2, "the newest checkpoint and the newest evaluation"
    older = check_store(files, "run", head=head(files, 1)[:16])
    assert older.findings == [] and str(older.proof).startswith("run/00000001 has the digest")
    assert any(
        "newer than the digest" in note.problem and "run/00000003" in note.problem
        for note in older.notes
    )


@pytest.mark.parametrize("forgery", FORGERIES, ids=lambda forgery: forgery.name)
def test_a_forgery_of_records_files_and_seals_is_named_by_the_chain(root: Path, forgery: Forgery):
    held = head(Files(root))
    forger = Forger(root)
    expected = forgery.edit(forger)
    forger.save(rechain=False)
    found = [
        one for one in check_store(Files(root), "run", head=held).findings if one.rule == "chain"
    ]
    assert any(expected in one.where for one in found), found


@pytest.mark.parametrize("forgery", FORGERIES, ids=lambda forgery: forgery.name)
def test_a_forgery_of_the_whole_store_is_found_only_with_a_digest_that_was_kept(
    root: Path, forgery: Forgery
):
    held = head(Files(root))
    forger = Forger(root)
    forgery.edit(forger)
    forger.save(rechain=True)
    assert check_store(Files(root), "run").findings == [], "the store alone shows no change"
    report = check_store(Files(root), "run", head=held)
    assert [(one.rule, held in one.problem) for one in report.findings] == [("chain", True)]
    assert report.proof is None


def test_a_change_after_the_held_commit_does_not_break_its_proof(root: Path):
    held = head(Files(root), 0)
    forger = Forger(root)
    forger.node(LAST, Stage.TRAIN)["outputs"]["metrics"] = {}
    forger.save(rechain=True)
    report = check_store(Files(root), "run", head=held)
    assert report.findings == [] and str(report.proof).startswith("run/00000000 has the digest")


def test_a_commit_without_a_parent_digest_breaks_the_proof(root: Path):
    files = Files(root)
    held = head(Files(root))
    files.delete(commit_path("run", 1))
    report = check_store(files, "run", head=held)
    assert any("run/00000001" in one for one in texts(report))
    assert "its history was changed" in str(report.proof)


def test_a_file_that_differs_from_its_node_breaks_the_proof(root: Path):
    held = head(Files(root))
    shard = next(root.glob("plans/*/groups/*.parquet"))
    data = shard.read_bytes()
    shard.unlink()
    shard.write_bytes(data[:-1] + b"0")
    report = check_store(Files(root), "run", head=held)
    assert "files" in {one.rule for one in report.findings}
    assert "its history was changed" in str(report.proof)


def test_every_record_of_a_history_except_the_newest_leaves_is_fixed(local_files: Files):
    """The store has segments, gates, draws and forks."""
    build(local_files)
    for run, k in (("run", 4), ("fork", 3)):
        report = check_store(local_files, run, head=head(local_files, k, run))
        assert report.findings == []
        unfixed = {note.where.rpartition("store/")[2].split("/")[1] for note in report.notes}
        assert unfixed <= {"checkpoint", "eval", "run", "segment"}, report.notes


def test_a_segment_is_fixed_with_its_pointer_and_checkpoint(local_files: Files):
    run = Chained(local_files).start().go(2)
    replaced = Branches(local_files).read("run", 1).nodes[Stage.TRAIN]
    base = (
        leaf_paths(Branches(local_files).read("run", 0).nodes[Stage.TRAIN])[0]
        .rpartition("/")[2]
        .removesuffix(".json")
    )
    segment = Nodes(local_files).commit(
        make_node(Stage.SEGMENT, {"weights": replaced, "base": base})
    )
    run.keep(segment.digest, 22)
    Segments(local_files).record("run", 2, 1, weights=replaced, segment=segment.digest)
    newest = Branches(local_files).newest("run")
    assert newest is not None
    retrained = newest.model_copy(update={"nodes": {**newest.nodes, Stage.TRAIN: segment.digest}})
    plan = run.plan(2, newest.data)
    planned = Plans(local_files).write(plan)
    nodes = run.nodes(plan, planned, retrained, None)
    made = Branches(local_files).commit(run.commit_of(plan, planned, nodes, newest))
    assert node_path(Stage.SEGMENT, segment.digest) in made.records
    assert any(path.startswith("branches/run/segments/") for path in made.records)
    assert leaf_paths(segment.digest)[0] in made.leaves
    assert check_store(local_files, "run", head=head(local_files, 2)).findings == []


def test_a_fork_is_proved_through_its_parent(local_files: Files):
    Chained(local_files).start().go(3)
    Chained(local_files, "fork").start(parent="run/00000001").go(2)
    first = Branches(local_files).read("fork", 2)
    assert first.parent_sha256 == head(local_files, 1), "digest of a commit of the other branch"
    assert "branches/fork/config.json" in first.records
    report = check_store(local_files, "fork", head=head(local_files, 3, "fork"))
    assert report.findings == [] and "4 commits down to run/00000000" in str(report.proof)
    held = head(local_files, 1)
    assert check_store(local_files, "fork", head=held).findings == []
    Chained(local_files, "begun").start(parent="run/00000001")
    begun = check_store(local_files, "begun", head=held)
    assert begun.findings == [] and any(
        "branches/begun/config.json" in note.where for note in begun.notes
    ), "no commit names it"
    other = check_store(local_files, "fork", head=head(local_files, 2))
    assert ["belongs to another run" in one for one in texts(other)] == [True], (
        "the parent continued with other commits"
    )


def test_a_leaf_is_named_by_the_first_commit_after_it(local_files: Files):
    run = Chained(local_files).start()
    first = run.iterate()
    second = None
    assert first is not None
    checkpoint, measured = first.awaited
    assert first.leaves == {}
    run.keep(first.nodes[Stage.TRAIN], 1)
    second = run.iterate()
    assert second is not None and set(second.leaves) == {checkpoint, measured}
    third = run.iterate()
    assert third is not None and third.leaves == {}
    assert [path for path in third.awaited if path in second.awaited] == list(second.awaited), (
        "still due"
    )
    run.keep(third.nodes[Stage.TRAIN], 3)
    fourth = run.iterate()
    assert fourth is not None
    assert second.awaited[0] not in fourth.awaited, (
        "a later checkpoint exists, so its upload was abandoned"
    )
    assert second.awaited[1] in fourth.awaited


def test_an_equal_commit_returns_the_first_one_despite_later_records(local_files: Files):
    run = Chained(local_files).start().go(1)
    second = run.iterate()
    assert second is not None
    run.keep(second.nodes[Stage.TRAIN], 2)
    before = head(local_files, 1)
    again = second.model_copy(
        update={"attempt": "later", "created": "", "awaited": (), "leaves": {}}
    )
    assert (
        Branches(local_files).commit(again, look_for=leaf_paths(second.nodes[Stage.TRAIN]))
        == second
    )
    assert head(local_files, 1) == before


def test_a_record_that_was_rewritten_since_the_first_attempt_refuses_the_second(local_files: Files):
    run = Chained(local_files).start().go(1)
    made = run.iterate()
    assert made is not None
    node = Nodes(local_files).get(Stage.TRAIN, made.nodes[Stage.TRAIN])
    path = node_path(Stage.TRAIN, node.digest)
    local_files.delete(path)
    Nodes(local_files).commit(node.model_copy(update={"outputs": {"version": 9}}))
    with pytest.raises(ObjectConflict, match="records"):
        Branches(local_files).commit(made.model_copy(update={"attempt": "", "created": ""}))


def test_the_number_of_requests_of_a_commit_does_not_grow_with_the_history(
    local_files: Files, monkeypatch: pytest.MonkeyPatch
):
    run = Chained(local_files).start()
    counts: list[int] = []
    requests: list[str] = []
    read = Files.read
    exists = Files.exists
    monkeypatch.setattr(
        Files,
        "read",
        lambda files, path, *more: (requests.append(path), read(files, path, *more))[1],
    )
    monkeypatch.setattr(
        Files, "exists", lambda files, path: (requests.append(path), exists(files, path))[1]
    )
    commit_it = Branches.commit

    def counted(branches: Branches, made: Commit) -> Commit:
        requests.clear()
        done = commit_it(branches, made)
        counts.append(len(requests))
        return done

    monkeypatch.setattr(Branches, "commit", counted)
    run.go(6)
    assert len(set(counts[1:])) == 1 and counts[1] <= 14, counts
    assert not any(path.endswith((".parquet", ".distcp")) for path in requests), (
        "no data is read again"
    )


def test_a_commit_of_this_format_without_digests_is_named(root: Path):
    forger = Forger(root)
    forger.commit(LAST).update(parent_sha256=None, records={})
    forger.save(rechain=False)
    assert any(
        "names no digest of its parent" in one for one in texts(check_store(Files(root), "run"))
    )


def test_a_commit_with_a_damaged_record_is_refused(local_files: Files):
    run = Chained(local_files).start().go(1)
    newest = Branches(local_files).newest("run")
    assert newest is not None
    plan = run.plan(1, newest.data)
    planned = Plans(local_files).write(plan)
    nodes = run.nodes(plan, planned, newest, None)
    path = node_path(Stage.REWARD, nodes[Stage.REWARD])
    data = local_files.read(path)
    local_files.delete(path)
    local_files.create(path, data[:-3])
    with pytest.raises(ObjectCorrupt, match=nodes[Stage.REWARD]):
        Branches(local_files).commit(run.commit_of(plan, planned, nodes, newest))


@pytest.fixture
def collect(local_files: Files, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def call() -> None:
        words = [
            "tools.gc",
            "--store",
            local_files.root,
            "--grace",
            "0s",
            "--keep-checkpoints",
            "1",
            "--delete",
        ]
        monkeypatch.setattr(sys, "argv", words)
        assert gc.main() == 0

    return call


def test_a_collected_checkpoint_is_a_note_and_a_lost_one_is_a_finding(
    local_files: Files, collect: Callable[[], None]
):
    run = Chained(local_files).start().go(4)
    held = head(local_files)
    collect()
    report = check_store(local_files, "run", head=held)
    assert report.findings == [] and "it proves 4 commits" in str(report.proof)
    assert [
        "3 checkpoints" in note.problem
        for note in report.notes
        if "garbage collection" in note.problem
    ] == [True]
    collect()
    assert check_store(local_files, "run", head=held).findings == [], (
        "the records of the removal stay"
    )
    oldest = Branches(local_files).read("run", 0).nodes[Stage.TRAIN]
    run.keep(oldest, 9)
    made_again = check_store(local_files, "run", head=held)
    assert made_again.findings == []
    assert any("recorded again since" in note.problem for note in made_again.notes)
    run.go(1)
    measured = next(
        path for path in Branches(local_files).read("run", 1).leaves if "/eval/" in path
    )
    local_files.delete(measured)
    local_files.delete(measured.replace("nodes", "receipts"))
    assert any(
        measured in one and "cannot be read" in one
        for one in texts(check_store(local_files, "run", head=held))
    )


def test_records_of_removals_are_removed_with_their_run(
    local_files: Files, monkeypatch: pytest.MonkeyPatch
):
    Chained(local_files).start().go(2)
    for words in (["--keep-checkpoints", "1"], ["--remove", "run"], []):
        monkeypatch.setattr(
            sys,
            "argv",
            ["tools.gc", "--store", local_files.root, "--grace", "0s", *words, "--delete"],
        )
        assert gc.main() == 0
    assert [name for name in local_files.list() if "/epochs/" not in name] == []


def test_a_removal_under_another_name_is_named(local_files: Files, collect: Callable[[], None]):
    Chained(local_files).start().go(3)
    collect()
    path = next(path for path in local_files.list("receipts") if path.endswith(".removed.json"))
    data = local_files.read(path)
    other = path.replace(path[-29:-13], "0" * 16)
    local_files.create(other, data)
    assert any(
        "the receipt belongs to another record" in one for one in texts(check_store(local_files))
    )


def test_tables_are_compared_with_the_records_if_a_digest_is_held(local_files: Files):
    Chained(local_files).start().go(3)
    scalars.update(local_files, "run")
    part = scalars.parts_of(local_files, "run", "metrics")[0]
    rows = scalars.read_part(local_files, "metrics", part)
    local_files.delete(part.path)
    forged = [
        {**row, "value": 0.0} if row["name"] == "train/loss" else row for row in rows.to_pylist()
    ]
    path = scalars._write(
        local_files,
        "run",
        "metrics",
        part.first,
        part.end,
        pa.Table.from_pylist(forged, rows.schema),
    )
    assert check_store(local_files, "run").findings == []
    assert any(
        path in one for one in texts(check_store(local_files, "run", head=head(local_files, 2)))
    )


def test_the_command_prints_a_digest_and_verifies_it(
    root: Path, tool: Callable[..., int], capsys: pytest.CaptureFixture[str]
):
    assert tool("head", "--run", "run") == 0
    branch, iteration, sha256 = capsys.readouterr().out.split()
    stored = (root / "branches/run/00000003.json").read_bytes()
    assert (branch, iteration, sha256) == ("run", "3", hashlib.sha256(stored).hexdigest())
    assert tool("verify", "--run", "run", "--head", sha256) == 0
    output = capsys.readouterr().out
    assert (
        f"run/00000003 has the digest {sha256}: it proves 4 commits" in output
        and "nothing is wrong" in output
    )
    assert tool("head", "--run", "run@1") == 0 and capsys.readouterr().out.startswith("run 1 ")
    assert tool("verify", "--run", "run", "--head", sha256[:16].upper()) == 0
    assert tool("verify", "--run", "run", "--head", "0" * 64) == 1
    assert "no commit of its history has the digest 0000" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("verify", "--run", "run", "--head", "0123"), "16 to 64 hexadecimal digits"),
        (("verify", "--run", "run", "--head", "run/00000001"), "not the digest of a commit"),
        (("verify", "--head", "0" * 64), "give --run too"),
        (("head", "--run", "run@9"), "the object does not exist"),
        (("head",), "no run given"),
    ],
)
def test_wrong_usage_is_named(
    tool: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    problem: str,
):
    assert tool(*words) == 2
    assert problem in capsys.readouterr().err


def test_a_run_without_a_commit_has_no_digest(local_files: Files):
    Run(local_files).start()
    report = check_store(local_files, "run", head="0" * 64)
    assert ["the history has no commit" in one for one in texts(report)] == [True]
    with pytest.raises(ConfigError, match="needs a run"):
        check_store(local_files, head="0" * 64)


@pytest.mark.integration
def test_a_store_on_s3_is_proved(files: Files):
    Chained(files).start().go(2)
    assert check_store(files, "run", head=head(files, 1)).findings == []


def test_an_unreachable_store_is_not_a_forgery(root: Path, monkeypatch: pytest.MonkeyPatch):
    def away(_self: object, path: str) -> object:
        raise StoreError("S3 request failed", where=path)

    held = head(Files(root))
    monkeypatch.setattr(LocalBackend, "_open", away)
    monkeypatch.setattr(LocalBackend, "stat", away)
    with pytest.raises(StoreError, match="request failed"):
        check_store(Files(root), "run", head=held)


def test_scores_of_a_filter_first_weights_and_opened_gates_are_fixed(local_files: Files):
    """The iterations were reprocessed, started from another run's weights, or passed an opened
    gate."""
    nodes = Nodes(local_files)
    branches = Branches(local_files)
    source = nodes.commit(make_node(Stage.ROLLOUT, {}, drawn="first"))
    judging = nodes.commit(make_node(Stage.REWARD, {"rollout": source.digest}))
    chosen = nodes.commit(make_node(Stage.ROLLOUT, {}, of=source.digest, judged_by=judging.digest))
    weights = nodes.commit(make_node(Stage.CHECKPOINT, {"weights": "of another run"}))
    init = nodes.commit(make_node(Stage.INIT, {"start_from": weights.digest}))
    train = nodes.commit(make_node(Stage.TRAIN, {"before": init.digest}))
    gate = gate_path("run", 0, train.digest)
    local_files.create(gate, b"{}")
    branches.create("run", {"gates": {"bounds": [{"metric": "train/loss"}]}}, init.digest)
    made = branches.commit(
        commit(0, plans=(), nodes={Stage.ROLLOUT: chosen.digest, Stage.TRAIN: train.digest})
    )
    named = [node_path(node.stage, node.digest) for node in (source, judging, chosen, init, train)]
    assert set(made.records) == {"branches/run/config.json", gate, *named}
    assert set(made.leaves) == {node_path(Stage.CHECKPOINT, weights.digest)}
    assert made.parent_sha256 == made.records["branches/run/config.json"]
