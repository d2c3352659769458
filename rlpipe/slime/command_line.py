"""Read a command line with slime's own flags, Megatron's bare flags and SGLang's as `--sglang-*`.

    flags = read_flags(["--lr", "1e-6", "--sglang-mem-fraction-static", "0.8",
                        "train.loss.eps_clip=0.3"])
    flags.own["lr"], flags.sglang["mem_fraction_static"], flags.overrides

A flag is `--name value` or `--name=value`, with dashes or underscores. The last value of a repeated
flag counts; repeated lists are concatenated. A word `dotted.key=value` that is not the value of a
flag is an override. `flag_keys` converts the flags to configuration keys.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlpipe.config.arguments import names
from rlpipe.config.arguments.check import refusal, rule_of
from rlpipe.config.arguments.table import MODEL_DIRECTORY
from rlpipe.config.text import parse
from rlpipe.errors import ConfigError
from rlpipe.slime.args import FLAGS, absent
from rlpipe.slime.flag import LISTS, SWITCHES, Flag, neutral
from rlpipe.slime.megatron_flags import SPEED_ONLY

OVERRIDE = re.compile(r"[a-z_]+(\.[A-Za-z0-9_]+)*=")
PREFIXES = {"sglang_router_": "router", "sglang_": "sglang", "router_": "router"}
RENAMED = {
    "enable_deepep_moe": ("moe_a2a_backend", "deepep"),
    "disable_piecewise_cuda_graph": ("cuda_graph_backend_prefill", "disabled"),
}
"""Former name of an SGLang argument → its present name and value."""
CHECKS = ("dry_run", "check", "check_only", "validate", "validate_only", "no_run", "noop")
"""Names under which other programs check without running."""


@dataclass(slots=True)
class ParsedFlags:
    """Values of a command line by name; `neutral` are the given flags that change nothing."""

    own: dict[str, Any] = field(default_factory=dict)
    megatron: dict[str, Any] = field(default_factory=dict)
    sglang: dict[str, Any] = field(default_factory=dict)
    router: dict[str, Any] = field(default_factory=dict)
    overrides: list[str] = field(default_factory=list)
    secrets: dict[str, str] = field(default_factory=dict, repr=False)
    """Environment variable → value; never part of a configuration."""
    neutral: list[Flag] = field(default_factory=list)

    def __bool__(self) -> bool:
        """True if the command line has any flag."""
        return bool(self.own or self.megatron or self.sglang or self.router)


def read_flags(words: Sequence[str], *, also: Iterable[str] = ()) -> ParsedFlags:
    """Read a command line. `also`: additional options to suggest for an unknown flag.

    Raises: ConfigError for a flag that is unknown (with the nearest ones), refused or malformed.
    """
    flags = ParsedFlags()
    for name, values in _split(words, flags.overrides):
        negated = name.removeprefix("no_") if name.startswith("no_") else None
        if name in FLAGS:
            _add_own(FLAGS[name], values, flags)
        elif negated in FLAGS and FLAGS[negated].kind == "either":
            _add_own(FLAGS[negated], values, flags, value=False)
        elif prefix := next((prefix for prefix in PREFIXES if name.startswith(prefix)), None):
            table = PREFIXES[prefix]
            argument = name.removeprefix(prefix)
            _add_argument(table, name, argument, values, flags)
        elif names.receivers("megatron", name):
            _add_argument("megatron", name, name, values, flags)
        elif name in names.megatron_options():
            _add_megatron_option(name, values, flags)
        elif negated and names.receivers("megatron", negated):
            _add_argument("megatron", name, negated, [*values, "false"], flags)
        else:
            raise _unknown(name, also)
    return flags


def _split(words: Sequence[str], overrides: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield (name with underscores, words) of each flag; append other words to `overrides`."""
    name = ""
    values = []
    for word in words:
        if word.startswith("--") and len(word) > 2:
            if name:
                yield name, values
            text, equals, value = word[2:].partition("=")
            name = text.replace("-", "_")
            values = [value] if equals else []
        elif name and not (OVERRIDE.match(word) and _is_complete(name, values)):
            values.append(word)
        elif OVERRIDE.match(word):
            overrides.append(word)
        else:
            raise ConfigError(
                "not an override",
                where=word,
                expected="dotted.key=value in lower case, or a flag and its value",
                do=f"write {word.rstrip(':')}=VALUE without spaces, or --flag VALUE",
            )
    if name:
        yield name, values


def _is_complete(name: str, values: list[str]) -> bool:
    """True if the flag has all words that it can have."""
    flag = FLAGS.get(name)
    if flag is None or flag.kind in LISTS:
        return bool(values)
    return len(values) == (flag.kind not in SWITCHES)


def _add_own(flag: Flag, words: list[str], flags: ParsedFlags, *, value: Any = None) -> None:
    """Add a flag of the table. Raises: ConfigError if it is refused."""
    value = flag.read(words) if value is None else value
    wrong_value = flag.effect == "only" and value not in flag.allowed
    if wrong_value or (flag.effect == "refused" and value != flag.default):
        raise ConfigError(
            f"rlpipe does not accept this {'value' if wrong_value else 'flag'}",
            where=flag.option,
            found=None if value is True else value,
            expected=" or ".join(map(str, flag.allowed)) or None,
            do=flag.reason,
        )
    if flag.effect == "secret":
        flags.secrets[flag.key] = value
        return
    if flag.effect == "to" and absent(flag) and value != flag.default:
        raise ConfigError(
            "this version has no such setting", where=flag.option, found=f"no key {flag.key}"
        )
    if flag.effect in ("neutral", "only"):
        flags.neutral.append(flag)
    elif flag.kind in LISTS:
        value = [*flags.own.get(flag.name, []), *value]
    flags.own[flag.name] = value


def _add_argument(
    table: str, name: str, argument: str, words: list[str], flags: ParsedFlags
) -> None:
    """Add an argument of Megatron-core, SGLang or its router to its dictionary in `flags`.

    `name`: the flag with underscores; `argument`: the name without prefix. Raises: ConfigError.
    """
    arguments = getattr(flags, table)
    if table == "sglang" and argument in RENAMED:
        argument, value = RENAMED[argument]
        arguments[argument] = value
        return
    entries = names.entries(table)
    option = f"--{name.replace('_', '-')}"
    present = argument if argument in entries else names.renamed(table, argument)
    if present is None:
        raise _unknown(name)
    argument = present
    rule = rule_of(table, argument)
    if rule is not None and table == "megatron" and rule.text == MODEL_DIRECTORY:
        flags.neutral.append(neutral(name, "any", None, "config.json decides"))
        return
    if rule is not None and rule.kind == "owned":
        raise ConfigError(
            "rlpipe sets this argument itself",
            where=option,
            found=" ".join(words) or None,
            do=rule.text,
        )
    value = _typed(entries[argument]["type"], words, option)
    if error := refusal(table, option, argument, value):
        if table == "megatron" and argument in SPEED_ONLY and rule is not None:
            flags.neutral.append(neutral(name, "any", None, rule.text))
            return
        raise error
    arguments[argument] = value


def _add_megatron_option(name: str, words: list[str], flags: ParsedFlags) -> None:
    """Add an option of Megatron-LM's parser under the name of the field that it sets.

    Raises: ConfigError for an option that only Megatron-LM's own training loop reads.
    """
    option = names.megatron_options()[name]
    if "field" not in option:
        raise ConfigError(
            "only Megatron-LM's own training program reads this flag",
            where=f"--{name.replace('_', '-')}",
            found=" ".join(words) or None,
            do="remove it; rlpipe flags lists the flags that rlpipe has",
        )
    if "value" in option:
        words = [*words, str(option["value"]).lower()]
    _add_argument("megatron", name, option["field"], words, flags)


def _typed(type_text: str, words: list[str], option: str) -> Any:
    """Return the words as a value of a type of the tables of names."""
    parsed = [parse(word, option)[0] for word in words]
    # One word can be a scalar, a text that looks like one, or a list of one.
    candidates: list[Any] = [*parsed, *words, parsed] if len(words) == 1 else [parsed]
    for candidate in candidates if words else [True]:
        if names.accepts(type_text, candidate):
            return candidate
    raise ConfigError(
        "not a value of this flag",
        where=option,
        found=" ".join(words) or "nothing",
        expected=type_text,
    )


def _unknown(name: str, also: Iterable[str] = ()) -> ConfigError:
    """Return the error of an unknown flag with the nearest ones.

    Flags of slime and Megatron come before those of SGLang, which have its prefix.
    """
    if name in CHECKS:
        return ConfigError(
            "unknown flag",
            where=f"--{name.replace('_', '-')}",
            do="to check without running: `rlpipe doctor RECIPE` makes all checks of a start, and "
            "`rlpipe config RECIPE` prints every key with its value",
        )
    bare = [
        *FLAGS,
        *(option.lstrip("-").replace("-", "_") for option in also),
        *names.megatron_options(),
        *_argument_names("megatron"),
    ]
    prefixed = [
        *(f"sglang_{key}" for key in _argument_names("sglang")),
        *(f"router_{key}" for key in _argument_names("router")),
    ]
    has_prefix = name.startswith(tuple(PREFIXES))
    close = [
        match
        for known in ((prefixed, bare) if has_prefix else (bare, prefixed))
        for match in difflib.get_close_matches(name, list(dict.fromkeys(known)), n=3, cutoff=0.6)
    ][:3]
    return ConfigError(
        "unknown flag",
        where=f"--{name.replace('_', '-')}",
        expected=" or ".join(f"--{match.replace('_', '-')}" for match in close) or None,
        do="rlpipe flags lists all flags; keys of rlpipe are given as dotted.key=value",
    )


def _argument_names(table: str) -> list[str]:
    return [name for arguments in names.load(table)["receivers"].values() for name in arguments]
