"""What is known of a run when it ends (or so far): the input of the summary and the report, filled
from the store.

Not here: where any of it comes from, or how it is shown.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

REWARD = "rollout/raw_reward"
LOGPROB_DIFFERENCE = ("rollout/logprob_abs_diff/mean", "train/train_rollout_logprob_abs_diff")
"""Mean |engine's − trainer's log-prob|: of the batch before the first optimizer step, or as the
loss saw it."""


@dataclass(slots=True)
class IterationRecord:
    """One trained iteration: metrics by name, and seconds by stage."""

    iteration: int
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Evaluation:
    """Accuracy (mean reward, 0 to 1) on one held-out set after so many trained iterations; 0 is
    before training."""

    iteration: int
    dataset: str
    accuracy: float
    n: int
    """Responses that were scored."""


@dataclass(slots=True)
class SampleChange:
    """The same prompt answered before and after training. A reward of None: not scored."""

    prompt: str
    before: str
    after: str
    label: str | None = None
    reward_before: float | None = None
    reward_after: float | None = None


@dataclass(slots=True)
class RunHistory:
    """A run as its reader sees it. Iterations and evaluations are in order of iteration."""

    run: str
    iterations: list[IterationRecord] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    samples: list[SampleChange] = field(default_factory=list)
    config_yaml: str = ""
    totals: dict[str, Any] = field(default_factory=dict)
    """Further figures by name (JSON-able), such as `samples`, `response_tokens`, `seconds`; shown
    as they are."""
    other_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds spent outside iterations in all, by what on: `start`, `eval`, `checkpoint`."""
    packages: dict[str, str] = field(default_factory=dict)
    """Package → version."""
    description: str = ""
    """One sentence under the title of the report."""
    status: str = "finished"

    @property
    def datasets(self) -> list[str]:
        """Names of the held-out sets, in order of appearance."""
        return list(dict.fromkeys(evaluation.dataset for evaluation in self.evaluations))

    def accuracy(self, dataset: str) -> list[Evaluation]:
        """Evaluations of one set, in order."""
        return [evaluation for evaluation in self.evaluations if evaluation.dataset == dataset]

    def series(self, metric: str) -> list[tuple[int, float]]:
        """(iteration, value) of a metric, where it was recorded."""
        return [
            (record.iteration, record.metrics[metric])
            for record in self.iterations
            if metric in record.metrics
        ]

    def logprob_difference(self) -> list[tuple[int, float]]:
        """(iteration, mean absolute difference between engine and trainer), from the first source
        that was recorded."""
        return next((series for name in LOGPROB_DIFFERENCE if (series := self.series(name))), [])

    @property
    def stages(self) -> list[str]:
        """Names of the stages that were timed, in order of appearance."""
        return list(dict.fromkeys(stage for record in self.iterations for stage in record.seconds))

    def stage_seconds(self, stage: str) -> list[float]:
        """Seconds of one stage in every iteration that has it."""
        return [record.seconds[stage] for record in self.iterations if stage in record.seconds]

    @property
    def iteration_seconds(self) -> float | None:
        """Median of the iterations' stage seconds added up; None without any."""
        sums = [sum(record.seconds.values()) for record in self.iterations if record.seconds]
        return statistics.median(sums) if sums else None
