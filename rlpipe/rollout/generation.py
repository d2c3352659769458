"""One sampled response, in one piece or in several: reading an engine's answer, joining what went
on after an abort.

Not here: requests (`client`), or samples (`generate`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import numpy as np
import orjson

from rlpipe.errors import EngineError, EngineRejected
from rlpipe.store.routed_experts import appended, read_rows

FINISH_REASONS = ("stop", "length", "abort")
UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, OverflowError)
"""What reading an answer raises that is not as it should be."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One sampled response. `response_ids` and `log_probs` have the same length; `weight_versions`
    are run lengths over it."""

    response_ids: list[int]
    log_probs: list[float]
    """Of the sampled tokens, after division by the temperature; before top-p and top-k."""
    finish_reason: str
    """`stop`, `length` or `abort`."""
    weight_versions: list[tuple[int, str]]
    """(tokens, stamp of the weights that sampled them), in order."""
    engine: str
    """Address that answered: the router's, which does not say which engine it chose."""
    cached_tokens: int
    t_start_s: float
    t_end_s: float
    has_spans: bool = True
    """Does the engine say which weights sampled which token? Else it names one version for the
    whole answer."""
    routed_experts: np.ndarray | None = field(default=None, compare=False)
    """[tokens, layers × k] uint16 of prompt and response, from the first token that they were asked
    for on, as far as an engine read them (see `rlpipe.store.routed_experts`); of a response that
    was cut shorter there may be too many. None: not asked for."""


@dataclass(frozen=True)
class RoutingWanted:
    """Which experts a request asks for."""

    width: int
    """Numbers per token."""
    routed_from: int
    """First token whose experts are wanted."""
    prompt_lengths: list[int]
    """Of each row of the answer."""

    def rows(self, row: int, sampled: int) -> int:
        """Tokens whose experts a whole answer names."""
        return self.prompt_lengths[row] + sampled - 1 - self.routed_from


def nothing_yet(engine: str) -> Generation:
    """A response that was cut off before its first token."""
    now = time.time()
    return Generation([], [], "abort", [], engine, 0, now, now)


def joined(first: Generation, more: Generation) -> Generation:
    """`more` went on where `first` was cut off, and was asked for the experts that `first` does not
    name."""
    runs = list(first.weight_versions)
    for tokens, stamp in more.weight_versions:
        if runs and runs[-1][1] == stamp:
            runs[-1] = (runs[-1][0] + tokens, stamp)
        else:
            runs.append((tokens, stamp))
    return replace(
        more,
        response_ids=first.response_ids + more.response_ids,
        log_probs=first.log_probs + more.log_probs,
        routed_experts=appended(first.routed_experts, more.routed_experts),
        weight_versions=runs,
        cached_tokens=first.cached_tokens,
        t_start_s=first.t_start_s,
    )


def settled(
    generation: Generation, sampling: dict[str, Any], end_ids: Collection[int]
) -> Generation:
    """An aborted response that is finished after all: its last token ends it, or it is as long as
    it may be.

    (An engine that is told to abort says so even if the same forward pass ended the response.)
    `end_ids`: the model's own.
    """
    if generation.finish_reason != "abort":
        return generation
    ends = set(sampling.get("stop_token_ids") or ()) | (
        set() if sampling.get("ignore_eos") else set(end_ids)
    )
    longest = sampling["max_new_tokens"]
    ended = next(
        (place + 1 for place, token in enumerate(generation.response_ids) if token in ends), None
    )
    if ended is not None and ended <= longest:
        return _shortened(generation, ended, "stop")
    return (
        _shortened(generation, longest, "length")
        if len(generation.response_ids) >= longest
        else generation
    )


def _shortened(generation: Generation, tokens: int, reason: str) -> Generation:
    runs = []
    left = tokens
    for count, stamp in generation.weight_versions:
        if left > 0:
            runs.append((min(count, left), stamp))
        left -= count
    return replace(
        generation,
        response_ids=generation.response_ids[:tokens],
        log_probs=generation.log_probs[:tokens],
        weight_versions=runs,
        finish_reason=reason,
    )


def read_generations(
    answer: httpx.Response,
    expected: int,
    engine: str,
    start_s: float,
    where: str,
    routing: RoutingWanted | None = None,
) -> list[Generation]:
    """Read one answer of `/generate`. Raises: EngineRejected if it is not what was asked for;
    EngineError if the engine names no experts although it is asked for them."""
    end_s = time.time()
    try:
        metas = [row["meta_info"] for row in orjson.loads(answer.content)]
        rows = [read_meta(meta, engine, start_s, end_s) for meta in metas]
        if routing is not None and len(rows) == expected:
            rows = [
                _routed(row, meta.get("routed_experts"), routing, n, where)
                for n, (row, meta) in enumerate(zip(rows, metas))  # noqa: B905
            ]
    except UNREADABLE as error:
        raise EngineRejected(
            "the answer cannot be read", where=where, found=f"{error!r} in {answer.text[:300]}"
        ) from error
    if len(rows) != expected:
        raise EngineRejected(
            "the answer has not one row per sample", where=where, found=len(rows), expected=expected
        )
    return rows


def read_meta(meta: dict[str, Any], engine: str, start_s: float, end_s: float) -> Generation:
    """Read SGLang's `meta_info`. Token spans of weight versions exist from 0.5.21 on; before, one
    version per response.

    Raises: one of `UNREADABLE` if it is none.
    """
    reason = meta["finish_reason"]["type"]
    if reason not in FINISH_REASONS:
        raise ValueError(f"finish_reason {reason!r}")
    pairs = (
        meta.get("output_token_logprobs", [])
        if reason == "abort"
        else meta["output_token_logprobs"]
    )
    said = meta.get("weight_versions")
    spans = said or [{"version": meta["weight_version"], "start": 0, "end": len(pairs)}]
    if (
        reason == "abort"
    ):  # of one that waited again when it was aborted, the engine may not know all versions
        pairs = pairs[: spans[-1]["end"]]
    ids = [pair[1] for pair in pairs]
    log_probs = [pair[0] for pair in pairs]
    if not set(map(type, ids)) <= {int}:
        raise TypeError("a token id is not a whole number")
    if not (set(map(type, log_probs)) <= {float, int} and all(map(math.isfinite, log_probs))):
        raise ValueError("a log-probability is not a finite number")
    return Generation(
        response_ids=ids,
        log_probs=log_probs,
        finish_reason=reason,
        weight_versions=_runs(spans, len(pairs)),
        engine=engine,
        cached_tokens=int(meta.get("cached_tokens") or 0),
        t_start_s=start_s,
        t_end_s=end_s,
        has_spans=bool(said) or not pairs,
    )


def _runs(spans: Sequence[dict[str, Any]], tokens: int) -> list[tuple[int, str]]:
    """(tokens, version) of spans, which follow each other up to the last token. Raises: ValueError
    if they do not."""
    ends = [0, *(span["end"] for span in spans)]
    if (
        not all(span["start"] == end <= span["end"] for span, end in zip(spans, ends, strict=False))
        or ends[-1] != tokens
    ):
        raise ValueError(f"weight_versions do not cover the {tokens} tokens once")
    if any(not isinstance(span["version"], str) for span in spans):
        raise TypeError("a weight version is not text")
    return [
        (span["end"] - span["start"], span["version"])
        for span in spans
        if span["end"] > span["start"]
    ]


def check_asked(
    generations: Sequence[Generation], vocab_size: int, max_new_tokens: int | None, where: str
) -> None:
    """Raises: EngineRejected for a response that is longer than was asked for (an aborted one is
    cut: `settled`), or has tokens that are not in the vocabulary."""
    for generation in generations:
        ids = generation.response_ids
        if (
            max_new_tokens is not None
            and len(ids) > max_new_tokens
            and generation.finish_reason != "abort"
        ):
            found = f"{len(ids)} tokens"
            expected = f"at most {max_new_tokens} (max_new_tokens)"
            raise EngineRejected(
                "the answer is longer than was asked for",
                where=where,
                found=found,
                expected=expected,
            )
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            found = next(token for token in ids if not 0 <= token < vocab_size)
            expected = f"0 <= id < {vocab_size}"
            raise EngineRejected(
                "a sampled token is not in the vocabulary",
                where=where,
                found=found,
                expected=expected,
            )


def _routed(
    generation: Generation, encoded: str | None, routing: RoutingWanted, row: int, where: str
) -> Generation:
    """With the experts of its tokens. What was aborted while it waited may have none; of what is
    asked next, they are."""
    sampled = len(generation.response_ids)
    if not sampled or (encoded is None and generation.finish_reason == "abort"):
        return generation
    if encoded is None:
        raise EngineError(
            "the engine does not say which experts it routed tokens to",
            where=where,
            found="an answer without routed_experts",
            expected="them, which train.use_rollout_routing_replay needs",
            do="start the engine with --enable-return-routed-experts, or use train.use_routing_replay",
        )
    return replace(
        generation, routed_experts=read_rows(encoded, routing.rows(row, sampled), routing.width)
    )


def no_spans(where: str) -> EngineError:
    """The error of an engine with which `sync.in_flight = in_place` would mix up weight
    versions."""
    return EngineError(
        "the engine does not say which weights sampled which token",
        where=where,
        found="answers without weight_versions: SGLang older than 0.5.21",
        expected="spans of weight versions, which sync.in_flight = in_place needs",
        do="set sync.in_flight to abort or drain, or install SGLang 0.5.21",
    )
