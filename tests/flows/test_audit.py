"""The audit flow: result, tables and errors, without a Prefect server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flows import audit as flow
from rlpipe.errors import Mismatch
from rlpipe.store.branches import Branches
from rlpipe.store.nodes import node_path
from rlpipe.store.objects.files import Files
from rlpipe.types import Stage
from tests.store.lineage import Run


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[dict[str, Any]]]:
    """Created tables, by key."""
    left: dict[str, list[dict[str, Any]]] = {}

    async def leave(rows: list[dict[str, Any]], key: str, description: str) -> None:
        left[key] = rows

    monkeypatch.setattr(flow, "acreate_table_artifact", leave)
    return left


async def test_an_audit_without_findings_returns_the_anomalies(
    local_files: Files, tables: dict[str, list[dict[str, Any]]]
):
    Run(local_files).start().iterate()
    assert await flow.audit.fn("run", local_files.root) == {
        "run": "run",
        "findings": 0,
        "unusual": 1,
    }
    assert tables["run-audit"] == [{"result": "nothing"}]
    assert tables["run-unusual"][0]["rule"] == "no_signal"


async def test_the_error_names_a_missing_manifest(
    local_files: Files, tables: dict[str, list[dict[str, Any]]]
):
    Run(local_files).start().iterate()
    reward = Branches(local_files).read("run", 0).nodes[Stage.REWARD]
    local_files.delete(node_path(Stage.REWARD, reward))
    with pytest.raises(Mismatch, match="records run/00000000 reward"):
        await flow.audit.fn("run", local_files.root)
    assert reward in tables["run-audit"][0]["problem"]


@pytest.fixture
def local_files(tmp_path: Path) -> Files:
    """An empty store on local disk."""
    return Files(tmp_path / "store")
