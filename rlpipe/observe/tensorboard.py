"""TensorBoard event files, written without torch or TensorFlow.

A run that resumes at iteration k writes over what TensorBoard shows from k on: the file begins by
purging those steps.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue] - made by protobuf
from tensorboard.compat.proto.summary_pb2 import (
    Summary,  # pyright: ignore[reportAttributeAccessIssue] - made by protobuf
    SummaryMetadata,  # pyright: ignore[reportAttributeAccessIssue] - made by protobuf
)
from tensorboard.compat.proto.tensor_pb2 import TensorProto  # pyright: ignore[reportAttributeAccessIssue] - made by protobuf
from tensorboard.compat.proto.types_pb2 import DT_STRING  # pyright: ignore[reportAttributeAccessIssue] - made by protobuf
from tensorboard.summary.writer.event_file_writer import EventFileWriter


class TensorBoardSink:
    """One event file. Made by the process that drives a run, closed when it ends; every write
    reaches the disk at once."""

    def __init__(self, directory: str | Path, first_step: int = 0) -> None:
        """`first_step`: steps from here on, left by an earlier process of the same run, are
        hidden."""
        self.directory = Path(directory)
        self._writer = EventFileWriter(str(self.directory))
        if first_step:
            self._add(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Scalars of one step (an iteration, or an optimizer step for `train/` names)."""
        scalars = [
            Summary.Value(tag=name, simple_value=float(value)) for name, value in values.items()
        ]
        if scalars:
            self._add(Event(step=step, summary=Summary(value=scalars)))

    def tell(self, step: int, name: str, text: str) -> None:
        """A line of text at one step."""
        kind = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()])
        self._add(
            Event(
                step=step,
                summary=Summary(value=[Summary.Value(tag=name, metadata=kind, tensor=tensor)]),
            )
        )

    def close(self) -> None:
        self._writer.close()

    def __enter__(self) -> TensorBoardSink:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _add(self, event: Event) -> None:
        event.wall_time = time.time()
        self._writer.add_event(event)
        self._writer.flush()
