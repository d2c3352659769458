"""Serving without a work pool: equal deployments, and no limit for iterations."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from deployments.apply import report_unreachable_server
from deployments.serve import check_limit, served
from deployments.site import Entry, Schedule, Site
from rlpipe.errors import ConfigError, ResourceError


async def test_the_chosen_flows_are_served_with_their_schedules(
    repository: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(repository)
    entry = Entry(
        flow="evaluate", name="often", parameters={"run": "r"}, schedules=(Schedule(interval_s=60),)
    )
    made = {
        f"{one.flow_name}/{one.name}": one
        for one in await served(Site(deployments=(entry,)), ["iteration", "evaluate"])
    }
    assert set(made) == {"iteration/iteration", "evaluate/evaluate", "evaluate/often"}
    assert [len(one.schedules or []) for one in made.values()] == [0, 0, 1]
    assert made["iteration/iteration"].entrypoint == "flows/iteration_run.py:iteration_run"
    assert all(one.work_pool_name is None for one in made.values())


def test_the_error_names_an_unreachable_server_without_its_password():
    with (
        temporary_settings({PREFECT_API_URL: "http://me:secret@10.0.0.1:4200/api"}),
        pytest.raises(
            ResourceError, match=r"does not answer\n *found: *http://10\.0\.0\.1:4200/api: refused"
        ) as raised,
        report_unreachable_server(),
    ):
        raise httpx.ConnectError("refused")
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    "chosen", [[], *([flow, "iteration"] for flow in ("train", "fork", "reprocess"))]
)
def test_runs_and_iterations_cannot_share_a_limit(chosen: list[str]):
    with pytest.raises(ConfigError, match="from another process"):
        check_limit(chosen, 1)
    check_limit(chosen, None)
    check_limit(["train", "fork", "reprocess"], 1)
    check_limit(["iteration", "evaluate"], 1)
