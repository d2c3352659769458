"""Begin a fork: a run that starts from a commit of another run.

    fork_from: {branch: OLD, iteration: K}
    rlpipe train --recipe ... --fork OLD@K --run NEW

The fork takes weights, optimizer state, random state and data cursor of the commit. The history up
to K is shared. The fork's first own iteration is K + 1, under its own configuration; the old branch
stays as it is. The weights must be a checkpoint in the store. Without one, a separate trainer
replays batches from the checkpoint before, under the old run's configuration, and ends before the
actors of the new run start. For new weights under a fresh optimizer see `model.start_from`.
"""

from __future__ import annotations

from pathlib import Path

from rlpipe.actors.trainer.standalone import standalone_trainer
from rlpipe.actors.trainer.states import TrainerStates
from rlpipe.config.load import validate_stored
from rlpipe.config.paths import with_moved_paths
from rlpipe.config.run import RunConfig
from rlpipe.errors import ConfigError, ObjectMissing
from rlpipe.lineage.source_weights import source_record, weight_sources
from rlpipe.lineage.stage_inputs import checkpoint_inputs
from rlpipe.observe.progress import Progress
from rlpipe.store.branches import Branches, commit_name
from rlpipe.store.epochs import Epochs
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.store.segments import Segments, current_state
from rlpipe.types import Commit, Stage
from tasks.context import packages

NO_EPOCH = 0
"""Epoch of records that are written before the new branch has a driver."""


async def fork_point(
    files: Files, config: RunConfig, home: Path, progress: Progress, *, takeover: bool = False
) -> Commit | None:
    """Return the commit that a new fork follows, after making sure of a checkpoint of its weights.

    None if the run is no fork, or if its branch exists. Raises: ConfigError, ObjectMissing; Fenced
    if another process begins the fork, unless `takeover`; Mismatch if a rebuild in deterministic
    mode gives other bits; errors of the trainer.
    """
    if config.fork_from is None or Branches(files).find(config.run) is not None:
        return None
    origin = fork_commit(Branches(files), config)
    check_state_format(files, config, origin)
    check_first_adapters(files, config, origin, home)
    # Two processes must not rebuild the same weights.
    epoch = Epochs(files).acquire(config.run, takeover=takeover)
    epoch.keep()
    try:
        recorded = origin.nodes[Stage.TRAIN]
        version = origin.iteration + 1
        state = first_state(files, config, origin)
        if Nodes(files).find(Stage.CHECKPOINT, checkpoint_inputs(state).digest) is None:
            name = commit_name(origin.branch, origin.iteration)
            progress.say(
                f"{config.run}: rebuilding the weights of {name}, of which no checkpoint is stored"
            )
            work = "the trainer, which trains the batches since the checkpoint before again"
            with progress.running("fork", note=f"weights of {name}", waits_for=work):
                await materialise(files, config, origin, state, home)
        # The first weights are a segment of the parent: the fork records it as its own.
        elif state != recorded:
            Segments(files).record(config.run, version, NO_EPOCH, weights=recorded, segment=state)
    finally:
        epoch.release()
    return origin


def first_state(files: Files, config: RunConfig, origin: Commit) -> str:
    """Return the digest of the state that a fork begins with: the parent's, or a segment's."""
    segments = Segments(files)
    version = origin.iteration + 1
    parents = current_state(segments, origin.branch, version, origin.nodes[Stage.TRAIN])
    return current_state(segments, config.run, version, parents)


def fork_commit(branches: Branches, config: RunConfig) -> Commit:
    """Return the commit that `fork_from` names. Raises: ConfigError if it does not exist."""
    source = config.fork_from
    assert source is not None
    if branches.find(source.branch) is None:
        raise ConfigError(
            "the parent of the fork does not exist",
            where="fork_from.branch",
            found=source.branch,
            expected=f"one of {', '.join(branches.names()) or '(the store has no run)'}",
        )
    newest = branches.newest(source.branch)
    if newest is None or (
        source.iteration is not None and not 0 <= source.iteration <= newest.iteration
    ):
        raise ConfigError(
            "the run has not committed this iteration",
            where="fork_from.iteration",
            found="no commit" if source.iteration is None else source.iteration,
            expected=f"0 to {newest.iteration}" if newest else "a run with a committed iteration",
        )
    while source.iteration is not None and newest.iteration > source.iteration:
        before = branches.before(newest.branch, newest.iteration)
        assert before is not None
        newest = before
    return newest


def check_state_format(files: Files, config: RunConfig, origin: Commit) -> None:
    """Check that the fork can load its parent's state.

    Raises: ConfigError naming the key that must be equal.
    """
    stored = validate_stored(Branches(files).config(origin.branch))
    types = [one.train.loss.type for one in (config, stored)]
    if types[0] != types[1] and "reward_model" in types:
        raise ConfigError(
            "a fork of a policy cannot train a reward model, nor the reverse",
            where="train.loss.type",
            found=types[0],
            expected=f"{types[1]}, the value of {origin.branch}",
            do="restore this key; a new run takes a policy's weights by model.start_from",
        )
    for key, parent_value, value in (
        ("model.dtype", stored.model.dtype, config.model.dtype),
        (
            "train.use_distributed_optimizer",
            stored.train.use_distributed_optimizer,
            config.train.use_distributed_optimizer,
        ),
    ):
        if parent_value != value:
            raise ConfigError(
                "a fork must have its parent's format of optimizer state",
                where=key,
                found=value,
                expected=f"{parent_value}, the value of {origin.branch}",
                do="restore this key, or use only the weights: model.start_from",
            )
    check_reference(config, stored, origin)


def check_first_adapters(files: Files, config: RunConfig, origin: Commit, home: Path) -> None:
    """Check that a fork has the first adapters of its parent, which are the first reference.

    Raises: ConfigError.
    """
    init = Nodes(files).get(Stage.INIT, Branches(files).get(origin.branch).init)
    parents = init.outputs.get("sources", {}).get("adapter")
    source = weight_sources(config).get("adapter")
    own = source and source_record(source, home)
    if (own and own["sha256"]) != (parents and parents["sha256"]):
        raise ConfigError(
            "a fork keeps the first adapters of its parent",
            where="model.adapter",
            found=f"{own['path']} with contents {own['sha256'][:16]}" if own else "none",
            expected=f"{parents['path']} with contents {parents['sha256'][:16]}"
            if parents
            else "none",
            do="restore the directory and its key, or use only the weights: model.start_from",
        )


def check_reference(config: RunConfig, stored: RunConfig, origin: Commit) -> None:
    """Check that the parent saved the reference that the fork needs. Raises: ConfigError."""
    if (config.reference.ref_load, config.reference.ref_ckpt_step) != (
        stored.reference.ref_load,
        stored.reference.ref_ckpt_step,
    ):
        raise ConfigError(
            "a fork keeps the reference of its parent",
            where="reference.ref_load",
            found=config.reference.ref_load,
            expected=stored.reference.ref_load or "none",
            do="restore the keys of the reference, or use only the weights: model.start_from",
        )
    interval = config.ref_update_interval
    parent_interval = stored.ref_update_interval
    version = origin.iteration + 1
    offset = config.ref_update_offset
    same = (interval, offset) == (parent_interval, stored.ref_update_offset)
    if interval is None or same:
        return
    # The reference at the fork is that of the newest refresh. The parent kept that version only if
    # it is the forked version itself (or the first weights).
    refreshed = (version + offset) // interval * interval - offset
    if refreshed > 0 and refreshed != version:
        raise ConfigError(
            "the parent did not save the weights that the fork needs as reference",
            where="reference.ref_update_interval",
            found=f"{interval}: the reference would be weight version "
            f"{refreshed} at a fork from version {version}",
            expected=f"{parent_interval}, the value of {origin.branch}, or a divisor of "
            f"{config.start_rollout_id + version}",
            do="change it, fork from another commit, or use only the weights: model.start_from",
        )


async def materialise(
    files: Files, config: RunConfig, origin: Commit, state: str, home: Path
) -> str:
    """Replay batches under the parent's configuration; return the digest of the saved state.

    The digest differs from `state` if the replay gave other bits. The fork then begins with a
    segment.
    """
    record = Branches(files).get(origin.branch)
    version = origin.iteration + 1
    stored = with_moved_paths(validate_stored(record.config), config)
    # The parent's layout on the fork's cluster.
    resources = stored.resources.model_copy(update={"ray_address": config.resources.ray_address})
    stored = stored.model_copy(update={"resources": resources})
    name = f"{config.cluster}-fork"
    async with standalone_trainer(stored, files, home=home, name=name) as trainer:
        trainer_states = TrainerStates(
            trainer=trainer,
            files=files,
            branch=config.run,
            init=record.init,
            deterministic=stored.deterministic,
            train_timeout_s=stored.train.timeout_s,
            checkpoint_timeout_s=stored.checkpoint.timeout_s,
            packages=packages(),
            ref_update_interval=stored.ref_update_interval,
            ref_update_offset=stored.ref_update_offset,
        )
        held = await trainer_states.restore(state, version=version, epoch=NO_EPOCH)
        if held == state:
            await trainer_states.save(checkpoint_inputs(state), state, version)
    return held


def begin_fork(files: Files, config: RunConfig, origin: Commit, fingerprint: str) -> None:
    """Create the branch of a fork. From now on garbage collection keeps its checkpoint.

    Raises: ConfigError if the model directory is not the parent's; ObjectMissing if the checkpoint
    was removed meanwhile; ObjectConflict.
    """
    branches = Branches(files)
    nodes = Nodes(files)
    init = branches.get(origin.branch).init
    if nodes.get(Stage.INIT, init).config["model"] != fingerprint:
        raise ConfigError(
            "a fork needs the model directory of its parent",
            where="model.source",
            found=f"contents {fingerprint[:16]}",
            expected=f"the contents at the start of {origin.branch}",
            do="name the same model directory, or use only the weights: model.start_from",
        )
    parent = commit_name(origin.branch, origin.iteration)
    state = first_state(files, config, origin)
    if nodes.find(Stage.CHECKPOINT, checkpoint_inputs(state).digest) is None:
        raise ObjectMissing(
            "the checkpoint of the fork's first weights was removed meanwhile",
            where=parent,
            found=f"no checkpoint of {state}",
            do="start the fork again: it rebuilds the checkpoint",
        )
    branches.create(config.run, config.model_dump(mode="json"), init, parent)
