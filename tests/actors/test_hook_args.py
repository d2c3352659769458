"""What functions of the user in the mathematics get as `args` in the trainer."""

from __future__ import annotations

import pickle
from pathlib import Path

from rlpipe.actors.trainer.spec import TrainerSpec
from tests.actors.trainer.trained import configuration


def spec(tmp_path: Path, **sections) -> TrainerSpec:
    config = configuration("/models/m", "run", reward={"function": {"type": "math"}}, **sections)
    return TrainerSpec.of(config, model_dir="/models/m", store_root="/store", work_dir=tmp_path)


def test_they_get_slimes_names_and_arrive_as_they_were_sent(tmp_path: Path):
    hooked = spec(tmp_path, advantage={"custom_advantage_function_path": "mine.py:f", "gamma": 0.9})
    assert (
        hooked.hook_args.rollout_batch_size,
        hooked.hook_args.n_samples_per_prompt,
        hooked.hook_args.gamma,
    ) == (4, 2, 0.9)
    assert pickle.loads(pickle.dumps(hooked)) == hooked
    assert (
        spec(
            tmp_path, train={"loss": {"custom_pg_loss_reducer_function_path": "mine.py:f"}}
        ).hook_args
        is not None
    )


def test_without_such_functions_there_are_none(tmp_path: Path):
    assert spec(tmp_path).hook_args is None
