"""Sinks of metrics (rlpipe.observe.sinks)."""

from __future__ import annotations

import importlib.util
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

from rlpipe.config.observe import ObserveConfig
from rlpipe.errors import ConfigError, ResourceError
from rlpipe.observe.sinks import Sinks, TensorBoardSink
from rlpipe.system.ports import free_port


def sinks(folder: Path, **observe: Any) -> Sinks:
    return Sinks(ObserveConfig(**observe), "my.run", folder, 0, {"seed": 1})


def test_prometheus_serves_the_newest_values(tmp_path: Path):
    port = free_port()
    with closing(sinks(tmp_path, prometheus_port=port)) as opened:
        for step in range(2):
            opened.write(step, {"train/loss": 1.5 - step, "eval/held-out/pass@1": 0.25})
        text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    assert (
        'rlpipe_train_loss{run="my.run"} 0.5' in text
        and 'rlpipe_eval_held_out_pass_1{run="my.run"} 0.25' in text
    )
    assert 'rlpipe_iteration{run="my.run"} 1.0' in text
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/metrics")


def test_a_port_in_use_is_named_and_earlier_sinks_are_closed(tmp_path: Path):
    port = free_port()
    with closing(sinks(tmp_path, tensorboard=False, prometheus_port=port)):
        with pytest.raises(ResourceError, match=r"observe\.prometheus_port") as caught:
            sinks(tmp_path, prometheus_port=port)
        assert str(caught.value.found).startswith(f"127.0.0.1:{port}: ")
    sinks(tmp_path, prometheus_port=port).close()


def test_tensorboard_shows_the_name_of_the_run(tmp_path: Path):
    with closing(sinks(tmp_path)) as opened:
        opened.write(0, {"train/loss": 1.5})
    boards = EventMultiplexer().AddRunsFromDirectory(str(tmp_path / "tensorboard"))
    assert list(boards.Runs()) == ["my.run"]


def test_a_run_that_has_event_files_continues_in_their_folder(tmp_path: Path):
    with closing(TensorBoardSink(tmp_path / "tensorboard")) as earlier:
        earlier.write(0, {"train/loss": 1.5})
    with closing(sinks(tmp_path)) as opened:
        opened.write(1, {"train/loss": 0.5})
    boards = EventMultiplexer().AddRunsFromDirectory(str(tmp_path / "tensorboard"))
    assert list(boards.Runs()) == ["."]
    assert [event.step for event in boards.Reload().Scalars(".", "train/loss")] == [0, 1]


def test_a_missing_wandb_package_is_named(tmp_path: Path):
    assert importlib.util.find_spec("wandb") is None
    with pytest.raises(ConfigError, match="is not installed") as caught:
        sinks(tmp_path, tensorboard=False, use_wandb=True)
    assert "pip install wandb" in str(caught.value)


def test_opened_sinks_are_closed_if_the_next_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    closed: list[TensorBoardSink] = []
    monkeypatch.setattr(TensorBoardSink, "close", lambda sink: closed.append(sink))
    with pytest.raises(ConfigError):
        sinks(tmp_path, use_wandb=True)
    assert len(closed) == 1


def test_wandb_resumes_a_run_by_its_name_or_the_configured_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    calls: list[dict[str, Any]] = []
    texts: dict[str, Any] = {}
    settings = SimpleNamespace(
        update=lambda arguments, allow_val_change: (
            texts.update(arguments) if allow_val_change else None
        )
    )
    run = SimpleNamespace(
        define_metric=lambda *_, **__: None, log=calls.append, finish=lambda: None, config=settings
    )
    fake = SimpleNamespace(
        init=lambda **arguments: (calls.append(arguments), run)[1],
        Settings=dict,
        Error=RuntimeError,
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for keys in ({}, {"wandb_run_id": "given"}):
        with closing(sinks(tmp_path, tensorboard=False, use_wandb=True, **keys)) as opened:
            opened.write(3, {"train/loss": 0.5})
            opened.write_text(2, "commit_sha256", "aa")
            opened.write_text(3, "commit_sha256", "bb")
    assert texts == {"commit_sha256": "bb", "commit_sha256_iteration": 3}
    assert [
        (arguments["id"], arguments["name"], arguments["resume"]) for arguments in calls[::2]
    ] == [
        ("my-run", "my.run", "allow"),
        ("given", "my.run", "allow"),
    ]
    assert calls[1] == {"train/loss": 0.5, "iteration": 3}
    assert "api_key" not in str(calls).lower()


def read_events(directory: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(directory), purge_orphaned_data=True)
    accumulator.Reload()
    return accumulator


def test_tensorboard_reads_the_written_scalars(tmp_path: Path):
    with closing(TensorBoardSink(tmp_path / "deep" / "tb")) as sink:
        sink.write(0, {"train/loss": 1.5, "rollout/raw_reward": 0.25})
        sink.write(1, {"train/loss": 0.5})
        sink.write(2, {})
    accumulator = read_events(sink.directory)
    assert [(event.step, event.value) for event in accumulator.Scalars("train/loss")] == [
        (0, 1.5),
        (1, 0.5),
    ]
    assert accumulator.Scalars("rollout/raw_reward")[0].value == pytest.approx(0.25)


def test_values_are_on_disk_before_the_sink_is_closed(tmp_path: Path):
    sink = TensorBoardSink(tmp_path)
    sink.write(3, {"x": 1.0})
    assert read_events(tmp_path).Scalars("x")[0].step == 3
    sink.close()


def test_a_resumed_run_hides_the_repeated_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with closing(TensorBoardSink(tmp_path)) as sink:
        for step in range(4):
            sink.write(step, {"x": 1.0})
    later = max(path.stat().st_mtime for path in tmp_path.iterdir()) + 100
    monkeypatch.setattr("time.time", lambda: later)
    with closing(TensorBoardSink(tmp_path, first_step=2)) as sink:
        sink.write(2, {"x": 2.0})
    assert [(event.step, event.value) for event in read_events(tmp_path).Scalars("x")] == [
        (0, 1.0),
        (1, 1.0),
        (2, 2.0),
    ]


def test_tensorboard_shows_a_line_of_text_per_step(tmp_path: Path):
    with closing(TensorBoardSink(tmp_path)) as sink:
        for step in range(2):
            sink.write_text(step, "commit_sha256", f"{step}" * 64)
    events = read_events(tmp_path)
    texts = [
        (event.step, event.tensor_proto.string_val[0].decode())
        for event in events.Tensors("commit_sha256")
    ]
    assert texts == [(0, "0" * 64), (1, "1" * 64)]
    assert events.SummaryMetadata("commit_sha256").plugin_data.plugin_name == "text"


def test_no_event_file_exists_before_the_first_value(tmp_path: Path):
    with closing(TensorBoardSink(tmp_path / "tensorboard", first_step=3)) as sink:
        sink.write(3, {})
    assert not (tmp_path / "tensorboard").exists()
