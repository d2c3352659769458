"""Functions of the user inside the trainer ranks: found and looked at before anything runs
(rlpipe.config.megatron_hooks)."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from rlpipe.config.megatron_hooks import CALLS, MegatronHooks
from rlpipe.config.train import TrainConfig
from rlpipe.errors import ConfigError

HOOKS = """
HEARD = []
def init(args):
    HEARD.append(("init", args))
def log_prob(args, model, store_prefix):
    HEARD.append(("log_prob", args, model, store_prefix))
def step(args, rollout_id, step_id, model, optimizer, opt_param_scheduler):
    HEARD.append(("step", args, rollout_id, step_id, model, optimizer, opt_param_scheduler))
"""


def test_they_get_what_slime_gives_them(tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text(HOOKS)
    names = dict(zip(CALLS, ("init", "log_prob", "step"), strict=True))
    hooks = MegatronHooks(
        TrainConfig.model_validate({key: f"{file}:{name}" for key, name in names.items()}), "args"
    )
    hooks.init()
    hooks.before_log_prob("model", "ref_")
    hooks.before_train_step(7, 1, "model", "optimizer", "schedule")
    heard = inspect.unwrap(hooks._hooks["custom_megatron_init_path"]).__globals__["HEARD"]
    assert heard == [
        ("init", "args"),
        ("log_prob", "args", ["model"], "ref_"),
        ("step", "args", 7, 1, ["model"], "optimizer", "schedule"),
    ]


def test_without_any_nothing_happens():
    MegatronHooks(TrainConfig()).init()


@pytest.mark.parametrize("key", CALLS)
def test_one_that_takes_other_arguments_is_told_which_it_would_get(tmp_path: Path, key: str):
    file = tmp_path / "mine.py"
    file.write_text("def mine():\n    pass\n")
    with pytest.raises(ConfigError, match="cannot be called") as caught:
        MegatronHooks(TrainConfig.model_validate({key: f"{file}:mine"}))
    assert caught.value.where == f"train.{key}"
    assert caught.value.expected == f"({', '.join(CALLS[key])})"
