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
from flows.derived_runs import has_checkpoint, saved_weights, weights_after
from rlpipe.actors.trainer.checkpoints import fetch_checkpoint
from rlpipe.batch.files import adapters_of
from rlpipe.config.load import validate_stored
from rlpipe.errors import ConfigError, ObjectCorrupt, ObjectMissing, ResourceError, RlpipeError
from rlpipe.lineage.named_runs import require_run
from rlpipe.lineage.source_weights import FINGERPRINTS
from rlpipe.lineage.stage_inputs import checkpoint_inputs
from rlpipe.model_dir import model_directory, model_fingerprint
from rlpipe.store.branches import Branches
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.store.run_file import store_of
from rlpipe.system.orphan import FLAG
from rlpipe.types import Node, Stage

LINE_BYTES = 2**20
"""Longest line that the child process may print."""


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint of a run, or its adapters of an iteration without a checkpoint."""

    folder: Path
    """Folder with the checkpoint files, or the file of adapters."""
    model_dir: Path | None
    """Model directory of the run's start, or None if it no longer exists."""
    node: str
    """Digest of the checkpoint node, or of the train node that has the adapters."""
    name: str
    """`RUN@K`: the run that saved it, and the iteration."""
    base: Path | None = None
    """Directory with the frozen weights of a file of adapters, if there is one."""


@contextmanager
def stored_checkpoint(home: Path, of: str, *, adapters: bool = False) -> Iterator[StoredCheckpoint]:
    """Open a run's checkpoint. `of`: "RUN@K", after iteration K, or "RUN", the newest saved.

    `adapters`: the adapters alone are enough, and need no checkpoint. A checkpoint in S3 is
    downloaded, and deleted when the context ends.
    Raises: ConfigError if the checkpoint does not exist; ObjectMissing, ObjectCorrupt, StoreFull.
    """
    run, _, iteration = of.partition("@")
    if not run or (iteration and not iteration.isdigit()):
        raise ConfigError(
            "not the name of a checkpoint", where="--of", found=of, expected="RUN or RUN@K"
        )
    files = Files(store_of(home, run))
    config = require_run(files, run, where=f"--of {of}").config
    chosen = int(iteration) if iteration else None
    saved = saved_weights(files, run, chosen, adapters=adapters)
    model_dir = _model_dir(config, home)
    name = f"{saved.branch}@{saved.iteration}"
    assert saved.iteration is not None
    weights = weights_after(files, Branches(files).read(saved.branch, saved.iteration))
    if not has_checkpoint(files, weights):
        record = adapters_of(Nodes(files), weights)
        assert record is not None
        base = _base(files, saved.branch, model_dir, home)
        with _temporary_folder(home / run) as folder:
            path = folder / "adapters.safetensors"
            files.get_file(record.path, path, record.sha256)
            yield StoredCheckpoint(path, model_dir, weights, name, base)
        return
    node = Nodes(files).get(Stage.CHECKPOINT, checkpoint_inputs(weights).digest)
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
    with _temporary_folder(home) as folder:
        yield fetch_checkpoint(files, node, folder)


@contextmanager
def _temporary_folder(home: Path) -> Iterator[Path]:
    # Below the home, not in /tmp: a checkpoint may not fit there.
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix="conversion-", dir=home, ignore_cleanup_errors=True
    ) as folder:
        yield Path(folder)


def conversion_job(
    source: Path,
    destination: Path,
    origin: Path | None,
    settings: dict[str, Any],
    *,
    adapter: bool = False,
) -> dict[str, Any]:
    """Return the settings of a conversion between Hugging Face and torch_dist.

    A source with config.json is a Hugging Face directory. `adapter`: the adapters alone of another
    source, which may be a file of adapters. Raises: ConfigError without a source.
    """
    if (source / "config.json").is_file():
        if adapter:
            raise ConfigError(
                "a Hugging Face directory has no adapters to write",
                where="adapter",
                found=str(source),
                expected="the checkpoint of a run with train.lora, or `of`",
            )
        return {
            "to": "torch_dist",
            "hf_dir": str(source.absolute()),
            "save": str(destination.absolute()),
            **settings,
        }
    if not (source.is_dir() or (adapter and source.is_file())):
        raise ConfigError("the source directory does not exist", where="source", found=str(source))
    job = {
        "to": "peft" if adapter else "huggingface",
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


def _base(files: Files, branch: str, model_dir: Path | None, home: Path) -> Path | None:
    """Return the model directory if it has the frozen weights of a branch's adapters."""
    init = Nodes(files).get(Stage.INIT, Branches(files).get(branch).init)
    if model_dir is None or "start_from" in init.parents:
        return None
    contents = model_fingerprint(str(model_dir), home / FINGERPRINTS)
    return model_dir if contents == init.config["model"] else None


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
