"""From a recipe to a `RunConfig`: YAML, then `dotted.key=value` overrides, then validation with
errors people can act on.

A recipe is a YAML file, given by path or by its name under `deployments/recipes`; with `preset`,
over a model's preset (`presets`). Later overrides win. Every problem names its dotted key, the line
or the override that it comes from, and the nearest keys there are.

Not here: flags in slime's style, and anything that needs torch, ray or prefect.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlpipe.config.arguments.check import check_megatron, check_router, check_sglang
from rlpipe.config.introduced import upgraded
from rlpipe.config.presets import exists, is_file, with_preset
from rlpipe.config.problems import Origin, explain, nearest
from rlpipe.config.run import RunConfig
from rlpipe.config.text import dump as dump_yaml
from rlpipe.config.text import parse, read
from rlpipe.config.unused import unused
from rlpipe.errors import ConfigError

RECIPES = Path(__file__).resolve().parents[2] / "deployments" / "recipes"
SLIME_DEFAULTS = Path(__file__).resolve().parents[1] / "slime"
HOME_VARIABLE = "RLPIPE_HOME"


RESERVED = ("store", "models")
"""Folders of the home, which no run may be called."""


def home() -> Path:
    """Where runs, models and the default store are kept: $RLPIPE_HOME, else ./runs. Absolute; not
    created here.

    Raises: ConfigError if it is there and is no folder.
    """
    given = os.environ.get(HOME_VARIABLE) or "runs"
    where = f"{HOME_VARIABLE} or --home"
    try:
        folder = Path(given).expanduser().absolute()
        is_other = folder.exists() and not folder.is_dir()
    except (
        RuntimeError,
        OSError,
        ValueError,
    ) as error:  # `~somebody` who has no account; a name that is too long
        raise ConfigError(
            "no folder can have this name",
            where=where,
            found=f"{given!r}: {error}",
            expected="a folder",
        ) from error
    if is_other:
        raise ConfigError(
            "this is no folder",
            where=where,
            found=str(folder),
            expected="a folder, or a name that is free",
        )
    return folder


def use_home(folder: str | None) -> None:
    """Keep everything in this folder from now on, in this process and those that it starts; None
    changes nothing.

    Raises: ConfigError.
    """
    if folder is None:
        return
    if not folder.strip():
        raise ConfigError(
            "no folder has an empty name", where="--home", found=repr(folder), expected="a folder"
        )
    os.environ[HOME_VARIABLE] = folder
    os.environ[HOME_VARIABLE] = str(home())


def load_run(
    recipe: str | Path, overrides: Sequence[str] = (), run: str | None = None
) -> RunConfig:
    """The configuration of one run.

    `recipe` is a path or a name under deployments/recipes; `overrides` are `dotted.key=value` with
    a YAML value (list items by number: `evaluation.datasets.0.temperature=0`); `run` names the run,
    and without it the recipe's `run`, else its file name. Raises: ConfigError.
    """
    return _loaded(recipe, overrides, run)[0]


def unused_keys(
    recipe: str | Path, overrides: Sequence[str] = (), run: str | None = None
) -> list[str]:
    """What to say of keys that were given and have no effect, because their switch is off; see
    `unused`.

    Only a person's keys count: those of a recipe or preset that comes with the project are not
    mentioned. Raises: ConfigError, as `load_run`.
    """
    config, origin = _loaded(recipe, overrides, run)
    if Path(origin.file).resolve().parent in (RECIPES, SLIME_DEFAULTS):
        origin.lines = {}
    return unused(config, origin)


def _loaded(
    recipe: str | Path, overrides: Sequence[str], run: str | None
) -> tuple[RunConfig, Origin]:
    path = find_recipe(recipe)
    values, lines = parse(read(path, "the recipe"), str(path))
    if not isinstance(values, dict):
        found = "nothing" if values is None else type(values).__name__
        raise ConfigError(
            "a recipe is a mapping of keys",
            where=str(path),
            found=found,
            expected="lines of `key: value`",
        )
    values.setdefault("run", path.stem)
    origin = Origin(str(path), lines)
    for override in overrides:
        origin.overrides[_apply(values, override)] = override
    if run is not None:
        values["run"] = run
        origin.overrides["run"] = f"run={run}"
    config = validate(with_preset(values, origin), origin)
    _refuse_reserved(config, origin)
    return config, origin


def _refuse_reserved(config: RunConfig, origin: Origin) -> None:
    """Raises: ConfigError for names that would make the folder of a run one of the home's own.

    Not a rule of `RunConfig`: what older versions have stored under such a name stays readable.
    """
    for key, name in (("run", config.run), ("resources.cluster", config.resources.cluster)):
        if name is not None and name.casefold() in RESERVED:
            raise ConfigError(
                f"this name is kept for the folder of the {'models' if name.casefold() == 'models' else 'store'}",
                where=f"{key} ({origin.of(key)})",
                found=name,
                expected=f"any name but {' and '.join(RESERVED)}, in capitals or not",
                do="choose another name: --run NAME",
            )


def warm_start_overrides(config: RunConfig) -> list[str]:
    """What a warm start has in common with its run: seed, dtype, store, processes and engines; not
    the ranks of a critic."""
    of_policy = {"critic_num_nodes": 1, "critic_num_gpus_per_node": 0}
    resources = config.resources.model_copy(update={"cluster": config.cluster, **of_policy})
    shared = {
        "resources": resources.model_dump(),
        "engine": config.engine.model_dump(),
        "store": config.store.model_dump(),
    }
    same = [
        f"seed={config.seed}",
        f"deterministic={json.dumps(config.deterministic)}",
        f"model.dtype={config.model.dtype}",
    ]
    return [*same, *(f"{section}={json.dumps(values)}" for section, values in shared.items())]


def validate(values: dict[str, Any], origin: Origin | None = None) -> RunConfig:
    """A `RunConfig` of plain data, with the arguments of other packages checked. Raises:
    ConfigError."""
    _refuse_unstorable(values, origin or Origin("configuration", {}))
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        raise explain(error, origin or Origin("configuration", {})) from None
    check_megatron(config.train.megatron)
    check_sglang(config.engine.sglang)
    check_router(config.engine.router)
    return config


def validate_stored(values: dict[str, Any]) -> RunConfig:
    """The `RunConfig` of a stored run: keys that are younger than the run are as they were
    introduced, not as they are today.

    Raises: ConfigError, also for a key that was removed since and made a difference.
    """
    return validate(upgraded(RunConfig, values))


def _refuse_unstorable(values: Any, origin: Origin) -> None:
    """Raises: ConfigError for a value that no record of the run may hold, wherever it stands."""
    for key, value in _leaves(values, ""):
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError("not a finite number", where=f"{key} ({origin.of(key)})", found=value)
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ConfigError(
                "a number of more than 64 bits",
                where=f"{key} ({origin.of(key)})",
                found=f"{value.bit_length()} bits",
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
    """The YAML file of a recipe given by name or path. Raises: ConfigError with the nearest
    names."""
    path = Path(recipe)
    if path.suffix in (".yaml", ".yml"):
        if exists(path):
            return path
        raise ConfigError(
            "there is no such recipe file",
            where=str(recipe),
            do="give its path, or the name of a recipe",
        )
    if len(path.parts) != 1:
        raise ConfigError(
            "not a recipe",
            where=repr(str(recipe)),
            expected="a YAML file (.yaml, .yml), or the name of a recipe",
        )
    path = RECIPES / f"{recipe}.yaml"
    if is_file(path):
        return path
    known = recipes()
    close = nearest(str(recipe), known) or known
    expected = f"one of {', '.join(close)}" if close else f"a YAML file in {RECIPES}"
    raise ConfigError(
        "there is no such recipe",
        where=str(recipe),
        expected=expected,
        do="or give the path of a YAML file",
    )


def _apply(values: dict[str, Any], override: str) -> str:
    """Set one `dotted.key=value` in place and return its key."""
    key, separator, text = override.partition("=")
    key = key.strip()
    if not separator or not all(key.split(".")):
        raise ConfigError(
            "not an override",
            where=override,
            expected="dotted.key=value",
            do="train.optimizer.lr=1e-5",
        )
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
    return (
        target[name] if isinstance(target, dict) else target[_index(target, name, parent, override)]
    )


def _index(target: Any, name: str, parent: str, override: str) -> int:
    if not isinstance(target, list):
        raise ConfigError(
            f"{parent} is a value and has no keys", where=f"override {override}", found=repr(target)
        )
    if not (name.isdecimal() and int(name) < len(target)):
        raise ConfigError(
            f"{parent} is a list",
            where=f"override {override}",
            found=name,
            expected=f"a number from 0 to {len(target) - 1}"
            if target
            else "an entry; the list is empty",
        )
    return int(name)
