"""Requested numbers of engines in the store (rlpipe.store.engine_targets)."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlpipe.errors import ObjectCorrupt
from rlpipe.store import engine_targets
from rlpipe.store.audit.snapshot import Snapshot
from rlpipe.store.audit.unexpected_files import of_branch
from rlpipe.store.engine_targets import EngineTargets, target_path
from rlpipe.store.objects.files import Files


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path / "store")


def test_the_last_request_counts(files: Files):
    targets = EngineTargets(files)
    assert targets.newest("run") is None and targets.following("run", None) is None
    first = targets.request("run", 3, configured=2)
    targets.request("other", 9, configured=2)
    assert targets.newest("run") == targets.following("run", None) == first
    third = [targets.request("run", engines, configured=2) for engines in (1, 4)][1]
    assert targets.following("run", first) == targets.newest("run") == third
    assert (third.number, third.of(2)) == (2, 4)


def test_a_start_with_another_number_of_engines_replaces_the_request(files: Files):
    target = EngineTargets(files).request("run", 3, configured=2)
    assert (target.of(2), target.of(4)) == (3, 4)


def test_two_requests_at_once_are_both_kept(files: Files, monkeypatch: pytest.MonkeyPatch):
    slow, fast = EngineTargets(files), EngineTargets(files)
    seal = engine_targets.seal

    def after_the_other(record, path: str) -> bytes:
        monkeypatch.setattr(engine_targets, "seal", seal)
        fast.request("run", 5, configured=2)
        return seal(record, path)

    monkeypatch.setattr(engine_targets, "seal", after_the_other)
    assert slow.request("run", 7, configured=2).number == 1
    newest = fast.newest("run")
    assert newest is not None and newest.engines == 7


def test_a_changed_record_is_refused_with_advice(files: Files, tmp_path: Path):
    EngineTargets(files).request("run", 3, configured=2)
    path = tmp_path / "store" / target_path("run", 0)
    path.chmod(0o644)
    path.write_text(path.read_text().replace('"engines":3', '"engines":4'))
    with pytest.raises(ObjectCorrupt) as caught:
        EngineTargets(Files(tmp_path / "store")).newest("run")
    assert "rlpipe engines RUN N" in str(caught.value.do)


def test_an_audit_expects_the_records(files: Files):
    EngineTargets(files).request("run", 3, configured=2)
    assert list(of_branch(Snapshot(files.root), "run")) == []
