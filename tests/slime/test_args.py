"""The table of slime's flags, and `args` of user functions (rlpipe.slime.args)."""

from __future__ import annotations

import pytest

from rlpipe.config.load import validate
from rlpipe.errors import ConfigError
from rlpipe.slime.args import FLAGS, absent, slime_args
from rlpipe.slime.flag import SWITCHES
from rlpipe.slime.flag_table import SLIME
from rlpipe.slime.megatron_flags import MEGATRON, MODEL


def config(**changes):
    values = {
        "run": "r",
        "num_rollout": 3,
        "model": {"source": {"type": "huggingface", "hf_checkpoint": "/models/m"}},
        "data": {"prompts": {"type": "file", "paths": ["a.jsonl"], "label_key": "answer"}},
        "rollout": {"rollout_batch_size": 4, "n_samples_per_prompt": 2},
        "reward": {"function": {"type": "python", "path": "r.py:f", "group": True}},
    }
    return validate({**values, **changes})


def test_no_flag_has_two_rows():
    assert len(FLAGS) == len(SLIME) + len(MEGATRON)


def test_every_row_has_a_key_or_a_reason():
    assert [flag.name for flag in FLAGS.values() if bool(flag.key) == bool(flag.reason)] == []


def test_every_key_of_the_table_is_in_the_configuration():
    assert [flag.key for flag in FLAGS.values() if absent(flag)] == []


def test_flags_that_config_json_can_contradict_are_in_the_table():
    assert set(MODEL) <= FLAGS.keys()


def test_args_has_every_flag():
    args = slime_args(config())
    assert [flag.name for flag in FLAGS.values() if not hasattr(args, flag.attribute)] == []


def test_args_has_the_values_of_the_configuration():
    args = slime_args(config(), router="http://127.0.0.1:3000")
    assert (args.rollout_batch_size, args.n_samples_per_prompt, args.global_batch_size) == (4, 2, 8)
    assert (args.hf_checkpoint, args.prompt_data, args.label_key) == (
        "/models/m",
        "a.jsonl",
        "answer",
    )
    assert (args.custom_rm_path, args.group_rm, args.rm_type) == ("r.py:f", True, None)
    assert (args.sglang_router_ip, args.sglang_router_port) == ("127.0.0.1", 3000)
    assert (args.loss_type, args.eps_clip_high, args.colocate) == ("policy_loss", 0.2, False)


def test_args_has_the_attribute_and_not_the_negation_of_a_disabling_flag():
    args = slime_args(config(advantage={"grpo_std_normalization": False}))
    assert (args.grpo_std_normalization, args.rewards_normalization) == (False, True)


def test_args_has_the_settings_of_megatron_and_sglang():
    args = slime_args(
        config(
            train={"megatron": {"moe_input_jitter_eps": 0.5}},
            engine={"sglang": {"mem_fraction_static": 0.7}},
        )
    )
    assert (args.moe_input_jitter_eps, args.sglang_mem_fraction_static, args.sglang_tp_size) == (
        0.5,
        0.7,
        1,
    )


def test_switches_take_no_value_and_lists_take_several():
    assert FLAGS["colocate"].read([]) is True
    assert FLAGS["disable_grpo_std_normalization"].read([]) is False
    assert FLAGS["rollout_stop_token_ids"].read(["1", "2"]) == [1, 2]
    assert FLAGS["apply_chat_template_kwargs"].read(['{"a": 1}']) == {"a": 1}
    assert all(
        isinstance(flag.default, bool | None) for flag in FLAGS.values() if flag.kind in SWITCHES
    )


@pytest.mark.parametrize(
    ("name", "words", "expected"),
    [
        ("lr", ["fast"], "a number"),
        ("lr", [], "one value"),
        ("colocate", ["yes"], "no value"),
        ("rollout_stop", [], "one value or more"),
        ("apply_chat_template_kwargs", ["[1]"], "a JSON object"),
    ],
)
def test_the_error_of_wrong_words_names_the_flag(name, words, expected):
    with pytest.raises(ConfigError, match="not a value of this flag") as caught:
        FLAGS[name].read(words)
    assert (caught.value.where, caught.value.expected) == (FLAGS[name].option, expected)
