"""Read a command line of slime's three categories (rlpipe.slime.command_line)."""

from __future__ import annotations

from typing import Any

import pytest

from rlpipe.config.arguments import names
from rlpipe.config.arguments.check import rule_of
from rlpipe.errors import ConfigError
from rlpipe.slime.command_line import ParsedFlags, read_flags
from rlpipe.slime.flag_keys import keys_of, overrides_of
from rlpipe.slime.megatron_flags import SPEED_ONLY


def keys(words: str) -> dict[str, Any]:
    return keys_of(read_flags(words.split()))


def flags(words: str) -> ParsedFlags:
    return read_flags(words.split())


def refused(words: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        keys(words)
    return caught.value


def test_a_flag_has_dashes_or_underscores_and_equals_or_a_space():
    assert keys("--clip-grad 2") == keys("--clip_grad=2") == {"train.optimizer.clip_grad": 2.0}


def test_the_last_value_of_a_flag_counts_and_repeated_lists_are_concatenated():
    assert keys("--lr 1 --lr 2") == {"train.optimizer.lr": 2.0}
    assert keys("--rollout-stop-token-ids 1 2 --rollout-stop-token-ids 3") == {
        "rollout.rollout_stop_token_ids": [1, 2, 3]
    }


def test_overrides_may_be_anywhere_between_flags():
    given = read_flags(
        [
            "a.b=1",
            "--colocate",
            "c=2",
            "--lr",
            "1",
            "d.0.e=x=y",
            "--rollout-stop-token-ids",
            "1",
            "f=3",
        ]
    )
    assert given.overrides == ["a.b=1", "c=2", "d.0.e=x=y", "f=3"]
    assert given.own["rollout_stop_token_ids"] == [1]


def test_a_value_that_looks_like_an_override_is_a_value():
    assert read_flags(["--rm-url", "a=b"]).own == {"rm_url": "a=b"}


def test_a_flag_without_prefix_is_first_compared_with_those_of_slime_and_megatron():
    error = refused("--decoder-last-pipeline-num-layer 5")
    assert str(error.expected).startswith("--decoder-last-pipeline-num-layers or ")
    assert "--sglang" not in str(error.expected)
    error = refused("--sglang-mem-fraction-statik 0.5")
    assert str(error.expected).startswith("--sglang-mem-fraction-static")


@pytest.mark.parametrize(
    ("words", "where", "expected"),
    [
        ("--rolout-batch-size 2", "--rolout-batch-size", "--rollout-batch-size"),
        ("--sglang-mem-fraction 1", "--sglang-mem-fraction", "--sglang-mem-fraction-static"),
        ("--recompute-granularit full", "--recompute-granularit", "--recompute-granularity"),
    ],
)
def test_the_error_of_an_unknown_flag_names_the_nearest(words: str, where: str, expected: str):
    error = refused(words)
    assert (error.problem, error.where) == ("unknown flag", where)
    assert str(error.expected).startswith(expected)


@pytest.mark.parametrize(
    ("words", "where", "do"),
    [
        ("--lora-rank 8", "--lora-rank", "LoRA is not supported"),
        ("--train-backend fsdp", "--train-backend", "Megatron is the only training engine"),
        ("--update-weight-mode delta", "--update-weight-mode", "--update-weight-transport disk"),
        ("--ckpt-format torch", "--ckpt-format", "torch_dist"),
        ("--optimizer sgd", "--optimizer", "Adam"),
        ("--fp16", "--fp16", "bfloat16"),
        ("--sglang-tp-size 2", "--sglang-tp-size", "resources.rollout_num_gpus_per_engine"),
        ("--sglang-router-ip 1.2.3.4", "--sglang-router-ip, --sglang-router-port", "give both"),
        ("--params-dtype x", "--params-dtype", "model.dtype"),
        ("--rm-type opencua_click", "--rm-type", "vision"),
    ],
)
def test_unsupported_flags_are_refused_with_the_reason(words: str, where: str, do: str):
    error = refused(words)
    assert error.where == where
    assert do in str(error.do)


def test_the_column_of_images_is_slime_s_flag():
    found = keys('--multimodal-keys {"image":"images"}')
    assert found == {"data.multimodal_keys": {"image": "images"}}


def test_a_refused_flag_at_its_default_value_is_accepted():
    assert keys("--mtp-loss-scaling-factor 0.2 --optimizer adam") == {}


def test_the_error_of_a_passed_through_value_names_the_flag():
    error = refused("--sglang-max-running-requests many")
    assert (error.where, error.found, error.expected) == (
        "--sglang-max-running-requests",
        "many",
        "int | None",
    )
    assert refused("--moe-aux-loss-coeff").where == "--moe-aux-loss-coeff"


def test_a_former_name_of_an_sglang_argument_is_its_present_name():
    given = flags(
        "--sglang-cuda-graph-bs 1 2 --sglang-nsa-decode-backend fa3 "
        "--sglang-mamba-scheduler-strategy extra_buffer"
    )
    assert given.sglang == {
        "cuda_graph_bs_decode": [1, 2],
        "dsa_decode_backend": "fa3",
        "mamba_radix_cache_strategy": "extra_buffer",
    }


def test_an_option_of_megatrons_parser_sets_the_field_that_megatron_sets():
    given = flags(
        "--decoder-last-pipeline-num-layers 3 --no-check-for-nan-in-loss-and-grad "
        "--no-bias-swiglu-fusion --ddp-bucket-size 100"
    )
    assert given.megatron == {
        "num_layers_in_last_pipeline_stage": 3,
        "check_for_nan_in_grad": False,
        "bias_activation_fusion": False,
        "bucket_size": 100,
    }


def test_an_option_of_megatrons_training_program_is_refused_as_such():
    error = refused("--data-cache-path /tmp/x")
    assert (error.where, error.found) == ("--data-cache-path", "/tmp/x")
    assert "training program" in str(error)


def test_an_argument_that_only_speeds_megatron_up_is_a_note():
    given = flags("--overlap-param-gather --apply-layernorm-1p --tp-comm-overlap")
    assert given.megatron == {}
    assert [flag.option for flag in given.neutral] == [
        "--overlap-param-gather",
        "--apply-layernorm-1p",
        "--tp-comm-overlap",
    ]


def test_an_argument_that_changes_results_is_refused():
    assert refused("--fp8-format e4m3").where == "--fp8-format"


@pytest.mark.parametrize("name", sorted(SPEED_ONLY))
def test_an_ignored_argument_is_one_of_megatron_that_rlpipe_restricts(name: str):
    assert names.receivers("megatron", name)
    rule = rule_of("megatron", name)
    assert rule is not None and rule.kind in ("fixed", "inert", "owned")


def test_a_secret_is_no_part_of_the_configuration():
    given = flags("--wandb-key abc123 --lr 1")
    assert given.secrets == {"WANDB_API_KEY": "abc123"}
    assert "abc123" not in repr(given) + repr(overrides_of(given))
