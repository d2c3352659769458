"""Turns with tools between them, by `rollout.tools`: the policy calls, the answer is appended, the
policy goes on.

    prompt │ turn: sampled, trained │ answer: given, masked │ turn │ answer │ … │ last turn
           └────────────────────── response, at most rollout_max_response_len ───────────┘

What was sampled is never tokenised again: a turn's tokens are the engine's, and only the answer's
text becomes tokens here. Each request begins with all tokens before it. A rollout ends when a turn
calls nothing, after `max_turns`, or without room.

Where a rollout stands can be read off its tokens and loss mask, so one that was cut off in the
middle of a turn goes on there.

Not here: how a call is written (`tool_calls`), the tools (`tools`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rlpipe.errors import DataError
from rlpipe.rollout.client.generate_client import GenerateClient
from rlpipe.rollout.generate import FINISHED, planned_sample, version_of
from rlpipe.rollout.generation import Generation
from rlpipe.rollout.tool_calls import Call, CallFormat
from rlpipe.rollout.tools import Tool
from rlpipe.store.routed_experts import appended, num_rows, within
from rlpipe.types import PlannedGroup, Sample, Status


@dataclass(frozen=True)
class TurnLimits:
    """Lengths in tokens."""

    max_turns: int
    response_len: int
    """Of the whole response, the tools' answers included."""
    context_len: int
    """Of prompt and response."""
    turn_len: int | None
    """Of a single turn; None: what is left."""
    answer_len: int
    """Of a tool's answer."""


class MultiTurn:
    """The generate function of a run with tools.

    `encode` and `decode` are the tokenizer's, special tokens skipped: calls and answers are read
    so. `response_text` makes the text of a response (None: `decode`); the others as in
    `SingleTurn`.
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
        """Raises: DataError if the prompt leaves no room for a response, and what
        `GenerateClient.generate` raises."""
        if len(group.prompt_ids) >= self.limits.context_len:
            raise DataError(
                "the prompt leaves no room for a response",
                where=f"group {group.group_id}",
                found=f"{len(group.prompt_ids)} prompt tokens",
                expected=f"fewer than {self.limits.context_len}",
                do="set data.rollout_max_prompt_len, or a longer rollout.rollout_max_context_len",
            )
        there = {sample.index: sample for sample in so_far}
        begun = [there.get(index) or self._fresh(group, index) for index in range(len(group.seeds))]
        return list(await asyncio.gather(*(self._rollout(sample) for sample in begun)))

    def _fresh(self, group: PlannedGroup, index: int) -> Sample:
        sample = planned_sample(group, index)
        sample.rollout_log_probs, sample.loss_mask, sample.t_start_s = [], [], time.time()
        return sample

    async def _rollout(self, sample: Sample) -> Sample:
        if sample.status in FINISHED:
            return sample
        while True:
            sample.num_turns = max(1, len(_turns(sample)))
            room = self._room(sample)
            begun = _turn_so_far(sample)
            if room < 1:
                return _ended(sample, Status.TRUNCATED, "length")
            generation = await self._turn(sample, room, len(begun))
            self._append(sample, generation)
            if generation.finish_reason == "abort":
                return _ended(sample, Status.ABORTED, "abort")
            turn = self.decode(_turn_so_far(sample))
            sample.num_turns = len(_turns(sample))
            sample.response = self.response_text(sample.response_ids)
            calls = self.calls.read(turn)
            if not calls or sample.num_turns >= self.limits.max_turns:
                done = generation.finish_reason == "stop"
                return _ended(
                    sample, Status.COMPLETED if done else Status.TRUNCATED, generation.finish_reason
                )
            if generation.finish_reason == "length" and self._room(sample) < 1:
                return _ended(sample, Status.TRUNCATED, "length")
            await self._answer(sample, calls)

    async def _turn(self, sample: Sample, room: int, begun: int) -> Generation:
        longest = (
            room
            if self.limits.turn_len is None
            else min(room, max(1, self.limits.turn_len - begun))
        )
        params = {**self.sampling, "max_new_tokens": longest}
        if self.seeded:
            params["sampling_seed"] = (sample.seed + len(sample.response_ids)) % 2**31
        where = f"group {sample.group_id}/{sample.index} turn {sample.num_turns}"
        key = f"{sample.group_id}.{sample.index}" if self.affinity else None
        ids = [*sample.prompt_ids, *sample.response_ids]
        known = num_rows(sample.rollout_routed_experts) if self.routed else None
        keep = {"stop": self.stop, "routing_key": key, "routed_from": known}
        (generation,) = await self.client.generate(ids, params, **keep, where=where)
        return generation

    def _append(self, sample: Sample, generation: Generation) -> None:
        """A turn's tokens, as they were sampled."""
        where = f"group {sample.group_id}"
        runs = [(tokens, version_of(stamp, where)) for tokens, stamp in generation.weight_versions]
        self._extend(sample, generation.response_ids, generation.log_probs, 1)
        sample.weight_versions = _joined([*sample.weight_versions, *runs])
        tokens = len(sample.prompt_ids) + len(sample.response_ids)
        sample.rollout_routed_experts = within(
            appended(sample.rollout_routed_experts, generation.routed_experts), tokens
        )
        sample.engine = generation.engine
        sample.t_end_s = generation.t_end_s

    def _extend(
        self, sample: Sample, ids: Sequence[int], log_probs: Sequence[float], counts: int
    ) -> None:
        assert sample.rollout_log_probs is not None and sample.loss_mask is not None
        sample.response_ids += ids
        sample.rollout_log_probs += log_probs
        sample.loss_mask += [counts] * len(ids)

    async def _answer(self, sample: Sample, calls: Sequence[Call]) -> None:
        """What the tools answer, as tokens that do not count. They have the weight version of the
        tokens before them."""
        start_s = time.time()
        answers = await asyncio.gather(*(self._called(call) for call in calls))
        sample.non_generation_time += time.time() - start_s
        short = [self.decode(self.encode(answer)[: self.limits.answer_len]) for answer in answers]
        text = self.calls.render(short, ended=sample.response_ids[-1] in self.client.end_ids)
        ids = self.encode(text)[: max(0, self._room(sample))]
        self._extend(sample, ids, [0.0] * len(ids), 0)
        if ids:
            sample.weight_versions = _joined(
                [*sample.weight_versions, (len(ids), sample.weight_versions[-1][1])]
            )
        sample.response = self.response_text(sample.response_ids)

    async def _called(self, call: Call) -> str:
        if call.error is not None:
            return f"error: {call.error}"
        tool = self.tools.get(call.name)
        if tool is None:
            return f"error: there is no tool {call.name!r}, only {', '.join(sorted(self.tools))}"
        return await tool.answer(call.arguments)

    def _room(self, sample: Sample) -> int:
        """Tokens that may still follow."""
        used = len(sample.response_ids)
        return min(
            self.limits.response_len - used, self.limits.context_len - len(sample.prompt_ids) - used
        )


def _ended(sample: Sample, status: Status, reason: str) -> Sample:
    sample.status = status
    sample.finish_reason = reason
    return sample


def _turns(sample: Sample) -> list[int]:
    """Tokens of each turn, in order."""
    return [len(list(run)) for counts, run in groupby(sample.loss_mask or ()) if counts]


def _turn_so_far(sample: Sample) -> list[int]:
    """Tokens of the turn that is under way, or of the last one; none after an answer."""
    mask = sample.loss_mask or []
    begin = next((place + 1 for place in range(len(mask) - 1, -1, -1) if not mask[place]), 0)
    return sample.response_ids[begin:]


def _joined(runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Run lengths without two neighbours of one version."""
    joined: list[tuple[int, int]] = []
    for tokens, version in runs:
        if joined and joined[-1][1] == version:
            joined[-1] = (joined[-1][0] + tokens, version)
        elif tokens:
            joined.append((tokens, version))
    return joined
