"""The default way to sample a group: one turn, every sample of the group from the same prompt.

A generate function is `async (PlannedGroup, so_far: Sequence[Sample]) -> list[Sample]`, one sample
per seed; it raises an `RlpipeError` if the group failed. `so_far` is empty, or has the samples of
the group as an earlier rollout left them: finished ones stay as they are, the others go on. A
sample that comes back aborted was cut off by whoever asked.

Not here: which groups, how many at a time and what becomes of a failed one (`sampler`); rewards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from rlpipe.config.rollout import RolloutConfig
from rlpipe.errors import DataError, EngineError
from rlpipe.rollout.client.client import GenerateClient
from rlpipe.rollout.generation import Generation
from rlpipe.store.routed_experts import within
from rlpipe.types import PlannedGroup, Sample, Status, WeightVersion


class Generate(Protocol):
    """See the module."""

    def __call__(
        self, group: PlannedGroup, so_far: Sequence[Sample] = ()
    ) -> Awaitable[list[Sample]]: ...


Decode = Callable[[Sequence[int]], str]
FINISHED = (Status.COMPLETED, Status.TRUNCATED)

_STATUS = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}


def sampling_params(
    config: RolloutConfig, *, temperature: float | None = None, max_response_len: int | None = None
) -> dict[str, Any]:
    """SGLang's sampling parameters of a rollout; evaluation overrides temperature (0 is greedy) and
    length."""
    params: dict[str, Any] = {
        "temperature": config.rollout_temperature if temperature is None else temperature,
        "top_p": config.rollout_top_p,
        "top_k": config.rollout_top_k,
        "max_new_tokens": config.rollout_max_response_len
        if max_response_len is None
        else max_response_len,
        "stop_token_ids": list(config.rollout_stop_token_ids),
        "skip_special_tokens": False,
    }
    if config.rollout_stop:
        params |= {"stop": list(config.rollout_stop), "no_stop_trim": True}
    if config.rollout_min_new_tokens:
        params["min_new_tokens"] = config.rollout_min_new_tokens
    return params


class SingleTurn:
    """The default generate function.

    `decode` turns response ids into text. `context_len` is the longest prompt + response; a
    response is cut short to fit. `seeded`: send each sample's own seed, one request each; only
    engines started with `enable_deterministic_inference` honour it. Once `stop` is set, what is
    aborted is returned as it is. `routed`: samples say which experts the engine routed their tokens
    to.
    """

    def __init__(
        self,
        client: GenerateClient,
        sampling: dict[str, Any],
        *,
        decode: Decode,
        context_len: int,
        seeded: bool = False,
        routed: bool = False,
        stop: asyncio.Event | None = None,
    ) -> None:
        self.client = client
        self.sampling = sampling
        self.decode = decode
        self.context_len = context_len
        self.seeded = seeded
        self.routed = routed
        self.stop = stop

    async def __call__(self, group: PlannedGroup, so_far: Sequence[Sample] = ()) -> list[Sample]:
        """Raises: DataError if the prompt leaves no room for a response, and what
        `GenerateClient.generate` raises."""
        room = self.context_len - len(group.prompt_ids)
        if room < 1:
            raise DataError(
                "the prompt leaves no room for a response",
                where=f"group {group.group_id}",
                found=f"{len(group.prompt_ids)} prompt tokens",
                expected=f"fewer than {self.context_len}",
                do="set data.rollout_max_prompt_len, or a longer rollout.rollout_max_context_len",
            )
        sampling = {**self.sampling, "max_new_tokens": min(self.sampling["max_new_tokens"], room)}
        generations = await self.client.generate(
            group.prompt_ids,
            sampling,
            n=len(group.seeds),
            seeds=group.seeds if self.seeded else None,
            so_far=[
                _generation(sample) for sample in sorted(so_far, key=lambda sample: sample.index)
            ]
            or None,
            stop=self.stop,
            routed_from=0 if self.routed else None,
            where=f"group {group.group_id}",
        )
        kept = {sample.index: sample for sample in so_far if sample.status in FINISHED}
        return [
            kept.get(index) or self._sample(group, index, generation)
            for index, generation in enumerate(generations)
        ]

    def _sample(self, group: PlannedGroup, index: int, generation: Generation) -> Sample:
        sample = planned_sample(group, index)
        sample.response_ids = generation.response_ids
        sample.rollout_log_probs = generation.log_probs
        tokens = len(group.prompt_ids) + len(generation.response_ids)
        sample.rollout_routed_experts = within(generation.routed_experts, tokens)
        sample.response = self.decode(generation.response_ids)
        runs = [
            (tokens, version_of(stamp, f"group {group.group_id}"))
            for tokens, stamp in generation.weight_versions
        ]
        sample.weight_versions = _merged(runs)
        sample.status = _STATUS[generation.finish_reason]
        sample.finish_reason = generation.finish_reason
        sample.engine = generation.engine
        sample.t_start_s = generation.t_start_s
        sample.t_end_s = generation.t_end_s
        return sample


class GroupFailed(EngineError):
    """A group whose sampling failed in part: `samples` are all of its rows."""

    def __init__(self, problem: str, samples: Sequence[Sample] = (), **details: Any) -> None:
        super().__init__(problem, **details)
        self.samples = list(samples)


def planned_sample(group: PlannedGroup, index: int) -> Sample:
    """Sample `index` of a group before anything is sampled."""
    return Sample(
        group_id=group.group_id,
        index=index,
        prompt=group.prompt,
        prompt_ids=list(group.prompt_ids),
        label=group.label,
        metadata=dict(group.metadata),
        seed=group.seeds[index],
    )


def failed_samples(group: PlannedGroup, error: Exception) -> list[Sample]:
    """The rows of a group that could not be sampled: status failed, the error's text, no response;
    or those it came with."""
    if isinstance(error, GroupFailed):
        return error.samples
    samples = [planned_sample(group, index) for index in range(len(group.seeds))]
    for sample in samples:
        sample.status, sample.error = Status.FAILED, f"{type(error).__name__}: {error}"
        sample.rollout_log_probs = []
    return samples


_EARLIER = "@earlier@"
_REASON = {status: reason for reason, status in _STATUS.items()}


def _generation(sample: Sample) -> Generation | None:
    """What there is of a sample, to go on from. None: nothing."""
    if not sample.response_ids:
        return None
    stamps = [(tokens, f"{_EARLIER}{version}") for tokens, version in sample.weight_versions]
    ids = sample.response_ids
    log_probs = sample.rollout_log_probs or []
    reason = _REASON[sample.status]
    times = (sample.t_start_s, sample.t_end_s)
    routed = sample.rollout_routed_experts
    return Generation(
        ids, log_probs, reason, stamps, sample.engine, 0, *times, routed_experts=routed
    )


def _merged(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Run lengths without two neighbours of one version."""
    merged: list[tuple[int, int]] = []
    for tokens, version in runs:
        if merged and merged[-1][1] == version:
            merged[-1] = (merged[-1][0] + tokens, version)
        else:
            merged.append((tokens, version))
    return merged


def version_of(stamp: str, where: str) -> int:
    """The weight version an engine named. Raises: EngineError if it is not one of ours."""
    if stamp.startswith(_EARLIER):
        return int(stamp.removeprefix(_EARLIER))
    try:
        return WeightVersion.version_of(stamp)
    except ValueError as error:
        raise EngineError(
            "the engine's weights have no version of ours",
            where=where,
            found=stamp,
            expected="branch@version@digest",
            do="push weights into the engine, or start it with a weight version, before sampling",
        ) from error
