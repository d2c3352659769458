"""A critic in its own ranks equals a critic in the policy's ranks, bit for bit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rlpipe.engines.megatron.critic_exchange import ExchangeAddress
from rlpipe.system.ports import free_port
from tests.engines.megatron import critic_jobs

pytestmark = pytest.mark.integration

TRAIN: dict[str, Any] = {
    "max_tokens_per_gpu": 64,
    "optimizer": {"lr": 1e-3, "weight_decay": 0.1, "clip_grad": 0.5},
}
CRITIC = {"optimizer": {"lr": 2e-3}}


@pytest.fixture(scope="module")
def model(models) -> str:
    """A model without tied embeddings. A critic must not load the policy's output layer."""
    return models["llama"]


@pytest.fixture(scope="module")
def together(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The history of one rank with both models, and a checkpoint of a policy without a critic."""
    folder = tmp_path_factory.mktemp("together")
    alone = critic_jobs.without_critic(model, TRAIN, free_port(), folder / "alone")
    ours = critic_jobs.shared(model, TRAIN, free_port(), CRITIC)
    try:
        found = critic_jobs.history(ours, str(folder / "both"), alone)
    finally:
        ours.close()
    return {**found, "saved": str(folder / "both"), "alone": alone}


def test_a_critic_in_its_own_ranks_equals_a_critic_in_the_policys_ranks(
    model: str, together: dict[str, Any], two_ranks, tmp_path: Path
):
    ports = (free_port(), free_port(), free_port())
    directories = (str(tmp_path), together["saved"], together["alone"])
    found = two_ranks.run(critic_jobs.one_rank_each, model, TRAIN, CRITIC, ports, directories)
    for side in found:
        assert side["no room"] == "no room for a checkpoint on the local disk"
        assert (side["begun"], side["trained"], side["steps"]) == (
            together["begun"],
            together["trained"],
            together["steps"],
        )
        assert side["loaded"] == [together["trained"], together["trained"], together["loaded"][-1]]
        assert critic_jobs.same_values(side, together)
    assert (
        "loss" not in together["steps"][0]
        and "loss" in together["steps"][-1]
        and "value_loss" in together["steps"][-1]
    )
    assert not together["values"][0].any() and together["values"][1].any()

    ours = critic_jobs.shared(model, TRAIN, free_port(), CRITIC)
    try:
        assert ours.load_checkpoint(tmp_path) == 1
        assert ours.state_digest() == together["trained"], (
            "ranks that have both read what each wrote for itself"
        )
    finally:
        ours.close()


@pytest.mark.parametrize(
    "layout",
    [{}, {"parallel": {"tensor_model_parallel_size": 2}}],
    ids=["data parallel", "tensor parallel"],
)
def test_a_critic_may_have_another_layout_than_the_policy(
    model: str, together: dict[str, Any], two_ranks, tmp_path: Path, layout
):
    meeting = free_port()
    critic = {**CRITIC, **layout}
    with ThreadPoolExecutor(1) as threads:
        ranks = threads.submit(
            two_ranks.run, critic_jobs.of_critic, model, TRAIN, critic, meeting, str(tmp_path)
        )
        ours = critic_jobs.policy(
            model, TRAIN, 0, 1, free_port(), ExchangeAddress(("127.0.0.1", meeting), 1, 2)
        )
        try:
            found = [critic_jobs.history(ours, str(tmp_path)), *ranks.result()]
        finally:
            ours.close()
    assert len({side["trained"] for side in found}) == 1
    for side in found:
        assert critic_jobs.same_values(side, together, tokens_of=(0, 1), within=2e-4)
        assert side["loaded"] == [side["trained"]]
        for step, wanted in zip(side["steps"], together["steps"], strict=True):
            assert step == pytest.approx(wanted, rel=1e-4, abs=1e-5)
