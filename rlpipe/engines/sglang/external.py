"""`ExternalServer` and `ExternalRouter`: processes that other people start and stop.

They have the interface of `Server` and `Router`, but never start or stop a process. Before a server
gets weights, and after each time it was away, its model and settings are checked: SGLang ignores
tensors of another name and crashes on another shape.
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
"""A server that does not answer within this time counts as away."""
OLDEST = (0, 5, 15)
"""Oldest supported release of SGLang. Earlier ones have other endpoints."""
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
class ServerRequirements:
    """Model and settings that a server must have."""

    model_dir: str
    dtype: str
    tensor_parallel_size: int
    quantization: str | None = None
    reads_text: bool = False
    """As the argument of `Server`; the next two as well."""
    names_experts: bool = False
    deterministic: bool = False


class ExternalServer:
    """A server at a URL."""

    pid = None
    """None: the process runs on another machine or under another user."""

    def __init__(self, url: str, required: ServerRequirements) -> None:
        self.url = url
        self.required = required
        self._checked = False

    @property
    def alive(self) -> bool:
        """True if the server has answered every time since the last check. Calls it: up to
        `LOOK_S` seconds."""
        self._checked = self._checked and _get(f"{self.url}/model_info") is not None
        return self._checked

    def start(self) -> None:
        """Check the server's model and settings.

        Raises: EngineUnavailable if it does not answer; ConfigError with everything that differs.
        """
        model = _get(f"{self.url}/model_info")
        server = _get(f"{self.url}/server_info")
        if model is None or server is None:
            raise EngineUnavailable(
                "no answer from an external engine",
                where=f"resources.external_engines: {self.url}",
                expected="an SGLang server that answers /model_info and /server_info within "
                f"{LOOK_S:g} s",
                do="start the server, or remove its address; it joins once it answers",
            )
        if wrong := mismatches(model, server, self.required):
            raise ConfigError(
                "an external engine has another model or other settings",
                where=f"resources.external_engines: {self.url}",
                found="; ".join(f"{name} {found}" for name, (found, _) in wrong.items()),
                expected="; ".join(f"{name} {expected}" for name, (_, expected) in wrong.items()),
                do="start the server with these arguments, or change the run's configuration",
            )
        self._checked = True

    def wait_ready(self, deadline_s: float) -> None:
        """Return at once: a server is ready after `start`."""

    def require_check(self) -> None:
        """Require another check before the next use. The process keeps running."""
        self._checked = False


def mismatches(
    model: dict[str, Any], server: dict[str, Any], required: ServerRequirements
) -> dict[str, tuple[Any, Any]]:
    """Return name → (found, expected) of every setting that differs.

    `model` and `server` are the answers of `/model_info` and `/server_info`.
    """
    own_config = json.loads((Path(required.model_dir) / "config.json").read_text())
    version = _release(server.get("version"))
    own_dtype = str(own_config.get("dtype") or own_config.get("torch_dtype"))
    dtype = (
        own_dtype
        if server.get("dtype") == "auto"
        else _TYPES.get(server.get("dtype", ""), server.get("dtype"))
    )
    pairs = {
        "architectures": (model.get("architectures"), own_config.get("architectures")),
        "dtype": (dtype, required.dtype),
        "tp_size": (server.get("tp_size"), required.tensor_parallel_size),
        "dp_size": (server.get("dp_size", 1), 1),
        "pp_size": (server.get("pp_size", 1), 1),
        "disaggregation_mode": (server.get("disaggregation_mode", "null"), "null"),
        "quantization": (server.get("quantization"), required.quantization),
        **_sizes(model.get("model_path"), own_config),
    }
    needed = {
        "skip_tokenizer_init": (required.reads_text, False),
        "enable_return_routed_experts": (required.names_experts, True),
        "enable_deterministic_inference": (
            required.deterministic and server.get("device") == "cuda",
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


def _sizes(directory: str | None, own_config: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return (server's, own) sizes of the model; {} if the directory is on another machine."""
    try:
        config = json.loads((Path(directory or "") / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return {name: (config.get(name), own_config[name]) for name in _SIZES if name in own_config}


def _release(version: Any) -> tuple[int, ...]:
    # A development build has no such number and passes.
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", str(version))
    return tuple(map(int, match.groups())) if match else OLDEST


class ExternalRouter(Routes):
    """A router at a URL."""

    port = None

    def __init__(self, url: str) -> None:
        self._url = url
        self.name = f"external router {url}"
        self.do = "read the router's log, or remove engine.router_url"

    @property
    def url(self) -> str:
        return self._url

    @property
    def alive(self) -> bool:
        """True if the router answers."""
        return _get(f"{self.url}/workers") is not None

    def start(self) -> None:
        """Do nothing: the router runs already."""

    def wait_ready(self, deadline_s: float) -> None:
        """Wait until the router answers. Raises: EngineUnavailable."""
        end_s = time.monotonic() + deadline_s
        while not self.alive:
            if time.monotonic() > end_s:
                raise EngineUnavailable(
                    "the router does not answer",
                    where=f"engine.router_url: {self.url}",
                    expected=f"/workers within {deadline_s:g} s",
                    do=self.do,
                )
            time.sleep(_POLL_S)

    def require_alone(self, ours: Collection[str]) -> None:
        """Require that the router serves no live engine except `ours` (URLs).

        Raises: ResourceError with the other engines.
        """
        others = [worker["url"] for worker in self.workers() if worker["url"] not in ours]
        if alive := [url for url in others if _get(f"{url}/model_info") is not None]:
            raise ResourceError(
                "the external router serves other engines too",
                where=f"engine.router_url: {self.url}",
                found=f"engines at {', '.join(alive)}",
                expected="only engines of this run: other models would answer its requests",
                do="give the run its own router, or remove the other engines from this one",
            )


def _get(url: str) -> dict[str, Any] | None:
    """Return the JSON object at a URL; None without a usable answer in time."""
    try:
        answer = fetch("GET", url, deadline_s=LOOK_S)
        content = answer.json() if answer.status_code == 200 else None
    except (httpx.RequestError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None
