"""Facts of a server for the record (rlpipe.engines.sglang.admin)."""

from __future__ import annotations

import pytest

from rlpipe.engines.sglang.admin import Engine, server_facts


def test_facts_name_the_attention_backend_by_phase_if_phases_differ():
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
async def test_a_real_server_reports_facts(live):
    async with Engine(live.server.url) as engine:
        facts = server_facts(await engine.server_info())
    assert (facts["device"], facts["dtype"], facts["attention"]) == (
        "cpu",
        "float32",
        "torch_native",
    )
    assert facts["sglang"].startswith("0.5.")
    assert facts["max_total_num_tokens"] > 0
