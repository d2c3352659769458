"""Read an engine's answer to `/generate`, and join the pieces of a response that was aborted.

Entry points: `read_generations` reads an answer, `joined` appends the continuation of an aborted
response, `settled` recognizes an aborted response that had ended, `check_lengths_and_ids` compares
an answer with its request.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import httpx
import numpy as np
import orjson

from rlpipe.errors import EngineError, EngineRejected
from rlpipe.store.routed_experts import appended, read_rows
from rlpipe.system.garbage import collections_paused

FINISH_REASONS = ("stop", "length", "abort")
UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, OverflowError)
"""Exceptions that a malformed answer raises while it is read."""

Version = TypeVar("Version", int, str)
TopLogProbs = list[tuple[float, int]]
"""Log-prob and id of the most probable tokens at one position."""
_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")


def has_grammar(sampling: Mapping[str, Any]) -> bool:
    """True if SGLang's sampling parameters restrict the text to a grammar."""
    return any(sampling.get(name) for name in _GRAMMARS)


@dataclass(frozen=True, slots=True)
class Generation:
    """One sampled response. `response_ids` and `log_probs` have the same length; `weight_versions`
    are run lengths over them."""

    response_ids: list[int]
    log_probs: list[float]
    """Log-probs of the sampled tokens, after division by the temperature, before top-p and
    top-k."""
    finish_reason: str
    """`stop`, `length` or `abort`."""
    weight_versions: list[tuple[int, str]]
    """(number of tokens, stamp of the weights that sampled them), in order."""
    engine: str
    """Address that answered. Behind a router this is the router's address: the router does not name
    the engine that it chose."""
    cached_tokens: int
    t_start_s: float
    t_end_s: float
    has_spans: bool = True
    """True if the engine reports the weight version of each token. False if it names one version
    for the whole answer."""
    routed_experts: np.ndarray | None = field(default=None, compare=False)
    """[tokens, layers × k] uint16: experts of prompt and response tokens, from the first requested
    token to the last token that an engine read (see `rlpipe.store.routed_experts`). A shortened
    response may have too many rows. None: not requested."""
    top_log_probs: list[TopLogProbs] | None = field(default=None, compare=False)
    """The most probable tokens at each position. None: not requested."""
    verify_steps: int = field(default=0, compare=False)
    """Forward passes of the model in speculative decoding. 0: no speculative decoding."""


@dataclass(frozen=True)
class RoutingWanted:
    """Rows of routed experts that a request asks the engine to return."""

    width: int
    """Numbers per token."""
    routed_from: int
    """First token that needs a row."""
    prompt_lengths: list[int]
    """Prompt tokens of each row of the answer."""

    def num_rows(self, row: int, num_sampled: int) -> int:
        """Return the number of tokens that have experts in a complete answer."""
        # An engine reads a token when it samples the next one: the last token has no experts.
        return self.prompt_lengths[row] + num_sampled - 1 - self.routed_from


def merged_runs(runs: Iterable[tuple[int, Version]]) -> list[tuple[int, Version]]:
    """Merge neighbouring run lengths `(tokens, version)` of equal version; drop empty runs."""
    merged: list[tuple[int, Version]] = []
    for tokens, version in runs:
        if merged and merged[-1][1] == version:
            merged[-1] = (merged[-1][0] + tokens, version)
        elif tokens:
            merged.append((tokens, version))
    return merged


def runs_of(versions: Iterable[int]) -> list[tuple[int, int]]:
    """Return the run lengths `(tokens, version)` of one version per token."""
    return merged_runs((1, version) for version in versions)


def empty_generation(engine: str) -> Generation:
    """Return a response that was aborted before its first token."""
    now_s = time.time()
    return Generation([], [], "abort", [], engine, 0, now_s, now_s)


def joined(first: Generation, more: Generation) -> Generation:
    """Append `more`, the continuation of the aborted response `first`.

    `more` has experts only for the tokens that have none in `first`.
    """
    return replace(
        more,
        response_ids=first.response_ids + more.response_ids,
        log_probs=first.log_probs + more.log_probs,
        routed_experts=appended(first.routed_experts, more.routed_experts),
        top_log_probs=_joined_top(first, more),
        weight_versions=merged_runs([*first.weight_versions, *more.weight_versions]),
        cached_tokens=first.cached_tokens,
        verify_steps=first.verify_steps + more.verify_steps,
        t_start_s=first.t_start_s,
    )


def _joined_top(first: Generation, more: Generation) -> list[TopLogProbs] | None:
    if first.top_log_probs is None and more.top_log_probs is None:
        return None
    return [*(first.top_log_probs or ()), *(more.top_log_probs or ())]


def settled(
    generation: Generation, sampling: dict[str, Any], end_ids: Collection[int]
) -> Generation:
    """Return an aborted response as finished if it ends with a stop token or has full length.

    `end_ids` are the model's end-of-sequence tokens.
    """
    # An engine that is told to abort reports `abort` even if the same forward pass ended the
    # response. Continuing such a response would sample tokens after its end.
    if generation.finish_reason != "abort":
        return generation
    stop_ids = set(sampling.get("stop_token_ids") or ())
    if not sampling.get("ignore_eos"):
        stop_ids |= set(end_ids)
    max_new_tokens = sampling["max_new_tokens"]
    lengths = (n for n, token in enumerate(generation.response_ids, start=1) if token in stop_ids)
    stopped_length = next(lengths, None)
    if stopped_length is not None and stopped_length <= max_new_tokens:
        return _shortened(generation, stopped_length, "stop")
    if len(generation.response_ids) >= max_new_tokens:
        return _shortened(generation, max_new_tokens, "length")
    return generation


def _shortened(generation: Generation, num_tokens: int, reason: str) -> Generation:
    runs = []
    remaining = num_tokens
    for count, stamp in generation.weight_versions:
        if remaining > 0:
            runs.append((min(count, remaining), stamp))
        remaining -= count
    return replace(
        generation,
        response_ids=generation.response_ids[:num_tokens],
        log_probs=generation.log_probs[:num_tokens],
        top_log_probs=generation.top_log_probs and generation.top_log_probs[:num_tokens],
        weight_versions=runs,
        finish_reason=reason,
    )


def read_generations(
    answer: httpx.Response,
    num_expected: int,
    engine: str,
    start_s: float,
    where: str,
    routing: RoutingWanted | None = None,
) -> list[Generation]:
    """Read the answer to one `/generate` request.

    Raises: EngineRejected if the answer cannot be read or has another number of rows; EngineError
    if the request wants routed experts and the answer has none.
    """
    end_s = time.time()
    try:
        # An answer has a list for each token. Collections that look for cycles among them take half
        # of the time.
        with collections_paused():
            metas = [row["meta_info"] for row in orjson.loads(answer.content)]
            rows = [read_meta(meta, engine, start_s, end_s) for meta in metas]
            if routing is not None and len(rows) == num_expected:
                rows = [
                    _with_experts(row, meta.get("routed_experts"), routing, n, where)
                    for n, (row, meta) in enumerate(zip(rows, metas))  # noqa: B905
                ]
            del metas
    except UNREADABLE as error:
        raise EngineRejected(
            "the answer cannot be read", where=where, found=f"{error!r} in {answer.text[:300]}"
        ) from error
    if len(rows) != num_expected:
        raise EngineRejected(
            "the answer does not have one row per sample",
            where=where,
            found=len(rows),
            expected=num_expected,
        )
    return rows


def read_meta(meta: dict[str, Any], engine: str, start_s: float, end_s: float) -> Generation:
    """Read SGLang's `meta_info`. Raises: one of `UNREADABLE` if it is malformed."""
    reason = meta["finish_reason"]["type"]
    if reason not in FINISH_REASONS:
        raise ValueError(f"finish_reason {reason!r}")
    if reason == "abort":
        pairs = meta.get("output_token_logprobs", [])
    else:
        pairs = meta["output_token_logprobs"]
    # SGLang reports spans of weight versions since 0.5.21, before that one version per response.
    reported_spans = meta.get("weight_versions")
    spans = reported_spans or [{"version": meta["weight_version"], "start": 0, "end": len(pairs)}]
    if reason == "abort":
        # A request that waited in the queue again when it was aborted may have tokens whose
        # versions the engine no longer knows. They are dropped.
        pairs = pairs[: spans[-1]["end"]]
    ids = [pair[1] for pair in pairs]
    log_probs = [pair[0] for pair in pairs]
    if not set(map(type, ids)) <= {int}:
        raise TypeError("a token id is not an integer")
    if not (set(map(type, log_probs)) <= {float, int} and all(map(math.isfinite, log_probs))):
        raise ValueError("a log-prob is not a finite number")
    return Generation(
        response_ids=ids,
        log_probs=log_probs,
        finish_reason=reason,
        weight_versions=_runs_of_spans(spans, len(pairs)),
        engine=engine,
        cached_tokens=int(meta.get("cached_tokens") or 0),
        verify_steps=int(meta.get("spec_verify_ct") or 0),
        t_start_s=start_s,
        t_end_s=end_s,
        has_spans=bool(reported_spans) or not pairs,
        top_log_probs=_read_top(meta.get("output_top_logprobs"), len(pairs)),
    )


def _read_top(positions: list[list[Any]] | None, num_tokens: int) -> list[TopLogProbs] | None:
    """Read SGLang's `output_top_logprobs`. Raises: ValueError if positions are missing."""
    if not positions:
        return None
    if len(positions) < num_tokens:
        raise ValueError(f"top log-probs of {len(positions)} of {num_tokens} tokens")
    return [
        [(float(entry[0]), int(entry[1])) for entry in position]
        for position in positions[:num_tokens]
    ]


def _runs_of_spans(spans: Sequence[dict[str, Any]], num_tokens: int) -> list[tuple[int, str]]:
    """Return (tokens, version) of consecutive spans. Raises: ValueError if the spans have gaps,
    overlap or do not end at the last token; TypeError if a version is not a string."""
    ends = [0, *(span["end"] for span in spans)]
    consecutive = all(
        span["start"] == previous_end <= span["end"]
        for span, previous_end in zip(spans, ends, strict=False)
    )
    if not consecutive or ends[-1] != num_tokens:
        raise ValueError(f"weight_versions do not cover the {num_tokens} tokens once")
    if any(not isinstance(span["version"], str) for span in spans):
        raise TypeError("a weight version is not a string")
    return [
        (span["end"] - span["start"], span["version"])
        for span in spans
        if span["end"] > span["start"]
    ]


def check_lengths_and_ids(
    generations: Sequence[Generation], vocab_size: int, max_new_tokens: int | None, where: str
) -> None:
    """Raises: EngineRejected if a response is longer than `max_new_tokens` or has a token id
    outside the vocabulary."""
    for generation in generations:
        ids = generation.response_ids
        # `settled` shortens aborted responses, so a longer one is no error.
        aborted = generation.finish_reason == "abort"
        if max_new_tokens is not None and len(ids) > max_new_tokens and not aborted:
            raise EngineRejected(
                "the response is longer than max_new_tokens",
                where=where,
                found=f"{len(ids)} tokens",
                expected=f"at most {max_new_tokens} (max_new_tokens)",
            )
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            raise EngineRejected(
                "a sampled token is not in the vocabulary",
                where=where,
                found=next(token for token in ids if not 0 <= token < vocab_size),
                expected=f"0 <= id < {vocab_size}",
            )


def _with_experts(
    generation: Generation, encoded: str | None, routing: RoutingWanted, row: int, where: str
) -> Generation:
    """Add the routed experts to a response."""
    num_sampled = len(generation.response_ids)
    # A request that was aborted in the queue may have no experts. The continuation requests them.
    if not num_sampled or (encoded is None and generation.finish_reason == "abort"):
        return generation
    if encoded is None:
        raise EngineError(
            "the engine does not return routed experts",
            where=where,
            found="an answer without routed_experts",
            expected="routed_experts, which train.use_rollout_routing_replay needs",
            do="start the engine with --enable-return-routed-experts, "
            "or use train.use_routing_replay",
        )
    experts = read_rows(encoded, routing.num_rows(row, num_sampled), routing.width)
    return replace(generation, routed_experts=experts)


def no_spans(where: str) -> EngineError:
    """Return the error for an engine that cannot report the weight version of each token.

    With `sync.in_flight = in_place` the tokens of one response have several versions.
    """
    return EngineError(
        "the engine does not report the weight version of each token",
        where=where,
        found="answers without weight_versions: SGLang older than 0.5.21",
        expected="spans of weight versions, which sync.in_flight = in_place needs",
        do="set sync.in_flight to abort or drain, or install SGLang 0.5.21",
    )
