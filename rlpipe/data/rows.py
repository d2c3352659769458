"""What a row of a prompt file must hold, and the errors that name what it holds instead.

Not here: reading files (`files`).
"""

from __future__ import annotations

import json
import math
from typing import Any

from rlpipe.errors import DataError
from rlpipe.types import Prompt


def value_of(content: dict[str, Any], key: str, setting: str, where: str) -> Any:
    """What a row has under a key. Raises: DataError if that is nothing."""
    if content.get(key) is None:
        raise DataError(
            f"the row has no {key!r}",
            where=where,
            found=f"keys {', '.join(sorted(content)) or 'none'}",
            expected=f"a value under {key!r} (prompts.{setting})",
        )
    return content[key]


def prompt_of(value: Any, where: str) -> Prompt:
    """A string, or a list of messages. Raises: DataError for anything else."""
    if isinstance(value, str) and value:
        return _storable(value, "prompt", where)
    if (
        isinstance(value, list)
        and value
        and all(isinstance(item, dict) and isinstance(item.get("role"), str) for item in value)
    ):
        return _storable(value, "prompt", where)
    raise DataError(
        "not a prompt",
        where=where,
        found=f"{type(value).__name__} {short(value)}",
        expected='a string that is not empty, or a list of messages {"role": ..., "content": ...}',
    )


def label_of(value: Any, where: str) -> str:
    """A string; a number becomes one. Raises: DataError for anything else."""
    if isinstance(value, str):
        return _storable(value, "label", where)
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return str(value)
    raise DataError(
        "not a label",
        where=where,
        found=f"{type(value).__name__} {short(value)}",
        expected="a string or a number",
    )


def metadata_of(content: dict[str, Any], key: str | None, where: str) -> dict[str, Any]:
    """The object under a key, or in the JSON text there; empty if there is none. Raises: DataError
    if it is not one."""
    value = None if key is None else content.get(key)
    if value is None:
        return {}
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise DataError("the metadata is not JSON", where=where, found=short(value)) from error
    if not isinstance(value, dict):
        raise DataError(
            "the metadata is not an object", where=where, found=short(value), expected="{...}"
        )
    return _storable(value, "metadata", where)


def tools_of(content: dict[str, Any], key: str | None, where: str) -> list[Any] | None:
    """The list of tools under a key, or in the JSON text there; None if there is none. Raises:
    DataError if it is not one."""
    value = None if key is None else content.get(key)
    if isinstance(value, str) and value:
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise DataError("the tools are not JSON", where=where, found=short(value)) from error
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise DataError(
            "not a list of tools",
            where=where,
            found=short(value),
            expected='[{"type": "function", ...}]',
        )
    return _storable(value, "tools", where)


def _storable(value: Any, what: str, where: str) -> Any:
    """The value, if a plan can hold it: plain and finite, with whole characters. Raises:
    DataError."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(
            f"the {what} cannot be written as JSON", where=where, found=str(error)
        ) from error
    return value


def short(value: object) -> str:
    """What a value looks like, in at most 80 characters."""
    text = value.decode(errors="replace") if isinstance(value, bytes) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
