"""Single-turn sampling and supervised rows of a planned group."""

from __future__ import annotations

import pytest

from rlpipe.config.rollout import RolloutConfig
from rlpipe.errors import DataError, EngineError
from rlpipe.rollout.client.generate_client import GenerateClient
from rlpipe.rollout.generate import SingleTurn, SupervisedRows, failed_samples, sampling_params
from rlpipe.rollout.generation import Generation, settled
from rlpipe.types import PlannedGroup, Status
from tests.live_engine import CONTEXT_LEN, END, VOCAB_SIZE

CONFIG = RolloutConfig(
    rollout_batch_size=1,
    n_samples_per_prompt=3,
    rollout_max_response_len=6,
    rollout_stop_token_ids=(END,),
)
GROUP = PlannedGroup(
    group_id="b:00000001",
    prompt="p",
    prompt_ids=(5, 6),
    label="l",
    metadata={"k": 1},
    seeds=(10, 11, 12),
)


def _decode(ids) -> str:
    return " ".join(map(str, ids))


class _Answers:
    """A client that returns given generations."""

    def __init__(self, *generations: Generation) -> None:
        self.generations = list(generations)
        self.request = {}

    async def generate(self, prompt_ids, sampling, **keywords):
        self.request = {"prompt_ids": prompt_ids, "sampling": sampling, **keywords}
        return self.generations


def _generation(reason: str, versions: list[tuple[int, str]]) -> Generation:
    tokens = sum(count for count, _ in versions)
    return Generation([7] * tokens, [-0.5] * tokens, reason, versions, "http://engine", 0, 1.0, 2.0)


@pytest.mark.integration
async def test_a_group_is_sampled_by_a_real_engine(live):
    async with GenerateClient(live.router.url, vocab_size=VOCAB_SIZE, deadline_s=60) as client:
        generate = SingleTurn(
            client, sampling_params(CONFIG), decode=_decode, context_len=CONTEXT_LEN
        )
        samples = await generate(GROUP)
    assert [(sample.index, sample.seed) for sample in samples] == [(0, 10), (1, 11), (2, 12)]
    for sample in samples:
        assert (sample.group_id, sample.prompt, sample.label, sample.metadata) == (
            "b:00000001",
            "p",
            "l",
            {"k": 1},
        )
        assert sample.status is (
            Status.COMPLETED if sample.response_ids[-1] == END else Status.TRUNCATED
        )
        assert sample.response == _decode(sample.response_ids)
        assert sample.rollout_log_probs is not None and len(sample.rollout_log_probs) == len(
            sample.response_ids
        )
        assert [tokens for tokens, _ in sample.weight_versions] == [len(sample.response_ids)]
        assert sample.engine == live.router.url


async def test_statuses_follow_the_finish_reason_and_versions_are_run_lengths():
    client = _Answers(
        _generation("stop", [(2, "b@3@d"), (1, "b@4@d")]),
        _generation("length", [(6, "b@4@d")]),
        _generation("abort", []),
    )
    turn = SingleTurn(client, sampling_params(CONFIG), decode=_decode, context_len=100)  # pyright: ignore
    samples = await turn(GROUP)
    assert [sample.status for sample in samples] == [
        Status.COMPLETED,
        Status.TRUNCATED,
        Status.ABORTED,
    ]
    assert [sample.weight_versions for sample in samples] == [[(2, 3), (1, 4)], [(6, 4)], []]


async def test_weights_without_a_version_of_rlpipe_are_an_error():
    client = _Answers(*[_generation("stop", [(1, "default")])] * 3)
    with pytest.raises(EngineError, match=r"(?s)group b:00000001.*default"):
        await SingleTurn(client, sampling_params(CONFIG), decode=_decode, context_len=100)(GROUP)  # pyright: ignore


async def test_a_response_is_cut_to_the_context_and_a_prompt_without_room_is_refused():
    client = _Answers(*[_generation("length", [(1, "b@0@d")])] * 3)
    sampling = sampling_params(CONFIG)
    turn = SingleTurn(client, sampling, decode=_decode, context_len=3, seeded=True)  # pyright: ignore
    await turn(GROUP)
    assert client.request["sampling"]["max_new_tokens"] == 1 and client.request["seeds"] == (
        10,
        11,
        12,
    )
    with pytest.raises(DataError, match=r"(?s)group b:00000001.*no room"):
        await SingleTurn(client, sampling_params(CONFIG), decode=_decode, context_len=2)(GROUP)  # pyright: ignore


def test_evaluation_may_be_greedy_and_longer():
    params = sampling_params(CONFIG, temperature=0.0, max_response_len=99)
    assert (params["temperature"], params["max_new_tokens"], params["stop_token_ids"]) == (
        0.0,
        99,
        [END],
    )


def test_a_failed_group_has_rows_with_the_error():
    samples = failed_samples(GROUP, EngineError("no"))
    assert [(sample.index, sample.status) for sample in samples] == [
        (i, Status.FAILED) for i in range(3)
    ]
    assert {sample.error for sample in samples} == {"EngineError: no"}


async def test_supervised_rows_take_the_given_response():
    group = GROUP.model_copy(
        update={"response_ids": (8, 9, END), "loss_mask": (0, 1, 1), "seeds": (10,)}
    )
    (sample,) = await SupervisedRows(decode=_decode)(group)
    assert (sample.response_ids, sample.loss_mask, sample.response) == (
        [8, 9, END],
        [0, 1, 1],
        "8 9 1",
    )
    assert (
        sample.rollout_log_probs is None
        and sample.weight_versions == []
        and sample.status is Status.COMPLETED
    )
    with pytest.raises(DataError, match="group b:00000001"):
        await SupervisedRows(decode=_decode)(group.model_copy(update={"loss_mask": (1,)}))
    with pytest.raises(DataError, match="0 response tokens"):
        await SupervisedRows(decode=_decode)(GROUP)


async def test_a_preference_row_is_one_rollout_of_two_samples():
    group = GROUP.model_copy(
        update={"response_ids": (8, END), "rejected_ids": (9, 9, END), "seeds": (10,)}
    )
    samples = await SupervisedRows(decode=_decode)(group)
    assert [sample.response_ids for sample in samples] == [[8, END], [9, 9, END]]
    assert [sample.loss_mask for sample in samples] == [[1, 1], [1, 1, 1]]
    assert [(sample.index, sample.rollout_id) for sample in samples] == [(0, 0), (1, 0)]
    assert [sample.metadata["preference"] for sample in samples] == ["chosen", "rejected"]
    assert group.metadata == {"k": 1}


def test_an_aborted_response_with_a_stop_token_ends_there():
    """Without tokens of the second version there is no run of it."""
    versions = [(2, "b@3@d"), (1, "b@4@d")]
    aborted = Generation([5, END, 7], [-1.0, -2.0, -3.0], "abort", versions, "e", 0, 0.0, 1.0)
    ended = settled(aborted, {"max_new_tokens": 6}, {END})
    assert (ended.response_ids, ended.finish_reason) == ([5, END], "stop")
    assert ended.log_probs == [-1.0, -2.0]
    assert ended.weight_versions == [(2, "b@3@d")]
