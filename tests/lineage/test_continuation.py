"""A run continues only with an equal configuration (rlpipe.lineage.continuation)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlpipe.config.load import validate
from rlpipe.config.run import RunConfig
from rlpipe.errors import ConfigError
from rlpipe.lineage.continuation import (
    ABSENT,
    changes_before_first_commit,
    check_same_run,
    differing,
)
from rlpipe.store.branches import Branches
from rlpipe.store.notes import write_note
from rlpipe.store.objects.files import Files
from rlpipe.types import Commit, DataState

BASE: dict[str, Any] = {
    "run": "run",
    "num_rollout": 3,
    "model": {"source": {"type": "huggingface", "hf_checkpoint": "/models/m"}},
    "data": {"prompts": {"type": "file", "paths": ["a.jsonl"]}},
    "rollout": {"rollout_batch_size": 4, "n_samples_per_prompt": 2},
    "reward": {"function": {"type": "math"}},
    "evaluation": {
        "datasets": [{"name": "held", "prompts": {"type": "file", "paths": ["b.jsonl"]}}]
    },
}


def config(**sections: Any) -> RunConfig:
    return validate({**BASE, **sections})


@pytest.fixture
def branches(tmp_path: Path) -> Branches:
    """Branches of a store that has the run of BASE."""
    Branches(Files(tmp_path)).create("run", config().model_dump(mode="json"), "init")
    return Branches(Files(tmp_path))


def differences(branches: Branches, **sections: Any) -> list[str]:
    """Return the lines of the error that name differences."""
    with pytest.raises(ConfigError) as caught:
        check_same_run(branches, config(**sections))
    assert caught.value.where == "run=run"
    return [line.strip() for line in str(caught.value.found).splitlines()]


def commit_iteration(branches: Branches, k: int) -> None:
    branches.commit(
        Commit(
            branch="run",
            iteration=k,
            parent=branches.parent_name("run", k),
            plans=("p",),
            nodes={},
            data=DataState(),
            config_digest="c",
        )
    )


def test_a_new_run_may_begin(tmp_path: Path):
    check_same_run(Branches(Files(tmp_path)), config())


def test_a_run_continues_with_its_own_configuration(branches: Branches):
    check_same_run(branches, config())


def test_another_run_may_have_another_configuration(branches: Branches):
    check_same_run(branches, config(run="other", seed=5))


@pytest.mark.parametrize(
    "sections",
    [
        {"num_rollout": 30},
        {"stop_when": {"metric": "eval/held/accuracy", "at_least": 0.5}},
        {"checkpoint": {"save_interval": 1}},
        {"resources": {"rollout_num_gpus": 2, "cluster": "shared"}},
        {"engine": {"sglang": {"mem_fraction_static": 0.5}}},
        {"evaluation": {**BASE["evaluation"], "eval_interval": 1}},
        {"train": {"timeout_s": 5.0}, "sync": {"probe_samples": 0}},
        {"rollout": {**BASE["rollout"], "flush_interval_s": 1.0}},
    ],
)
def test_settings_that_do_not_decide_results_may_change(
    branches: Branches, sections: dict[str, Any]
):
    check_same_run(branches, config(**sections))


def test_the_error_names_each_changed_key_with_both_values(branches: Branches):
    train = {"optimizer": {"lr": 1e-5}, "global_batch_size": 2}
    assert differences(
        branches, train=train, rollout={"rollout_batch_size": 8, "n_samples_per_prompt": 2}
    ) == [
        "rollout.rollout_batch_size: was 4, now 8",
        "train.global_batch_size: was None, now 2",
        "train.optimizer.lr: was 1e-06, now 1e-05",
    ]


def test_a_run_whose_learning_rate_decays_over_its_length_keeps_its_length(tmp_path: Path):
    branches = Branches(Files(tmp_path))
    decaying = {"optimizer": {"lr_decay_style": "cosine"}}
    branches.create("run", config(train=decaying).model_dump(mode="json"), "init")
    check_same_run(branches, config(train=decaying))
    (line,) = differences(branches, train=decaying, num_rollout=30)
    assert line.endswith(": was 3, now 30")


def test_the_reward_may_change_until_the_first_commit(branches: Branches):
    changed = {"reward": {"function": {"type": "by_row", "reward_key": "acc"}}}
    check_same_run(branches, config(**changed))
    assert changes_before_first_commit(branches, config(**changed)) == {
        "reward.function.boxed": "False → absent",
        "reward.function.default": "absent → None",
        "reward.function.reward_key": "absent → 'acc'",
        "reward.function.type": "'math' → 'by_row'",
    }
    # With another key, which decides samples or weights, nothing may change.
    lines = differences(branches, seed=1, **changed)
    assert "reward.function.type: was 'math', now 'by_row'" in lines
    assert changes_before_first_commit(branches, config(seed=1, **changed)) == {}
    commit_iteration(branches, 0)
    differences(branches, **changed)
    assert changes_before_first_commit(branches, config(**changed)) == {}


def test_the_reward_of_noted_samples_does_not_change(branches: Branches, tmp_path: Path):
    write_note(Files(tmp_path), "run", 0, {})
    differences(branches, reward={"function": {"type": "reasoning_gym"}})


def test_the_error_names_the_fork_command(branches: Branches):
    def says(**changes: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            check_same_run(branches, config(train={"optimizer": {"lr": 1e-3}}, **changes))
        return str(caught.value.do)

    assert (
        "or remove it, as it has no iteration yet: rlpipe gc --remove run --delete; or start"
        in says()
    )
    for k in range(2):
        commit_iteration(branches, k)
    assert "--fork run@1 --run NEW; or start" in says()
    assert "--fork run@1 --run NEW num_rollout=4; or start" in says(num_rollout=1)
    assert "--fork" not in says(seed=1)


def test_a_changed_seed_is_refused(branches: Branches):
    assert differences(branches, seed=1) == [
        "data.rollout_seed: was 0, now 1",
        "seed: was 0, now 1",
        "train.seed: was 0, now 1",
    ]


def test_a_changed_type_of_model_verifier_or_held_out_set_is_refused(branches: Branches):
    made = {"source": {"type": "made", "maker": "makers.make"}, "dtype": "float32"}
    lines = differences(branches, model=made)
    assert "model.dtype: was 'bfloat16', now 'float32'" in lines
    assert "model.source.maker: was absent, now 'makers.make'" in lines
    commit_iteration(branches, 0)
    lines = differences(branches, reward={"function": {"type": "reasoning_gym"}})
    assert "reward.function.type: was 'math', now 'reasoning_gym'" in lines
    assert [line.partition(":")[0] for line in differences(branches, evaluation={})] == [
        "evaluation.datasets"
    ]


def test_a_key_in_one_of_two_configurations_is_a_difference():
    assert differing({"a": 1, "b": {"c": 2}}, {"b": {"c": 2, "d": 3}}) == {
        "a": (1, ABSENT),
        "b.d": (ABSENT, 3),
    }
    assert differing({"a": {"b": 1}}, {"a": None}) == {"a": ({"b": 1}, None)}


def test_a_list_equals_the_tuple_that_it_was_stored_from():
    assert differing({"a": [1, 2], "b": ()}, {"a": (1, 2), "b": []}) == {}
    assert differing({"a": [1, 2]}, {"a": (2, 1)}) == {"a": ([1, 2], (2, 1))}
    assert differing({"a": [1]}, {"a": 1}) == {"a": ([1], 1)}
