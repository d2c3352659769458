"""Go on from an iteration of a run with some settings changed, as a new run that shares the history
up to there.

The configuration is the parent's; where another recipe shall be used, the train flow forks too. Not
here: the configuration (`forking`), training (`train`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prefect import flow
from prefect.runtime import flow_run

from flows.forking import forked
from flows.output import outlive_the_worker
from flows.stopping import or_cancelled
from flows.train import train
from rlpipe.config.load import home as default_home


def run_name() -> str:
    """The flow run's name in Prefect."""
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
    """Train a fork to its end, going on from what the store has of it. Answers the train flow's
    summary; `Cancelled` if it was.

    Raises: ConfigError at once for bad input; as the train flow.

    Args: of: The parent, `RUN@K` (after iteration K) or `RUN` (after its newest). run: Name of the
    fork; without `RUN-from-K`. overrides: Settings over the parent's, `dotted.key=value`;
    `num_rollout` counts from the parent's iteration 0. store: URL of the store; without that of the
    parent. takeover: Replace the process that drives the fork now, wherever it is.
    """
    config, recipe = forked(default_home(), of, run, overrides, store)
    return await or_cancelled(train(str(recipe), (), config.run, takeover))
