"""Validate the requests to the gateway before a template or an engine gets them.

A parameter that has no effect on the sampled tokens is accepted (`user`, `metadata`, ...). Unknown
parameters, and those that rlpipe cannot apply, are refused: an agent that is trained without them
would not be the agent that is used. Requests to SGLang's `/generate` may have further fields.

Entry points: `read_body` and the models of the requests.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlpipe.errors import DataError

MAX_COPIES = 4096
_MAX_CHOICES = 128
Finite = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
StopText = Annotated[str, Field(min_length=1)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class Part(BaseModel):
    """Object with further fields allowed. Strict: the string "1" is not a number."""

    model_config = ConfigDict(extra="allow", strict=True)


class Whole(BaseModel):
    """Object without further fields."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Parameters(Whole):
    """Parameters that several APIs share."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None


class _OpenAIParameters(Parameters):
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    store: bool | None = None


class _SamplingParameters(_OpenAIParameters):
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    seed: int | None = None
    n: Annotated[int, Field(ge=1, le=_MAX_CHOICES)] | None = None
    max_tokens: Count | None = None
    stop: StopText | list[StopText] | None = None
    stream_options: _StreamOptions | None = None


class _StreamOptions(Whole):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _Function(Part):
    name: str
    arguments: str | dict[str, Any] | None = None


class _Call(Part):
    function: _Function
    id: str | None = None
    type: Literal["function"] | None = None


class _TextPart(Part):
    type: Literal["text", "refusal"] = "text"
    text: str = ""


class _Message(Whole):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_TextPart] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


class FunctionTool(Whole):
    """A function that the policy may call."""

    class Definition(Part):
        name: str = Field(min_length=1)
        description: str | None = None
        parameters: dict[str, Any] | None = None
        strict: bool | None = None

    type: Literal["function"]
    function: Definition


class _NamedFunction(Whole):
    class Name(Whole):
        name: str

    type: Literal["function"]
    function: Name


class _ResponseFormat(Whole):
    class Schema(Whole):
        name: str
        description: str | None = None
        schema_: dict[str, Any] = Field(alias="schema")
        strict: bool | None = None

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None


class ChatRequest(_SamplingParameters):
    """Request for a chat completion."""

    messages: list[_Message] = Field(min_length=1)
    max_completion_tokens: Count | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | _NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    response_format: _ResponseFormat | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    modalities: list[Literal["text"]] | None = None


class CompletionRequest(_SamplingParameters):
    """Request to complete a text."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: None = None


class _ResponsesTool(Whole):
    type: Literal["function"]
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _ResponsesFunction(Whole):
    type: Literal["function"]
    name: str


class _TextFormat(Whole):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class _TextSettings(Whole):
    format: _TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class _ItemText(Part):
    type: Literal["input_text", "output_text", "text", "refusal"]
    text: str = ""


class _MessageItem(Part):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_ItemText]


class _CallItem(Part):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class _OutputItem(Part):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[_ItemText]


class _ReasoningItem(Part):
    class Text(Part):
        text: str

    type: Literal["reasoning"]
    content: list[Text] | None = None
    summary: list[Text] | None = None


class ResponsesRequest(_OpenAIParameters):
    """Request of OpenAI's Responses API."""

    input: str | list[_MessageItem | _CallItem | _OutputItem | _ReasoningItem]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Count | None = None
    tools: list[_ResponsesTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | _ResponsesFunction | None = None
    parallel_tool_calls: bool | None = None
    text: _TextSettings | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = (
        None
    )
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    stream_options: _StreamOptions | None = None


class _CacheControl(Part):
    type: str


class _Block(Part):
    cache_control: _CacheControl | None = None


class _TextBlock(_Block):
    type: Literal["text"]
    text: str
    citations: Annotated[list[Any], Field(max_length=0)] | None = None


class _ThinkingBlock(_Block):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class _ToolUseBlock(_Block):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: dict[str, Any] | None = None


class _ToolResultBlock(_Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[_TextBlock] | None = None
    is_error: bool | None = None


class _AnthropicMessage(Whole):
    role: Literal["user", "assistant"]
    content: (
        str
        | list[
            Annotated[
                _TextBlock | _ThinkingBlock | _ToolUseBlock | _ToolResultBlock,
                Field(discriminator="type"),
            ]
        ]
    )


class _AnthropicTool(Whole):
    type: Literal["custom"] | None = None
    name: str = Field(min_length=1)
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: _CacheControl | None = None


class _AnthropicToolChoice(Whole):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _Thinking(Whole):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Count | None = None
    display: str | None = None


class _OutputFormat(Whole):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class _OutputSettings(Whole):
    format: _OutputFormat | None = None
    effort: str | None = None


class CountTokensRequest(Whole):
    """Request of Anthropic's API for the number of tokens of a prompt."""

    model: str | None = None
    messages: list[_AnthropicMessage] = Field(min_length=1)
    system: str | list[_TextBlock] | None = None
    tools: list[_AnthropicTool] | None = None
    tool_choice: _AnthropicToolChoice | None = None
    thinking: _Thinking | None = None
    output_config: _OutputSettings | None = None


class MessagesRequest(CountTokensRequest, Parameters):
    """Request of Anthropic's Messages API."""

    max_tokens: Count
    stop_sequences: list[StopText] | None = None


class Sampling(Part):
    """SGLang's sampling parameters."""

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


class GenerateRequest(Part):
    """Request to SGLang's `/generate`."""

    input_ids: list[int] | list[list[int]] | None = None
    text: str | list[str] | None = None
    sampling_params: Sampling | None = None
    stream: bool | None = None
    return_routed_experts: bool | None = None
    routed_experts_start_len: int | None = Field(default=None, ge=0)


async def read_body(request: web.Request, model: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON of a request unchanged. Raises: DataError with an invalid field."""
    where = f"{request.method} {request.path}"
    try:
        body = await request.json()
        model.model_validate(body)
    except ValidationError as error:
        # Each alternative of a union has errors. The longest path belongs to the alternative that
        # fits best.
        worst = max(error.errors(), key=lambda one: len(one["loc"]))
        key = ".".join(filter(_is_key, map(str, worst["loc"]))) or "the whole body"
        problem = worst["msg"]
        do = None
        if worst["type"] == "extra_forbidden":
            problem = "the parameter cannot be applied here"
            do = "remove it; rollout/README.md lists the parameters of each API"
        raise DataError(
            problem, where=f"{where}: {key}", found=ascii(worst["input"])[:200], do=do
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError("the request is not JSON", where=where, found=error) from error
    return body


def _is_key(name: str) -> bool:
    """True if a part of an error's path is a key of the request, not a type of this module."""
    return name != "str" and "[" not in name and not name.startswith("_")
