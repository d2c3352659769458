"""Convert slime's flags to configuration keys (rlpipe.slime.flag_keys)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlpipe.config.hooks import load_hook
from rlpipe.config.load import load_run
from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.run import RunConfig
from rlpipe.errors import ConfigError
from rlpipe.rollout.filters import load_filter
from rlpipe.slime.args import slime_args
from rlpipe.slime.command_line import read_flags
from rlpipe.slime.flag_keys import BASE, keys_of, overrides_of
from rlpipe.slime.reward_flags import NO_REWARD

LAUNCH = """
--actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate --swiglu --num-layers 36
--hidden-size 2560 --ffn-hidden-size 9728 --num-attention-heads 32
--use-rotary-position-embeddings --disable-bias-linear --normalization RMSNorm
--norm-epsilon 1e-6 --rotary-base 1000000 --group-query-attention --num-query-groups 8
--vocab-size 151936 --kv-channels 128 --qk-layernorm --hf-checkpoint /data/Qwen3-4B
--load /data/Qwen3-4B_slime/ --save /data/Qwen3-4B_slime/ --save-interval 20
--prompt-data /data/dapo-math-17k/dapo-math-17k.jsonl --input-key prompt --label-key label
--apply-chat-template --rollout-shuffle --rm-type deepscaler --num-rollout 3000
--rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 8192
--rollout-temperature 0.8 --global-batch-size 256 --balance-data --eval-interval 20
--eval-prompt-data aime /data/aime-2024/aime-2024.jsonl --n-samples-per-eval-prompt 16
--eval-max-response-len 16384 --eval-top-p 0.7 --tensor-model-parallel-size 2
--sequence-parallel --pipeline-model-parallel-size 1 --context-parallel-size 1
--expert-model-parallel-size 1 --expert-tensor-parallel-size 1 --recompute-granularity full
--recompute-method uniform --recompute-num-layers 1 --use-dynamic-batch-size
--max-tokens-per-gpu 9216 --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00
--kl-loss-type low_var_kl --entropy-coef 0.00 --eps-clip 0.2 --eps-clip-high 0.28
--optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9
--adam-beta2 0.98 --rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7
--attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32
--attention-softmax-in-fp32 --attention-backend flash
"""
"""The arguments of slime's own launch script for Qwen3-4B, without --ref-load."""


def keys(words: str) -> dict[str, Any]:
    return keys_of(read_flags(words.split()))


def refused(words: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        keys(words)
    return caught.value


def loaded(words: str, *more: str) -> RunConfig:
    return load_run(BASE, [*overrides_of(read_flags(words.split())), *more])


def test_a_launch_script_of_slime_works_as_it_is():
    config = loaded(LAUNCH)
    assert (
        config.num_rollout,
        config.rollout.rollout_batch_size,
        config.train.global_batch_size,
    ) == (3000, 32, 256)
    assert (config.resources.trainer_ranks, config.resources.num_engines) == (8, 4)
    assert (
        config.train.parallel.tensor_model_parallel_size,
        config.train.optimizer.lr_decay_style,
    ) == (2, "constant")
    assert config.train.megatron["recompute_granularity"] == "full"
    assert config.train.megatron["grad_reduce_in_fp32"] is True
    assert config.engine.sglang == {"mem_fraction_static": 0.7}
    assert config.reward.function.model_dump() == {
        "type": "by_row",
        "default": "deepscaler",
        "reward_key": None,
    }
    (aime,) = config.evaluation.datasets
    assert (aime.name, aime.n_samples_per_eval_prompt, aime.top_p, aime.max_response_len) == (
        "aime",
        16,
        0.7,
        16384,
    )


def test_args_have_the_values_of_the_command_line():
    args = slime_args(loaded(LAUNCH))
    assert (args.hf_checkpoint, args.rm_type, args.lr, args.use_kl_loss) == (
        "/data/Qwen3-4B",
        "deepscaler",
        1e-6,
        True,
    )
    assert (args.eval_prompt_data, args.eval_top_p) == (
        ["aime", "/data/aime-2024/aime-2024.jsonl"],
        0.7,
    )
    assert (
        args.attention_dropout,
        args.sglang_mem_fraction_static,
        args.num_steps_per_rollout,
    ) == (0.0, 0.7, 1)


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        ("--moe-input-jitter-eps 0.01", "train.megatron.moe_input_jitter_eps", 0.01),
        ("--no-masked-softmax-fusion", "train.megatron.masked_softmax_fusion", False),
        (
            "--recompute-modules core_attn mlp",
            "train.megatron.recompute_modules",
            ["core_attn", "mlp"],
        ),
        ("--recompute-activations", "train.megatron.recompute_granularity", "selective"),
        ("--keep-old-actor", "train.loss.use_rollout_logprobs", True),
        ("--keep-old-actor --rollout-function-path m.f", "rollout.rollout_function_path", "m.f"),
        ("--sequence-parallel", "train.parallel.sequence_parallel", False),
        ("--sglang-enable-dp-attention", "engine.sglang.enable_dp_attention", True),
        ("--sglang-context-length 4096", "engine.sglang.context_length", 4096),
        ("--sglang-log-level INFO", "engine.sglang.log_level", "INFO"),
        ("--sglang-enable-deepep-moe", "engine.sglang.moe_a2a_backend", "deepep"),
        ("--router-policy round_robin", "engine.router.policy", "round_robin"),
        ("--sglang-router-policy cache_aware", "engine.router.policy", "cache_aware"),
        ("--sglang-server-concurrency 64", "engine.server_concurrency", 64),
        ("--lr-warmup-iters 5", "train.optimizer.lr_warmup_steps", 5),
        ("--disable-grpo-std-normalization", "advantage.grpo_std_normalization", False),
        ("--bf16", "model.dtype", "bfloat16"),
        ("--loss-mask-type qwen3", "rollout.loss_mask_type", "all_assistant"),
        ("--balance-by-flops", "train.balance_by_flops", True),
        ("--num-critic-only-steps 3", "critic.num_critic_only_steps", 3),
        ("--num-gpus-per-node 4", "resources.num_gpus_per_node", 4),
        ("--critic-num-gpus-per-node 4", "resources.critic_num_gpus_per_node", 4),
        ("--critic-lr 1e-5 --critic-save /models/c", "critic.lr", 1e-5),
        ("--critic-lr-warmup-iters 5 --critic-load /nowhere", "critic.lr_warmup_steps", 5),
        ("--ref-update-interval 5", "reference.ref_update_interval", 5),
        (
            "--profile-target train_actor train_log_probs",
            "observe.profile_target",
            ["train_actor", "train_log_probs"],
        ),
        ("--use-pytorch-profiler", "observe.profile_target", ["train_overall"]),
        ("--profile-ranks 0 1", "observe.profile_ranks", [0, 1]),
        ("--max-turns 3", "rollout.max_turns", 3),
        (
            "--rollout-sample-hook-path a.b --rollout-sample-hook-path c.d",
            "rollout.rollout_sample_hook_path",
            ["a.b", "c.d"],
        ),
        (
            "--get-mismatch-metrics --custom-tis-function-path a.b --tis-clip 3",
            "train.loss.tis_clip",
            3.0,
        ),
    ],
)
def test_flags_of_each_category_set_their_keys(words: str, key: str, value: Any):
    assert keys(words) == {key: value}


def test_several_tensor_parallel_ranks_keep_sequence_parallelism():
    given = keys("--sequence-parallel --tensor-model-parallel-size 2")
    assert given["train.parallel.sequence_parallel"] is True


def test_a_teacher_s_server_is_accepted_at_another_temperature():
    config = loaded(
        f"{LAUNCH} --use-opd --opd-type sglang --rm-url http://teacher:1 --custom-rm-path a.b.c"
    )
    assert config.rollout.rollout_temperature == 0.8 and config.teacher.other_temperature


def test_a_supervised_rollout_renders_messages_without_a_flag():
    given = keys("--rollout-function-path slime.rollout.sft_rollout.generate_rollout")
    assert given == {"rollout.type": "dataset", "data.apply_chat_template": True}


@pytest.mark.parametrize(
    ("words", "transport"),
    [
        ("", "tensor"),
        ("--update-weight-mode full", "tensor"),
        ("--update-weight-transport nccl", "distributed"),
        ("--update-weight-transport nccl --colocate", "tensor"),
        ("--update-weight-transport disk", "disk"),
        ("--update-weight-mode delta --update-weight-transport disk", "delta"),
    ],
)
def test_the_transport_of_weights_follows_from_two_flags(words: str, transport: str):
    launch = LAUNCH.replace("--colocate", "--rollout-num-gpus 8")
    config = loaded(f"{launch} --update-weight-disk-dir /w {words}")
    assert (config.sync.transport, config.sync.update_weight_disk_dir) == (transport, "/w")
    args = slime_args(config)
    slime = {"disk": ("full", "disk"), "delta": ("delta", "disk")}.get(transport, ("full", "nccl"))
    assert (args.update_weight_mode, args.update_weight_transport) == slime


def test_supervised_training_is_one_flag():
    config = loaded(
        "--loss-type sft_loss --hf-checkpoint /m "
        "--rollout-function-path slime.rollout.sft_rollout.generate_rollout "
        "--prompt-data a.jsonl --num-rollout 1 --rollout-batch-size 2 --debug-train-only "
        "--disable-compute-advantages-and-returns --loss-mask-type qwen3"
    )
    assert (config.rollout.type, config.train.loss.type, config.advantage.advantage_estimator) == (
        "dataset",
        "sft",
        "none",
    )
    assert config.reward.function.type == "none"


def test_a_custom_data_source_needs_no_prompt_data():
    words = (
        "--data-source-path mine.py:Source --input-key question --hf-checkpoint /m "
        "--num-rollout 1 --rollout-batch-size 2 --n-samples-per-prompt 2"
    )
    config = loaded(words)
    assert (config.data.prompts, config.rollout.data_source_path) == (None, "mine.py:Source")
    assert config.reward.function.type == "by_row"
    args = slime_args(config)
    assert (args.prompt_data, args.input_key) == (None, None)
    kept = loaded(f"{words} --prompt-data a.jsonl").data.prompts
    assert kept is not None and kept.type == "file"
    with pytest.raises(
        ConfigError, match=r"data\.prompts is needed, unless rollout\.data_source_path"
    ):
        loaded(words, "rollout.data_source_path=null")


def test_functions_of_slime_become_functions_of_rlpipe():
    path = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
    for suffix in ("", "_with_fallback"):
        ours = f"rlpipe.rollout.filters.reward_nonzero_std{suffix}"
        assert keys(f"--dynamic-sampling-filter-path {path}{suffix}") == {
            "rollout.dynamic_sampling_filter_path": ours
        }
        assert load_filter(ours)
        config = RolloutConfig(rollout_batch_size=1, dynamic_sampling_filter_path=f"{path}{suffix}")
        assert config.dynamic_sampling_filter_path == ours, "in a recipe too"
    assert keys("--rollout-function-path slime.rollout.sglang_rollout.generate_rollout") == {}


@pytest.mark.parametrize(
    ("name", "mode"), [("icepop_function", "icepop"), ("vanilla_tis_function", "clip")]
)
def test_corrections_of_slime_become_tis_modes(name: str, mode: str):
    path = f"slime.backends.megatron_utils.loss.{name}"
    loss = loaded(
        f"{LAUNCH} --use-tis --tis-clip 2 --tis-clip-low 0.5 --custom-tis-function-path {path}"
    ).train.loss
    assert (loss.use_tis, loss.tis_mode, loss.tis_clip, loss.tis_clip_low) == (True, mode, 2.0, 0.5)
    assert loss.custom_tis_function_path is None, "slime is not installed"
    with pytest.raises(ConfigError, match="needs use_tis"):
        loaded(f"{LAUNCH} --custom-tis-function-path {path}")
    with pytest.raises(ConfigError, match=f"is tis_mode: {mode}; found tis_mode: mask"):
        loaded(f"{LAUNCH} --use-tis --custom-tis-function-path {path}", "train.loss.tis_mode=mask")


@pytest.mark.parametrize(
    ("words", "function"),
    [
        (
            "--rm-type remote_rm --rm-url http://h/x",
            {"type": "remote", "url": "http://h/x", "reward_key": None},
        ),
        (
            "--custom-rm-path r.py:f --group-rm",
            {"type": "python", "path": "r.py:f", "group": True, "reward_key": None},
        ),
        ("--rm-type boxed_math", {"type": "by_row", "default": "boxed_math"}),
        ("--prompt-data a.jsonl", {"type": "by_row"}),
        ("--rm-type math --use-opd", {"type": "python", "path": NO_REWARD}),
        ("--rm-type math --use-opd --label-key label", {"type": "by_row", "default": "math"}),
        ("--rm-type random --use-opd", {"type": "by_row", "default": "random"}),
    ],
)
def test_the_reward_follows_from_its_flags(words: str, function: dict):
    assert keys(words)["reward.function"] == function


def test_contradicting_flags_are_refused():
    assert refused("--kl-loss-coef 0.1").where == "--kl-loss-coef"
    assert refused("--rm-type remote_rm").where == "--rm-url"
    assert refused("--rm-type deepscale").expected == "deepscaler"
    assert refused("--eval-prompt-data aime a.jsonl b").where == "--eval-prompt-data"
    assert refused("--disable-compute-advantages-and-returns").expected == "--loss-type sft_loss"


def test_a_kl_in_reward_or_loss_scores_the_reference_with_its_estimator():
    reward = "--advantage-estimator rloo --kl-coef 0.1 --kl-loss-type k2 "
    assert keys(reward) == {
        "advantage.advantage_estimator": "rloo",
        "advantage.kl_coef": 0.1,
        "advantage.reference": True,
        "advantage.kl_type": "k2",
        "train.loss.kl_loss_type": "k2",
    }
    config = loaded(
        LAUNCH.replace("--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00", reward)
    )
    assert (config.advantage.reference, config.advantage.kl_coef, config.advantage.kl_type) == (
        True,
        0.1,
        "low_var_kl",
    )
    assert keys("--use-kl-loss --kl-loss-coef 0.2") == {
        "advantage.reference": True,
        "train.loss.kl_loss_coef": 0.2,
    }


def test_functions_of_slime_for_distillation_become_the_teacher_of_the_run():
    module = "slime.rollout.on_policy_distillation"
    config = loaded(
        f"{LAUNCH} --rollout-temperature 1 --use-opd --opd-type sglang "
        f"--custom-rm-path {module}.reward_func --rm-url http://h:1/generate "
        f"--custom-reward-post-process-path {module}.post_process_rewards"
    )
    assert config.teacher.url == "http://h:1"
    assert config.reward.custom_reward_post_process_path is None
    path = getattr(config.reward.function, "path", "")
    assert load_hook(path)(None) == 0.0
    assert slime_args(config).rm_url == "http://h:1/generate"


def test_a_teacher_is_a_directory_or_the_server_of_rm_url():
    served = loaded(
        f"{LAUNCH} --rollout-temperature 1 --use-opd --opd-type sglang --opd-kl-coef 0.5 "
        "--rm-url http://h:1"
    )
    assert (served.advantage.use_opd, served.advantage.opd_kl_coef) == (True, 0.5)
    assert (served.teacher.opd_type, served.teacher.url) == ("sglang", "http://h:1")
    held = loaded(f"{LAUNCH} --use-opd --opd-type megatron --opd-teacher-load /teacher").teacher
    assert (held.opd_type, held.opd_teacher_load) == ("megatron", "/teacher")


@pytest.mark.parametrize(
    "name",
    [
        "rollout_function_path",
        "eval_function_path",
        "custom_generate_function_path",
        "data_source_path",
        "buffer_filter_path",
        "dynamic_sampling_filter_path",
        "rollout_sample_filter_path",
        "rollout_all_samples_process_path",
        "custom_advantage_function_path",
        "custom_loss_function_path",
        "custom_tis_function_path",
        "custom_pg_loss_reducer_function_path",
        "custom_megatron_init_path",
        "custom_megatron_before_log_prob_hook_path",
        "custom_megatron_before_train_step_hook_path",
        "custom_reward_post_process_path",
        "custom_update_weight_post_write_path",
        "custom_model_provider_path",
        "custom_convert_samples_to_train_data_path",
    ],
)
def test_a_user_function_sets_the_key_of_its_name(name: str):
    result = keys(f"--{name.replace('_', '-')} mine.py:f")
    set_keys = [key.rpartition(".")[2] for key, value in result.items() if value == "mine.py:f"]
    assert set_keys == [name]


def test_model_flags_are_checked_against_config_json(tmp_path: Path):
    config = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "rope_parameters": {"rope_theta": 1e4}})
    )
    model = f"--hf-checkpoint {tmp_path} "
    assert "model.source" in keys(model + "--num-layers 2 --kv-channels 16 --rotary-base 10000")
    error = refused(
        model + "--num-layers 3 --rotary-base 1000000 --untie-embeddings-and-output-weights"
    )
    assert error.where == f"{tmp_path}/config.json"
    assert "--num-layers 3, but num_hidden_layers is 2" in str(error.found)
    assert "--rotary-base" in str(error.found)
    assert "--untie-embeddings-and-output-weights" in str(error.found)


def test_held_out_sets_come_from_one_flag_or_from_several():
    one = keys(
        "--eval-prompt-data aime a.jsonl gsm8k g.jsonl --eval-temperature 0 --eval-label-key answer"
    )
    several = keys(
        "--eval-prompt-data aime a.jsonl --eval-prompt-data gsm8k g.jsonl "
        "--eval-temperature 0 --eval-label-key answer"
    )
    assert one == several
    first, second = one["evaluation.datasets"]
    assert (first["name"], first["prompts"]["paths"], second["prompts"]["paths"]) == (
        "aime",
        ["a.jsonl"],
        ["g.jsonl"],
    )
    assert (
        second["temperature"],
        second["prompts"]["label_key"],
        second["prompts"]["input_key"],
    ) == (0.0, "answer", "input")


def test_settings_of_a_set_win_over_the_files_defaults_and_these_over_flags(
    tmp_path: Path,
):
    path = tmp_path / "eval.yaml"
    path.write_text(
        "eval:\n  defaults: {temperature: 0.5, top_p: 0.9}\n  datasets:\n"
        "    - {name: a, path: a.jsonl, temperature: 0.1, rm_type: gpqa}\n"
        "    - {name: b, path: b.parquet, n_samples_per_eval_prompt: 4}\n"
    )
    launch = LAUNCH.replace("--eval-prompt-data aime /data/aime-2024/aime-2024.jsonl", "")
    config = loaded(f"{launch} --eval-config {path}")
    a, b = config.evaluation.datasets
    assert (a.temperature, a.top_p, a.n_samples_per_eval_prompt, a.max_response_len) == (
        0.1,
        0.9,
        16,
        16384,
    )
    assert (b.temperature, b.n_samples_per_eval_prompt, b.reward) == (0.5, 4, None)
    assert a.reward is not None
    assert a.reward.function.model_dump() == {
        "type": "by_row",
        "default": "gpqa",
        "reward_key": None,
    }


def test_the_error_of_an_unknown_key_of_a_held_out_set_names_it(tmp_path: Path):
    path = tmp_path / "eval.yaml"
    path.write_text("eval: {datasets: {a: {path: a.jsonl, max_response_lenn: 5}}}")
    error = refused(f"--eval-config {path}")
    assert error.where == f"{path}: a.max_response_lenn"
    assert str(error.expected).startswith("max_response_len")


def test_the_custom_config_file_has_settings_and_flags(tmp_path: Path):
    path = tmp_path / "own.yaml"
    path.write_text("lr: 0.5\nsearch_url: http://x\n")
    result = keys(f"--lr 1 --custom-config-path {path}")
    assert result == {
        "train.optimizer.lr": 0.5,
        "rollout.custom_config": {"search_url": "http://x"},
    }
    assert refused(f"--custom-config-path {tmp_path}/none.yaml").where == "--custom-config-path"


def test_external_engines_and_router_are_given_by_address():
    words = (
        "--sglang-router-ip 10.0.0.1 --sglang-router-port 3000 "
        "--rollout-external-engine-addrs 10.0.0.2:30000 10.0.0.3:30000"
    )
    assert keys(words) == {
        "engine.router_url": "http://10.0.0.1:3000",
        "resources.external_engines": ["10.0.0.2:30000", "10.0.0.3:30000"],
    }


def test_a_test_of_slime_fails_above_its_bound_of_the_log_probs():
    gates = keys("--ci-test --ci-train-rollout-logprob-abs-diff-threshold 0.2")["gates"]
    assert gates["bounds"] == [{"metric": "train/train_rollout_logprob_abs_diff", "at_most": 0.2}]
    assert "gates" not in keys("--ci-train-rollout-logprob-abs-diff-threshold 0.2")
    config = loaded(
        "--ci-test --hf-checkpoint /m --prompt-data p.jsonl --num-rollout 1 "
        "--rollout-batch-size 4 --n-samples-per-prompt 2 --rollout-max-response-len 8 "
        "--rm-type math"
    )
    assert (config.gates.bounds[0].at_most, config.gates.timeout_s) == (0.1, 1)


def test_a_file_of_roles_sets_the_policy_and_the_critic(tmp_path: Path):
    file = tmp_path / "roles.yaml"
    file.write_text(
        "megatron:\n"
        "- {name: default, role: critic, overrides: {lr: 1e-5, save: /critic}}\n"
        "- {name: default, role: actor, overrides: {lr: 1e-6, clip_grad: 0.5}}\n"
    )
    assert keys(f"--lr 1 --megatron-config-path {file}") == {
        "train.optimizer.lr": 1e-6,
        "train.optimizer.clip_grad": 0.5,
        "critic.lr": 1e-5,
    }
    file.write_text("megatron: [{role: critic, overrides: {clip_grad: 0.5}}]\n")
    error = refused(f"--megatron-config-path {file}")
    assert (error.found, "critic alone" in str(error)) == ("clip_grad", True)
