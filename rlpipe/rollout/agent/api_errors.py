"""Answer errors in the format of the API that the request uses.

    /v1/messages           Anthropic: {"type": "error", "error": {"type", "message"}}
    other paths of /v1     OpenAI: {"error": {"message", "type", "param", "code"}}
    /generate              SGLang: {"error": {"message", "type", "code"}}

Entry points: `errors_as_json`, the middleware of the gateway; `error_body`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiohttp import web

from rlpipe.errors import DeadlineExceeded, EngineRejected, RlpipeError

_BAD_REQUEST = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    RecursionError,
    EngineRejected,
)
_BAD = "invalid_request_error"
_OPENAI_TYPES = {504: "timeout", 503: "server_error"}
_ANTHROPIC_TYPES = {404: "not_found_error", 504: "timeout_error", 503: "overloaded_error"}


@web.middleware
async def errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Any]
) -> web.StreamResponse:
    """Answer 400 to wrong requests, 504 and 503 for engines without an answer.

    Statuses of aiohttp, such as 404 for an unknown path, are kept.
    """
    try:
        return await handler(request)
    except web.HTTPException as error:
        status = error.status
        body = error_body(request.path, status, error)
    except _BAD_REQUEST as error:
        status = 400
        body = error_body(request.path, status, error)
    except DeadlineExceeded as error:
        status = 504
        body = error_body(request.path, status, error)
    except RlpipeError as error:
        status = 503
        body = error_body(request.path, status, error)
    return web.json_response(body, status=status)


def error_body(
    path: str, status: int, error: Exception, *, streamed: bool = False
) -> dict[str, Any]:
    """Return the body of an error answer, or the event of an error in a stream."""
    kind = type(error).__name__
    message = str(error) if isinstance(error, RlpipeError) else f"{kind}: {error}"
    if "/v1/messages" in path:
        details = {"type": _ANTHROPIC_TYPES.get(status, _BAD), "message": message}
        return {"type": "error", "error": details}
    if streamed and path.endswith("/v1/responses"):
        return {"type": "error", "code": kind, "message": message, "param": None}
    if "/v1/" in path:
        details = {
            "message": message,
            "type": _OPENAI_TYPES.get(status, _BAD),
            "param": None,
            "code": kind,
        }
        return {"error": details}
    return {"error": {"message": message, "type": kind, "code": status}}
