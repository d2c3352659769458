"""`ExternalServer` and `ExternalRouter`: what others start and end, used like `Server` and
`Router`.

A server is asked what it serves before it is given weights: it would ignore tensors of another
name, and end at one of another shape. It is asked anew each time it has been away. Nothing here
starts, restarts or ends a process.

Not here: which weights it holds (`admin`), when it is left out (the fleet).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from rlpipe.engines.sglang.routes import Routes
from rlpipe.errors import ConfigError, EngineUnavailable, ResourceError
from rlpipe.rollout.client.http import fetch

LOOK_S = 10.0
"""A server that does not say in so many seconds what it serves is away."""
OLDEST = (0, 5, 15)
"""Release of SGLang: older ones have other endpoints."""
_POLL_S = 0.5
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "num_experts",
    "n_routed_experts",
    "vocab_size",
)
_TYPES = {"float": "float32", "half": "float16"}


@dataclass(frozen=True)
class Wanted:
    """What a server has to serve."""

    model_dir: str
    dtype: str
    tensor_parallel_size: int
    quantization: str | None = None
    reads_text: bool = False
    """As in `Server`, and so are the next two."""
    names_experts: bool = False
    deterministic: bool = False


class ExternalServer:
    """One server at an address. `start()`, `alive`, `stop()`, `url`, `pid`."""

    pid = None
    """Of a process that is not ours to name."""

    def __init__(self, url: str, wanted: Wanted) -> None:
        self.url = url
        self.wanted = wanted
        self._met = False

    @property
    def alive(self) -> bool:
        """Does it answer, and has it since it was asked what it serves? Asks it: up to `LOOK_S`."""
        self._met = self._met and _answer(f"{self.url}/model_info") is not None
        return self._met

    def start(self) -> None:
        """Ask it what it serves. Raises: EngineUnavailable if it does not answer; ConfigError
        naming all that is wrong."""
        model = _answer(f"{self.url}/model_info")
        server = _answer(f"{self.url}/server_info")
        if model is None or server is None:
            raise EngineUnavailable(
                "no answer from an external engine",
                where=f"resources.external_engines: {self.url}",
                expected=f"an SGLang server that answers /model_info and /server_info within {LOOK_S:g} s",
                do="start it, or take its address out; once it answers it is taken in",
            )
        if wrong := unfit(model, server, self.wanted):
            raise ConfigError(
                "an external engine serves something else",
                where=f"resources.external_engines: {self.url}",
                found="; ".join(f"{name} {found}" for name, (found, _) in wrong.items()),
                expected="; ".join(f"{name} {expected}" for name, (_, expected) in wrong.items()),
                do="start it with these arguments, or change the run's configuration",
            )
        self._met = True

    def wait_ready(self, deadline_s: float) -> None:
        """It is, once `start` has returned."""

    def stop(self) -> None:
        """It is not ours to end: it is asked again before it is used again."""
        self._met = False


def unfit(
    model: dict[str, Any], server: dict[str, Any], wanted: Wanted
) -> dict[str, tuple[Any, Any]]:
    """What of `/model_info` and `/server_info` is not as it has to be: name → (found, expected)."""
    ours = json.loads((Path(wanted.model_dir) / "config.json").read_text())
    version = _release(server.get("version"))
    own_dtype = str(ours.get("dtype") or ours.get("torch_dtype"))
    dtype = (
        own_dtype
        if server.get("dtype") == "auto"
        else _TYPES.get(server.get("dtype", ""), server.get("dtype"))
    )
    pairs = {
        "architectures": (model.get("architectures"), ours.get("architectures")),
        "dtype": (dtype, wanted.dtype),
        "tp_size": (server.get("tp_size"), wanted.tensor_parallel_size),
        "dp_size": (server.get("dp_size", 1), 1),
        "pp_size": (server.get("pp_size", 1), 1),
        "disaggregation_mode": (server.get("disaggregation_mode", "null"), "null"),
        "quantization": (server.get("quantization"), wanted.quantization),
        **_sizes(model.get("model_path"), ours),
    }
    needed = {
        "skip_tokenizer_init": (wanted.reads_text, False),
        "enable_return_routed_experts": (wanted.names_experts, True),
        "enable_deterministic_inference": (
            wanted.deterministic and server.get("device") == "cuda",
            True,
        ),
    }
    pairs |= {
        name: (bool(server.get(name)), value)
        for name, (applies, value) in needed.items()
        if applies
    }
    wrong = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    if version < OLDEST:
        wrong["version"] = (server.get("version"), f"{'.'.join(map(str, OLDEST))} or later")
    return wrong


def _sizes(directory: str | None, ours: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Sizes of its model beside ours; {} if its directory lies where we cannot see it."""
    try:
        theirs = json.loads((Path(directory or "") / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return {name: (theirs.get(name), ours[name]) for name in _SIZES if name in ours}


def _release(version: Any) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", str(version))
    return tuple(map(int, found.groups())) if found else OLDEST


class ExternalRouter(Routes):
    """A router at an address. `start()`, `wait_ready(deadline_s)`, `stop()`, `alive`, and as
    `Routes`."""

    port = None

    def __init__(self, url: str) -> None:
        self._url = url
        self.name = f"external router {url}"
        self.do = "look at its log, or leave engine.router_url out"

    @property
    def url(self) -> str:
        return self._url

    @property
    def alive(self) -> bool:
        """Does it answer?"""
        return _answer(f"{self.url}/workers") is not None

    def start(self) -> None:
        """It has been."""

    def wait_ready(self, deadline_s: float) -> None:
        """Wait until it answers. Raises: EngineUnavailable."""
        end_s = time.monotonic() + deadline_s
        while not self.alive:
            if time.monotonic() > end_s:
                raise EngineUnavailable(
                    "no answer",
                    where=f"engine.router_url: {self.url}",
                    expected=f"/workers within {deadline_s:g} s",
                    do=self.do,
                )
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """It is not ours to end."""

    def require_alone(self, ours: Collection[str]) -> None:
        """Returns if it routes to nothing that lives but `ours` (addresses). Raises: ResourceError
        naming those of others."""
        others = [worker["url"] for worker in self.workers() if worker["url"] not in ours]
        if alive := [url for url in others if _answer(f"{url}/model_info") is not None]:
            raise ResourceError(
                "the external router serves others too",
                where=f"engine.router_url: {self.url}",
                found=f"engines at {', '.join(alive)}",
                expected="none but this run's: it would be answered by models that are not trained here",
                do="give the run a router of its own, or take them off",
            )


def _answer(url: str) -> dict[str, Any] | None:
    """What it says; None if it says nothing of use in time."""
    try:
        answer = fetch("GET", url, deadline_s=LOOK_S)
        said = answer.json() if answer.status_code == 200 else None
    except (httpx.RequestError, ValueError, RecursionError):
        return None
    return said if isinstance(said, dict) else None
