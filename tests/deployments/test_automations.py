"""Alerts as automations: which there are, what they look for, whom they tell."""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID, uuid4

import pytest
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState, SendNotification
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture

from deployments.automations import HEARTBEAT_S, PREFIX, automations
from deployments.site import Alerts, Site
from tasks.gates import WHY

BLOCK, POOL = uuid4(), uuid4()


def by_name(block: UUID | None, alerts: Alerts | None = None) -> dict[str, AutomationCore]:
    return {one.name.removeprefix(PREFIX): one for one in automations(Site(alerts=alerts or Alerts()), block, POOL)}


def trigger(one: AutomationCore) -> EventTrigger:
    assert isinstance(one.trigger, EventTrigger)
    return one.trigger


def test_without_a_block_nobody_is_told_and_a_silent_run_is_crashed_all_the_same():
    (one,) = by_name(None).values()
    (action,) = one.actions
    assert isinstance(action, ChangeFlowRunState)
    assert (action.state, trigger(one).posture, trigger(one).within) == (
        StateType.CRASHED,
        Posture.Proactive,
        timedelta(seconds=240),
    )
    assert by_name(None, Alerts(silent_after_s=None)) == {}


def test_silence_is_longer_than_a_sign_of_life_may_take():
    least = Alerts.model_fields["silent_after_s"].metadata[0].ge
    assert least > HEARTBEAT_S


def test_every_end_of_a_run_ends_its_silence():
    expected = trigger(by_name(None)["a silent run is crashed"]).expect
    over = ("Completed", "Failed", "Crashed", "Cancelled", "AwaitingRetry", "Paused", "Suspended")
    assert {f"prefect.flow-run.{state}" for state in over} <= expected


@pytest.mark.parametrize(
    ("name", "event"),
    [
        ("a run failed", "prefect.flow-run.Failed"),
        ("a run waits for somebody", "prefect.flow-run.Paused"),
        ("no worker", "prefect.work-pool.not-ready"),
    ],
)
def test_the_block_is_told(name: str, event: str):
    one = by_name(BLOCK)[name]
    (action,) = one.actions
    assert isinstance(action, SendNotification)
    assert action.block_document_id == BLOCK
    assert event in trigger(one).expect


def test_who_is_told_that_a_run_waits_is_told_why():
    (action,) = by_name(BLOCK)["a run waits for somebody"].actions
    assert isinstance(action, SendNotification) and f"flow_run.labels['{WHY}']" in action.body


@pytest.mark.parametrize(("name", "told"), [("a run failed", False), ("a run waits for somebody", True)])
def test_of_iterations_it_is_told_when_they_wait_but_not_when_they_fail_for_they_are_put_back(name: str, told: bool):
    related = trigger(by_name(BLOCK)[name]).model_dump(mode="json")["match_related"]
    (names,) = (one["prefect.resource.name"] for one in related if "prefect.resource.name" in one)
    assert "train" in names
    assert ("iteration" in names) is told
