"""Base class of all configuration models, and the limits and types that several models use.

    class SomeConfig(Config):
        steps: int = 1              part of the identity
        timeout_s: float = Tuning(60.0)   not part of the identity

A stage's *identity* is the part of its configuration that can change its results. The identity is
part of the stage's input digest. A timeout, a port or a log level cannot change results: declare
such a field with `Tuning(...)` instead of `Field(...)`. The identity leaves out a key that has the
default of its introduction (`rlpipe.config.introduced`). So a new key changes no digest of an older
run.
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
from rlpipe.errors import ConfigError

STRICT_TYPES = frozenset({"bool", "int", "float"})
"""Scalar types that accept no conversion. A whole number is still a valid `float`."""
LARGEST = 1e12
"""Largest float of any setting. Numbers near 1e38 become infinite in float32, but only late in a
run."""
LONGEST_S = 1e8
"""Longest duration, about three years. Timers overflow at larger numbers."""
MOST_PROCESSES = 1024
"""Processes or threads that one setting may start on one machine."""
MOST_ROWS = 1_000_000
"""Prompts of an iteration, or samples of one prompt. One process holds their rows in memory."""
MOST_TOKENS = 2**31 - 1
"""Engines and trainer number the tokens of a sequence with 32 bits."""
MOST_GPUS = 100_000
"""Upper bound of GPU counts. Ray creates a bundle for each GPU before it checks that they exist."""


def Tuning(default: Any = ..., **keywords: Any) -> Any:  # noqa: N802 - used like pydantic's Field
    """Declare a field that cannot change results, such as a deadline or a directory."""
    return Field(default, json_schema_extra={"tuning": True}, **keywords)


def _make_scalars_strict(schema: Any) -> None:
    """Set `strict` in every scalar of a pydantic core schema, in place."""
    if isinstance(schema, list | tuple):
        for part in schema:
            _make_scalars_strict(part)
    elif isinstance(schema, dict):
        if isinstance(kind := schema.get("type"), str) and kind in STRICT_TYPES:
            schema["strict"] = True
        for name, part in schema.items():
            # These parts are data, which may contain a key `type` by chance.
            if name not in ("metadata", "default", "serialization"):
                _make_scalars_strict(part)


class Config(BaseModel):
    """Frozen model that refuses unknown keys; docstrings under fields are their descriptions.

    Every number is finite. No value is converted: `true` is not 1, `"5"` is not 5 and `"off"` is
    not `false`.
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
        """Return pydantic's schema with strict numbers and booleans."""
        schema = handler(source)
        # pydantic's own `strict=True` also refuses a list for a tuple, and YAML has only lists.
        _make_scalars_strict(schema)
        return schema

    @field_validator("*")
    @classmethod
    def _within_common_limits(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse an empty string and a number beyond the limits of all settings."""
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, str) and not part:
                raise ConfigError(
                    "an empty string has no meaning here",
                    do="remove the key, or write null if null is allowed",
                )
            if not isinstance(part, int | float) or isinstance(part, bool):
                continue
            if isinstance(part, float) and abs(part) > LARGEST:
                raise ConfigError(
                    "not a valid value", found=f"{part:g}", expected=f"at most {LARGEST:g}"
                )
            if (info.field_name or "").endswith("_s") and part > LONGEST_S:
                raise ConfigError(
                    "not a valid number of seconds",
                    found=f"{part:g}",
                    expected=f"at most {LONGEST_S:g} (three years)",
                )
        return value

    def non_tuning_values(self) -> dict[str, Any]:
        """Return all keys that can change results, with JSON-able values of nested models too."""
        fields = type(self).model_fields.items()
        return {
            name: _plain(getattr(self, name), Config.non_tuning_values)
            for name, field in fields
            if not is_tuning(field)
        }

    def identity(self) -> dict[str, Any]:
        """Return `non_tuning_values` without the keys that have the default of their introduction.

        A section is left out if all its keys are.
        """
        entry = introduced(type(self))
        fields = type(self).model_fields.items()
        values = {
            name: _plain(getattr(self, name), Config.identity)
            for name, field in fields
            if not is_tuning(field)
        }
        return {name: value for name, value in values.items() if not entry.leaves_out(name, value)}


def _plain(value: Any, of_model: Callable[[Config], dict[str, Any]]) -> Any:
    """Return a value as JSON-able data, with `of_model` applied to every nested model."""
    if isinstance(value, Config):
        return of_model(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item, of_model) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item, of_model) for key, item in value.items()}
    return value


def _name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", value):
        raise ConfigError(
            "not a valid name",
            found=f"{value[:120]!a}",
            expected="at most 100 letters, digits, '.', '_' and '-', "
            "starting with a letter or a digit",
        )
    return value


Name = Annotated[str, AfterValidator(_name)]
"""Name of a run, a branch or a cluster. A name is also a folder of the home and of the store, so it
has no "/" and is not ".."."""
