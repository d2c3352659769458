"""Validate the requests to the gateway before a template or an engine gets them.

Entry point: `read_body`. Only the fields that rlpipe reads have a type here. Other fields of a
client are ignored, as OpenAI's and SGLang's servers ignore them.
"""

from __future__ import annotations

from typing import Annotated, Any

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlpipe.errors import DataError

MAX_COPIES = 4096
Finite = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class _Part(BaseModel):
    """Object with further fields allowed. Strict: the string "1" is not a number."""

    model_config = ConfigDict(extra="allow", strict=True)


class _Function(_Part):
    name: str
    arguments: str | dict[str, Any] | None = None


class _Call(_Part):
    function: _Function
    id: str | None = None


class _ContentPart(_Part):
    text: str = ""


class _Message(_Part):
    role: str
    content: str | list[_ContentPart] | None = None
    tool_calls: list[_Call] | None = None


class _StreamOptions(_Part):
    include_usage: bool | None = None


class Sampling(_Part):
    """Sampling parameters, by SGLang's and OpenAI's names."""

    temperature: Finite | None = None
    top_p: Finite | None = None
    top_k: int | None = None
    min_p: Finite | None = None
    presence_penalty: Finite | None = None
    frequency_penalty: Finite | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    max_new_tokens: int | None = Field(default=None, ge=0)
    n: int | None = Field(default=None, ge=0, le=MAX_COPIES)


class ChatRequest(Sampling):
    """Request for a chat completion."""

    messages: list[_Message] = Field(min_length=1)
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    tools: list[dict[str, Any]] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    logprobs: bool | None = None
    model: str | None = None


class GenerateRequest(_Part):
    """Request to SGLang's `/generate`."""

    input_ids: list[int] | list[list[int]] | None = None
    text: str | list[str] | None = None
    sampling_params: Sampling | None = None
    stream: bool | None = None
    return_routed_experts: bool | None = None
    routed_experts_start_len: int | None = Field(default=None, ge=0)


async def read_body(request: web.Request, model: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON of a request unchanged. Raises: DataError with the first invalid field."""
    where = f"{request.method} {request.path}"
    try:
        body = await request.json()
        model.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the whole body"
        found = ascii(first["input"])[:200]
        raise DataError(first["msg"], where=f"{where}: {key}", found=found) from error
    except (ValueError, RecursionError) as error:
        raise DataError("the request is not JSON", where=where, found=error) from error
    return body
