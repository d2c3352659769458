"""`Family`: the keys and values of config.json that a bridge supports, and rules of families.

This module imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Problem = tuple[str, Any, str]
"""(key, value found, expected value)."""
Rule = Callable[[Mapping[str, Any]], Iterator[Problem]]
"""Takes config.json with the defaults of its family."""


def words(text: str) -> frozenset[str]:
    """Return the words of a text as a set."""
    return frozenset(text.split())


@dataclass(frozen=True)
class Family:
    """The keys and values of config.json that the bridge of one model type supports."""

    source: Literal["mbridge", "rlpipe"] = "rlpipe"
    """Source of the bridge (`registry`)."""
    reads: frozenset[str] = frozenset()
    """Keys that this bridge reads, in addition to those of every bridge."""
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Key → the values that are computed as in transformers. A missing key has transformers'
    default."""
    ropes: tuple[str, ...] = ("default",)
    """Supported types of rotation."""
    rope_keys: frozenset[str] = frozenset()
    """Further keys of a rotation, without effect on text."""
    layer_types: tuple[str, ...] = ("full_attention",)
    """Supported values of `layer_types`."""
    quantizations: tuple[str, ...] = ("fp8",)
    """Values of `quant_method` that `weight_files` reads."""
    rules: tuple[Rule, ...] = ()
    """Checks of several keys together."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """transformers' defaults of the keys that a rule reads."""
    tower: frozenset[str] = frozenset()
    """Keys of `vision_config`; empty for a model of text."""


def check_layer_types(config: Mapping[str, Any], family: Family) -> Iterator[Problem]:
    """Rule of all families: every layer has a supported kind, or a window without effect."""
    kinds = set(config.get("layer_types") or ())
    supported = set(family.layer_types)
    if window_hides_nothing(config):
        supported.add("sliding_attention")
    if kinds - supported:
        names = " or ".join(repr(kind) for kind in family.layer_types)
        yield "layer_types", sorted(kinds), f"layer_types: {names} alone"


def check_window_by_layer(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Rule of Qwen2, Qwen3, Qwen2-MoE: layers from `max_window_layers` on have the window.

    `layer_types` takes precedence.
    """
    if (
        config.get("layer_types") is None
        and config["max_window_layers"] < config["num_hidden_layers"]
    ):
        yield from check_window_of_all_layers(config)


def check_window_of_all_layers(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Rule of Qwen3-MoE: `use_sliding_window` gives every layer the window.

    `max_window_layers` has no effect.
    """
    if config.get("use_sliding_window"):
        yield from check_window(config, "use_sliding_window", "false")


def check_window(config: Mapping[str, Any], name: str, off: str) -> Iterator[Problem]:
    window = config.get("sliding_window")
    longest = config["max_position_embeddings"]
    if window is not None and not window_hides_nothing(config):
        found = (
            config[name]
            if name == "sliding_window"
            else f"{config[name]!r}, with sliding_window {window!r}"
        )
        yield (
            name,
            found,
            f"{name}: {off}, or a window of max_position_embeddings ({longest}) at least",
        )


def window_hides_nothing(config: Mapping[str, Any]) -> bool:
    """True if the window is as long as the longest context."""
    window = config.get("sliding_window")
    longest = config.get("max_position_embeddings")
    return isinstance(window, int) and isinstance(longest, int) and window >= longest


WINDOWS = words("max_window_layers sliding_window use_sliding_window")
WINDOW_DEFAULTS = {
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_hidden_layers": 32,
}
MROPE = words("mrope_interleaved mrope_section")
