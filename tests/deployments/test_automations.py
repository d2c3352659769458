"""Alerts as automations: triggers, actions and receivers (deployments.automations)."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState, SendNotification
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture

from deployments.automations import HEARTBEAT_S, apply_automations, prefix, site_automations
from deployments.declarations import declared
from deployments.site import Alerts, Site
from tasks.gates import REASON_LABEL

BLOCK = uuid4()
POOL = uuid4()


def by_name(block: UUID | None, alerts: Alerts | None = None) -> dict[str, AutomationCore]:
    site = Site(alerts=alerts or Alerts())
    return {one.name.removeprefix(prefix(site)): one for one in site_automations(site, block, POOL)}


def trigger(one: AutomationCore) -> EventTrigger:
    assert isinstance(one.trigger, EventTrigger)
    return one.trigger


def test_without_a_block_only_silent_runs_are_crashed():
    (one,) = by_name(None).values()
    (action,) = one.actions
    assert isinstance(action, ChangeFlowRunState)
    assert (action.state, trigger(one).posture, trigger(one).within) == (
        StateType.CRASHED,
        Posture.Proactive,
        timedelta(seconds=240),
    )
    assert by_name(None, Alerts(silent_after_s=None)) == {}


def test_the_silence_limit_is_longer_than_the_heartbeat_interval():
    least = Alerts.model_fields["silent_after_s"].metadata[0].ge
    assert least > HEARTBEAT_S


def test_every_final_state_ends_the_wait_for_heartbeats():
    expected = trigger(by_name(None)["a silent run is crashed"]).expect
    over = ("Completed", "Failed", "Crashed", "Cancelled", "AwaitingRetry", "Paused", "Suspended")
    assert {f"prefect.flow-run.{state}" for state in over} <= expected


@pytest.mark.parametrize(
    ("name", "event"),
    [
        ("a run failed", "prefect.flow-run.Failed"),
        ("a run waits for a person", "prefect.flow-run.Paused"),
        ("no worker", "prefect.work-pool.not-ready"),
    ],
)
def test_notifications_go_to_the_block(name: str, event: str):
    one = by_name(BLOCK)[name]
    (action,) = one.actions
    assert isinstance(action, SendNotification)
    assert action.block_document_id == BLOCK
    assert event in trigger(one).expect


def test_the_notification_of_a_pause_contains_the_reason():
    (action,) = by_name(BLOCK)["a run waits for a person"].actions
    assert (
        isinstance(action, SendNotification) and f"flow_run.labels['{REASON_LABEL}']" in action.body
    )


@pytest.mark.parametrize(
    ("name", "told"), [("a run failed", False), ("a run waits for a person", True)]
)
def test_iterations_notify_pauses_but_not_failures_which_are_retried(name: str, told: bool):
    related = trigger(by_name(BLOCK)[name]).model_dump(mode="json")["match_related"]
    (names,) = (one["prefect.resource.name"] for one in related if "prefect.resource.name" in one)
    assert "train" in names
    assert ("iteration" in names) is told


class Server:
    """Replaces a Prefect server; records calls about automations."""

    def __init__(self) -> None:
        self.kept: dict[UUID, AutomationCore] = {}

    @property
    def names(self) -> set[str]:
        return {one.name for one in self.kept.values()}

    async def read_work_pool(self, name: str) -> Any:
        return SimpleNamespace(id=POOL)

    async def read_block_document_by_name(self, name: str, block_type_slug: str) -> Any:
        return SimpleNamespace(id=BLOCK)

    async def read_automations(self) -> list[Any]:
        return [SimpleNamespace(id=number, name=one.name) for number, one in self.kept.items()]

    async def create_automation(self, automation: AutomationCore) -> None:
        self.kept[uuid4()] = automation

    async def update_automation(self, number: UUID, automation: AutomationCore) -> None:
        self.kept[number] = automation

    async def delete_automation(self, number: UUID) -> None:
        del self.kept[number]


async def test_two_sites_on_one_server_keep_separate_alerts():
    server: Any = Server()
    told = Site(pool="a", alerts=Alerts(block="slack-webhook/oncall"))
    first = set(await apply_automations(server, told))
    second = set(await apply_automations(server, Site(pool="b")))
    assert (len(first), len(second)) == (4, 1) and not first & second
    assert server.names == first | second
    await apply_automations(server, Site(pool="a", alerts=Alerts(silent_after_s=None)))
    assert server.names == second, "what a place does not want any more is removed"


@pytest.mark.parametrize("name", ["a silent run is crashed", "a run failed"])
def test_the_deployment_tag_separates_runs_of_two_sites(name: str):
    site = Site(pool="a")
    related = trigger(
        {one.name: one for one in site_automations(site, BLOCK, POOL)}[prefix(site) + name]
    ).model_dump(mode="json")
    assert f"prefect.tag.{site.tag}" in str(related["match_related"])
    assert all(site.tag in one.tags for one in declared(site, {"train", "fork"}))
