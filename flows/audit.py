"""Audit a run: check every record and file, list anomalies, show both as Prefect tables.

Needs no GPU, engine or trainer. The run may continue during the audit. `rlpipe.store.audit` defines
the checks.
"""

from __future__ import annotations

import asyncio
from typing import Any

from prefect import flow
from prefect.artifacts import acreate_table_artifact
from prefect.runtime import flow_run

from rlpipe.config.load import home as default_home
from rlpipe.errors import Mismatch
from rlpipe.store.audit.anomalies import find_anomalies
from rlpipe.store.audit.verification import check_store
from rlpipe.store.objects.files import Files
from rlpipe.store.run_file import store_of
from tasks.artifacts import artifact_key

MAX_ROWS = 200
"""Rows of a table. The counts cover all findings."""


def run_name() -> str:
    """Return the name of the flow run in Prefect."""
    return f"audit-{flow_run.parameters['run']}"


@flow(name="audit", flow_run_name=run_name)
async def audit(run: str, store: str | None = None, head: str | None = None) -> dict[str, Any]:
    """Check every record and file of a run, and find objects in the store that no run refers to.

    Returns the number of `findings` and of `unusual` anomalies.
    Raises: Mismatch if the audit has findings; ObjectMissing without the run; ConfigError.

    Args:
        run: Required. Name of the run. Example: `spell_backward`
        store: Optional, by default the store that the run was started with. URL of the store.
            Example: `s3://bucket/runs`
        head: Optional. At least 16 digits of the sha256 of a commit that was kept outside the
            store. It proves the history below. Example: `3f9ac1d20b7e4482`
    """
    files = Files(store or store_of(default_home(), run))
    report = await asyncio.to_thread(check_store, files, run, None, head)
    findings = report.findings
    notes = report.notes
    description = (
        f"audit of {run}: {len(findings)} findings, "
        f"{len(notes)} notes (leftovers and records that cannot be checked)"
    )
    description += f"; {report.proof}" if report.proof is not None else ""
    rows = [finding._asdict() for finding in findings] + [
        {**note._asdict(), "rule": f"note: {note.rule}"} for note in notes
    ]
    await _create_table(run, "audit", rows, description)
    if findings:
        raise Mismatch(
            "the audit found differences between the store and the records of the run",
            where=run,
            found="; ".join(f"{finding.rule} {finding.where}" for finding in findings[:5]),
            do="read the table of this flow run, or run `rlpipe audit verify --run RUN`",
        )
    unusual = await asyncio.to_thread(find_anomalies, files, run)
    await _create_table(
        run,
        "unusual",
        [anomaly._asdict() for anomaly in unusual],
        f"unusual in {run}: {len(unusual)}",
    )
    return {"run": run, "findings": 0, "unusual": len(unusual)}


async def _create_table(run: str, name: str, rows: list[dict[str, Any]], description: str) -> None:
    await acreate_table_artifact(
        rows[:MAX_ROWS] or [{"result": "nothing"}],
        key=artifact_key(run, name),
        description=description,
    )
