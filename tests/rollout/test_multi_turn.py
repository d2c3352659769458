"""Turns and tools, token by token, with an engine of fixed responses."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest

from rlpipe.config.rollout import ToolConfig
from rlpipe.errors import ConfigError
from rlpipe.rollout.generation import Generation
from rlpipe.rollout.multi_turn import MultiTurn, TurnLimits
from rlpipe.rollout.tool_calls import Hermes, Tags
from rlpipe.rollout.tools import Tool, calculator, load_tools, python
from rlpipe.types import PlannedGroup, Sample, Status

GROUP = PlannedGroup(group_id="b:00000001", prompt="Q", prompt_ids=(ord("Q"),), seeds=(10,))
END = 3
LIMITS = TurnLimits(
    max_turns=3, response_len=200, context_len=300, turn_len=None, tool_response_len=20
)


def _encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def _decode(ids: Sequence[int]) -> str:
    return "".join(chr(token) for token in ids if token != END)


class _Engine:
    """Return one text per request, a token per letter; `|` is the end-of-sequence token."""

    end_ids = frozenset({END})

    def __init__(self, *texts: str, cut_after: int | None = None) -> None:
        self.texts = list(texts)
        self.requests = []
        self.cut_after = cut_after
        self.routed_from: list[int | None] = []

    async def generate(self, ids, sampling, *, stop, routing_key, routed_from, where):
        self.requests.append((_decode(ids), sampling))
        self.routed_from.append(routed_from)
        sampled_ids = [END if letter == "|" else ord(letter) for letter in self.texts.pop(0)]
        reason = (
            "stop"
            if sampled_ids[-1:] == [END]
            or any(_decode(sampled_ids).endswith(text) for text in sampling["stop"])
            else "length"
        )
        if len(sampled_ids) > sampling["max_new_tokens"]:
            sampled_ids = sampled_ids[: sampling["max_new_tokens"]]
            reason = "length"
        if self.cut_after is not None and len(self.requests) == 1:
            sampled_ids = sampled_ids[: self.cut_after]
            reason = "abort"
        version = len(self.requests)
        experts = None if routed_from is None else _experts(ids, sampled_ids)[routed_from:]
        runs = [(len(sampled_ids), f"b@{version}@d")]
        times = (1.0, 2.0)
        return [
            Generation(
                sampled_ids,
                [-float(version)] * len(sampled_ids),
                reason,
                runs,
                "e",
                0,
                *times,
                routed_experts=experts,
            )
        ]


def _experts(before: Sequence[int], sampled_ids: Sequence[int]) -> np.ndarray:
    """Return a different row of experts for every token that the engine reads."""
    ids = np.asarray([*before, *sampled_ids[:-1]])
    return np.stack([ids, np.arange(len(ids))], 1).astype(np.uint16)


def _double(text: str) -> str:
    return text * 2


async def _never(text: str) -> str:
    await asyncio.sleep(60)
    return text


def _tool(function: str, name: str, timeout_s: float = 5.0) -> Tool:
    return Tool(ToolConfig(path=f"{__file__}:{function}", name=name), timeout_s=timeout_s)


def _turns(
    engine: _Engine, tools: dict[str, Tool] | None = None, calls=None, *, routed=False, **limits
) -> MultiTurn:
    tools = {"twice": _tool("_double", "twice")} if tools is None else tools
    limits = TurnLimits(**{**vars(LIMITS), **limits})
    calls = calls or Tags(tools)
    keywords = {"encode": _encode, "decode": _decode, "routed": routed}
    return MultiTurn(engine, {"stop": ["!"]}, tools, calls, limits, **keywords)  # pyright: ignore


def _by_mask(sample: Sample) -> tuple[str, str]:
    """Return sampled and given text, each with dots for the other."""
    assert sample.loss_mask is not None
    pairs = list(zip(sample.response_ids, sample.loss_mask, strict=True))
    shown = [
        ("".join(chr(token) if mask == which else "." for token, mask in pairs)).replace(
            chr(END), "|"
        )
        for which in (1, 0)
    ]
    return shown[0], shown[1]


async def test_a_tool_response_is_between_the_turns_with_loss_mask_0():
    engine = _Engine("a<twice>xy</twice>", "done|")
    (sample,) = await _turns(engine)(GROUP)
    sampled, given = _by_mask(sample)
    assert (
        sampled == "a<twice>xy</twice>" + "." * 21 + "done|"
        and given.strip(".") == "<result>xyxy</result>"
    )
    assert engine.requests[1][0] == "Qa<twice>xy</twice><result>xyxy</result>" and engine.requests[
        0
    ][1]["stop"] == ["!", "</twice>"]
    assert (sample.status, sample.num_turns, sample.response) == (
        Status.COMPLETED,
        2,
        _decode(sample.response_ids),
    )
    assert sample.rollout_log_probs == [-1.0] * 18 + [0.0] * 21 + [-2.0] * 5
    assert sample.weight_versions == [(18 + 21, 1), (5, 2)]


async def test_calls_in_the_last_turn_are_not_executed():
    engine = _Engine(*["<twice>x</twice>"] * 3)
    (sample,) = await _turns(engine)(GROUP)
    assert (sample.num_turns, len(engine.requests), sample.status) == (3, 3, Status.COMPLETED)
    assert sample.response.endswith("<twice>x</twice>")


async def test_length_limits_apply_to_a_turn_a_tool_response_and_the_whole_response():
    engine = _Engine("abcdefgh", "xyz")
    (sample,) = await _turns(engine, turn_len=4)(GROUP)
    assert (sample.response, sample.status) == ("abcd", Status.TRUNCATED)
    engine = _Engine("<twice>0123456789abc</twice>", "xyz|")
    (sample,) = await _turns(engine, tool_response_len=5)(GROUP)
    assert "<result>01234</result>" in sample.response
    engine = _Engine("<twice>0123456789abc</twice>", "xyz|")
    (sample,) = await _turns(engine, response_len=35)(GROUP)
    assert (
        len(sample.response_ids) == 35
        and sample.status is Status.TRUNCATED
        and len(engine.requests) == 1
    )


async def test_a_rollout_that_was_cut_off_in_a_turn_continues_in_that_turn():
    first = _Engine("a<twice>xy</twice>", cut_after=4)
    (cut,) = await _turns(first)(GROUP)
    assert (cut.status, cut.response_ids) == (Status.ABORTED, _encode("a<tw"))
    engine = _Engine("ice>xy</twice>", "done|")
    (sample,) = await _turns(engine, turn_len=18)(GROUP, [cut])
    assert engine.requests[0][0] == "Qa<tw" and engine.requests[0][1]["max_new_tokens"] == 14
    assert _by_mask(sample)[1].strip(".") == "<result>xyxy</result>" and sample.num_turns == 2
    assert (await _turns(_Engine())(GROUP, [sample])) == [sample], "a finished one stays as it is"


async def test_every_read_token_has_experts_once_over_turns_tools_and_iterations():
    first = _Engine("a<twice>xy</twice>", cut_after=4)
    (cut,) = await _turns(first, routed=True)(GROUP)
    engine = _Engine("ice>xy</twice>", "done|")
    (sample,) = await _turns(engine, routed=True)(GROUP, [cut])
    assert (first.routed_from, engine.routed_from) == ([0], [4, 1 + 18 - 1])
    wanted = _experts([*sample.prompt_ids], sample.response_ids)
    assert sample.rollout_routed_experts.tolist() == wanted.tolist()
    (free,) = await _turns(_Engine("done|"))(GROUP)
    assert free.rollout_routed_experts is None


async def test_the_policy_gets_exceptions_and_missed_deadlines_of_a_tool_as_text():
    tools = {
        "slow": _tool("_never", "slow", 0.05),
        "calculator": Tool(ToolConfig(path="rlpipe.rollout.tools.calculator"), timeout_s=5),
    }
    engine = _Engine("<slow>x</slow>", "<calculator>1/0</calculator>", "|")
    (sample,) = await _turns(engine, tools, tool_response_len=99)(GROUP)
    assert "<result>error: no answer within 0.05 s</result>" in sample.response
    assert "<result>error: ZeroDivisionError: division by zero</result>" in sample.response


async def test_several_json_calls_are_answered_together_and_an_invalid_call_gets_an_error():
    calls = (
        '<tool_call>{"name": "twice", "arguments": {"text": "ab"}}</tool_call>\n'
        '<tool_call>{nonsense</tool_call><tool_call>{"name": "no"}</tool_call>|'
    )
    engine = _Engine(calls, "done|")
    (sample,) = await _turns(
        engine, calls=Hermes(), tool_response_len=99, response_len=900, context_len=999
    )(GROUP)
    given = _by_mask(sample)[1].strip(".")
    assert given.startswith(
        "\n<|im_start|>user\n<tool_response>\nabab\n</tool_response>\n"
        "<tool_response>\nerror: the call is not JSON"
    )
    assert "there is no tool 'no', only twice" in given and given.endswith(
        "<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("expression", "value"),
    [("2+3*4", "14"), ("-(7//2)", "-3"), ("10/4", "2.5"), ("10/5", "2"), ("2**10 % 1000", "24")],
)
def test_the_calculator_calculates(expression, value):
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["__import__('os')", "2**99999", "9**64**2", "a", "1 +", "'x'*9", "True", "(-8)**0.5"],
)
def test_the_calculator_refuses_everything_but_arithmetic(expression):
    with pytest.raises(ValueError, match=r"."):
        calculator(expression)


async def test_a_program_prints_fails_and_is_killed_at_the_deadline():
    assert await python("print(6 * 7)") == "42"
    assert (await python("1/0")).endswith("(exit status 1)")
    tool = Tool(ToolConfig(path="rlpipe.rollout.tools.python"), timeout_s=0.5)
    assert await tool.answer("while True: pass") == "error: no answer within 0.5 s"


def test_two_tools_of_one_name_and_wrong_arguments_are_refused():
    one = ToolConfig(path="rlpipe.rollout.tools.calculator")
    with pytest.raises(ConfigError, match="two tools have one name"):
        load_tools([one, one], timeout_s=1)
    with pytest.raises(ConfigError, match="does not take these arguments"):
        load_tools([ToolConfig(path="fractions.Fraction", arguments={"nope": 1})], timeout_s=1)


class AsyncTool:
    def __init__(self, greeting: str) -> None:
        self.greeting = greeting

    async def __call__(self, name: str) -> str:
        return f"{self.greeting} {name}"


async def test_a_class_with_an_async_call_is_a_tool():
    config = ToolConfig(path=f"{__file__}:AsyncTool", arguments={"greeting": "Hello"})
    assert await Tool(config, timeout_s=5).answer("Ada") == "Hello Ada"


async def test_child_processes_of_a_program_are_killed_and_do_not_delay_the_answer():
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid)"
    )
    async with asyncio.timeout(60):
        child = int(await python(code))
    # SIGKILL takes a moment on a busy machine.
    for _ in range(200):
        if not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the child process is still running")


async def test_a_tool_that_exits_python_gives_an_answer(tmp_path: Path):
    (tmp_path / "mine.py").write_text("import sys\ndef tool(text): sys.exit(text)\n")
    tool = Tool(ToolConfig(path=f"{tmp_path}/mine.py:tool"), timeout_s=10)
    assert "SystemExit: bye" in await tool.answer("bye")
