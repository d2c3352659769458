"""Before the first iteration: actors up, first weights known as weight version 0, the branch there
(or found to go on)."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from prefect import task
from prefect.artifacts import acreate_table_artifact
from prefect.cache_policies import NO_CACHE

from rlpipe.actors.trainer.checkpoints import prune
from rlpipe.config.load import validate_stored
from rlpipe.config.model import BranchModel
from rlpipe.config.run import RunConfig
from rlpipe.errors import ConfigError, ObjectMissing
from rlpipe.lineage.stage_inputs import (
    checkpoint_inputs,
    critic_schedule_length,
    init_inputs,
    schedule_length,
)
from rlpipe.observe.progress import Progress
from rlpipe.store.branches import Branches
from rlpipe.store.objects.files import Files
from rlpipe.store.segments import Segments, current_state
from rlpipe.store.signatures import SigningKey
from rlpipe.types import Commit, Stage
from tasks.context import RunContext, close_context, open_context
from tasks.fork import begin_fork, fork_point
from tasks.observe import artifact_key

OVERLONG_FILE = "overlong_prompts.jsonl"
"""In the run's folder: the rows that `data.overlong_prompts` drops or cuts."""
NAMED_ROWS, SHOWN_ROWS = 5, 100
"""Of each set in the terminal; of all in Prefect's pages."""


class _Absent:
    """Stands for a key that is not there, as opposed to one that is null."""

    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()


@task(name="begin", cache_policy=NO_CACHE)
async def begin(
    config: RunConfig, home: Path, progress: Progress, *, takeover: bool = False
) -> int:
    """Open the run and make sure its branch exists; the first iteration that is not committed yet.
    It is open unless this raises.

    Raises: ConfigError if the branch exists with another configuration, or a key to sign with
    cannot be read; Fenced if another process drives the run, unless `takeover`; whatever keeps an
    actor from coming up.
    """
    files = Files(config.store.root or home / "store")
    SigningKey.of_environment()
    check_same_run(Branches(files), config)
    origin = await fork_point(files, config, home, progress, takeover=takeover)
    progress.stage("start", note="Ray, engines, trainer, generator (about half a minute on CPUs)")
    it = await open_context(config, home, progress, takeover=takeover)
    try:
        if config.data.overlong_prompts != "error":
            await report_overlong(it, await it.cluster.generator.overlong())
        return await first_iteration(it, origin)
    except BaseException:
        await close_context(config.run, end_actors=False)
        raise


async def report_overlong(it: RunContext, found: dict[str, list[dict[str, Any]]]) -> None:
    """Name the rows that `data.overlong_prompts` drops or cuts.

    A line in the terminal has their number and the first few of each set, an artifact the first
    hundred, and `{home}/{run}/overlong_prompts.jsonl` all of them, one JSON object each.
    """
    did = {"drop": "dropped", "truncate_left": "cut to their last tokens"}[
        it.config.data.overlong_prompts
    ]
    rows = [{"prompts": key, **row} for key, of_set in found.items() for row in of_set]
    await asyncio.to_thread(_write_overlong, it.directory / OVERLONG_FILE, rows)
    if not rows:
        return
    for key, of_set in found.items():
        first = ", ".join(f"{row['where']} ({row['tokens']} tokens)" for row in of_set[:NAMED_ROWS])
        more = "" if len(of_set) <= NAMED_ROWS else f" and {len(of_set) - NAMED_ROWS} more"
        limit = f"longer than {of_set[0]['limit']} tokens ({of_set[0]['setting']})"
        it.progress.say(
            f"{it.config.run}: {key}: {len(of_set)} over-long prompts are {did}, {limit}: {first}{more}"
        )
    it.progress.say(f"{it.config.run}: all of them are in {it.directory / OVERLONG_FILE}")
    about = f"{len(rows)} over-long prompts of {it.config.run} are {did} (data.overlong_prompts)"
    await acreate_table_artifact(
        rows[:SHOWN_ROWS], key=artifact_key(it.config.run, "overlong"), description=about
    )


def _write_overlong(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write the list, or remove that of an earlier start if there is nothing to list."""
    if rows:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        path.unlink(missing_ok=True)


async def first_iteration(it: RunContext, origin: Commit | None = None) -> int:
    """The first iteration that is not committed, of a branch that is there now. `origin`: the
    commit that a new one is a fork of.

    Raises: ConfigError; as `first_weights`.
    """
    if origin is not None:
        begin_fork(it.files, it.config, origin, it.fingerprint)
    elif it.branches.find(it.config.run) is None:
        it.progress.stage("start", note="first weights")
        it.branches.create(
            it.config.run, it.config.model_dump(mode="json"), await first_weights(it)
        )
    check_same_model(it)
    newest = it.branches.newest(it.config.run)
    return newest.iteration + 1 if newest else 0


def check_same_run(branches: Branches, config: RunConfig) -> None:
    """A branch goes on only with the configuration it was started with. Raises: ConfigError naming
    each key that differs."""
    record = branches.find(config.run)
    if record is None:
        return
    stored = validate_stored(record.config)
    differing = sorted(_differing(_decisive(stored), _decisive(config)))
    if differing:
        newest = branches.newest(config.run)
        fork = (
            f"{config.run}@{newest.iteration}"
            if newest
            else f"{config.run}@K (once it has committed an iteration)"
        )
        raise ConfigError(
            "a run of this name exists with another configuration",
            where=f"run={config.run}",
            found="\n            ".join(differing),
            expected="the keys that decide results as they were when the run was started",
            do=f"undo these changes to go on with the run; go on from where it is as another one: --fork {fork} --run NEW; "
            "or start a new one: --run NEW",
        )


def check_same_model(it: RunContext) -> None:
    """The model directory is the one the branch began with. Raises: ConfigError."""
    recorded = it.nodes.get(Stage.INIT, it.init).config["model"]
    if recorded != it.fingerprint:
        raise ConfigError(
            "the model directory is another one than when the run was started",
            where="model.source",
            found=f"{it.model_dir} with contents {it.fingerprint[:16]}",
            expected=f"contents {recorded[:16]}",
            do="bring the model back, or give the new run another name: --run NAME",
        )


async def first_weights(it: RunContext) -> str:
    """Digest of the init node: weights of version 0, loaded once to say what they are. They are not
    stored: whoever needs them loads them again from the model directory, or the checkpoint they
    started from, and compares."""
    start = _start_from(it)
    inputs = init_inputs(it.config, it.fingerprint, start, it.contracts)
    if it.nodes.find(Stage.INIT, inputs.digest) is None:
        deadline_s = it.config.resources.start_timeout_s
        made = await it.cluster.trainer.initialise(inputs.digest, start, deadline_s=deadline_s)
        if it.config.num_rollout and not it.config.debug.debug_rollout_only:
            await it.cluster.trainer.call("require_room", deadline_s=deadline_s)
        it.nodes.commit(inputs.node(outputs={"version": 0, **made}))
        await asyncio.to_thread(
            prune, it.directory / "checkpoints", it.config.checkpoint.keep_local
        )
    return inputs.digest


def _start_from(it: RunContext) -> str | None:
    source = it.config.start_from
    return checkpoint_of(it, source) if source else None


def checkpoint_of(it: RunContext, source: BranchModel) -> str:
    """Digest of the checkpoint node at the end (or at `iteration`) of a branch. Raises:
    ObjectMissing."""
    newest = (
        it.branches.newest(source.branch)
        if source.iteration is None
        else it.branches.read(source.branch, source.iteration)
    )
    where = f"model.start_from.branch={source.branch}"
    if newest is None:
        raise ObjectMissing(
            "that branch has no iteration yet", where=where, do="finish that run first"
        )
    weights = current_state(
        Segments(it.files), source.branch, newest.iteration + 1, newest.nodes[Stage.TRAIN]
    )
    inputs = checkpoint_inputs(weights)
    if it.nodes.find(inputs.stage, inputs.digest) is None:
        raise ObjectMissing(
            "that branch has no checkpoint there",
            where=where,
            found=f"iteration {newest.iteration} without one",
            expected="an iteration whose weights were saved (checkpoint.save_interval)",
        )
    return inputs.digest


def _decisive(config: RunConfig) -> dict[str, Any]:
    """What decides results: the run's length is part of it only where the learning rate follows
    from it."""
    lengths = {
        "schedule": schedule_length(config),
        "critic's schedule": critic_schedule_length(config),
    }
    schedule = {
        f"optimizer steps of the {name}": length
        for name, length in lengths.items()
        if length is not None
    }
    ranks = {
        "trainer ranks": config.resources.trainer_ranks,
        "critic's own ranks": config.resources.critic_ranks,
    }
    return {**config.decisive(), **schedule, **ranks}


def _differing(stored: Any, given: Any, key: str = "") -> list[str]:
    if isinstance(stored, dict) and isinstance(given, dict):
        names = sorted(set(stored) | set(given))
        nested = (
            _differing(
                stored.get(name, ABSENT), given.get(name, ABSENT), f"{key}.{name}" if key else name
            )
            for name in names
        )
        return [line for lines in nested for line in lines]
    same = (
        list(stored) == list(given)
        if isinstance(stored, (list, tuple)) and isinstance(given, (list, tuple))
        else stored == given
    )
    return [] if same else [f"{key}: was {stored!r}, now {given!r}"]
