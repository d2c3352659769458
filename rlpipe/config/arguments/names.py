"""Names, types and defaults of the arguments that Megatron-core, SGLang and its router take.

`{table}-{version}.json` lists every name with its type and default, per receiving class
({"package", "version", "receivers": {class: {name: {"type", "default", "field"?, ...}}}});
`tools/argument_tables.py` writes it. There is one for each end of a range of versions. A
configuration is checked against the one of the version that is installed; for another version
against all of them together, and where none is installed, on a machine that only submits runs,
against the newest.

Types are checked as far as JSON goes (a string where a number belongs). `choices` are the words
that a command line option takes, `words` is set where it takes several, `off` is the option that
turns it off, and `reads` how its word is read: as JSON, or as a size (`4096`, `8Ki`).
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.version import Version

from rlpipe.config.arguments.checkout import arguments, checkout

FOLDER = Path(__file__).parent
TABLES = ("megatron", "sglang", "router")
PAD_TO = "make_vocab_size_divisible_by"
"""Megatron-LM's argument for padding the vocabulary. No class of Megatron-core has it; the trainer
reads it itself."""
OWN: dict[str, dict[str, dict[str, Any]]] = {"megatron": {PAD_TO: {"type": "int", "default": 1}}}
"""Arguments that no receiving class has, and that are taken all the same."""
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


@cache
def load(table: str) -> dict[str, Any]:
    """The table of what is installed; Megatron's with the arguments of a checkout that is imported
    in place of the wheel."""
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
    found = [
        json.loads(path.read_text(encoding="utf-8")) for path in FOLDER.glob(f"{table}-*.json")
    ]
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


def entries(table: str) -> dict[str, dict[str, Any]]:
    """Name → what is known of it, of all receiving classes together; of a name that several have,
    as the last one has it."""
    every = [*load(table)["receivers"].values(), OWN.get(table, {})]
    return {name: entry for known in every for name, entry in known.items()}


def receivers(table: str, name: str) -> list[str]:
    """The classes that take an argument of this name (`TransformerConfig`, `OptimizerConfig`, ...);
    none if unknown."""
    return [kind for kind, known in load(table)["receivers"].items() if name in known]


def accepts(spelled: str, value: Any) -> bool:
    """Whether a JSON value is of the type that a table spells (`int | None`, `'full' |
    'selective'`). None is an OBJECT."""
    for part in spelled.split(" | "):
        if part in _JSON_TYPES:
            if isinstance(value, _JSON_TYPES[part]) and isinstance(value, bool) <= (part == "bool"):
                return True
        elif part != OBJECT and ast.literal_eval(part) == value:
            return True
    return False
