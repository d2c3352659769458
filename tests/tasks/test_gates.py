"""An iteration with metrics out of bounds pauses until a person resumes it (tasks.gates)."""

from __future__ import annotations

import asyncio
import io
import math
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.flow_runs import aresume_flow_run
from prefect.runtime import flow_run
from prefect.states import Cancelled

from rlpipe.config.observe import Gate
from rlpipe.errors import ConfigError, GateClosed
from rlpipe.lineage.stage_inputs import eval_inputs
from rlpipe.observe.progress import Progress
from rlpipe.store.branches import Branches, commit_name
from rlpipe.store.epochs import Epochs
from rlpipe.store.objects.files import Files
from rlpipe.store.segments import Segments
from rlpipe.types import Commit, DataState, NodeRef, Stage
from tasks import context as contexts
from tasks.context import RunContext
from tasks.gates import REASON_LABEL, broken_bounds, gates
from tests.tasks.test_begin import config
from tests.tasks.test_observe import record
from tests.tasks.test_ordering import commit

Opened = Callable[..., tuple[RunContext, io.StringIO]]


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Opened:
    """Open the run `run` with these gates, without actors; a held-out set is evaluated after
    each iteration.
    """

    def opening(
        *bounds: dict[str, Any], timeout_s: float = 60.0, parent: str | None = None
    ) -> tuple[RunContext, io.StringIO]:
        (tmp_path / "b.jsonl").write_text('{"prompt": "1", "answer": "2"}\n')
        prompts = {"type": "file", "paths": [str(tmp_path / "b.jsonl")], "label_key": "answer"}
        held = {"eval_interval": 1, "datasets": [{"name": "held", "prompts": prompts}]}
        run = config(evaluation=held, gates={"bounds": bounds, "timeout_s": timeout_s, "poll_s": 1})
        files = Files(tmp_path / "store")
        stream = io.StringIO()
        no_actors = None
        progress = Progress("run", 3, stream=stream)
        epoch = Epochs(files).acquire("run")
        ctx = RunContext(run, tmp_path / "home", "/m", files, no_actors, progress, epoch)  # pyright: ignore[reportArgumentType]
        ctx.branches.create("run", run.model_dump(mode="json"), "init", parent)
        monkeypatch.setitem(contexts._OPEN, "run", ctx)
        return ctx, stream

    return opening


def trained(ctx: RunContext, **metrics: float) -> dict[str, NodeRef]:
    return {
        "train": record(
            ctx,
            Stage.TRAIN,
            seconds=1.0,
            metrics={f"train/{name}": value for name, value in metrics.items()},
        )
    }


def committed(files: Files, branch: str, iterations: int) -> str:
    """Commit a number of iterations of another branch; return the last commit's name."""
    branches = Branches(files)
    branches.create(branch, config(run=branch).model_dump(mode="json"), "init")
    for k in range(iterations):
        made = {
            "plans": ("p",),
            "nodes": {Stage.TRAIN: f"{branch}{k}"},
            "data": DataState(),
            "config_digest": "c",
        }
        branches.commit(
            Commit(branch=branch, iteration=k, parent=branches.parent_name(branch, k), **made)
        )
    return commit_name(branch, iterations - 1)


def measure(ctx: RunContext, version: int, accuracy: float) -> None:
    inputs = eval_inputs(ctx.config, ctx.config.evaluation.datasets[0], ctx.weights_before(version))
    ctx.nodes.commit(inputs.node(outputs={"metrics": {"eval/held/accuracy": accuracy}}))


def test_a_value_is_compared_with_every_bound_and_nan_breaks_each():
    gate = Gate(metric="eval/held/accuracy", at_most=1, at_least=0.2, falls_by=0.1)
    assert gate.violation(0.5, 0.55) is None and gate.violation(0.5) is None
    assert (
        Gate(metric="eval/held/accuracy", falls_by=0.25, at_most=0.5, at_least=0.5).violation(
            0.5, 0.75
        )
        is None
    ), "bounds hold"
    assert (
        gate.violation(0.4, 0.55)
        == "eval/held/accuracy is 0.4, expected at least 0.45, 0.1 below the best"
    )
    assert gate.violation(0.1) == "eval/held/accuracy is 0.1, expected at least 0.2"
    assert "at most 1 and at least 0.2" in str(gate.violation(math.nan))
    assert (
        Gate(metric="eval/held/accuracy", falls_by=1).violation(math.nan)
        == "eval/held/accuracy is nan, expected a number"
    )


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"metric": "train/loss"}, "set at_most, at_least or falls_by"),
        ({"metric": "train/loss", "falls_by": 1}, "falls_by is for eval/"),
        (
            {"metric": "eval/other/accuracy", "at_least": 1},
            "no evaluation measures 'eval/other/accuracy'; held-out sets: ",
        ),
    ],
)
def test_a_gate_without_a_bound_is_refused(opened: Opened, bounds: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        opened(bounds)


def test_a_pause_must_be_shorter_than_the_timeout_of_waiting_iterations(opened: Opened):
    with pytest.raises(
        ConfigError, match=r"gates\.timeout_s = 14400 must be less than orchestration\.timeout_s"
    ):
        opened({"metric": "train/loss", "at_most": 1}, timeout_s=14400)


def test_metrics_come_from_the_stages_and_an_unknown_one_is_named(opened: Opened):
    ctx, _ = opened(
        {"metric": "train/loss", "at_most": 1}, {"metric": "train/grad_norm", "at_most": 10}
    )
    assert broken_bounds(ctx, 0, trained(ctx, loss=0.5, grad_norm=10.0)) == []
    assert broken_bounds(ctx, 0, trained(ctx, loss=2.0, grad_norm=11.0)) == [
        "train/loss is 2, expected at most 1",
        "train/grad_norm is 11, expected at most 10",
    ]
    with pytest.raises(ConfigError, match="a metric that does not exist") as caught:
        broken_bounds(ctx, 0, trained(ctx, loss=0.5, gradnorm=1.0))
    assert caught.value.found == "train/grad_norm" and "train/gradnorm; or one of" in str(
        caught.value.expected
    )


def test_an_evaluation_is_compared_with_the_best_earlier_one(opened: Opened):
    ctx, _ = opened({"metric": "eval/held/accuracy", "falls_by": 0.1})
    found = trained(ctx, loss=0.0)
    for version, accuracy in enumerate((0.5, 0.7, 0.65)):
        measure(ctx, version, accuracy)
        assert broken_bounds(ctx, version, found) == []
        commit(ctx, version)
    assert broken_bounds(ctx, 3, found) == [], "not measured"
    measure(ctx, 3, 0.55)
    assert broken_bounds(ctx, 3, found) == [
        "eval/held/accuracy is 0.55, expected at least 0.6, 0.1 below the best"
    ]


def test_an_evaluation_of_a_fork_is_compared_with_the_best_one_of_the_fork(
    opened: Opened, tmp_path: Path
):
    ctx, _ = opened(
        {"metric": "eval/held/accuracy", "falls_by": 0.1},
        parent=committed(Files(tmp_path / "store"), "old", 2),
    )
    found = trained(ctx, loss=0.0)
    assert broken_bounds(ctx, 2, found) == [], "not measured"
    measure(ctx, 2, 0.7)
    assert broken_bounds(ctx, 2, found) == [], "nothing to hold it against"
    commit(ctx, 2)
    measure(ctx, 3, 0.55)
    assert broken_bounds(ctx, 3, found) == [
        "eval/held/accuracy is 0.55, expected at least 0.6, 0.1 below the best"
    ]


@pytest.mark.parametrize("bounds", [{"at_least": 0.2}, {"falls_by": 0.1}])
def test_earlier_evaluations_are_read_only_for_a_gate_that_needs_them(
    opened: Opened, bounds: dict[str, float], monkeypatch: pytest.MonkeyPatch
):
    ctx, _ = opened({"metric": "eval/held/accuracy", **bounds})
    for version in range(4):
        measure(ctx, version, 0.5)
        commit(ctx, version)
    found = trained(ctx, loss=0.0)
    looked = []
    real = RunContext.weights_before
    monkeypatch.setattr(
        RunContext,
        "weights_before",
        lambda self, version: (looked.append(version), real(self, version))[1],
    )
    assert broken_bounds(ctx, 4, found) == [] and looked == [4], "not measured: nothing to compare"
    looked.clear()
    assert broken_bounds(ctx, 3, found) == []
    assert looked == ([3, 0, 1, 2] if "falls_by" in bounds else [3])


def test_an_evaluation_counts_for_the_segment_that_replaced_the_weights(opened: Opened):
    ctx, _ = opened({"metric": "eval/held/accuracy", "falls_by": 0.1})
    commit(ctx, 0)
    measure(ctx, 1, 0.7)
    Segments(ctx.files).record("run", 1, 1, weights="t0", segment="made")
    commit(ctx, 1)
    measure(ctx, 2, 0.5)
    assert len(broken_bounds(ctx, 2, trained(ctx, loss=0.0))) == 1


def test_a_critic_warm_up_iteration_may_lack_metrics(opened: Opened):
    ctx, _ = opened({"metric": "train/grad_norm", "at_most": 10})
    batch = record(ctx, Stage.ADVANTAGE, seconds=1.0, critic_only=True)
    assert broken_bounds(ctx, 0, {**trained(ctx, value_loss=0.5), "advantage": batch}) == []


@flow
async def gated(
    k: int, nodes: dict[str, NodeRef], answer: Callable[[], Coroutine[Any, Any, None]] | None
) -> None:
    """Run the gates of one iteration; call `answer` once it is paused."""
    if answer is None:
        await gates("run", k, nodes)
        return
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(gates("run", k, nodes))
        async with get_client() as client:
            while not waiting.done():
                state = (await client.read_flow_run(UUID(flow_run.id))).state
                if state is not None and state.is_paused():
                    break
                await asyncio.sleep(0.1)
        await answer()


async def resume() -> None:
    async with get_client() as client:
        assert (await client.read_flow_run(UUID(flow_run.id))).labels[
            REASON_LABEL
        ] == "train/loss is 2, expected at most 1"
    await aresume_flow_run(UUID(flow_run.id))


async def cancel() -> None:
    async with get_client() as client:
        await client.set_flow_run_state(UUID(flow_run.id), Cancelled(), force=True)


@pytest.mark.integration
async def test_a_resumed_iteration_continues_and_does_not_pause_again(
    opened: Opened, prefect_server: str
):
    ctx, stream = opened({"metric": "train/loss", "at_most": 1})
    await gated(0, trained(ctx, loss=0.5), None)
    bad = trained(ctx, loss=2.0)
    await gated(1, bad, resume)
    assert "iteration 1 is paused: train/loss is 2, expected at most 1" in stream.getvalue()
    await gated(1, bad, None)
    assert ctx.files.list("gates/run") == [f"gates/run/00000001-{bad['train'].digest[:16]}.json"]


@pytest.mark.integration
async def test_a_pause_that_is_cancelled_or_times_out_fails_and_a_retry_pauses_again(
    opened: Opened, prefect_server: str
):
    ctx, _ = opened({"metric": "train/loss", "at_most": 1}, timeout_s=2)
    bad = trained(ctx, loss=2.0)
    for answer in (cancel, None):
        with pytest.raises((GateClosed, ExceptionGroup)) as caught:
            await gated(0, bad, answer)
        error = (
            caught.value.exceptions[0] if isinstance(caught.value, ExceptionGroup) else caught.value
        )
        assert (
            isinstance(error, GateClosed) and error.found == "train/loss is 2, expected at most 1"
        )
    assert ctx.files.list("gates/run") == []
