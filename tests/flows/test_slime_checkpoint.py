"""Runs that continue checkpoints of slime: weights, optimizer states, schedule and prompts."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deployments.recipes.tiny_models import make_spell_backward_model
from rlpipe.engines.megatron.checkpoint.conversion.convert import to_torch_dist
from rlpipe.lineage import provenance
from rlpipe.store.branches import Branches
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.store.plans import Plans
from rlpipe.types import Stage
from tests.engines.megatron.slime_checkpoint import LR, SEED, Job, write
from tests.flows.live_run import LiveRun, command

ROLLOUTS = 4
"""Of all iterations, slime has trained two."""
WORDS = ("sun", "tree", "rain", "sea", "moon", "leaf")
"""Of six prompts, slime has drawn four."""


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    """A model, slime's run of it, another model as reference, and prompts."""
    found = {name: tmp_path / name for name in ("model", "other", "run", "reference", "hf")}
    for name, seed in (("model", 1), ("other", 2)):
        found[name].mkdir()
        make_spell_backward_model(str(found[name]), seed=seed, hidden_size=64, num_layers=2)
    to_torch_dist(found["model"], tmp_path / "release")
    to_torch_dist(found["other"], found["reference"])
    write(Job(str(found["model"]), str(tmp_path / "release"), str(found["run"])))
    found["prompts"] = tmp_path / "prompts.jsonl"
    rows = [{"input": f"{word}=", "label": word[::-1]} for word in WORDS]
    found["prompts"].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return found


def arguments(folders: dict[str, Path]) -> list[str]:
    """Return the arguments of a launch script of slime: one folder is --load and --save."""
    text = f"""
    --hf-checkpoint {folders["model"]} --ref-load {folders["reference"]}
    --load {folders["run"]} --save {folders["run"]} --save-interval 1
    --save-hf {folders["hf"]}/{{rollout_id}}
    --prompt-data {folders["prompts"]} --label-key label --rm-type math --rollout-shuffle
    --num-rollout {ROLLOUTS} --rollout-batch-size 2 --n-samples-per-prompt 4
    --global-batch-size 8 --rollout-max-response-len 8 --lr {LR} --weight-decay 0.1
    --actor-num-gpus-per-node 1 --rollout-num-gpus 1 --max-tokens-per-gpu 1024
    model.dtype=float32 deterministic=true
    """
    return [*text.split(), "--run", "continued"]


GRPO = ["--use-kl-loss", "--kl-loss-coef", "0.1", "--advantage-estimator", "grpo"]


def drawn_after_slime() -> list[str]:
    """Return the prompts of the first two iterations, as slime's data set orders them."""
    prompts = []
    for epoch in (0, 1):
        order = list(range(len(WORDS)))
        random.seed(SEED + epoch)
        random.shuffle(order)
        prompts += [f"{WORDS[number]}=" for number in order]
    return prompts[4:8]


@pytest.mark.integration
@pytest.mark.long
def test_a_run_continues_slimes_checkpoint_and_its_lineage_names_it(
    folders: dict[str, Path], tmp_path: Path
):
    home = tmp_path / "home"
    with LiveRun(home, *arguments(folders), *GRPO) as run:
        assert run.finish(900.0) == 0, run.output
        assert "2 iterations of --num-rollout are done" in run.output
        assert "prompts continue" in run.output
    root = folders["run"] / "rlpipe"
    files = Files(root)
    nodes, branches = Nodes(files), Branches(files)
    assert branches.committed("continued") == [0, 1]

    init = nodes.get(Stage.INIT, branches.get("continued").init)
    sources = init.outputs["sources"]
    assert sources["policy"]["iteration"] == 1
    assert sources["policy"]["path"] == str(folders["run"] / "iter_0000001")
    assert sources["policy"]["sha256"] == init.config["sources"]["optimizer"]
    assert sources["reference"]["path"] == str(folders["reference"] / "release")
    assert provenance.backward(files, "continued")["branches"][0]["sources"] == sources

    trained = [
        nodes.get(Stage.TRAIN, branches.read("continued", k).nodes[Stage.TRAIN]) for k in (0, 1)
    ]
    rates = [step["lr"] for node in trained for step in node.outputs["steps"]]
    assert rates == pytest.approx([LR * (1 - done / ROLLOUTS) for done in (2, 3)])
    # The reference is another model, so the first KL is not 0.
    assert trained[0].outputs["steps"][0]["kl_loss"] > 0.01

    plans = [
        Plans(files).read(digest) for k in (0, 1) for digest in branches.read("continued", k).plans
    ]
    assert [group.prompt for plan in plans for group in plan.groups] == drawn_after_slime()
    position = folders["run"] / "rollout" / "global_dataset_state_dict_1.pt"
    assert sources["prompts"]["path"] == str(position)
    assert len(sources["prompts"]["sha256"]) == 64

    exported = load_file(folders["hf"] / "3" / "model.safetensors")
    first = load_file(folders["hf"] / "2" / "model.safetensors")
    assert exported.keys() == load_file(folders["model"] / "model.safetensors").keys()
    assert any(not torch.equal(exported[name], first[name]) for name in exported)

    store = ["--store", str(root)]
    command(home, "audit", "verify", "--run", "continued", *store)
    assert "sources" in command(home, "audit", "lineage", "--run", "continued", *store)
    command(home, "replay", "continued", *store)


@pytest.mark.integration
@pytest.mark.long
def test_ppo_continues_slimes_critic_and_a_teacher_is_a_megatron_checkpoint(
    folders: dict[str, Path], tmp_path: Path
):
    critic = tmp_path / "critic"
    write(Job(str(folders["model"]), str(tmp_path / "release"), str(critic), critic=True))
    settings = {"role": "critic", "overrides": {"load": str(critic), "save": str(critic)}}
    (tmp_path / "roles.json").write_text(json.dumps({"megatron": [settings]}))
    more = f"""
    --advantage-estimator ppo --megatron-config-path {tmp_path / "roles.json"}
    --use-opd --opd-type megatron --opd-teacher-load {folders["reference"]}
    """
    home = tmp_path / "home"
    with LiveRun(home, *arguments(folders), *more.split()) as run:
        assert run.finish(900.0) == 0, run.output
        assert "optimizer starts fresh" not in run.output
    root = folders["run"] / "rlpipe"
    files = Files(root)
    nodes, branches = Nodes(files), Branches(files)
    init = nodes.get(Stage.INIT, branches.get("continued").init)
    sources = init.outputs["sources"]
    assert sources["critic"]["path"] == str(critic / "iter_0000001")
    assert init.config["sources"]["critic's optimizer"] == sources["critic"]["sha256"]
    assert sources["teacher"]["path"] == str(folders["reference"] / "release")
    trained = [
        nodes.get(Stage.TRAIN, branches.read("continued", k).nodes[Stage.TRAIN]) for k in (0, 1)
    ]
    for name in ("lr", "critic_lr"):
        rates = [step[name] for node in trained for step in node.outputs["steps"]]
        assert rates == pytest.approx([LR * (1 - done / ROLLOUTS) for done in (2, 3)])
    command(home, "audit", "verify", "--run", "continued", "--store", str(root))
