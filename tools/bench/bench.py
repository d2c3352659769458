"""The model, configuration, time limits and progress lines that all parts of the benchmark share.

The configuration is a `RunConfig` that follows from the shape and the overrides, so every part
measures a run with these settings.
"""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rlpipe
from rlpipe.actors.gpu_memory import fitted
from rlpipe.config.load import load_run
from rlpipe.config.run import RunConfig
from rlpipe.config.text import dump
from rlpipe.errors import ResourceError
from tools.bench.shapes import SHAPES, Shape, make_directory, random_text

ITERATIONS = 8
PROMPTS_FOR = 64
"""Number of batches in the prompt file."""
PACKAGES = (
    "torch",
    "sglang",
    "megatron-core",
    "transformers",
    "triton",
    "flash-attn",
    "transformer-engine",
)


@dataclass(frozen=True)
class Bench:
    """One call of the benchmark."""

    home: Path
    name: str
    """Name of the shape."""
    shape: Shape
    config: RunConfig
    seconds: float
    """Measuring time of a part, without starting its processes."""
    repeats: int
    recipe: Path
    overrides: tuple[str, ...] = ()

    @property
    def model_dir(self) -> Path:
        return self.home / "models" / self.name

    @property
    def on_gpus(self) -> bool:
        return torch.cuda.is_available()

    @property
    def trainer_config(self) -> RunConfig:
        """The configuration of a run's trainer, with micro-batches that fit into the GPU."""
        memory = torch.cuda.get_device_properties(0).total_memory if self.on_gpus else None
        return fitted(self.config, str(self.model_dir), memory).config

    @property
    def config_of_shape(self) -> RunConfig:
        """The configuration with micro-batches of the shape's size, unless it has another size."""
        if self.config.train.max_tokens_per_gpu is not None:
            return self.config
        size = f"train.max_tokens_per_gpu={self.shape.micro_batch_tokens}"
        return self.with_overrides([size]).config

    def with_overrides(self, overrides: Sequence[str]) -> Bench:
        """Return this benchmark with more overrides. Raises: ConfigError."""
        both = (*self.overrides, *overrides)
        return replace(self, config=load_run(self.recipe, both, self.config.run), overrides=both)

    def ensure_model(self) -> None:
        """Make the model directory unless it exists."""
        if not self.model_dir.is_dir():
            self.progress("model")(
                f"{self.shape.parameters / 1e6:.1f}M parameters, to be in {self.model_dir}"
            )
            in_subprocess(make_directory, self.shape, self.model_dir)

    def progress(self, part: str) -> Callable[[str], None]:
        """Return a function that prints progress lines of a part."""
        started_s = time.monotonic()
        return lambda text: print(
            f"bench {part} {time.monotonic() - started_s:6.1f} s: {text}",
            file=sys.stderr,
            flush=True,
        )

    def until_s(self) -> float:
        """Return the end of a part that starts now, in time.monotonic."""
        return time.monotonic() + self.seconds


def open_bench(
    home: Path, name: str, overrides: Sequence[str], *, seconds: float, repeats: int
) -> Bench:
    """Write prompts and configuration of a shape under `home`.

    The model is made when a part needs it. Raises: ConfigError.
    """
    shape = SHAPES[name]
    (home / "models").mkdir(parents=True, exist_ok=True)
    recipe = home / f"{name}.yaml"
    prompts = write_prompts(shape, home / f"{name}.jsonl")
    recipe.write_text(dump(settings(shape, home / "models" / name, prompts)))
    config = load_run(recipe, overrides, f"bench-{name}")
    return Bench(home, name, shape, config, seconds, repeats, recipe, tuple(overrides))


def settings(shape: Shape, model_dir: Path, prompts: Path) -> dict[str, Any]:
    """Return the configuration of a run with one optimizer step an iteration, as plain data."""
    cuda = torch.cuda.is_available()
    return {
        "num_rollout": ITERATIONS,
        "model": {
            "source": {"type": "huggingface", "hf_checkpoint": str(model_dir)},
            "dtype": "bfloat16" if cuda else "float32",
        },
        "data": {"prompts": {"type": "file", "paths": [str(prompts)]}},
        "rollout": {
            "rollout_batch_size": shape.prompts,
            "n_samples_per_prompt": shape.samples_per_prompt,
            "rollout_max_response_len": shape.response_tokens,
        },
        "reward": {"function": {"type": "random"}},
        "train": {
            "max_tokens_per_gpu": None if cuda else shape.micro_batch_tokens,
            "optimizer": {"lr": 1e-6},
        },
        "checkpoint": {"save_interval": 1_000_000},
        "observe": {"tensorboard": False},
    }


def write_prompts(shape: Shape, path: Path) -> Path:
    """Write different prompts of `prompt_tokens` letters each, the same in every call."""
    random = np.random.default_rng(0)
    rows = [
        {"prompt": random_text(random, shape.prompt_tokens), "label": "0"}
        for _ in range(PROMPTS_FOR * shape.prompts)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def in_subprocess(function: Callable[..., None], *arguments: Any) -> None:
    """Call a function in a separate process, which frees its memory (also GPU memory) at the end.

    Raises: ResourceError.
    """
    process = multiprocessing.get_context("spawn").Process(
        target=function, args=arguments, daemon=True
    )
    process.start()
    process.join()
    if process.exitcode:
        raise ResourceError(
            "a process failed",
            where=f"bench: {function.__name__}",
            found=f"exit status {process.exitcode}",
        )


def about(bench: Bench) -> dict[str, Any]:
    """Return the device, packages, commit and configuration of the measurement."""
    from importlib.metadata import PackageNotFoundError, version

    packages = {}
    for package in PACKAGES:
        try:
            packages[package] = version(package)
        except PackageNotFoundError:
            continue
    source = Path(rlpipe.__file__).parents[1]
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=source, capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "device": torch.cuda.get_device_name(0) if bench.on_gpus else "CPU",
        "packages": packages,
        "commit": commit,
        "shape": bench.name,
        "config": bench.config.model_dump(mode="json"),
    }
