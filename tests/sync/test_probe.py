"""Log-probs of engines and trainer are compared (rlpipe.sync.probe).

The policies are linear: logits = hidden states × head, each rounded to bfloat16. A real engine:
`test_probe_gpu`, and every run of tests/flows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rlpipe.batch.columns import BatchColumns
from rlpipe.errors import DeadlineExceeded
from rlpipe.sync import probe
from rlpipe.sync.probe import (
    BOUNDS,
    Agreement,
    Probe,
    mean_difference,
    probe_metrics,
    spread,
    stale_share,
)

TOKENS = 64
SIZE = 96
BOUND = BOUNDS["bfloat16"]


class Linear:
    """A policy whose logits are `sharpness` times those of random features."""

    def __init__(self, sharpness: float, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.hidden = torch.randn(TOKENS, SIZE, generator=generator)
        self.head = torch.randn(SIZE, SIZE, generator=generator) * sharpness / SIZE**0.5
        self.step = torch.randn(SIZE, SIZE, generator=generator) * 0.02 * sharpness / SIZE**0.5
        log_probs = torch.log_softmax(self.hidden @ self.head.T, -1)
        self.tokens = torch.multinomial(log_probs.exp(), 1, generator=generator)

    @property
    def before(self) -> torch.Tensor:
        """The head before the last update."""
        return self.head - self.step

    def trainer(self, head: torch.Tensor) -> np.ndarray:
        """Log-probs of the tokens, with the head and the hidden states in bf16."""
        logits = self.hidden.bfloat16().float() @ head.bfloat16().float().T
        return torch.log_softmax(logits, -1).gather(-1, self.tokens)[:, 0].numpy()

    def engine(self, head: torch.Tensor) -> np.ndarray:
        """The same in another kernel: halves are summed in bf16, and the logits are rounded."""
        hidden = self.hidden.bfloat16()
        head = head.bfloat16()
        half = SIZE // 2
        logits = hidden[:, :half] @ head[:, :half].T + hidden[:, half:] @ head[:, half:].T
        return torch.log_softmax(logits.float(), -1).gather(-1, self.tokens)[:, 0].numpy()

    def agreement(self, head: torch.Tensor) -> Agreement:
        """Compare an engine that holds `head` with the trainer."""
        log_probs = self.trainer(self.head)
        scores = self.engine(head)
        update = self.trainer(self.before) - log_probs
        stale = stale_share(log_probs, scores, update)
        return Agreement(
            engine="http://a",
            difference=mean_difference(log_probs, scores),
            largest=float(np.abs(scores - log_probs).max()),
            noise=0.0,
            stale_share=stale[0] if stale else None,
            stale_error=stale[1] if stale else None,
        )


def _half_stale(policy: Linear) -> torch.Tensor:
    """Half of the columns are those of another model: a shard that never arrived."""
    head = policy.head.clone()
    head[:, : SIZE // 2] = policy.step[:, : SIZE // 2] * 50
    return head


FAULTS: dict[str, Callable[[Linear], torch.Tensor]] = {
    "transposed": lambda policy: policy.head.T,
    "rows swapped": lambda policy: policy.head.flip(0),
    "never sent": lambda policy: policy.step * 50,
    "half never sent": _half_stale,
    "zeros": lambda policy: torch.zeros_like(policy.head),
    "version before": lambda policy: policy.before,
}


def test_300_pushes_of_an_ever_more_deterministic_policy_pass_although_one_token_differs():
    largest = []
    for number, sharpness in enumerate(np.geomspace(1, 40, 300)):
        policy = Linear(float(sharpness), seed=number)
        agreement = policy.agreement(policy.head)
        largest.append(agreement.largest)
        assert agreement.fault(BOUND) is None, (number, agreement)
    assert max(largest) > 0.3, "which an earlier check took for a fault"


@pytest.mark.parametrize("sharpness", [2.0, 8.0])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_push_is_found(fault: str, sharpness: float):
    policy = Linear(sharpness, seed=7)
    assert policy.agreement(FAULTS[fault](policy)).fault(BOUND) is not None


def test_the_weights_of_the_version_before_are_found_below_the_bound():
    policy = Linear(3.0, seed=3)
    agreement = policy.agreement(policy.before)
    assert agreement.difference < BOUND
    assert agreement.stale_share == pytest.approx(1.0, abs=0.2)
    assert "of the last update is missing" in str(agreement.fault(BOUND))


def test_an_update_that_rounding_hides_is_not_judged():
    policy = Linear(3.0, seed=3)
    log_probs = policy.trainer(policy.head)
    scores = policy.engine(policy.head)
    assert stale_share(log_probs, scores, (scores - log_probs) * 0.1) == pytest.approx(
        (10.0, 0.0), abs=1e-3
    )
    noise = np.random.default_rng(0).normal(0, 1e-3, len(log_probs)).astype(np.float32)
    assert stale_share(log_probs, scores, noise) is None
    assert stale_share(log_probs, scores, np.zeros_like(log_probs)) is None


def test_one_token_alone_does_not_make_an_engine_stale():
    random = np.random.default_rng(0)
    log_probs = np.full(41, -0.01, np.float32)
    update = random.normal(0, 1e-3, 41).astype(np.float32)
    difference = random.normal(0, 3e-3, 41).astype(np.float32)
    log_probs[0], update[0], difference[0] = -2.0, 2.0, 1.2
    assert stale_share(log_probs, log_probs + difference, update) is None


def test_improbable_tokens_count_for_little_and_nan_for_a_fault():
    log_probs = np.log(np.array([0.9, 0.001], np.float32))
    assert mean_difference(
        log_probs, log_probs + np.array([0.0, 1.0], np.float32)
    ) == pytest.approx(0.001 / 0.901)
    assert mean_difference(log_probs, np.array([np.nan, -1.0], np.float32)) == float("inf")
    assert mean_difference(log_probs[:0], log_probs[:0]) == 0.0
    assert Agreement("http://a", float("inf"), 0.0, 0.0, None, None).fault(BOUND) is not None
    assert Agreement("http://a", float("nan"), 0.0, 0.0, None, None).fault(BOUND) is not None


def test_the_noise_of_the_trainer_raises_the_bound():
    assert Agreement("http://a", 0.4, 1.0, 0.1, None, None).fault(BOUND) is None
    assert Agreement("http://a", 0.6, 1.0, 0.1, None, None).fault(BOUND) is not None


def test_samples_are_spread_over_the_batch():
    assert spread(256, 8)[[0, -1]].tolist() == [0, 255]
    assert len(spread(256, 8)) == 8
    assert spread(3, 8).tolist() == [0, 1, 2]
    assert spread(1, 1).tolist() == [0]


def test_metrics_are_those_of_the_worst_engine():
    found = probe_metrics(
        [Agreement("a", 0.1, 3.0, 0.02, 0.2, 0.1), Agreement("b", 0.3, 1.0, 0.02, None, None)]
    )
    assert found == {
        "sync/logprob_difference": 0.3,
        "sync/logprob_difference_max": 3.0,
        "sync/logprob_noise": 0.02,
        "sync/stale_share": 0.2,
    }


SAMPLES = BatchColumns.from_lists([[1, 2]], [[3, 4]])
TRAINER = Probe(SAMPLES, np.array([-1.0, -2.0], np.float32), noise=0.0, update=None)
ENGINES = ["http://a", "http://b", "http://c"]


class Engine:
    """Scores of all engines, and the number of concurrent calls. `hangs` never answers."""

    now = most = 0
    hangs: str | None = None

    def __init__(self, url: str, *, deadline_s: float) -> None:
        self.url = url

    async def __aenter__(self) -> Engine:
        return self

    async def __aexit__(self, *_error: object) -> None: ...

    async def score(
        self, sequences: list[list[int]], images: list[list[dict[str, Any]]] | None = None
    ) -> list[list[float]]:
        assert sequences == [[1, 2, 3, 4]] and images is None
        Engine.now += 1
        Engine.most = max(Engine.most, Engine.now)
        await asyncio.sleep(600 if self.url == Engine.hangs else 0.01)
        Engine.now -= 1
        return [[-9.0, -1.0, -2.5 if self.url == "http://b" else -2.0]]


@pytest.fixture(autouse=True)
def _engines(monkeypatch: pytest.MonkeyPatch) -> None:
    Engine.now = 0
    Engine.most = 0
    Engine.hangs = None
    monkeypatch.setattr(probe, "Engine", Engine)


@pytest.mark.parametrize(("at_once", "most"), [(True, 3), (False, 1)])
def test_engines_score_at_the_same_time_unless_they_share_cores(at_once: bool, most: int):
    found = [Agreement(**row) for row in probe.compare(TRAINER, ENGINES, 60.0, at_once=at_once)]
    assert [agreement.engine for agreement in found] == ENGINES
    assert [agreement.largest for agreement in found] == [0.0, 0.5, 0.0]
    assert Engine.most == most


def test_an_engine_that_does_not_score_in_time_is_named():
    Engine.hangs = "http://b"
    with pytest.raises(DeadlineExceeded) as caught:
        probe.compare(TRAINER, ENGINES, 0.2, at_once=True)
    assert caught.value.where == "http://b"
