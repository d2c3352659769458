"""Start a run from a commit of another run, with some settings changed.

The fork shares the history up to that commit and has its parent's configuration. To fork under
another recipe, use the train flow with `fork`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prefect import flow
from prefect.runtime import flow_run

from flows.derived_runs import fork_run
from flows.output import outlive_the_worker
from flows.stopping import result_or_cancelled
from flows.train import train
from rlpipe.config.load import home as default_home


def run_name() -> str:
    """Return the name of the flow run in Prefect."""
    parameters = flow_run.parameters
    return f"fork {parameters['of']}" + (
        f" as {parameters['run']}" if parameters.get("run") else ""
    )


@flow(name="fork", flow_run_name=run_name, on_running=[outlive_the_worker])
async def fork(
    of: str,
    run: str | None = None,
    overrides: Sequence[str] = (),
    store: str | None = None,
    takeover: bool = False,
) -> dict[str, Any]:
    """Train a fork to its end, from the newest commit of the fork in the store.

    Returns the summary of the train flow, or the state `Cancelled`.
    Raises: ConfigError for wrong input; otherwise as the train flow.

    Args:
        of: Required. The parent run and an iteration. Without an iteration: its newest.
            Example: `spell_backward@99`
        run: Optional, by default `<parent>-from-<K>`. Name of the fork. Example: `hotter`
        overrides: Optional. Settings that differ from the parent's, an item each. `num_rollout`
            counts from the parent's iteration 0. Example: `rollout.rollout_temperature=1.2`
        store: Optional, by default the store of the parent. URL of the store.
            Example: `s3://bucket/runs`
        takeover: Optional, by default off. Replace the process that drives the fork now, on any
            machine. Example: on, after the machine of that process was lost.
    """
    config, recipe = fork_run(default_home(), of, run, overrides, store)
    return await result_or_cancelled(train(str(recipe), (), config.run, takeover))
