"""The default way to sample a group: one turn, every sample of the group from the same prompt.

A generate function is `async (PlannedGroup) -> list[Sample]`, one sample per seed; it raises an `RlpipeError` if the group
failed. Not here: which groups, how many at a time and what becomes of a failed one (`sampler`); rewards.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rlpipe.config.data import RolloutConfig
from rlpipe.errors import DataError, EngineError
from rlpipe.rollout.client import GenerateClient, Generation
from rlpipe.types import PlannedGroup, Sample, Status, WeightVersion

Generate = Callable[[PlannedGroup], Awaitable[list[Sample]]]
Decode = Callable[[Sequence[int]], str]

_STATUS = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}


def sampling_params(
    config: RolloutConfig, *, temperature: float | None = None, max_response_len: int | None = None
) -> dict[str, Any]:
    """SGLang's sampling parameters of a rollout; evaluation overrides temperature (0 is greedy) and length."""
    return {
        "temperature": config.rollout_temperature if temperature is None else temperature,
        "top_p": config.rollout_top_p,
        "top_k": config.rollout_top_k,
        "max_new_tokens": config.rollout_max_response_len if max_response_len is None else max_response_len,
        "stop_token_ids": list(config.rollout_stop_token_ids),
        "skip_special_tokens": False,
    }


class SingleTurn:
    """The default generate function.

    `decode` turns response ids into text (a tokenizer's, special tokens skipped). `context_len` is the longest prompt +
    response; a response is cut short to fit. `seeded`: send each sample's own seed, one request each; only engines started
    with `enable_deterministic_inference` honour it.
    """

    def __init__(
        self, client: GenerateClient, sampling: dict[str, Any], *, decode: Decode, context_len: int, seeded: bool = False
    ) -> None:
        self.client, self.sampling, self.decode, self.context_len, self.seeded = client, sampling, decode, context_len, seeded

    async def __call__(self, group: PlannedGroup) -> list[Sample]:
        """Raises: DataError if the prompt leaves no room for a response, and what `GenerateClient.generate` raises."""
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
            where=f"group {group.group_id}",
        )
        return [self._sample(group, index, generation) for index, generation in enumerate(generations)]

    def _sample(self, group: PlannedGroup, index: int, generation: Generation) -> Sample:
        sample = planned_sample(group, index)
        sample.response_ids, sample.rollout_log_probs = generation.response_ids, generation.log_probs
        sample.response = self.decode(generation.response_ids)
        sample.weight_versions = [(tokens, _version(stamp, group.group_id)) for tokens, stamp in generation.weight_versions]
        sample.status, sample.finish_reason = _STATUS[generation.finish_reason], generation.finish_reason
        sample.engine, sample.t_start_s, sample.t_end_s = generation.engine, generation.t_start_s, generation.t_end_s
        return sample


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
    """The rows of a group that could not be sampled: status failed, the error's text, no response."""
    samples = [planned_sample(group, index) for index in range(len(group.seeds))]
    for sample in samples:
        sample.status, sample.error = Status.FAILED, f"{type(error).__name__}: {error}"
        sample.rollout_log_probs = []
    return samples


def _version(stamp: str, group_id: str) -> int:
    try:
        return WeightVersion.version_of(stamp)
    except ValueError as error:
        raise EngineError(
            "the engine's weights have no version of ours",
            where=f"group {group_id}",
            found=stamp,
            expected="branch@version@digest",
            do="push weights into the engine, or start it with a weight version, before sampling",
        ) from error
