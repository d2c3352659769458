"""Declared deployments: flows, recipes and a site's own, with queues and schedules."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from prefect.client.schemas.actions import DeploymentScheduleCreate

from deployments.declarations import FLOWS, Declaration, declared, entrypoints, timetable
from deployments.site import Entry, GpuSet, Schedule, Site, load_site
from rlpipe.config.load import recipes
from rlpipe.errors import ConfigError


def by_name(site: Site) -> dict[str, Declaration]:
    return {one.full_name: one for one in declared(site, set(FLOWS))}


def test_every_flow_and_every_recipe_has_a_deployment():
    names = set(by_name(Site()))
    assert {f"{flow}/{flow}" for flow in FLOWS} | {
        f"train/{recipe}" for recipe in recipes()
    } == names


def test_the_deployment_of_a_recipe_has_its_summary_and_the_description_of_the_flow():
    declarations = by_name(Site())
    text = declarations["train/spell_backward"].described("Train a recipe.")
    assert text.startswith("A tiny Qwen3, taught by examples")
    assert text.endswith("\n\nTrain a recipe.")
    assert declarations["fork/fork"].described("Train a fork.") == "Train a fork."


def test_only_training_has_a_queue_with_a_limit():
    queues = {one.flow: one.queue for one in by_name(Site()).values()}
    assert [queues.pop(flow) for flow in ("train", "fork")] == ["train", "train"]
    assert set(queues.values()) == {"default"}


def test_entrypoints_exist(repository: Path):
    for entrypoint in entrypoints().values():
        file, _, function = entrypoint.partition(":")
        assert f"def {function}(" in (repository / file).read_text()


def test_a_site_sets_gpus_and_settings_of_its_runs():
    entry = Entry(
        flow="train", name="n", parameters={"recipe": "search"}, gpu_set="b", tags=("mine",)
    )
    site = Site(
        gpu_sets={"b": GpuSet(gpus=(2, 3))}, overrides=("num_rollout=7",), deployments=(entry,)
    )
    one = by_name(site)["train/n"]
    assert (one.queue, one.gpus, one.tags) == (
        "b",
        (2, 3),
        ("rlpipe", "rlpipe/rlpipe", "train", "mine"),
    )
    assert one.parameters == {"recipe": "search", "site": ["num_rollout=7"]}
    assert "site" not in by_name(site)["iteration/iteration"].parameters


def test_sites_with_names_share_no_deployment_pool_or_iteration():
    entry = Entry(flow="train", name="nightly", parameters={"recipe": "search"})
    here, there = (
        Site.model_validate({"name": name, "deployments": [entry]}) for name in ("h200", "lab")
    )
    ours = by_name(here)
    assert ours.keys().isdisjoint(by_name(there)) and ours.keys().isdisjoint(by_name(Site()))
    assert {
        "train/search@h200",
        "train/nightly@h200",
        "iteration/iteration@h200",
        "audit/audit@h200",
    } <= ours.keys()
    assert ours["train/nightly@h200"].parameters["site"] == [
        "orchestration.deployment=iteration/iteration@h200"
    ]
    assert (here.pool, there.pool, here.tag) == ("rlpipe-h200", "rlpipe-lab", "rlpipe/rlpipe-h200")
    assert Site(name="h200", pool="mine").pool == "mine"


@pytest.mark.parametrize("overrides", [("no.such=1",), ("num_rollout=x",)])
def test_settings_that_no_run_accepts_are_refused_at_once(overrides: tuple[str, ...]):
    with pytest.raises(ConfigError, match=r"no|num_rollout"):
        by_name(Site(overrides=overrides))


def test_schedules_do_not_depend_on_the_time_of_declaration():
    def kept(schedule: Schedule) -> dict[str, Any]:
        return DeploymentScheduleCreate.from_schedule(timetable(schedule)).model_dump()

    cron = kept(Schedule(cron="0 2 * * *", timezone="Europe/Berlin"))["schedule"]
    assert (cron["cron"], cron["timezone"]) == ("0 2 * * *", "Europe/Berlin")
    interval = kept(Schedule(interval_s=21600))["schedule"]
    assert (interval["interval"], interval["anchor_date"]) == (
        timedelta(hours=6),
        datetime(2026, 1, 1, tzinfo=UTC),
    )
    assert kept(Schedule(rrule="FREQ=DAILY;COUNT=1", active=False))["active"] is False


def test_an_invalid_cron_text_is_refused():
    entry = Entry(flow="train", name="n", schedules=(Schedule(cron="every night"),))
    with pytest.raises(ConfigError, match=r"train/n: "):
        by_name(Site(deployments=(entry,)))


def test_every_deployment_of_the_example_can_be_declared(repository: Path):
    site = load_site(repository / "deployments" / "site.example.yaml")
    assert all(one.timetables is not None for one in by_name(site).values())
