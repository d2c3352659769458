"""Find the files that a recipe names by relative paths.

    located(config, origin)              the configuration with absolute paths
    check_paths(config, origin)          ConfigError for a file that is in no folder
    with_recorded_paths(config, stored)  the paths of a run that is continued

A relative path of a recipe counts from the recipe's folder, else from the current folder; one of an
override counts from the current folder, else from the recipe's. The absolute path is recorded, so
another process, another working directory and a fork find the same file. Files of the project
(`deployments/recipes/agents.py`) stay relative to the project: a run with them can be continued in
another checkout.

Keys of files are functions (`path`, `maker`, `..._path`), prompt files (`paths`), model directories
(`hf_checkpoint`, `megatron_checkpoint`, `adapter`, `ref_load`, `opd_teacher_load`) and the recipe
of a warm start. URLs, names of the Hugging Face Hub and dotted paths of functions are no files.
Folders that a run writes, and the store, count from the current folder.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable
from contextlib import suppress
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from rlpipe.config.problems import Origin
from rlpipe.config.run import RunConfig
from rlpipe.errors import ConfigError
from rlpipe.system.hub import model_reference
from rlpipe.system.project import is_of_project

Model = TypeVar("Model", bound=BaseModel)
Change = Callable[[str, str], str]
"""(key, value of a path) → new value."""

_FUNCTION = re.compile(r"(?P<file>.*\.py)(?P<rest>:[^:/]*)?", re.DOTALL)
_DATA = re.compile(r"(?P<file>.*?)(?P<rest>@\[[^\]]*\])?", re.DOTALL)
_DIRECTORY = re.compile(r"(?P<file>.*)(?P<rest>)", re.DOTALL)
_RECIPE = re.compile(r"(?P<file>.*\.ya?ml)(?P<rest>)", re.DOTALL)
_PATTERNS = {
    "path": _FUNCTION,
    "maker": _FUNCTION,
    "paths": _DATA,
    "hf_checkpoint": _DIRECTORY,
    "opd_teacher_load": _DIRECTORY,
    "ref_load": _DIRECTORY,
    "megatron_checkpoint": _DIRECTORY,
    "adapter": _DIRECTORY,
    "warm_start": _RECIPE,
}
"""Field → pattern of its values. The group `rest` follows the path: a function, a slice of rows."""
HUB_KEYS = ("hf_checkpoint", "opd_teacher_load", "ref_load")
"""Ends of the keys of models, which may be on the Hugging Face Hub."""


def located(config: RunConfig, origin: Origin) -> RunConfig:
    """Return the configuration with absolute paths of all files that exist."""

    def locate(key: str, value: str) -> str:
        file, rest = _split(key, value)
        for folder in [] if is_of_project(file) else _folders(key, origin):
            if _exists(folder / file):
                return os.path.abspath(folder / file) + rest  # noqa: PTH100 - removes `..`, follows no link
        return value

    return _changed(config, locate)


def check_paths(config: RunConfig, origin: Origin, *, absolute: bool = False) -> None:
    """Check that `located` found every file; with `absolute` also files of absolute paths.

    Raises: ConfigError with all that are missing, and the folders of relative paths.
    """
    missing: list[ConfigError] = []

    def check(key: str, value: str) -> str:
        file, _ = _split(key, value)
        is_absolute = Path(file).is_absolute()
        if is_absolute and _exists(Path(file)):
            return value
        if not is_of_project(file) and not _may_be_on_hub(key, value):
            missing.append(_missing(key, value, origin))
        return value

    _changed(config, check, relative_only=not absolute)
    if len(missing) == 1:
        raise missing[0]
    if missing:
        lines = [f"  {error.where}: {error.found}; {error.do}" for error in missing]
        raise ConfigError(
            f"{len(missing)} files do not exist\n" + "\n".join(lines), where=origin.file
        )


def _missing(key: str, value: str, origin: Origin) -> ConfigError:
    file, rest = _split(key, value)
    is_absolute = Path(file).is_absolute()
    folders = [Path("/")] if is_absolute else list(dict.fromkeys(_folders(key, origin)))
    near = most_similar([folder / file for folder in folders])
    name = key.rpartition(".")[2]
    if near and not rest and (name.endswith("_path") or _PATTERNS.get(name) is _FUNCTION):
        rest = f":{_functions(near) or 'FUNCTION'}"
    return ConfigError(
        "the file does not exist",
        where=f"{key} ({origin.of(key)})",
        found=f"no {file}"
        if is_absolute
        else f"no {file} in {' and not in '.join(map(str, folders))}",
        expected="a path relative to the recipe's folder or to the current one, "
        "or an absolute path",
        do=f"write {near}{rest}"
        if near
        else "correct the path; a model of the Hugging Face Hub is named ORG/NAME"
        if key.endswith(HUB_KEYS)
        else "correct the path",
    )


def _functions(file: Path) -> str:
    """Return the names of the public functions of a file, joined by `|`; "" if it has none."""
    with suppress(OSError, ValueError, SyntaxError):
        nodes = ast.parse(file.read_text(encoding="utf-8")).body
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        return "|".join(n.name for n in nodes if isinstance(n, kinds) and n.name[0] != "_")
    return ""


def with_recorded_paths(config: RunConfig, stored: RunConfig) -> RunConfig:
    """Return the configuration with the paths that a run has recorded for the same files.

    Older versions recorded relative paths, which are part of the identity of stages. A recorded
    file that this machine does not have, of the same name, counts as moved: the new path is used.
    """
    recorded = _values(stored)

    def keep(key: str, value: str) -> str:
        before = recorded.get(key, value)
        file, rest = _split(key, before)
        if file and (os.path.abspath(file) + rest) == value:  # noqa: PTH100 - as in `located`
            return before
        return value

    return _changed(config, keep, relative_only=False)


def with_moved_paths(stored: RunConfig, config: RunConfig) -> RunConfig:
    """Return a stored configuration with the present paths of files that were moved.

    A file was moved if this machine does not have it at the recorded path, and the present path has
    the same name.
    """
    present = _values(config)

    def follow(key: str, value: str) -> str:
        now = present.get(key, value)
        file, rest = _split(key, value)
        new_file, new_rest = _split(key, now)
        is_same_name = Path(file).name == Path(new_file).name and rest == new_rest
        return now if is_same_name and not _exists(Path(file)) else value

    return _changed(stored, follow, relative_only=False)


def _folders(key: str, origin: Origin) -> tuple[Path, ...]:
    current = Path.cwd()
    recipe = Path(os.path.abspath(origin.file)).parent  # noqa: PTH100 - as in `located`
    return (current, recipe) if origin.of(key).startswith("override ") else (recipe, current)


def _changed(model: Model, change: Change, key: str = "", *, relative_only: bool = True) -> Model:
    """Return a copy of a configuration with `change` applied to all paths of files."""
    update: dict[str, Any] = {}
    for name in type(model).model_fields:
        value = getattr(model, name)
        new = _changed_value(value, name, change, f"{key}.{name}" if key else name, relative_only)
        if new is not value:
            update[name] = new
    return model.model_copy(update=update) if update else model


def _changed_value(value: Any, name: str, change: Change, key: str, relative_only: bool) -> Any:
    if isinstance(value, BaseModel):
        return _changed(value, change, key, relative_only=relative_only)
    if isinstance(value, tuple):
        items = [
            _changed_value(item, name, change, f"{key}.{number}", relative_only)
            for number, item in enumerate(value)
        ]
        same = all(new is old for new, old in zip(items, value, strict=True))
        return value if same else tuple(items)
    if not isinstance(value, str) or not (file := _split(key, value)[0]):
        return value
    return value if relative_only and Path(file).is_absolute() else change(key, value)


def _values(config: RunConfig) -> dict[str, str]:
    """Return key → value of all paths of files."""
    values: dict[str, str] = {}

    def note(key: str, value: str) -> str:
        values[key] = value
        return value

    _changed(config, note, relative_only=False)
    return values


def _split(key: str, value: str) -> tuple[str, str]:
    """Split a value into (path of the file, rest); ("", "") if the key has no file."""
    names = [name for name in key.split(".") if not name.isdecimal()]
    pattern = _FUNCTION if names[-1].endswith("_path") else _PATTERNS.get(names[-1])
    match = pattern and pattern.fullmatch(value)
    if not match or value.startswith("~") or "://" in value or "::" in value:
        return "", ""
    return match["file"], match["rest"] or ""


def _may_be_on_hub(key: str, value: str) -> bool:
    return key.endswith(HUB_KEYS) and model_reference(value) is not None


def most_similar(paths: list[Path]) -> Path | None:
    """Return the existing file whose name is most similar to that of one of the paths."""
    best: Path | None = None
    best_ratio = 0.0
    for path in paths:
        with suppress(OSError, ValueError):
            names = [entry.name for entry in path.parent.iterdir()]
            for name in get_close_matches(path.name, names, n=1):
                ratio = SequenceMatcher(None, path.name, name).ratio()
                if ratio > best_ratio:
                    best = path.with_name(name)
                    best_ratio = ratio
    return best


def _exists(path: Path) -> bool:
    """True if the path exists; False also for a name that no file can have."""
    with suppress(OSError, ValueError):
        return path.exists()
    return False
