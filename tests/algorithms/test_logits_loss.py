"""slime's functions for losses of logits on one rank, and checks of a loss's result."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.algorithms import logits_loss as functions
from rlpipe.algorithms.logits_loss import (
    Share,
    compute_approx_kl,
    compute_policy_loss,
    get_log_probs_and_entropy,
    get_responses,
    logits_loss,
    shared_as,
    target_log_probs,
)
from rlpipe.errors import DataError

ARGS = Namespace(rollout_temperature=0.5)


def test_log_probs_and_entropy_have_the_values_and_gradients_of_log_softmax():
    results = []
    for ours in (True, False):
        logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(0), requires_grad=True)
        targets = torch.tensor([0, 6, 3, 3, 1])
        if ours:
            log_probs, entropy = target_log_probs(logits, targets, with_entropy=True)
            assert entropy is not None
        else:
            everything = logits.log_softmax(-1)
            log_probs = everything.gather(1, targets[:, None])[:, 0]
            entropy = -(everything.exp() * everything).sum(-1)
        (torch.linspace(-1, 1, 5) * log_probs + 0.3 * entropy).sum().backward()
        results.append((log_probs, entropy, logits.grad))
    for actual, expected in zip(*results, strict=True):
        assert torch.allclose(actual, expected, atol=1e-6)


@given(
    samples=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4),
    cp_size=st.sampled_from([1, 2, 3]),
)
def test_context_parallel_ranks_have_every_response_token_once(samples, cp_size):
    totals = [prompt + response for prompt, response in samples]
    responses = [response for _, response in samples]
    tokens = [1000 * number + torch.arange(total) for number, total in enumerate(totals)]
    actual: list[list[int]] = [[] for _ in samples]
    for cp_rank in range(cp_size):
        rows = [_held(part, cp_size, cp_rank) for part in tokens]
        logits = torch.cat([*rows, torch.full((2,), -7)]).float()[None, :, None]
        with shared_as(Share(None, cp_size, cp_rank)):
            shown = get_responses(
                logits,
                args=ARGS,
                unconcat_tokens=tokens,
                total_lengths=totals,
                response_lengths=responses,
            )
            pairs = list(shown)
        for number, (chosen, expected) in enumerate(pairs):
            assert (chosen[:, 0] * 0.5 + 1).tolist() == expected.tolist(), (
                "the row before each token, divided by the temperature"
            )
            actual[number] += expected.tolist()
    assert [sorted(part) for part in actual] == [
        part[-count:].tolist() for part, count in zip(tokens, responses, strict=True)
    ]


def _held(tokens: torch.Tensor, cp_size: int, cp_rank: int) -> torch.Tensor:
    if cp_size == 1:
        return tokens
    chunks = torch.nn.functional.pad(tokens, (0, -len(tokens) % (2 * cp_size)), value=-9).chunk(
        2 * cp_size
    )
    return torch.cat([chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]])


def test_entropies_are_returned_on_request():
    logits = torch.randn(1, 5, 4)
    known = {
        "unconcat_tokens": [torch.tensor([0, 1, 2, 3, 0])],
        "total_lengths": [5],
        "response_lengths": [3],
    }
    _, actual = get_log_probs_and_entropy(logits, args=ARGS, **known)
    assert [part.shape for part in actual["log_probs"]] == [(3,)] and "entropy" not in actual
    _, actual = get_log_probs_and_entropy(logits, args=ARGS, with_entropy=True, **known)
    assert [part.shape for part in actual["entropy"]] == [(3,)]


def test_slimes_policy_loss_functions():
    loss, clipped = compute_policy_loss(
        torch.tensor([-1.0, 0.0]), torch.tensor([2.0, 1.0]), 0.2, 0.3
    )
    assert loss.tolist() == pytest.approx([-2.6, -1.0]) and clipped.tolist() == [1, 0]
    assert compute_approx_kl(torch.tensor([-1.0]), torch.tensor([-2.0]), "k2").tolist() == [0.5]


def test_an_unreduced_loss_is_refused_and_an_empty_one_has_a_gradient():
    logits = torch.randn(1, 3, 4, requires_grad=True)
    with pytest.raises(DataError, match="reduce it with sum_of_sample_mean"):
        logits_loss(lambda *_: (logits[0, :, 0], {}), ARGS, {}, logits, torch.sum)
    with pytest.raises(DataError, match="kl"):
        logits_loss(lambda *_: (logits.sum(), {"kl": 0.5}), ARGS, {}, logits, torch.sum)
    loss, _ = logits_loss(
        lambda args, batch, logits, reduce: (reduce(torch.zeros(0)), {}),
        ARGS,
        {},
        logits,
        torch.sum,
    )
    loss.backward()
    assert logits.grad is not None and logits.grad.abs().max() == 0


def test_values_of_a_response_are_whole_without_context_parallelism_and_sliced_with_it():
    values = torch.arange(5.0)
    assert functions.slice_log_prob_with_cp(values, 8, 5) is values
    assert functions.all_gather_with_cp(values, 8, 5) is values
    parts = []
    for rank in range(2):
        with functions.shared_as(functions.Share(cp_size=2, cp_rank=rank)):
            parts.append(functions.slice_log_prob_with_cp(values.tolist(), 8, 5))
            with pytest.raises(DataError, match="all_gather_with_cp is called in a custom loss"):
                functions.all_gather_with_cp(values, 8, 5)
    # Rank 0 has the tokens 0, 1, 6, 7 of 8; tokens 2 to 6 predict the response.
    assert [part.tolist() for part in parts] == [[4.0], [0.0, 1.0, 2.0, 3.0]]
