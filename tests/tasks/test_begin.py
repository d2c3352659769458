"""The start of a run, without actors (tasks.begin)."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlpipe.batch.files import write_adapters
from rlpipe.config.hooks import hook_digest
from rlpipe.config.load import validate
from rlpipe.config.run import RunConfig
from rlpipe.errors import ConfigError, Fenced, ObjectMissing
from rlpipe.lineage.continuation import check_same_run
from rlpipe.lineage.stage_inputs import Inputs, checkpoint_inputs, init_inputs
from rlpipe.observe.progress import Progress
from rlpipe.store.branches import Branches
from rlpipe.store.epochs import Epochs
from rlpipe.store.objects.files import Files
from rlpipe.types import Commit, DataState, Stage
from tasks import begin
from tasks.begin import (
    changed_functions,
    check_same_model,
    first_iteration,
    report_overlong,
)
from tasks.context import RunContext

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


def opened(folder: Path, model: Path) -> RunContext:
    """The context of the run `begun`, without actors."""
    source = {"type": "huggingface", "hf_checkpoint": str(model)}
    run = config(run="begun", model={"source": source})
    no_actors: Any = None
    files = Files(folder / "store")
    epoch = Epochs(files).acquire("begun", takeover=True)
    return RunContext(
        run, folder / "home", str(model), files, no_actors, Progress("begun", 3), epoch
    )


def begun_run(tmp_path: Path) -> tuple[Path, Any]:
    """Return a model directory and the context of a run with it that has first weights."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    begun = opened(tmp_path, directory)
    init = begun.nodes.commit(init_inputs(begun.config, begun.fingerprint, None).node())
    begun.branches.create("begun", begun.config.model_dump(mode="json"), init.digest)
    return directory, begun


def test_a_model_may_move_but_not_change(tmp_path: Path):
    directory, begun = begun_run(tmp_path)
    moved = directory.rename(tmp_path / "moved")
    check_same_run(begun.branches, opened(tmp_path, moved).config)
    check_same_model(opened(tmp_path, moved))
    (moved / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="the model directory has changed") as caught:
        check_same_model(opened(tmp_path, moved))
    assert caught.value.where == "model.source"
    assert str(moved) in str(caught.value.found)


async def test_a_policy_does_not_start_from_a_reward_model(tmp_path: Path):
    directory, _ = begun_run(tmp_path)
    ctx = opened(tmp_path, directory)
    scores = validate(
        {
            **BASE,
            "run": "scores",
            "data": {
                "prompts": {
                    **BASE["data"]["prompts"],
                    "label_key": "chosen",
                    "rejected_key": "rejected",
                }
            },
            "rollout": {**BASE["rollout"], "type": "dataset", "n_samples_per_prompt": 1},
            "reward": {"function": {"type": "none"}},
            "advantage": {"advantage_estimator": "none"},
            "train": {"loss": {"type": "reward_model"}},
            "evaluation": {},
        }
    )
    ctx.branches.create("scores", scores.model_dump(mode="json"), "0" * 64)
    model = {**ctx.config.model.model_dump(mode="json"), "start_from": {"branch": "scores"}}
    ctx.config = validate({**ctx.config.model_dump(mode="json"), "model": model})
    with pytest.raises(ConfigError, match="a policy cannot start from a reward model"):
        begin._start_nodes(ctx)


def test_adapters_need_their_settings_and_the_directory_of_their_frozen_weights(tmp_path: Path):
    directory, begun = begun_run(tmp_path)
    lora = {"lora": {"rank": 4}}
    inputs = Inputs(Stage.TRAIN, {"before": "w"})
    record = write_adapters(begun.files, inputs.digest, b"adapters")
    begun.nodes.commit(inputs.node(files=(record,), outputs={"version": 1}))
    stored = config(run="trained", train=lora).model_dump(mode="json")
    begun.branches.create("trained", stored, begun.branches.get("begun").init)
    nodes = {Stage.TRAIN: inputs.digest}
    commit = Commit(
        branch="trained",
        iteration=0,
        parent=None,
        plans=(),
        nodes=nodes,
        data=DataState(),
        config_digest="",
    )
    begun.branches.commit(commit)

    def nodes_of(**train: Any) -> begin.StartNodes:
        ctx = opened(tmp_path, directory)
        start = {**ctx.config.model.model_dump(mode="json"), "start_from": {"branch": "trained"}}
        ctx.config = validate(
            {**ctx.config.model_dump(mode="json"), "model": start, "train": train}
        )
        return begin._start_nodes(ctx)

    assert nodes_of(**lora) == begin.StartNodes(None, inputs.digest)
    with pytest.raises(ConfigError, match="other adapters than the policy"):
        nodes_of(lora={"rank": 8})
    with pytest.raises(ObjectMissing, match="no saved weights"):
        nodes_of()
    (directory / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="the model directory on which they were trained"):
        nodes_of(**lora)
    saved = checkpoint_inputs(inputs.digest)
    begun.nodes.commit(saved.node(outputs={"version": 1}))
    assert nodes_of(lora={"rank": 8}) == begin.StartNodes(saved.digest)


async def test_pushes_of_adapters_need_the_frozen_weights_of_the_model_directory(tmp_path: Path):
    directory, begun = begun_run(tmp_path)
    init = begun.nodes.commit(init_inputs(begun.config, begun.fingerprint, "checkpoint").node())
    begun.branches.create("warm", begun.config.model_dump(mode="json"), init.digest)

    def pushing(run: str) -> RunContext:
        ctx = opened(tmp_path, directory)
        changed = {
            "run": run,
            "train": {"lora": {"rank": 4}},
            "sync": {"transport": "adapter"},
        }
        ctx.config = validate({**ctx.config.model_dump(mode="json"), **changed})
        return ctx

    begin.check_frozen_weights(pushing("begun"))
    with pytest.raises(ConfigError, match="the frozen ones are others"):
        begin.check_frozen_weights(pushing("warm"))


async def test_a_run_without_a_commit_takes_another_reward_key(tmp_path: Path):
    directory, begun = begun_run(tmp_path)
    again = opened(tmp_path, directory)
    function = {"type": "by_row", "reward_key": "acc"}
    again.config = validate(
        {**again.config.model_dump(mode="json"), "reward": {"function": function}}
    )
    terminal = io.StringIO()
    again.progress = Progress("begun", 3, stream=terminal)
    check_same_run(again.branches, again.config)
    assert await first_iteration(again) == 0
    assert (
        "begun: reward.function.reward_key has changed before the first commit: absent → 'acc'"
        in terminal.getvalue()
    )
    (stored,) = [Branches(again.files).get(name) for name in again.branches.names()]
    assert stored.config == again.config.model_dump(mode="json")
    assert again.branches.get("begun") == stored
    assert (stored.init, stored.branch) == (begun.branches.get("begun").init, "begun")
    # The earlier driver cannot bring its configuration back.
    with pytest.raises(Fenced):
        await first_iteration(begun)
    assert stored == Branches(again.files).get("begun")
    again.epoch.release()


def test_a_user_function_that_was_edited_since_the_last_iteration_is_named(tmp_path: Path):
    ctx = opened(tmp_path, tmp_path / "model")
    reward = tmp_path / "reward.py"
    reward.write_text("def score(sample):\n    return 1.0\n")
    path = f"{reward}:score"
    inputs = Inputs(Stage.REWARD, {}, {}, {path: hook_digest(path), "gone.py:score": "0"})
    node = ctx.nodes.commit(inputs.node())
    commit = cast("Commit", SimpleNamespace(nodes={Stage.REWARD: node.digest}))
    ctx.config = config(reward={"function": {"type": "python", "path": path}})
    assert changed_functions(ctx, commit) == []
    reward.write_text("def score(sample):\n    return 2.0\n")
    assert changed_functions(ctx, commit) == [path]
    # A fork of the iteration scores with another function.
    ctx.config = config()
    assert changed_functions(ctx, commit) == []


async def test_dropped_and_cut_rows_are_listed_in_terminal_artifact_and_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shown: list[dict[str, Any]] = []

    async def artifact(rows: list[dict[str, Any]], **about: Any) -> None:
        shown.append({"rows": rows, **about})

    monkeypatch.setattr(begin, "acreate_table_artifact", artifact)
    ctx = opened(tmp_path, tmp_path / "model")
    terminal = io.StringIO()
    ctx.directory.mkdir(parents=True)
    ctx.progress = Progress("begun", 3, stream=terminal)
    ctx.config = ctx.config.model_copy(
        update={"data": ctx.config.data.model_copy(update={"overlong_prompts": "drop"})}
    )
    rows = [
        {
            "where": f"a.jsonl:{n}",
            "tokens": 100 + n,
            "limit": 90,
            "setting": "data.rollout_max_prompt_len",
        }
        for n in range(7)
    ]
    await report_overlong(ctx, {"data.prompts": rows, "evaluation.datasets: held": rows[:1]})
    output = terminal.getvalue()
    assert (
        "begun: data.prompts: 7 over-long prompts are dropped, "
        "longer than 90 tokens (data.rollout_max_prompt_len)" in output
    )
    assert (
        "a.jsonl:0 (100 tokens), a.jsonl:1 (101 tokens)" in output
        and "a.jsonl:4 (104 tokens) and 2 more" in output
    )
    assert "evaluation.datasets: held: 1 over-long prompts are dropped" in output
    written = [
        json.loads(line)
        for line in (ctx.directory / "overlong_prompts.jsonl").read_text().splitlines()
    ]
    assert written == [{"prompts": "data.prompts", **row} for row in rows] + [
        {"prompts": "evaluation.datasets: held", **rows[0]}
    ]
    assert shown == [
        {"rows": written, "key": "begun-overlong", "description": shown[0]["description"]}
    ]
    await report_overlong(ctx, {})
    assert not (ctx.directory / "overlong_prompts.jsonl").exists() and len(shown) == 1
    ctx.epoch.release()
