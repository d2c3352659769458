"""The smoke test of a recipe: its section `smoke`, with a small stand-in of model, data and sizes.

    rlpipe train my_run.yaml --smoke        the same as the override smoke=true

    # my_run.yaml
    model: {source: {type: huggingface, hf_checkpoint: Qwen/Qwen3-0.6B}}
    smoke:
      num_rollout: 2
      model: {source: {type: made, maker: my_models.py:make_tiny}}

Keys of the section replace the recipe's, and overrides win over both. Everything else of the recipe
is exercised as it is. The run is called `<recipe>-smoke`. Without `smoke=true` the section has no
effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlpipe.config.problems import Origin
from rlpipe.config.text import parse
from rlpipe.errors import ConfigError

SECTION = "smoke"
SMOKE = f"{SECTION}=true"
"""The override that asks for the smoke test."""


def apply_smoke(
    values: dict[str, Any], overrides: Sequence[str], origin: Origin
) -> tuple[dict[str, Any], list[str]]:
    """Return a recipe's values without the section, and the overrides without `smoke=...`.

    With `smoke=true` the keys of the section replace the recipe's, and their lines those of
    `origin`. Raises: ConfigError, also for a recipe without the section.
    """
    rest = [override for override in overrides if override.partition("=")[0].strip() != SECTION]
    section = values.pop(SECTION, None)
    lines = {key: line for key, line in origin.lines.items() if not _is_within(key, SECTION)}
    if not _wanted(overrides):
        origin.lines = lines
        return values, rest
    if not isinstance(section, dict):
        raise ConfigError(
            "this recipe has no smoke test",
            where=f"{SECTION} ({origin.file})",
            found="no section" if section is None else type(section).__name__,
            expected="a section `smoke` with the keys of a small run",
        )
    prefix = f"{SECTION}."
    replaced = {
        key.removeprefix(prefix): line
        for key, line in origin.lines.items()
        if key.startswith(prefix)
    }
    origin.lines = lines | replaced
    return merged({"run": f"{values['run']}-{SECTION}", **section}, values), rest


def merged(above: dict[str, Any], below: dict[str, Any]) -> dict[str, Any]:
    """Merge two nested mappings; values of `above` win.

    A mapping of another `type` replaces the whole mapping below, whose keys it does not have.
    """
    result = {**below, **above}
    for name in above.keys() & below.keys():
        upper, lower = above[name], below[name]
        if isinstance(upper, dict) and isinstance(lower, dict):
            same_type = upper.get("type", lower.get("type")) == lower.get("type")
            result[name] = merged(upper, lower) if same_type else upper
    return result


def _wanted(overrides: Sequence[str]) -> bool:
    """True if the last override of the section is `smoke=true`. Raises: ConfigError."""
    wanted = False
    for override in overrides:
        key, _, text = override.partition("=")
        if key.strip() == SECTION:
            wanted, _ = parse(text, f"override {SECTION}")
        elif _is_within(key.strip(), SECTION):
            raise ConfigError(
                "a smoke test takes overrides of its keys themselves",
                where=override,
                do=f"write {override.strip().removeprefix(f'{SECTION}.')}",
            )
        if not isinstance(wanted, bool):
            raise ConfigError(
                "not a switch", where=override, found=text, expected="smoke=true or smoke=false"
            )
    return wanted


def _is_within(key: str, section: str) -> bool:
    return key == section or key.startswith(f"{section}.")
