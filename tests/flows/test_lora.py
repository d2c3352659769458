"""Whole runs with adapters: after a warm start, or from a directory of PEFT, with kills."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rlpipe.lineage.provenance import backward
from rlpipe.store.audit.verification import check_branch
from rlpipe.store.branches import Branches
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.store.parquet.shards import read_rows
from rlpipe.types import Stage
from tests.flows.live_run import LiveRun, command
from tests.flows.test_train import REWARD, SAMPLING, SUPERVISED, WORDS, committed


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


def evaluate(home: Path, name: str, *arguments: str) -> list[list[int]]:
    """Run an evaluation, and return the tokens of its responses."""
    folder = home / "store" / "nodes" / "eval"
    before = {*folder.glob("*")}
    command(home, "evaluate", "--name", name, *arguments)
    (new,) = {*folder.glob("*")} - before
    files = Files(home / "store")
    rows = read_rows(files, Nodes(files).get(Stage.EVAL, new.stem).files, columns=["response_ids"])
    return rows["response_ids"].to_pylist()


LORA = ("train.lora.rank=4", "train.optimizer.lr=1e-2")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a home, its finished run `first`, and the run's adapters in `adapter`."""
    folder = tmp_path_factory.mktemp("exported")
    (folder / "reward.py").write_text(REWARD)
    (folder / "small.yaml").write_text(SAMPLING % (folder / "reward.py"))
    recipe = ("--recipe", str(folder / "small.yaml"), "--run", "first", "num_rollout=2")
    with LiveRun(folder / "home", *recipe, *LORA) as run:
        assert run.finish(300) == 0, run.output
    convert(folder, "first", "adapter")
    return folder


def convert(folder: Path, of: str, name: str) -> None:
    """Write adapters of a run in `folder` as the directory `name` of PEFT."""
    arguments = ("--of", of, "--adapter", "--output-dir", str(folder / name))
    command(folder / "home", "convert", "dist2hf", *arguments)


def nodes_of(home: Path, stage: Stage) -> list[Path]:
    return [*(home / "store" / "nodes" / stage).glob("*.json")]


@pytest.mark.long
@pytest.mark.integration
def test_engines_answer_with_the_adapters_of_a_directory_as_with_the_iteration_that_made_it(
    exported: Path,
):
    home = exported / "home"
    greedy = (
        "evaluation={datasets: [{name: held, temperature: 0.0, n_samples_per_eval_prompt: 1, "
        f"prompts: {WORDS % 9000}}}]}}"
    )
    recipe = ("--recipe", str(exported / "small.yaml"), greedy, LORA[0])
    base = evaluate(home, "base", *recipe)
    # The first version has no checkpoint, only its adapters.
    assert len(nodes_of(home, Stage.CHECKPOINT)) == 1
    trained = evaluate(home, "trained", "--of", "first@0", greedy)
    init = Branches(Files(home / "store")).get("trained").init
    assert [*Nodes(Files(home / "store")).get(Stage.INIT, init).parents] == ["adapter"]
    convert(exported, "first@0", "early")
    config = json.loads((exported / "early" / "adapter_config.json").read_text())
    assert (Path(config["base_model_name_or_path"]) / "config.json").is_file()
    imported = evaluate(home, "imported", *recipe, f"model.adapter={exported / 'early'}")
    assert imported == trained != base


@pytest.mark.long
@pytest.mark.integration
def test_a_run_from_a_directory_of_peft_is_rebuilt_replayed_and_forked(exported: Path):
    home = exported / "home"
    adapter = exported / "adapter"
    kl = ("advantage.reference=true", "train.loss.kl_loss_coef=0.01")
    arguments = ("--recipe", str(exported / "small.yaml"), *LORA, *kl)
    layout = (
        "sync.transport=adapter",
        "resources.actor_num_gpus_per_node=2",
        "train.parallel.tensor_model_parallel_size=2",
        f"model.adapter={adapter}",
        "num_rollout=3",
        "checkpoint.save_interval=3",
    )
    with LiveRun(home, *arguments, *layout, "--run", "second") as run:
        # There is no checkpoint yet: the weights are rebuilt from the directory.
        run.wait_until(lambda: committed(home, "second") >= 1)
        run.kill_part("ray::TrainerRank")
        assert run.finish(400) == 0, run.output
    files = Files(home / "store")
    nodes = Nodes(files)
    branches = Branches(files)
    assert check_branch(files, "second") == []
    init = nodes.get(Stage.INIT, branches.get("second").init)
    assert init.outputs["sources"]["adapter"]["path"] == str(adapter)
    assert init.config["sources"] == {"adapter": init.outputs["sources"]["adapter"]["sha256"]}
    commits = list(branches.walk("second"))
    syncs = [nodes.get(Stage.SYNC, commit.nodes[Stage.SYNC]).outputs for commit in commits]
    assert max(sync["metrics"]["sync/logprob_difference"] for sync in syncs) <= 1e-4
    # The first reference has the first adapters.
    first = branches.read("second", 0).nodes[Stage.TRAIN]
    steps = nodes.get(Stage.TRAIN, first).outputs["steps"]
    assert steps[0]["kl_loss"] == pytest.approx(0, abs=1e-9)
    assert steps[1]["kl_loss"] > 1e-3
    assert "4 states, all bit" in command(home, "replay", "second", "--ray-address", "local")

    fork = ("--fork", "second@0", "--run", "fork")
    moved = exported / "moved" / "adapter"
    moved.parent.mkdir()
    shutil.move(adapter, moved)
    with LiveRun(home, *arguments, *layout[:3], *layout[4:], *fork) as run:
        assert run.finish(300) != 0
        assert "a fork keeps the first adapters of its parent" in run.output
    changed = (f"model.adapter={moved}", "train.optimizer.lr=2e-2")
    with LiveRun(home, *arguments, *layout[:3], *layout[4:], *changed, *fork) as run:
        assert run.finish(400) == 0, run.output
    assert check_branch(files, "fork") == []


@pytest.mark.long
@pytest.mark.integration
def test_a_run_starts_from_the_adapters_of_an_iteration_without_a_checkpoint(exported: Path):
    home = exported / "home"
    arguments = (
        "--recipe",
        str(exported / "small.yaml"),
        *LORA,
        "advantage.reference=true",
        "train.loss.kl_loss_coef=0.01",
        "num_rollout=2",
        "checkpoint.save_interval=2",
        'model.start_from={"branch": "first", "iteration": 0}',
    )
    with LiveRun(home, *arguments, "--run", "later") as run:
        # There is no checkpoint yet: the weights are rebuilt from the adapters.
        run.wait_until(lambda: committed(home, "later") >= 1)
        run.kill_part("ray::TrainerRank")
        assert run.finish(400) == 0, run.output
    files = Files(home / "store")
    branches = Branches(files)
    nodes = Nodes(files)
    assert check_branch(files, "later") == []
    trained = branches.read("first", 0).nodes[Stage.TRAIN]
    init = nodes.get(Stage.INIT, branches.get("later").init)
    assert init.parents == {"adapter": trained}
    first = nodes.get(Stage.TRAIN, branches.read("later", 0).nodes[Stage.TRAIN])
    assert first.outputs["steps"][0]["kl_loss"] == pytest.approx(0, abs=1e-9)
    chain = backward(files, "later")
    assert [part["branch"] for part in chain["branches"]] == ["later", "first"]
    # Versions 0 and 1 of `first`, 0 to 2 of `later`.
    assert "5 states, all bit" in command(home, "replay", "later", "--ray-address", "local")
