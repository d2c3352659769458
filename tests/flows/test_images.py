"""A whole run with images: pushes with the probe, a fork, the audit, garbage collection, pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlpipe.store.audit.verification import check_store
from rlpipe.store.branches import Branches
from rlpipe.store.gc import unreachable
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.types import Stage
from tests.flows.live_run import LiveRun, command

HELD_OUT = 16
SHAPES = "deployments/recipes/shapes/heldout.jsonl"
SMALL = (
    "rollout.rollout_batch_size=8",
    "rollout.n_samples_per_prompt=4",
    "evaluation={eval_interval: 2, datasets: [{name: heldout, prompts: {type: file, "
    f"paths: ['{SHAPES}@[0:{HELD_OUT}]'], label_key: label}}}}]}}",
    "checkpoint.save_interval=2",
)


@pytest.mark.long
@pytest.mark.integration
def test_a_run_learns_from_images_and_its_fork_shares_them(tmp_path: Path):
    home = tmp_path / "home"
    start = ("--recipe", "count_shapes", "num_rollout=2", *SMALL)
    with LiveRun(home, *start, "--run", "first") as run:
        assert run.finish(400) == 0, run.output
    files = Files(home / "store")
    nodes = Nodes(files)
    commits = list(Branches(files).walk("first"))
    syncs = [nodes.get(Stage.SYNC, commit.nodes[Stage.SYNC]).outputs for commit in commits]
    assert max(sync["metrics"]["sync/logprob_difference"] for sync in syncs) <= 1e-4
    scored = [nodes.get(Stage.ADVANTAGE, commit.nodes[Stage.ADVANTAGE]) for commit in commits]
    assert max(node.outputs["metrics"]["rollout/logprob_abs_diff/max"] for node in scored) < 1e-4
    images = set(files.list("images"))
    assert len(images) == 2 * 8 + HELD_OUT
    fork = ("--recipe", "count_shapes", "num_rollout=2", *SMALL, "fork_from.branch=first")
    with LiveRun(home, *fork, "fork_from.iteration=0", "seed=0", "--run", "second") as run:
        assert run.finish(400) == 0, run.output
    assert set(files.list("images")) >= images
    assert check_store(files).findings == []
    assert [path for path in unreachable(files, grace_s=-60) if path.startswith("images/")] == []
    assert "states, all bit" in command(home, "replay", "first", "--ray-address", "local")
    for page in ("samples.html", "report.html"):
        assert "data:image/png;base64," in (home / "first" / page).read_text(), page
