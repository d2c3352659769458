"""Prefect's own share of orchestration (tools.bench.empty_dag)."""

from __future__ import annotations

import pytest

from tools.bench import empty_dag


@pytest.mark.integration
async def test_empty_iterations_cost_seconds_of_the_flow_process_and_of_the_server(
    prefect_server: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(empty_dag, "LATER_S", 0.0)
    monkeypatch.setattr(empty_dag, "WARM_UP", 0)
    spent = await empty_dag.measure(1, empty_dag.listener(prefect_server))
    assert all(seconds > 0 for seconds in spent)
