"""`RunHistory`: the data of a run for summary, overview, report and pictures.

`rlpipe.lineage.history` reads it from the store.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

REWARD = "rollout/raw_reward"
LOGPROB_DIFFERENCE = ("rollout/logprob_abs_diff/mean", "train/train_rollout_logprob_abs_diff")
"""Mean |rollout log-prob − trainer's log-prob|: of the batch before the first optimizer step, else
of the loss."""

PAIR_ACCURACY = "train/rewards/accuracies"
"""Metric of preference pairs: share with the higher reward for the chosen response."""
PAIR_MARGIN = "train/rewards/margins"
"""Metric of preference pairs: reward of the chosen response less that of the rejected, mean."""
ACCURACY = "accuracy"
PASS_RATE = "pass rate"
MEAN_REWARD = "mean reward"
"""Measures of a held-out set."""
NAMED_PROMPTS = 3
"""Prompts that a sentence about errors names."""
SHARES = (ACCURACY, PASS_RATE)
"""Measures that are shown in percent."""


@dataclass(slots=True)
class IterationRecord:
    """One trained iteration: metrics by name, and seconds by stage."""

    iteration: int
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    reward_errors: int = 0
    """Samples whose reward function failed."""
    failed: dict[str, Any] = field(default_factory=dict)
    """Of these samples: `prompts` (text → number), and `last_error`."""
    reward: dict[str, dict[str, Any]] = field(default_factory=dict)
    """`settings` of the reward, and the `sources` of its user functions: path → sha256."""


@dataclass(slots=True)
class Evaluation:
    """Rewards on one held-out set.

    `iteration` is the number of trained iterations; 0 is before training.
    """

    iteration: int
    dataset: str
    mean_reward: float
    n: int
    """Number of scored responses."""
    binary: bool = True
    """True if every reward is 0 or 1, so that the mean reward is an accuracy."""
    passed: float | None = None
    """Share of rewards of at least the set's `pass_threshold`; None if it is the default."""


@dataclass(slots=True)
class Score:
    """One point of the curve of a held-out set, in the set's measure."""

    iteration: int
    value: float
    n: int


@dataclass(slots=True)
class SampleChange:
    """Responses to one prompt before and after training. A reward None was not scored."""

    prompt: str
    before: str
    after: str
    label: str | None = None
    reward_before: float | None = None
    reward_after: float | None = None
    pictures: tuple[str, ...] = ()
    """Data URIs of the images of the prompt."""


@dataclass(slots=True)
class RunHistory:
    """Data of a run. Iterations and evaluations are in order of iteration."""

    run: str
    iterations: list[IterationRecord] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    samples: list[SampleChange] = field(default_factory=list)
    config_yaml: str = ""
    totals: dict[str, Any] = field(default_factory=dict)
    """Further JSON-able numbers by name, such as `samples`, `response_tokens`, `seconds`."""
    other_seconds: dict[str, float] = field(default_factory=dict)
    """Total seconds outside stages: `start`, `eval`, `checkpoint`, `between stages`."""
    wall_seconds: list[float] = field(default_factory=list)
    """Seconds of the iterations as the terminal shows them, without those of other machines."""
    has_reference: bool = True
    """False if no reference model was scored, so that a KL to it has no meaning."""
    links: dict[str, str] = field(default_factory=dict)
    """Title → address of other pages of the run, relative to the report's folder or absolute."""
    packages: dict[str, str] = field(default_factory=dict)
    """Package → version."""
    reward_changes: dict[int, str] = field(default_factory=dict)
    """First iteration with another reward than the iteration before it → what changed."""
    description: str = ""
    """One sentence under the title of the report."""
    status: str = "finished"

    @property
    def datasets(self) -> list[str]:
        """Return the names of the held-out sets, in order of appearance."""
        return list(dict.fromkeys(evaluation.dataset for evaluation in self.evaluations))

    def measure(self, dataset: str) -> str:
        """Return the name of the measure of one set: an accuracy only if it is one.

        `ACCURACY` if all rewards are 0 or 1 and some are 1, `PASS_RATE` if a threshold is given,
        else `MEAN_REWARD`.
        """
        evaluations = self._of(dataset)
        if show_accuracy(evaluations):
            return ACCURACY
        if all(evaluation.passed is not None for evaluation in evaluations):
            return PASS_RATE
        return MEAN_REWARD

    def scores(self, dataset: str) -> list[Score]:
        """Return the curve of one set in its measure, in order."""
        passes = self.measure(dataset) == PASS_RATE
        return [
            Score(
                evaluation.iteration,
                (evaluation.passed or 0.0) if passes else evaluation.mean_reward,
                evaluation.n,
            )
            for evaluation in self._of(dataset)
        ]

    def _of(self, dataset: str) -> list[Evaluation]:
        return [evaluation for evaluation in self.evaluations if evaluation.dataset == dataset]

    def series(self, metric: str) -> list[tuple[int, float]]:
        """Return (iteration, value) of a metric for the iterations that recorded it."""
        return [
            (record.iteration, record.metrics[metric])
            for record in self.iterations
            if metric in record.metrics
        ]

    def logprob_difference(self) -> list[tuple[int, float]]:
        """Return (iteration, mean absolute log-prob difference of engine and trainer).

        The values are from the first metric of `LOGPROB_DIFFERENCE` that was recorded.
        """
        return next((series for name in LOGPROB_DIFFERENCE if (series := self.series(name))), [])

    def reward_errors(self) -> str:
        """Return a sentence about all samples whose reward function failed; "" without any."""
        failed = [record for record in self.iterations if record.reward_errors]
        if not failed:
            return ""
        errors = sum(record.reward_errors for record in failed)
        prompts: Counter[str] = Counter()
        for record in failed:
            prompts.update(record.failed.get("prompts", {}))
        named = ", ".join(f"{text} ({n})" for text, n in prompts.most_common(NAMED_PROMPTS))
        more = len(prompts) - NAMED_PROMPTS
        rest = f" and {more} more" if more > 0 else ""
        last = failed[-1].failed.get("last_error")
        return (
            f"{errors:,} samples had reward errors, in {len(failed):,} of "
            f"{len(self.iterations):,} iterations"
            + (f"; prompts: {named}{rest}" if named else "")
            + (f"; last error: {last}" if last else "")
        )

    @property
    def stages(self) -> list[str]:
        """Return the names of the timed stages, in order of appearance."""
        return list(dict.fromkeys(stage for record in self.iterations for stage in record.seconds))

    def stage_seconds(self, stage: str) -> list[float]:
        """Return the seconds of a stage, of every iteration that has it."""
        return [record.seconds[stage] for record in self.iterations if stage in record.seconds]

    @property
    def iteration_seconds(self) -> float | None:
        """Return the median of an iteration's seconds, or if no process recorded them here, of the
        sums of its stages; None without either."""
        seconds = self.wall_seconds or [
            sum(record.seconds.values()) for record in self.iterations if record.seconds
        ]
        return statistics.median(seconds) if seconds else None


def show_accuracy(evaluations: Sequence[Evaluation]) -> bool:
    """True if the mean rewards of a set are accuracies: all rewards are 0 or 1, and some are 1.

    Rewards that are all 0 can have any scale. They are usual before training. True without an
    evaluation.
    """
    all_zero = bool(evaluations) and not any(one.mean_reward for one in evaluations)
    return all(one.binary for one in evaluations) and not all_zero


def score_text(value: float, measure: str) -> str:
    """Return a score as text: a share in percent, a mean reward with three digits."""
    if measure not in SHARES:
        return f"{value:.3g}"
    # 0.4 % and 0 % are different results.
    return f"{value:.1%}" if 0 < value < 0.01 else f"{value:.0%}"
