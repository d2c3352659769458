"""Check arguments that go to Megatron-core, SGLang and its router, by name, by the rules of the
table, and by type.

    check_megatron(config.train.megatron)       raises ConfigError for the first one that cannot be taken
    effective("megatron", config.train.megatron)  those that the receiving classes are to be given

Whether several values make sense together is found out by the receiving class itself
(`rlpipe.engines.megatron.preflight`).
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
from rlpipe.config.arguments.rows import Rule
from rlpipe.config.arguments.table import TABLE
from rlpipe.errors import ConfigError

KEYS = {"megatron": "train.megatron", "sglang": "engine.sglang", "router": "engine.router"}
"""Table → the key of the configuration that its arguments are given under."""
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


def check_megatron(given: Mapping[str, Any]) -> None:
    """Check `train.megatron`. Raises: ConfigError for a name or value that cannot be taken."""
    check("megatron", given)


def check_sglang(given: Mapping[str, Any]) -> None:
    """Check `engine.sglang`. Raises: ConfigError for a name or value that cannot be taken."""
    check("sglang", given)


def check_router(given: Mapping[str, Any]) -> None:
    """Check `engine.router`. Raises: ConfigError for a name or value that cannot be taken."""
    check("router", given)


def check(table: str, given: Mapping[str, Any]) -> None:
    """Check arguments of one table. Raises: ConfigError for the first that cannot be taken."""
    content = names.load(table)
    made_by = f"{content['package']} {content['version']}"
    for name, value in given.items():
        where = f"{KEYS[table]}.{name}"
        entries = list(_entries(table, name))
        if not entries:
            raise unknown(table, where, name)
        if error := refusal(table, where, name, value):
            raise error
        spelled = entries[-1]["type"]
        if not accepts(spelled, value):
            raise ConfigError(
                "this takes a Python object, which YAML cannot hold"
                if OBJECT in spelled
                else "the value is not of the argument's type",
                where=where,
                found=repr(value),
                expected=f"{spelled} ({made_by})",
            )
        if error := _unreadable(table, where, value, entries[-1], made_by):
            raise error
        if error := _not_a_choice(where, value, entries[-1].get("choices"), made_by):
            raise error


def rule_of(table: str, name: str) -> Rule | None:
    """The row of an argument in the table, under any of its spellings; None if it is free."""
    field = next((entry.get("field", name) for entry in _entries(table, name)), name)
    rule = TABLE[table].get(field)
    only_of_the_checkout = table == "megatron" and names.receivers(table, name) == [PROVIDER]
    if rule is not None and rule.kind != "owned" and only_of_the_checkout:
        return None  # the provider's code reads it, whatever Megatron's own field of this name does
    return rule


def refusal(table: str, where: str, name: str, value: Any) -> ConfigError | None:
    """The error for an argument that the table does not allow; None if it does. `where`: how the
    user spelled it."""
    rule = rule_of(table, name)
    if (
        rule is None
        or rule.kind == "free"
        or any(_same(value, one) for one in allowed(table, name))
    ):
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
            do=f"leave it out: {rule.text}",
        )
    return ConfigError(
        "this argument would have no effect",
        where=where,
        found=repr(value),
        do=f"leave it out: {rule.text}",
    )


def allowed(table: str, name: str) -> list[Any]:
    """Values that are taken though the argument is not free: they say what holds anyway."""
    rule = rule_of(table, name)
    if rule is None or rule.kind not in ("fixed", "inert"):
        return []
    defaults = [entry["default"] for entry in _entries(table, name)] if rule.kind == "inert" else []
    return [*rule.values, *defaults]


def effective(table: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments without those that only say what holds anyway (`fixed` and `inert` ones)."""
    kinds = {name: rule.kind for name in given if (rule := rule_of(table, name))}
    return {
        name: value for name, value in given.items() if kinds.get(name) not in ("fixed", "inert")
    }


def unknown(table: str, where: str, name: str) -> ConfigError:
    """The error for a name that no receiving class has, with the nearest names."""
    content = names.load(table)
    known = list(names.entries(table))
    plain = name.lstrip("-").replace("-", "_")
    close = [plain] if plain in known else difflib.get_close_matches(plain, known, n=3, cutoff=0.6)
    others = f"one of its {len(known)} arguments (names with underscores, no prefix)"
    return ConfigError(
        f"{content['package']} {content['version']} has no argument of this name",
        where=where,
        found=name,
        expected=" or ".join(close) if close else others,
    )


def size_of(value: int | str) -> int:
    """The number that a size stands for: SGLang reads `4k` as 4000 and `4Ki` as 4096."""
    found = re.fullmatch(r"(-?[0-9.]+)([A-Za-z]*)", str(value))
    assert found is not None, f"{value!r} has passed `check`"
    return int(Decimal(found[1]) * _UNITS[found[2]])


def _unreadable(
    table: str, where: str, value: Any, entry: dict[str, Any], made_by: str
) -> ConfigError | None:
    """The error for a value that the package's command line cannot be told; None if it can, and for
    Megatron, which has none."""
    if table == "megatron":
        return None
    if value is False and "off" not in entry and entry["default"] is not False:
        return ConfigError(
            "this argument can only be turned on",
            where=where,
            found="false",
            expected=f"true ({made_by})",
            do="leave it out",
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


def _not_a_choice(
    where: str, value: Any, choices: list[Any] | None, made_by: str
) -> ConfigError | None:
    """The error for a word that a command line option does not take; None if it does, or takes
    any."""
    values = value if isinstance(value, list | tuple) else [value]
    if choices is None or value is None or all(one in choices for one in values):
        return None
    close = [
        word
        for one in values
        for word in difflib.get_close_matches(str(one), map(str, choices), n=1)
    ]
    others = f"{', '.join(map(str, choices))} ({made_by})"
    return ConfigError(
        "the value is none of the argument's choices",
        where=where,
        found=repr(value),
        expected=f"{close[0]}; or one of {others}" if close else f"one of {others}",
    )


def _entries(table: str, name: str) -> Iterator[dict[str, Any]]:
    """What each receiving class knows about a name."""
    every = [*names.load(table)["receivers"].values(), names.OWN.get(table, {})]
    return (known[name] for known in every if name in known)


def _same(value: Any, other: Any) -> bool:
    """True if two values are equal, and not a number and a truth value."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)
