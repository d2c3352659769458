"""From a recipe to a `RunConfig`: YAML, then `dotted.key=value` overrides, then validation with errors people can act on.

A recipe is a YAML file, given by path or by its name under `deployments/recipes`; with `preset`, over a model's preset
(`presets`). Later overrides win. Every problem names
its dotted key, the line or the override that it comes from, and the nearest keys there are.

Not here: flags in slime's style, and anything that needs torch, ray or prefect.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlpipe.config.passthrough import check_megatron, check_router, check_sglang
from rlpipe.config.presets import is_file, with_preset
from rlpipe.config.problems import Origin, explain, nearest
from rlpipe.config.run import RunConfig
from rlpipe.config.text import dump as dump_yaml
from rlpipe.config.text import parse
from rlpipe.errors import ConfigError

RECIPES = Path(__file__).resolve().parents[2] / "deployments" / "recipes"
HOME_VARIABLE = "RLPIPE_HOME"


def home() -> Path:
    """Where runs, models and the default store are kept: $RLPIPE_HOME, else ./runs. Absolute; not created here."""
    return Path(os.environ.get(HOME_VARIABLE) or "runs").expanduser().absolute()


def load_run(recipe: str | Path, overrides: Sequence[str] = (), run: str | None = None) -> RunConfig:
    """The configuration of one run.

    `recipe` is a path or a name under deployments/recipes; `overrides` are `dotted.key=value` with a YAML value (list items by
    number: `evaluation.datasets.0.temperature=0`); `run` names the run, and without it the recipe's `run`, else its file name.
    Raises: ConfigError.
    """
    path = find_recipe(recipe)
    values, lines = parse(_read(path), str(path))
    if not isinstance(values, dict):
        raise ConfigError("a recipe is a mapping of keys", where=str(path), found=type(values).__name__)
    values.setdefault("run", path.stem)
    origin = Origin(str(path), lines)
    for override in overrides:
        origin.overrides[_apply(values, override)] = override
    if run is not None:
        values["run"] = run
        origin.overrides["run"] = f"run={run}"
    return validate(with_preset(values, origin), origin)


def validate(values: dict[str, Any], origin: Origin | None = None) -> RunConfig:
    """A `RunConfig` of plain data, its passthrough arguments checked by name. Raises: ConfigError."""
    _refuse_unstorable(values, origin or Origin("configuration", {}))
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        raise explain(error, origin or Origin("configuration", {})) from None
    check_megatron(config.train.megatron)
    check_sglang(config.engine.sglang)
    check_router(config.engine.router)
    return config


def _refuse_unstorable(values: Any, origin: Origin) -> None:
    """Raises: ConfigError for a value that no record of the run may hold, wherever it stands."""
    for key, value in _leaves(values, ""):
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError("not a finite number", where=f"{key} ({origin.of(key)})", found=value)
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ConfigError(
                "a number of more than 64 bits", where=f"{key} ({origin.of(key)})", found=f"{value.bit_length()} bits"
            )
        if isinstance(value, str) and _PASSWORD.search(value):
            raise ConfigError(
                "a URL with a password, which would be stored with the run",
                where=key,
                expected="credentials in the environment of the run's processes, and a URL without",
            )


_PASSWORD = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/?#\s@:]*:[^/?#\s@]+@")


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list | tuple):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


def dump(config: RunConfig) -> str:
    """The whole configuration as YAML; `load_run` of it gives an equal one."""
    return dump_yaml(config.model_dump(mode="json"))


def recipes() -> list[str]:
    """Names of the recipes that come with the project."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def find_recipe(recipe: str | Path) -> Path:
    """The YAML file of a recipe given by name or path. Raises: ConfigError with the nearest names."""
    path = Path(recipe)
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        if is_file(path):
            return path
        raise ConfigError("there is no such recipe file", where=str(recipe), do="give its path, or the name of a recipe")
    path = RECIPES / f"{recipe}.yaml"
    if is_file(path):
        return path
    known = recipes()
    close = nearest(str(recipe), known) or known
    expected = f"one of {', '.join(close)}" if close else f"a YAML file in {RECIPES}"
    raise ConfigError("there is no such recipe", where=str(recipe), expected=expected, do="or give the path of a YAML file")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("the recipe cannot be read", where=str(path), found=error) from error


def _apply(values: dict[str, Any], override: str) -> str:
    """Set one `dotted.key=value` in place and return its key."""
    key, separator, text = override.partition("=")
    key = key.strip()
    if not separator or not all(key.split(".")):
        raise ConfigError("not an override", where=override, expected="dotted.key=value", do="train.optimizer.lr=1e-5")
    value, _ = parse(text, f"override {key}")
    *parents, last = key.split(".")
    target: Any = values
    for depth, name in enumerate(parents):
        if isinstance(target, dict) and target.get(name) is None:
            target[name] = {}
        target = _child(target, name, ".".join(parents[:depth]), override)
    if isinstance(target, dict):
        target[last] = value
    else:
        target[_index(target, last, ".".join(parents), override)] = value
    return key


def _child(target: Any, name: str, parent: str, override: str) -> Any:
    return target[name] if isinstance(target, dict) else target[_index(target, name, parent, override)]


def _index(target: Any, name: str, parent: str, override: str) -> int:
    if not isinstance(target, list):
        raise ConfigError(f"{parent} is a value and has no keys", where=f"override {override}", found=repr(target))
    if not (name.isdecimal() and int(name) < len(target)):
        raise ConfigError(
            f"{parent} is a list",
            where=f"override {override}",
            found=name,
            expected=f"a number from 0 to {len(target) - 1}" if target else "an entry; the list is empty",
        )
    return int(name)
