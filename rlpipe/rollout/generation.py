"""One sampled response, in one piece or in several: reading an engine's answer, joining what went on after an abort.

Not here: requests (`client`), or samples (`generate`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import httpx
import orjson

from rlpipe.errors import EngineError, EngineRejected


@dataclass(frozen=True, slots=True)
class Generation:
    """One sampled response. `response_ids` and `log_probs` have the same length; `weight_versions` are run lengths over it."""

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
    """Does the engine say which weights sampled which token? Else it names one version for the whole answer."""


def nothing_yet(engine: str) -> Generation:
    """A response that was cut off before its first token."""
    now = time.time()
    return Generation([], [], "abort", [], engine, 0, now, now)


def joined(first: Generation, more: Generation) -> Generation:
    """`more` went on where `first` was cut off."""
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
        weight_versions=runs,
        cached_tokens=first.cached_tokens,
        t_start_s=first.t_start_s,
    )


def settled(generation: Generation, sampling: dict[str, Any], end_ids: Collection[int]) -> Generation:
    """An aborted response that is finished after all: its last token ends it, or it is as long as it may be.

    (An engine that is told to abort says so even if the same forward pass ended the response.) `end_ids`: the model's own.
    """
    if generation.finish_reason != "abort":
        return generation
    ends = set(sampling.get("stop_token_ids") or ()) | (set() if sampling.get("ignore_eos") else set(end_ids))
    longest = sampling["max_new_tokens"]
    ended = next((place + 1 for place, token in enumerate(generation.response_ids) if token in ends), None)
    if ended is not None and ended <= longest:
        return _shortened(generation, ended, "stop")
    return _shortened(generation, longest, "length") if len(generation.response_ids) >= longest else generation


def _shortened(generation: Generation, tokens: int, reason: str) -> Generation:
    runs, left = [], tokens
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


def read_generations(answer: httpx.Response, expected: int, engine: str, start_s: float, where: str) -> list[Generation]:
    """Read one answer of `/generate`. Raises: EngineRejected if it is not what was asked for."""
    end_s = time.time()
    try:
        rows = [_read(row["meta_info"], engine, start_s, end_s) for row in orjson.loads(answer.content)]
    except (KeyError, TypeError, ValueError) as error:
        raise EngineRejected("the answer cannot be read", where=where, found=f"{error!r} in {answer.text[:300]}") from error
    if len(rows) != expected:
        raise EngineRejected("the answer has not one row per sample", where=where, found=len(rows), expected=expected)
    return rows


def _read(meta: dict[str, Any], engine: str, start_s: float, end_s: float) -> Generation:
    """Read SGLang's `meta_info`. Token spans of weight versions exist from 0.5.21 on; before, one version per response."""
    reason = meta["finish_reason"]["type"]
    pairs = meta.get("output_token_logprobs", []) if reason == "abort" else meta["output_token_logprobs"]
    if not all(map(math.isfinite, (pair[0] for pair in pairs))):
        raise ValueError("a log-probability is not finite")
    said = meta.get("weight_versions")
    spans = said or [{"version": meta["weight_version"], "start": 0, "end": len(pairs)}]
    return Generation(
        response_ids=[pair[1] for pair in pairs],
        log_probs=[pair[0] for pair in pairs],
        finish_reason=reason,
        weight_versions=[(span["end"] - span["start"], span["version"]) for span in spans if span["end"] > span["start"]],
        engine=engine,
        cached_tokens=meta.get("cached_tokens", 0),
        t_start_s=start_s,
        t_end_s=end_s,
        has_spans=bool(said) or not pairs,
    )


def no_spans(where: str) -> EngineError:
    """The error of an engine with which `sync.in_flight = in_place` would mix up weight versions."""
    return EngineError(
        "the engine does not say which weights sampled which token",
        where=where,
        found="answers without weight_versions: SGLang older than 0.5.21",
        expected="spans of weight versions, which sync.in_flight = in_place needs",
        do="set sync.in_flight to abort or drain, or install SGLang 0.5.21",
    )
