"""Evaluate the weights of a run, or of a recipe's model, on held-out sets. Train nothing.

The evaluation is its own run without iterations. Its first weights are the evaluated weights, so
the evaluated run stays untouched and may still be training. Nodes are stored as in every
evaluation: a second evaluation of the same weights reuses them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.runtime import flow_run

from flows.derived_runs import evaluation_config
from flows.output import outlive_the_worker
from flows.parameters import OptionalRecipe
from flows.stopping import Stopping, handle_sigterm, result_or_cancelled
from flows.train import drive
from rlpipe.config.load import default_name
from rlpipe.config.load import home as default_home
from rlpipe.config.run import RunConfig
from rlpipe.lineage.stage_inputs import eval_inputs
from rlpipe.preflight import check
from rlpipe.store.branches import Branches
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.types import Stage
from tasks.artifacts import configuration_artifact


def run_name() -> str:
    """Return the name of the flow run in Prefect."""
    parameters = flow_run.parameters
    return (
        parameters.get("name")
        or f"evaluate-{parameters.get('run') or default_name(parameters['recipe'])}"
    )


@flow(name="evaluate", flow_run_name=run_name, on_running=[handle_sigterm, outlive_the_worker])
async def evaluate(
    run: str | None = None,
    iteration: int | None = None,
    recipe: OptionalRecipe | None = None,
    overrides: Sequence[str] = (),
    name: str | None = None,
    takeover: bool = False,
    site: Sequence[str] = (),
) -> dict[str, Any]:
    """Evaluate every held-out set once.

    Returns the summary, with each metric under `evaluation`; or the state `Cancelled`.
    Raises: ConfigError, DataError for wrong input; otherwise as the train flow.

    Args:
        run: Required unless `recipe` is given. Run that has the weights, and the configuration
            unless a recipe is given. Without a run: the first weights of the recipe.
            Example: `spell_backward`
        iteration: Optional, by default the newest saved weights. Iteration after which the weights
            were saved. Example: `99`
        recipe: Required unless `run` is given. A recipe of the project, or the path of a YAML file.
            Example: `spell_backward`
        overrides: Optional. Settings that differ, an item each.
            Example: `rollout.rollout_temperature=0.6`
        name: Optional, by default `<run>.eval-<iteration>`. Name of the evaluation, as a run.
            Example: `greedy`
        takeover: Optional, by default off. Replace the process that drives this evaluation now, on
            any machine. Example: on, after the machine of that process was lost.
        site: Optional, filled in by the deployment. Settings of the site. `overrides` win.
            Example: `store.root=s3://bucket/runs`
    """
    home = default_home()
    overrides = [*site, *overrides]
    # A run without iterations: `drive` evaluates its first weights, then ends.
    config = evaluation_config(
        home, run=run, iteration=iteration, recipe=recipe, overrides=overrides, name=name
    )
    await configuration_artifact(config, recipe or f"of the run {run}", overrides)
    check(config, home)
    with Stopping(config.resources.stop_grace_s) as stopping:
        return await result_or_cancelled(run_evaluation(config, home, stopping, takeover=takeover))


async def run_evaluation(
    config: RunConfig, home: Path, stopping: Stopping, *, takeover: bool
) -> dict[str, Any]:
    """Drive the run that evaluates; return its summary and its metrics."""
    summary = await drive(config, home, stopping, takeover=takeover)
    return {
        **summary,
        "evaluation": recorded_metrics(Files(config.store.root or home / "store"), config),
    }


def recorded_metrics(files: Files, config: RunConfig) -> dict[str, float]:
    """Return every metric of a finished evaluation."""
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
