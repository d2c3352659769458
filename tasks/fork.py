"""Starting a run from another run's commit: its weights, optimizer state, random numbers, and place
in the data.

    fork_from: {branch: OLD, iteration: K}       or  python -m tools.train --recipe … --fork OLD@K --run NEW

The history up to K is shared; the new branch's first own iteration is K + 1, under its own
configuration, and the old branch stays as it is. The weights have to be in the store as a
checkpoint. Where there is none they are trained again from the one before, under the old run's
configuration, in a trainer of its own that is gone before the new run's actors come up.

Not here: new weights under a fresh optimizer (`model.start_from`, `warm_start`).
"""

from __future__ import annotations

from pathlib import Path

from rlpipe.actors.trainer.alone import lone_trainer
from rlpipe.actors.trainer.states import StateKeeper
from rlpipe.config.load import validate_stored
from rlpipe.config.run import RunConfig
from rlpipe.errors import ConfigError, ObjectMissing
from rlpipe.lineage.stage_inputs import checkpoint_inputs
from rlpipe.observe.progress import Progress
from rlpipe.store.branches import Branches, commit_name
from rlpipe.store.epochs import Epochs
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.store.segments import Segments, current_state
from rlpipe.types import Commit, Stage
from tasks.context import packages

BEFORE_ALL_EPOCHS = 0
"""The epoch of what is written before the new branch has a driver."""


async def fork_point(
    files: Files, config: RunConfig, home: Path, progress: Progress, *, takeover: bool = False
) -> Commit | None:
    """The commit that a new fork begins after, with its weights in the store as a checkpoint.

    None if the run is no fork, or its branch is there already. Raises: ConfigError, ObjectMissing;
    Fenced if another process does it, unless `takeover`; Mismatch if the weights cannot be had
    again in deterministic mode; whatever keeps a trainer from rebuilding them.
    """
    if config.fork_from is None or Branches(files).find(config.run) is not None:
        return None
    origin = origin_of(Branches(files), config)
    check_fits(files, config, origin)
    epoch = Epochs(files).acquire(config.run, takeover=takeover)
    epoch.keep()
    try:
        recorded = origin.nodes[Stage.TRAIN]
        version = origin.iteration + 1
        state = first_state(files, config, origin)
        if Nodes(files).find(Stage.CHECKPOINT, checkpoint_inputs(state).digest) is None:
            name = commit_name(origin.branch, origin.iteration)
            progress.stage("fork", note=f"rebuilding the weights of {name} from the store")
            await materialise(files, config, origin, state, home)
        elif state != recorded:
            Segments(files).record(
                config.run, version, BEFORE_ALL_EPOCHS, weights=recorded, segment=state
            )
    finally:
        epoch.release()
    return origin


def first_state(files: Files, config: RunConfig, origin: Commit) -> str:
    """Digest of the node whose state a fork begins with: what its parent recorded, or a segment of
    either in its place."""
    segments = Segments(files)
    version = origin.iteration + 1
    parents = current_state(segments, origin.branch, version, origin.nodes[Stage.TRAIN])
    return current_state(segments, config.run, version, parents)


def origin_of(branches: Branches, config: RunConfig) -> Commit:
    """The commit that `fork_from` names. Raises: ConfigError if there is no such run or commit."""
    source = config.fork_from
    assert source is not None
    if branches.find(source.branch) is None:
        raise ConfigError(
            "there is no run to fork",
            where="fork_from.branch",
            found=source.branch,
            expected=f"one of {', '.join(branches.names()) or 'the runs of this store, which has none'}",
        )
    newest = branches.newest(source.branch)
    if newest is None or (
        source.iteration is not None and not 0 <= source.iteration <= newest.iteration
    ):
        raise ConfigError(
            "that run has not committed this iteration",
            where="fork_from.iteration",
            found="the newest" if source.iteration is None else source.iteration,
            expected=f"0 to {newest.iteration}" if newest else "a run with a committed iteration",
        )
    while source.iteration is not None and newest.iteration > source.iteration:
        before = branches.before(newest.branch, newest.iteration)
        assert before is not None
        newest = before
    return newest


def check_fits(files: Files, config: RunConfig, origin: Commit) -> None:
    """Can the fork load the parent's state? Raises: ConfigError naming the key that it must share
    with the parent."""
    stored = validate_stored(Branches(files).config(origin.branch))
    for key, theirs, ours in (
        ("model.dtype", stored.model.dtype, config.model.dtype),
        (
            "train.use_distributed_optimizer",
            stored.train.use_distributed_optimizer,
            config.train.use_distributed_optimizer,
        ),
    ):
        if theirs != ours:
            raise ConfigError(
                "a fork goes on with its parent's optimizer state, which has another form",
                where=key,
                found=ours,
                expected=f"{theirs}, as {origin.branch} was started with",
                do="leave this key as it is, or take only the weights: model.start_from",
            )
    check_reference(config, stored, origin)


def check_reference(config: RunConfig, stored: RunConfig, origin: Commit) -> None:
    """Is the reference that the fork goes on with one of its parent's? Raises: ConfigError."""
    ours = config.ref_update_interval
    theirs = stored.ref_update_interval
    version = origin.iteration + 1
    if ours is not None and ours != theirs and version >= ours and version % ours:
        raise ConfigError(
            "a fork goes on with its parent's reference, and weights that the parent never kept would have to be it",
            where="reference.ref_update_interval",
            found=f"{ours}: weight version {version // ours * ours} at a fork from version {version}",
            expected=f"{theirs}, as {origin.branch} was started with, or a divisor of {version}",
            do="change it, fork from another commit, or take only the weights: model.start_from",
        )


async def materialise(
    files: Files, config: RunConfig, origin: Commit, state: str, home: Path
) -> str:
    """Put a checkpoint of a commit's weights into the store, trained again under its own
    configuration; the state's digest.

    It is another one than `state` if the batches trained again gave another result: a segment,
    which the fork begins with.
    """
    record = Branches(files).get(origin.branch)
    version = origin.iteration + 1
    stored = validate_stored(record.config)
    placed = stored.resources.model_copy(update={"ray_address": config.resources.ray_address})
    stored = stored.model_copy(update={"resources": placed})
    async with lone_trainer(stored, files, home=home, name=f"{config.cluster}-fork") as trainer:
        keeper = StateKeeper(
            trainer=trainer,
            files=files,
            branch=config.run,
            init=record.init,
            deterministic=stored.deterministic,
            train_timeout_s=stored.train.timeout_s,
            checkpoint_timeout_s=stored.checkpoint.timeout_s,
            packages=packages(),
            ref_update_interval=stored.ref_update_interval,
        )
        held = await keeper.hold(state, version=version, epoch=BEFORE_ALL_EPOCHS)
        if held == state:
            await keeper.save(checkpoint_inputs(state), state, version)
    return held


def begin_fork(files: Files, config: RunConfig, origin: Commit, fingerprint: str) -> None:
    """Make the branch of a fork; its driver holds it by now, so that the checkpoint it begins with
    stays from here on.

    Raises: ConfigError if its model directory is not its parent's; ObjectMissing if that checkpoint
    was removed meanwhile; ObjectConflict.
    """
    branches = Branches(files)
    nodes = Nodes(files)
    init = branches.get(origin.branch).init
    if nodes.get(Stage.INIT, init).config["model"] != fingerprint:
        raise ConfigError(
            "a fork has its parent's model",
            where="model.source",
            found=f"contents {fingerprint[:16]}",
            expected=f"the contents that {origin.branch} was started with",
            do="name the same model directory, or take only the weights: model.start_from",
        )
    parent = commit_name(origin.branch, origin.iteration)
    state = first_state(files, config, origin)
    if nodes.find(Stage.CHECKPOINT, checkpoint_inputs(state).digest) is None:
        do = "start the fork again: it makes it anew"
        raise ObjectMissing(
            "the checkpoint of a fork's first weights was removed meanwhile",
            where=parent,
            found=state,
            do=do,
        )
    branches.create(config.run, config.model_dump(mode="json"), init, parent)
