"""Observation of a run: metrics sinks, reports, profiles, and conditions on metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlpipe.config.base import Config, Tuning


class ObserveConfig(Config):
    """Metrics, reports and profiles of a run."""

    tensorboard: bool = Tuning(True)
    """Write TensorBoard event files under `{home}/{run}/tensorboard/{run}`."""
    report_interval: int = Tuning(default=20, ge=1)
    """Iterations from one writing of the report page, its curves and Prefect's overview to the
    next. They are also written after each evaluation and at the end."""
    prometheus_port: int | None = Tuning(default=None, ge=1, le=65535)
    """Serve the newest metrics at `http://host:port/metrics` while a driver runs. None: no
    server."""
    prometheus_host: str = Tuning("127.0.0.1")
    """Address that this server binds to."""
    use_wandb: bool = Tuning(False)
    """Log to Weights & Biases too (`pip install wandb`; the key comes from WANDB_API_KEY or `wandb
    login`)."""
    wandb_mode: Literal["online", "offline", "disabled"] | None = Tuning(None)
    """Mode of Weights & Biases; None: WANDB_MODE, else online."""
    wandb_project: str | None = Tuning(None)
    """Project name; None: rlpipe."""
    wandb_team: str | None = Tuning(None)
    """Entity (team or user); None: the default of the key."""
    wandb_group: str | None = Tuning(None)
    """Group of runs that are shown together; None: no group."""
    wandb_run_id: str | None = Tuning(None)
    """Id of the W&B run; the same id continues the same curves. None: the run's name."""
    wandb_dir: str | None = Tuning(None)
    """Directory of the W&B files; None: `{home}/{run}`."""
    wandb_host: str | None = Tuning(None)
    """URL of the W&B server; None: https://api.wandb.ai."""
    samples_in_report: int = Tuning(default=8, ge=0)
    """Samples before and after training that the report page shows; 0: none."""
    profile_target: tuple[Literal["train_overall", "train_actor", "train_log_probs"], ...] = Tuning(
        ()
    )
    """Work of a trainer rank that torch's profiler records: optimizer steps (`train_actor`),
    scoring of the batch (`train_log_probs`) or both (`train_overall`). Traces contain memory and
    are `{home}/{run}/profile/*.json.gz`, for chrome://tracing or Perfetto. `[]`: nothing."""
    profile_step_start: int = Tuning(default=10, ge=0)
    """First iteration that is profiled."""
    profile_step_end: int = Tuning(default=12, ge=0)
    """First iteration after the profile."""
    profile_ranks: tuple[Annotated[int, Field(ge=0)], ...] = Tuning((0,))
    """Trainer ranks that are profiled. Separate ranks of the critic are numbered after the
    policy's."""
    custom_rollout_log_function_path: str | None = Tuning(None)
    """User function that logs each iteration's rollout: `(rollout_id, args, samples, extra_metrics,
    rollout_time)`. If it returns true, TensorBoard and terminal skip the rollout's metrics. An
    exception is reported and does not stop the run. None: no function. See
    `rlpipe.observe.log_functions`."""
    custom_eval_rollout_log_function_path: str | None = Tuning(None)
    """The same for each evaluation: `(rollout_id, args, data, extra_metrics)`. None: no
    function."""
    record_memory_history: bool = Tuning(False)
    """Record all CUDA allocations of the profiled work, iterations and ranks (of all work if
    profile_target is empty) as `{home}/{run}/profile/memory-*.pickle`, for
    https://pytorch.org/memory_viz. An out-of-memory error writes the file too. Needs CUDA."""


class StopCondition(Config):
    """End the run early at a value of an evaluation metric."""

    metric: str
    """Metric name, such as `eval/heldout/accuracy`."""
    at_least: float
    """End the run if the metric has at least this value."""

    def is_met(self, metrics: Mapping[str, float]) -> bool:
        """True if the metric has at least this value. A missing metric has not."""
        return metrics.get(self.metric, float("-inf")) >= self.at_least


class Gate(Config):
    """Bounds on one metric of an iteration."""

    metric: str
    """Name as in TensorBoard: `train/grad_norm`, `max_logprob_difference`,
    `rollout/truncated_ratio`, `eval/heldout/accuracy`."""
    at_most: float | None = Tuning(None)
    """Largest allowed value; None: no upper bound."""
    at_least: float | None = Tuning(None)
    """Smallest allowed value; None: no lower bound."""
    falls_by: float | None = Tuning(default=None, gt=0)
    """For an evaluation metric: largest allowed distance below the run's best earlier value. None:
    no such bound."""

    @model_validator(mode="after")
    def _has_a_bound(self):
        if self.at_most is None and self.at_least is None and self.falls_by is None:
            raise ValueError(f"gate on {self.metric}: set at_most, at_least or falls_by")
        if self.falls_by is not None and not self.metric.startswith("eval/"):
            raise ValueError(
                f"gate on {self.metric}: falls_by is for eval/ metrics; use at_most or at_least"
            )
        return self

    def violation(self, value: float, best: float | None = None) -> str | None:
        """Describe the bounds that `value` breaks; None if it breaks none.

        `best`: best value of the run's earlier evaluations. NaN breaks every gate.
        """
        # Written as `not value <= bound`, so that NaN breaks the bound.
        broken = []
        if self.at_most is not None and not value <= self.at_most:
            broken.append(f"at most {self.at_most:g}")
        if self.at_least is not None and not value >= self.at_least:
            broken.append(f"at least {self.at_least:g}")
        if self.falls_by is not None and best is not None and not value >= best - self.falls_by:
            broken.append(f"at least {best - self.falls_by:g}, {self.falls_by:g} below the best")
        if not broken and value != value:
            broken = ["a number"]
        return f"{self.metric} is {value:.4g}, expected {' and '.join(broken)}" if broken else None


class GatesConfig(Config):
    """Metric bounds that pause a run after an iteration's optimizer steps and before its push.

    A broken bound pauses the iteration's flow run, and an artifact gives the reason. Resume in
    Prefect's pages (or `prefect flow-run resume`) continues the run; Cancel ends it. A loss or
    gradient that is not finite needs no gate: it is an error.
    """

    bounds: tuple[Gate, ...] = Tuning(())
    """Each gate is checked in every iteration that has its metric. `[]`: no gates."""
    timeout_s: float = Tuning(default=3 * 3600.0, ge=1)
    """A pause without an answer fails the iteration after this many seconds; the same command
    pauses again. Must be less than `orchestration.timeout_s`, because later iterations wait for the
    paused one."""
    poll_s: float = Tuning(default=5.0, ge=1)
    """Seconds between two checks for an answer."""
