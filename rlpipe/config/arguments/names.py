"""Names, types and defaults of the arguments of Megatron-core, SGLang and its router.

`{table}-{version}.json` lists every name with its type and default per receiving class:
{"package", "version", "receivers": {class: {name: {"type", "default", "field"?, ...}}}}.
`tools/argument_tables.py` writes the files, one for each end of a range of versions.

A configuration is checked against the table of the installed version. For another version it is
checked against all tables together. On a machine without the package, which only submits runs, it
is checked against the newest table.

Types are checked as far as JSON goes (a string instead of a number). `choices` are the values of a
command line option, `words` is set for an option with several values, `off` is the option that
turns it off, and `reads` is the format of its value: JSON, or a size (`4096`, `8Ki`).
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
"""Megatron-LM's argument for padding the vocabulary. No class of Megatron-core has it; rlpipe's
trainer reads it."""
LAYERS_PER_CHUNK = "num_layers_per_virtual_pipeline_stage"
"""Megatron-LM's argument for virtual pipelining. No class of Megatron-core has it; rlpipe's trainer
computes `virtual_pipeline_model_parallel_size` of it."""
OWN: dict[str, dict[str, dict[str, Any]]] = {
    "megatron": {
        PAD_TO: {"type": "int", "default": 1},
        LAYERS_PER_CHUNK: {"type": "int | None", "default": None},
    }
}
"""Accepted arguments that no receiving class has."""
OBJECT = "object"
"""Type of values that YAML cannot contain: functions, dtypes, classes."""

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
    """Return the table of the installed version, or of a Megatron-LM checkout on PYTHONPATH."""
    folder = checkout() if table == "megatron" else None
    if folder is not None:
        return {"package": "Megatron-LM", "version": f"at {folder}", "receivers": arguments(folder)}
    known = stored(table)
    version = installed(next(iter(known.values()))["package"])
    if version is None:
        return known[max(known)]
    return known[version] if version in known else _merged(known)


def stored(table: str) -> dict[Version, dict[str, Any]]:
    """Return the tables of the JSON files by version."""
    contents = [
        json.loads(path.read_text(encoding="utf-8")) for path in FOLDER.glob(f"{table}-*.json")
    ]
    return {Version(content["version"]): content for content in contents}


def installed(package: str) -> Version | None:
    """Return the installed version without a local build suffix; None if not installed."""
    try:
        return Version(Version(metadata.version(package)).base_version)
    except metadata.PackageNotFoundError:
        return None


def _merged(known: Mapping[Version, dict[str, Any]]) -> dict[str, Any]:
    """Merge tables; the newest version wins for a name of several versions."""
    receivers: dict[str, dict[str, Any]] = {}
    for version in sorted(known):
        for kind, names in known[version]["receivers"].items():
            receivers.setdefault(kind, {}).update(names)
    versions = " or ".join(map(str, sorted(known)))
    return {"package": known[min(known)]["package"], "version": versions, "receivers": receivers}


def entries(table: str) -> dict[str, dict[str, Any]]:
    """Return name → entry of all receiving classes; the last class wins for a shared name."""
    classes = [*load(table)["receivers"].values(), OWN.get(table, {})]
    return {name: entry for known in classes for name, entry in known.items()}


def receivers(table: str, name: str) -> list[str]:
    """Return the classes with an argument of this name, such as `TransformerConfig`."""
    return [kind for kind, known in load(table)["receivers"].items() if name in known]


def renamed(table: str, name: str) -> str | None:
    """Return the present name of an argument that another stored version calls `name`, or None.

    The tables of other versions have the field that an option sets: `nsa_decode_backend` of SGLang
    0.5.15 set `dsa_decode_backend`, the option of 0.5.21.
    """
    known = entries(table)
    for content in stored(table).values():
        for options in content["receivers"].values():
            field = options.get(name, {}).get("field")
            if field in known:
                return field
    return None


@cache
def megatron_options() -> dict[str, dict[str, Any]]:
    """Return Megatron-LM's command line options by name with underscores, of the newest table.

    `tools/megatron_options.py` writes the table and explains an entry.
    """
    files = {
        Version(path.stem.removeprefix("megatron_options-")): path
        for path in FOLDER.glob("megatron_options-*.json")
    }
    return json.loads(files[max(files)].read_text(encoding="utf-8"))["options"]


def accepts(type_text: str, value: Any) -> bool:
    """True if a JSON value has the type of a table (`int | None`, `'full' | 'selective'`).

    No value has the type OBJECT.
    """
    for part in type_text.split(" | "):
        if part in _JSON_TYPES:
            # bool is a subclass of int in Python, but true is not a number here.
            is_bool_mismatch = isinstance(value, bool) and part != "bool"
            if isinstance(value, _JSON_TYPES[part]) and not is_bool_mismatch:
                return True
        elif part != OBJECT and ast.literal_eval(part) == value:
            return True
    return False
