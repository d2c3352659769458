"""The root of a store: which directories and URLs can be one, and the one spelling of each.

Not here: opening it (`rlpipe.store.objects.files`), or whether it can be written to
(`rlpipe.preflight`).
"""

from __future__ import annotations

from pathlib import Path

EXPECTED = "a directory, file:///directory or s3://bucket/prefix"


def canonical_root(root: str) -> str:
    """`file:///directory` or `s3://bucket/prefix`. Raises: ValueError for a root that cannot be
    one."""
    protocol, separator, rest = root.partition("://")
    if not separator and root.strip():
        return f"file://{_directory(root).resolve()}"
    if protocol == "file" and rest.startswith("/"):
        return f"file://{Path(rest).resolve()}"
    if protocol == "s3" and rest.strip("/"):
        return f"s3://{rest.strip('/')}"
    raise ValueError(f"not a root the store can live under; found {root!r}, expected {EXPECTED}")


def _directory(root: str) -> Path:
    try:
        return Path(root).expanduser()
    except RuntimeError as error:  # `~somebody` who has no account here
        raise ValueError(
            f"not a root the store can live under; found {root!r}: {error}, expected {EXPECTED}"
        ) from error
