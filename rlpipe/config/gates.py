"""Gates: figures at which a run stops and asks. Not here: measuring them, or stopping
(`tasks.gates`)."""

from __future__ import annotations

from pydantic import model_validator

from rlpipe.config.base import Config, Tuning


class Gate(Config):
    """A bound on one figure of an iteration."""

    metric: str
    """Name as in TensorBoard: `train/grad_norm`, `max_logprob_difference`,
    `rollout/truncated_ratio`, `eval/heldout/accuracy`."""
    at_most: float | None = Tuning(None)
    """None: however large."""
    at_least: float | None = Tuning(None)
    """None: however small."""
    falls_by: float | None = Tuning(default=None, gt=0)
    """Of an evaluation's metric: at most so far below the best of the run before. None: however
    far."""

    @model_validator(mode="after")
    def _bounds_something(self):
        if self.at_most is None and self.at_least is None and self.falls_by is None:
            raise ValueError(f"gate on {self.metric}: set at_most, at_least or falls_by")
        if self.falls_by is not None and not self.metric.startswith("eval/"):
            raise ValueError(
                f"gate on {self.metric}: falls_by is for eval/ metrics; use at_most or at_least"
            )
        return self

    def broken_by(self, value: float, best: float | None = None) -> str | None:
        """What is wrong with a value, in words; None if nothing is. NaN breaks every gate. `best`:
        of the evaluations before."""
        bounds = {
            f"at most {self.at_most:g}" if self.at_most is not None else "": self.at_most is None
            or value <= self.at_most,
            f"at least {self.at_least:g}" if self.at_least is not None else "": self.at_least
            is None
            or value >= self.at_least,
        }
        if self.falls_by is not None and best is not None:
            bounds[f"at least {best - self.falls_by:g}, {self.falls_by:g} below the best"] = (
                value >= best - self.falls_by
            )
        wrong = [bound for bound, held in bounds.items() if not held] or (
            ["a number"] if value != value else []
        )
        return f"{self.metric} is {value:.4g}, expected {' and '.join(wrong)}" if wrong else None


class GatesConfig(Config):
    """Where a run stops and asks a person: after an iteration's optimizer steps, before its weights
    reach engines.

    The iteration's flow run is paused then, and an artifact says why; Resume in Prefect's pages (or
    `prefect flow-run resume`) lets it go on, Cancel ends it. A loss or a gradient that is not
    finite needs no gate: that is an error.
    """

    bounds: tuple[Gate, ...] = Tuning(())
    """Each is asked of each iteration that has its metric. (): no gates."""
    timeout_s: float = Tuning(default=3 * 3600.0, ge=1)
    """A pause that nobody answers fails the iteration after so long; the same command asks again.
    Shorter than `orchestration.timeout_s`, in which later iterations wait for this one."""
    poll_s: float = Tuning(default=5.0, ge=1)
    """Seconds between two looks whether somebody has answered."""
