"""Begin a run: start actors, record the first weights as version 0, create or find the branch.

`start_run` opens the run, `begin` is the first task of its flow.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from prefect import get_run_logger, task
from prefect.artifacts import acreate_table_artifact
from prefect.cache_policies import NO_CACHE

from rlpipe.actors.trainer.checkpoints import prune
from rlpipe.batch.files import adapters_of
from rlpipe.config.hooks import hook_digest
from rlpipe.config.load import validate_stored
from rlpipe.config.model import BranchModel
from rlpipe.config.run import RunConfig
from rlpipe.errors import ConfigError, ObjectMissing
from rlpipe.lineage.continuation import changes_before_first_commit, check_same_run
from rlpipe.lineage.source_weights import (
    decisive_digests,
    prompts_record,
    source_record,
    weight_sources,
)
from rlpipe.lineage.stage_inputs import checkpoint_inputs, init_inputs
from rlpipe.observe.progress import Progress
from rlpipe.observe.terminal import duration, waiting_for
from rlpipe.store.branches import Branches
from rlpipe.store.objects.files import Files
from rlpipe.store.segments import Segments, current_state
from rlpipe.store.signatures import SigningKey
from rlpipe.types import Commit, Stage
from tasks.artifacts import artifact_key
from tasks.context import RunContext, context, open_context
from tasks.fork import begin_fork, fork_point

OVERLONG_FILE = "overlong_prompts.jsonl"
"""Name of the file, in the run's folder, of the rows that `data.overlong_prompts` drops or cuts."""
TERMINAL_ROWS, ARTIFACT_ROWS = 5, 100
"""Rows of the list: per set in the terminal, and in total in the artifact."""


async def start_run(
    config: RunConfig, home: Path, progress: Progress, *, takeover: bool = False
) -> Commit | None:
    """Open a run: start its actors. Return the commit that a new fork follows, else None.

    Not a task: its bar would be longer than those of many iterations in Prefect's graph of the run.
    The run is open afterwards, unless `start_run` raises.
    Raises: ConfigError if the branch exists with another configuration, or if the signing key
    cannot be read; Fenced if another process drives the run, unless `takeover`; errors of the
    starting actors.
    """
    files = Files(config.store.root or home / "store")
    # Read the key now: an unreadable key must not stop the first commit hours later.
    SigningKey.of_environment()
    check_same_run(Branches(files), config)
    log = get_run_logger()
    logs = home / config.run / "logs"
    log.info("starting Ray, trainer, engines and router; their logs are in %s", logs)
    started = time.perf_counter()
    # Before the actors start: rebuilding weights needs the GPUs that they would take.
    origin = await fork_point(files, config, home, progress, takeover=takeover)
    await open_context(config, home, progress, takeover=takeover)
    log.info("started in %s", duration(time.perf_counter() - started))
    return origin


@task(name="begin", cache_policy=NO_CACHE)
async def begin(run: str, origin: Commit | None) -> int:
    """Make sure that the branch of an open run exists; return the first uncommitted iteration.

    `origin`: the commit that a new fork follows. Raises: as `first_iteration`.
    """
    ctx = await context(run)
    if ctx.config.data.overlong_prompts != "error":
        await report_overlong(ctx, await ctx.cluster.generator.overlong())
    return await first_iteration(ctx, origin)


async def report_overlong(ctx: RunContext, overlong: dict[str, list[dict[str, Any]]]) -> None:
    """List the rows that `data.overlong_prompts` drops or cuts.

    The terminal shows the count and the first rows of each set, an artifact the first hundred rows,
    and `{home}/{run}/overlong_prompts.jsonl` all of them, one JSON object a line.
    """
    action = {"drop": "dropped", "truncate_left": "cut to their last tokens"}[
        ctx.config.data.overlong_prompts
    ]
    rows = [{"prompts": key, **row} for key, of_set in overlong.items() for row in of_set]
    await asyncio.to_thread(_write_overlong, ctx.directory / OVERLONG_FILE, rows)
    if not rows:
        return
    for key, of_set in overlong.items():
        first = ", ".join(
            f"{row['where']} ({row['tokens']} tokens)" for row in of_set[:TERMINAL_ROWS]
        )
        more = "" if len(of_set) <= TERMINAL_ROWS else f" and {len(of_set) - TERMINAL_ROWS} more"
        limit = f"longer than {of_set[0]['limit']} tokens ({of_set[0]['setting']})"
        ctx.progress.say(
            f"{ctx.config.run}: {key}: {len(of_set)} over-long prompts are {action}, "
            f"{limit}: {first}{more}"
        )
    ctx.progress.say(f"{ctx.config.run}: the full list is {ctx.directory / OVERLONG_FILE}")
    await acreate_table_artifact(
        rows[:ARTIFACT_ROWS],
        key=artifact_key(ctx.config.run, "overlong"),
        description=f"{len(rows)} over-long prompts of {ctx.config.run} are {action} "
        "(data.overlong_prompts)",
    )


def _write_overlong(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write the list, or remove the list of an earlier start if no row is affected."""
    if rows:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        path.unlink(missing_ok=True)


async def first_iteration(ctx: RunContext, origin: Commit | None = None) -> int:
    """Create the branch if it does not exist; return the first uncommitted iteration.

    `origin`: the commit that a new fork follows. Raises: ConfigError; as `first_weights`.
    """
    if origin is not None:
        begin_fork(ctx.files, ctx.config, origin, ctx.fingerprint)
    elif ctx.branches.find(ctx.config.run) is None:
        with waiting_for("first weights"):
            init = await first_weights(ctx)
        ctx.branches.create(ctx.config.run, ctx.config.model_dump(mode="json"), init)
    else:
        take_changes(ctx)
    check_same_model(ctx)
    check_frozen_weights(ctx)
    newest = ctx.branches.newest(ctx.config.run)
    if newest is None:
        return 0
    for path in changed_functions(ctx, newest):
        ctx.progress.say(
            f"{ctx.config.run}: {path} has changed since iteration {newest.iteration}; the next "
            "iterations use the new source"
        )
    return newest.iteration + 1


def take_changes(ctx: RunContext) -> None:
    """Store the changed settings of a run without a commit, such as those of its reward."""
    changes = changes_before_first_commit(ctx.branches, ctx.config)
    if not changes:
        return
    ctx.epoch.check()
    ctx.branches.replace_config(ctx.config.run, ctx.config.model_dump(mode="json"))
    for key, change in changes.items():
        ctx.progress.say(f"{ctx.config.run}: {key} has changed before the first commit: {change}")


def changed_functions(ctx: RunContext, commit: Commit) -> list[str]:
    """Return the paths of the run's user functions whose source an iteration had otherwise.

    A fork may use others than that iteration.
    """
    own = ctx.config.model_dump_json()
    nodes = [ctx.nodes.get(stage, digest) for stage, digest in commit.nodes.items()]
    recorded = {path: sha256 for node in nodes for path, sha256 in node.hooks.items()}
    changed = []
    for path, sha256 in sorted(recorded.items()):
        with suppress(ConfigError):  # a file that this start may not need any more
            is_own = json.dumps(path, ensure_ascii=False) in own
            changed += [path] if is_own and hook_digest(path) != sha256 else []
    return changed


def check_same_model(ctx: RunContext) -> None:
    """Refuse another model directory than the branch began with. Raises: ConfigError."""
    recorded = ctx.nodes.get(Stage.INIT, ctx.init).config["model"]
    if recorded != ctx.fingerprint:
        raise ConfigError(
            "the model directory has changed since the run was started",
            where="model.source",
            found=f"{ctx.model_dir} with contents {ctx.fingerprint[:16]}",
            expected=f"contents {recorded[:16]}",
            do="restore the model, or give the new run another name: --run NAME",
        )


def check_frozen_weights(ctx: RunContext) -> None:
    """Require the frozen weights that engines load, for pushes of adapters. Raises: ConfigError."""
    init = ctx.nodes.get(Stage.INIT, ctx.init)
    if ctx.config.sync.transport == "adapter" and "start_from" in init.parents:
        raise ConfigError(
            "engines have the weights of the model directory, and the frozen ones are others",
            where="sync.transport",
            found="adapter, in a run that began with a checkpoint of another run",
            expected="tensor, distributed, disk or delta",
            do="set sync.transport: tensor, or convert the checkpoint and start from its directory",
        )


async def first_weights(ctx: RunContext) -> str:
    """Load the weights of version 0 once, record their digest; return the digest of the init node.

    The weights are not stored. A later load reads the model directory, or the checkpoint and the
    adapters that the run started from, and compares digests.
    """
    start = await asyncio.to_thread(_start_nodes, ctx)
    sources = weight_sources(ctx.config)
    records = {
        role: await asyncio.to_thread(source_record, source, ctx.home)
        for role, source in sources.items()
    }
    records |= prompts_record(ctx.config, ctx.home)
    digests = decisive_digests(ctx.config, records)
    inputs = init_inputs(
        ctx.config,
        ctx.fingerprint,
        start.checkpoint,
        ctx.contracts,
        sources=digests,
        adapter=start.adapter,
    )
    if ctx.nodes.find(Stage.INIT, inputs.digest) is None:
        deadline_s = ctx.config.resources.start_timeout_s
        outputs = await ctx.cluster.trainer.initialise(
            inputs.digest, start.checkpoint, start.adapter, deadline_s=deadline_s
        )
        if ctx.config.num_rollout and not ctx.config.debug.debug_rollout_only:
            # Fail before the first rollout if the local disk has no room for a checkpoint.
            await ctx.cluster.trainer.call("require_room", deadline_s=deadline_s)
        recorded = {"sources": records} if records else {}
        ctx.nodes.commit(inputs.node(outputs={"version": 0, **outputs, **recorded}))
        await asyncio.to_thread(
            prune, ctx.directory / "checkpoints", ctx.config.checkpoint.keep_local
        )
    return inputs.digest


class StartNodes(NamedTuple):
    """Digests of nodes of another branch that have the first weights of a run."""

    checkpoint: str | None = None
    """A checkpoint; None: the model directory."""
    adapter: str | None = None
    """A train node with the adapters; None: those of the checkpoint, or first ones."""


def _start_nodes(ctx: RunContext) -> StartNodes:
    source = ctx.config.start_from
    if source is None:
        return StartNodes()
    scores = [
        config.train.loss.type == "reward_model"
        for config in (validate_stored(ctx.branches.config(source.branch)), ctx.config)
    ]
    if scores == [True, False]:
        raise ConfigError(
            "a policy cannot start from a reward model, which generates no text",
            where="model.start_from.branch",
            found=source.branch,
            expected="a run that trained a policy",
        )
    return stored_weights(ctx, source)


def stored_weights(ctx: RunContext, source: BranchModel) -> StartNodes:
    """Return the nodes with the weights of a commit: its checkpoint, else its adapters.

    Raises: ObjectMissing if neither is stored; ConfigError if the adapters are of another model or
    have other settings than `train.lora`.
    """
    commit = (
        ctx.branches.newest(source.branch)
        if source.iteration is None
        else ctx.branches.read(source.branch, source.iteration)
    )
    where = f"model.start_from.branch={source.branch}"
    if commit is None:
        raise ObjectMissing(
            "the run has no finished iteration yet",
            where=where,
            do="let that run finish its first iteration",
        )
    weights = current_state(
        Segments(ctx.files), source.branch, commit.iteration + 1, commit.nodes[Stage.TRAIN]
    )
    inputs = checkpoint_inputs(weights)
    if ctx.nodes.find(inputs.stage, inputs.digest) is not None:
        return StartNodes(inputs.digest)
    if ctx.config.train.lora is not None and adapters_of(ctx.nodes, weights) is not None:
        return _adapted_weights(ctx, source, weights)
    raise ObjectMissing(
        "the run has no saved weights of this iteration",
        where=where,
        found=f"no checkpoint after iteration {commit.iteration}",
        expected="an iteration whose weights were saved (checkpoint.save_interval)",
    )


def _adapted_weights(ctx: RunContext, source: BranchModel, weights: str) -> StartNodes:
    """Return the nodes with weights that have adapters in the store and no checkpoint.

    The frozen weights are the first ones of the branch. Raises: ConfigError.
    """
    branch = ctx.branches.get(source.branch)
    init = ctx.nodes.get(Stage.INIT, branch.init)
    stored = validate_stored(branch.config).train.lora
    if stored != ctx.config.train.lora:
        raise ConfigError(
            "the weights have other adapters than the policy",
            where=f"train.lora, model.start_from.branch={source.branch}",
            found=stored,
            expected=ctx.config.train.lora,
            do="keep train.lora, or start from an iteration with a checkpoint",
        )
    checkpoint = init.parents.get("start_from")
    if checkpoint is None and init.config["model"] != ctx.fingerprint:
        raise ConfigError(
            "adapters need the model directory on which they were trained",
            where="model.source",
            found=f"{ctx.model_dir} with contents {ctx.fingerprint[:16]}",
            expected=f"contents {init.config['model'][:16]}, as at the start of {source.branch}",
            do="name the same model directory, or start from an iteration with a checkpoint",
        )
    return StartNodes(checkpoint, weights)
