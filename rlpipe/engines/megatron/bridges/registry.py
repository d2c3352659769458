"""`bridge_class`: the class of bridges of a model type, by the source of its family.

`supported_families.Family.source` names the source: mbridge's class as it is, or a class of ours,
which may extend one of mbridge's. Everything else here uses a bridge by mbridge's interface
(`mbridge.core.LLMBridge`), so a further source needs a row in `_SOURCES` and classes with this
interface. NVIDIA's Megatron-Bridge is not a source: megatron-bridge 0.3.1, the newest for Python
3.11, requires transformers below 5, and its import needs Transformer Engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import rlpipe.engines.megatron.platform  # noqa: F401

# isort: split
from mbridge.core import LLMBridge
from mbridge.core.bridge import _MODEL_REGISTRY

from rlpipe.engines.megatron.bridges.supported_families import FAMILIES

_OWN: dict[str, type[LLMBridge]] = {}
_SOURCES: Mapping[str, Mapping[str, type[LLMBridge]]] = {
    "mbridge": _MODEL_REGISTRY,
    "rlpipe": _OWN,
}


def own_family(model_type: str) -> Callable[[type[LLMBridge]], type[LLMBridge]]:
    """Register the decorated class as ours for this model type of transformers."""

    def register(kind: type[LLMBridge]) -> type[LLMBridge]:
        _OWN[model_type] = kind
        return kind

    return register


def bridge_class(model_type: str) -> type[LLMBridge]:
    """Return the class of bridges of a supported model type.

    The modules with our families must be imported (`bridge`).
    """
    return _SOURCES[FAMILIES[model_type].source][model_type]
