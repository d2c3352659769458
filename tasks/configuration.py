"""The resolved configuration of a run as a Prefect artifact: what a form's few fields became.

Not here: the record that decides (`store.branches` keeps it with the branch).
"""

from __future__ import annotations

from collections.abc import Sequence

from prefect.artifacts import acreate_markdown_artifact

from rlpipe.config.load import dump
from rlpipe.config.run import RunConfig
from tasks.observe import artifact_key


async def configuration_artifact(config: RunConfig, recipe: str, overrides: Sequence[str]) -> None:
    """What was asked for, then every key with its value; one artifact a run, a version for each start of it."""
    asked = "\n".join(["recipe: " + recipe, *overrides])
    text = f"# {config.run}\n\n```\n{asked}\n```\n\n```yaml\n{dump(config)}```\n"
    await acreate_markdown_artifact(text, key=artifact_key(config.run, "configuration"), description="the resolved configuration")
