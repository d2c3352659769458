"""Encode prompts as token ids: tokenizer, chat template, and the loss mask of supervised rows.

A plain prompt is tokenized without special tokens; a chat template writes its own. Prompt and
response are always tokenized separately, so that a supervised row has exactly the prompt ids from
which a rollout would sample.

Entry points: `encode_prompt`, `encode_supervised`, `encode_preference`, `render`, `overlong_rows`,
`kept_rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from rlpipe.config.base import MOST_TOKENS
from rlpipe.config.data import DataConfig
from rlpipe.config.rollout import RolloutConfig
from rlpipe.data.chat_templates import fields, no_template_error
from rlpipe.data.prompts import PromptRow
from rlpipe.errors import ConfigError, DataError
from rlpipe.types import Image, Message, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlpipe.data.image_reader import ImageReader


@dataclass(frozen=True, slots=True)
class Encoded:
    """A row as tokens.

    `prompt` is the text of the ids, or the messages of a supervised chat row. If the prompt was
    cut, `prompt` is the remaining text; messages stay complete. `response_ids` and `loss_mask` have
    the same length, 0 if the response will be sampled.
    """

    prompt: Prompt
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...] = ()
    loss_mask: tuple[int, ...] = ()
    images: tuple[Image, ...] = ()
    """Images of the prompt, in the order of their tokens."""
    rejected_ids: tuple[int, ...] = ()
    """The rejected response of a preference row; `response_ids` is the chosen one."""
    overlong: Overlong | None = None
    """Set if the prompt exceeds its limit. It was cut, or the caller must drop the row."""


@dataclass(frozen=True, slots=True)
class Overlong:
    """A prompt that exceeds its limit.

    `tokens` is the length before a cut, `setting` the key of the limit.
    """

    where: str
    tokens: int
    limit: int
    setting: str

    @property
    def error(self) -> DataError:
        """Return the error that names the row."""
        if self.setting.startswith(("data.", "rollout.")):
            shorten = f"remove the row, raise {self.setting.partition(',')[0]}"
        else:
            shorten = "remove or shorten the row, use a model with a longer context"
        return DataError(
            "the prompt is too long",
            where=self.where,
            found=f"{self.tokens} tokens",
            expected=f"at most {self.limit} ({self.setting})",
            do=f"{shorten}, or set data.overlong_prompts: drop or truncate_left",
        )


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    row: PromptRow,
    data: DataConfig,
    rollout: RolloutConfig,
    *,
    model_context_len: int | None = None,
    images: ImageReader | None = None,
) -> Encoded:
    """Encode the prompt of a row that will be sampled.

    `model_context_len`: longest prompt + response of the model; None: no limit. `images`: how the
    model reads images; None: a model of text.

    A user function may get messages as they are, without a chat template, as in slime. Their ids
    are those of their texts, and their length is not checked: the function renders them.

    Raises: DataError naming the row if it is empty, cannot be rendered, or is too long with
    `data.overlong_prompts: error`.
    """
    is_kept = rollout.samples_by_user_function and not data.apply_chat_template
    if is_kept and not isinstance(row.prompt, str):
        return Encoded(row.prompt, _token_ids(tokenizer, _texts(row.prompt)))
    if images is not None:
        row = images.shown(row, data, tokenizer)
    text = render(tokenizer, row.prompt, data, where=row.where, tools=row.metadata.get("tools"))
    encoded = Encoded(text, _token_ids(tokenizer, text))
    if images is not None:
        encoded = images.expanded(encoded, row)
    return _within_limits(tokenizer, encoded, row.where, data, rollout, model_context_len)


def encode_supervised(
    tokenizer: PreTrainedTokenizerBase,
    row: PromptRow,
    data: DataConfig,
    rollout: RolloutConfig,
    *,
    images: ImageReader | None = None,
) -> Encoded:
    """Encode a row with its answer as the response.

    `prompt_ids` are all tokens before the first trained token. In a plain row the response is the
    label's tokens and the end-of-sequence token. In a chat row (`apply_chat_template`) the label is
    an additional assistant message. `loss_mask_type` selects the assistant messages that count in
    the loss; `"step_loss_mask": 0` in a message excludes it. A trained message ends with the
    end-of-sequence token of the template.

    Raises: DataError naming the row if it has no answer, no trained token, a too long answer, or a
    too long prompt with `data.overlong_prompts: error`.
    """
    if not isinstance(row.label, str | None):
        raise DataError(
            "the answer of a supervised row is no text",
            where=row.where,
            found=type(row.label).__name__,
            expected="a string in the column that data.prompts.label_key names",
        )
    if images is not None:
        row = images.shown(row, data, tokenizer)
    if data.apply_chat_template:
        encoded = _encode_chat(tokenizer, row, data, rollout)
    else:
        encoded = _encode_plain(tokenizer, row, data)
    if images is not None:
        encoded = images.expanded(encoded, row)
    return _within_limits(tokenizer, encoded, row.where, data, rollout, None)


def render(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    data: DataConfig,
    *,
    where: str,
    add_generation_prompt: bool = True,
    tools: list[Any] | None = None,
) -> str:
    """Return the prompt as text.

    Without `apply_chat_template` a string is returned unchanged. With it, a string is a message of
    the user, and the template can describe `tools`.

    Raises: DataError for messages without `apply_chat_template`, or if the template refuses them;
    ConfigError if the tokenizer has no template.
    """
    if not data.apply_chat_template:
        return require_text(prompt, where)
    if not tokenizer.chat_template:
        raise no_template_error(tokenizer.name_or_path, prompt, where)
    messages = as_messages(prompt)
    options: dict[str, Any] = {
        **data.apply_chat_template_kwargs,
        "add_generation_prompt": add_generation_prompt,
    }
    if tools:
        options["tools"] = tools
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except (TemplateError, TypeError, KeyError) as error:
        raise DataError(
            "the chat template refuses the messages",
            where=where,
            found=f"{type(error).__name__}: {error}",
        ) from error


def require_text(prompt: Prompt, where: str) -> str:
    """Return a prompt of text. Raises: DataError for messages."""
    if isinstance(prompt, str):
        return prompt
    raise DataError(
        "the prompt is a list of messages, which needs a chat template",
        where=where,
        found=fields(prompt),
        expected="text",
        do="set data.apply_chat_template=true, write rendered text into the column, or sample with "
        "a function of yours (rollout.custom_generate_function_path)",
    )


def as_messages(prompt: Prompt) -> list[Message]:
    """Return the messages of a prompt; a string is one message of the user."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def _texts(messages: list[Message]) -> str:
    """Return the texts of messages, one after another; a content may be a list of parts."""
    contents = [message.get("content") or "" for message in messages]
    parts = [[{"text": one}] if isinstance(one, str) else one for one in contents]
    return "\n".join(str(part.get("text", "")) for some in parts for part in some)


def _token_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False)) if text else ()


def _encode_plain(tokenizer: PreTrainedTokenizerBase, row: PromptRow, data: DataConfig) -> Encoded:
    if not isinstance(row.label, str):
        raise DataError(
            "a supervised row needs an answer",
            where=row.where,
            found="no label",
            do="set data.prompts.label_key to the column of the answers",
        )
    eos_token_id = tokenizer.eos_token_id
    if not isinstance(eos_token_id, int):
        raise ConfigError(
            "the tokenizer has no end-of-sequence token",
            where="model.source",
            found=tokenizer.name_or_path,
        )
    text = render(tokenizer, row.prompt, data, where=row.where)
    response = (*_token_ids(tokenizer, row.label), eos_token_id)
    return Encoded(text, _token_ids(tokenizer, text), response, (1,) * len(response))


def _encode_chat(
    tokenizer: PreTrainedTokenizerBase, row: PromptRow, data: DataConfig, rollout: RolloutConfig
) -> Encoded:
    messages = as_messages(row.prompt)
    if row.label is not None:
        messages.append({"role": "assistant", "content": row.label})
    trained = _trained_messages(messages, rollout.loss_mask_type, row.where)
    # Later messages are never trained. `step_loss_mask` is not for the template.
    shown = [
        {key: value for key, value in message.items() if key != "step_loss_mask"}
        for message in messages[: trained[-1] + 1]
    ]
    text, spans = _answer_spans(
        shown, trained, tokenizer, data, row.where, row.metadata.get("tools")
    )
    prompt_ids = _token_ids(tokenizer, text[: spans[0][0]])
    response_ids = []
    loss_mask = []
    for (start, end), (next_start, _) in pairwise([*spans, (spans[-1][1], 0)]):
        answer = _token_ids(tokenizer, text[start:end])
        num_trained = _length_to_end_of_turn(answer, tokenizer.eos_token_id)
        rest = answer[num_trained:] + _token_ids(tokenizer, text[end:next_start])
        response_ids += answer[:num_trained] + rest
        loss_mask += [1] * num_trained + [0] * len(rest)
    last = len(loss_mask) - loss_mask[::-1].index(1)
    return Encoded(
        messages[: trained[-1] + 1], prompt_ids, tuple(response_ids[:last]), tuple(loss_mask[:last])
    )


def _trained_messages(messages: list[Message], loss_mask_type: str, where: str) -> list[int]:
    """Return the positions of the assistant messages that count in the loss.

    Raises: DataError if there is none.
    """
    answers = [
        position for position, message in enumerate(messages) if message["role"] == "assistant"
    ]
    candidates = answers[-1:] if loss_mask_type == "last" else answers
    for message in messages:
        if message.get("step_loss_mask", 1) not in (0, 1):
            raise DataError(
                "step_loss_mask is not 0 or 1",
                where=where,
                found=message["step_loss_mask"],
                expected="0 or 1",
            )
    trained = [position for position in candidates if messages[position].get("step_loss_mask", 1)]
    if not trained:
        raise DataError(
            "the row has no trained message",
            where=where,
            found=f"roles {[message['role'] for message in messages]}, "
            f"loss_mask_type {loss_mask_type!r}",
            expected="an assistant message (or a label) whose step_loss_mask is not 0",
        )
    return trained


def _answer_spans(
    messages: list[Message],
    trained: list[int],
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    where: str,
    tools: list[Any] | None,
) -> tuple[str, list[tuple[int, int]]]:
    """Return the rendered text, and (start, end) of the answer of each trained message in it."""
    text = render(tokenizer, messages, data, where=where, add_generation_prompt=False, tools=tools)
    spans = []
    for position in trained:
        before = render(tokenizer, messages[:position], data, where=where, tools=tools)
        through = render(
            tokenizer,
            messages[: position + 1],
            data,
            where=where,
            add_generation_prompt=False,
            tools=tools,
        )
        # Some templates remove the reasoning of earlier answers, so positions would be wrong.
        if not (text.startswith(through) and through.startswith(before)):
            raise DataError(
                "the chat template rewrites earlier messages, so the answer has no fixed position",
                where=where,
                found=f"message {position} of {len(messages)}",
                do="use loss_mask_type: last, or a template that only appends",
            )
        spans.append((len(before), len(through)))
    return text, spans


def _length_to_end_of_turn(ids: tuple[int, ...], eos_token_id: Any) -> int:
    """Return the number of tokens up to and including the last end-of-sequence token."""
    # Text that a template writes after it is never sampled, so it is not trained.
    return len(ids) - ids[::-1].index(eos_token_id) if eos_token_id in ids else len(ids)


def _within_limits(
    tokenizer: PreTrainedTokenizerBase,
    encoded: Encoded,
    where: str,
    data: DataConfig,
    rollout: RolloutConfig,
    model_context_len: int | None,
) -> Encoded:
    """Apply `data.overlong_prompts` to a row. Raises: DataError naming the row."""
    tokens = len(encoded.prompt_ids)
    answer = len(encoded.response_ids)
    if not tokens:
        raise DataError("the prompt has no tokens", where=where, found=repr(encoded.prompt))
    limit, setting = prompt_limit(data, rollout, max(answer, 1), model_context_len)
    overlong = Overlong(where, tokens, limit, setting) if tokens > limit else None
    if overlong is not None and data.overlong_prompts == "error":
        raise overlong.error
    if overlong is not None and data.overlong_prompts == "drop":
        return replace(encoded, overlong=overlong)
    if answer > rollout.rollout_max_response_len:
        limit = rollout.rollout_max_response_len
        raise DataError(
            "the answer is too long",
            where=where,
            found=f"{answer} tokens",
            expected=f"at most {limit} (rollout.rollout_max_response_len)",
        )
    return encoded if overlong is None else _cut_left(tokenizer, encoded, overlong)


def prompt_limit(
    data: DataConfig, rollout: RolloutConfig, answer: int, model_context_len: int | None
) -> tuple[int, str]:
    """Return (longest prompt in tokens before an answer of this length, key of that limit)."""
    bounds = {
        "data.rollout_max_prompt_len": (data.rollout_max_prompt_len, 0),
        "rollout.rollout_max_context_len, with room for a response": (
            rollout.rollout_max_context_len,
            answer,
        ),
        "max_position_embeddings of the model, with room for a response": (
            model_context_len,
            answer,
        ),
    }
    # The smallest limit applies, and its key is named in errors.
    limits = [(bound - room, key) for key, (bound, room) in bounds.items() if bound is not None]
    return min(limits, default=(MOST_TOKENS, ""))


def _cut_left(tokenizer: PreTrainedTokenizerBase, encoded: Encoded, overlong: Overlong) -> Encoded:
    """Keep the last tokens of the prompt. Raises: DataError if no prompt token fits."""
    if overlong.limit < 1:
        raise DataError(
            "the answer leaves no room for a prompt",
            where=overlong.where,
            found=f"an answer of {len(encoded.response_ids)} tokens",
            expected=f"a shorter answer, or a larger limit ({overlong.setting})",
        )
    if encoded.images:
        raise DataError(
            "a prompt with images cannot be cut",
            where=overlong.where,
            found=f"{overlong.tokens} tokens",
            expected=f"at most {overlong.limit} ({overlong.setting})",
            do="set data.overlong_prompts: drop",
        )
    kept = encoded.prompt_ids[-overlong.limit :]
    prompt = encoded.prompt
    if isinstance(prompt, str):
        prompt = str(tokenizer.decode(list(kept), skip_special_tokens=False))
    return replace(encoded, prompt=prompt, prompt_ids=kept, overlong=overlong)


def encode_preference(
    tokenizer: PreTrainedTokenizerBase, row: PromptRow, data: DataConfig, rollout: RolloutConfig
) -> Encoded:
    """Encode a preference row; both responses follow the same prompt.

    Each response is encoded as by `encode_supervised`. Raises: as `encode_supervised`.
    """
    rows = (row, replace(row, label=row.rejected))
    chosen, rejected = (encode_supervised(tokenizer, one, data, rollout) for one in rows)
    # A limit of prompt and response together cuts more of the prompt of the longer response.
    shorter = min(chosen, rejected, key=lambda encoded: len(encoded.prompt_ids))
    return replace(
        chosen,
        # The messages of a chat row would contain the chosen response.
        prompt=shorter.prompt if isinstance(shorter.prompt, str) else row.prompt,
        prompt_ids=shorter.prompt_ids,
        rejected_ids=rejected.response_ids,
        overlong=chosen.overlong or rejected.overlong,
    )


def overlong_rows(
    rows: Iterable[PromptRow], encode: Callable[[PromptRow], Encoded]
) -> dict[int, Overlong]:
    """Return row number → length and limit, for rows with an over-long prompt.

    Raises: DataError naming a bad row.
    """
    encoded = (encode(row).overlong for row in rows)
    return {number: overlong for number, overlong in enumerate(encoded) if overlong is not None}


def kept_rows(num_rows: int, overlong: Mapping[int, Overlong], where: str) -> Sequence[int]:
    """Return the numbers of the rows that are not dropped. Raises: ConfigError if none is left."""
    kept = [number for number in range(num_rows) if number not in overlong]
    if num_rows and not kept:
        first = overlong[0]
        raise ConfigError(
            "every prompt is over-long, and data.overlong_prompts: drop leaves none",
            where=where,
            found=f"{num_rows} rows; the first has {first.tokens} tokens ({first.where})",
            expected=f"a row with at most {first.limit} ({first.setting})",
            do="raise the limit, or set data.overlong_prompts: truncate_left",
        )
    return kept
