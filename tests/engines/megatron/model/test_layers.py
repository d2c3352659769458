"""A layer specification that is not Megatron's (rlpipe.engines.megatron.model.layers)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlpipe.engines.megatron.bridges import bridge
from rlpipe.engines.megatron.model import layers
from rlpipe.errors import ConfigError

# isort: split
from mbridge.core.parallel_states import ParallelStates
from megatron.core.models.gpt import gpt_layer_specs


class Mine(torch.nn.Module):
    """A part of a changed specification."""


def attention(block: Any) -> None:
    block.layer_specs[0].submodules.self_attention.submodules.core_attention = Mine


def feed_forward(block: Any) -> None:
    block.layer_specs[1].submodules.mlp.submodules.linear_fc1 = Mine


def last_norm(block: Any) -> None:
    block.layer_norm = Mine


@pytest.mark.parametrize(
    ("change", "part"),
    [(attention, "core_attention"), (feed_forward, "mlp.linear_fc1"), (last_norm, "layer_norm")],
)
def test_a_changed_layer_specification_is_refused(models, monkeypatch, change, part):
    own = gpt_layer_specs.get_gpt_decoder_block_spec

    def changed(*args: Any, **keywords: Any) -> Any:
        block = own(*args, **keywords)
        change(block)
        return block

    sizes: Any = ParallelStates(vpp_size=None)  # type: ignore[arg-type]
    opened = bridge.open_bridge(models["qwen3"], torch.float32, sizes=sizes)
    assert layers.block_spec(opened.config, stage=0).layer_specs
    monkeypatch.setattr(gpt_layer_specs, "get_gpt_decoder_block_spec", changed)
    with pytest.raises(ConfigError, match=rf"(?s){part}.*test_layers\.Mine"):
        layers.block_spec(opened.config, stage=0)
