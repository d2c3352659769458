"""Model types that SGLang serves only under a condition."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from rlpipe.config.model import EngineConfig, ResourcesConfig
from rlpipe.engines.sglang import served_models
from rlpipe.engines.sglang.served_models import CPU_PROBLEMS, check_served
from rlpipe.engines.sglang.server import Server
from rlpipe.errors import ConfigError, EngineError
from tests.live_engine import START_S
from tools.slime_counts.stand_ins import write_model


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
def test_sglang_fails_with_these_types_on_cpus(kind: str, tmp_path: Path):
    write_model(kind, tmp_path / "model")
    server = Server(
        tmp_path / "model",
        EngineConfig(sglang={"context_length": 512}),
        ResourcesConfig(),
        dtype="float32",
        port=None,
        log_path=tmp_path / "log",
        seed=0,
        device="cpu",
    )
    try:
        with pytest.raises((EngineError, httpx.HTTPError)):
            _start_and_sample(server)
    finally:
        server.stop()


def _start_and_sample(server: Server) -> None:
    """Some types fail at the start, others at the first request."""
    server.start()
    server.wait_ready(START_S)
    request = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 2}}
    httpx.post(f"{server.url}/generate", json=request, timeout=60.0).raise_for_status()
