"""Evaluate the weights of a run, or of a recipe's model, on held-out sets, and train nothing.

It is a run of its own, without iterations, whose first weights are those: nothing of the run that
they come from is touched, which may still be training. What is measured is in the store like any
evaluation, so that asking again measures nothing twice.

Not here: what such a run is (`evaluation`), evaluations between iterations (`flows.train`),
or how a set is sampled and scored (`rlpipe.actors.generator`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.runtime import flow_run

from flows.evaluation import configuration
from flows.output import outlive_the_worker
from flows.parameters import Recipe
from flows.stopping import Stopping, hear_sigterm, or_cancelled
from flows.train import drive
from rlpipe.config.load import home as default_home
from rlpipe.config.run import RunConfig
from rlpipe.lineage.stage_inputs import eval_inputs
from rlpipe.preflight import check
from rlpipe.store.branches import Branches
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.types import Stage
from tasks.configuration import configuration_artifact


def run_name() -> str:
    """The flow run's name in Prefect."""
    parameters = flow_run.parameters
    return (
        parameters.get("name")
        or f"evaluate-{parameters.get('run') or Path(parameters['recipe']).stem}"
    )


@flow(name="evaluate", flow_run_name=run_name, on_running=[hear_sigterm, outlive_the_worker])
async def evaluate(
    run: str | None = None,
    iteration: int | None = None,
    recipe: Recipe | None = None,
    overrides: Sequence[str] = (),
    name: str | None = None,
    takeover: bool = False,
    site: Sequence[str] = (),
) -> dict[str, Any]:
    """Measure every held-out set once: the summary, with a value for each metric under
    `evaluation`; `Cancelled` if it was.

    Raises: ConfigError, DataError at once for bad input; as the train flow.

    Args: run: Whose weights, and whose configuration unless a recipe is given. Without: the first
    weights of the recipe. iteration: Which of the run's weights; without: its newest that were
    saved. recipe: One that comes with the project, or the path of a YAML file. overrides: Settings
    over those, `dotted.key=value`, such as other `evaluation.datasets`. name: The evaluation's own
    name, as a run; without: `<run>.eval-<iteration>`. takeover: Replace the process that drives
    this evaluation now, wherever it is. site: Settings of the place where it runs, filled in by the
    deployment; `overrides` win.
    """
    home = default_home()
    overrides = [*site, *overrides]
    config = configuration(
        home, run=run, iteration=iteration, recipe=recipe, overrides=overrides, name=name
    )
    await configuration_artifact(config, recipe or f"of the run {run}", overrides)
    check(config, home)
    with Stopping(config.resources.stop_grace_s) as stopping:
        return await or_cancelled(evaluated(config, home, stopping, takeover=takeover))


async def evaluated(
    config: RunConfig, home: Path, stopping: Stopping, *, takeover: bool
) -> dict[str, Any]:
    """The run that evaluates: its summary, and what it measured."""
    summary = await drive(config, home, stopping, takeover=takeover)
    return {**summary, "evaluation": measured(Files(config.store.root or home / "store"), config)}


def measured(files: Files, config: RunConfig) -> dict[str, float]:
    """Every metric of an evaluation that is done."""
    branches = Branches(files)
    init = branches.get(config.run).init
    contracts = branches.contracts(config.run)
    digests = [
        eval_inputs(config, dataset, init, contracts).digest
        for dataset in config.evaluation.datasets
    ]
    return {
        name: value
        for digest in digests
        for name, value in Nodes(files).get(Stage.EVAL, digest).outputs["metrics"].items()
    }
