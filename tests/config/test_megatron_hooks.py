"""Load and call user functions inside trainer ranks (rlpipe.config.megatron_hooks)."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from rlpipe.config.megatron_hooks import PARAMETERS, MegatronHooks
from rlpipe.config.train import TrainConfig
from rlpipe.errors import ConfigError

HOOKS = """
CALLS = []
def init(args):
    CALLS.append(("init", args))
def log_prob(args, model, store_prefix):
    CALLS.append(("log_prob", args, model, store_prefix))
def step(args, rollout_id, step_id, model, optimizer, opt_param_scheduler):
    CALLS.append(("step", args, rollout_id, step_id, model, optimizer, opt_param_scheduler))
"""


def test_hooks_get_the_arguments_of_slime(tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text(HOOKS)
    names = dict(zip(PARAMETERS, ("init", "log_prob", "step"), strict=True))
    hooks = MegatronHooks(
        TrainConfig.model_validate({key: f"{file}:{name}" for key, name in names.items()}), "args"
    )
    hooks.init()
    hooks.before_log_prob(["model"], "ref_")
    hooks.before_train_step(7, 1, ["model"], "optimizer", "schedule")
    calls = inspect.unwrap(hooks._hooks["custom_megatron_init_path"]).__globals__["CALLS"]
    assert calls == [
        ("init", "args"),
        ("log_prob", "args", ["model"], "ref_"),
        ("step", "args", 7, 1, ["model"], "optimizer", "schedule"),
    ]


def test_a_hook_that_is_not_set_does_nothing():
    MegatronHooks(TrainConfig()).init()


@pytest.mark.parametrize("key", PARAMETERS)
def test_a_hook_with_other_parameters_is_refused_with_the_expected_ones(tmp_path: Path, key: str):
    file = tmp_path / "mine.py"
    file.write_text("def mine():\n    pass\n")
    with pytest.raises(ConfigError, match="cannot be called") as caught:
        MegatronHooks(TrainConfig.model_validate({key: f"{file}:mine"}))
    assert caught.value.where == f"train.{key}"
    assert caught.value.expected == f"({', '.join(PARAMETERS[key])})"
