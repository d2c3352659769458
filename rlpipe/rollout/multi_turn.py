"""Sample in turns with tools: the policy calls tools and continues after their responses.

    prompt │ turn: sampled, trained │ tool: masked │ turn │ tool │ … │ last turn
           └──────────────── response, at most rollout_max_response_len ────────┘

Entry point: `MultiTurn`, the generate function of a run with `rollout.tools`. Sampled tokens are
never tokenized again: only the text of a tool response becomes tokens here. Each request begins
with all tokens before it. A rollout ends with a turn without calls, after `max_turns`, or without
room.

Tokens and loss mask determine the state of a rollout, so a rollout that was cut off in a turn
continues there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rlpipe.rollout.client.generate_client import GenerateClient
from rlpipe.rollout.generate import FINISHED, planned_sample, require_room, version_runs
from rlpipe.rollout.generation import Generation, merged_runs
from rlpipe.rollout.tool_calls import Call, CallFormat
from rlpipe.rollout.tools import Tool
from rlpipe.store.routed_experts import appended, num_rows, within
from rlpipe.types import PlannedGroup, Sample, Status


@dataclass(frozen=True)
class TurnLimits:
    """Limits of a rollout. Lengths are in tokens."""

    max_turns: int
    response_len: int
    """Whole response, including the tool responses."""
    context_len: int
    """Prompt and response."""
    turn_len: int | None
    """A single turn. None: the rest of the response."""
    tool_response_len: int
    """A single tool response."""


class MultiTurn:
    """The generate function of a run with tools.

    `encode` and `decode` convert text and tokens without special tokens; calls are read from this
    text. `response_text` makes the text of a response (None: `decode`). `affinity` sends all turns
    of a rollout to one engine. See `SingleTurn` for the other parameters.
    """

    def __init__(
        self,
        client: GenerateClient,
        sampling: dict[str, Any],
        tools: dict[str, Tool],
        calls: CallFormat,
        limits: TurnLimits,
        *,
        encode: Callable[[str], list[int]],
        decode: Callable[[Sequence[int]], str],
        response_text: Callable[[Sequence[int]], str] | None = None,
        seeded: bool = False,
        affinity: bool = False,
        routed: bool = False,
        stop: asyncio.Event | None = None,
    ) -> None:
        self.client = client
        self.tools = tools
        self.calls = calls
        self.limits = limits
        # The stop text of a call stays in the response: the policy learns to write it.
        self.sampling = {
            **sampling,
            "stop": [*sampling.get("stop", ()), *calls.stops],
            "no_stop_trim": True,
        }
        self.encode = encode
        self.decode = decode
        self.seeded = seeded
        self.affinity = affinity
        self.stop = stop
        self.routed = routed
        self.response_text = response_text or decode

    async def __call__(self, group: PlannedGroup, so_far: Sequence[Sample] = ()) -> list[Sample]:
        """Sample a group. Raises: DataError if the prompt leaves no room for a response; errors of
        `GenerateClient.generate`."""
        require_room(group, self.limits.context_len)
        earlier = {sample.index: sample for sample in so_far}
        samples = [
            earlier.get(index) or _new_sample(group, index) for index in range(len(group.seeds))
        ]
        return list(await asyncio.gather(*(self._rollout(sample) for sample in samples)))

    async def _rollout(self, sample: Sample) -> Sample:
        if sample.status in FINISHED:
            return sample
        while True:
            sample.num_turns = max(1, _num_turns(sample))
            if self._room(sample) < 1:
                return _ended(sample, Status.TRUNCATED, "length")
            generation = await self._sample_turn(sample)
            self._append_turn(sample, generation)
            reason = generation.finish_reason
            if reason == "abort":
                return _ended(sample, Status.ABORTED, "abort")
            sample.num_turns = _num_turns(sample)
            sample.response = self.response_text(sample.response_ids)
            calls = self.calls.read(self.decode(_turn_ids(sample)))
            if not calls or sample.num_turns >= self.limits.max_turns:
                status = Status.COMPLETED if reason == "stop" else Status.TRUNCATED
                return _ended(sample, status, reason)
            if reason == "length" and self._room(sample) < 1:
                return _ended(sample, Status.TRUNCATED, "length")
            await self._append_tool_responses(sample, calls)

    async def _sample_turn(self, sample: Sample) -> Generation:
        max_new_tokens = self._room(sample)
        if self.limits.turn_len is not None:
            # The first tokens of the turn exist already if an earlier rollout was cut off.
            left_of_turn = max(1, self.limits.turn_len - len(_turn_ids(sample)))
            max_new_tokens = min(max_new_tokens, left_of_turn)
        params = {**self.sampling, "max_new_tokens": max_new_tokens}
        if self.seeded:
            # Another seed for each turn; SGLang accepts 31 bits.
            params["sampling_seed"] = (sample.seed + len(sample.response_ids)) % 2**31
        num_routed = num_rows(sample.rollout_routed_experts)
        (generation,) = await self.client.generate(
            [*sample.prompt_ids, *sample.response_ids],
            params,
            stop=self.stop,
            routing_key=f"{sample.group_id}.{sample.index}" if self.affinity else None,
            routed_from=num_routed if self.routed else None,
            where=f"group {sample.group_id}/{sample.index} turn {sample.num_turns}",
        )
        return generation

    def _append_turn(self, sample: Sample, generation: Generation) -> None:
        runs = version_runs(generation, f"group {sample.group_id}")
        _append(sample, generation.response_ids, generation.log_probs, 1)
        sample.weight_versions = merged_runs([*sample.weight_versions, *runs])
        experts = appended(sample.rollout_routed_experts, generation.routed_experts)
        num_tokens = len(sample.prompt_ids) + len(sample.response_ids)
        sample.rollout_routed_experts = within(experts, num_tokens)
        sample.engine = generation.engine
        sample.t_end_s = generation.t_end_s

    async def _append_tool_responses(self, sample: Sample, calls: Sequence[Call]) -> None:
        """Run the tools and append their responses as tokens with loss mask 0."""
        start_s = time.time()
        responses = await asyncio.gather(*(self._run_tool(call) for call in calls))
        sample.non_generation_time += time.time() - start_s
        limit = self.limits.tool_response_len
        shortened = [self.decode(self.encode(response)[:limit]) for response in responses]
        ended = sample.response_ids[-1] in self.client.end_ids
        text = self.calls.render(shortened, ended=ended)
        ids = self.encode(text)[: max(0, self._room(sample))]
        _append(sample, ids, [0.0] * len(ids), 0)
        if ids:
            # Run lengths cover all response tokens: tool tokens get the version before them.
            run = (len(ids), sample.weight_versions[-1][1])
            sample.weight_versions = merged_runs([*sample.weight_versions, run])
        sample.response = self.response_text(sample.response_ids)

    async def _run_tool(self, call: Call) -> str:
        if call.error is not None:
            return f"error: {call.error}"
        tool = self.tools.get(call.name)
        if tool is None:
            return f"error: there is no tool {call.name!r}, only {', '.join(sorted(self.tools))}"
        return await tool.answer(call.arguments)

    def _room(self, sample: Sample) -> int:
        """Return the number of tokens that may still follow."""
        used = len(sample.response_ids)
        room_in_context = self.limits.context_len - len(sample.prompt_ids) - used
        return min(self.limits.response_len - used, room_in_context)


def _new_sample(group: PlannedGroup, index: int) -> Sample:
    sample = planned_sample(group, index)
    sample.rollout_log_probs = []
    sample.loss_mask = []
    sample.t_start_s = time.time()
    return sample


def _append(sample: Sample, ids: Sequence[int], log_probs: Sequence[float], mask: int) -> None:
    assert sample.rollout_log_probs is not None and sample.loss_mask is not None
    sample.response_ids += ids
    sample.rollout_log_probs += log_probs
    sample.loss_mask += [mask] * len(ids)


def _ended(sample: Sample, status: Status, reason: str) -> Sample:
    sample.status = status
    sample.finish_reason = reason
    return sample


def _num_turns(sample: Sample) -> int:
    """Return the number of stretches of trained tokens."""
    return sum(counts for counts, _ in groupby(sample.loss_mask or ()))


def _turn_ids(sample: Sample) -> list[int]:
    """Return the tokens of the current or last turn; empty after a tool response."""
    mask = sample.loss_mask or []
    begin = next((index + 1 for index in range(len(mask) - 1, -1, -1) if not mask[index]), 0)
    return sample.response_ids[begin:]
