"""The folder that holds `flows`, `tasks`, `tools` and `deployments`: a checkout or a wheel.

In a checkout these packages are next to `rlpipe`. A wheel holds them in `rlpipe/_project`, because
top-level packages of these names would hide those of the user.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

PACKAGES = ("flows", "tasks", "tools", "deployments")
_LIBRARY = Path(__file__).resolve().parents[1]
_INSTALLED = _LIBRARY / "_project"
PROJECT = _INSTALLED if _INSTALLED.is_dir() else _LIBRARY.parent
RECIPES = PROJECT / "deployments" / "recipes"
PRESETS = PROJECT / "deployments" / "models"
HOME_VARIABLE = "RLPIPE_HOME"
"""Environment variable with the directory of all runs."""


def use_project() -> None:
    """Make the project's packages importable in this process and in all processes it starts.

    They come first, so that a package `tools` of the current folder does not hide them. The current
    folder comes second, as in `python -m`: functions of the user may be modules there.
    """
    first = [str(PROJECT), str(Path.cwd())]
    sys.path[:] = list(dict.fromkeys([*first, *sys.path]))
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = dict.fromkeys([str(PROJECT), *filter(None, inherited)])
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)


def hidden_file(module: str) -> Path | None:
    """Return the user's file of a module that a package of the project hides, if there is one.

    `tools.my_reward` with `tools/my_reward.py` in the current folder is such a module: the import
    finds the project's `tools`.
    """
    parts = module.split(".")
    if parts[0] not in PACKAGES or Path.cwd() == PROJECT:
        return None
    if PROJECT.joinpath(*parts).is_dir() or PROJECT.joinpath(*parts).with_suffix(".py").is_file():
        return None
    file = Path(*parts).with_suffix(".py")
    return file if file.is_file() else None


def in_project(path: str) -> str:
    """Return the path of a file: of the current folder, else of the project if it has the file."""
    return str(PROJECT / path) if is_of_project(path) and not _exists(Path(path)) else path


def is_of_project(path: str) -> bool:
    """True for a relative path of a file of the project that the current folder does not hide.

    `deployments/recipes/agents.py` is such a path in every folder without a file of this name.
    """
    file = Path(path)
    if file.is_absolute() or not file.parts or file.parts[0] not in (*PACKAGES, _LIBRARY.name):
        return False
    if not _exists(PROJECT / file):
        return False
    return not _exists(file) or file.samefile(PROJECT / file)


def _exists(path: Path) -> bool:
    """True if the path exists; False also for a name that no file can have."""
    with suppress(OSError, ValueError):
        return path.exists()
    return False
