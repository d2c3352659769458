"""Presets of models: what a family and size needs of trainer and engines, as YAML that a recipe
names.

    preset: qwen3-4b          # in a recipe, or `preset=qwen3-4b` on a command line

Its keys are the configuration's; whatever a recipe or an override says wins, key by key. The
resolved configuration has the values and not the name.

Not here: the model's architecture, which is its directory's config.json; what is learned, and how
(recipes).
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from rlpipe.config.problems import Origin, nearest
from rlpipe.config.text import parse, read
from rlpipe.errors import ConfigError

PRESETS = Path(__file__).resolve().parents[2] / "deployments" / "models"
KEY = "preset"


def presets() -> list[str]:
    """Names of the presets that come with the project."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def with_preset(values: dict[str, Any], origin: Origin) -> dict[str, Any]:
    """A recipe's values over those of the preset that it names, if any; what `origin` says of their
    places is completed.

    Raises: ConfigError for a preset that is not there, with the nearest names, or is not a mapping.
    """
    rest = dict(values)
    if (name := rest.pop(KEY, None)) is None:
        return rest
    path = _find(name, origin)
    below, lines = parse(read(path, "the preset"), str(path))
    if not isinstance(below, dict):
        raise ConfigError(
            "a preset is a mapping of keys", where=str(path), found=type(below).__name__
        )
    origin.elsewhere = {key: f"{path}:{line}" for key, line in lines.items()}
    return _over(rest, below)


def exists(path: Path) -> bool:
    """Is there something of this name, a file or not? Not under a name that no file can have."""
    with suppress(OSError, ValueError):
        return path.exists()
    return False


def is_file(path: Path) -> bool:
    """Is there one? Not under a name that no file can have."""
    with suppress(OSError, ValueError):
        return path.is_file()
    return False


def _find(name: Any, origin: Origin) -> Path:
    path = Path(str(name))
    if path.suffix not in (".yaml", ".yml"):
        path = PRESETS / f"{name}.yaml"
    if is_file(path):
        return path
    close = (
        [known for known in presets() if known.startswith(str(name))]
        or nearest(str(name), presets())
        or presets()
    )
    where = f"{KEY} ({origin.of(KEY)})"
    raise ConfigError(
        "there is no such preset",
        where=where,
        found=name,
        expected=f"a YAML file, or one of {', '.join(close)}",
    )


def _over(above: dict[str, Any], below: dict[str, Any]) -> dict[str, Any]:
    merged = {**below, **above}
    for name in above.keys() & below.keys():
        if isinstance(above[name], dict) and isinstance(below[name], dict):
            merged[name] = _over(above[name], below[name])
    return merged
