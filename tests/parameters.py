"""Parameters of tests that `make test` runs only in part."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def each(values: Iterable[Any], quick: Container[Any]) -> list[Any]:
    """Return a parameter for each value. All except the quick ones are `long`. A tuple is the
    values of several arguments."""
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else [value]),
            marks=() if value in quick else pytest.mark.long,
        )
        for value in values
    ]
