"""The resolved configuration of a run as a Prefect artifact: what a form's few fields became.

Not here: the record that decides (`store.branches` keeps it with the branch).
"""

from __future__ import annotations

from collections.abc import Sequence

from prefect.artifacts import acreate_markdown_artifact

from rlpipe.config.load import dump
from rlpipe.config.run import RunConfig
from tasks.observe import artifact_key


async def configuration_artifact(
    config: RunConfig, recipe: str, overrides: Sequence[str], warnings: Sequence[str] = ()
) -> None:
    """What was asked for, keys of it that have no effect, then every key with its value; a version
    for each start of the run."""
    asked = "\n".join(["recipe: " + recipe, *overrides])
    noted = (
        "## Keys without effect\n\n" + "".join(f"- {one}\n" for one in warnings) + "\n"
        if warnings
        else ""
    )
    text = f"# {config.run}\n\n```\n{asked}\n```\n\n{noted}```yaml\n{dump(config)}```\n"
    await acreate_markdown_artifact(
        text,
        key=artifact_key(config.run, "configuration"),
        description="the resolved configuration",
    )
