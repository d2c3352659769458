"""Check arguments of Megatron-core, SGLang and its router by name, by table and by type.

    check_megatron(config.train.megatron)           ConfigError for the first invalid argument
    effective("megatron", config.train.megatron)    arguments to pass to the receiving classes

The receiving class itself checks combinations of arguments (`rlpipe.engines.megatron.preflight`).
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from rlpipe.config.arguments import names
from rlpipe.config.arguments.checkout import PROVIDER
from rlpipe.config.arguments.names import OBJECT, accepts
from rlpipe.config.arguments.table import TABLE, Rule
from rlpipe.errors import ConfigError

KEYS = {"megatron": "train.megatron", "sglang": "engine.sglang", "router": "engine.router"}
"""Package → key of the configuration with its arguments."""
_UNITS = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}
_SIZE = re.compile(r"-?[0-9]+(Ki|Mi|Gi|Ti|k|M|G|T)?|[0-9]+\.[0-9]+[kMGT]")


def check_megatron(arguments: Mapping[str, Any]) -> None:
    """Check `train.megatron`. Raises: ConfigError for a name or value that is not accepted."""
    check("megatron", arguments)


def check_sglang(arguments: Mapping[str, Any]) -> None:
    """Check `engine.sglang`. Raises: ConfigError for a name or value that is not accepted."""
    check("sglang", arguments)


def check_router(arguments: Mapping[str, Any]) -> None:
    """Check `engine.router`. Raises: ConfigError for a name or value that is not accepted."""
    check("router", arguments)


def check(table: str, arguments: Mapping[str, Any]) -> None:
    """Check the arguments of one package. Raises: ConfigError for the first invalid one."""
    content = names.load(table)
    package = f"{content['package']} {content['version']}"
    for name, value in arguments.items():
        where = f"{KEYS[table]}.{name}"
        entries = list(_entries(table, name))
        if not entries:
            raise unknown(table, where, name)
        if error := refusal(table, where, name, value):
            raise error
        type_text = entries[-1]["type"]
        if not accepts(type_text, value):
            raise ConfigError(
                "the argument is a Python object, which YAML cannot contain"
                if OBJECT in type_text
                else "the value is not of the argument's type",
                where=where,
                found=repr(value),
                expected=f"{type_text} ({package})",
            )
        if error := _command_line_error(table, where, value, entries[-1], package):
            raise error
        if error := _choice_error(where, value, entries[-1].get("choices"), package):
            raise error


def rule_of(table: str, name: str) -> Rule | None:
    """Return the row of an argument, under any of its spellings; None if it has no row."""
    field = next((entry.get("field", name) for entry in _entries(table, name)), name)
    rule = TABLE[table].get(field)
    only_in_checkout = table == "megatron" and names.receivers(table, name) == [PROVIDER]
    if rule is not None and rule.kind != "owned" and only_in_checkout:
        # The checkout's argument provider reads it, even if Megatron ignores its own field.
        return None
    return rule


def refusal(table: str, where: str, name: str, value: Any) -> ConfigError | None:
    """Return the error of an argument that the table refuses, else None.

    `where`: the user's spelling, such as a key or a flag.
    """
    rule = rule_of(table, name)
    if rule is None or rule.kind == "free":
        return None
    if any(_same(value, accepted) for accepted in accepted_values(table, name)):
        return None
    if rule.kind == "owned":
        return ConfigError(
            "rlpipe sets this argument itself", where=where, found=repr(value), do=rule.text
        )
    if rule.kind == "fixed":
        return ConfigError(
            "rlpipe needs one value of this argument",
            where=where,
            found=repr(value),
            expected=repr(rule.values[0]),
            do=f"remove it: {rule.text}",
        )
    return ConfigError(
        "this argument would have no effect",
        where=where,
        found=repr(value),
        do=f"remove it: {rule.text}",
    )


def accepted_values(table: str, name: str) -> list[Any]:
    """Return the values of a `fixed` or `inert` argument that change nothing; else []."""
    rule = rule_of(table, name)
    if rule is None or rule.kind not in ("fixed", "inert"):
        return []
    defaults = [entry["default"] for entry in _entries(table, name)] if rule.kind == "inert" else []
    return [*rule.values, *defaults]


def effective(table: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments without `fixed` and `inert` ones, which change nothing."""
    kinds = {name: rule.kind for name in arguments if (rule := rule_of(table, name))}
    return {
        name: value
        for name, value in arguments.items()
        if kinds.get(name) not in ("fixed", "inert")
    }


def unknown(table: str, where: str, name: str) -> ConfigError:
    """Return the error of an unknown name, with the nearest names."""
    content = names.load(table)
    known = list(names.entries(table))
    plain = name.lstrip("-").replace("-", "_")
    present = plain if plain in known else names.renamed(table, plain)
    close = [present] if present else difflib.get_close_matches(plain, known, n=3, cutoff=0.6)
    others = f"one of {len(known)} arguments (names with underscores, no prefix)"
    return ConfigError(
        f"{content['package']} {content['version']} has no argument of this name",
        where=where,
        found=name,
        expected=" or ".join(close) if close else others,
    )


def size_of(value: int | str) -> int:
    """Return the number of a size. SGLang reads `4k` as 4000 and `4Ki` as 4096."""
    match = re.fullmatch(r"(-?[0-9.]+)([A-Za-z]*)", str(value))
    assert match is not None, f"{value!r} has passed `check`"
    return int(Decimal(match[1]) * _UNITS[match[2]])


def _command_line_error(
    table: str, where: str, value: Any, entry: dict[str, Any], package: str
) -> ConfigError | None:
    """Return the error of a value that the package's command line cannot express, else None."""
    if table == "megatron":  # its arguments are passed to classes, not to a command line
        return None
    if value is False and "off" not in entry and entry["default"] is not False:
        return ConfigError(
            "this argument can only be turned on",
            where=where,
            found="false",
            expected=f"true ({package})",
            do="remove it",
        )
    reads = entry.get("reads")
    if not isinstance(value, str) or reads is None:
        return None
    if reads == "size" and not _SIZE.fullmatch(value):
        return ConfigError("not a size", where=where, found=repr(value), expected="4096, 4k or 4Ki")
    if reads == "json":
        try:
            json.loads(value)
        except ValueError as error:
            return ConfigError(
                "not JSON", where=where, found=repr(value), expected=f"a list or a mapping: {error}"
            )
    return None


def _choice_error(
    where: str, value: Any, choices: list[Any] | None, package: str
) -> ConfigError | None:
    """Return the error of a value that is none of an option's choices, else None."""
    values = value if isinstance(value, list | tuple) else [value]
    if choices is None or value is None or all(item in choices for item in values):
        return None
    words = list(map(str, choices))
    close = [word for item in values for word in difflib.get_close_matches(str(item), words, n=1)]
    others = f"{', '.join(words)} ({package})"
    return ConfigError(
        "the value is none of the argument's choices",
        where=where,
        found=repr(value),
        expected=f"{close[0]}; or one of {others}" if close else f"one of {others}",
    )


def _entries(table: str, name: str) -> Iterator[dict[str, Any]]:
    """Return the entries of a name in all receiving classes."""
    classes = [*names.load(table)["receivers"].values(), names.OWN.get(table, {})]
    return (entries[name] for entries in classes if name in entries)


def _same(value: Any, other: Any) -> bool:
    """True if two values are equal and both or neither are a bool (in Python, 1 == True)."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)
