"""External servers and routers are checked before use (rlpipe.engines.sglang.external)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlpipe.config.model import EngineConfig
from rlpipe.engines.sglang import external
from rlpipe.engines.sglang.external import (
    ExternalRouter,
    ExternalServer,
    ServerRequirements,
    mismatches,
)
from rlpipe.engines.sglang.router import Router
from rlpipe.errors import ConfigError, EngineUnavailable, ResourceError

CLOSED_PORT = "http://127.0.0.1:9"
MODEL = {"architectures": ["Qwen3ForCausalLM"], "model_path": "/nowhere"}
SERVER = {
    "version": "0.5.21",
    "dtype": "bfloat16",
    "tp_size": 2,
    "dp_size": 1,
    "device": "cuda",
    "quantization": None,
}


@pytest.fixture
def required(tmp_path: Path) -> ServerRequirements:
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "dtype": "bfloat16",
        "hidden_size": 64,
        "vocab_size": 128,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return ServerRequirements(str(tmp_path), dtype="bfloat16", tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        ({}, {}),
        ({"dtype": "auto"}, {}),
        ({"dtype": "half"}, {"dtype": ("float16", "bfloat16")}),
        ({"tp_size": 4, "dp_size": 2}, {"tp_size": (4, 2), "dp_size": (2, 1)}),
        ({"quantization": "fp8"}, {"quantization": ("fp8", None)}),
        ({"version": "0.5.9"}, {"version": ("0.5.9", "0.5.15 or later")}),
        ({"version": "0.5.15.post1"}, {}),
        ({"disaggregation_mode": "decode"}, {"disaggregation_mode": ("decode", "null")}),
    ],
)
def test_settings_of_a_server_are_compared_with_those_of_the_run(
    required: ServerRequirements, settings: dict, wrong: dict
):
    assert mismatches(MODEL, {**SERVER, **settings}, required) == wrong


@pytest.mark.parametrize(
    ("needs", "server", "wrong"),
    [
        ({"reads_text": True}, {"skip_tokenizer_init": True}, "skip_tokenizer_init"),
        ({"names_experts": True}, {}, "enable_return_routed_experts"),
        ({"deterministic": True}, {}, "enable_deterministic_inference"),
    ],
)
def test_optional_settings_are_required_only_by_runs_that_need_them(
    required: ServerRequirements, needs: dict, server: dict, wrong: str
):
    assert mismatches(MODEL, {**SERVER, **server}, required) == {}
    assert list(mismatches(MODEL, {**SERVER, **server}, replace(required, **needs))) == [wrong]


def test_model_sizes_are_compared_if_the_directory_is_on_this_machine(
    required: ServerRequirements, tmp_path: Path
):
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"hidden_size": 32, "vocab_size": 128}))
    assert mismatches({**MODEL, "model_path": str(other)}, SERVER, required) == {
        "hidden_size": (32, 64)
    }
    assert list(mismatches({**MODEL, "architectures": ["LlamaForCausalLM"]}, SERVER, required)) == [
        "architectures"
    ]


def test_a_server_that_does_not_answer_is_not_alive(required: ServerRequirements):
    server = ExternalServer(CLOSED_PORT, required)
    with pytest.raises(
        EngineUnavailable,
        match=r"(?s)external_engines: http://127\.0\.0\.1:9.*it joins once it answers",
    ):
        server.start()
    assert not server.alive


def test_a_server_is_not_alive_until_its_settings_are_checked(
    required: ServerRequirements, monkeypatch: pytest.MonkeyPatch
):
    answers = {"model_info": MODEL, "server_info": SERVER}
    monkeypatch.setattr(external, "_get", lambda url: answers.get(url.rpartition("/")[2]))
    server = ExternalServer(CLOSED_PORT, required)
    assert not server.alive
    server.start()
    assert server.alive
    del answers["model_info"]
    assert not server.alive
    answers["model_info"] = MODEL
    assert not server.alive, "another server may run there now"


@pytest.mark.integration
def test_a_real_server_is_checked_and_checked_again_on_request(live):
    server = ExternalServer(live.server.url, _requirements(live))
    assert not server.alive, "its settings are not checked yet"
    server.start()
    assert server.alive
    server.require_check()
    assert live.server.alive and not server.alive
    for wrong in ({"dtype": "bfloat16"}, {"tensor_parallel_size": 2}):
        with pytest.raises(
            ConfigError, match=next(iter(wrong)).replace("tensor_parallel_size", "tp_size 1")
        ):
            ExternalServer(live.server.url, replace(_requirements(live), **wrong)).start()


@pytest.mark.integration
def test_a_real_router_is_used_and_refused_if_it_serves_other_engines(live):
    router = ExternalRouter(live.router.url)
    router.wait_ready(5)
    assert router.alive and [worker["url"] for worker in router.workers()] == [live.server.url]
    router.require_alone([live.server.url])
    with pytest.raises(ResourceError, match=f"(?s)serves other engines too.*{live.server.url}"):
        router.require_alone([])
    router.remove(live.server.url)
    router.add(live.server.url)


def test_the_error_of_a_missing_router_names_its_url(tmp_path: Path):
    with pytest.raises(EngineUnavailable, match=r"engine\.router_url: http://127\.0\.0\.1:9"):
        ExternalRouter(CLOSED_PORT).wait_ready(0.0)
    assert Router(EngineConfig(), port=None, log_path=tmp_path / "log").pid is None


def _requirements(live: Any) -> ServerRequirements:
    return ServerRequirements(str(live.model_dir), dtype="float32", tensor_parallel_size=1)
