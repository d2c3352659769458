"""A whole run with a curriculum: a lost generator, a fork, the audit and garbage collection."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlpipe.rewards.reasoning_gym import make_task
from rlpipe.store.audit.verification import check_store
from rlpipe.store.branches import Branches
from rlpipe.store.gc import unreachable
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.store.plans import Plans
from rlpipe.store.row_states import StoredRowStates
from rlpipe.types import Commit, Plan, Stage
from tests.flows.live_run import LiveRun, command
from tests.flows.test_train import MODEL, committed

RECIPE = f"""
num_rollout: 4
model: {{source: {MODEL}, dtype: float32}}
data:
  prompts: {{type: file, paths: [%s/short.jsonl, %s/long.jsonl], label_key: label}}
  curriculum:
    weights:
      - {{from_iteration: 0, weights: {{short: 1, long: 0}}}}
      - {{from_iteration: 2, weights: {{short: 1, long: 1}}}}
    difficulty: {{hard_below: 0.2, easy_above: 0.5}}
    pass_threshold: 0.3
async_buffer_size: 1
rollout: {{rollout_batch_size: 4, n_samples_per_prompt: 4, rollout_max_response_len: 6}}
reward: {{function: {{type: python, path: "%s/reward.py"}}}}
train: {{global_batch_size: 8, optimizer: {{lr: 1e-3}}}}
checkpoint: {{save_interval: 2}}
"""
REWARD = "def score(sample):\n    return sum(c in 'aeiou' for c in sample.response) / 6\n"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    for name, length in (("short", 3), ("long", 6)):
        arguments = {"min_word_len": length, "max_word_len": length}
        task = make_task("spell_backward", arguments, seed=length, size=12)
        lines = [
            json.dumps({"prompt": row["question"], "label": row["answer"]})
            for row in (task[number] for number in range(12))
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "mixed.yaml").write_text(RECIPE % ((tmp_path,) * 3))
    return tmp_path / "mixed.yaml"


def plans(files: Files, commits: list[Commit]) -> list[Plan]:
    return [Plans(files).read(digest) for commit in commits for digest in commit.plans]


@pytest.mark.long
@pytest.mark.integration
def test_a_run_that_loses_its_generator_and_its_fork_keep_one_curriculum(recipe: Path):
    home = recipe.parent / "home"
    with LiveRun(home, "--recipe", str(recipe)) as run:
        run.wait_until(lambda: committed(home, "mixed") >= 2)
        run.kill_part("ray::Generator")
        assert run.finish(400) == 0, run.output
    files = Files(home / "store")
    commits = list(Branches(files).walk("mixed"))[::-1]
    made = plans(files, commits)
    sources = [{group.row[1] for group in plan.groups if group.row} for plan in made]
    assert sources[:2] == [{"short"}, {"short"}]
    assert set().union(*sources[2:]) == {"short", "long"}
    counted = [StoredRowStates(files).read(plan.after.rows or "").counted for plan in made]
    assert counted == [0, 0, 1, 2]
    shown = Nodes(files).get(Stage.REWARD, commits[-1].nodes[Stage.REWARD]).outputs["metrics"]
    assert {"rollout/source/long/share", "rollout/difficulty/normal/share"} <= shown.keys()

    fork = ("--recipe", str(recipe), "fork_from.branch=mixed", "fork_from.iteration=1")
    with LiveRun(home, *fork, "--run", "second") as run:
        assert run.finish(400) == 0, run.output
    own = list(Branches(files).walk("second"))[::-1]
    first = plans(files, own)[2]
    assert first.before == commits[1].data
    # The same store and draw numbers: the fork draws the rows of its parent.
    rows = [[group.row for group in plan.groups] for plan in (first, made[2])]
    assert rows[0] == rows[1]
    assert check_store(files).findings == []
    assert [path for path in unreachable(files, grace_s=-60) if "row_states" in path] == []
    assert "states, all bit" in command(home, "replay", "mixed", "--ray-address", "local")
