"""Terminal line, artifacts, sinks and user log functions of a run (tasks.observe)."""

from __future__ import annotations

import base64
import io
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from prefect.runtime import flow_run
from prefect.settings import PREFECT_UI_URL, temporary_settings
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlpipe.batch.files import write_evaluation, write_rewards
from rlpipe.config.hooks import load_hook
from rlpipe.lineage.stage_inputs import Inputs
from rlpipe.observe.progress import Progress
from rlpipe.rewards.reward_rows import RewardRow
from rlpipe.store.epochs import Epochs
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.store.parquet.rows import samples_to_table
from rlpipe.store.parquet.shards import data_folder, write_table
from rlpipe.types import Commit, DataState, FileRecord, NodeRef, Stage
from tasks import artifacts, observe
from tasks.artifacts import UpdatedArtifact
from tasks.context import RunContext
from tasks.observe import Observer
from tests.store.lineage import group
from tests.tasks.test_begin import config

SOURCE = """
seen = []


def rollout(rollout_id, args, samples, extra_metrics, rollout_time):
    rewards = [s.reward for s in samples]
    number = args.n_samples_per_prompt
    seen.append((rollout_id, number, rewards, extra_metrics, rollout_time, args.colocate))
    return rollout_id == 1


def evaluation(rollout_id, args, data, extra_metrics):
    sets = {
        name: (found["rewards"], found["truncated"], len(found["samples"]))
        for name, found in data.items()
    }
    seen.append((rollout_id, sets))
    return True


def fails(*arguments):
    raise SystemExit("no server")
"""
ITERATION_ARTIFACT = observe.iteration_artifact
METRICS = {"rollout/raw_reward": 0.5, "train/loss": 0.25, "train/grad_norm": 0.5}
Watching = Callable[..., tuple[RunContext, io.StringIO]]


@pytest.fixture
def watching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watching:
    """Open a run with the log functions of SOURCE, without actors and Prefect artifacts."""
    (tmp_path / "mine.py").write_text(SOURCE)
    (tmp_path / "b.jsonl").write_text('{"prompt": "1", "label": "2"}\n')
    monkeypatch.chdir(tmp_path)

    async def nothing(*_: Any) -> None: ...

    monkeypatch.setattr(observe, "iteration_artifact", nothing)
    monkeypatch.setattr(observe, "curve_artifact", nothing)
    monkeypatch.setattr(observe, "overview_artifact", nothing)

    def opening(rollout: str, evaluation: str) -> tuple[RunContext, io.StringIO]:
        paths = {
            "custom_rollout_log_function_path": rollout,
            "custom_eval_rollout_log_function_path": evaluation,
        }
        run = config(observe={key: f"{tmp_path}/mine.py:{name}" for key, name in paths.items()})
        # `colocate: auto` of the run, and the decision of the actors.
        shared = run.resources.model_copy(update={"colocate": True})
        actors: Any = SimpleNamespace(config=run.model_copy(update={"resources": shared}))
        files = Files(tmp_path / "store")
        stream = io.StringIO()
        ctx = RunContext(
            run,
            tmp_path / "home",
            "/m",
            files,
            actors,
            Progress("run", 3, stream=stream),
            Epochs(files).acquire("run"),
        )
        init = ctx.nodes.commit(Inputs(Stage.INIT, {}, {}).node())
        ctx.branches.create("run", run.model_dump(mode="json"), init.digest)
        ctx.directory.mkdir(parents=True)
        return ctx, stream

    return opening


def record(
    ctx: RunContext, stage: Stage, file: Callable[[str], FileRecord] | None = None, **outputs: Any
) -> NodeRef:
    inputs = Inputs(stage, {}, {"number": len(ctx.files.list("nodes"))})
    node = Nodes(ctx.files).commit(
        inputs.node(files=(file(inputs.digest),) if file else (), outputs=outputs)
    )
    return NodeRef(stage=stage, digest=node.digest, outputs=outputs)


def iteration(ctx: RunContext) -> dict[str, NodeRef]:
    """Nodes of an iteration of two groups; one was accepted and scored 0 and 1."""
    table = samples_to_table([*group("a"), *group("b")], 0)
    rows = [RewardRow("b", index, float(index)) for index in range(2)]
    return {
        "rollout": record(
            ctx,
            Stage.ROLLOUT,
            lambda key: write_table(ctx.files, data_folder(Stage.ROLLOUT, key), "rows", table),
            accepted=["b"], seconds=2.0, tokens=6,
        ),
        "reward": record(
            ctx, Stage.REWARD, lambda key: write_rewards(ctx.files, key, rows), seconds=1.0
        ),
        "train": record(ctx, Stage.TRAIN, seconds=1.0, metrics=METRICS),
    }  # fmt: skip


def evaluation(ctx: RunContext) -> dict[str, NodeRef]:
    samples = group("q")
    rows = [RewardRow("q", index, 1.0) for index in range(2)]
    return {
        "held": record(
            ctx, Stage.EVAL, lambda key: write_evaluation(ctx.files, key, 0, samples, rows)
        )
    }


def logged_steps(ctx: RunContext) -> dict[str, list[int]]:
    board = EventAccumulator(str(ctx.directory / "tensorboard" / ctx.config.run))
    board.Reload()
    return {name: [event.step for event in board.Scalars(name)] for name in board.Tags()["scalars"]}


async def test_user_log_functions_get_slime_arguments_and_replace_the_sinks(
    watching: Watching,
):
    ctx, stream = watching("rollout", "evaluation")
    with Observer(ctx, 0, startup_seconds=0.0) as observer:
        for k in range(2):
            await observer.iteration(k, iteration(ctx), seconds=1.0)
        await observer.evaluation(
            2, evaluation(ctx), {"eval/held/accuracy": 1.0}, seconds=1.0, concurrent=False
        )
    seen = vars(
        sys.modules[load_hook(ctx.config.observe.custom_rollout_log_function_path or "").__module__]
    )["seen"]
    assert [(one[0], one[1], one[2], *one[4:]) for one in seen[:2]] == [
        (k, 2, [0.0, 1.0], 2.0, True) for k in range(2)
    ]
    assert seen[0][3] == {
        "rollout/raw_reward": 0.5,
        "perf/rollout_tokens": 6.0,
        "perf/rollout_tokens_per_s": 3.0,
    }
    assert seen[2] == (2, {"held": ([1.0, 1.0], [False, False], 2)})
    trained = {name: [0, 1] for name in ("train/loss", "train/grad_norm")}
    assert logged_steps(ctx) == {**trained, **{name: [0] for name in seen[0][3]}}
    assert [("reward" in line, "grad" in line) for line in stream.getvalue().splitlines()[:2]] == [
        (True, True),
        (False, True),
    ]
    assert "held accuracy" not in stream.getvalue()


async def test_groups_without_signal_in_consecutive_iterations_give_one_warning(
    watching: Watching,
):
    ctx, stream = watching("fails", "fails")
    with Observer(ctx, 0, startup_seconds=0.0) as observer:
        for share in (0.8, 0.9, 1.0, 0.9, 0.7, 0.8, 0.9, 0.8, 0.9):
            observer._warn_without_signal({"rollout/zero_std_fraction": share})
        assert "equal rewards" not in stream.getvalue(), "at most four in a row"
        for _ in range(9):
            metrics = {"rollout/zero_std_fraction": 0.85, "rollout/raw_reward": 0.2}
            observer._warn_without_signal(metrics)
    warnings = [line for line in stream.getvalue().splitlines() if "equal rewards" in line]
    assert len(warnings) == 1
    assert "85% of the groups have equal rewards (mean reward 0.2)" in warnings[0]
    ctx.config = config(advantage={"advantage_estimator": "reinforce_plus_plus"})
    with Observer(ctx, 0, startup_seconds=0.0) as observer:
        for _ in range(9):
            observer._warn_without_signal({"rollout/zero_std_fraction": 1.0})
    assert stream.getvalue().count("equal rewards") == 1


async def test_an_error_of_a_user_log_function_is_printed_and_the_sinks_log(watching: Watching):
    ctx, stream = watching("fails", "fails")
    with Observer(ctx, 0, startup_seconds=0.0) as observer:
        await observer.iteration(0, iteration(ctx), seconds=1.0)
        await observer.evaluation(
            1, evaluation(ctx), {"eval/held/accuracy": 1.0}, seconds=1.0, concurrent=False
        )
        assert not await observer.rollout(1, iteration(ctx))
    assert stream.getvalue().count("SystemExit: no server") == 3
    assert "observe.custom_eval_rollout_log_function_path" in stream.getvalue()
    assert "held accuracy 1.000" in stream.getvalue()
    assert {"rollout/raw_reward", "train/loss", "eval/held/accuracy"} <= logged_steps(ctx).keys()


@pytest.mark.parametrize(
    ("num_rollout", "expected"),
    [(3, "run: after 0 iterations held accuracy 1.000"), (0, "run: held accuracy 1.000")],
)
async def test_an_evaluation_of_another_runs_weights_prints_no_number_of_iterations(
    watching: Watching, num_rollout: int, expected: str
):
    ctx, stream = watching("fails", "fails")
    ctx.config = ctx.config.model_copy(update={"num_rollout": num_rollout})
    with Observer(ctx, 0, startup_seconds=0.0) as observer:
        await observer.evaluation(
            0, evaluation(ctx), {"eval/held/accuracy": 1.0}, seconds=1.0, concurrent=False
        )
    assert expected in stream.getvalue()


def test_user_log_functions_are_not_part_of_the_identity():
    observed = config(
        observe={
            "custom_rollout_log_function_path": "a.b",
            "custom_eval_rollout_log_function_path": "c.d",
        }
    )
    assert observed.identity() == config().identity()


@pytest.mark.integration
async def test_newer_curves_and_overview_replace_older_ones(prefect_server: str, tmp_path: Path):
    picture = tmp_path / "report.png"

    @flow
    async def reporting() -> list[list[Any]]:
        curve = UpdatedArtifact()
        overview = UpdatedArtifact()
        seen = []
        of_this_run = ArtifactFilter(
            flow_run_id=ArtifactFilterFlowRunId(any_=[UUID(str(flow_run.id))])
        )
        async with get_client() as client:
            for number in range(4):
                picture.write_bytes(b"%d" % number)
                await artifacts.curve_artifact(curve, "observed", picture)
                await artifacts.overview_artifact(overview, "observed", f"after {number}")
                made = await client.read_artifacts(artifact_filter=of_this_run)
                seen.append(sorted(str(artifact.data) for artifact in made))
                if number == 2:
                    for artifact in made:  # as a person does in Prefect's pages
                        await client.delete_artifact(artifact.id)
            latest = await client.request(
                "GET", "/artifacts/{key}/latest", path_params={"key": "observed-overview"}
            )
        return [*seen, latest.json()["data"]]

    *seen, latest = await reporting()
    data = [base64.b64encode(b"%d" % number).decode() for number in range(4)]
    assert seen == [
        [f"after {number}", f"data:image/png;base64,{data[number]}"] for number in range(4)
    ]
    assert latest == "after 3"


async def test_the_digest_of_a_commit_is_in_its_artifact_and_in_tensorboard(
    watching: Watching, monkeypatch: pytest.MonkeyPatch
):
    ctx, _ = watching("fails", "fails")
    left: list[str] = []

    async def leave(rows: list[dict[str, Any]], key: str, description: str) -> None:
        left.append(description)

    monkeypatch.setattr(observe, "iteration_artifact", ITERATION_ARTIFACT)
    monkeypatch.setattr(artifacts, "acreate_table_artifact", leave)
    with Observer(ctx, 0, startup_seconds=0.0) as observer:
        for k in range(2):
            nodes = iteration(ctx)
            made = {Stage(name): node.digest for name, node in nodes.items()}
            parent = ctx.branches.parent_name("run", k)
            record = {"plans": (), "nodes": made, "data": DataState(), "config_digest": "0"}
            ctx.branches.commit(Commit(branch="run", iteration=k, parent=parent, **record))
            await observer.iteration(k, nodes, seconds=1.0)
        await observer.iteration(2, iteration(ctx), seconds=1.0)
    digests = [ctx.branches.read_stored("run", k)[1] for k in range(2)]
    assert [message.rpartition("commit sha256 ")[2] for message in left[:2]] == digests
    assert "sha256" not in left[2], "it was not committed"
    board = EventAccumulator(str(ctx.directory / "tensorboard" / ctx.config.run))
    board.Reload()
    assert [
        event.tensor_proto.string_val[0].decode() for event in board.Tensors("commit_sha256")
    ] == digests


def test_the_terminal_shows_the_accuracy_of_preference_pairs():
    columns = {"label_key": "chosen", "rejected_key": "rejected"}
    pairs = config(
        data={"prompts": {"type": "file", "paths": ["a.jsonl"], **columns}},
        rollout={"type": "dataset", "rollout_batch_size": 2},
        reward={"function": {"type": "none"}},
        advantage={"advantage_estimator": "none", "reference": True},
        train={"loss": {"type": "dpo"}},
    )
    metrics = {"train/loss": 0.5, "train/rewards/accuracies": 0.75, "train/grad_norm": 2.0}
    values = observe.terminal_values(pairs, metrics, {})
    assert values == {"accuracy": 0.75, "loss": 0.5, "grad": 2.0}
    tied = {"train/rewards/accuracies": 0.0, "train/rewards/margins": 0.0, "train/loss": 0.5}
    assert observe.terminal_values(pairs, tied, {})["accuracy"] == "0 (ties)"


def test_the_terminal_shows_each_logprob_difference_with_its_own_bound():
    metrics = {
        "rollout/raw_reward": 0.5,
        "perf/rollout_tokens_per_s": 1234.6,
        "sync/logprob_difference": 1.14e-6,
        "sync/logprob_noise": 1e-7,
        "max_logprob_difference": 0.0034,
        "train/loss": 9.31e-10,
        "train/entropy": 1.25,
    }
    plain = observe.terminal_values(config(), metrics, {"heldout": 0.25})
    assert plain == {
        "reward": 0.5,
        "heldout": 0.25,
        "Δlogp": "1.1e-06 (limit 0.1)",
        "max Δlogp": "0.0034",
        "tok/s": 1235,
        "entropy": 1.25,
    }
    # The check after a push accepts five times the trainer's own noise.
    bounds = config(
        gates={"bounds": [{"metric": "max_logprob_difference", "at_most": 0.02}]},
        sync={"max_logprob_difference": 1e-4},
    )
    noisy = observe.terminal_values(bounds, metrics | {"sync/logprob_noise": 1e-4}, {})
    assert noisy["Δlogp"] == "1.1e-06 (limit 0.0005)"
    assert noisy["max Δlogp"] == "0.0034 (limit 0.02)"
    assert observe.terminal_values(bounds, {}, {}) == {}


def test_the_terminal_shows_the_loss_only_where_it_is_not_0_by_construction():
    metrics = {"train/loss": 0.25, "train/entropy": 1.5}
    relative = ("grpo", "gspo", "cispo", "rloo")
    for estimator in (*relative, "reinforce_plus_plus"):
        run = config(advantage={"advantage_estimator": estimator})
        shown = observe.terminal_values(run, metrics, {})
        assert shown == ({"entropy": 1.5} if estimator in relative else {"loss": 0.25})
    absolute = config(advantage={"rewards_normalization": False})
    assert observe.terminal_values(absolute, metrics, {}) == {"loss": 0.25}


async def test_an_iteration_in_another_process_has_the_seconds_of_its_stages(watching: Watching):
    ctx, stream = watching("rollout", "evaluation")
    ctx.config = config(orchestration={"iterations": "deployment"})
    ctx.progress.stage("flow run", 0, note="run-0: Running")
    with Observer(ctx, 0, startup_seconds=0.0) as observer:
        nodes = iteration(ctx)
        metrics = {"sync/logprob_difference": 1e-6}
        nodes["train"] = record(ctx, Stage.TRAIN, seconds=1.0, metrics=metrics)
        for k in range(2):
            await observer.iteration(k, nodes, seconds=4.0)
    lines = stream.getvalue().splitlines()
    assert sum("(rollout 2.0 reward 1.0 train 1.0)" in line for line in lines) == 2
    assert "flow run" not in stream.getvalue()
    assert stream.getvalue().count(observe.LOGPROB_LEGEND) == 1


def test_the_terminal_shows_the_speed_of_all_rollouts_in_flight():
    speed = {"perf/rollout_tokens": 3000.0, "perf/rollout_tokens_per_s": 300.0}

    def shown(rollout_s: float, **sections: Any) -> Any:
        values = observe.terminal_values(config(**sections), speed, {}, rollout_s=rollout_s)
        return values["tok/s"]

    assert shown(5.0) == 300
    assert shown(5.0, async_buffer_size=1) == 600
    assert shown(0.0, async_buffer_size=1) == 300


async def test_report_and_samples_link_to_each_other_and_to_the_flow_run(
    watching: Watching, monkeypatch: pytest.MonkeyPatch
):
    ctx, _ = watching("fails", "fails")
    # How Prefect sets its runtime context outside a flow.
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", "0198c0de-0000-7000-8000-000000000000")
    with (
        temporary_settings({PREFECT_UI_URL: "http://127.0.0.1:4200"}),
        Observer(ctx, 0, startup_seconds=0.0) as observer,
    ):
        await observer.samples_page()
        await observer.report()
    flow_run = "http://127.0.0.1:4200/runs/flow-run/0198c0de-0000-7000-8000-000000000000"
    report = (ctx.directory / "report.html").read_text()
    samples = (ctx.directory / "samples.html").read_text()
    assert 'href="samples.html"' in report and 'href="report.html"' in samples
    assert f'href="{flow_run}"' in report and f'href="{flow_run}"' in samples
