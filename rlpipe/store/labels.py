"""Labels that are JSON objects or lists, in columns and plans of text.

verl's data sets have such labels (`reward_model: {"ground_truth": ...}`), and functions get them as
they are in the file. Stored, the label is `json:` and its JSON. A text label is stored unchanged.
"""

from __future__ import annotations

import json
from typing import Any

MARK = "json:"


def label_text(label: Any) -> str | None:
    """Return the stored text of a label. Raises: ValueError if it cannot be stored."""
    if isinstance(label, dict | list):
        return MARK + json.dumps(label, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    if label is None:
        return None
    text = str(label)
    if label_value(text) != text:
        raise ValueError(f"a text label that begins with {MARK!r} and continues as JSON")
    return text


def label_value(text: str | None) -> Any:
    """Return the label of a stored text."""
    if text is None or not text.startswith((MARK + "{", MARK + "[")):
        return text
    try:
        return json.loads(text.removeprefix(MARK))
    except ValueError:
        return text
