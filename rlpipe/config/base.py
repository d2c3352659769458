"""What every configuration model shares: frozen, strict, and able to say which of its keys decide
results.

A stage's *identity* is the part of its configuration that can change what it computes, and goes
into the input digest. A timeout, a port or a log level does not: such a field is declared with
`Tuning(...)` in place of `Field(...)`. A key at the default that it was introduced with is left out
(`rlpipe.config.introduced`), so a new key changes no digest of older runs.

Not here: reading YAML (`load`), or any default that depends on the machine.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationInfo,
    field_validator,
)

from rlpipe.config.introduced import introduced, is_tuning

SCALARS = frozenset({"bool", "int", "float"})
"""Types that take nothing but themselves; a whole number is a `float` too."""
LARGEST = 1e12
"""No setting has a meaning beyond this. Numbers near 1e38 become infinite in float32, long after
the run has begun."""
LONGEST_S = 1e8
"""Three years. Timers overflow at larger numbers, at a moment when nobody looks for a setting."""
MOST_PROCESSES = 1024
"""Processes or threads that one setting may start on one machine."""
MOST_ROWS = 1_000_000
"""Prompts, or samples of one prompt, of an iteration: their rows are in the memory of one
process."""
MOST_TOKENS = 2**31 - 1
"""Engines and trainer number the tokens of a sequence with 32 bits."""
MOST_GPUS = 100_000
"""More than any cluster has. Ray makes a bundle for each before it looks whether they are there."""


def Tuning(default: Any = ..., **keywords: Any) -> Any:  # noqa: N802 - stands beside pydantic's Field
    """A field that cannot change results: speed, limits, places, logging. Kept out of digests."""
    return Field(default, json_schema_extra={"tuning": True}, **keywords)


def _make_scalars_strict(schema: Any) -> None:
    """Set `strict` in every scalar of a pydantic core schema, in place."""
    if isinstance(schema, list | tuple):
        for part in schema:
            _make_scalars_strict(part)
    elif isinstance(schema, dict):
        if isinstance(kind := schema.get("type"), str) and kind in SCALARS:
            schema["strict"] = True
        for name, part in schema.items():
            if name not in ("metadata", "default", "serialization"):
                _make_scalars_strict(part)


class Config(BaseModel):
    """Frozen; an unknown key is an error; docstrings under fields are their descriptions.

    Every number is finite, and nothing is converted in silence: `true` is no 1, `"5"` is no 5 and
    `"off"` is no `false`.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:
        """As pydantic makes it, but with strict numbers and booleans.

        pydantic's own `strict=True` would refuse lists for tuples too, and YAML has nothing but
        lists.
        """
        schema = handler(source)
        _make_scalars_strict(schema)
        return schema

    @field_validator("*")
    @classmethod
    def _means_something(cls, value: Any, info: ValidationInfo) -> Any:
        """What no field takes: an empty text, a number that is larger than any that is meant."""
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, str) and not part:
                raise ValueError(
                    "an empty text has no meaning here; leave it out, or write null where that is allowed"
                )
            if not isinstance(part, int | float) or isinstance(part, bool):
                continue
            if isinstance(part, float) and abs(part) > LARGEST:
                raise ValueError(
                    f"{part:g} is too large for any use of it; expected at most {LARGEST:g}"
                )
            if (info.field_name or "").endswith("_s") and part > LONGEST_S:
                raise ValueError(
                    f"{part:g} seconds are more than three years; expected at most {LONGEST_S:g}"
                )
        return value

    def decisive(self) -> dict[str, Any]:
        """Return every key that can change results with its value, JSON-able, nested models
        likewise."""
        fields = type(self).model_fields.items()
        return {
            name: _decisive(getattr(self, name)) for name, field in fields if not is_tuning(field)
        }

    def identity(self) -> dict[str, Any]:
        """Return `decisive` without the keys that have the default they were introduced with.

        A section whose keys are all left out is left out itself.
        """
        entry = introduced(type(self))
        fields = type(self).model_fields.items()
        values = {
            name: _identity(getattr(self, name)) for name, field in fields if not is_tuning(field)
        }
        return {name: value for name, value in values.items() if not entry.leaves_out(name, value)}


def _decisive(value: Any) -> Any:
    return _plain(value, Config.decisive)


def _identity(value: Any) -> Any:
    return _plain(value, Config.identity)


def _plain(value: Any, of_model: Callable[[Config], dict[str, Any]]) -> Any:
    if isinstance(value, Config):
        return of_model(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item, of_model) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item, of_model) for key, item in value.items()}
    return value


def _name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", value):
        raise ValueError(
            f"not a name: found {value[:120]!a}, expected at most 100 letters, digits, '.', '_' and '-', of which the first is "
            "a letter or a digit"
        )
    return value


Name = Annotated[str, AfterValidator(_name)]
"""Name of a run, a branch or a cluster. It is a folder of the home and of the store, so it has no
"/" and is not ".."."""
