"""Versions and kernels of a trainer rank (rlpipe.engines.megatron.reproducibility.facts)."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from rlpipe.engines.megatron.platform import CUDA_FOUND
from rlpipe.engines.megatron.reproducibility import facts


def test_facts_name_versions_and_locations():
    found = facts("bfloat16")
    assert (found["torch"], found["megatron"][:2]) == (torch.__version__, "0.")
    assert (Path(found["megatron_from"]) / "megatron" / "core" / "__init__.py").is_file()
    assert found["mbridge"]
    if not CUDA_FOUND:
        assert (found["device"], found["attention"], found["fused"]) == (
            "cpu",
            "torch scaled_dot_product_attention",
            "torch",
        )
    assert json.loads(json.dumps(found)) == found
