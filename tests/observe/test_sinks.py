"""Where figures go beside TensorBoard (rlpipe.observe.sinks)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import httpx
import pytest

from rlpipe.config.observe import ObserveConfig
from rlpipe.errors import ConfigError, ResourceError
from rlpipe.observe.sinks import Sinks
from rlpipe.ports import free_port


def sinks(folder: Path, **observe: Any) -> Sinks:
    return Sinks(ObserveConfig(**observe), "my.run", folder, 0, {"seed": 1})


def test_prometheus_is_served_the_newest_figures_of_the_run(tmp_path: Path):
    port = free_port()
    with sinks(tmp_path, prometheus_port=port) as made:
        for step in range(2):
            made.write(step, {"train/loss": 1.5 - step, "eval/held-out/pass@1": 0.25})
        text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    assert 'rlpipe_train_loss{run="my.run"} 0.5' in text and 'rlpipe_eval_held_out_pass_1{run="my.run"} 0.25' in text
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
