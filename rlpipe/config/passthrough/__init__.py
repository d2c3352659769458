"""Arguments that go to Megatron-core, SGLang and its router untouched, under their own names: checked here, read there.

`{table}-{version}.json` lists every name with its type and default, per receiving class
({"package", "version", "receivers": {class: {name: {"type", "default", "field"?}}}}); `tools/passthrough_tables.py` writes
it. There is one for each end of a range of versions, and what is checked against is the one of the version that is installed; of
another version all of them together, and where none is, on a machine that only submits runs, the newest. Names that rlpipe sets
itself are *owned*: passing one is an error that says which key to use.

Types are checked as far as JSON goes (a string where a number belongs); whether a value makes sense is found out by the
receiving class itself when it is built. Nothing here imports torch, megatron or sglang.
"""

from __future__ import annotations

import ast
import difflib
import json
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.version import Version

from rlpipe.config.passthrough.checkout import arguments, checkout
from rlpipe.config.passthrough.owned import OWNED
from rlpipe.errors import ConfigError

FOLDER = Path(__file__).parent
TABLES = ("megatron", "sglang", "router")
OBJECT = "object"
"""The type of what YAML cannot hold: functions, dtypes, classes."""

_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "None": (type(None),),
    "list": (list, tuple),
    "dict": (dict,),
}


def check_megatron(given: Mapping[str, Any]) -> None:
    """Check `train.megatron`. Raises: ConfigError for a name that is unknown, owned, or of the wrong type."""
    _check("megatron", "train.megatron", given)


def check_sglang(given: Mapping[str, Any]) -> None:
    """Check `engine.sglang`. Raises: ConfigError for a name that is unknown, owned, or of the wrong type."""
    _check("sglang", "engine.sglang", given)


def check_router(given: Mapping[str, Any]) -> None:
    """Check `engine.router`. Raises: ConfigError for a name that is unknown, owned, or of the wrong type."""
    _check("router", "engine.router", given)


@cache
def load(table: str) -> dict[str, Any]:
    """The table of what is installed; Megatron's with the arguments of a checkout that is imported in place of the wheel."""
    folder = checkout() if table == "megatron" else None
    if folder is not None:
        return {"package": "Megatron-LM", "version": f"at {folder}", "receivers": arguments(folder)}
    known = stored(table)
    version = installed(next(iter(known.values()))["package"])
    if version is None:
        return known[max(known)]
    return known[version] if version in known else _together(known)


def stored(table: str) -> dict[Version, dict[str, Any]]:
    """The tables that lie here, by version."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in FOLDER.glob(f"{table}-*.json")]
    return {Version(content["version"]): content for content in found}


def installed(package: str) -> Version | None:
    """Its version, without what a build adds to it; None if it is not there."""
    try:
        return Version(Version(metadata.version(package)).base_version)
    except metadata.PackageNotFoundError:
        return None


def _together(known: Mapping[Version, dict[str, Any]]) -> dict[str, Any]:
    """Names of any of the versions; of one that several have, as the newest has it."""
    receivers: dict[str, dict[str, Any]] = {}
    for version in sorted(known):
        for kind, names in known[version]["receivers"].items():
            receivers.setdefault(kind, {}).update(names)
    versions = " or ".join(map(str, sorted(known)))
    return {"package": known[min(known)]["package"], "version": versions, "receivers": receivers}


def receivers(table: str, name: str) -> list[str]:
    """The classes that take an argument of this name (`TransformerConfig`, `OptimizerConfig`, ...); none if unknown."""
    return [kind for kind, known in load(table)["receivers"].items() if name in known]


def accepts(spelled: str, value: Any) -> bool:
    """Whether a JSON value is of the type that a table spells (`int | None`, `'full' | 'selective'`). None is an OBJECT."""
    for part in spelled.split(" | "):
        if part in _JSON_TYPES:
            if isinstance(value, _JSON_TYPES[part]) and isinstance(value, bool) <= (part == "bool"):
                return True
        elif part != OBJECT and ast.literal_eval(part) == value:
            return True
    return False


def _check(table: str, key: str, given: Mapping[str, Any]) -> None:
    content = load(table)
    made_by = f"{content['package']} {content['version']}"
    known = {name: entry for kind in content["receivers"].values() for name, entry in kind.items()}
    for name, value in given.items():
        where = f"{key}.{name}"
        entry = known.get(name)
        if entry is None:
            raise _unknown(where, name, known, made_by)
        owner = OWNED[table].get(entry.get("field", name))
        if owner:
            raise ConfigError("rlpipe sets this itself", where=where, found=repr(value), do=owner)
        if not accepts(entry["type"], value):
            problem = "this takes a Python object, which YAML cannot hold" if OBJECT in entry["type"] else "not of its type"
            raise ConfigError(problem, where=where, found=repr(value), expected=f"{entry['type']} ({made_by})")


def _unknown(where: str, name: str, known: Mapping[str, Any], made_by: str) -> ConfigError:
    plain = name.lstrip("-").replace("-", "_")
    close = [plain] if plain in known else difflib.get_close_matches(plain, list(known), n=3, cutoff=0.6)
    return ConfigError(
        f"{made_by} has no argument of this name",
        where=where,
        found=name,
        expected=" or ".join(close) if close else f"one of its {len(known)} arguments (names with underscores, no prefix)",
    )
