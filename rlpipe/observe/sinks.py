"""Write metrics to TensorBoard, Weights & Biases and Prometheus, as `observe` configures.

`Sinks` opens and closes the configured sinks of a run and forwards every write to each of them.
"""

from __future__ import annotations

import importlib
import os
import re
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from prometheus_client import CollectorRegistry, Gauge, start_http_server

from rlpipe.config.observe import ObserveConfig
from rlpipe.errors import ConfigError, ResourceError

if TYPE_CHECKING:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter


class Sink(Protocol):
    """Destination of metrics; a step is an iteration."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the scalars of one step. Several calls for a step add up."""
        ...

    def write_text(self, step: int, name: str, text: str) -> None:
        """Write a line of text for one step."""
        ...

    def close(self) -> None:
        """Release files and ports."""
        ...


class Sinks:
    """All sinks of a run. The driver makes it and closes it at the end of the run."""

    def __init__(
        self,
        config: ObserveConfig,
        run: str,
        directory: Path,
        first_step: int,
        settings: Mapping[str, Any],
    ) -> None:
        """Open the configured sinks.

        `directory`: `{home}/{run}`. `first_step`: later steps of an earlier process are hidden.
        `settings`: configuration of the run, for sinks that show it.

        Raises: ConfigError if W&B is configured and not installed; ResourceError if the Prometheus
        port is in use.
        """
        self._sinks: list[Sink] = []
        # If a sink cannot be opened, the stack closes the sinks before it.
        with ExitStack() as opened:
            if config.tensorboard:
                self._add(opened, TensorBoardSink(_event_folder(directory, run), first_step))
            if config.prometheus_port is not None:
                prometheus = PrometheusSink(run, config.prometheus_host, config.prometheus_port)
                self._add(opened, prometheus)
            if config.use_wandb:
                self._add(opened, WandbSink(config, run, directory, settings))
            opened.pop_all()

    def _add(self, opened: ExitStack, sink: Sink) -> None:
        opened.callback(sink.close)
        self._sinks.append(sink)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the scalars of one iteration to every sink."""
        for sink in self._sinks:
            sink.write(step, values)

    def write_text(self, step: int, name: str, text: str) -> None:
        """Write a line of text of one iteration to every sink."""
        for sink in self._sinks:
            sink.write_text(step, name, text)

    def close(self) -> None:
        """Close every sink, even if closing one of them fails."""
        with ExitStack() as closing:
            for sink in self._sinks:
                closing.callback(sink.close)


def _event_folder(directory: Path, run: str) -> Path:
    """Return the folder of the event files of a run.

    TensorBoard names a run by its folder below `--logdir`, so the run has a folder of its name. A
    run of an earlier version continues in the folder above.
    """
    folder = directory / "tensorboard"
    return folder if any(folder.glob("events.*")) else folder / run


class TensorBoardSink:
    """TensorBoard event files. Every write reaches the disk at once.

    Uses TensorBoard's own writer. torch's `SummaryWriter` would import torch into the process that
    drives the run, for more than a second of CPU time.
    """

    def __init__(self, directory: str | Path, first_step: int = 0) -> None:
        """Set the folder of the event file, which the first write creates.

        `first_step`: TensorBoard hides earlier values of this and later steps, which an earlier
        process of the run wrote.
        """
        self.directory = Path(directory)
        self._first_step = first_step
        self._opened: EventFileWriter | None = None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the scalars of one step."""
        summary = _proto("summary").Summary
        if values:
            scalars = [
                summary.Value(tag=name, simple_value=float(value)) for name, value in values.items()
            ]
            self._add(_proto("event").Event(step=step, summary=summary(value=scalars)))

    def write_text(self, step: int, name: str, text: str) -> None:
        """Write a line of text for one step."""
        from tensorboard.plugins.text.summary_v2 import text_pb

        self._add(_proto("event").Event(step=step, summary=text_pb(name, text)))

    def _add(self, event: Any) -> None:
        """Write an event to the disk. The first one creates the file."""
        if self._opened is None:
            self._opened = self._open()
        event.wall_time = time.time()
        self._opened.add_event(event)
        self._opened.flush()

    def _open(self) -> EventFileWriter:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        writer = EventFileWriter(str(self.directory))
        if self._first_step:
            event = _proto("event")
            start = event.SessionLog(status=event.SessionLog.START)
            writer.add_event(
                event.Event(wall_time=time.time(), step=self._first_step, session_log=start)
            )
        return writer

    def close(self) -> None:
        """Close the event file, if one was created."""
        if self._opened is not None:
            self._opened.close()


def _proto(name: str) -> Any:
    """Return one of TensorBoard's protobuf modules, which have no types."""
    return importlib.import_module(f"tensorboard.compat.proto.{name}_pb2")


class PrometheusSink:
    """The newest values at `http://host:port/metrics`.

    The gauge of `train/loss` is `rlpipe_train_loss{run="…"}`; `rlpipe_iteration` is the step.
    """

    def __init__(self, run: str, host: str, port: int) -> None:
        """Start the HTTP server. Raises: ResourceError if the port cannot be used."""
        self._run = run
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        try:
            self._server, self._thread = start_http_server(port, host, self._registry)
        except OSError as error:
            raise ResourceError(
                "the Prometheus port cannot be used",
                where="observe.prometheus_port",
                found=f"{host}:{port}: {error.strerror}",
                do="choose another port, or null to disable Prometheus",
            ) from error

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Replace the values of these gauges."""
        for name, value in {**values, "iteration": step}.items():
            self._gauge(name).labels(self._run).set(value)

    def write_text(self, step: int, name: str, text: str) -> None:
        """Do nothing: Prometheus stores numbers, and each text would be a new series."""

    def close(self) -> None:
        """Stop the server and release the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _gauge(self, name: str) -> Gauge:
        gauge_name = "rlpipe_" + re.sub(r"[^a-zA-Z0-9]+", "_", name)
        if gauge_name not in self._gauges:
            self._gauges[gauge_name] = Gauge(gauge_name, name, ["run"], registry=self._registry)
        return self._gauges[gauge_name]


class WandbSink:
    """A run at Weights & Biases with the id of the run's name; a resumed run continues it.

    The API key is in `WANDB_API_KEY`.
    """

    def __init__(
        self, config: ObserveConfig, run: str, directory: Path, settings: Mapping[str, Any]
    ) -> None:
        """Open the run. Raises: ConfigError if wandb is not installed or refuses the run."""
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
        server = {"base_url": config.wandb_host} if config.wandb_host else {}
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
                settings=wandb.Settings(console="off", silent=True, **server),
            )
        except wandb.Error as error:
            key_state = "set" if os.environ.get("WANDB_API_KEY") else "not set"
            raise ConfigError(
                "Weights & Biases refused the run",
                where="observe.use_wandb",
                found=f"{error} (WANDB_API_KEY is {key_state})",
                do="set WANDB_API_KEY, or observe.wandb_mode=offline",
            ) from error
        # wandb's step cannot decrease, so a resumed run uses a metric as its x axis.
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to each curve over iterations."""
        self._run.log({**values, "iteration": step})

    def write_text(self, step: int, name: str, text: str) -> None:
        """Replace a key of the run's configuration at W&B, which shows the newest text."""
        self._run.config.update({name: text, f"{name}_iteration": step}, allow_val_change=True)

    def close(self) -> None:
        """Send the remaining data and end the run."""
        self._run.finish()
