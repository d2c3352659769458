"""With what a server computes (rlpipe.engines.sglang.admin)."""

from __future__ import annotations

import pytest

from rlpipe.engines.sglang.admin import Engine, server_facts


def test_attention_is_named_by_phase_where_it_differs():
    assert server_facts({"attention_backend": "fa3", "version": "0.5.21"}) == {
        "sglang": "0.5.21",
        "attention": "fa3",
    }
    split = {
        "attention_backend": "fa3",
        "decode_attention_backend": "flashinfer",
        "device": "cuda",
        "dtype": None,
    }
    assert server_facts(split) == {
        "sglang": None,
        "attention": "prefill: fa3, decode: flashinfer",
        "device": "cuda",
    }


@pytest.mark.integration
async def test_a_real_server_says_it(live):
    async with Engine(live.server.url) as engine:
        found = server_facts(await engine.server_info())
    assert (found["device"], found["dtype"], found["attention"]) == (
        "cpu",
        "float32",
        "torch_native",
    )
    assert found["sglang"].startswith("0.5.")
    assert found["max_total_num_tokens"] > 0
