"""Arguments that go to Megatron-core, SGLang and its router untouched, under their own names: checked here, read there.

`megatron.json`, `sglang.json` and `router.json` list every name with its type and default, per receiving class
({"package", "version", "receivers": {class: {name: {"type", "default", "field"?}}}}); `tools/passthrough_tables.py` writes
them. Names that rlpipe sets itself are *owned*: passing one is an error that says which key to use.

Types are checked as far as JSON goes (a string where a number belongs); whether a value makes sense is found out by the
receiving class itself when it is built. Nothing here imports torch, megatron or sglang.
"""

from __future__ import annotations

import ast
import difflib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

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
    """One table as it is stored; Megatron's with the arguments of a checkout that is imported in place of the wheel."""
    stored = json.loads((FOLDER / f"{table}.json").read_text(encoding="utf-8"))
    folder = checkout() if table == "megatron" else None
    if folder is None:
        return stored
    return {"package": "Megatron-LM", "version": f"at {folder}", "receivers": arguments(folder)}


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
