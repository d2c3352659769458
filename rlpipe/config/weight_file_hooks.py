"""Call user functions around weight files (`sync.transport: disk` or `delta`), as in slime.

    sync.custom_update_weight_post_write_path
        (args, version_dir, rollout_engines) -> None
        after a process has written files of a version: every trainer rank, then the conductor,
        which writes the record of the version
    sync.custom_pull_weights_pre_read_path
        (source_dir, target_version) -> None
        on each engine's machine, before files are copied to it

They serve shared directories that show a file on another machine only after a command, such as the
commit of a volume, or its reload. `args` has slime's names. `version_dir` is the folder of the
version, and `source_dir` its parent; an object store has URLs. `rollout_engines` are the URLs of
the engines; slime has Ray actors. A repeated push or the restart of an engine repeats the calls.
An exception fails the push, like the write or the copy itself.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

from rlpipe.config.hooks import error_with_line, load_positional
from rlpipe.config.train import SyncConfig
from rlpipe.errors import SyncError

POST_WRITE = "custom_update_weight_post_write_path"
PRE_READ = "custom_pull_weights_pre_read_path"
PARAMETERS: dict[str, tuple[str, ...]] = {
    POST_WRITE: ("args", "version_dir", "rollout_engines"),
    PRE_READ: ("source_dir", "target_version"),
}
"""Key of `sync` → positional parameters of the hook."""


def check_weight_file_hooks(sync: SyncConfig) -> None:
    """Load both functions. Raises: ConfigError if one is missing or has other parameters."""
    for key in PARAMETERS:
        if path := getattr(sync, key):
            _load(key, path)


def post_write(
    sync: SyncConfig, args: Namespace | None, version_dir: str, engines: Sequence[str]
) -> None:
    """Call the function after files were written, if the run has one. Raises: SyncError."""
    path = sync.custom_update_weight_post_write_path
    if path is not None:
        _call(POST_WRITE, path, args, version_dir, list(engines))


def pre_read(path: str | None, source_dir: str, target_version: int) -> None:
    """Call the function before files are read, if there is one. Raises: SyncError."""
    if path is not None:
        _call(PRE_READ, path, source_dir, target_version)


def _call(key: str, path: str, *arguments: Any) -> None:
    hook = _load(key, path)
    try:
        hook(*arguments)
    except Exception as error:  # a hook can raise anything; the push fails with it
        raise SyncError(
            "the function for weight files raised an exception",
            where=f"sync.{key}: {path}",
            found=error_with_line(error),
        ) from error


def _load(key: str, path: str) -> Callable[..., Any]:
    return load_positional(path, PARAMETERS[key], f"sync.{key}")
