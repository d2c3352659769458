"""Declare work pool and deployments to the Prefect server:  python -m deployments.apply [--pool rlpipe] [--home DIR]

    prefect worker start --pool rlpipe --type process
    prefect deployment run 'train/train' -p recipe=spell_backward -p 'overrides=["num_rollout=20"]'

The flows run from this checkout, in processes of a worker on this machine. The pool has no limit of its own: an iteration's flow
run must never wait for the place of the run that waits for it. Its queue `train` has one (`--limit`): further runs wait in line.
(A deployment's own limit would not do: its leases are in the server's memory, and a run whose lease is gone is ended.)
Doing it again changes what differs.

Not here: what the flows do, or a server (`prefect server start`).
"""

from __future__ import annotations

import argparse
import asyncio
import os
from contextlib import suppress
from pathlib import Path

from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.exceptions import ObjectAlreadyExists

from flows.environment import CACHES, CLIENT_SETTINGS, keep_caches_in
from rlpipe.config.load import HOME_VARIABLE, home

ROOT = Path(__file__).resolve().parents[1]
FLOWS = {
    "train": "flows/train.py:train",
    "iteration": "flows/iteration_run.py:iteration_run",
    "evaluate": "flows/evaluate.py:evaluate",
}


async def apply(pool: str, folder: Path, *, limit: int) -> list[str]:
    """Pool and deployments as declared here; the deployments' full names."""
    async with get_client() as client:
        with suppress(ObjectAlreadyExists):
            await client.create_work_pool(WorkPoolCreate(name=pool, type="process", description="rlpipe on this machine"))
        with suppress(ObjectAlreadyExists):
            await client.create_work_queue(name="train", work_pool_name=pool)
        queue = await client.read_work_queue_by_name("train", work_pool_name=pool)
        await client.update_work_queue(queue.id, concurrency_limit=limit)
    for name, entrypoint in FLOWS.items():
        flow = await Flow.afrom_source(source=str(ROOT), entrypoint=entrypoint)
        await flow.adeploy(
            name=name,
            work_pool_name=pool,
            build=False,
            push=False,
            job_variables={"env": environment(folder)},
            work_queue_name="train" if name == "train" else "default",
            concurrency_limit=None,
            description=flow.description,
            print_next_steps=False,
            ignore_warnings=True,
        )
    return [f"{name}/{name}" for name in FLOWS]


def environment(folder: Path) -> dict[str, str]:
    """What a flow's process needs to know: where this checkout, the runs and their caches are."""
    keep_caches_in(folder)
    caches = {name: os.environ[name] for name in (*CACHES, "HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY") if name in os.environ}
    return {**CLIENT_SETTINGS, **caches, HOME_VARIABLE: str(folder), "PYTHONPATH": str(ROOT)}


def main() -> None:
    """Parse, apply, say what to do next."""
    parser = argparse.ArgumentParser(prog="python -m deployments.apply", description="Declare work pool and deployments.")
    parser.add_argument("--pool", default="rlpipe", help="process work pool, made if there is none (default: rlpipe)")
    parser.add_argument("--home", help=f"where runs are kept (default: ${HOME_VARIABLE} or ./runs)")
    parser.add_argument("--limit", type=int, default=1, help="training runs at a time: one for each set of GPUs (default: 1)")
    arguments = parser.parse_args()
    folder = Path(arguments.home).expanduser().absolute() if arguments.home else home()
    names = asyncio.run(apply(arguments.pool, folder, limit=arguments.limit))
    print(f"declared {', '.join(names)}; now: prefect worker start --pool {arguments.pool} --type process")


if __name__ == "__main__":
    main()
