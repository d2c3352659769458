"""`Engine`: client for the control endpoints of one SGLang server. `server_facts` for the record.

The calls go to the server directly: the router does not forward them. The client works with SGLang
0.5.15 to 0.5.21. It detects a missing endpoint by status 404, not by version.
"""

from __future__ import annotations

import asyncio
import base64
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any, Literal, NamedTuple, TypeVar, get_args
from uuid import uuid4

import httpx

from rlpipe.engines.sglang import adapters
from rlpipe.engines.sglang.push_routes import CLOSE, OPEN
from rlpipe.errors import DeadlineExceeded, EngineRejected
from rlpipe.rollout.client.http import call
from rlpipe.rollout.generation import no_spans
from rlpipe.system.certificates import certificates
from rlpipe.system.parts import Parts

FLUSH_SHARE = 0.8
"""Share of a call's deadline that our servers wait for a cache in use."""
FIRST = 1
"""Priority of requests that pass all others, which have 0 on a server of ours."""
_POLL_S = 0.05
_SHOWN_CHARACTERS = 500
Answer = TypeVar("Answer")
PauseMode = Literal["abort", "retract", "in_place"]
MemoryTag = Literal["weights", "kv_cache", "cuda_graph"]
MEMORY_TAGS: tuple[MemoryTag, ...] = get_args(MemoryTag)
"""Kinds of GPU memory of an engine, by SGLang's names."""
_FACTS = (
    "device",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "tp_size",
    "nnodes",
    "mem_fraction_static",
    "max_total_num_tokens",
    "max_total_tokens",
    "chunked_prefill_size",
    "sampling_backend",
    "moe_runner_backend",
    "enable_deterministic_inference",
    "disable_cuda_graph",
)


class Opened(NamedTuple):
    """Result of `Engine.open_update`."""

    begun: bool
    """True if a weight update is open, which `close_update` ends."""
    seconds: dict[str, float]
    """Seconds of each step."""


class Closed(NamedTuple):
    """Result of `Engine.close_update`."""

    weight_version: str
    """As `Engine.weight_version`."""
    seconds: dict[str, float]
    """Seconds of each step."""


class EngineLoad(NamedTuple):
    """Requests of an engine at one time."""

    running: int
    queued: int
    cache_used: float
    """Used share of the KV cache, 0 to 1."""


class Engine:
    """Control client of one engine.

    Methods raise EngineUnavailable, EngineRejected or DeadlineExceeded with the engine's URL.
    """

    def __init__(self, url: str, *, deadline_s: float = 120.0) -> None:
        """`deadline_s`: deadline of each call."""
        self.url = url.rstrip("/")
        self.deadline_s = deadline_s
        self._http = httpx.AsyncClient(timeout=None, verify=certificates())
        self._client = uuid4().hex
        """Id that tells a server of the run which `Engine` opened an update."""

    async def __aenter__(self) -> Engine:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._http.aclose()

    async def info(self) -> dict[str, Any]:
        """Return the served model: `model_path`, `weight_version` and more. Works while paused."""
        try:
            return await self._ask("GET", "/model_info", read=dict)
        except EngineRejected as error:
            if not _missing(error):
                raise
            return await self._ask("GET", "/get_model_info", read=dict)

    async def server_info(self) -> dict[str, Any]:
        """Return the server's arguments, its derived settings and SGLang's version."""
        return await self._ask("GET", "/server_info", read=dict)

    async def load(self) -> EngineLoad | None:
        """Return the requests of the server now; None before SGLang 0.5.21.

        The server answers from shared memory, without a wait for its scheduler.
        """
        try:
            return await self._ask("GET", "/v1/loads?include=core", read=_load)
        except EngineRejected as error:
            if not _missing(error):
                raise
            return None

    async def weight_version(self) -> str:
        """Return the stamp of the last push, or the stamp that the server was started with."""
        version = (await self.info()).get("weight_version")
        if version is None:
            version = await self._ask(
                "GET", "/get_weight_version", read=itemgetter("weight_version")
            )
        return str(version)

    async def health(self) -> None:
        """Generate one token. Raises if that fails. A paused server does not answer."""
        await self._call("GET", "/health_generate")

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Stop sampling until `continue_`. New requests wait in the server.

        `mode` decides about requests in flight. `abort` returns them with their tokens so far,
        which takes about 1 s if there are any. `retract` and `in_place` keep them.

        Weights may change under `abort` and `retract`: the cache can be flushed and is computed
        again. Under `in_place` the cache stays. Requests in flight then continue with keys and
        values of the old weights. So does, through the prefix cache, every later request with a
        known prompt, under the new weights' name. Measured on 0.5.21: log-probs differ by 6.5 and
        4.7 nats.
        """
        await self._call("POST", "/pause_generation", {"mode": mode})

    async def require_spans(self) -> None:
        """Require that answers name the weights of each token. Samples one token.

        Requests that continue over a push need this. Raises: EngineError with the setting to change
        for SGLang before 0.5.21.
        """
        body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}, "return_logprob": True}
        meta = await self._ask(
            "POST", "/generate", body, read=lambda answer: dict(answer["meta_info"])
        )
        if not meta.get("weight_versions"):
            raise no_spans(f"engine {self.url}")

    async def continue_(self) -> None:
        """Sample again after `pause`."""
        await self._call("POST", "/continue_generation", {})

    async def flush(self) -> None:
        """Empty the prefix cache. Waits until no request uses it."""
        end_s = time.monotonic() + self.deadline_s
        while True:
            try:
                await self._call("POST", "/flush_cache")
                return
            except EngineRejected as error:
                if time.monotonic() > end_s:
                    raise DeadlineExceeded(
                        "the cache is still in use",
                        where=self.url,
                        found=error.found,
                        expected=f"idle within {self.deadline_s:g} s",
                    ) from error
            await asyncio.sleep(_POLL_S)

    async def open_update(self, mode: PauseMode, *, begin: bool) -> Opened:
        """Pause, empty the prefix cache, and with `begin` open a weight update.

        One request to a server with `push_routes`, else one for each step.
        """
        # The server's error comes before the deadline of this call, and says more.
        timeout_s = FLUSH_SHARE * self.deadline_s
        body = {"client": self._client, "mode": mode, "begin": begin, "timeout_s": timeout_s}
        answer = await self._ask_ours(OPEN, body)
        if answer is not None:
            return Opened(bool(answer["begun"]), answer["seconds"])
        parts = Parts()
        with parts.part("pause"):
            await self.pause(mode)
        with parts.part("flush the cache"):
            await self.flush()
        with parts.part("begin"):
            begun = begin and await self.begin_weight_update()
        return Opened(begun, parts.seconds)

    async def close_update(self, expected: str, *, end: bool, sample: bool) -> Closed:
        """Close a weight update (`end`), read the weight version, and sample again (`sample`).

        A server with another version than `expected` stays paused. Requests: as `open_update`. Our
        servers refuse if another `Engine` has opened an update since this one.
        """
        body = {"client": self._client, "expected": expected, "end": end, "sample": sample}
        answer = await self._ask_ours(CLOSE, body)
        if answer is not None:
            return Closed(str(answer["weight_version"]), answer["seconds"])
        parts = Parts()
        with parts.part("end"):
            if end:
                await self.end_weight_update()
        with parts.part("echo"):
            version = await self.weight_version()
        with parts.part("continue"):
            if sample and version == expected:
                await self.continue_()
        return Closed(version, parts.seconds)

    async def _ask_ours(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """Call an endpoint of `push_routes`; return None if the server does not have it."""
        try:
            return await self._ask("POST", path, body, read=dict)
        except EngineRejected as error:
            if not _missing(error):
                raise
            return None

    async def abort_all(self) -> None:
        """End every request. Each returns its tokens so far."""
        await self._call("POST", "/abort_request", {"rid": "", "abort_all": True})

    async def begin_weight_update(self) -> bool:
        """Open a weight update. Ends an update that a failed push left open.

        Returns False if this version of SGLang does not have the endpoint.
        """
        try:
            await self._call("POST", "/begin_weight_update", {})
        except EngineRejected as error:
            if _missing(error):
                return False
            # A failed push can leave an update open.
            if "already open" not in str(error.found):
                raise
            await self.end_weight_update()
            await self._call("POST", "/begin_weight_update", {})
        return True

    async def end_weight_update(self) -> None:
        """Close a weight update. The server then builds what it derives from its weights."""
        await self._call("POST", "/end_weight_update", {})

    async def update_from_tensors(
        self,
        serialized: Sequence[bytes],
        *,
        weight_version: str | None,
        flush_cache: bool,
        flattened: bool = False,
    ) -> None:
        """Load one bucket.

        `serialized` has one entry for each tensor parallel rank: the pickle of [(name, tensor)], or
        a handle to a flat bucket (`flattened`). Set `weight_version` with the last bucket only. The
        caller checks names and shapes: SGLang ignores a wrong name and crashes on a wrong shape.
        """
        body: dict[str, Any] = {
            "serialized_named_tensors": [base64.b64encode(item).decode() for item in serialized],
            "flush_cache": flush_cache,
        }
        if flattened:
            body["load_format"] = "flattened_bucket"
        if weight_version is not None:
            body["weight_version"] = weight_version
        await self._call("POST", "/update_weights_from_tensor", body)

    async def load_adapter(self, name: str, config: dict[str, Any], tensors: str) -> None:
        """Replace the adapters of a server of ours (`adapters.load_only`) in an opened update."""
        body = {"client": self._client, "name": name, "config": config, "tensors": tensors}
        await self._call("POST", adapters.LOAD, body)

    async def join_group(
        self, name: str, *, address: str, port: int, first_rank: int, world_size: int, backend: str
    ) -> None:
        """Have the engine's ranks join a process group, from `first_rank` on.

        Its store listens at `address` and `port`.
        """
        # A trainer that died leaves a group of the same name in the engine.
        await self.leave_group(name)
        body = {
            "master_address": address,
            "master_port": port,
            "rank_offset": first_rank,
            "world_size": world_size,
        }
        await self._call(
            "POST", "/init_weights_update_group", {**body, "group_name": name, "backend": backend}
        )

    async def leave_group(self, name: str) -> None:
        """Have the engine's ranks leave a process group. No error if they are in none."""
        try:
            await self._call("POST", "/destroy_weights_update_group", {"group_name": name})
        except EngineRejected as error:
            if "does not exist" not in str(error.found):
                raise

    async def update_from_group(
        self,
        name: str,
        tensors: Sequence[tuple[str, str, Sequence[int]]],
        *,
        weight_version: str | None,
        flush_cache: bool,
    ) -> None:
        """Load one bucket that the group broadcasts as one tensor of bytes.

        `tensors`: name, dtype (torch's name) and shape of each. The server answers after the load,
        and waits for the broadcast without a deadline. Otherwise as `update_from_tensors`.
        """
        names, dtypes, shapes = zip(*tensors, strict=True)
        body: dict[str, Any] = {
            "names": names,
            "dtypes": dtypes,
            "shapes": [list(shape) for shape in shapes],
            "group_name": name,
            "load_format": "flattened_bucket",
            "flush_cache": flush_cache,
        }
        if weight_version is not None:
            body["weight_version"] = weight_version
        await self._call("POST", "/update_weights_from_distributed", body)

    async def release_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Release GPU memory. The server must be paused and flushed.

        The server crashes if a request runs, if memory is released twice, or if it is resumed
        without a release. Without `enable_memory_saver` or CUDA the call does nothing.
        """
        await self._call("POST", "/release_memory_occupation", {"tags": list(tags)})

    async def resume_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Allocate released GPU memory again. Its weights are undefined until the next push."""
        await self._call("POST", "/resume_memory_occupation", {"tags": list(tags)})

    async def update_from_disk(self, directory: str, *, weight_version: str) -> None:
        """Load all weights from the safetensors files of a directory on the engine's machine.

        Works without `begin_weight_update`. A tensor without a file keeps its old weights. Files
        that cannot be read crash the engine: SGLang 0.5.21 tries to restore the old weights, but
        reads the same files again.
        """
        await self._call(
            "POST",
            "/update_weights_from_disk",
            {"model_path": directory, "weight_version": weight_version},
        )

    async def check_weights(self, action: Literal["snapshot", "reset_tensors", "compare"]) -> None:
        """Copy the weights; overwrite them with random numbers; or compare them with the copy.

        `compare` deletes the copy. Raises: EngineRejected with the tensors that differ, or if this
        version of SGLang does not have the endpoint.
        """
        await self._call("POST", "/weights_checker", {"action": action})

    async def score(
        self, sequences: Sequence[Sequence[int]], images: Sequence[Any] | None = None
    ) -> list[list[float]]:
        """Return the log-probability of each token except the first, at temperature 1.

        Token ids are not checked. Waiting requests do not hold up a server of ours (`PRIORITIES` of
        `server`). `images`: `image_data` of each sequence; None: text.
        Shapes: sequences [N][T_i]; returns [N][T_i - 1].
        """
        body = {
            "input_ids": [list(map(int, sequence)) for sequence in sequences],
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "priority": FIRST,
            **({} if images is None else {"image_data": images}),
        }
        return await self._ask("POST", "/generate", body, read=partial(_scores, sequences))

    async def _ask(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        read: Callable[[Any], Answer],
    ) -> Answer:
        """Call an endpoint and return `read(JSON of the answer)`.

        Raises also: EngineRejected if the answer is no JSON, or not what `read` expects.
        """
        answer = await self._call(method, path, body)
        try:
            return read(answer.json())
        except (
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as error:
            raise EngineRejected(
                "the engine's answer cannot be read",
                where=f"engine {self.url} {path}",
                found=f"{answer.text[:_SHOWN_CHARACTERS]} ({error!r})",
            ) from error

    async def _call(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> httpx.Response:
        answer = await call(
            self._http,
            method,
            f"{self.url}{path}",
            json=body,
            deadline_s=self.deadline_s,
            where=f"engine {self.url} {path}",
        )
        if "json" in answer.headers.get("content-type", ""):
            with suppress(ValueError, RecursionError):
                # SGLang answers some failures with status 200.
                content = answer.json()
                if isinstance(content, dict) and content.get("success") is False:
                    raise EngineRejected(
                        "the request failed in the engine",
                        where=f"engine {self.url} {path}",
                        found=content.get("message", content),
                    )
        return answer


def server_facts(info: dict[str, Any]) -> dict[str, Any]:
    """Return name → value of settings in `/server_info` that describe how a server computes.

    For the record only. Values that this release of SGLang does not report are left out.
    """
    attention = info.get("attention_backend")
    by_phase = {
        phase: info.get(f"{phase}_attention_backend") or attention
        for phase in ("prefill", "decode")
    }
    attention = by_phase["decode"]
    if by_phase["prefill"] != attention:
        attention = ", ".join(f"{phase}: {backend}" for phase, backend in by_phase.items())
    return {
        "sglang": info.get("version"),
        "attention": attention,
        **{name: info[name] for name in _FACTS if info.get(name) is not None},
    }


def _load(answer: dict[str, Any]) -> EngineLoad:
    loads = answer["loads"]  # one entry for each data parallel rank
    used = [float(load["token_usage"]) for load in loads]
    return EngineLoad(
        running=sum(int(load["num_running_reqs"]) for load in loads),
        queued=sum(int(load["num_waiting_reqs"]) for load in loads),
        cache_used=sum(used) / len(used),
    )


def _scores(sequences: Sequence[Sequence[int]], rows: list[dict[str, Any]]) -> list[list[float]]:
    scores = [
        [float(pair[0]) for pair in row["meta_info"]["input_token_logprobs"][1:]] for row in rows
    ]
    if [len(row) + 1 for row in scores] != [len(sequence) for sequence in sequences]:
        raise ValueError("the answer has another number of log-probabilities than tokens - 1")
    if not all(map(math.isfinite, chain.from_iterable(scores))):
        raise ValueError("a log-probability is not finite")
    return scores


def _missing(error: EngineRejected) -> bool:
    return str(error.found).startswith("HTTP 404 ")
