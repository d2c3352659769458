"""Alerts, as automations of the Prefect server: who is told that a run failed, waits for somebody,
or has no worker; and a run whose process is silent becomes Crashed.

The last needs nobody to tell: a worker that dies together with a flow's process reports nothing,
and the run would stay Running. A run that only looked dead goes on unharmed; whoever retries it
meanwhile is refused, for it still drives its branch.

Not here: which notification block there is (made in Prefect's pages, where its secret stays), or
when iterations are put back (`flows.deployed`).
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
"""How often the process of a flow run says that it lives; what `alerts.silent_after_s` waits
for."""
HEARTBEAT = "prefect.flow-run.heartbeat"
OVER = ("Completed", "Failed", "Crashed", "Cancelled", "AwaitingRetry", "Paused", "Suspended")
RUNS = ["train", "fork", "evaluate", "reprocess", "convert", "audit"]
"""Flows that nobody puts back by themselves, as iterations are."""
RUN = "{{ flow.name }}/{{ flow_run.name }}"
WHY_IT_WAITS = (
    "{{ flow_run.labels['rlpipe.waits'] or flow_run.state.message or 'paused by somebody' }}"
)
"""A gate says why in a label (`tasks.gates.WHY`)."""


def automations(site: Site, block: UUID | None, pool: UUID) -> list[AutomationCore]:
    """Every automation of a site. `block`: the notification block's id; without it nobody is told
    of anything."""
    made = [] if site.alerts.silent_after_s is None else [_silent(site, site.alerts.silent_after_s)]
    if block is not None:
        made += [_failed(site, block), _waiting(site, block), _alone(site, block, pool)]
    return made


def prefix(site: Site) -> str:
    """How the names of a site's automations begin."""
    return f"{site.tag}: "


def _silent(site: Site, after_s: float) -> AutomationCore:
    over = {f"prefect.flow-run.{state}" for state in OVER}
    return AutomationCore(
        name=f"{prefix(site)}a silent run is crashed",
        description=f"no sign of life of its process for {after_s:g} s, so that Retry can be pressed",
        trigger=EventTrigger(
            match={"prefect.resource.id": "prefect.flow-run.*"},
            match_related=_tagged(site),
            after={HEARTBEAT},
            expect={HEARTBEAT, *over},
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=after_s),
        ),
        actions=[
            ChangeFlowRunState(
                name="Crashed",
                state=StateType.CRASHED,
                message=f"its process was silent for {after_s:g} s",
                force=False,
            )
        ],
    )


def _failed(site: Site, block: UUID) -> AutomationCore:
    return AutomationCore(
        name=f"{prefix(site)}a run failed",
        trigger=_seen("Failed", "Crashed", "TimedOut", related=[_tagged(site), _flows(RUNS)]),
        actions=[
            _told(
                block,
                f"{RUN} {{{{ flow_run.state.name }}}}",
                "{{ flow_run.state.message }}\n{{ flow_run|ui_url }}",
            )
        ],
    )


def _waiting(site: Site, block: UUID) -> AutomationCore:
    """Of any place on the server: an iteration within its run's process has no tags of a
    deployment."""
    return AutomationCore(
        name=f"{prefix(site)}a run waits for somebody",
        trigger=_seen("Paused", "Suspended", related=[_flows([*RUNS, "iteration"])]),
        actions=[
            _told(
                block,
                f"{RUN} waits",
                f"{WHY_IT_WAITS}\nResume or cancel it: {{{{ flow_run|ui_url }}}}",
            )
        ],
    )


def _alone(site: Site, block: UUID, pool: UUID) -> AutomationCore:
    return AutomationCore(
        name=f"{prefix(site)}no worker",
        trigger=EventTrigger(
            match={"prefect.resource.id": f"prefect.work-pool.{pool}"},
            expect={"prefect.work-pool.not-ready"},
            posture=Posture.Reactive,
            threshold=1,
        ),
        actions=[
            _told(
                block,
                "no worker of {{ work_pool.name }} answers",
                "Its runs wait until one is started again.",
            )
        ],
    )


def _tagged(site: Site) -> dict[str, str | list[str]]:
    return {"prefect.resource.role": "tag", "prefect.resource.id": f"prefect.tag.{site.tag}"}


def _flows(names: list[str]) -> dict[str, str | list[str]]:
    return {"prefect.resource.role": "flow", "prefect.resource.name": names}


def _seen(*states: str, related: list[dict[str, str | list[str]]]) -> EventTrigger:
    """A flow run enters one of these states."""
    return EventTrigger(
        match={"prefect.resource.id": "prefect.flow-run.*"},
        match_related=[*related],
        expect={f"prefect.flow-run.{state}" for state in states},
        for_each={"prefect.resource.id"},
        posture=Posture.Reactive,
        threshold=1,
    )


def _told(block: UUID, subject: str, body: str) -> SendNotification:
    return SendNotification(block_document_id=block, subject=subject, body=body)


async def keep_automations(client: PrefectClient, site: Site) -> list[str]:
    """Make, change or remove a site's automations of the server, by name; the names. Those of other
    places stay as they are.

    Raises: ConfigError if there is no such block.
    """
    pool = await client.read_work_pool(site.pool)
    wanted = {
        one.name: one for one in automations(site, await block_of(client, site.alerts), pool.id)
    }
    there = {
        one.name: one
        for one in await client.read_automations()
        if one.name.startswith(prefix(site))
    }
    for name, automation in wanted.items():
        if name in there:
            await client.update_automation(there[name].id, automation)
        else:
            await client.create_automation(automation)
    for name in there.keys() - wanted.keys():
        await client.delete_automation(there[name].id)
    return sorted(wanted)


async def block_of(client: PrefectClient, alerts: Alerts) -> UUID | None:
    """The id of the notification block that is told. Raises: ConfigError if there is none of this
    name."""
    if alerts.block is None:
        return None
    kind, _, name = alerts.block.partition("/")
    try:
        return (await client.read_block_document_by_name(name, block_type_slug=kind)).id
    except ObjectNotFound as error:
        raise ConfigError(
            "the Prefect server has no such notification block",
            where="alerts.block",
            found=alerts.block,
            expected="<type>/<name>, such as slack-webhook/oncall",
            do="make it in Prefect's pages (Blocks), or leave alerts.block out",
        ) from error
