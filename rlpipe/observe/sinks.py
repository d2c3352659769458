"""Where figures go: TensorBoard, Weights & Biases, Prometheus; those that `observe` asks for,
behind one `Sinks`.

Not here: which figures there are (`run_history`), or TensorBoard's files (`tensorboard`).
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Gauge, start_http_server

from rlpipe.config.observe import ObserveConfig
from rlpipe.errors import ConfigError, ResourceError
from rlpipe.observe.tensorboard import TensorBoardSink


class Sink(Protocol):
    """Something that takes the scalars of one step (an iteration)."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Take them. They need not be all there are."""
        ...

    def tell(self, step: int, name: str, text: str) -> None:
        """Take a line of text."""
        ...

    def close(self) -> None:
        """Let go of files and ports."""
        ...


class Sinks:
    """All of a run's. Made by the process that drives it, closed when it ends."""

    def __init__(
        self,
        config: ObserveConfig,
        run: str,
        directory: Path,
        first_step: int,
        settings: Mapping[str, Any],
    ) -> None:
        """`directory`: `{home}/{run}`. `first_step`: steps from here on, left by an earlier
        process, are replaced or hidden. `settings`: the run's configuration, for who shows it.

        Raises: ConfigError if W&B is asked for and not installed; ResourceError if the port is
        taken.
        """
        self._sinks: list[Sink] = []
        with ExitStack() as made:
            if config.tensorboard:
                self._add(made, TensorBoardSink(directory / "tensorboard", first_step))
            if config.prometheus_port is not None:
                self._add(made, PrometheusSink(run, config.prometheus_host, config.prometheus_port))
            if config.use_wandb:
                self._add(made, WandbSink(config, run, directory, settings))
            made.pop_all()

    def _add(self, made: ExitStack, sink: Sink) -> None:
        made.callback(sink.close)
        self._sinks.append(sink)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Scalars of one iteration, to all of them."""
        for sink in self._sinks:
            sink.write(step, values)

    def tell(self, step: int, name: str, text: str) -> None:
        """A line of text of one iteration, to all of them."""
        for sink in self._sinks:
            sink.tell(step, name, text)

    def close(self) -> None:
        """Close all of them."""
        with ExitStack() as closing:
            for sink in self._sinks:
                closing.callback(sink.close)

    def __enter__(self) -> Sinks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class PrometheusSink:
    """The newest figures at `http://host:port/metrics`: `rlpipe_train_loss{run="…"}` for
    `train/loss`, and `rlpipe_iteration`."""

    def __init__(self, run: str, host: str, port: int) -> None:
        """Raises: ResourceError if the port cannot be had."""
        self._run, self._registry = run, CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        try:
            self._server, self._thread = start_http_server(port, host, self._registry)
        except OSError as error:
            raise ResourceError(
                "its port cannot be used",
                where="observe.prometheus_port",
                found=f"{host}:{port}: {error.strerror}",
                do="choose another, or null for none",
            ) from error

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Replace these figures."""
        for name, value in {**values, "iteration": step}.items():
            self._gauge(name).labels(self._run).set(value)

    def tell(self, step: int, name: str, text: str) -> None:
        """Leave it out: Prometheus keeps numbers, and a label for each text would be a series for
        each."""

    def close(self) -> None:
        """Give the port back."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _gauge(self, name: str) -> Gauge:
        known = "rlpipe_" + re.sub(r"[^a-zA-Z0-9]+", "_", name)
        if known not in self._gauges:
            self._gauges[known] = Gauge(known, name, ["run"], registry=self._registry)
        return self._gauges[known]


class WandbSink:
    """A run at Weights & Biases, known by the run's name: resumed, it goes on there. The key is
    `WANDB_API_KEY`'s."""

    def __init__(
        self, config: ObserveConfig, run: str, directory: Path, settings: Mapping[str, Any]
    ) -> None:
        """Raises: ConfigError if the package is not installed, or it does not let us in."""
        try:
            wandb = importlib.import_module("wandb")
        except ImportError as error:
            raise ConfigError(
                "Weights & Biases is not installed",
                where="observe.use_wandb",
                found=str(error),
                do="pip install wandb, or observe.use_wandb=false",
            ) from error
        folder = Path(config.wandb_dir) if config.wandb_dir else directory
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                project=config.wandb_project or "rlpipe",
                entity=config.wandb_team,
                group=config.wandb_group,
                name=run,
                id=config.wandb_run_id or re.sub(r"[^a-zA-Z0-9_-]", "-", run),
                resume="allow",
                mode=config.wandb_mode,
                dir=str(folder),
                config=dict(settings),
                settings=wandb.Settings(
                    console="off",
                    silent=True,
                    **({"base_url": config.wandb_host} if config.wandb_host else {}),
                ),
            )
        except wandb.Error as error:
            known = "set" if os.environ.get("WANDB_API_KEY") else "not set"
            raise ConfigError(
                "Weights & Biases does not take this run",
                where="observe.use_wandb",
                found=f"{error} (WANDB_API_KEY is {known})",
                do="set WANDB_API_KEY, or observe.wandb_mode=offline",
            ) from error
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to each curve, over iterations."""
        self._run.log({**values, "iteration": step})

    def tell(self, step: int, name: str, text: str) -> None:
        """Replace a key of the run's configuration, which shows the newest text."""
        self._run.config.update({name: text, f"{name}_iteration": step}, allow_val_change=True)

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()
