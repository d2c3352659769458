"""Which keys of the configuration decide which stages (rlpipe.lineage.stage_inputs): neither one
too many nor one too few.

One file because all tests read one table of keys and stages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.config.base import Config
from rlpipe.config.data import EvalDataset, FilePrompts, NoReward, RewardConfig
from rlpipe.config.load import RECIPES, load_run, validate
from rlpipe.config.rollout import GymEnvironment, ToolConfig
from rlpipe.config.run import RunConfig
from rlpipe.config.smoke import SMOKE
from rlpipe.lineage.stage_inputs import (
    Inputs,
    advantage_inputs,
    checkpoint_inputs,
    config_digest,
    eval_inputs,
    init_inputs,
    reward_inputs,
    rollout_inputs,
    segment_inputs,
    sync_inputs,
    train_inputs,
)
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.types import Stage

BASE: dict[str, Any] = {
    "run": "run",
    "num_rollout": 3,
    "stop_when": {"metric": "eval/held/accuracy", "at_least": 0.5},
    "model": {
        "source": {"type": "huggingface", "hf_checkpoint": "/models/m"},
        "start_from": {"branch": "other"},
    },
    "data": {"prompts": {"type": "file", "paths": ["a.jsonl"]}},
    "rollout": {"rollout_batch_size": 4, "n_samples_per_prompt": 2},
    "reward": {"function": {"type": "math"}},
    "evaluation": {
        "datasets": [
            {"name": "held", "prompts": {"type": "reasoning_gym", "task": "chain_sum", "size": 4}},
            {
                "name": "scored",
                "prompts": {"type": "reasoning_gym", "task": "chain_sum", "size": 4},
                "reward": {"function": {"type": "reasoning_gym"}},
            },
        ]
    },
}
CONFIG = validate(BASE)
HELD = "eval held"
SCORED = "eval with a verifier of its own"

EXPECTED = {
    "rollout.": {Stage.ROLLOUT, HELD, SCORED},
    "rollout.mask_offpolicy_in_partial_rollout": {Stage.ROLLOUT, Stage.ADVANTAGE, HELD, SCORED},
    "rollout.rollout_temperature": {Stage.ROLLOUT, Stage.ADVANTAGE, Stage.TRAIN, HELD, SCORED},
    "reward.": {Stage.REWARD, HELD},
    "advantage.": {Stage.ADVANTAGE},
    "async_buffer_size": {Stage.ADVANTAGE},
    "train.": {Stage.TRAIN},
    "train.custom_megatron_init_path": {Stage.ADVANTAGE, Stage.TRAIN},
    "train.custom_megatron_before_log_prob_hook_path": {Stage.ADVANTAGE, Stage.TRAIN},
    "train.custom_model_provider_path": {Stage.INIT, Stage.ADVANTAGE, Stage.TRAIN},
    "train.use_routing_replay": {Stage.ADVANTAGE, Stage.TRAIN},
    "train.use_rollout_routing_replay": {Stage.ROLLOUT, Stage.ADVANTAGE, Stage.TRAIN},
    "deterministic": {Stage.TRAIN},
    "engine.quantization": {Stage.ROLLOUT, HELD, SCORED},
    "train.optimizer.": {Stage.INIT, Stage.TRAIN},
    "train.parallel.": {Stage.INIT, Stage.TRAIN},
    "train.use_distributed_optimizer": {Stage.INIT, Stage.TRAIN},
    "train.megatron": {Stage.INIT, Stage.TRAIN},
    "train.seed": {Stage.INIT, Stage.TRAIN},
    "train.lora": {Stage.INIT, Stage.TRAIN},
    "train.freeze_params_name_list": {Stage.INIT, Stage.TRAIN},
    "train.only_train_params_name_list": {Stage.INIT, Stage.TRAIN},
    "model.dtype": {Stage.INIT},
    "data.": {HELD, SCORED},
    "data.prompts.": set(),
    "data.curriculum": set(),
    "evaluation.datasets.0.": {HELD},
    "evaluation.datasets.1.": {SCORED},
    "resources.actor_num_nodes": {Stage.INIT, Stage.TRAIN},
    "resources.actor_num_gpus_per_node": {Stage.INIT, Stage.TRAIN},
    "resources.critic_num_gpus_per_node": {Stage.INIT, Stage.TRAIN},
}
"""Keys, or all below one (longest first), and the stages that they decide by themselves; all others
decide none.

The training prompts come through the plan, the model through its fingerprint, a start on another
branch through that branch's checkpoint. Numbers of ranks decide the order of sums.
"""
TUNING = {
    "": "num_rollout flags",
    "stop_when": "metric at_least",
    "model.source": "hf_checkpoint megatron_checkpoint megatron_checkpoint_step",
    "data": "num_data_workers streaming_data",
    "rollout": "flush_interval_s timeout_s max_sampling_rounds",
    "reward": "workers worker_labels attempts sample_timeout_s timeout_s",
    "advantage": "log_probs_max_tokens_per_gpu",
    "train": "timeout_s",
    "teacher": "timeout_s",
    "sync": (
        "check_weight_update_equal in_flight transport update_weight_buffer_size probe_samples "
        "max_logprob_difference update_weight_disk_dir update_weight_disk_keep_files "
        "update_weight_local_checkpoint_dir update_weight_delta_encoding "
        "update_weight_delta_checksum update_weight_full_interval timeout_s "
        "custom_update_weight_post_write_path custom_pull_weights_pre_read_path"
    ),
    "checkpoint": "save_interval keep_local save_hf timeout_s",
    "evaluation.datasets.1.reward": "workers worker_labels attempts sample_timeout_s timeout_s",
    "evaluation": "eval_interval skip_eval_before_train",
    "engine": (
        "sglang router router_url server_concurrency request_timeout_s host "
        "rollout_health_check_interval rollout_health_check_timeout"
    ),
    "resources": (
        "actor_num_nodes actor_num_gpus_per_node critic_num_nodes critic_num_gpus_per_node "
        "rollout_num_gpus rollout_num_gpus_per_engine num_gpus_per_node external_engines "
        "trainer_labels engine_labels "
        "colocate offload_train offload_rollout cluster ray_address exclusive_gpus keep_idle_s "
        "threads_per_process start_timeout_s import_timeout_s stop_grace_s"
    ),
    "store": "root",
    "observe": (
        "tensorboard samples_in_report profile_target profile_step_start profile_step_end "
        "profile_ranks custom_rollout_log_function_path custom_eval_rollout_log_function_path "
        "record_memory_history report_interval prometheus_port prometheus_host use_wandb "
        "wandb_mode wandb_project wandb_team wandb_group wandb_run_id wandb_dir wandb_host"
    ),
    "gates": "bounds timeout_s poll_s",
    "orchestration": "iterations deployment retries retry_delay_s timeout_s",
}
"""Section → the keys that decide nothing. A key that moves in or out of this table changes what is
reused of old runs."""


def leaves(model: Config, prefix: str = "", tuning: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield every dotted key without keys below it, and True for a tuning key."""
    for name, info in type(model).model_fields.items():
        marked = tuning or bool(
            isinstance(info.json_schema_extra, dict) and info.json_schema_extra.get("tuning")
        )
        value = getattr(model, name)
        items = value if isinstance(value, tuple) else ()
        if isinstance(value, Config):
            yield from leaves(value, f"{prefix}{name}.", marked)
        elif items and all(isinstance(item, Config) for item in items):
            for number, item in enumerate(items):
                yield from leaves(item, f"{prefix}{name}.{number}.", marked)
        else:
            yield prefix + name, marked


LEAVES = dict(leaves(CONFIG))


def changed(model: Any, key: str) -> Any:
    """The configuration with another value under a key, whatever it means."""
    name, _, rest = key.partition(".")
    if isinstance(model, tuple):
        return (*model[: int(name)], changed(model[int(name)], rest), *model[int(name) + 1 :])
    value = getattr(model, name)
    return model.model_copy(update={name: changed(value, rest) if rest else other(name, value)})


def other(name: str, value: Any) -> Any:
    hook = "rlpipe.rollout.filters.reward_nonzero_std"
    if name == "tools":
        return (ToolConfig(path=hook),)
    if name == "environment":
        return GymEnvironment(type="gym", path=hook)
    if name.endswith("_path"):
        return (hook,) if isinstance(value, tuple) else hook
    if name == "over_sampling_batch_size":
        return 9
    if name in ("global_batch_size", "num_steps_per_rollout", "ref_update_interval"):
        return 4  # a number: others are computed from it
    if name == "reward":
        return RewardConfig(function=NoReward(type="none"))
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int | float) else "another"


def digests(config: RunConfig) -> dict[str, str]:
    """The digest of each stage, with the same parents."""
    made = [
        init_inputs(config, "model", "checkpoint"),
        rollout_inputs(config, "model", "plan"),
        reward_inputs(config, "rollout"),
        advantage_inputs(config, "rollout", "reward", "before"),
        train_inputs(config, "advantage", "before"),
        sync_inputs("train"),
        checkpoint_inputs("train"),
    ]
    evaluations = zip((HELD, SCORED), config.evaluation.datasets, strict=True)
    of_stages = {inputs.stage: inputs.digest for inputs in made}
    return of_stages | {
        name: eval_inputs(config, dataset, "train").digest for name, dataset in evaluations
    }


def differing(first: RunConfig, second: RunConfig) -> set[str]:
    before = digests(first)
    after = digests(second)
    return {stage for stage, digest in before.items() if after[stage] != digest}


def by_scoring(config: RunConfig) -> set[str]:
    """The advantage stage if it has proximal log-probs, which several keys decide together."""
    inputs = advantage_inputs(config, "rollout", "reward", "before")
    return {Stage.ADVANTAGE} if "proximal_log_probs" in inputs.config else set()


def expected(key: str) -> set[str]:
    found = [
        prefix
        for prefix in EXPECTED
        if key == prefix or (prefix.endswith(".") and key.startswith(prefix))
    ]
    return EXPECTED[max(found, key=len)] if found else set()


def test_each_identity_key_changes_exactly_the_stages_that_it_decides():
    found = {
        key: differing(CONFIG, changed(CONFIG, key)) for key, tuning in LEAVES.items() if not tuning
    }
    assert found == {key: expected(key) | by_scoring(changed(CONFIG, key)) for key in found}
    assert {key for key in found if by_scoring(changed(CONFIG, key))} > {
        "train.custom_megatron_before_train_step_hook_path",
        "train.num_steps_per_rollout",
    }


@pytest.mark.parametrize(("steps", "scored"), [(1, False), (2, True)])
def test_the_second_optimizer_step_of_a_batch_needs_proximal_log_probs(steps: int, scored: bool):
    train = CONFIG.train.model_copy(update={"num_steps_per_rollout": steps})
    config = CONFIG.model_copy(update={"train": train})
    assert by_scoring(config) == ({Stage.ADVANTAGE} if scored else set())


def test_only_these_keys_are_tuning_keys():
    assert {key for key, tuning in LEAVES.items() if tuning} == {
        f"{section}.{name}".strip(".")
        for section, names in TUNING.items()
        for name in names.split()
    }


def test_no_tuning_key_changes_a_digest_but_the_number_of_trainer_ranks():
    found = {
        key: differing(CONFIG, changed(CONFIG, key)) for key, tuning in LEAVES.items() if tuning
    }
    deciding = {key for key, stages in found.items() if stages}
    ranks = {"actor_num_nodes", "actor_num_gpus_per_node", "critic_num_gpus_per_node"}
    assert deciding == {f"resources.{name}" for name in ranks}
    assert all(found[key] == expected(key) for key in deciding)


@given(st.sets(st.sampled_from(sorted(LEAVES)), max_size=6))
def test_combined_changes_change_the_union_of_the_stages(keys: set[str]):
    config = CONFIG
    for key in sorted(keys):
        config = changed(config, key)
    ranks = ("resources.actor_num", "resources.critic_num")
    decided = [expected(key) for key in keys if not LEAVES[key] or key.startswith(ranks)]
    assert differing(CONFIG, config) == by_scoring(config).union(*decided)


def test_a_sampling_filter_makes_its_source_and_the_reward_decide_the_rollout(tmp_path: Path):
    hook = tmp_path / "keep.py"
    hook.write_text("def keep(samples):\n    return True\n")
    filtering = validate(
        {
            **BASE,
            "rollout": {
                "rollout_batch_size": 4,
                "n_samples_per_prompt": 2,
                "dynamic_sampling_filter_path": f"{hook}:keep",
            },
        }
    )
    before = digests(filtering)
    gym = filtering.model_copy(
        update={"reward": RewardConfig.model_validate({"function": {"type": "reasoning_gym"}})}
    )
    assert differing(filtering, gym) == {Stage.ROLLOUT, Stage.REWARD, HELD}
    hook.write_text("def keep(samples):\n    return False\n")
    assert {stage for stage, digest in digests(filtering).items() if digest != before[stage]} == {
        Stage.ROLLOUT
    }


@pytest.mark.parametrize(
    ("sections", "stage"),
    [
        ({"advantage": {"custom_advantage_function_path": "{}:f"}}, Stage.ADVANTAGE),
        ({"train": {"loss": {"custom_pg_loss_reducer_function_path": "{}:f"}}}, Stage.TRAIN),
    ],
)
def test_the_source_of_a_function_in_the_mathematics_decides_its_stage(
    tmp_path: Path, sections: dict, stage: Stage
):
    hook = tmp_path / "mine.py"
    hook.write_text("def f(*_):\n    return 1\n")
    config = validate(json.loads(json.dumps({**BASE, **sections}).replace("{}", str(hook))))
    before = digests(config)
    hook.write_text("def f(*_):\n    return 2\n")
    assert {name for name, digest in digests(config).items() if digest != before[name]} == {stage}


@pytest.mark.parametrize("key", ["deterministic", "async_buffer_size"])
def test_the_order_of_acceptance_and_the_staleness_bound_decide_rollouts_that_choose_their_groups(
    key: str,
):
    choosing = changed(CONFIG, "rollout.over_sampling_batch_size")
    assert Stage.ROLLOUT in differing(choosing, changed(choosing, key))


def test_the_kind_of_a_verifier_decides_rewards_and_the_evaluations_that_use_it():
    gym = validate({**BASE, "reward": {"function": {"type": "reasoning_gym"}}})
    assert differing(CONFIG, gym) == {Stage.REWARD, HELD}


def test_the_length_of_a_run_is_an_input_only_if_the_learning_rate_decays():
    def longer(**optimizer: Any) -> set[str]:
        short = {**BASE, "train": {"optimizer": optimizer}}
        return differing(validate(short), validate({**short, "num_rollout": 5}))

    assert longer() == set()
    assert longer(lr_decay_style="cosine") == {Stage.TRAIN}
    assert longer(lr_decay_style="cosine", lr_decay_steps=100) == set()


def test_the_seed_of_a_run_changes_prompt_order_and_random_numbers():
    assert differing(CONFIG, validate({**BASE, "seed": 1})) == {
        Stage.INIT,
        Stage.TRAIN,
        HELD,
        SCORED,
    }


def test_a_critic_changes_the_identities_of_runs_with_a_critic_only():
    def differing_in(critic: dict[str, Any], **advantage: Any) -> set[str]:
        base = {**BASE, "advantage": advantage}
        return differing(validate(base), validate({**base, "critic": critic}))

    ppo = {"advantage_estimator": "ppo"}
    assert (
        differing_in({"value_clip": 0.1}) == differing_in({"hf_checkpoint": "/models/c"}) == set()
    )
    assert differing_in({"value_clip": 0.1}, **ppo) == {Stage.TRAIN}
    assert differing_in({"num_critic_only_steps": 2}, **ppo) == {Stage.ADVANTAGE, Stage.TRAIN}
    assert differing_in({"hf_checkpoint": "/models/c"}, **ppo) == {Stage.INIT, Stage.TRAIN}
    assert differing_in({"optimizer": {"lr": 1e-5}}, **ppo) == {Stage.INIT, Stage.TRAIN}
    assert (
        differing_in({"lr": 1e-5}, **ppo)
        == differing_in({"lr_warmup_steps": 1}, **ppo)
        == {Stage.INIT, Stage.TRAIN}
    )


def test_the_identity_has_number_and_layout_of_separate_critic_ranks():
    def config(ranks: int, **parallel: int) -> RunConfig:
        critic = {"parallel": parallel} if parallel else {}
        resources = {"critic_num_gpus_per_node": ranks}
        return validate(
            {
                **BASE,
                "advantage": {"advantage_estimator": "ppo"},
                "critic": critic,
                "resources": resources,
            }
        )

    assert (
        differing(config(0), config(2))
        == differing(config(2), config(4))
        == {Stage.INIT, Stage.TRAIN}
    )
    assert differing(config(2), config(2, tensor_model_parallel_size=2)) == {
        Stage.INIT,
        Stage.TRAIN,
    }


def test_a_teacher_changes_the_batches_of_distilling_runs_only():
    teacher = {"teacher": {"opd_type": "sglang", "url": "http://t:1"}}
    other = {"teacher": {"opd_type": "sglang", "url": "http://t:2"}}
    distils = {**BASE, "advantage": {"use_opd": True}}
    assert differing(validate({**BASE, **teacher}), validate({**BASE, **other})) == set()
    assert differing(validate({**distils, **teacher}), validate({**distils, **other})) == {
        Stage.ADVANTAGE
    }


def test_the_policy_s_schedule_waits_while_only_the_critic_is_trained():
    config = validate(
        {
            **BASE,
            "advantage": {"advantage_estimator": "ppo"},
            "critic": {"num_critic_only_steps": 2},
        }
    )
    assert (config.total_optimizer_steps, config.critic_optimizer_steps) == (1, 3)
    assert CONFIG.total_optimizer_steps == 3


@pytest.mark.parametrize(
    "changes",
    [
        (("x", "b", "c"), ("a", "b", "c")),
        (("a", "x", "c"), ("a", "b", "c")),
        (("a", "b", "x"), ("a", "b", "c")),
    ],
)
def test_every_parent_decides(changes: tuple[tuple[str, str, str], ...]):
    assert len({advantage_inputs(CONFIG, *parents).digest for parents in changes}) == 2
    assert len({train_inputs(CONFIG, *parents[:2]).digest for parents in changes}) == len(
        {parents[:2] for parents in changes}
    )


def test_model_plan_and_weights_decide():
    pairs = [
        (init_inputs(CONFIG, "model", None), init_inputs(CONFIG, "other", None)),
        (init_inputs(CONFIG, "model", None), init_inputs(CONFIG, "model", "checkpoint")),
        (rollout_inputs(CONFIG, "model", "plan"), rollout_inputs(CONFIG, "other", "plan")),
        (rollout_inputs(CONFIG, "model", "plan"), rollout_inputs(CONFIG, "model", "other")),
        (reward_inputs(CONFIG, "rollout"), reward_inputs(CONFIG, "other")),
        (sync_inputs("weights"), sync_inputs("other")),
        (checkpoint_inputs("weights"), checkpoint_inputs("other")),
        (sync_inputs("weights"), checkpoint_inputs("weights")),
        (segment_inputs("weights", "base", "a"), segment_inputs("other", "base", "a")),
        (segment_inputs("weights", "base", "a"), segment_inputs("weights", "other", "a")),
        (segment_inputs("weights", "base", "a"), segment_inputs("weights", "base", "b")),
        (
            eval_inputs(CONFIG, CONFIG.evaluation.datasets[0], "w"),
            eval_inputs(CONFIG, CONFIG.evaluation.datasets[0], "x"),
        ),
    ]
    assert [first.digest == second.digest for first, second in pairs] == [False] * len(pairs)


def test_the_source_of_a_reward_function_decides_rewards_and_evaluations(tmp_path: Path):
    hook = tmp_path / "mine.py"
    hook.write_text("def reward(sample):\n    return 1.0\n")
    config = validate(
        {**BASE, "reward": {"function": {"type": "python", "path": f"{hook}:reward"}}}
    )
    before = digests(config)
    hook.write_text("def reward(sample):\n    return 0.5\n")
    after = digests(config)
    assert {stage for stage in before if before[stage] != after[stage]} == {Stage.REWARD, HELD}


@pytest.mark.parametrize("recipe", sorted(path.stem for path in RECIPES.glob("*.yaml")))
def test_every_recipe_has_a_digest_for_every_stage(recipe: str):
    # Evaluations read their files, which the smoke test of a recipe has without a network.
    has_smoke = "\nsmoke:" in (RECIPES / f"{recipe}.yaml").read_text()
    config = load_run(recipe, [SMOKE] if has_smoke else [])
    of_stages = [
        init_inputs(config, "m", None),
        rollout_inputs(config, "m", "p"),
        reward_inputs(config, "r"),
        advantage_inputs(config, "a", "b", "c"),
        train_inputs(config, "a", "b"),
        *(eval_inputs(config, dataset, "w") for dataset in config.evaluation.datasets),
    ]
    assert len({inputs.digest for inputs in of_stages}) == len(of_stages)
    assert [inputs.digest for inputs in of_stages[:1]] == [
        init_inputs(load_run(recipe, [SMOKE] if has_smoke else []), "m", None).digest
    ]


def test_the_store_accepts_a_node_of_inputs(tmp_path: Path):
    inputs = train_inputs(CONFIG, "advantage", "before")
    node = inputs.node(outputs={"state_digest": "s"})
    assert (node.stage, node.digest, node.outputs) == (
        Stage.TRAIN,
        inputs.digest,
        {"state_digest": "s"},
    )
    assert Nodes(Files(tmp_path)).commit(node).digest == inputs.digest
    assert inputs.digest != Inputs(Stage.TRAIN, inputs.parents).digest


def test_the_content_of_a_held_out_file_decides_its_evaluation(tmp_path: Path):
    def digest(name: str, content: str) -> str:
        (tmp_path / name).write_text(content)
        dataset = EvalDataset(
            name="held", prompts=FilePrompts(type="file", paths=(str(tmp_path / name),))
        )
        return eval_inputs(CONFIG, dataset, "weights").digest

    first = digest("a.jsonl", '{"prompt": "1"}')
    assert digest("a.jsonl", '{"prompt": "1"}') == first
    assert (
        len({first, digest("a.jsonl", '{"prompt": "2"}'), digest("b.jsonl", '{"prompt": "1"}')})
        == 3
    )


def test_the_digest_of_the_configuration_covers_tuning_keys_too():
    others = [
        {"run": "b"},
        {"num_rollout": 4},
        {"sync": {"probe_samples": 0}},
        {"train": {"timeout_s": 1.0}},
        {"seed": 1},
    ]
    assert config_digest(CONFIG) == config_digest(validate(BASE))
    assert len({config_digest(validate({**BASE, **changes})) for changes in [{}, *others]}) == 6
