"""Measure log-prob differences of engine and trainer on a mixture of experts, by routing.

    python -m tools.routing

Samples with a real engine that returns its experts. Then the trainer scores the same tokens twice:
with its own routing, and with the engine's experts (`train.use_rollout_routing_replay`). Both have
equal weights and use the device one after the other. Without `--model` a random mixture is made;
its routers are undecided, so the first line is worse than for a trained model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from rlpipe.batch.columns import BatchColumns
from rlpipe.config.model import EngineConfig, ModelConfig, ResourcesConfig
from rlpipe.config.train import TrainConfig
from rlpipe.engines.megatron.engine import MegatronEngine
from rlpipe.engines.sglang.router import Router
from rlpipe.engines.sglang.server import Server
from rlpipe.rollout.client.generate_client import GenerateClient
from rlpipe.rollout.generation import Generation
from rlpipe.store.routed_experts import NOT_ROUTED, one_per_token, routed_width, within
from rlpipe.system.ports import free_port

PROMPT_TOKENS = 16
START_S = 600.0
SHAPES = {
    "cpu": {
        "hidden_size": 64,
        "moe_intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_experts": 4,
    },
    "cuda": {
        "hidden_size": 1024,
        "moe_intermediate_size": 384,
        "num_hidden_layers": 12,
        "num_experts": 64,
    },
}
TOP_K = {"cpu": 2, "cuda": 8}
"""Experts per token of the random mixture."""


@dataclass(frozen=True)
class Comparison:
    """Absolute differences of log-probs of sampled tokens, between engine and trainer."""

    tokens: int
    free: np.ndarray
    """[R]: the trainer uses its own routing."""
    replayed: np.ndarray
    """[R]: the trainer uses the engine's experts."""
    other_experts: float
    """Share of tokens × layers that the trainer routes to another set of experts."""
    tokens_per_s: tuple[float, float]
    """Tokens/s of the engine, without and with returned experts."""

    def table(self) -> str:
        """Return the results as text."""
        title = f"|Δ log-prob| of {self.tokens} tokens"
        rows = [f"{title:<44}{'mean':>12}{'p99':>12}{'max':>12}"]
        for name, difference in (
            ("trainer routes for itself", self.free),
            ("trainer replays the engine's routing", self.replayed),
        ):
            rows.append(
                f"{name:<44}{difference.mean():12.6f}{np.quantile(difference, 0.99):12.6f}"
                f"{difference.max():12.6f}"
            )
        without, with_experts = self.tokens_per_s
        rows.append(f"{'tokens × layers with other experts':<44}{100 * self.other_experts:11.3f} %")
        rows.append(
            f"{'engine, tokens/s: without and with experts':<44}"
            f"{without:12.0f}{with_experts:12.0f}{with_experts / without:12.3f}"
        )
        return "\n".join(rows)


def make_model(directory: Path, device: str) -> None:
    """Write a random mixture of experts (the shape of Qwen3-MoE) as a Hugging Face directory."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    heads = {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": SHAPES[device]["hidden_size"] // 8,
    }
    ends = {
        "eos_token_id": 1,
        "pad_token_id": 0,
        "bos_token_id": None,
        "max_position_embeddings": 4096,
    }
    torch.manual_seed(0)
    experts = {"num_experts_per_tok": TOP_K[device], "norm_topk_prob": True}
    config = Qwen3MoeConfig(
        vocab_size=2048, **SHAPES[device], **heads, **ends, **experts, tie_word_embeddings=False
    )
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    stored: torch.nn.Module = model.bfloat16() if device == "cuda" else model
    stored.save_pretrained(directory)


def compare(
    model_dir: Path, *, device: str, samples: int, tokens: int, engine: EngineConfig
) -> Comparison:
    """Sample responses and score them.

    Raises: ConfigError for a model without experts; EngineError.
    """
    model = json.loads((model_dir / "config.json").read_text())
    random = np.random.default_rng(0)
    prompts = random.integers(2, model["vocab_size"], (samples, PROMPT_TOKENS)).tolist()
    generations, speeds = _sample(model_dir, model, prompts, tokens, device, engine)
    batch = BatchColumns.from_lists(
        prompts, [generation.response_ids for generation in generations]
    )
    named = []
    for prompt, generation in zip(prompts, generations, strict=True):
        length = len(prompt) + len(generation.response_ids)
        rows = within(generation.routed_experts, length)
        assert rows is not None
        named.append(one_per_token(rows, length))
    rollout_log_probs = np.concatenate(
        [np.asarray(generation.log_probs, np.float32) for generation in generations]
    )
    free, replayed, other = _score(
        model_dir, batch.with_columns(routed_experts=np.concatenate(named)), _dtype(device)
    )
    return Comparison(
        len(rollout_log_probs),
        np.abs(free - rollout_log_probs),
        np.abs(replayed - rollout_log_probs),
        other,
        speeds,
    )


def _sample(
    model_dir: Path,
    model: dict,
    prompts: list[list[int]],
    tokens: int,
    device: str,
    config: EngineConfig,
) -> tuple[list[Generation], tuple[float, float]]:
    keep = {"port": None, "seed": 0, "weight_version": "made@0@first", "names_experts": True}
    with tempfile.TemporaryDirectory(prefix="routing-") as logs:
        server = Server(
            model_dir,
            config,
            ResourcesConfig(),
            dtype=_dtype(device),
            log_path=Path(logs) / "engine.log",
            **keep,
        )
        router = Router(config, port=None, log_path=Path(logs) / "router.log")
        try:
            server.start()
            router.start()
            server.wait_ready(START_S)
            router.wait_ready(START_S)
            router.add(server.url)
            return asyncio.run(_generate(router.url, server.url, model, prompts, tokens))
        finally:
            server.stop()
            router.stop()


async def _generate(
    router: str, server: str, model: dict, prompts: list[list[int]], tokens: int
) -> tuple[list[Generation], tuple[float, float]]:
    """Return the generations, and tokens/s without and with experts.

    The request for experts passes the router, as in a run.
    """
    sampling = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": tokens,
        "ignore_eos": True,
    }
    width = routed_width(model)
    of_model = {"vocab_size": model["vocab_size"], "deadline_s": START_S}
    async with (
        GenerateClient(router, routed_width=width, **of_model) as naming,
        GenerateClient(server, **of_model) as silent,
    ):

        async def all_of(
            client: GenerateClient, routed_from: int | None
        ) -> tuple[list[Generation], float]:
            start_s = time.perf_counter()
            work = (
                client.generate(prompt, sampling, routed_from=routed_from) for prompt in prompts
            )
            generations = [generation for (generation,) in await asyncio.gather(*work)]
            return generations, len(prompts) * tokens / (time.perf_counter() - start_s)

        await all_of(silent, None)  # warm-up
        plain = [await all_of(silent, None) for _ in range(2)]
        routed = [await all_of(naming, 0) for _ in range(2)]
        speeds = max(speed for _, speed in plain), max(speed for _, speed in routed)
        return routed[-1][0], speeds


def _score(
    model_dir: Path, batch: BatchColumns, dtype: str
) -> tuple[np.ndarray, np.ndarray, float]:
    """Return log-probs of the trainer, free and replayed, and the share of other routing."""
    source = {"type": "huggingface", "hf_checkpoint": str(model_dir)}
    model = ModelConfig.model_validate({"source": source, "dtype": dtype})
    train = TrainConfig(use_rollout_routing_replay=True)
    shape = {
        "rollout_temperature": 1.0,
        "total_optimizer_steps": 1,
        "rank": 0,
        "world_size": 1,
        "threads": 1,
    }
    ours = MegatronEngine(str(model_dir), model, train, master=("127.0.0.1", free_port()), **shape)
    try:
        ours.load_hf()
        named = ours.routing_of_engines(batch)
        replayed = ours.score(batch.with_columns(routed_experts=named), replay=True)
        free, chosen = ours.score_and_route(batch)
    finally:
        ours.close()
    read = named[:, 0] != NOT_ROUTED
    k = json.loads((model_dir / "config.json").read_text())["num_experts_per_tok"]
    sets = [
        np.sort(experts[read].reshape(int(read.sum()), -1, k), axis=-1)
        for experts in (named, chosen)
    ]
    return free, replayed, float((sets[0] != sets[1]).any(-1).mean())


def _dtype(device: str) -> str:
    return "bfloat16" if device == "cuda" else "float32"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.routing", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--model", type=Path, help="a Hugging Face directory of a mixture of experts"
    )
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each sample")
    parser.add_argument(
        "--sglang", type=json.loads, default={}, help="arguments of the engine, as JSON"
    )
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        if arguments.model is None:
            make_model(Path(folder), device)
        engine = EngineConfig(sglang=arguments.sglang)
        comparison = compare(
            arguments.model or Path(folder),
            device=device,
            samples=arguments.samples,
            tokens=arguments.tokens,
            engine=engine,
        )
    print(comparison.table())


if __name__ == "__main__":
    main()
