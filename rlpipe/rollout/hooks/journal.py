"""What the engines answered to a function of the user: which of a sample's tokens they sampled, and
with which weights.

The function only hands over tokens. Whatever it asked through us is known here by the tokens it was
asked with, so for each stretch of a sample that is trained there is the answer that was sampled
after exactly the tokens before it.

    tokens   p p p │ r r r r │ t t │ r r r      p prompt, r sampled, t a tool's
                   └ asked with p p p           └ asked with all before it

Not here: the requests (`gateway`), what a sample must be like (`checked`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rlpipe.store.routed_experts import appended, num_rows


@dataclass(frozen=True, slots=True)
class Answer:
    """Sampled tokens, their log-probs, the weight versions as run lengths over them, and the
    experts of all tokens from `routed_from` on, those it was asked with included."""

    response_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    weight_versions: tuple[tuple[int, int], ...]
    routed_experts: np.ndarray | None = field(default=None, compare=False)
    routed_from: int = 0

    @property
    def versions(self) -> list[int]:
        """One a token."""
        return [version for tokens, version in self.weight_versions for _ in range(tokens)]


@dataclass(slots=True)
class Known:
    """Per response token: log-prob and weight version, None where nothing was sampled as it
    stands."""

    log_probs: list[float | None]
    versions: list[int | None]
    routed_experts: np.ndarray | None = None
    """Of prompt and response from their first token on, as far as they are known."""


class Journal:
    """The answers of one rollout stage."""

    def __init__(self) -> None:
        self._answers: dict[int, list[Answer]] = {}
        self.oldest: int | None = None
        """Oldest weight version that answered anything."""

    def add(self, asked_with: Sequence[int], answer: Answer) -> None:
        """Remember what was answered to these tokens."""
        for _, version in answer.weight_versions:
            self.oldest = version if self.oldest is None else min(self.oldest, version)
        if answer.response_ids:
            self._answers.setdefault(_key(asked_with), []).append(answer)

    def known(
        self,
        prompt_ids: Sequence[int],
        response_ids: Sequence[int],
        loss_mask: Sequence[int] | None,
        *,
        begin: int = 0,
        routed: np.ndarray | None = None,
    ) -> Known:
        """What is known of a response from its token `begin` on, and of the experts after those
        that are `routed`.

        Of equal answers to an equal question the one with the oldest weights is taken.
        """
        size = len(response_ids)
        found = Known([None] * size, [None] * size, routed)
        ids = [*prompt_ids, *response_ids]
        place = begin
        start = len(prompt_ids)
        while place < size:
            if loss_mask is not None and not loss_mask[place]:
                place += 1
                continue
            length, answer = self._longest(ids[: start + place], ids[start + place :])
            if answer is None:
                place = _end_of_run(loss_mask, place, size)
                continue
            found.log_probs[place : place + length] = answer.log_probs[:length]
            found.versions[place : place + length] = answer.versions[:length]
            found.routed_experts = _appended(
                found.routed_experts, answer, start + place + length - 1
            )
            place += length
        return found

    def _longest(self, before: list[int], after: list[int]) -> tuple[int, Answer | None]:
        best = 0
        chosen = None
        for answer in self._answers.get(_key(before), ()):
            length = _common(answer.response_ids, after)
            if length > best or (
                length == best and chosen and length and min(answer.versions) < min(chosen.versions)
            ):
                best = length
                chosen = answer
        return best, chosen


def _appended(held: np.ndarray | None, answer: Answer, end: int) -> np.ndarray | None:
    """What is held, and what an answer adds to it of the tokens before `end`."""
    begin = num_rows(held)
    if answer.routed_experts is None or not answer.routed_from <= begin < end:
        return held
    return appended(
        held, answer.routed_experts[begin - answer.routed_from : end - answer.routed_from]
    )


def _key(ids: Sequence[int]) -> int:
    return hash(tuple(ids))


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens both begin with."""
    shorter = min(len(first), len(second))
    return next((place for place in range(shorter) if first[place] != second[place]), shorter)


def _end_of_run(mask: Sequence[int] | None, place: int, size: int) -> int:
    """Where the stretch of tokens that count ends."""
    if mask is None:
        return size
    return next((number for number in range(place, size) if not mask[number]), size)
