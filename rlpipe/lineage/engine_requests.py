"""Request another number of engines for a run, which follows while it runs.

Entry points: `request_engines`, `engines_of`.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from rlpipe.config.load import validate_stored
from rlpipe.config.run import RunConfig
from rlpipe.errors import ConfigError
from rlpipe.lineage.named_runs import require_run
from rlpipe.store.engine_targets import EngineTarget, EngineTargets
from rlpipe.store.epochs import Epochs
from rlpipe.store.objects.files import Files
from rlpipe.store.run_file import find_run


class RunEngines(NamedTuple):
    """The engines of a run."""

    configured: int
    target: EngineTarget | None
    """The newest request, also if a start with another configuration replaced it."""
    running: bool
    """True if a process drives the run."""

    @property
    def number(self) -> int:
        """Engines that the run has, or will have at its next start."""
        return self.target.of(self.configured) if self.target else self.configured


def engines_of(files: Files, home: Path, run: str) -> RunEngines:
    """Return the engines of a run. Raises: ConfigError if it does not exist or has none."""
    return _engines(files, run, _config(files, home, run))


def request_engines(files: Files, home: Path, run: str, engines: int) -> RunEngines:
    """Request a number of engines; return the engines before the request.

    Raises: ConfigError if the run cannot have this number.
    """
    config = _config(files, home, run)
    before = _engines(files, run, config)
    resources = config.resources
    reason = None
    if engines < 1:
        reason = "a run that samples needs an engine; to pause a run, end its process"
    elif resources.external_engines:
        reason = (
            "its engines belong to others; start it again with another resources.external_engines"
        )
    elif resources.shares_gpus:
        reason = (
            "trainer and engines share GPUs, so the trainer's GPUs decide; start it again with "
            "other resources"
        )
    if reason:
        raise ConfigError(
            "the run cannot have this number of engines",
            where=f"run {run}",
            found=f"{engines} engines requested, {before.number} configured",
            do=reason,
        )
    if engines != before.number:
        EngineTargets(files).request(run, engines, configured=before.configured)
    return before


def _config(files: Files, home: Path, run: str) -> RunConfig:
    """Return the configuration of a run's last start, or of its first one."""
    branch = require_run(files, run, where=run)
    last = find_run(home, run)
    config = validate_stored(last.config if last else branch.config)
    if not config.needs_engines:
        raise ConfigError(
            "the run has no engines",
            where=f"run {run}",
            found=f"rollout.type: {config.rollout.type}",
            expected="a run that samples",
        )
    return config


def _engines(files: Files, run: str, config: RunConfig) -> RunEngines:
    lease = Epochs(files).newest(run)
    running = lease is not None and not lease.expired(0.0)
    return RunEngines(config.resources.num_engines, EngineTargets(files).newest(run), running)
