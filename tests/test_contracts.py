"""Digests of whole configurations, pinned; and runs that keep the contract that they were begun
with.

`contracts.json` has the digest of every stage of every configuration below, by version of the
contracts. A digest that changes makes the stored runs of every user unreachable: do not edit the
file. Where a stage must compute something else, raise its version in `rlpipe.types.CONTRACTS`, keep
the settings of the version before (`rlpipe.lineage.stage_inputs.SETTINGS`), and add a table.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rlpipe import types
from rlpipe.config.load import validate_stored
from rlpipe.config.run import RunConfig
from rlpipe.errors import ObjectCorrupt
from rlpipe.lineage import stage_inputs as inputs
from rlpipe.lineage.stage_inputs import (
    SETTINGS,
    advantage_inputs,
    checkpoint_inputs,
    eval_inputs,
    init_inputs,
    reward_inputs,
    rollout_inputs,
    segment_inputs,
    sync_inputs,
    train_inputs,
)
from rlpipe.store.branches import Branch, Branches, config_path
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.store.records import seal
from rlpipe.types import CONTRACTS, Stage

PINNED = json.loads(Path(__file__).with_name("contracts.json").read_text())
REPOSITORY = Path(__file__).resolve().parents[1]
HELD = {
    "name": "held",
    "prompts": {"type": "reasoning_gym", "task": "chain_sum", "size": 4, "seed": 1000},
}
BASE: dict[str, Any] = {
    "run": "run",
    "num_rollout": 3,
    "model": {"source": {"type": "huggingface", "hf_checkpoint": "/models/m"}},
    "data": {"prompts": {"type": "reasoning_gym", "task": "chain_sum", "size": 16}},
    "rollout": {"rollout_batch_size": 4, "n_samples_per_prompt": 2},
    "reward": {"function": {"type": "math"}},
    "evaluation": {"datasets": [HELD]},
}
SUPERVISED: dict[str, Any] = {
    "rollout": {"type": "dataset", "rollout_batch_size": 4},
    "reward": {"function": {"type": "none"}},
    "advantage": {"advantage_estimator": "none"},
    "train": {"loss": {"type": "sft"}, "optimizer": {"lr": 1e-3, "weight_decay": 0.1}},
}
TEACHER = {"opd_type": "sglang", "url": "http://teacher:1"}
JUDGE = {"type": "judge", "url": "http://judge:1/v1", "model": "large", "temperature": 0.5}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "ppo with a critic": {
        "advantage": {
            "advantage_estimator": "ppo",
            "lambd": 0.95,
            "kl_coef": 0.01,
            "reference": True,
        },
        "critic": {
            "hf_checkpoint": "/models/c",
            "lr": 1e-5,
            "num_critic_only_steps": 1,
            "parallel": {},
        },
        "resources": {"critic_num_gpus_per_node": 2},
    },
    "supervised": SUPERVISED,
    "gspo": {"advantage": {"advantage_estimator": "gspo"}},
    "scored where a result needs it": {"advantage": {"score_proximal": None}},
    "cispo with a reference that is refreshed": {
        "advantage": {"advantage_estimator": "cispo", "reference": True},
        "reference": {"ref_update_interval": 2},
        "train": {"loss": {"kl_loss_coef": 0.01}},
    },
    "asynchronous": {
        "async_buffer_size": 2,
        "rollout": {
            "over_sampling_batch_size": 8,
            "partial_rollout": True,
            "mask_offpolicy_in_partial_rollout": True,
            "rollout_temperature": 0.9,
        },
        "train": {"loss": {"use_tis": True}, "num_steps_per_rollout": 2},
    },
    "colocated": {
        "deterministic": True,
        "resources": {"colocate": True, "actor_num_gpus_per_node": 2},
    },
    "reprocessed": {
        "debug": {"load_debug_rollout_data": "other"},
        "advantage": {"advantage_estimator": "rloo"},
    },
    "routing replay": {"train": {"use_routing_replay": True, "use_rollout_routing_replay": True}},
    "large model": {
        "engine": {"quantization": "fp8"},
        "resources": {"actor_num_gpus_per_node": 8},
        "train": {
            "parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
            "megatron": {"recompute_granularity": "full"},
            "use_distributed_optimizer": True,
            "optimizer": {"lr_decay_style": "cosine", "lr_warmup_steps": 1},
        },
    },
    "distilled": {"teacher": TEACHER, "advantage": {"use_opd": True}},
    "judged": {
        "seed": 7,
        "reward": {"function": JUDGE, "on_error": 0.0},
        "advantage": {"advantage_estimator": "reinforce_plus_plus"},
        "evaluation": {
            "datasets": [
                {**HELD, "reward": {"function": {"type": "reasoning_gym"}}, "temperature": 0.0}
            ]
        },
    },
    "long context": {
        "data": {
            "rollout_max_prompt_len": 512,
            "overlong_prompts": "drop",
            "apply_chat_template": True,
        },
        "rollout": {
            "rollout_max_context_len": 4096,
            "rollout_skip_special_tokens": False,
            "rollout_stop": ["</answer>"],
        },
        "model": {"dtype": "float32", "start_from": {"branch": "other"}},
    },
}


def configuration(name: str) -> RunConfig:
    """As of a stored run: a key that is not given has the default that it was introduced with, also
    once that is another."""
    sections = {
        key: {**BASE.get(key, {}), **new} if isinstance(new, dict) else new
        for key, new in CONFIGURATIONS[name].items()
    }
    if "type" in sections.get("rollout", {}):
        sections["rollout"] = CONFIGURATIONS[name]["rollout"]
    return validate_stored({**BASE, **sections})


def digests(config: RunConfig, contracts: Mapping[Stage, int] = CONTRACTS) -> dict[str, str]:
    """The digest of each stage whose inputs a configuration decides."""
    made = [
        init_inputs(config, "model", None, contracts),
        rollout_inputs(config, "model", "plan", contracts),
        reward_inputs(config, "rollout", contracts),
        advantage_inputs(config, "rollout", "reward", "before", contracts),
        train_inputs(config, "advantage", "before", contracts),
        *(
            eval_inputs(config, dataset, "weights", contracts)
            for dataset in config.evaluation.datasets
        ),
    ]
    return {str(one.stage): one.digest for one in made}


@pytest.mark.parametrize("name", sorted(CONFIGURATIONS))
def test_the_digests_of_whole_configurations_stay_what_they_are(name: str):
    assert digests(configuration(name), dict.fromkeys(Stage, 1)) == PINNED["1"][name]


def test_the_names_of_nodes_without_settings_stay_what_they_are():
    found = [sync_inputs("w"), checkpoint_inputs("w"), segment_inputs("w", "b", "a")]
    assert {str(one.stage): one.digest for one in found} == PINNED["1"]["without settings"]


def test_what_does_not_decide_results_is_in_no_digest():
    plain = digests(configuration("defaults"))
    tuned = {
        **BASE,
        "resources": {"colocate": True},
        "engine": {"server_concurrency": 8},
        "num_rollout": 9,
    }
    assert digests(validate_stored(tuned)) == plain


def test_every_version_of_every_contract_has_its_settings():
    assert {stage: sorted(versions) for stage, versions in SETTINGS.items()} == {
        stage: list(range(1, CONTRACTS[stage] + 1)) for stage in SETTINGS
    }
    assert {stage: CONTRACTS[stage] for stage in Stage if stage not in SETTINGS} == {
        Stage.SYNC: 1,
        Stage.CHECKPOINT: 1,
        Stage.SEGMENT: 1,
    }


def test_every_stage_is_asked_for_with_the_contracts_of_its_branch():
    """The default is for tests. A call that forgets the branch's contracts would give an older run
    other nodes."""
    needs = {
        "init_inputs",
        "rollout_inputs",
        "reward_inputs",
        "advantage_inputs",
        "train_inputs",
        "eval_inputs",
    }
    calls = [
        (f"{path.name}:{call.lineno}", call)
        for folder in ("rlpipe", "tasks", "flows", "tools")
        for path in (REPOSITORY / folder).rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in needs
    ]
    assert len(calls) >= 14
    assert [
        where for where, call in calls if not ast.unparse(call.args[-1]).endswith("contracts")
    ] == []


@pytest.fixture
def local_files(tmp_path: Path) -> Files:
    return Files(tmp_path / "store")


@pytest.fixture
def second_version(monkeypatch: pytest.MonkeyPatch):
    """A later rlpipe, whose `train` has a second version with other settings."""
    second = lambda config: {**SETTINGS[Stage.TRAIN][1](config), "mended": True}  # noqa: E731
    monkeypatch.setitem(types.CONTRACTS, Stage.TRAIN, 2)
    monkeypatch.setitem(inputs.SETTINGS, Stage.TRAIN, {**SETTINGS[Stage.TRAIN], 2: second})


def test_a_run_keeps_the_contracts_that_it_was_begun_with(
    local_files: Files, request: pytest.FixtureRequest
):
    config = configuration("defaults")
    Branches(local_files).create("old", config.model_dump(mode="json"), "init")
    request.getfixturevalue("second_version")
    branches = Branches(local_files)
    branches.create("new", config.model_dump(mode="json"), "init")
    assert (branches.contracts("old")[Stage.TRAIN], branches.contracts("new")[Stage.TRAIN]) == (
        1,
        2,
    )
    assert branches.contracts("not begun")[Stage.TRAIN] == 2
    assert (
        branches.create("old", config.model_dump(mode="json"), "init").contracts[Stage.TRAIN] == 1
    ), "the run continues"
    old, new = (train_inputs(config, "a", "b", branches.contracts(name)) for name in ("old", "new"))
    assert (
        old.digest == train_inputs(config, "a", "b", dict.fromkeys(Stage, 1)).digest != new.digest
    )
    assert digests(config, branches.contracts("old")) == PINNED["1"]["defaults"]
    for one in (old, new):
        assert Nodes(local_files).commit(one.node()).contract == one.contract
        assert Nodes(local_files).get(Stage.TRAIN, one.digest).config == one.config


def test_a_version_that_changes_no_setting_is_another_node():
    assert (
        inputs.Inputs(Stage.TRAIN, {}, contract=2).digest != inputs.Inputs(Stage.TRAIN, {}).digest
    )


def test_a_branch_of_an_unknown_contract_is_refused_by_name(local_files: Files):
    record = Branch(branch="run", config={}, init="init", contracts={Stage.REWARD: 9})
    local_files.create(config_path("run"), seal(record, "x"))
    with pytest.raises(
        ObjectCorrupt, match=r"(?s)contract of the stage reward.*contract 9.*1 to 1"
    ):
        Branches(local_files).get("run")


def test_a_stage_that_is_younger_than_a_branch_has_its_first_contract_there(local_files: Files):
    local_files.create(config_path("run"), seal(Branch(branch="run", config={}, init="init"), "x"))
    assert Branches(local_files).contracts("run") == dict.fromkeys(Stage, 1)
