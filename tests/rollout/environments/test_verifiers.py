"""Environments of the package `verifiers`, in an interpreter of their own.

RLPIPE_VERIFIERS_PYTHON names an interpreter that has verifiers 0.4.0. Tests that need the package
are not collected without it: its requirements contradict the pins of this environment.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from deployments.recipes.agents import CHATML
from deployments.recipes.tiny_models import character_tokenizer
from rlpipe.config.data import EnvironmentReward, VerifiersPrompts
from rlpipe.config.load import validate
from rlpipe.config.rollout import VerifiersEnvironment
from rlpipe.config.run import RunConfig
from rlpipe.data.prompts import load_prompts
from rlpipe.errors import ConfigError
from rlpipe.lineage.stage_inputs import rollout_inputs
from rlpipe.rewards.scorer import Scorer
from rlpipe.rollout.client.generate_client import GenerateClient
from rlpipe.rollout.environments.loaded import check_environment
from rlpipe.rollout.environments.verifiers import Verifiers
from rlpipe.rollout.generate import GroupFailed
from rlpipe.rollout.generators import RolloutContext, RolloutResources, open_generate_function
from rlpipe.types import PlannedGroup, Sample, Status
from tests.live_engine import CONTEXT_LEN, END, VOCAB_SIZE, Live

PYTHON = os.environ.get("RLPIPE_VERIFIERS_PYTHON", "nowhere/python")
TOKENIZER = character_tokenizer("Say: ")
TOKENIZER.chat_template = CHATML
AGENT = {"runtime": {"type": "subprocess"}}
TASKSET = '''
"""Words to say, and a harness that asks twice."""
import asyncio
import os
from collections.abc import Iterable

import httpx
import verifiers.v1 as vf


class WordData(vf.TaskData):
    word: str = ""
    answer: str | None = None


class WordTask(vf.Task[WordData]):
    @vf.reward(weight=0.5)
    async def asked(self, task, trace) -> float:
        return float(len(trace.calls))

    @vf.reward
    async def right(self, task, trace) -> float:
        return 0.25

    @vf.metric
    async def letters(self, task) -> float:
        return float(len(task.word or task.answer))


class Words(vf.Taskset[WordTask]):
    def load(self) -> Iterable[WordTask]:
        print("a print does not break the protocol")
        for word in ("sun", "moon", "star"):
            yield WordTask(WordData(prompt=f"Say {word}.", word=word), self.config.task)


class AskTwice(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        messages = [{"role": "user", "content": data.prompt}]
        headers = {"Authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(base_url=endpoint, headers=headers, timeout=None) as client:
            for _ in range(2):
                body = {"model": ctx.model, "messages": messages, "max_tokens": 8}
                answer = await client.post("/chat/completions", json=body)
                answer.raise_for_status()
                reply = answer.json()["choices"][0]["message"]
                messages += [reply, {"role": "user", "content": "Again."}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["Words", "AskTwice"]
'''


@pytest.fixture
def taskset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of a taskset that the interpreter can import as `say_words`."""
    file = tmp_path / "say_words.py"
    file.write_text(TASKSET)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return file


def _change(taskset: Path, statement: str) -> None:
    """Write the taskset with another statement in its reward `right`."""
    taskset.write_text(TASKSET.replace("return 0.25", statement))


def _config(**environment: Any) -> RunConfig:
    return validate(
        {
            "run": "run",
            "num_rollout": 1,
            "model": {"source": {"type": "huggingface", "hf_checkpoint": "/m"}},
            "data": {
                "prompts": {"type": "verifiers", "id": "say_words", "python": PYTHON, "size": 2}
            },
            "reward": {"function": {"type": "environment"}},
            "rollout": {
                "rollout_batch_size": 1,
                "n_samples_per_prompt": 2,
                "rollout_max_response_len": 90,
                "environment": {
                    "type": "verifiers",
                    "id": "say_words",
                    "python": PYTHON,
                    "arguments": {"agent": AGENT},
                    **environment,
                },
            },
        }
    )


def _group(metadata: dict[str, Any]) -> PlannedGroup:
    return PlannedGroup(
        group_id="b:00000007",
        prompt="Say tree.",
        prompt_ids=(5, 6),
        label="tree",
        metadata=metadata,
        seeds=(10, 11),
    )


@asynccontextmanager
async def _generate(live: Live, config: RunConfig, **context: Any) -> AsyncIterator[Any]:
    model = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": CONTEXT_LEN}
    resources = RolloutResources.load(config, TOKENIZER, model, "/m")
    environment = resources.environment
    assert isinstance(environment, Verifiers)
    options: Any = {"vocab_size": VOCAB_SIZE, "deadline_s": 120.0, "end_ids": [END]}
    try:
        async with (
            GenerateClient(live.router.url, **options) as client,
            open_generate_function(
                resources, RolloutContext(config.rollout, **context), client
            ) as generate,
        ):
            yield generate
    finally:
        await environment.close()
        for listener in resources.gateway_ports._listeners:
            listener.close()


@pytest.mark.verifiers
@pytest.mark.integration
async def test_an_episode_has_the_tokens_of_the_engine_and_the_rewards_of_the_environment(
    taskset: Path, live: Live
):
    config = _config()
    source = config.data.prompts
    assert isinstance(source, VerifiersPrompts)
    first, second = load_prompts(source)
    assert (first.prompt, second.prompt) == ("Say sun.", "Say moon.")
    async with _generate(live, config) as generate:
        rows: list[Sample] = await generate(_group(second.metadata))
        (own, _) = await generate(_group({"floor": 3}))
    for row in rows:
        assert row.status in (Status.COMPLETED, Status.TRUNCATED)
        assert row.loss_mask is not None and row.rollout_log_probs is not None
        assert TOKENIZER.decode(row.prompt_ids) == (
            "<|im_start|>user\nSay moon.<|im_end|>\n<|im_start|>assistant\n"
        )
        assert row.num_turns == 2
        assert 2 <= sum(row.loss_mask) <= 16 and row.loss_mask[0] == 1
        assert all(
            (log_prob < 0) == bool(mask)
            for log_prob, mask in zip(row.rollout_log_probs, row.loss_mask, strict=True)
        )
        (score,) = Scorer(EnvironmentReward(type="environment")).score([row])
        assert score.reward == 1.25
        assert score.parts == {"asked": 1.0, "right": 0.25, "letters": 4.0}
        assert row.metadata["environment"]["turns"] == 2
        assert len(row.metadata["environment"]["source"]) == 64
    assert own.metadata["environment"]["parts"]["letters"] == 4.0, "a row of ours: the label"
    assert str(TOKENIZER.decode(own.prompt_ids)).startswith("<|im_start|>user\nSay tree.")


@pytest.mark.verifiers
@pytest.mark.integration
async def test_an_error_of_the_environment_names_its_line_and_others_continue(
    taskset: Path, live: Live
):
    _change(taskset, "return 1 / len(task.word)")
    async with _generate(live, _config()) as generate:
        with pytest.raises(GroupFailed) as failed:
            await generate(_group({}))
        error = str(failed.value.samples[0].error)
        assert "the episode failed" in error
        assert "ZeroDivisionError" in error and 'say_words.py", line' in error
        rows = await generate(_group({"verifiers_task": {"prompt": "Say x.", "word": "x"}}))
    assert [row.metadata["environment"]["parts"]["right"] for row in rows] == [1.0, 1.0]


@pytest.mark.verifiers
@pytest.mark.integration
async def test_a_program_that_ends_fails_its_episodes_and_starts_again(taskset: Path, live: Live):
    _change(taskset, "return os._exit(3) if task.word == 'x' else 2.0")
    async with _generate(live, _config()) as generate:
        with pytest.raises(GroupFailed) as failed:
            await generate(_group({"verifiers_task": {"prompt": "Say x.", "word": "x"}}))
        assert "the program of verifiers ended" in str(failed.value.samples[0].error)
        rows = await generate(_group({}))
    assert rows[0].metadata["environment"]["parts"]["right"] == 2.0


@pytest.mark.verifiers
@pytest.mark.integration
async def test_a_rollout_that_was_cut_off_is_aborted(taskset: Path, live: Live):
    _change(taskset, "return await asyncio.sleep(60)")
    stop = asyncio.Event()
    async with _generate(live, _config(), stop=stop) as generate:
        rollout = asyncio.ensure_future(generate(_group({})))
        await asyncio.sleep(1.0)
        stop.set()
        rows = await rollout
    assert {row.status for row in rows} == {Status.ABORTED}


@pytest.mark.verifiers
def test_an_environment_that_cannot_be_loaded_is_refused_before_the_start(taskset: Path):
    def environment(**changes: Any) -> VerifiersEnvironment:
        found = _config(**changes).rollout.environment
        assert isinstance(found, VerifiersEnvironment)
        return found

    check_environment(environment())
    with pytest.raises(ConfigError, match=r"taskset 'say_nothing' not found"):
        check_environment(environment(id="say_nothing"))
    with pytest.raises(ConfigError, match=r"agent.colour"):
        check_environment(environment(arguments={"agent": {"colour": "red"}}))
    taskset.write_text("raise KeyError('words')")
    with pytest.raises(ConfigError, match=r"KeyError: 'words' \(.*say_words.py:1\)"):
        check_environment(environment())


def test_a_missing_interpreter_or_package_is_an_error_with_the_command(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"pip install verifiers==0\.4\.0") as error:
        Verifiers(VerifiersEnvironment(type="verifiers", id="words", python="nowhere/python"))
    assert error.value.where == "rollout.environment.python"
    without = VerifiersEnvironment(type="verifiers", id="words", python=sys.executable)
    with pytest.raises(ConfigError, match=r"-m pip install verifiers==0\.4\.0") as error:
        check_environment(without)
    assert "No module named 'verifiers'" in str(error.value)


def test_the_interpreter_does_not_change_the_identity_of_a_rollout():
    digest = rollout_inputs(_config(python="a"), "f", "plan").digest
    assert rollout_inputs(_config(python="b", max_concurrent=2), "f", "plan").digest == digest
    assert rollout_inputs(_config(id="other"), "f", "plan").digest != digest
