"""`Flag`: one row of the table from slime's command line to a configuration key.

Every flag has one of five verdicts. `to` and `built` set a key (the second together with other
flags, see `slime`); `neutral` is taken and changes nothing, because rlpipe does so anyway; `only`
is taken with the values it names; `refused` is an error that says what to do instead.

Not here: the rows (`slime_table`, `slime_megatron`), reading a command line (`flags`).
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
    """One flag. `kind` says how its words are read, `default` is what slime's parser gives where
    nothing is said.

    Kinds: `int`, `float`, `str`, `json`; `on` and `off` stand without a value for true and false,
    `either` has a `--no-` form; `strs`, `ints` and `floats` take one or more words.
    """

    name: str
    kind: str
    default: Any
    verdict: str
    key: str = ""
    why: str = ""
    allowed: tuple[Any, ...] = ()

    @property
    def spelled(self) -> str:
        """As it is written on a command line."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def attribute(self) -> str:
        """Its name in slime's `args`: `--disable-x` is `x`."""
        return self.name.removeprefix("disable_") if self.kind == "off" else self.name

    def read(self, words: Sequence[str]) -> Any:
        """The value of the words that follow it. Raises: ConfigError naming the flag."""
        if self.kind in SWITCHES:
            if words:
                raise self._wrong(" ".join(words), "no value")
            return self.kind != "off"
        if self.kind in LISTS:
            if not words:
                raise self._wrong("nothing", "one value or more")
            return [_word(self, word) for word in words]
        if len(words) != 1:
            raise self._wrong(" ".join(words) or "nothing", "one value")
        return _word(self, words[0])

    def _wrong(self, found: str, expected: str) -> ConfigError:
        return ConfigError(
            "not a value of this flag", where=self.spelled, found=found, expected=expected
        )


def _word(flag: Flag, word: str) -> Any:
    reader = _READERS[flag.kind]
    try:
        return reader(word)
    except (ValueError, ConfigError) as error:
        raise ConfigError(
            "not a value of this flag",
            where=flag.spelled,
            found=word,
            expected=_EXPECTED[flag.kind],
        ) from error


def _json(word: str) -> Any:
    value = json.loads(word)
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


def _any(word: str) -> Any:
    return parse(word, "value")[0]


_READERS: dict[str, Callable[[str], Any]] = {
    "int": int,
    "ints": int,
    "float": float,
    "floats": float,
    "str": str,
    "strs": str,
    "json": _json,
    "any": _any,
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
    """Sets `key` to its value."""
    return Flag(name, kind, default, "to", key=key)


def built(name: str, kind: str, default: Any, key: str) -> Flag:
    """Has a part in `key`, or sets it to something that follows from its value."""
    return Flag(name, kind, default, "built", key=key)


def neutral(name: str, kind: str, default: Any, why: str) -> Flag:
    """Is taken and changes nothing."""
    return Flag(name, kind, default, "neutral", why=why)


def only(name: str, kind: str, default: Any, allowed: tuple[Any, ...], why: str) -> Flag:
    """Is taken with these values, which change nothing."""
    return Flag(name, kind, default, "only", why=why, allowed=allowed)


def refused(name: str, kind: str, default: Any, why: str) -> Flag:
    """Is an error."""
    return Flag(name, kind, default, "refused", why=why)
