"""`Flag`: one row of the table from slime's command line to configuration keys.

| effect    | meaning                                                         |
|-----------|-----------------------------------------------------------------|
| `to`      | sets a key to its value                                         |
| `built`   | sets a key together with other flags (`flag_keys`)              |
| `neutral` | accepted, changes nothing, because rlpipe behaves so in any case |
| `only`    | accepted with certain values, which change nothing              |
| `secret`  | put into an environment variable, and never stored               |
| `refused` | an error that names the alternative                             |

`flag_table` and `megatron_flags` contain the rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlpipe.config.text import parse
from rlpipe.errors import ConfigError

SWITCHES = ("on", "off", "either")
LISTS = ("strs", "ints", "floats")


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag. `kind` is the type of its words, `default` the default of slime's parser.

    Kinds: `int`, `float`, `str`, `json`, `any` (YAML). `on` and `off` have no value and mean true
    and false; `either` has a `--no-` form. `strs`, `ints` and `floats` have one or more words.
    """

    name: str
    kind: str
    default: Any
    effect: str
    key: str = ""
    reason: str = ""
    allowed: tuple[Any, ...] = ()

    @property
    def option(self) -> str:
        """Spelling on a command line."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def attribute(self) -> str:
        """Name in slime's `args`: `x` for `--disable-x`."""
        return self.name.removeprefix("disable_") if self.kind == "off" else self.name

    def read(self, words: Sequence[str]) -> Any:
        """Return the value of the words after the flag. Raises: ConfigError."""
        if self.kind in SWITCHES:
            if words:
                raise self._error(" ".join(words), "no value")
            return self.kind != "off"
        if self.kind in LISTS:
            if not words:
                raise self._error("nothing", "one value or more")
            return [self._convert(word) for word in words]
        if len(words) != 1:
            raise self._error(" ".join(words) or "nothing", "one value")
        return self._convert(words[0])

    def _convert(self, word: str) -> Any:
        try:
            return _CONVERTERS[self.kind](word)
        except (ValueError, ConfigError) as error:
            raise self._error(word, _EXPECTED[self.kind]) from error

    def _error(self, found: str, expected: str) -> ConfigError:
        return ConfigError(
            "not a value of this flag", where=self.option, found=found, expected=expected
        )


def _json(word: str) -> Any:
    value = json.loads(word)
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


def _yaml(word: str) -> Any:
    return parse(word, "value")[0]


_CONVERTERS: dict[str, Callable[[str], Any]] = {
    "int": int,
    "ints": int,
    "float": float,
    "floats": float,
    "str": str,
    "strs": str,
    "json": _json,
    "any": _yaml,
}
_EXPECTED = {
    "int": "a whole number",
    "ints": "whole numbers",
    "float": "a number",
    "floats": "numbers",
    "json": "a JSON object",
    "any": "a YAML value",
}


def to(name: str, kind: str, default: Any, key: str) -> Flag:
    """Return a flag that sets `key` to its value."""
    return Flag(name, kind, default, "to", key=key)


def built(name: str, kind: str, default: Any, key: str) -> Flag:
    """Return a flag that sets `key` together with other flags, or to a derived value."""
    return Flag(name, kind, default, "built", key=key)


def neutral(name: str, kind: str, default: Any, reason: str) -> Flag:
    """Return a flag that is accepted and changes nothing."""
    return Flag(name, kind, default, "neutral", reason=reason)


def only(name: str, kind: str, default: Any, allowed: tuple[Any, ...], reason: str) -> Flag:
    """Return a flag that is accepted with certain values, which change nothing."""
    return Flag(name, kind, default, "only", reason=reason, allowed=allowed)


def secret(name: str, variable: str) -> Flag:
    """Return a flag whose text goes into an environment variable and is never stored."""
    return Flag(name, "str", None, "secret", key=variable)


def refused(name: str, kind: str, default: Any, reason: str) -> Flag:
    """Return a flag that is an error."""
    return Flag(name, kind, default, "refused", reason=reason)
