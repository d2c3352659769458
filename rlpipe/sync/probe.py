"""Check after a push that engines and trainer compute the same log-probs.

The trainer scores a few samples of the batch with the pushed weights at temperature 1, and each
engine scores the same samples. With d = engine's log-prob - trainer's log-prob, p = the trainer's
probability and sums over all response tokens, two statistics decide:

    difference    = Σ p |d| / Σ p
    stale share   = Σ p u d / Σ p u²    u = (trainer's log-prob before the update - after it) - mean

`difference` finds weights that are wrong as a whole or in part: a tensor that never arrived, two
swapped tensors, a transposed one, a layer of another model. Its bound depends on the engines'
dtype. It is raised by the trainer's own noise: the trainer scores the same samples twice, packed
differently.

`stale share` finds engines that still hold the weights before the update. Their log-probs can
differ by less than the bound. The share is 0 if an engine has the update and 1 if not. It counts
only if the update moves the probed tokens by several times more than rounding does.

The largest |d| of one token is reported and decides nothing. In bf16 the logits of a policy that
becomes deterministic grow, and their rounding errors with them. An improbable token shows the whole
error: 0.10 became 0.35, once 0.53, over 80 healthy iterations of a GRPO run. A probable token shows
(1 - p) of the error, so the weights p keep the mean steady.

Neither statistic finds:

- a tensor of which the change moves no probed token by more than rounding: the weights of an expert
  that no probed token uses, or one tensor that misses one update at a small learning rate, until
  the missed changes add up;
- a wrong sampling setting.

`sync.check_weight_update_equal` compares every byte, at the cost of a second push.

Measured in bf16 on H100s (SGLang 0.5.15, 0.6M parameters, 8 samples, 57 tokens): over 600 pushes of
three healthy runs, in which the probability of a token rose to 0.95, `difference` was at most 0.004
and `stale share` never counted, while the largest |d| reached 0.39. With the previous version on
the engine, `stale share` counts in 64 % of the pushes of such a run. It counts in 2 of 8 pushes
once the probability of a token is 0.95 and single tokens carry most of an update. An engine that is
always one version behind is thus found within a few pushes, not by the first.
Planted faults: tests/sync/planted.py.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rlpipe.batch.columns import BatchColumns
from rlpipe.engines.sglang.admin import Engine
from rlpipe.engines.sglang.image_inputs import image_data
from rlpipe.errors import DeadlineExceeded

BOUNDS = {"float32": 1e-4, "bfloat16": 0.1, "fp8": 0.3}
"""Bound of `difference` in nats, by the engines' quantization, else by the model's dtype.

0.1 is the limit of slime's own CI (`--ci-train-rollout-logprob-abs-diff-threshold`)."""
NOISE_FACTOR = 5.0
"""A `difference` up to this many times the trainer's own noise is accepted."""
VISIBLE = 2.0
"""An update is visible if its root mean square is this many times that of the noise."""
LARGEST_LEVERAGE = 0.8
"""Limit on one token's part of the update's weighted square. Beyond it one rounding error would
decide."""
STALE_SHARE = 0.5
"""A stale share counts above this: half of the update is missing."""
STALE_ERRORS = 4.0
"""A stale share counts if it is this many of its standard errors."""


@dataclass(frozen=True)
class Probe:
    """The trainer's scores of the probed samples. Shapes [R]: all response tokens."""

    samples: BatchColumns
    log_probs: np.ndarray
    """float32, with the pushed weights at temperature 1."""
    noise: float
    """`difference` between two scorings of the same weights, packed differently."""
    update: np.ndarray | None
    """float32, log-probs before the update - after it; None without scores from before."""


@dataclass(frozen=True)
class Agreement:
    """Differences between one engine and the trainer, in nats."""

    engine: str
    difference: float
    largest: float
    noise: float
    stale_share: float | None
    """None if the update cannot be seen in the probed tokens."""
    stale_error: float | None
    """Standard error of `stale_share`."""

    def fault(self, bound: float) -> str | None:
        """Return the fault of the engine's weights; None without one."""
        if not self.difference <= max(bound, NOISE_FACTOR * self.noise):
            return f"{self.engine}: log-probs differ by {self.difference:.3g} on average"
        if self.stale_share is None or self.stale_error is None:
            return None
        if self.stale_share > max(STALE_SHARE, STALE_ERRORS * self.stale_error):
            return f"{self.engine}: {self.stale_share:.0%} of the last update is missing"
        return None


def probe_metrics(agreements: list[Agreement]) -> dict[str, float]:
    """Return the metrics of a sync stage, those of the worst engine."""
    worst = max(agreements, key=lambda agreement: agreement.difference)
    metrics = {
        "sync/logprob_difference": worst.difference,
        "sync/logprob_difference_max": max(agreement.largest for agreement in agreements),
        "sync/logprob_noise": worst.noise,
    }
    shares = [
        agreement.stale_share for agreement in agreements if agreement.stale_share is not None
    ]
    if shares:
        metrics["sync/stale_share"] = max(shares)
    return metrics


def spread(num_samples: int, num_probed: int) -> np.ndarray:
    """Return the indices of `num_probed` samples of a batch, evenly spread over its prompts."""
    return np.unique(np.linspace(0, num_samples - 1, min(num_probed, num_samples)).astype(np.int64))


def mean_difference(log_probs: np.ndarray, other: np.ndarray) -> float:
    """Return Σ p |other - log_probs| / Σ p with p = exp(log_probs), in nats; inf for NaN.

    Shapes: log_probs, other [R] float32. Returns 0 without tokens.
    """
    if not len(log_probs):
        return 0.0
    # Relative to the largest: if every token is improbable, the weights do not underflow.
    weights = np.exp((log_probs - log_probs.max()).astype(np.float64))
    differences = np.abs(other.astype(np.float64) - log_probs)
    mean = float((weights * differences).sum() / weights.sum())
    return mean if np.isfinite(mean) else float("inf")


def stale_share(
    log_probs: np.ndarray, engine: np.ndarray, update: np.ndarray
) -> tuple[float, float] | None:
    """Return the share of the update that an engine misses, and its standard error.

    The least-squares coefficient of d = engine - log_probs on the centred update, weighted by
    probability. The error is heteroscedasticity-consistent (HC3: MacKinnon and White 1985). None
    if the update is not visible, or if one token decides the coefficient alone.

    Shapes: log_probs, engine, update [R] float32.
    """
    if len(log_probs) < 2:
        return None
    weights = np.exp((log_probs - log_probs.max()).astype(np.float64))
    weights /= weights.sum()
    moved = update - (weights * update).sum()
    difference = engine.astype(np.float64) - log_probs
    difference -= (weights * difference).sum()
    size = (weights * moved**2).sum()
    if not size > 0:
        return None
    share = (weights * moved * difference).sum() / size
    rest = difference - share * moved
    # Noise as large as the update correlates with it: the trainer's rounding is in both.
    if not size > VISIBLE**2 * (weights * rest**2).sum():
        return None
    leverage = weights * moved**2 / size
    if leverage.max() > LARGEST_LEVERAGE:
        return None
    rest /= 1 - leverage
    error = np.sqrt((weights**2 * moved**2 * rest**2).sum()) / size
    return float(share), float(error)


def compare(
    probe: Probe, engines: list[str], timeout_s: float, *, at_once: bool
) -> list[dict[str, Any]]:
    """Have each engine score the probed samples; return an `Agreement` of each as a dict.

    `timeout_s`: deadline of all engines together. `at_once`: engines score at the same time;
    otherwise one after another, for engines that share the cores of one machine.
    Raises: EngineError, DeadlineExceeded.
    """
    samples = probe.samples
    sequences = [row.tolist() for row in np.split(samples.tokens, samples.offsets[1:-1])]
    images = _image_data(samples)
    scores = asyncio.run(_score_all(engines, sequences, images, timeout_s, at_once=at_once))
    return [asdict(_agreement(probe, url, rows)) for url, rows in zip(engines, scores, strict=True)]


def _image_data(samples: BatchColumns) -> list[list[dict[str, Any]]] | None:
    """Return the images of each sample for an engine; None without images."""
    if (images := samples.images) is None:
        return None
    rows = []
    for sample in range(len(samples)):
        here = images.of_sample(sample)
        pixels = [images.pixels[digest] for digest in images.digests[here]]
        rows.append(image_data(np.concatenate(pixels), images.grids[here]) if pixels else [])
    return rows


def _agreement(probe: Probe, url: str, rows: list[list[float]]) -> Agreement:
    responses = [
        row[prompt - 1 :] for row, prompt in zip(rows, probe.samples.prompt_lengths, strict=True)
    ]
    engine = np.concatenate([np.asarray(row, np.float32) for row in responses])
    stale = None
    if probe.update is not None:
        stale = stale_share(probe.log_probs, engine, probe.update)
    largest = np.abs(engine - probe.log_probs).max(initial=0.0)
    return Agreement(
        engine=url,
        difference=mean_difference(probe.log_probs, engine),
        largest=float(np.nan_to_num(largest, nan=np.inf)),
        noise=probe.noise,
        stale_share=stale[0] if stale else None,
        stale_error=stale[1] if stale else None,
    )


async def _score_all(
    engines: list[str],
    sequences: list[list[int]],
    images: list[list[dict[str, Any]]] | None,
    deadline_s: float,
    *,
    at_once: bool,
) -> list[list[list[float]]]:
    """Return the scores of every engine, in order."""
    slots = asyncio.Semaphore(len(engines) if at_once else 1)
    waiting = list(engines)

    async def score_on(url: str) -> list[list[float]]:
        async with slots, Engine(url, deadline_s=deadline_s) as engine:
            scores = await engine.score(sequences, images)
        waiting.remove(url)
        return scores

    try:
        async with asyncio.timeout(deadline_s):
            return await asyncio.gather(*map(score_on, engines))
    except TimeoutError as error:
        if isinstance(error, DeadlineExceeded):
            raise
        raise DeadlineExceeded(
            "the engines did not score the samples in time",
            where=", ".join(waiting),
            expected=f"all within {deadline_s:g} s",
        ) from error
