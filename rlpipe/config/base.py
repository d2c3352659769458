"""What every configuration model shares: frozen, strict, and able to say which of its keys decide results.

A stage's *identity* is the part of its configuration that can change what it computes. It is what goes into the input
digest; a timeout, a port or a log level does not. A field opts out with `Tuning(...)` in place of `Field(...)`.

Not here: reading YAML (`load`), or any default that depends on the machine.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


def Tuning(default: Any = ..., **keywords: Any) -> Any:  # noqa: N802 - stands beside pydantic's Field
    """A field that cannot change results: speed, limits, places, logging. Kept out of digests."""
    return Field(default, json_schema_extra={"tuning": True}, **keywords)


class Config(BaseModel):
    """Frozen; an unknown key is an error; docstrings under fields are their descriptions."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)

    def identity(self) -> dict[str, Any]:
        """The JSON-able part of this model that can change results (nested models likewise)."""
        return {
            name: _identity(getattr(self, name))
            for name, field in type(self).model_fields.items()
            if not (isinstance(field.json_schema_extra, dict) and field.json_schema_extra.get("tuning"))
        }


def _identity(value: Any) -> Any:
    if isinstance(value, Config):
        return value.identity()
    if isinstance(value, (list, tuple)):
        return [_identity(item) for item in value]
    if isinstance(value, dict):
        return {key: _identity(item) for key, item in value.items()}
    return value
