"""A command line in slime's three categories, read: its own flags, Megatron's bare, SGLang's with
`--sglang-`.

    given = read_flags(["--lr", "1e-6", "--sglang-mem-fraction-static", "0.8",
    "train.loss.eps_clip=0.3"]) given.own["lr"], given.sglang["mem_fraction_static"],
    given.overrides

A flag may be given as `--name value` or `--name=value`, with dashes or underscores; the last one
counts, but repeated lists are put together. A word `dotted.key=value` that is not a flag's value is
an override.

Not here: the table (`slime`), what keys follow from flags (`slime_build`).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlpipe.config.arguments import names
from rlpipe.config.arguments.check import refusal, rule_of
from rlpipe.config.text import parse
from rlpipe.errors import ConfigError
from rlpipe.slime.args import FLAGS, absent
from rlpipe.slime.flag import LISTS, SWITCHES, Flag

OVERRIDE = re.compile(r"[a-z_]+(\.[A-Za-z0-9_]+)*=")
PREFIXES = {"sglang_router_": "router", "sglang_": "sglang", "router_": "router"}
RENAMED = {"enable_deepep_moe": ("moe_a2a_backend", "deepep")}
"""Arguments that SGLang had when slime was described, and what they are now."""


@dataclass(slots=True)
class Given:
    """What a command line gives, by name; `neutral` are the flags that change nothing."""

    own: dict[str, Any] = field(default_factory=dict)
    megatron: dict[str, Any] = field(default_factory=dict)
    sglang: dict[str, Any] = field(default_factory=dict)
    router: dict[str, Any] = field(default_factory=dict)
    overrides: list[str] = field(default_factory=list)
    neutral: list[Flag] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Was there a flag at all?"""
        return bool(self.own or self.megatron or self.sglang or self.router)


def read_flags(words: Sequence[str], *, also: Iterable[str] = ()) -> Given:
    """Read a command line; `also` are options beside the table's, for "did you mean".

    Raises: ConfigError for a flag that is unknown (with the nearest ones), refused or malformed.
    """
    given = Given()
    for name, values in _split(words, given.overrides):
        if name in FLAGS:
            _take(FLAGS[name], values, given)
        elif name.startswith("no_") and FLAGS.get(name[3:], _NONE).kind == "either":
            _take(FLAGS[name[3:]], values, given, value=False)
        elif prefix := next((prefix for prefix in PREFIXES if name.startswith(prefix)), None):
            _pass(
                PREFIXES[prefix],
                name,
                name.removeprefix(prefix),
                values,
                getattr(given, PREFIXES[prefix]),
            )
        elif names.receivers("megatron", name):
            _pass("megatron", name, name, values, given.megatron)
        elif name.startswith("no_") and names.receivers("megatron", name[3:]):
            _pass("megatron", name, name[3:], [*values, "false"], given.megatron)
        else:
            raise _unknown(name, also)
    return given


_NONE = Flag("", "", None, "")


def _split(words: Sequence[str], overrides: list[str]) -> Iterator[tuple[str, list[str]]]:
    """(name with underscores, its words) of each flag in order; other words go to `overrides`."""
    name = ""
    values = []
    for word in words:
        if word.startswith("--") and len(word) > 2:
            if name:
                yield name, values
            text, equals, value = word[2:].partition("=")
            name = text.replace("-", "_")
            values = [value] if equals else []
        elif name and not (OVERRIDE.match(word) and _full(name, values)):
            values.append(word)
        elif OVERRIDE.match(word):
            overrides.append(word)
        else:
            raise ConfigError(
                "not an override",
                where=word,
                expected="dotted.key=value in lower case, or a flag and its value",
            )
    if name:
        yield name, values


def _full(name: str, values: list[str]) -> bool:
    """Has the flag all the words that it can have?"""
    flag = FLAGS.get(name)
    if flag is None or flag.kind in LISTS:
        return bool(values)
    return len(values) == (flag.kind not in SWITCHES)


def _take(flag: Flag, words: list[str], given: Given, *, value: Any = None) -> None:
    value = flag.read(words) if value is None else value
    unlike = flag.verdict == "only" and value not in flag.allowed
    if unlike or (flag.verdict == "refused" and value != flag.default):
        raise ConfigError(
            "rlpipe does not take this" + (" value" if unlike else ""),
            where=flag.spelled,
            found=None if value is True else value,
            expected=" or ".join(map(str, flag.allowed)) or None,
            do=flag.why,
        )
    if flag.verdict == "to" and absent(flag) and value != flag.default:
        raise ConfigError(
            "this version has no such setting", where=flag.spelled, found=f"no key {flag.key}"
        )
    if flag.verdict in ("neutral", "only"):
        given.neutral.append(flag)
    elif flag.kind in LISTS:
        value = [*given.own.get(flag.name, []), *value]
    given.own[flag.name] = value


def _pass(table: str, spelled: str, name: str, words: list[str], into: dict[str, Any]) -> None:
    """An argument that goes to Megatron-core, SGLang or its router. Raises: ConfigError."""
    if table == "sglang" and name in RENAMED:
        name, value = RENAMED[name]
        into[name] = value
        return
    known = names.entries(table)
    flag = f"--{spelled.replace('_', '-')}"
    if name not in known:
        raise _unknown(spelled)
    rule = rule_of(table, name)
    if rule is not None and rule.kind == "owned":
        raise ConfigError(
            "rlpipe sets this argument itself",
            where=flag,
            found=" ".join(words) or None,
            do=rule.text,
        )
    value = _typed(known[name]["type"], words, flag)
    if error := refusal(table, flag, name, value):
        raise error
    into[name] = value


def _typed(spelled: str, words: list[str], flag: str) -> Any:
    """The words as a value of a type of the tables of names."""
    parsed = [parse(word, flag)[0] for word in words]
    candidates: list[Any] = (
        [True] if not words else [*parsed, *words] if len(words) == 1 else [parsed]
    )
    candidates += [parsed] if len(words) == 1 else []
    for candidate in candidates:
        if names.accepts(spelled, candidate):
            return candidate
    raise ConfigError(
        "not a value of this flag", where=flag, found=" ".join(words) or "nothing", expected=spelled
    )


def _unknown(name: str, also: Iterable[str] = ()) -> ConfigError:
    known = [
        *FLAGS,
        *(one.lstrip("-").replace("-", "_") for one in also),
        *(f"sglang_{key}" for key in _names("sglang")),
        *(f"router_{key}" for key in _names("router")),
    ]
    known += _names("megatron")
    close = difflib.get_close_matches(name, list(dict.fromkeys(known)), n=3, cutoff=0.6)
    return ConfigError(
        "unknown flag",
        where=f"--{name.replace('_', '-')}",
        expected=" or ".join(f"--{one.replace('_', '-')}" for one in close) or None,
        do="python -m tools.flags lists all; keys of our own are given as dotted.key=value",
    )


def _names(table: str) -> list[str]:
    return [name for arguments in names.load(table)["receivers"].values() for name in arguments]
