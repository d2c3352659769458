"""Alerts as automations of the Prefect server: a run failed, a run is paused, no worker answers.

One automation needs no notification block: a run whose process is silent becomes Crashed. A worker
that dies together with a flow's process reports nothing, so the run would stay Running. A run that
was only slow continues unharmed: a retry meanwhile is refused, because the run still holds the
epoch of its branch.
"""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState, SendNotification
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.exceptions import ObjectNotFound

from deployments.site import Alerts, Site
from rlpipe.errors import ConfigError

HEARTBEAT_S = 60
"""Interval at which the process of a flow run reports to the server (see
`alerts.silent_after_s`).
"""
HEARTBEAT = "prefect.flow-run.heartbeat"
FINAL_STATES = (
    "Completed",
    "Failed",
    "Crashed",
    "Cancelled",
    "AwaitingRetry",
    "Paused",
    "Suspended",
)
RUNS = ["train", "fork", "evaluate", "reprocess", "convert", "audit", "engines"]
"""Flows that Prefect does not retry by itself. Iterations are retried."""
RUN = "{{ flow.name }}/{{ flow_run.name }}"
REASON = "{{ flow_run.labels['rlpipe.waits'] or flow_run.state.message or 'paused by a person' }}"
"""A gate writes the reason to this label (`tasks.gates.REASON_LABEL`)."""


def site_automations(site: Site, block: UUID | None, pool: UUID) -> list[AutomationCore]:
    """Return every automation of a site. `block`: id of the notification block; None: no alerts."""
    silent_after_s = site.alerts.silent_after_s
    automations = [] if silent_after_s is None else [_silent(site, silent_after_s)]
    if block is not None:
        automations += [_failed(site, block), _paused(site, block), _no_worker(site, block, pool)]
    return automations


def prefix(site: Site) -> str:
    """Return the start of the names of a site's automations."""
    return f"{site.tag}: "


def _silent(site: Site, after_s: float) -> AutomationCore:
    final = {f"prefect.flow-run.{state}" for state in FINAL_STATES}
    return AutomationCore(
        name=f"{prefix(site)}a silent run is crashed",
        description=f"its process sent no heartbeat for {after_s:g} s; Retry becomes possible",
        trigger=EventTrigger(
            match={"prefect.resource.id": "prefect.flow-run.*"},
            match_related=_tagged(site),
            after={HEARTBEAT},
            expect={HEARTBEAT, *final},
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=after_s),
        ),
        actions=[
            ChangeFlowRunState(
                name="Crashed",
                state=StateType.CRASHED,
                message=f"its process sent no heartbeat for {after_s:g} s",
                # Not forced: a run that has ended meanwhile keeps its state.
                force=False,
            )
        ],
    )


def _failed(site: Site, block: UUID) -> AutomationCore:
    return AutomationCore(
        name=f"{prefix(site)}a run failed",
        trigger=_on_states("Failed", "Crashed", "TimedOut", related=[_tagged(site), _flows(RUNS)]),
        actions=[
            _notify(
                block,
                f"{RUN} {{{{ flow_run.state.name }}}}",
                "{{ flow_run.state.message }}\n{{ flow_run|ui_url }}",
            )
        ],
    )


def _paused(site: Site, block: UUID) -> AutomationCore:
    """Match all sites: an iteration inside its run's process has no tags of a deployment."""
    return AutomationCore(
        name=f"{prefix(site)}a run waits for a person",
        trigger=_on_states("Paused", "Suspended", related=[_flows([*RUNS, "iteration"])]),
        actions=[
            _notify(
                block,
                f"{RUN} is paused",
                f"{REASON}\nResume or cancel it: {{{{ flow_run|ui_url }}}}",
            )
        ],
    )


def _no_worker(site: Site, block: UUID, pool: UUID) -> AutomationCore:
    return AutomationCore(
        name=f"{prefix(site)}no worker",
        trigger=EventTrigger(
            match={"prefect.resource.id": f"prefect.work-pool.{pool}"},
            expect={"prefect.work-pool.not-ready"},
            posture=Posture.Reactive,
            threshold=1,
        ),
        actions=[
            _notify(
                block,
                "no worker of {{ work_pool.name }} answers",
                "Its runs wait until a worker is started.",
            )
        ],
    )


def _tagged(site: Site) -> dict[str, str | list[str]]:
    return {"prefect.resource.role": "tag", "prefect.resource.id": f"prefect.tag.{site.tag}"}


def _flows(names: list[str]) -> dict[str, str | list[str]]:
    return {"prefect.resource.role": "flow", "prefect.resource.name": names}


def _on_states(*states: str, related: list[dict[str, str | list[str]]]) -> EventTrigger:
    """Return a trigger: a flow run enters one of these states."""
    return EventTrigger(
        match={"prefect.resource.id": "prefect.flow-run.*"},
        match_related=[*related],
        expect={f"prefect.flow-run.{state}" for state in states},
        for_each={"prefect.resource.id"},
        posture=Posture.Reactive,
        threshold=1,
    )


def _notify(block: UUID, subject: str, body: str) -> SendNotification:
    return SendNotification(block_document_id=block, subject=subject, body=body)


async def apply_automations(client: PrefectClient, site: Site) -> list[str]:
    """Create, update or remove a site's automations, by name; return the names.

    Automations of other sites stay as they are. Raises: ConfigError without the notification block.
    """
    pool = await client.read_work_pool(site.pool)
    block = await block_id(client, site.alerts)
    declared = {
        automation.name: automation for automation in site_automations(site, block, pool.id)
    }
    existing = {
        automation.name: automation
        for automation in await client.read_automations()
        if automation.name.startswith(prefix(site))
    }
    for name, automation in declared.items():
        if name in existing:
            await client.update_automation(existing[name].id, automation)
        else:
            await client.create_automation(automation)
    # For example after `alerts.block` was removed from the site.
    for name in existing.keys() - declared.keys():
        await client.delete_automation(existing[name].id)
    return sorted(declared)


async def block_id(client: PrefectClient, alerts: Alerts) -> UUID | None:
    """Return the id of the notification block. Raises: ConfigError if it does not exist."""
    if alerts.block is None:
        return None
    kind, _, name = alerts.block.partition("/")
    try:
        return (await client.read_block_document_by_name(name, block_type_slug=kind)).id
    except ObjectNotFound as error:
        raise ConfigError(
            "the notification block does not exist on the Prefect server",
            where="alerts.block",
            found=alerts.block,
            expected="<type>/<name>, such as slack-webhook/oncall",
            do="create it in Prefect's UI (Blocks), or leave alerts.block out",
        ) from error
