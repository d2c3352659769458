"""Sample one group: the generate functions for single-turn and for supervised rollouts.

A generate function is `async (PlannedGroup, so_far: Sequence[Sample]) -> list[Sample]` and returns
one sample per seed. `so_far` is empty or holds the group's samples from an earlier rollout:
finished samples are kept, the others continue from their tokens. A sample with status `aborted` was
cut off by the rollout. A generate function raises an `RlpipeError` if the group failed.

Entry points: `SingleTurn`, `SupervisedRows`, `sampling_params`, `planned_sample`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from rlpipe.config.rollout import RolloutConfig
from rlpipe.errors import DataError, EngineError
from rlpipe.rollout.client.generate_client import GenerateClient
from rlpipe.rollout.client.image_requests import ImageRequests
from rlpipe.rollout.generation import Generation, merged_runs
from rlpipe.store.labels import label_value
from rlpipe.store.routed_experts import within
from rlpipe.types import STATUS_OF_REASON, PlannedGroup, Sample, Status, WeightVersion


class Generate(Protocol):
    """A generate function, as described in the module docstring."""

    def __call__(
        self, group: PlannedGroup, so_far: Sequence[Sample] = ()
    ) -> Awaitable[list[Sample]]: ...


Decode = Callable[[Sequence[int]], str]
FINISHED = (Status.COMPLETED, Status.TRUNCATED)

_REASON_OF_STATUS = {status: reason for reason, status in STATUS_OF_REASON.items()}


def sampling_params(
    config: RolloutConfig, *, temperature: float | None = None, max_response_len: int | None = None
) -> dict[str, Any]:
    """Return SGLang's sampling parameters of a rollout.

    An evaluation overrides `temperature` (0 is greedy) and `max_response_len`.
    """
    if max_response_len is None:
        max_response_len = config.rollout_max_response_len
    params: dict[str, Any] = {
        "temperature": config.rollout_temperature if temperature is None else temperature,
        "top_p": config.rollout_top_p,
        "top_k": config.rollout_top_k,
        "max_new_tokens": max_response_len,
        "stop_token_ids": list(config.rollout_stop_token_ids),
        "skip_special_tokens": False,
    }
    if config.rollout_stop:
        params |= {"stop": list(config.rollout_stop), "no_stop_trim": True}
    if config.rollout_min_new_tokens:
        params["min_new_tokens"] = config.rollout_min_new_tokens
    return params


class SingleTurn:
    """Sample every response of a group from the same prompt, in one turn.

    `decode` turns response ids into text. `context_len` is the limit for prompt plus response; a
    response is shortened to fit. `seeded` sends one request per sample with the sample's seed; only
    engines started with `enable_deterministic_inference` use the seed. `routed` stores the experts
    that the engine routed the tokens to. `images` reads the images of prompts. After `stop` is set,
    aborted responses are returned as they are.
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
        images: ImageRequests | None = None,
    ) -> None:
        self.client = client
        self.images = images
        self.sampling = sampling
        self.decode = decode
        self.context_len = context_len
        self.seeded = seeded
        self.routed = routed
        self.stop = stop

    async def __call__(self, group: PlannedGroup, so_far: Sequence[Sample] = ()) -> list[Sample]:
        """Sample a group. Raises: DataError if the prompt leaves no room for a response; errors of
        `GenerateClient.generate`."""
        require_room(group, self.context_len)
        room = self.context_len - len(group.prompt_ids)
        sampling = {**self.sampling, "max_new_tokens": min(self.sampling["max_new_tokens"], room)}
        earlier = [_generation_of(row) for row in sorted(so_far, key=lambda row: row.index)]
        generations = await self.client.generate(
            group.prompt_ids,
            sampling,
            n=len(group.seeds),
            seeds=group.seeds if self.seeded else None,
            so_far=earlier or None,
            stop=self.stop,
            routed_from=0 if self.routed else None,
            images=await self.images.of(group.images) if self.images else None,
            where=f"group {group.group_id}",
        )
        finished = {sample.index: sample for sample in so_far if sample.status in FINISHED}
        return [
            finished.get(index) or self._sample(group, index, generation)
            for index, generation in enumerate(generations)
        ]

    def _sample(self, group: PlannedGroup, index: int, generation: Generation) -> Sample:
        sample = planned_sample(group, index)
        sample.response_ids = generation.response_ids
        sample.rollout_log_probs = generation.log_probs
        num_tokens = len(group.prompt_ids) + len(generation.response_ids)
        sample.rollout_routed_experts = within(generation.routed_experts, num_tokens)
        sample.response = self.decode(generation.response_ids)
        sample.weight_versions = version_runs(generation, f"group {group.group_id}")
        sample.status = STATUS_OF_REASON[generation.finish_reason]
        sample.finish_reason = generation.finish_reason
        sample.engine = generation.engine
        sample.t_start_s = generation.t_start_s
        sample.t_end_s = generation.t_end_s
        return sample


class SupervisedRows:
    """The generate function of `rollout.type: dataset`: responses come from the plan.

    No engine is called. `decode` turns response ids into text.
    """

    def __init__(self, *, decode: Decode) -> None:
        self.decode = decode

    async def __call__(self, group: PlannedGroup, so_far: Sequence[Sample] = ()) -> list[Sample]:
        """Return one completed sample per seed, with the planned response and loss mask and without
        log-probs.

        A preference row is one rollout of two samples: the chosen response, then the rejected one.

        Raises: DataError if the plan has no response, or a loss mask of another length.
        """
        num_tokens = len(group.response_ids)
        if not num_tokens or len(group.loss_mask) not in (0, num_tokens):
            raise DataError(
                "a supervised row needs a response and a loss mask of the same length",
                where=f"group {group.group_id}",
                found=f"{num_tokens} response tokens, loss mask of {len(group.loss_mask)}",
            )
        samples = [self._sample(group, index) for index in range(len(group.seeds))]
        return self._pair(group, *samples) if group.rejected_ids else samples

    def _pair(self, group: PlannedGroup, chosen: Sample) -> list[Sample]:
        other = {"response_ids": group.rejected_ids, "loss_mask": ()}
        rejected = self._sample(group.model_copy(update=other), 0)
        rejected.index = 1
        for sample, name in ((chosen, "chosen"), (rejected, "rejected")):
            sample.rollout_id = 0
            sample.metadata["preference"] = name
        return [chosen, rejected]

    def _sample(self, group: PlannedGroup, index: int) -> Sample:
        sample = planned_sample(group, index)
        sample.response_ids = list(group.response_ids)
        sample.response = self.decode(group.response_ids)
        sample.loss_mask = list(group.loss_mask) or [1] * len(group.response_ids)
        sample.status = Status.COMPLETED
        sample.finish_reason = "stop"
        sample.t_start_s = sample.t_end_s = time.time()
        return sample


class GroupFailed(EngineError):
    """Sampling failed for some samples of a group. `samples` are all rows of the group."""

    def __init__(self, problem: str, samples: Sequence[Sample] = (), **details: Any) -> None:
        super().__init__(problem, **details)
        self.samples = list(samples)


def require_room(group: PlannedGroup, context_len: int) -> None:
    """Raises: DataError if a group's prompt leaves no room for a response."""
    if len(group.prompt_ids) >= context_len:
        raise DataError(
            "the prompt leaves no room for a response",
            where=f"group {group.group_id}",
            found=f"{len(group.prompt_ids)} prompt tokens",
            expected=f"fewer than {context_len}",
            do="set data.rollout_max_prompt_len, or a longer rollout.rollout_max_context_len",
        )


def planned_sample(group: PlannedGroup, index: int) -> Sample:
    """Return sample `index` of a group without a response."""
    return Sample(
        group_id=group.group_id,
        index=index,
        prompt=group.prompt,
        prompt_ids=list(group.prompt_ids),
        images=list(group.images),
        label=label_value(group.label),
        metadata=dict(group.metadata),
        seed=group.seeds[index],
    )


def failed_samples(group: PlannedGroup, error: Exception) -> list[Sample]:
    """Return the rows of a failed group: the rows of a `GroupFailed`, else rows without a response,
    with status failed and the error's text."""
    if isinstance(error, GroupFailed):
        return error.samples
    samples = [planned_sample(group, index) for index in range(len(group.seeds))]
    for sample in samples:
        sample.status = Status.FAILED
        sample.error = f"{type(error).__name__}: {error}"
        sample.rollout_log_probs = []
    return samples


# A row stores weight versions as integers, a Generation as the engine's stamps. This prefix marks
# the stamp of an integer from a row, which has no branch and digest any more.
_STORED_VERSION = "@earlier@"


def _generation_of(sample: Sample) -> Generation | None:
    """Return a stored sample as a generation to continue from. None: it has no response tokens."""
    if not sample.response_ids:
        return None
    return Generation(
        response_ids=sample.response_ids,
        log_probs=sample.rollout_log_probs or [],
        finish_reason=_REASON_OF_STATUS[sample.status],
        weight_versions=[
            (tokens, f"{_STORED_VERSION}{version}") for tokens, version in sample.weight_versions
        ],
        engine=sample.engine,
        cached_tokens=0,
        t_start_s=sample.t_start_s,
        t_end_s=sample.t_end_s,
        routed_experts=sample.rollout_routed_experts,
    )


def version_runs(generation: Generation, where: str) -> list[tuple[int, int]]:
    """Return the run lengths `(tokens, weight version)` of a generation. Raises: as
    `version_of`."""
    return merged_runs(
        (tokens, version_of(stamp, where)) for tokens, stamp in generation.weight_versions
    )


def version_of(stamp: str, where: str) -> int:
    """Return the weight version of an engine's stamp. Raises: EngineError if the stamp is not
    `branch@version@digest`."""
    if stamp.startswith(_STORED_VERSION):
        return int(stamp.removeprefix(_STORED_VERSION))
    try:
        return WeightVersion.version_of(stamp)
    except ValueError as error:
        raise EngineError(
            "the engine's weight version is not one of rlpipe",
            where=where,
            found=stamp,
            expected="branch@version@digest",
            do="push weights into the engine, or start it with a weight version, before sampling",
        ) from error
