"""What a person watches of a run. Not here: what becomes of it (`rlpipe.observe`,
`tasks.observe`)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlpipe.config.base import Config, Tuning


class ObserveConfig(Config):
    """What a person watches."""

    tensorboard: bool = Tuning(True)
    """Write TensorBoard event files under `{home}/{run}/tensorboard`."""
    report_interval: int = Tuning(default=20, ge=1)
    """The report page, its curves and the overview in Prefect are written after every so many
    iterations, each evaluation, and at the end."""
    prometheus_port: int | None = Tuning(default=None, ge=1, le=65535)
    """Serve the newest figures at `http://host:port/metrics` while the run is driven. None: do
    not."""
    prometheus_host: str = Tuning("127.0.0.1")
    """The address it is bound to."""
    use_wandb: bool = Tuning(False)
    """Log to Weights & Biases too (`pip install wandb`; the key comes from WANDB_API_KEY or `wandb
    login`)."""
    wandb_mode: Literal["online", "offline", "disabled"] | None = Tuning(None)
    """None: WANDB_MODE, else online."""
    wandb_project: str | None = Tuning(None)
    """None: rlpipe."""
    wandb_team: str | None = Tuning(None)
    """Its entity. None: the key's own."""
    wandb_group: str | None = Tuning(None)
    """Runs of one group are shown together."""
    wandb_run_id: str | None = Tuning(None)
    """None: the run's name; the same id goes on with the same curves."""
    wandb_dir: str | None = Tuning(None)
    """Where its files go. None: `{home}/{run}`."""
    wandb_host: str | None = Tuning(None)
    """Server other than https://api.wandb.ai."""
    samples_in_report: int = Tuning(default=8, ge=0)
    """Examples shown before and after in the report page."""
    profile_target: tuple[Literal["train_overall", "train_actor", "train_log_probs"], ...] = Tuning(
        ()
    )
    """What torch's profiler records of a trainer rank: optimizer steps (`train_actor`), scoring of
    the batch (`train_log_probs`) or both (`train_overall`), with memory, as
    `{home}/{run}/profile/*.json.gz` for chrome://tracing or Perfetto. (): nothing."""
    profile_step_start: int = Tuning(default=10, ge=0)
    """First iteration that is profiled."""
    profile_step_end: int = Tuning(default=12, ge=0)
    """First iteration that is not profiled any more."""
    profile_ranks: tuple[Annotated[int, Field(ge=0)], ...] = Tuning((0,))
    """Trainer ranks that are profiled; those that a critic has to itself count after the
    policy's."""
    custom_rollout_log_function_path: str | None = Tuning(None)
    """Function of yours that logs each iteration's rollout: `(rollout_id, args, samples,
    extra_metrics, rollout_time)`. Where it answers true, TensorBoard and the terminal leave that
    out. What it raises is reported and stops nothing. See `rlpipe.observe.functions`."""
    custom_eval_rollout_log_function_path: str | None = Tuning(None)
    """The same for each evaluation: `(rollout_id, args, data, extra_metrics)`."""
    record_memory_history: bool = Tuning(False)
    """Record every allocation of CUDA memory in the same work, iterations and ranks (in all work if
    profile_target is empty) as `{home}/{run}/profile/memory-*.pickle`, for
    https://pytorch.org/memory_viz; after running out of memory too. Needs CUDA."""
