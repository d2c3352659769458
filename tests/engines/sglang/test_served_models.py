"""Model types that SGLang serves only under a condition."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlpipe.engines.sglang import served_models
from rlpipe.engines.sglang.served_models import CPU_PROBLEMS, check_served
from rlpipe.engines.sglang.server import Server
from rlpipe.errors import ConfigError, EngineError
from tests.live_engine import START_S, make_server
from tools.slime_counts.stand_ins import write_model

TOKENS = [5, 6, 7, 8, 9, 10, 20, 21, 22, 9, 8]


@pytest.mark.parametrize("kind", CPU_PROBLEMS)
def test_a_type_without_kernels_for_cpus_needs_a_gpu(kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(served_models, "local_device", lambda: "cuda")
    check_served(kind, "model", trusts_code=False)
    monkeypatch.setattr(served_models, "local_device", lambda: "cpu")
    with pytest.raises(ConfigError, match=re.escape(CPU_PROBLEMS[kind])):
        check_served(kind, "model", trusts_code=True)


def test_a_type_that_its_own_code_reads_needs_trust_in_that_code():
    check_served("mimo", "model", trusts_code=True)
    with pytest.raises(ConfigError, match="trust_remote_code=true"):
        check_served("mimo", "model", trusts_code=False)


def test_other_types_are_served_everywhere(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(served_models, "local_device", lambda: pytest.fail("not needed"))
    check_served("qwen3", "model", trusts_code=False)


@pytest.mark.integration
@pytest.mark.long
@pytest.mark.parametrize("kind", CPU_PROBLEMS)
def test_sglang_fails_or_is_wrong_with_these_types_on_cpus(kind: str, tmp_path: Path):
    write_model(kind, tmp_path / "model")
    server = make_server(tmp_path / "model", tmp_path / "log", context_length=512)
    try:
        with suppress(EngineError, httpx.HTTPError):  # at the start, or at the first request
            server.start()
            server.wait_ready(START_S)
            assert np.abs(_scores(server) - _expected(tmp_path / "model")).max() > 0.1
    finally:
        server.stop()


def _scores(server: Server) -> np.ndarray:
    """Return the log-probs of TOKENS but the first. Raises: httpx.HTTPError."""
    request = {
        "input_ids": TOKENS,
        "sampling_params": {"max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    answer = httpx.post(f"{server.url}/generate", json=request, timeout=120.0)
    entries = answer.raise_for_status().json()["meta_info"]["input_token_logprobs"]
    return np.array([entry[0] for entry in entries[1:]])


def _expected(directory: Path) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        scores = model(torch.tensor([TOKENS])).logits[0].log_softmax(-1)
    return scores[:-1].gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0].numpy()
