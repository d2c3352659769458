"""Load a recipe into a `RunConfig`: YAML, overrides, preset, validation.

    load_run("my_run.yaml", ["train.optimizer.lr=1e-5"])    the configuration of a run
    load_with_origin(recipe, overrides, run)               the same, with the source of each value
    validate(values), validate_stored(values)               from plain data
    dump(config)                                            back to YAML
    home(), use_home(folder)                                directory of all runs

A recipe is given by its path, or by its name under `deployments/recipes`. The key `preset` names a
YAML file of `deployments/models` with the defaults of a model family and size:

    preset: qwen3-4b          # in a recipe, or `preset=qwen3-4b` on a command line

Keys of the recipe win over the preset, and overrides win over both. The resolved configuration
contains the preset's values and not its name. Every error names the dotted key, its line or
override, and the nearest existing keys.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlpipe.config.arguments.check import check_megatron, check_router, check_sglang
from rlpipe.config.introduced import upgraded
from rlpipe.config.paths import check_paths, located, most_similar
from rlpipe.config.problems import Origin, explain
from rlpipe.config.run import RunConfig
from rlpipe.config.similar_keys import nearest
from rlpipe.config.smoke import apply_smoke, merged
from rlpipe.config.text import dump as dump_yaml
from rlpipe.config.text import parse, read
from rlpipe.config.unused import unused
from rlpipe.errors import ConfigError
from rlpipe.system.project import HOME_VARIABLE, PRESETS, RECIPES

SLIME_DEFAULTS = Path(__file__).resolve().parents[1] / "slime"
RESERVED = ("store", "models")
"""Folders of the home, which cannot be names of runs."""
_KINDS = {type(None): "nothing", list: "a list", str: "a text"}
_PASSWORD = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/?#\s@:]*:[^/?#\s@]+@")


def home() -> Path:
    """Return the absolute directory of all runs: $RLPIPE_HOME, else ./runs. It may not exist.

    Raises: ConfigError if the path is not a folder.
    """
    setting = os.environ.get(HOME_VARIABLE) or "runs"
    where = f"{HOME_VARIABLE} or --home"
    try:
        folder = Path(setting).expanduser().absolute()
        is_other = folder.exists() and not folder.is_dir()
    # RuntimeError: `~name` without such an account. OSError, ValueError: a name too long, or NUL.
    except (RuntimeError, OSError, ValueError) as error:
        raise ConfigError(
            "not a possible name of a folder",
            where=where,
            found=f"{setting!r}: {error}",
            expected="a folder",
        ) from error
    if is_other:
        raise ConfigError(
            "the home is not a folder",
            where=where,
            found=str(folder),
            expected="a folder, or a path that does not exist yet",
        )
    return folder


def use_home(folder: str | None) -> None:
    """Use `folder` as the home of this process and its children; None changes nothing.

    Raises: ConfigError if it cannot be a folder.
    """
    if folder is None:
        return
    if not folder.strip():
        raise ConfigError(
            "a folder needs a name", where="--home", found=repr(folder), expected="a folder"
        )
    os.environ[HOME_VARIABLE] = folder
    os.environ[HOME_VARIABLE] = str(home())  # absolute: children may have another directory


def load_run(
    recipe: str | Path, overrides: Sequence[str] = (), run: str | None = None
) -> RunConfig:
    """Return the configuration of one run.

    `recipe`: path of a YAML file, or name of a recipe under deployments/recipes.
    `overrides`: `dotted.key=value` with a YAML value. List items are numbered:
    `evaluation.datasets.0.temperature=0`.
    `run`: name of the run; None: the recipe's `run`, else `default_name`.
    Paths of files are absolute in the result (`rlpipe.config.paths`).

    Raises: ConfigError.
    """
    return load_with_origin(recipe, overrides, run)[0]


def unused_keys(
    recipe: str | Path, overrides: Sequence[str] = (), run: str | None = None
) -> list[str]:
    """Return a warning for each given key without effect; see `rlpipe.config.unused`.

    Keys of recipes and presets of the project are not reported. Raises: ConfigError, as `load_run`.
    """
    config, origin = load_with_origin(recipe, overrides, run)
    if Path(origin.file).resolve().parent in (RECIPES, SLIME_DEFAULTS):
        origin.lines = {}  # report overrides only
    return unused(config, origin)


def require_files(
    recipe: str | Path,
    overrides: Sequence[str] = (),
    run: str | None = None,
    *,
    absolute: bool = False,
) -> None:
    """Check that all files that a recipe names exist. Raises: ConfigError, also as `load_run`.

    Files of absolute paths are checked with `absolute` only: other machines may read them.
    `load_run` does not require them: `--dump-config` works on a machine without the files.
    """
    check_paths(*load_with_origin(recipe, overrides, run), absolute=absolute)


def load_with_origin(
    recipe: str | Path, overrides: Sequence[str], run: str | None
) -> tuple[RunConfig, Origin]:
    """Return the configuration of one run, and the source of its values. As `load_run`."""
    path = find_recipe(recipe)
    values, lines = parse(read(path, "the recipe"), str(path))
    if not isinstance(values, dict):
        raise ConfigError(
            "a recipe is a mapping of keys",
            where=str(path),
            found=_KINDS.get(type(values), "a value"),
            expected="lines of `key: value`",
            do="write at least num_rollout, model, data, rollout and reward; "
            "deployments/recipes has examples",
        )
    values.setdefault("run", default_name(path))
    origin = Origin(str(path), lines)
    values, overrides = apply_smoke(values, overrides, origin)
    for override in overrides:
        origin.overrides[_apply(values, override)] = override
    if run is not None:
        values["run"] = run
        origin.overrides["run"] = f"run={run}"
    config = validate(_with_preset(values, origin), origin)
    _refuse_reserved_names(config, origin)
    return located(config, origin), origin


def _refuse_reserved_names(config: RunConfig, origin: Origin) -> None:
    """Raise ConfigError for a name that is a folder of the home.

    `RunConfig` itself accepts these names, because older versions stored runs with them.
    """
    for key, name in (("run", config.run), ("resources.cluster", config.resources.cluster)):
        if name is not None and name.casefold() in RESERVED:
            raise ConfigError(
                f"this name is reserved for the folder of the {name.casefold()}",
                where=f"{key} ({origin.of(key)})",
                found=name,
                expected=f"any name but {' and '.join(RESERVED)}, in upper or lower case",
                do="choose another name: --run NAME",
            )


def warm_start_overrides(config: RunConfig) -> list[str]:
    """Return the overrides that a warm start shares with its run.

    They are seed, dtype, store, processes and engines, without the critic's ranks.
    """
    without_critic = {"critic_num_nodes": 1, "critic_num_gpus_per_node": 0}
    resources = config.resources.model_copy(update={"cluster": config.cluster, **without_critic})
    sections = {
        "resources": resources.model_dump(),
        "engine": config.engine.model_dump(),
        "store": config.store.model_dump(),
    }
    return [
        f"seed={config.seed}",
        f"deterministic={json.dumps(config.deterministic)}",
        f"model.dtype={config.model.dtype}",
        *(f"{section}={json.dumps(values)}" for section, values in sections.items()),
    ]


def validate(values: dict[str, Any], origin: Origin | None = None) -> RunConfig:
    """Return the `RunConfig` of plain data, with Megatron's and SGLang's arguments checked.

    Raises: ConfigError.
    """
    origin = origin or Origin("configuration", {})
    _refuse_unstorable_values(values, origin)
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        raise explain(error, origin) from None  # pydantic's text would repeat every problem
    check_megatron(config.train.megatron)
    check_sglang(config.engine.sglang)
    check_router(config.engine.router)
    return config


def validate_stored(values: dict[str, Any]) -> RunConfig:
    """Return the `RunConfig` of a stored run.

    Keys that are younger than the run get the default of their introduction, not today's default.
    Raises: ConfigError, also for a removed key with a value other than that default.
    """
    return validate(upgraded(RunConfig, values))


def _refuse_unstorable_values(values: Any, origin: Origin) -> None:
    """Raise ConfigError for a value that the run's records cannot or must not contain."""
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
            # The message has neither value nor override, because both contain the password.
            raise ConfigError(
                "a URL with a password, which would be stored with the run",
                where=key,
                expected="a URL without a password, and credentials in environment variables",
            )


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of everything that is neither a mapping nor a list."""
    if isinstance(value, dict | list | tuple):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


def dump(config: RunConfig) -> str:
    """Return the whole configuration as YAML; `load_run` of the YAML gives an equal one."""
    return dump_yaml(config.model_dump(mode="json"))


def recipes() -> list[str]:
    """Return the names of the project's recipes."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def presets() -> list[str]:
    """Return the names of the project's presets."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def default_name(recipe: str | Path) -> str:
    """Return the name of a recipe's run: the file's name, or for `FOLDER/recipe.yaml` the folder's.

    Recipes that are all called recipe.yaml would otherwise share the run `recipe`.
    """
    path = Path(recipe)
    if path.name in ("recipe.yaml", "recipe.yml"):
        return path.absolute().parent.name or path.stem
    return path.stem


def find_recipe(recipe: str | Path) -> Path:
    """Return the YAML file of a recipe.

    `recipe`: path of the file, or name of a recipe of the project. Raises: ConfigError with the
    nearest names.
    """
    path = Path(recipe)
    if path.suffix in (".yaml", ".yml"):
        if _exists(path):
            return path
        raise ConfigError(
            "the recipe file does not exist",
            where=str(recipe),
            found=f"no {path.name} in {path.absolute().parent}",
            expected=f"a YAML file, or one of {', '.join(recipes())}",
            do=f"write {near}"
            if (near := most_similar([path]))
            else "check the path; it counts from the current folder",
        )
    # `rlpipe init NAME` makes a folder, whose recipe has another name.
    in_folder = next(iter(sorted(path.glob("*.y*ml"))), None)
    if len(path.parts) != 1:
        raise ConfigError(
            "not a recipe",
            where=repr(str(recipe)),
            expected="a YAML file (.yaml, .yml), or the name of a recipe",
            do=f"give the file in this folder: {in_folder}" if in_folder else None,
        )
    named = RECIPES / f"{recipe}.yaml"
    if _is_file(named):
        return named
    names = recipes()
    close = nearest(str(recipe), names) or names
    expected = f"one of {', '.join(close)}" if close else f"a YAML file in {RECIPES}"
    raise ConfigError(
        "the project has no such recipe",
        where=str(recipe),
        expected=expected,
        do=f"give the file in this folder: {in_folder}"
        if in_folder
        else "or give the path of a YAML file",
    )


def _with_preset(values: dict[str, Any], origin: Origin) -> dict[str, Any]:
    """Return a recipe's values merged over its preset, and add the preset's lines to `origin`.

    Raises: ConfigError for a preset that does not exist (with the nearest names) or is no mapping.
    """
    rest = dict(values)
    name = rest.pop("preset", None)
    if name is None:
        return rest
    path = _find_preset(name, origin)
    preset, lines = parse(read(path, "the preset"), str(path))
    if not isinstance(preset, dict):
        raise ConfigError(
            "a preset is a mapping of keys", where=str(path), found=type(preset).__name__
        )
    origin.elsewhere = {key: f"{path}:{line}" for key, line in lines.items()}
    return merged(rest, preset)


def _find_preset(name: Any, origin: Origin) -> Path:
    path = Path(str(name))
    if path.suffix not in (".yaml", ".yml"):
        path = PRESETS / f"{name}.yaml"
    if _is_file(path):
        return path
    names = presets()
    same_family = [known for known in names if known.startswith(str(name))]
    close = same_family or nearest(str(name), names) or names
    raise ConfigError(
        "the project has no such preset",
        where=f"preset ({origin.of('preset')})",
        found=name,
        expected=f"a YAML file, or one of {', '.join(close)}",
    )


def _exists(path: Path) -> bool:
    """True if the path exists; False also for a name that no file can have."""
    with suppress(OSError, ValueError):
        return path.exists()
    return False


def _is_file(path: Path) -> bool:
    """True if the path is a file; False also for a name that no file can have."""
    with suppress(OSError, ValueError):
        return path.is_file()
    return False


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
        parent = ".".join(parents[:depth])
        target = target[_entry(target, name, parent, override)]
    target[_entry(target, last, ".".join(parents), override)] = value
    return key


def _entry(target: Any, name: str, parent: str, override: str) -> str | int:
    """Return `name` as the key of a mapping or the index of a list."""
    if isinstance(target, dict):
        return name
    if not isinstance(target, list):
        raise ConfigError(
            f"{parent} is a value and has no keys",
            where=f"override {override}",
            found=repr(target),
            do=f"write {parent}=VALUE",
        )
    if not (name.isdecimal() and int(name) < len(target)):
        numbers = f"a number from 0 to {len(target) - 1}" if len(target) > 1 else "0"
        raise ConfigError(
            f"{parent} is a list",
            where=f"override {override}",
            found=name,
            expected=numbers if target else "an entry; the list is empty",
        )
    return int(name)
