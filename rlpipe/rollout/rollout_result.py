"""Progress and result of a rollout, for sampling by rlpipe and by a user's rollout function.

Entry points: `RolloutProgress`, `RolloutResult`, `build_result`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlpipe.rollout.generate import FINISHED
from rlpipe.rollout.planner import discarded
from rlpipe.rollout.rollout_rows import Groups, PlanPart, num_response_tokens
from rlpipe.types import BufferedGroup, DataState, Sample


@dataclass(slots=True)
class RolloutProgress:
    """Counters of a running rollout. The same object is updated after each group."""

    groups: int = 0
    """Planned groups of all parts so far."""
    finished_groups: int = 0
    """Includes the groups that were adopted from an earlier attempt."""
    accepted_groups: int = 0
    wanted_groups: int = 0
    failed_groups: int = 0
    samples: int = 0
    """Sampled in this attempt, like the tokens and the statuses."""
    prompt_tokens: int = 0
    response_tokens: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    spans: list[tuple[int, int]] = field(default_factory=list)
    """First token and end of what was computed of each sample, prompt and response together. The
    first sample of a group begins at 0, the others after the prompt."""
    seconds: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Response tokens per second so far."""
        return self.response_tokens / self.seconds if self.seconds else 0.0

    def count(self, samples: Sequence[Sample], so_far: Sequence[Sample] = ()) -> None:
        """Add the samples of a group, without the tokens that an earlier rollout sampled."""
        self.samples += len(samples)
        self.prompt_tokens += sum(len(sample.prompt_ids) for sample in samples)
        self.response_tokens += num_response_tokens(samples) - num_response_tokens(so_far)
        self.statuses.update(sample.status.value for sample in samples)
        known = {sample.index: len(sample.response_ids) for sample in so_far}
        for number, sample in enumerate(samples):
            prompt = len(sample.prompt_ids)
            start = prompt + known.get(sample.index, 0) if number or so_far else 0
            self.spans.append((start, prompt + len(sample.response_ids)))


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """Result of a rollout: each group of its parts is accepted, dropped or in the buffer of
    `after`."""

    progress: RolloutProgress
    parts: tuple[PlanPart, ...]
    accepted: tuple[str, ...]
    dropped: dict[str, str]
    """Reason by group id."""
    after: DataState
    adopted_groups: int
    cut_groups: int
    errors: dict[str, str]
    """Error text by group id, of groups that failed or could not be judged."""
    scored: Groups = field(default_factory=dict)
    """Groups with their rewards, if sampling needed rewards."""
    fallbacks: dict[str, str] = field(default_factory=dict)
    """Accepted groups that the filter rejected, with its reason: they fill a batch for which too
    few groups were fit."""

    def outputs(self) -> dict[str, Any]:
        """Return the outputs of a rollout's node: data state, and the fate of each group."""
        return {
            **self.sampling_outputs(),
            "plans": [part.digest for part in self.parts],
            "after": self.after.model_dump(mode="json"),
            "accepted": list(self.accepted),
            "dropped": self.dropped,
            "buffered_groups": len(self.after.buffer),
            "cut_groups": self.cut_groups,
            "errors": self.errors,
            **({"fallbacks": self.fallbacks} if self.fallbacks else {}),
        }

    def sampling_outputs(self) -> dict[str, Any]:
        """Return statistics of the sampling. Samples and tokens are those of this attempt only."""
        now = self.progress
        return {
            "groups": now.groups,
            "adopted_groups": self.adopted_groups,
            "failed_groups": now.failed_groups,
            "samples": now.samples,
            "tokens": now.response_tokens,
            "tokens_per_s": now.tokens_per_s,
            "truncated_ratio": now.statuses["truncated"] / max(1, now.samples),
            "statuses": dict(now.statuses),
        }


def build_result(
    progress: RolloutProgress,
    parts: Sequence[PlanPart],
    accepted: Sequence[str],
    dropped: dict[str, str],
    *,
    older: Iterable[BufferedGroup] = (),
    newer: Iterable[BufferedGroup],
    **details: Any,
) -> RolloutResult:
    """Return the result of a rollout with its data state.

    `older` and `newer` are the groups that go to the buffer, before and behind the groups that are
    still in it. `details` are the other fields of `RolloutResult`.
    """
    last_state = parts[-1].plan.after
    after = last_state.model_copy(update={"buffer": (*older, *last_state.buffer, *newer)})
    return RolloutResult(
        progress=progress,
        parts=tuple(parts),
        accepted=tuple(accepted),
        dropped=dropped,
        after=after,
        **details,
    )


def dropped_by_buffer_filter(parts: Iterable[PlanPart]) -> dict[str, str]:
    """Return the reason of each group that the buffer filter removed."""
    return {group_id: "buffer_filter" for part in parts for group_id in discarded(part.plan)}


def ages(samples: Iterable[Sample]) -> dict[str, int | None]:
    """Return the weight versions of a group as `BufferedGroup` has them: `oldest` of all tokens,
    `finished` the newest if every sample is finished."""
    samples = list(samples)
    versions = [version for sample in samples for _, version in sample.weight_versions]
    finished = all(sample.status in FINISHED for sample in samples)
    return {
        "oldest": min(versions, default=None),
        "finished": max(versions, default=None) if finished else None,
    }
