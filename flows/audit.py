"""The audit of a run as a flow: every record and file checked, what is unusual listed, both as
tables in Prefect's pages.

It needs no GPU and starts no engine or trainer; the run may go on meanwhile. Not here: what is
checked (`rlpipe.store.audit.verification`, `rlpipe.store.audit.anomalies`).
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
from tasks.observe import artifact_key

SHOWN = 200
"""Rows of a table; the counts are of all."""


def run_name() -> str:
    """The flow run's name in Prefect."""
    return f"audit-{flow_run.parameters['run']}"


@flow(name="audit", flow_run_name=run_name)
async def audit(run: str, store: str | None = None, head: str | None = None) -> dict[str, Any]:
    """Check everything that a run has in the store, and that every object there is explained by
    some run.

    Answers how many `findings` there are, and how many things are `unusual`.

    `store`: URL of the store (None: the one the run was started with). `head`: sha256 of a commit
    that was kept elsewhere, which has to prove what is below it. Raises: Mismatch if anything is
    wrong; ObjectMissing if there is no such run; ConfigError.
    """
    files = Files(store or store_of(default_home(), run))
    report = await asyncio.to_thread(check_store, files, run, None, head)
    findings = report.findings
    notes = report.notes
    about = f"audit of {run}: {len(findings)} findings, {len(notes)} notes (leftovers, and what cannot be checked)"
    about += f"; {report.proof}" if report.proof is not None else ""
    rows = [finding._asdict() for finding in findings] + [
        {**note._asdict(), "rule": f"note: {note.rule}"} for note in notes
    ]
    await _table(run, "audit", rows, about)
    if findings:
        raise Mismatch(
            "the store does not hold what the run's records say",
            where=run,
            found="; ".join(f"{finding.rule} {finding.where}" for finding in findings[:5]),
            do="see the table of this flow run, or `python -m tools.audit verify --run RUN`",
        )
    unusual = await asyncio.to_thread(find_anomalies, files, run)
    await _table(
        run, "unusual", [one._asdict() for one in unusual], f"unusual in {run}: {len(unusual)}"
    )
    return {"run": run, "findings": 0, "unusual": len(unusual)}


async def _table(run: str, what: str, rows: list[dict[str, Any]], about: str) -> None:
    await acreate_table_artifact(
        rows[:SHOWN] or [{"result": "nothing"}], key=artifact_key(run, what), description=about
    )
