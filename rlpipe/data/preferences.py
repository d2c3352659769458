"""Preference rows: a prompt, the chosen and the rejected response.

The columns have one of the forms that TRL reads, with or without a column for the prompt:

    text       {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}
    messages   {"prompt": [user], "chosen": [assistant], "rejected": [assistant]}
    repeated   {"prompt": "2 + 2 =", "chosen": [user, assistant], "rejected": [user, assistant]}

Entry point: `preference`. Source: https://huggingface.co/docs/trl/dataset_formats#preference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlpipe.errors import DataError
from rlpipe.types import Prompt

FORMS = "two strings, or two lists of messages that end with one message of the assistant each"


def preference(
    prompt: Prompt | None, chosen: Any, rejected: Any, where: str
) -> tuple[Prompt, str, str]:
    """Return prompt, chosen and rejected response.

    `prompt` None: the common beginning of both responses. Of messages, the responses are the
    contents of the last ones.

    Raises: DataError naming the row if the responses have other forms, or no common beginning.
    """
    if isinstance(chosen, str) and isinstance(rejected, str):
        return (prompt, chosen, rejected) if prompt else _split_texts(chosen, rejected, where)
    if not (isinstance(chosen, list) and isinstance(rejected, list)):
        found = f"{type(chosen).__name__} and {type(rejected).__name__}"
        raise DataError("not a pair of responses", where=where, found=found, expected=FORMS)
    if prompt is None:
        prompt = chosen[: _num_common(chosen[:-1], rejected[:-1])]
        if not prompt:
            raise _no_prompt(where)
    shown = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return prompt, _answer(chosen, shown, where), _answer(rejected, shown, where)


def _split_texts(chosen: str, rejected: str, where: str) -> tuple[str, str, str]:
    """Split the common beginning off. A space before the first difference stays in the responses,
    as in TRL's `extract_prompt`: tokens often begin with a space."""
    prompt = chosen[: _num_common(chosen, rejected)]
    if prompt.endswith(" ") and len(prompt) < min(len(chosen), len(rejected)):
        prompt = prompt[:-1]
    if not prompt:
        raise _no_prompt(where)
    return prompt, chosen[len(prompt) :], rejected[len(prompt) :]


def _num_common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the length of the common beginning."""
    shorter = min(len(one), len(other))
    return next((i for i in range(shorter) if one[i] != other[i]), shorter)


def _answer(messages: list[Any], prompt: list[Any], where: str) -> str:
    """Return the content of the only message after the prompt."""
    answer = messages[len(prompt) :] if messages[: len(prompt)] == prompt else messages
    last = answer[-1] if len(answer) == 1 else None
    if (
        isinstance(last, dict)
        and last.get("role") == "assistant"
        and isinstance(last.get("content"), str)
    ):
        return last["content"]
    raise DataError(
        "a response is not one message of the assistant after the prompt",
        where=where,
        found=[m.get("role") if isinstance(m, dict) else type(m).__name__ for m in answer],
        expected='[{"role": "assistant", "content": "..."}], alone or after the prompt\'s messages',
    )


def _no_prompt(where: str) -> DataError:
    return DataError(
        "chosen and rejected response have no common beginning, which would be the prompt",
        where=where,
        do="set prompts.input_key to the column of the prompt",
    )
