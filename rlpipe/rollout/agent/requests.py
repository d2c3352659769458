"""What the gateway is asked, checked before any of it reaches a template or an engine.

Only what we read has a type here; whatever else a client sends is left aside, as OpenAI's and
SGLang's servers leave it.

Not here: what a request means (`gateway`, `openai_api`), or whether an engine can take it (it says
so itself).
"""

from __future__ import annotations

from typing import Annotated, Any

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlpipe.errors import DataError

MOST_COPIES = 4096
Finite = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class _Part(BaseModel):
    """Anything but what is named: strict, so that "1" is no number."""

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
    """Parameters of sampling, by SGLang's names and OpenAI's."""

    temperature: Finite | None = None
    top_p: Finite | None = None
    top_k: int | None = None
    min_p: Finite | None = None
    presence_penalty: Finite | None = None
    frequency_penalty: Finite | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    max_new_tokens: int | None = Field(default=None, ge=0)
    n: int | None = Field(default=None, ge=0, le=MOST_COPIES)


class Chat(Sampling):
    """A chat completion."""

    messages: list[_Message] = Field(min_length=1)
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    tools: list[dict[str, Any]] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    logprobs: bool | None = None
    model: str | None = None


class Generate(_Part):
    """SGLang's `/generate`."""

    input_ids: list[int] | list[list[int]] | None = None
    text: str | list[str] | None = None
    sampling_params: Sampling | None = None
    stream: bool | None = None
    return_routed_experts: bool | None = None
    routed_experts_start_len: int | None = Field(default=None, ge=0)


async def read_body(request: web.Request, kind: type[BaseModel]) -> dict[str, Any]:
    """The JSON of a request as it was sent. Raises: DataError naming the first thing that is not of
    its type."""
    try:
        body = await request.json()
        kind.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the whole"
        raise DataError(
            first["msg"],
            where=f"{request.method} {request.path}: {key}",
            found=ascii(first["input"])[:200],
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(
            "the request is not JSON", where=f"{request.method} {request.path}", found=error
        ) from error
    return body
