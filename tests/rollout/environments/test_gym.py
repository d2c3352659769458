"""Environments with reset and step: tokens of a real engine, seeds, rewards, errors, cut-offs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from deployments.recipes.agents import CHATML
from deployments.recipes.guess_digit import GuessDigit
from deployments.recipes.tiny_models import character_tokenizer
from rlpipe.config.data import EnvironmentReward, SeedPrompts
from rlpipe.config.load import validate
from rlpipe.config.run import RunConfig
from rlpipe.data.prompts import load_prompts
from rlpipe.errors import ConfigError, RewardError, RlpipeError
from rlpipe.lineage.stage_inputs import rollout_inputs
from rlpipe.rewards.scorer import Scorer
from rlpipe.rollout.client.generate_client import GenerateClient
from rlpipe.rollout.generate import GroupFailed
from rlpipe.rollout.generation import Generation
from rlpipe.rollout.generators import RolloutContext, RolloutResources, open_generate_function
from rlpipe.types import PlannedGroup, Sample, Status
from tests.live_engine import CONTEXT_LEN, END, VOCAB_SIZE, Live

TOKENIZER = character_tokenizer("Look: ")
TOKENIZER.chat_template = CHATML
GROUP = PlannedGroup(
    group_id="b:00000007",
    prompt="room",
    prompt_ids=tuple(TOKENIZER.encode("room")),
    label="door",
    metadata={"floor": 3},
    seeds=(10, 11),
)
GAME = '''
import time

class Room:
    """Count actions; end after the third."""

    def __init__(self, *, end=3):
        self.end = end

    def reset(self, *, seed, options):
        self.turns = 0
        self.seen = (seed, options["sample_seed"])
        assert (options["prompt"], options["label"]) == ("room", "door")
        assert options["metadata"]["floor"] == 3
        return "Look: a room", {}

    async def step(self, action):
        self.turns += 1
        info = {"reward_parts": {"seed": self.seen[0], "sample": self.seen[1], "turns": 1}}
        return f" wall {self.turns}", 0.5, self.turns == self.end, False, info
'''


class _Recording(GenerateClient):
    """Keep the prompts and answers of the engine."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, **options)
        self.answers: list[tuple[list[int], Generation]] = []

    async def generate(self, prompt_ids: Sequence[int], sampling: Any, **options: Any):
        generations = await super().generate(prompt_ids, sampling, **options)
        self.answers += [(list(prompt_ids), one) for one in generations]
        return generations


class _Engine:
    """Return `yes`, and wait for `stop` in the answer of number `hangs`."""

    end_ids = frozenset({END})

    def __init__(self, hangs: int | None = None) -> None:
        self.hangs = hangs
        self.sampling: list[dict[str, Any]] = []

    async def generate(
        self, ids: Any, sampling: dict[str, Any], *, stop: Any = None, **_: Any
    ) -> list[Generation]:
        self.sampling.append(sampling)
        reason = "stop"
        if len(self.sampling) - 1 == self.hangs:
            await stop.wait()
            reason = "abort"
        answer = [*TOKENIZER.encode("yes"), END][: sampling["max_new_tokens"]]
        reason = "length" if reason == "stop" and answer[-1] != END else reason
        versions = [(len(answer), "b@1@d")]
        return [Generation(answer, [-0.5] * len(answer), reason, versions, "e", 0, 1.0, 2.0)]


def _config(path: Path | str, source: str = GAME, **changes: Any) -> RunConfig:
    if isinstance(path, Path):
        file = path / "game.py"
        file.write_text(source)
        path = f"{file}:Room"
    environment = {"type": "gym", "path": path, **changes.pop("environment", {})}
    rollout = {
        "rollout_batch_size": 1,
        "n_samples_per_prompt": 2,
        "rollout_max_response_len": 120,
        "environment": environment,
        **changes.pop("rollout", {}),
    }
    return validate(
        {
            "run": "run",
            "num_rollout": 1,
            "model": {"source": {"type": "huggingface", "hf_checkpoint": "/m"}},
            "data": {"prompts": {"type": "seeds", "size": 4}, **changes.pop("data", {})},
            "reward": {"function": {"type": "environment"}},
            "rollout": rollout,
            **changes,
        }
    )


@asynccontextmanager
async def _generate(config: RunConfig, client: Any, **context: Any):
    model = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": CONTEXT_LEN}
    resources = RolloutResources.load(config, TOKENIZER, model, "/m")
    try:
        rollout = RolloutContext(config.rollout, **context)
        async with open_generate_function(resources, rollout, client) as generate:
            yield generate
    finally:
        for listener in resources.gateway_ports._listeners:
            listener.close()


async def _rows(config: RunConfig, client: Any | None = None, **options: Any) -> list[Sample]:
    async with _generate(config, client or _Engine()) as generate:
        return await generate(GROUP, **options)


async def _error_of_row(config: RunConfig) -> str:
    with pytest.raises(GroupFailed) as failed:
        await _rows(config)
    assert [row.status for row in failed.value.samples] == [Status.FAILED] * 2
    error = failed.value.samples[0].error
    assert error is not None
    return error


@pytest.mark.integration
@pytest.mark.parametrize("chat", [False, True])
async def test_a_rollout_has_the_tokens_of_the_engine_and_masked_observations(
    tmp_path: Path, live: Live, chat: bool
):
    config = _config(
        tmp_path,
        rollout={"max_turn_tokens": 9, "rollout_max_response_len": 190},
        data={"apply_chat_template": chat},
    )
    options: Any = {"vocab_size": VOCAB_SIZE, "deadline_s": 120.0, "end_ids": [END]}
    client = _Recording(live.router.url, **options)
    async with client:
        rows = await _rows(config, client)
    answers = client.answers
    assert len(answers) == 6
    for row in rows:
        assert row.loss_mask is not None and row.rollout_log_probs is not None
        ids = [*row.prompt_ids, *row.response_ids]
        assert str(TOKENIZER.decode(row.prompt_ids)).startswith(
            "<|im_start|>user\nLook: a room" if chat else "Look: a room"
        )
        own = [
            one
            for one in answers
            if [*one[0], *one[1].response_ids] == ids[: len(one[0]) + len(one[1].response_ids)]
        ]
        assert len(own) == 3
        expected_mask = [0] * len(row.response_ids)
        for prompt, answer in own:
            begin = len(prompt) - len(row.prompt_ids)
            end = begin + len(answer.response_ids)
            expected_mask[begin:end] = [1] * (end - begin)
            assert row.rollout_log_probs[begin:end] == answer.log_probs
        assert row.loss_mask == expected_mask
        masked = [
            token for token, mask in zip(row.response_ids, row.loss_mask, strict=True) if not mask
        ]
        text = TOKENIZER.decode(masked)
        assert text.index(" wall 1") < text.index(" wall 2")
        assert " wall 3" not in text, "the observation of the last action is not read"
        assert row.num_turns == 3
        assert row.metadata["environment"]["ended"] == "terminated"


async def test_all_samples_of_a_group_have_one_seed_and_another_group_has_another(tmp_path: Path):
    config = _config(tmp_path)
    episodes = [row.metadata["environment"]["parts"] for row in await _rows(config)]
    assert episodes[0]["seed"] == episodes[1]["seed"]
    assert [episode["sample"] for episode in episodes] == [30, 33], "its own seed, in three steps"
    assert episodes == [row.metadata["environment"]["parts"] for row in await _rows(config)]

    async def seed(**changes: Any) -> float:
        async with _generate(config, _Engine()) as generate:
            (first, _) = await generate(GROUP.model_copy(update=changes))
        return first.metadata["environment"]["parts"]["seed"] / 3

    assert await seed() * 3 == episodes[0]["seed"]
    assert await seed(group_id="b:00000008") != await seed()
    assert await seed(metadata={"floor": 3, "seed": 77}) == 77, "the row names the seed"


async def test_the_reward_is_the_sum_over_the_steps_with_its_parts(tmp_path: Path):
    (row, _) = await _rows(_config(tmp_path))
    assert row.reward is None, "the reward stage sets it, and can score the row again"
    (score,) = Scorer(EnvironmentReward(type="environment")).score([row])
    assert score.reward == 1.5
    assert score.parts["turns"] == 3
    row.metadata = {}
    with pytest.raises(RewardError, match="no reward of an environment"):
        Scorer(EnvironmentReward(type="environment")).score([row])


@pytest.mark.parametrize(
    ("rollout", "ended", "turns", "status"),
    [
        ({}, "terminated", 3, Status.COMPLETED),
        ({"max_turns": 2}, "max_turns", 2, Status.COMPLETED),
        ({"max_turn_tokens": 1}, "terminated", 3, Status.COMPLETED),
        ({"rollout_max_response_len": 3}, "length", 1, Status.TRUNCATED),
        ({"rollout_max_response_len": 11}, "terminated", 3, Status.TRUNCATED),
    ],
)
async def test_limits_end_a_rollout(
    tmp_path: Path, rollout: dict[str, Any], ended: str, turns: int, status: Status
):
    source = (
        GAME.replace('f" wall {self.turns}"', '""')
        if len(rollout) and rollout.get("rollout_max_response_len") == 11
        else GAME
    )
    rows = await _rows(_config(tmp_path, source, rollout=rollout))
    for row in rows:
        episode = row.metadata["environment"]
        assert (episode["ended"], episode["turns"], row.status) == (ended, turns, status)
        limit = rollout.get("rollout_max_response_len", 120)
        assert len(row.response_ids) <= limit


async def test_an_environment_that_ends_itself_has_truncated_or_terminated(tmp_path: Path):
    source = GAME.replace("self.turns == self.end, False", "False, self.turns == 2")
    (row, _) = await _rows(_config(tmp_path, source))
    assert (row.metadata["environment"]["ended"], row.status) == ("truncated", Status.COMPLETED)


async def test_the_seed_of_the_engine_differs_between_turns(tmp_path: Path):
    engine = _Engine()
    async with _generate(_config(tmp_path, deterministic=True), engine, on_gpus=True) as generate:
        await generate(GROUP)
    assert sorted(one["sampling_seed"] for one in engine.sampling) == [10, 11, 11, 12, 12, 13]


async def test_every_environment_is_closed(tmp_path: Path):
    source = (
        GAME
        + f"""
    def close(self):
        with open({str(tmp_path / "closed")!r}, "a") as file:
            file.write("closed ")
"""
    )
    await _rows(_config(tmp_path, source))
    failing = source.replace("self.turns += 1", "raise KeyError('wall')")
    await _error_of_row(_config(tmp_path, failing))
    assert (tmp_path / "closed").read_text().split() == ["closed"] * 4


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("self.turns += 1", "raise KeyError('wall')", "KeyError: 'wall' ({file}:18: "),
        ("self.turns = 0", "raise ValueError('no')", "ValueError: no ({file}:11: "),
        ("self.turns += 1", "raise SystemExit(3)", "ended Python"),
        ('return f" wall {self.turns}", 0.5', "return 0.5", "(observation, reward, terminated"),
        ('return "Look: a room", {}', 'return "Look: a room"', "(observation, info)"),
        ('f" wall {self.turns}"', "7", "int 7"),
        (", 0.5,", ", float('nan'),", "the reward is not a finite number"),
        ('"turns": 1}', '"turns": "x"}', "reward part 'turns' is not a finite number"),
        ('"turns": 1}}', '"turns": 1}, "reward_parts": ["turns"]}', "reward_parts is not a dict"),
        ("self.turns = 0", "time.sleep(2)", "the environment took too long"),
    ],
)
async def test_an_error_of_the_environment_names_its_line(
    tmp_path: Path, old: str, new: str, message: str
):
    assert old in GAME
    config = _config(tmp_path, GAME.replace(old, new), environment={"call_timeout_s": 0.5})
    error = await _error_of_row(config)
    assert message.format(file=tmp_path / "game.py") in error
    assert f"{tmp_path / 'game.py'}:Room, " in error


async def test_a_rollout_that_was_cut_off_starts_again(tmp_path: Path):
    stop = asyncio.Event()
    config = _config(tmp_path)
    group = GROUP.model_copy(update={"seeds": (10,)})
    async with _generate(config, _Engine(hangs=1), stop=stop) as generate:
        rollout = asyncio.ensure_future(generate(group))
        await asyncio.sleep(0.2)
        stop.set()
        (cut_off,) = await rollout
    assert cut_off.status is Status.ABORTED
    assert cut_off.response_ids and "environment" not in cut_off.metadata
    async with _generate(config, _Engine()) as generate:
        (row,) = await generate(group, so_far=[cut_off])
        (whole,) = await generate(group)
    assert row.status is Status.COMPLETED
    assert (row.response_ids, row.loss_mask) == (whole.response_ids, whole.loss_mask)
    assert row.metadata == whole.metadata


async def test_an_observation_without_room_for_an_action_fails_the_rollout(tmp_path: Path):
    source = GAME.replace('"Look: a room"', f'"{"x" * CONTEXT_LEN}"')
    error = await _error_of_row(_config(tmp_path, source))
    assert "leaves no room for an action" in error


@pytest.mark.parametrize(
    ("source", "arguments", "message"),
    [
        (GAME, {"floors": 2}, "does not take these arguments"),
        (GAME.replace("async def step", "async def go"), {}, "no method step"),
        (GAME.replace("class Room", "class Cellar"), {}, "no 'Room'"),
    ],
)
def test_an_environment_is_checked_when_it_is_loaded(
    tmp_path: Path, source: str, arguments: dict[str, Any], message: str
):
    config = _config(tmp_path, source, environment={"arguments": arguments})
    with pytest.raises(ConfigError, match=message):
        RolloutResources.load(config, TOKENIZER, {"vocab_size": VOCAB_SIZE}, "/m")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout": {"tools": [{"path": "rlpipe.rollout.tools.python"}]}}, "two sampling methods"),
        (
            {
                "rollout": {"environment": None},
                "data": {"prompts": {"type": "file", "paths": ["a.jsonl"]}},
            },
            "reward.function.type: environment needs rollout.environment",
        ),
        (
            {"rollout": {"environment": None}, "reward": {"function": {"type": "random"}}},
            "data.prompts.type: seeds needs rollout.environment",
        ),
        ({"rollout": {"type": "dataset"}}, "samples nothing"),
    ],
)
def test_keys_that_contradict_an_environment_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
):
    with pytest.raises(RlpipeError, match=message):
        _config(tmp_path, **changes)


def test_the_source_of_the_environment_is_an_input_of_the_rollout(tmp_path: Path):
    config = _config(tmp_path)
    digest = rollout_inputs(config, "f", "plan").digest
    assert rollout_inputs(config, "f", "plan").digest == digest
    changed = _config(tmp_path, GAME.replace("0.5", "0.25"))
    assert rollout_inputs(changed, "f", "plan").digest != digest
    patient = _config(tmp_path, environment={"call_timeout_s": 5.0})
    assert rollout_inputs(patient, "f", "plan").digest == digest


def test_rows_of_seeds_are_numbered_from_the_first_seed():
    rows = load_prompts(SeedPrompts(type="seeds", size=3, seed=40))
    assert [row.metadata["seed"] for row in rows] == [40, 41, 42]
    assert [row.prompt for row in rows] == ["40", "41", "42"]


def test_halving_finds_every_digit_of_the_recipe_in_four_guesses():
    for seed in range(50):
        game = GuessDigit()
        assert game.reset(seed=seed, options={})[0] == "Guess the digit: "
        low = 0
        high = 9
        for _ in range(4):
            guess = (low + high) // 2
            answer, reward, terminated, _, _ = game.step(str(guess))
            if terminated:
                break
            low, high = (guess + 1, high) if answer == "+" else (low, guess - 1)
        assert reward == 1.0
    assert game.step("no")[1:3] == (0.0, True)
