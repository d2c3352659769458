"""The batch of an iteration as flat NumPy columns.

N samples, S tokens (prompts and responses), R response tokens of all samples. Sample i owns
`tokens[offsets[i]:offsets[i + 1]]` and `column[response_offsets[i]:response_offsets[i + 1]]`. The
columns are described in `rlpipe.store.columns`; `rlpipe.batch.files` reads and writes them.

A rank may hold only some samples of a batch. Then N, S and R count these samples, and `part` has
their numbers in the whole batch and the sizes of all its samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlpipe.batch.images import BatchImages
from rlpipe.errors import DataError
from rlpipe.store.columns import BATCH, Shape

RESPONSE_COLUMNS = BATCH.named(Shape.RESPONSE)
"""Names of the columns with one value per response token, the loss mask among them."""


@dataclass(slots=True, frozen=True, eq=False)
class BatchSizes:
    """Lengths of all samples of a batch."""

    prompt_lengths: np.ndarray
    """[N] int64."""
    response_lengths: np.ndarray
    """[N] int64."""
    rollout: np.ndarray | None = None
    """As `BatchColumns.rollout`."""
    loss_tokens: np.ndarray | None = None
    """[N] int64: response tokens that count. None: not read, because no loss is computed."""
    stored_order: np.ndarray | None = None
    """[N] int64: samples in the order in which shards of the rollout hold them. None: 0..N-1."""

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    @property
    def lengths(self) -> np.ndarray:
        """[N]: tokens of prompt and response."""
        return self.prompt_lengths + self.response_lengths

    @property
    def rollouts(self) -> np.ndarray:
        """[N] int64: the number of each sample's rollout."""
        return np.arange(len(self)) if self.rollout is None else self.rollout

    @property
    def num_tokens(self) -> int:
        """S of the whole batch."""
        return int(self.lengths.sum())

    @property
    def num_response_tokens(self) -> int:
        """R of the whole batch."""
        return int(self.response_lengths.sum())


@dataclass(slots=True, frozen=True, eq=False)
class BatchPart:
    """Samples of a batch that a rank holds."""

    sizes: BatchSizes
    """Sizes of the whole batch."""
    samples: np.ndarray
    """[n] int64, ascending: numbers of the held samples in the whole batch."""


@dataclass(slots=True, frozen=True, eq=False)
class BatchColumns:
    """Tokens, and one value per response token in every other column.

    Raises: DataError if the lengths of the columns do not agree.
    """

    tokens: np.ndarray
    """[S] int32: prompt and response of each sample, one sample after another."""
    offsets: np.ndarray
    """[N + 1] int64, from 0 to S."""
    prompt_lengths: np.ndarray
    """[N] int64, at least 1."""
    loss_mask: np.ndarray
    """[R] float32, 1 where a response token counts."""
    rollout_log_probs: np.ndarray | None = None
    """[R] float32: behaviour log-probs, from the engine."""
    proximal_log_probs: np.ndarray | None = None
    """[R] float32: the trainer's, before the first optimizer step of the iteration."""
    reference_log_probs: np.ndarray | None = None
    """[R] float32: the reference policy's."""
    teacher_log_probs: np.ndarray | None = None
    """[R] float32: the teacher's, for on-policy distillation."""
    advantages: np.ndarray | None = None
    """[R] float32."""
    values: np.ndarray | None = None
    """[R] float32: the critic's value of the state before each token, before the first step."""
    returns: np.ndarray | None = None
    """[R] float32: target of the critic."""
    rollout: np.ndarray | None = None
    """[N] int64: number of the rollout; equal numbers share a denominator. None: all differ."""
    routed_experts: np.ndarray | None = None
    """[S, W] uint16: experts of every token, W = layers with experts × experts a token;
    `routed_experts.NOT_ROUTED` where no engine read the token. None: every pass routes again."""
    part: BatchPart | None = None
    """Which samples these are. None: the whole batch."""
    images: BatchImages | None = None
    """Images of the samples. None: text alone."""

    def __post_init__(self) -> None:
        self._check_offsets()
        self._check_prompts()
        self._check_lengths()

    @classmethod
    def from_lists(
        cls,
        prompt_ids: Sequence[Sequence[int]],
        response_ids: Sequence[Sequence[int]],
        **columns: Sequence[Sequence[float]] | None,
    ) -> BatchColumns:
        """Return the batch of one list per sample.

        `columns`: response columns, ragged like `response_ids`. `loss_mask` defaults to ones.
        Raises: DataError if a column has other lengths than the responses.
        """
        pairs = list(zip(prompt_ids, response_ids, strict=True))
        rows = [np.asarray([*prompt, *response], np.int32) for prompt, response in pairs]
        responses = np.array([len(response) for _, response in pairs], np.int64)
        flat: dict[str, Any] = {
            name: _flatten(name, column, responses)
            for name, column in columns.items()
            if column is not None
        }
        flat.setdefault("loss_mask", np.ones(int(responses.sum()), np.float32))
        return cls(
            tokens=np.concatenate(rows) if rows else np.zeros(0, np.int32),
            offsets=_offsets(np.array([len(row) for row in rows], np.int64)),
            prompt_lengths=np.array([len(prompt) for prompt, _ in pairs], np.int64),
            **flat,
        )

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    @property
    def lengths(self) -> np.ndarray:
        """[N]: tokens of prompt and response."""
        return np.diff(self.offsets)

    @property
    def response_lengths(self) -> np.ndarray:
        """[N]: tokens of the response."""
        return self.lengths - self.prompt_lengths

    @property
    def response_offsets(self) -> np.ndarray:
        """[N + 1], from 0 to R."""
        return _offsets(self.response_lengths)

    @property
    def rollouts(self) -> np.ndarray:
        """[N] int64: the number of each sample's rollout."""
        return np.arange(len(self)) if self.rollout is None else self.rollout

    @property
    def sample_of(self) -> np.ndarray:
        """[R] int64: the sample of each response token."""
        return np.repeat(np.arange(len(self)), self.response_lengths)

    @property
    def num_response_tokens(self) -> int:
        """R."""
        return len(self.tokens) - int(self.prompt_lengths.sum())

    @property
    def sizes(self) -> BatchSizes:
        """Sizes of the whole batch."""
        if self.part is not None:
            return self.part.sizes
        counted = _offsets(self.loss_mask > 0)[self.response_offsets]
        return BatchSizes(
            self.prompt_lengths, self.response_lengths, self.rollout, np.diff(counted)
        )

    def held(self, samples: np.ndarray) -> np.ndarray:
        """Return one flag for each number of a sample in the whole batch: it is here."""
        if self.part is None:
            return np.ones(len(samples), bool)
        return np.isin(samples, self.part.samples)

    def positions(self, samples: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the positions of samples here, by their numbers in the whole batch. [n] int64."""
        numbers = np.asarray(samples, np.int64)
        if self.part is None:
            return numbers
        held = self.part.samples
        positions = np.searchsorted(held, numbers)
        assert (held[np.minimum(positions, len(held) - 1)] == numbers).all(), "not held"
        return positions

    def response_index(self) -> np.ndarray:
        """Return the index of each response token into a column of the whole batch. [R] int64."""
        if self.part is None:
            return np.arange(self.num_response_tokens)
        return gather_index(_offsets(self.part.sizes.response_lengths), self.part.samples)

    def token_index(self) -> np.ndarray:
        """Return the index of each token into the tokens of the whole batch. [S] int64."""
        if self.part is None:
            return np.arange(len(self.tokens))
        return gather_index(_offsets(self.part.sizes.lengths), self.part.samples)

    def with_columns(self, **columns: Any) -> BatchColumns:
        """Return the same samples with other columns."""
        return replace(self, **columns)

    def select(self, samples: Sequence[int] | np.ndarray) -> BatchColumns:
        """Return these samples, in this order, as a batch of their own.

        `samples`: positions here.
        """
        samples = np.asarray(samples, np.int64)
        tokens = gather_index(self.offsets, samples)
        responses = gather_index(self.response_offsets, samples)
        columns = {name: getattr(self, name) for name in RESPONSE_COLUMNS}
        selected: dict[str, Any] = {
            name: None if column is None else column[responses] for name, column in columns.items()
        }
        return BatchColumns(
            tokens=self.tokens[tokens],
            offsets=_offsets(self.lengths[samples]),
            prompt_lengths=self.prompt_lengths[samples],
            rollout=None if self.rollout is None else self.rollout[samples],
            routed_experts=None if self.routed_experts is None else self.routed_experts[tokens],
            images=None if self.images is None else self.images.select(samples),
            **selected,
        )

    def cut_before(self, token: int) -> BatchColumns:
        """Return the samples as a batch of their own, with responses that end before a token.

        A response without the token stays as it is.
        """
        is_response = np.ones(len(self.tokens), bool)
        for start, length in zip(self.offsets, self.prompt_lengths, strict=False):
            is_response[start : start + length] = False
        kept = np.zeros(0, bool)
        for response in np.split(self.tokens[is_response], self.response_offsets[1:-1]):
            kept = np.append(kept, np.cumsum(response == token) == 0)
        in_tokens = ~is_response
        in_tokens[is_response] = kept
        lengths = np.diff(_offsets(in_tokens)[self.offsets])
        columns = {name: getattr(self, name) for name in RESPONSE_COLUMNS}
        return replace(
            self,
            tokens=self.tokens[in_tokens],
            offsets=_offsets(lengths),
            part=None,
            routed_experts=None if self.routed_experts is None else self.routed_experts[in_tokens],
            **{name: None if column is None else column[kept] for name, column in columns.items()},
        )

    def split(self, column: np.ndarray) -> list[np.ndarray]:
        """Return a flat [R] column as one array per sample."""
        return np.split(column, self.response_offsets[1:-1]) if len(self) else []

    def _check_offsets(self) -> None:
        spans = self.offsets[0] == 0 and self.offsets[-1] == len(self.tokens)
        if len(self.offsets) != len(self.prompt_lengths) + 1 or not spans:
            raise DataError(
                "offsets do not span the tokens",
                where="BatchColumns.offsets",
                found=f"{len(self.offsets)} offsets, {len(self.prompt_lengths)} prompts, "
                f"{len(self.tokens)} tokens",
                expected="one more offset than prompts, the first 0, the last the number of tokens",
            )

    def _check_prompts(self) -> None:
        bad = (self.prompt_lengths < 1) | (self.response_lengths < 0)
        if bad.any():
            row = int(np.argmax(bad))
            raise DataError(
                "a prompt must have a token and fit into its sample",
                where=f"BatchColumns.prompt_lengths[{row}]",
                found=f"prompt {self.prompt_lengths[row]} of {self.lengths[row]} tokens",
                expected="1 <= prompt <= tokens of the sample",
            )

    def _check_lengths(self) -> None:
        expected: dict[str, tuple[int, str]] = dict.fromkeys(
            RESPONSE_COLUMNS, (self.num_response_tokens, "response token")
        )
        expected["rollout"] = (len(self), "sample")
        expected["routed_experts"] = (len(self.tokens), "token")
        for name, (length, unit) in expected.items():
            column = getattr(self, name)
            if column is not None and len(column) != length:
                raise DataError(
                    f"a column must have one value per {unit}",
                    where=f"BatchColumns.{name}",
                    found=len(column),
                    expected=length,
                )


def gather_index(offsets: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """Return the flat positions of the ragged rows `samples`, one row after another, int64."""
    starts = offsets[samples]
    lengths = offsets[samples + 1] - starts
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(total)


def _offsets(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def _flatten(name: str, column: Sequence[Sequence[float]], lengths: np.ndarray) -> np.ndarray:
    """Return a ragged column [R] float32. Raises: DataError naming the first row that differs."""
    found = [len(row) for row in column]
    expected = lengths.tolist()
    if found != expected:
        rows = zip(found, expected, strict=False)
        shorter = min(len(found), len(expected))
        bad = next((row for row, (a, b) in enumerate(rows) if a != b), shorter)
        raise DataError(
            "a column must be as ragged as the responses",
            where=f"BatchColumns.{name}[{bad}]",
            found=f"{len(found)} rows; {(found[bad:] or ['none'])[0]} values here",
            expected=f"{len(expected)} rows; {(expected[bad:] or ['none'])[0]} values here",
        )
    if not found:
        return np.zeros(0, np.float32)
    return np.concatenate([np.asarray(row, np.float32) for row in column])
