"""Where figures go beside TensorBoard (rlpipe.observe.sinks)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from rlpipe.config.observe import ObserveConfig
from rlpipe.errors import ConfigError, ResourceError
from rlpipe.observe.sinks import Sinks
from rlpipe.observe.tensorboard import TensorBoardSink
from rlpipe.system.ports import free_port


def sinks(folder: Path, **observe: Any) -> Sinks:
    return Sinks(ObserveConfig(**observe), "my.run", folder, 0, {"seed": 1})


def test_prometheus_is_served_the_newest_figures_of_the_run(tmp_path: Path):
    port = free_port()
    with sinks(tmp_path, prometheus_port=port) as made:
        for step in range(2):
            made.write(step, {"train/loss": 1.5 - step, "eval/held-out/pass@1": 0.25})
        text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    assert (
        'rlpipe_train_loss{run="my.run"} 0.5' in text
        and 'rlpipe_eval_held_out_pass_1{run="my.run"} 0.25' in text
    )
    assert 'rlpipe_iteration{run="my.run"} 1.0' in text
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/metrics")


def test_a_port_that_is_taken_is_named_and_what_was_opened_before_it_is_closed(tmp_path: Path):
    port = free_port()
    with sinks(tmp_path, tensorboard=False, prometheus_port=port):
        with pytest.raises(ResourceError, match=r"observe\.prometheus_port") as caught:
            sinks(tmp_path, prometheus_port=port)
        assert str(caught.value.found).startswith(f"127.0.0.1:{port}: ")
    sinks(tmp_path, prometheus_port=port).close()


def test_weights_and_biases_is_asked_for_by_name_where_it_is_not_installed(tmp_path: Path):
    assert importlib.util.find_spec("wandb") is None
    with pytest.raises(ConfigError, match="is not installed") as caught:
        sinks(tmp_path, tensorboard=False, use_wandb=True)
    assert "pip install wandb" in str(caught.value)


def test_what_was_opened_is_closed_when_the_next_one_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    closed: list[TensorBoardSink] = []
    monkeypatch.setattr(TensorBoardSink, "close", lambda sink: closed.append(sink))
    with pytest.raises(ConfigError):
        sinks(tmp_path, use_wandb=True)
    assert len(closed) == 1


def test_a_run_goes_on_at_weights_and_biases_under_its_name_or_the_id_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked: list[dict[str, Any]] = []
    told: dict[str, Any] = {}
    settings = SimpleNamespace(
        update=lambda said, allow_val_change: told.update(said) if allow_val_change else None
    )
    run = SimpleNamespace(
        define_metric=lambda *_, **__: None, log=asked.append, finish=lambda: None, config=settings
    )
    fake = SimpleNamespace(
        init=lambda **said: (asked.append(said), run)[1], Settings=dict, Error=RuntimeError
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for given in ({}, {"wandb_run_id": "given"}):
        with sinks(tmp_path, tensorboard=False, use_wandb=True, **given) as made:
            made.write(3, {"train/loss": 0.5})
            made.tell(2, "commit_sha256", "aa")
            made.tell(3, "commit_sha256", "bb")
    assert told == {"commit_sha256": "bb", "commit_sha256_iteration": 3}
    assert [(said["id"], said["name"], said["resume"]) for said in asked[::2]] == [
        ("my-run", "my.run", "allow"),
        ("given", "my.run", "allow"),
    ]
    assert asked[1] == {"train/loss": 0.5, "iteration": 3}
    assert "api_key" not in str(asked).lower()
