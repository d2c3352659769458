"""TensorBoard event files (rlpipe.observe.tensorboard)."""

from __future__ import annotations

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlpipe.observe.tensorboard import TensorBoardSink


def read(directory) -> EventAccumulator:
    accumulator = EventAccumulator(str(directory), purge_orphaned_data=True)
    accumulator.Reload()
    return accumulator


def test_tensorboard_reads_what_was_written(tmp_path):
    with TensorBoardSink(tmp_path / "deep" / "tb") as sink:
        sink.write(0, {"train/loss": 1.5, "rollout/raw_reward": 0.25})
        sink.write(1, {"train/loss": 0.5})
        sink.write(2, {})
    accumulator = read(sink.directory)
    assert [(event.step, event.value) for event in accumulator.Scalars("train/loss")] == [
        (0, 1.5),
        (1, 0.5),
    ]
    assert accumulator.Scalars("rollout/raw_reward")[0].value == pytest.approx(0.25)


def test_values_are_on_disk_before_the_sink_is_closed(tmp_path):
    sink = TensorBoardSink(tmp_path)
    sink.write(3, {"x": 1.0})
    assert read(tmp_path).Scalars("x")[0].step == 3
    sink.close()


def test_a_resumed_run_hides_the_steps_it_takes_again(tmp_path, monkeypatch):
    with TensorBoardSink(tmp_path) as sink:
        for step in range(4):
            sink.write(step, {"x": 1.0})
    later = max(path.stat().st_mtime for path in tmp_path.iterdir()) + 100
    monkeypatch.setattr("time.time", lambda: later)
    with TensorBoardSink(tmp_path, first_step=2) as sink:
        sink.write(2, {"x": 2.0})
    assert [(event.step, event.value) for event in read(tmp_path).Scalars("x")] == [
        (0, 1.0),
        (1, 1.0),
        (2, 2.0),
    ]


def test_tensorboard_shows_a_line_of_text_at_each_step(tmp_path):
    with TensorBoardSink(tmp_path) as sink:
        for step in range(2):
            sink.tell(step, "commit_sha256", f"{step}" * 64)
    found = read(tmp_path)
    told = [
        (event.step, event.tensor_proto.string_val[0].decode())
        for event in found.Tensors("commit_sha256")
    ]
    assert told == [(0, "0" * 64), (1, "1" * 64)]
    assert found.SummaryMetadata("commit_sha256").plugin_data.plugin_name == "text"
