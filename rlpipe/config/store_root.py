"""Normalize the root of a store to one spelling.

`rlpipe.store.objects.files` opens the store; `rlpipe.preflight` checks that it is writable.
"""

from __future__ import annotations

from pathlib import Path

EXPECTED = "a directory, file:///directory or s3://bucket/prefix"


def canonical_root(root: str) -> str:
    """Return `file:///directory` or `s3://bucket/prefix`. Raises: ValueError for another URL."""
    protocol, separator, rest = root.partition("://")
    if not separator and root.strip():
        try:
            directory = Path(root).expanduser()
        except RuntimeError as error:  # `~name` without such an account
            raise ValueError(
                f"not a possible root of a store; found {root!r}: {error}, expected {EXPECTED}"
            ) from error
        return f"file://{directory.resolve()}"
    if protocol == "file" and rest.startswith("/"):
        return f"file://{Path(rest).resolve()}"
    if protocol == "s3" and rest.strip("/"):
        return f"s3://{rest.strip('/')}"
    raise ValueError(f"not a possible root of a store; found {root!r}, expected {EXPECTED}")
