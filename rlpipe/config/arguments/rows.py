"""Rows of the one table of arguments that are not simply passed on, and how they are written.

| kind    | meaning                                                            | taken with              |
|---------|--------------------------------------------------------------------|-------------------------|
| `owned` | another key of the configuration decides it                        | no value                |
| `fixed` | rlpipe needs one value                                             | that value              |
| `inert` | nothing that rlpipe runs reads it                                  | the value that means no |
| `free`  | taken as given, though it changes speed, memory or messages only   | any value               |

A name without a row is passed on as given, and changes what is computed. Names are fields of the
receiving class; other spellings (`tp`, `tensor_parallel_size`) are found through the field that
they set.

The rows are in `megatron` and `sglang`, the table is in `table`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Rule:
    """One row. `text` completes a sentence: for `owned` what to do instead, for all others the
    reason."""

    kind: Literal["owned", "fixed", "inert", "free"]
    text: str
    values: tuple[Any, ...] = ()
    """Values that are taken: what `fixed` is fixed to, and for `inert` what means no beside the
    class's default."""


def owned(do: str, names: str) -> dict[str, Rule]:
    """Rows of names that another key decides; `do`: what to do instead."""
    return dict.fromkeys(names.split(), Rule("owned", do))


def same(prefix: str, names: str) -> dict[str, Rule]:
    """Rows of names that are keys of ours under `prefix`, with the same meaning."""
    return {name: Rule("owned", f"use {prefix}.{name}") for name in names.split()}


def fixed(value: Any, reason: str, names: str) -> dict[str, Rule]:
    """Rows of names that have one value."""
    return dict.fromkeys(names.split(), Rule("fixed", reason, (value,)))


def inert(reason: str, names: str, values: Iterable[Any] = ()) -> dict[str, Rule]:
    """Rows of names without effect; `values` are taken, beside the class's default."""
    return dict.fromkeys(names.split(), Rule("inert", reason, tuple(values)))


def free(reason: str, names: str) -> dict[str, Rule]:
    """Rows of names that are taken, and do not change what is computed."""
    return dict.fromkeys(names.split(), Rule("free", reason))
