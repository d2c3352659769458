"""Endpoints of our SGLang servers that do several steps of a weight push in one request.

    POST /rlpipe/open_update     pause → empty the prefix cache → open a weight update
    POST /rlpipe/close_update    close the weight update → read the weight version → sample again
    POST /rlpipe/load_adapter    see `adapters`

`launch` adds them to SGLang's server. The steps are those of SGLang's own endpoints, which
`admin.Engine` calls one by one where these are missing (external servers). Each answer has the
seconds of each step.

SGLang's pause with `abort` looks once a second whether the aborted requests have ended. Here they
are aborted before, and awaited with `POLL_S`.

A trainer that dies in a push leaves requests behind. So requests run one after the other, those of
a client that has gone are given up, and only the client that opened an update last may close it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from rlpipe.engines.sglang import adapters
from rlpipe.system.parts import Parts

OPEN = "/rlpipe/open_update"
CLOSE = "/rlpipe/close_update"
POLL_S = 0.01
Gone = Callable[[], Awaitable[bool]]
"""True if the client of a request no longer waits for its answer."""
ABORT_S = 5.0
"""Wait for aborted requests. Later SGLang's own pause waits for them."""


class _Refused(Exception):
    """SGLang refused a step; the message says why."""


class PushRoutes:
    """The endpoints. `state` holds SGLang's `tokenizer_manager`, which exists once it serves."""

    def __init__(self, state: Any) -> None:
        """`state`: module `sglang.srt.entrypoints.http_server`, or a stand-in."""
        self._state = state
        self._lock = asyncio.Lock()
        self._client: str | None = None
        """The client that opened an update last."""

    def add_to(self, app: Any) -> None:
        """Add the endpoints to SGLang's FastAPI application."""
        routes = {OPEN: self._open, CLOSE: self._close, adapters.LOAD: self._load_adapter}
        for path, steps in routes.items():
            app.add_route(path, _endpoint(steps), methods=["POST"])

    @property
    def _manager(self) -> Any:
        return self._state._global_state.tokenizer_manager

    async def _open(self, body: dict[str, Any], parts: Parts, gone: Gone) -> dict[str, Any]:
        async with self._lock:
            if await gone():
                raise _Refused("the client has gone")
            self._client = body["client"]
            return await self._open_alone(body, parts, gone)

    async def _open_alone(self, body: dict[str, Any], parts: Parts, gone: Gone) -> dict[str, Any]:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        manager = self._manager
        with parts.part("pause"):
            if body["mode"] == "abort":
                await _end_requests(manager)
            await manager.pause_generation(PauseGenerationReqInput(mode=body["mode"]))
        with parts.part("flush the cache"):
            await _flush(manager, body["timeout_s"], gone)
        begun = False
        if body["begin"] and hasattr(manager, "begin_weight_update"):
            with parts.part("begin"):
                await _begin(manager)
            begun = True
        return {"begun": begun}

    async def _load_adapter(
        self, body: dict[str, Any], parts: Parts, _gone: Gone
    ) -> dict[str, Any]:
        async with self._lock:
            if self._client != body["client"]:
                raise _Refused("another client has opened an update since")
            try:
                await adapters.load_only(self._manager, body, parts)
            except ValueError as error:
                raise _Refused(str(error)) from error
        return {}

    async def _close(self, body: dict[str, Any], parts: Parts, _gone: Gone) -> dict[str, Any]:
        async with self._lock:
            if self._client != body["client"]:
                raise _Refused("another client has opened an update since")
            return await self._close_alone(body, parts)

    async def _close_alone(self, body: dict[str, Any], parts: Parts) -> dict[str, Any]:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        manager = self._manager
        if body["end"]:
            with parts.part("end"):
                await _end(manager)
        version = _weight_version(manager)
        # With other weights than expected the server stays paused.
        if body["sample"] and version == body["expected"]:
            with parts.part("continue"):
                await manager.continue_generation(ContinueGenerationReqInput())
        return {"weight_version": version}


def _endpoint(steps: Any) -> Any:
    # Imported in the server only: `admin` takes the paths from this module.
    from starlette.responses import JSONResponse

    async def endpoint(request: Any) -> JSONResponse:
        parts = Parts()
        try:
            answer = await steps(await request.json(), parts, request.is_disconnected)
        except _Refused as error:
            return JSONResponse({"success": False, "message": str(error)}, status_code=400)
        return JSONResponse({**answer, "seconds": parts.seconds})

    return endpoint


async def _end_requests(manager: Any) -> None:
    """Let new requests wait, abort all others, and wait until they have returned their tokens."""
    # As in SGLang's pause. Otherwise requests that clients send again would be aborted again.
    async with manager.is_pause_cond:
        manager.is_pause = True
    until_s = time.monotonic() + ABORT_S
    while await manager.model_update_lock.is_locked() and time.monotonic() < until_s:
        manager.abort_request(abort_all=True)
        await asyncio.sleep(POLL_S)


async def _flush(manager: Any, timeout_s: float, gone: Gone) -> None:
    """Empty the prefix cache once no request uses it."""
    until_s = time.monotonic() + timeout_s
    while not (answer := await manager.flush_cache()).success:
        if time.monotonic() > until_s:
            raise _Refused(f"the cache is still in use: {getattr(answer, 'message', '')}")
        if await gone():
            raise _Refused("the client has gone")
        await asyncio.sleep(POLL_S)


async def _begin(manager: Any) -> None:
    from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

    success, message = await manager.begin_weight_update(BeginWeightUpdateReqInput())
    if not success and "already open" in message:
        # A failed push can leave an update open.
        await _end(manager)
        success, message = await manager.begin_weight_update(BeginWeightUpdateReqInput())
    if not success:
        raise _Refused(message)


async def _end(manager: Any) -> None:
    from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

    success, message = await manager.end_weight_update(EndWeightUpdateReqInput())
    if not success:
        raise _Refused(message)


def _weight_version(manager: Any) -> str:
    if hasattr(manager, "config_value"):
        return str(manager.config_value("weight_version"))
    return str(manager.server_args.weight_version)  # before SGLang 0.5.21
