"""One tiny real model behind a real SGLang server and a real router, shared by all tests of a run.
Not a test."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rlpipe.config.model import EngineConfig, ResourcesConfig
from rlpipe.config.train import LoraConfig
from rlpipe.engines.sglang.router import Router
from rlpipe.engines.sglang.server import Server
from tests.engine_template import forked_engines

VOCAB_SIZE = 128
CONTEXT_LEN = 256
END = 1
START_S = 240.0
FIRST_STAMP = "made@0@first"

_started: list[Live] = []


@dataclass
class Live:
    """`model` is what the server holds; a test that pushes other weights sets it."""

    model: Qwen3ForCausalLM
    model_dir: Path
    server: Server
    router: Router


def make_model(directory: Path, seed: int) -> Qwen3ForCausalLM:
    """A Qwen3 of 0.1M parameters with weights wide enough that its log-probabilities differ; saved
    to `directory` too."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT_LEN,
        tie_word_embeddings=True,
        eos_token_id=END,
        pad_token_id=0,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.15)
    model.save_pretrained(directory)
    return model.eval()


def log_probs(
    model: Qwen3ForCausalLM,
    prompt_ids: list[int],
    response_ids: list[int],
    temperature: float = 1.0,
) -> list[float]:
    """Log-probability of each response token by transformers."""
    with torch.no_grad():
        logits = (
            model(torch.tensor([prompt_ids + response_ids])).logits[0, len(prompt_ids) - 1 : -1]
            / temperature
        )
    return (
        torch.log_softmax(logits, -1).gather(-1, torch.tensor(response_ids)[:, None])[:, 0].tolist()
    )


def make_server(
    model_dir: Path, log_path: Path, lora: LoraConfig | None = None, **sglang: object
) -> Server:
    """A server that is not started. `sglang`: its arguments."""
    return Server(
        model_dir,
        EngineConfig(sglang=sglang),
        ResourcesConfig(),
        dtype="float32",
        port=None,
        log_path=log_path,
        seed=1,
        weight_version=FIRST_STAMP,
        lora=lora,
        device="cpu",
    )


def live_engine(config: pytest.Config) -> Live:
    """The shared engine; started on first use, stopped at the end of the run."""
    if not _started:
        folder = Path(tempfile.mkdtemp(prefix="rlpipe-live-"))
        model = make_model(folder / "model", seed=0)
        server = make_server(folder / "model", folder / "server.log")
        router = Router(EngineConfig(), port=None, log_path=folder / "router.log")
        config.add_cleanup(lambda: shutil.rmtree(folder))
        config.add_cleanup(server.stop)
        config.add_cleanup(router.stop)
        with forked_engines():
            server.start()
        router.start()
        server.wait_ready(START_S)
        router.wait_ready(START_S)
        router.add(server.url)
        _started.append(Live(model, folder / "model", server, router))
    return _started[0]
