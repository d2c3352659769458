"""A whole run with adapters: after a warm start, on two tensor parallel ranks, with kills."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlpipe.store.audit.verification import check_branch
from rlpipe.store.branches import Branches
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.types import Stage
from tests.flows.live_run import LiveRun
from tests.flows.test_train import REWARD, SAMPLING, SUPERVISED, committed


@pytest.mark.long
@pytest.mark.integration
def test_a_run_with_adapters_continues_after_kills_and_engines_have_its_weights(tmp_path: Path):
    home = tmp_path / "home"
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "warm.yaml").write_text(SUPERVISED)
    (tmp_path / "small.yaml").write_text(SAMPLING % (tmp_path / "reward.py"))
    arguments = (
        "--recipe",
        str(tmp_path / "small.yaml"),
        f"warm_start={tmp_path / 'warm.yaml'}",
        "num_rollout=4",
        "checkpoint.save_interval=3",
        "train.lora.rank=4",
        "train.optimizer.lr=1e-2",
        "train.loss.kl_loss_coef=0.01",
        "advantage.reference=true",
        "reference.ref_update_interval=2",
        "resources.actor_num_gpus_per_node=2",
        "train.parallel.tensor_model_parallel_size=2",
    )
    with LiveRun(home, *arguments) as run:
        run.wait_until(lambda: committed(home, "small") >= 2)
        run.kill_part("ray::TrainerRank")
        assert run.finish(400) == 0, run.output
    files = Files(home / "store")
    assert check_branch(files, "small") == []
    nodes = Nodes(files)
    commits = list(Branches(files).walk("small"))
    assert len(commits) == 4
    syncs = [nodes.get(Stage.SYNC, commit.nodes[Stage.SYNC]).outputs for commit in commits]
    assert max(sync["metrics"]["sync/logprob_difference"] for sync in syncs) <= 1e-4
    digests = [nodes.get(Stage.TRAIN, commit.nodes[Stage.TRAIN]).outputs for commit in commits]
    assert len({one["state_digest"] for one in digests}) == 4
