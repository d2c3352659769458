"""Sources of bridges (rlpipe.engines.megatron.bridges.registry)."""

from __future__ import annotations

import pytest

from rlpipe.engines.megatron.bridges import bridge
from rlpipe.engines.megatron.bridges.registry import bridge_class
from rlpipe.engines.megatron.bridges.supported_families import FAMILIES

# isort: split
from mbridge.core import LLMBridge
from mbridge.core.bridge import _MODEL_REGISTRY


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_has_a_bridge_of_its_source(model_type: str):
    kind = bridge_class(model_type)
    assert issubclass(kind, LLMBridge)
    package = {"mbridge": "mbridge", "rlpipe": "rlpipe"}[FAMILIES[model_type].source]
    assert kind.__module__.split(".")[0] == package


def test_both_sources_are_used():
    assert {family.source for family in FAMILIES.values()} == {"mbridge", "rlpipe"}


def test_our_families_leave_the_registry_of_mbridge_as_it_is():
    assert bridge.open_bridge
    changed = {name for name, kind in _MODEL_REGISTRY.items() if "rlpipe" in kind.__module__}
    assert changed == set()
