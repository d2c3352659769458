"""Flow parameters that start a run: types for Prefect's form, and the meaning of `seed` and `fork`.

    apply_seed_and_fork(recipe, overrides, run, seed=, fork=)    the arguments of `load_run`

Imports no Prefect: a command line uses this module before a server starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import takewhile
from typing import Annotated, Any

from pydantic import WithJsonSchema

from rlpipe.config.load import default_name, find_recipe, recipes


def recipe_summary(recipe: str) -> str:
    """Return the first sentence of the comment at the top of a recipe; "" without a comment."""
    lines = takewhile(
        lambda line: line.startswith("#"),
        find_recipe(recipe).read_text(encoding="utf-8").split("\n"),
    )
    comment = " ".join(line.lstrip("# ") for line in lines)
    sentence, end, _ = f"{comment} ".partition(". ")
    return f"{sentence.strip()}{end.strip()}"


def recipe_list() -> str:
    """Return the project's recipes as Markdown, a line each."""
    # Blank lines: the form makes a space of a single line end, so items would run together.
    return "\n\n".join(f"- `{name}`: {recipe_summary(name)}" for name in recipes())


def _recipe_schema(description: str) -> dict[str, Any]:
    """Return the schema of a field that is a list of names or a path, in Prefect's form."""
    return {
        "type": "string",
        "description": description,
        "anyOf": [
            {"type": "string", "title": "of the project", "enum": recipes()},
            {"type": "string", "title": "a file", "pattern": r"\.ya?ml$"},
        ],
    }


Recipe = Annotated[
    str,
    WithJsonSchema(
        _recipe_schema(
            "Required. A recipe of the project, or the path of a YAML file, such as "
            f"`/home/me/my_run.yaml`.\n\n{recipe_list()}"
        )
    ),
]
"""A recipe by name or path. A flow's docstring does not describe this parameter: the description of
this type, with a line for each recipe, is the one of the form."""
OptionalRecipe = Annotated[
    str, WithJsonSchema(_recipe_schema("The name of a recipe or the path of a YAML file."))
]
"""The same for a parameter that has a default."""
Fork = Annotated[str, WithJsonSchema({"type": "string", "pattern": r"^[^@\s]+(@\d+)?$"})]
"""`RUN` or `RUN@K`."""


def apply_seed_and_fork(
    recipe: str,
    overrides: Sequence[str],
    run: str | None,
    *,
    seed: int | None = None,
    fork: str | None = None,
) -> tuple[list[str], str | None]:
    """Return overrides and name of a run, with the settings that `seed` and `fork` stand for.

    The caller's overrides win. The default name is `<recipe>-seed<N>` with a seed and
    `<run>-from-<K>` with a fork.
    """
    settled = list(overrides)
    if seed is not None:
        settled.insert(0, f"seed={seed}")
        run = run or f"{default_name(recipe)}-seed{seed}"
    if fork:
        branch, _, iteration = fork.partition("@")
        run = run or f"{branch}-from-{iteration or 'newest'}"
        settled[:0] = [
            f"fork_from={{branch: {branch}, iteration: {iteration or 'null'}}}",
            "warm_start=null",
            "model.start_from=null",
        ]
    return settled, run


def format_run_name(run: str | None, moment: datetime | None) -> str | None:
    """Fill in `%Y`, `%m`, `%d`, `%H` ... of a run name with the scheduled time (UTC).

    Each run of a schedule gets its own name. A retry keeps the scheduled time of its first attempt,
    so it continues the same run.
    """
    if run is None or "%" not in run:
        return run
    return (moment or datetime.now(UTC)).strftime(run)


def run_name_of(parameters: dict[str, Any], moment: datetime | None) -> str:
    """Return the name of a run from the parameters of its flow, without checking them."""
    recipe = parameters["recipe"]
    given = [text for text in parameters.get("overrides") or () if text.startswith("run=")]
    named = parameters.get("run") or (given[-1].removeprefix("run=") if given else None)
    _, run = apply_seed_and_fork(
        recipe, (), named, seed=parameters.get("seed"), fork=parameters.get("fork")
    )
    return format_run_name(run, moment) or default_name(recipe)
