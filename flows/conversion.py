"""What is to be converted, a directory or a run's checkpoint out of its store, and the process that
does it.

Not here: the flow (`convert`), converting (`rlpipe.engines.megatron.checkpoint.conversion`).
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
from flows.evaluation import saved
from rlpipe.actors.trainer.checkpoints import fetch_checkpoint
from rlpipe.config.load import validate_stored
from rlpipe.errors import ConfigError, ObjectCorrupt, ObjectMissing, ResourceError, RlpipeError
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


@dataclass(frozen=True)
class Stored:
    """A run's checkpoint."""

    folder: Path
    """With its files."""
    model_dir: Path | None
    """The directory that the run started with, if it is still there."""
    node: str
    """Digest of its record."""


@contextmanager
def checkpoint_of(home: Path, of: str) -> Iterator[Stored]:
    """A run's checkpoint out of its store. `of`: "RUN@K", after iteration K, or "RUN", the newest
    saved.

    One in S3 is fetched, and gone afterwards. Raises: ConfigError if there is none; ObjectMissing,
    ObjectCorrupt, StoreFull.
    """
    run, _, k = of.partition("@")
    if not run or (k and not k.isdigit()):
        raise ConfigError(
            "not the name of a checkpoint", where="--of", found=of, expected="RUN or RUN@K"
        )
    files = Files(store_of(home, run))
    branches = Branches(files)
    if branches.find(run) is None:
        raise ConfigError(
            "there is no such run", where=f"--of {of}", found=f"no branch {run} in {files.root}"
        )
    start = saved(files, run, int(k) if k else None)
    node = _node(files, start.branch, start.iteration)
    origin = _model(branches.config(run), home)
    if files.root.startswith("file://"):
        yield Stored(_in_place(files, node), origin, node.digest)
        return
    with fetched(files, node, home / run) as folder:
        yield Stored(folder, origin, node.digest)


@contextmanager
def fetched(files: Files, node: Node, home: Path) -> Iterator[Path]:
    """A checkpoint's files in a folder of one conversion's own, which is gone afterwards.

    Raises: ObjectMissing, ObjectCorrupt, StoreFull.
    """
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix="conversion-", dir=home, ignore_cleanup_errors=True
    ) as folder:
        yield fetch_checkpoint(files, node, Path(folder))


def job_of(
    source: Path, destination: Path, origin: Path | None, settings: dict[str, Any]
) -> dict[str, Any]:
    """The conversion that turns one into the other. Raises: ConfigError if the source is neither
    kind."""
    if (source / "config.json").is_file():
        return {
            "to": "torch_dist",
            "hf_dir": str(source.absolute()),
            "save": str(destination.absolute()),
            **settings,
        }
    if not source.is_dir():
        raise ConfigError("there is no such directory", where="source", found=str(source))
    where = {"checkpoint": source, "output": destination, **({"origin": origin} if origin else {})}
    return {
        "to": "huggingface",
        **{name: str(path.absolute()) for name, path in where.items()},
        **settings,
    }


async def converted(
    job: dict[str, Any], tell: Callable[[dict[str, Any]], Awaitable[None]]
) -> dict[str, Any]:
    """Do it in a process of its own, which is killed when nobody waits any more; the report. `tell`
    hears how far it is.

    Raises: what the conversion raised; ResourceError if its process died.
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
        start_new_session=True,
        limit=LINE_BYTES,
    )
    try:
        assert process.stdout is not None
        async for line in process.stdout:
            said = json.loads(line) if line.startswith(b"{") else {}
            if "error" in said:
                raise getattr(rlpipe.errors, said["error"]["type"], RlpipeError)(
                    said["error"]["text"]
                )
            if "report" in said:
                return said["report"]
            if said:
                await tell(said)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
    raise ResourceError(
        "the converting process ended without a word",
        where="convert",
        found=f"exit code {process.returncode}",
    )


def _node(files: Files, branch: str, iteration: int | None) -> Node:
    assert iteration is not None
    commit = Branches(files).read(branch, iteration)
    weights = current_state(Segments(files), branch, iteration + 1, commit.nodes[Stage.TRAIN])
    return Nodes(files).get(Stage.CHECKPOINT, checkpoint_inputs(weights).digest)


def _in_place(files: Files, node: Node) -> Path:
    """The folder of a checkpoint in a store on this machine, every file of which is what was
    recorded."""
    paths = {record: Path(files.url(record.path).removeprefix("file://")) for record in node.files}
    for record, path in paths.items():
        if not path.is_file():
            raise ObjectMissing("a file of the checkpoint is gone", where=str(path))
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != record.sha256:
            raise ObjectCorrupt(
                "these are not the bytes that were written",
                where=str(path),
                found=f"sha256 {found}",
                expected=record.sha256,
            )
    return next(iter(paths.values())).parent


def _model(recorded: dict[str, Any], home: Path) -> Path | None:
    try:
        config = validate_stored(recorded)
        return Path(model_directory(config.model, home, seed=config.seed))
    except ConfigError:
        return None
