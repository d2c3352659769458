"""Record the engines' answers to a user function, to attribute the tokens of its samples.

A user function returns tokens only. Each request of the function passes the gateway and is recorded
by its prompt tokens. A stretch of trained tokens in a sample belongs to the answer that was sampled
after exactly the tokens before the stretch. The answer gives log-probs, weight versions and routed
experts.

    tokens   p p p │ r r r r │ t t │ r r r      p prompt, r sampled, t of a tool
                   └ request p p p              └ request with all tokens before

Entry point: `Journal`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rlpipe.store.routed_experts import appended, num_rows


@dataclass(frozen=True, slots=True)
class Answer:
    """Sampled tokens with log-probs and run lengths of weight versions."""

    response_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    weight_versions: tuple[tuple[int, int], ...]
    routed_experts: np.ndarray | None = field(default=None, compare=False)
    """Experts of all tokens from `routed_from` on, including prompt tokens."""
    routed_from: int = 0

    @property
    def versions(self) -> list[int]:
        """Weight version of each token."""
        return [version for tokens, version in self.weight_versions for _ in range(tokens)]


@dataclass(slots=True)
class Attribution:
    """Log-prob and weight version of each response token; None for tokens without an answer."""

    log_probs: list[float | None]
    versions: list[int | None]
    routed_experts: np.ndarray | None = None
    """Experts of prompt and response from the first token on, as far as they are known."""


class Journal:
    """Answers of the engines during one rollout."""

    def __init__(self) -> None:
        self._answers: dict[int, list[Answer]] = {}
        self.oldest: int | None = None
        """Oldest weight version of all answers."""

    def add(self, prompt_ids: Sequence[int], answer: Answer) -> None:
        """Record the answer to a request."""
        for _, version in answer.weight_versions:
            self.oldest = version if self.oldest is None else min(self.oldest, version)
        if answer.response_ids:
            self._answers.setdefault(_key(prompt_ids), []).append(answer)

    def known(
        self,
        prompt_ids: Sequence[int],
        response_ids: Sequence[int],
        loss_mask: Sequence[int] | None,
        *,
        begin: int = 0,
        routed: np.ndarray | None = None,
    ) -> Attribution:
        """Attribute a response from its token `begin` on.

        `routed` are the known experts of the tokens before. Of equal answers to equal requests, the
        answer with the oldest weights is taken.
        """
        size = len(response_ids)
        known = Attribution([None] * size, [None] * size, routed)
        ids = [*prompt_ids, *response_ids]
        position = begin
        start = len(prompt_ids)
        while position < size:
            if loss_mask is not None and not loss_mask[position]:
                position += 1
                continue
            length, answer = self._longest_match(ids[: start + position], ids[start + position :])
            if answer is None:
                # Nothing was sampled here: the whole stretch has another source.
                position = _end_of_stretch(loss_mask, position, size)
                continue
            end = position + length
            known.log_probs[position:end] = answer.log_probs[:length]
            known.versions[position:end] = answer.versions[:length]
            # The engine has no experts for the last sampled token.
            known.routed_experts = _with_experts_of(known.routed_experts, answer, start + end - 1)
            position = end
        return known

    def _longest_match(self, before: list[int], after: list[int]) -> tuple[int, Answer | None]:
        """Return the answer to `before` with the longest common prefix with `after`."""
        longest = 0
        chosen = None
        for answer in self._answers.get(_key(before), ()):
            length = _common_prefix(answer.response_ids, after)
            is_older = (
                length == longest
                and chosen is not None
                and length > 0
                and min(answer.versions) < min(chosen.versions)
            )
            if length > longest or is_older:
                longest = length
                chosen = answer
        return longest, chosen


def _with_experts_of(held: np.ndarray | None, answer: Answer, end: int) -> np.ndarray | None:
    """Append the experts that an answer has for the tokens between `held` and `end`."""
    begin = num_rows(held)
    if answer.routed_experts is None or not answer.routed_from <= begin < end:
        return held
    more = answer.routed_experts[begin - answer.routed_from : end - answer.routed_from]
    return appended(held, more)


def _key(ids: Sequence[int]) -> int:
    # The hash alone: the prompts of long conversations would take much memory.
    return hash(tuple(ids))


def _common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    shorter = min(len(first), len(second))
    return next((index for index in range(shorter) if first[index] != second[index]), shorter)


def _end_of_stretch(loss_mask: Sequence[int] | None, position: int, size: int) -> int:
    """Return the end of the stretch of tokens that count."""
    if loss_mask is None:
        return size
    return next((index for index in range(position, size) if not loss_mask[index]), size)
