"""With what a run computes: said once in each process that drives it, as a line and as a table in
Prefect's UI.

Not here: finding it out (`rlpipe.engines.*.facts`), the record (the train and sync nodes).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefect.artifacts import acreate_table_artifact

from rlpipe.types import Stage
from tasks.context import RunContext

OF_TRAINER = ("device", "torch", "cuda", "megatron", "attention", "fused")
OF_ENGINES = ("device", "sglang", "attention", "mem_fraction_static")


def distinct(machines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each once, in order: engines are mostly alike."""
    found: list[dict[str, Any]] = []
    for machine in machines:
        if machine and machine not in found:
            found.append(machine)
    return found


def machines_of(outputs: Mapping[Stage, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """`trainer`, `engines`, or `engines 0` … if they differ → name → value, as an iteration's nodes
    have them."""
    trainer = outputs.get(Stage.TRAIN, {}).get("machine")
    engines = outputs.get(Stage.SYNC, {}).get("machines", [])
    names = (
        ["engines"]
        if len(engines) == 1
        else [f"engines {number}" for number in range(len(engines))]
    )
    return ({"trainer": trainer} if trainer else {}) | dict(zip(names, engines, strict=True))


def line(machines: Mapping[str, Mapping[str, Any]]) -> str:
    """The most telling values in one line."""
    parts = []
    for name, machine in machines.items():
        shown = OF_TRAINER if name == "trainer" else OF_ENGINES
        parts.append(
            f"{name}: "
            + ", ".join(f"{key} {machine[key]}" for key in shown if machine.get(key) is not None)
        )
    return "; ".join(parts)


async def show_machines(it: RunContext, key: str, outputs: Mapping[Stage, dict[str, Any]]) -> bool:
    """Say it, if the nodes of this iteration have it; whether they have. `key`: of the artifact."""
    machines = machines_of(outputs)
    if not machines:
        return False
    it.progress.say(f"{it.config.run}: {line(machines)}")
    rows = [
        {"of": name, "what": what, "value": str(value)}
        for name, machine in machines.items()
        for what, value in machine.items()
    ]
    await acreate_table_artifact(rows, key=key, description="with what this run computes")
    return True
