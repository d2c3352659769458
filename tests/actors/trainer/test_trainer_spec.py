"""`args` of user functions in the trainer (rlpipe.actors.trainer.trainer_spec)."""

from __future__ import annotations

import pickle
from pathlib import Path

from rlpipe.actors.trainer.trainer_spec import TrainerSpec
from tests.actors.trainer.trained import configuration


def spec(tmp_path: Path, **sections) -> TrainerSpec:
    config = configuration("/models/m", "run", reward={"function": {"type": "math"}}, **sections)
    return TrainerSpec.of(config, model_dir="/models/m", store_root="/store", work_dir=tmp_path)


def test_user_functions_get_slimes_names_and_the_spec_can_be_pickled(tmp_path: Path):
    hooked = spec(tmp_path, advantage={"custom_advantage_function_path": "mine.py:f", "gamma": 0.9})
    assert (
        hooked.hook_args.rollout_batch_size,
        hooked.hook_args.n_samples_per_prompt,
        hooked.hook_args.gamma,
    ) == (4, 2, 0.9)
    assert pickle.loads(pickle.dumps(hooked)) == hooked
    of_loss = {"loss": {"custom_pg_loss_reducer_function_path": "mine.py:f"}}
    assert spec(tmp_path, train=of_loss).hook_args is not None


def test_without_user_functions_there_are_no_args(tmp_path: Path):
    assert spec(tmp_path).hook_args is None
