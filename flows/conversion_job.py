"""Resolve the source of a conversion, and run the conversion in a child process.

    with stored_checkpoint(home, "my_run@9") as checkpoint:
        report = await run_conversion(conversion_job(checkpoint.folder, ...), report_progress)

Imports no Prefect: a command line uses this module before a server starts.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rlpipe.errors
from flows.derived_runs import saved_weights
from rlpipe.actors.trainer.checkpoints import fetch_checkpoint
from rlpipe.config.load import validate_stored
from rlpipe.errors import ConfigError, ObjectCorrupt, ObjectMissing, ResourceError, RlpipeError
from rlpipe.lineage.named_runs import require_run
from rlpipe.lineage.stage_inputs import checkpoint_inputs
from rlpipe.model_dir import model_directory
from rlpipe.store.branches import Branches
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.store.run_file import store_of
from rlpipe.store.segments import Segments, current_state
from rlpipe.system.orphan import FLAG
from rlpipe.types import Node, Stage

LINE_BYTES = 2**20
"""Longest line that the child process may print."""


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint of a run."""

    folder: Path
    """Folder with the checkpoint files."""
    model_dir: Path | None
    """Model directory of the run's start, or None if it no longer exists."""
    node: str
    """Digest of the checkpoint node."""
    name: str
    """`RUN@K`: the run that saved it, and the iteration."""


@contextmanager
def stored_checkpoint(home: Path, of: str) -> Iterator[StoredCheckpoint]:
    """Open a run's checkpoint. `of`: "RUN@K", after iteration K, or "RUN", the newest saved.

    A checkpoint in S3 is downloaded, and deleted when the context ends.
    Raises: ConfigError if the checkpoint does not exist; ObjectMissing, ObjectCorrupt, StoreFull.
    """
    run, _, iteration = of.partition("@")
    if not run or (iteration and not iteration.isdigit()):
        raise ConfigError(
            "not the name of a checkpoint", where="--of", found=of, expected="RUN or RUN@K"
        )
    files = Files(store_of(home, run))
    config = require_run(files, run, where=f"--of {of}").config
    saved = saved_weights(files, run, int(iteration) if iteration else None)
    node = _checkpoint_node(files, saved.branch, saved.iteration)
    model_dir = _model_dir(config, home)
    name = f"{saved.branch}@{saved.iteration}"
    if files.root.startswith("file://"):
        yield StoredCheckpoint(_verified_folder(files, node), model_dir, node.digest, name)
        return
    with fetched_checkpoint(files, node, home / run) as folder:
        yield StoredCheckpoint(folder, model_dir, node.digest, name)


@contextmanager
def fetched_checkpoint(files: Files, node: Node, home: Path) -> Iterator[Path]:
    """Download checkpoint files into a temporary folder below `home`.

    Raises: ObjectMissing, ObjectCorrupt, StoreFull.
    """
    # Below the home, not in /tmp: a checkpoint may not fit there.
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix="conversion-", dir=home, ignore_cleanup_errors=True
    ) as folder:
        yield fetch_checkpoint(files, node, Path(folder))


def conversion_job(
    source: Path, destination: Path, origin: Path | None, settings: dict[str, Any]
) -> dict[str, Any]:
    """Return the settings of a conversion between Hugging Face and torch_dist.

    A source with config.json is a Hugging Face directory. Raises: ConfigError without a source.
    """
    if (source / "config.json").is_file():
        return {
            "to": "torch_dist",
            "hf_dir": str(source.absolute()),
            "save": str(destination.absolute()),
            **settings,
        }
    if not source.is_dir():
        raise ConfigError("the source directory does not exist", where="source", found=str(source))
    job = {
        "to": "huggingface",
        "checkpoint": str(source.absolute()),
        "output": str(destination.absolute()),
        **settings,
    }
    return {**job, "origin": str(origin.absolute())} if origin else job


async def run_conversion(
    job: dict[str, Any], report_progress: Callable[[dict[str, Any]], Awaitable[None]]
) -> dict[str, Any]:
    """Run a conversion in a child process and return its report. Cancelling kills the process.

    `report_progress` gets `{"what", "done", "total"}`, in bytes.
    Raises: the error of the conversion; ResourceError if the process died.
    """
    arguments = (
        "-m",
        "rlpipe.engines.megatron.checkpoint.conversion",
        FLAG,
        str(os.getpid()),
        json.dumps(job),
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        # Ctrl-C reaches this process only, which then kills the child.
        start_new_session=True,
        limit=LINE_BYTES,
    )
    try:
        assert process.stdout is not None
        async for line in process.stdout:
            # Libraries print other lines to the same pipe.
            message = json.loads(line) if line.startswith(b"{") else {}
            if "error" in message:
                error = getattr(rlpipe.errors, message["error"]["type"], RlpipeError)
                raise error(message["error"]["text"])
            if "report" in message:
                return message["report"]
            if message:
                await report_progress(message)
    finally:
        # The wait was cancelled or a message could not be read.
        if process.returncode is None:
            process.kill()
        await process.wait()
    raise ResourceError(
        "the conversion process ended without a report",
        where="convert",
        found=f"exit code {process.returncode}",
    )


def _checkpoint_node(files: Files, branch: str, iteration: int | None) -> Node:
    assert iteration is not None
    commit = Branches(files).read(branch, iteration)
    weights = current_state(Segments(files), branch, iteration + 1, commit.nodes[Stage.TRAIN])
    return Nodes(files).get(Stage.CHECKPOINT, checkpoint_inputs(weights).digest)


def _verified_folder(files: Files, node: Node) -> Path:
    """Check the sha256 of every file of a checkpoint in a local store; return the folder."""
    paths = {record: Path(files.url(record.path).removeprefix("file://")) for record in node.files}
    for record, path in paths.items():
        if not path.is_file():
            raise ObjectMissing("a file of the checkpoint is missing", where=str(path))
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if sha256 != record.sha256:
            raise ObjectCorrupt(
                "a file of the checkpoint has changed since it was written",
                where=str(path),
                found=f"sha256 {sha256}",
                expected=record.sha256,
            )
    return next(iter(paths.values())).parent


def _model_dir(stored: dict[str, Any], home: Path) -> Path | None:
    try:
        config = validate_stored(stored)
        return Path(model_directory(config.model, home, seed=config.seed))
    # The model was removed since the run. The checkpoint has its own configuration.
    except ConfigError:
        return None
