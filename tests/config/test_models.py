"""What does not fit together among the models beside the policy is said before anything runs."""

from __future__ import annotations

from typing import Any

import pytest

from rlpipe.config.load import validate
from rlpipe.errors import ConfigError

BASE: dict[str, Any] = {
    "run": "run",
    "num_rollout": 4,
    "model": {"source": {"type": "huggingface", "hf_checkpoint": "/models/m"}},
    "data": {"prompts": {"type": "file", "paths": ["a.jsonl"]}},
    "rollout": {"rollout_batch_size": 4},
    "reward": {"function": {"type": "math"}},
}
SERVER = {"opd_type": "sglang", "url": "http://t:1"}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"advantage": {"use_opd": True}}, "needs a teacher"),
        ({"teacher": {"opd_type": "megatron"}}, "opd_teacher_load"),
        ({"teacher": {"opd_type": "sglang"}}, "needs url"),
        (
            {"advantage": {"use_opd": True}, "teacher": SERVER, "rollout": {"rollout_batch_size": 4, "rollout_temperature": 0.7}},
            "scores at temperature 1",
        ),
        ({"train": {"use_routing_replay": True}, "advantage": {"score_proximal": False}}, "routing of the scoring pass"),
        (
            {
                "train": {"use_rollout_routing_replay": True, "loss": {"type": "sft"}},
                "rollout": {"type": "dataset", "rollout_batch_size": 4},
                "advantage": {"advantage_estimator": "none"},
            },
            "none samples",
        ),
        ({"reference": {"ref_update_interval": 2}}, "needs advantage.reference"),
        ({"critic": {"value_clip": 0}}, "value_clip"),
    ],
)
def test_it_is_refused_with_the_key_that_is_wrong(keys: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        validate({**BASE, **keys})


def test_the_engines_routing_needs_no_scoring_pass():
    train = {"use_rollout_routing_replay": True, "use_routing_replay": True}
    assert validate({**BASE, "train": train, "advantage": {"score_proximal": False}}).train.replays_routing


def test_a_teacher_is_taken():
    config = validate({**BASE, "advantage": {"use_opd": True}, "teacher": SERVER})
    assert config.teacher.url == "http://t:1"
    assert config.ref_update_interval is None
    assert not config.uses_critic
