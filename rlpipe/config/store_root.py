"""Normalize the root of a store to one spelling.

`rlpipe.store.objects.files` opens the store; `rlpipe.preflight` checks that it is writable.
"""

from __future__ import annotations

from pathlib import Path

from rlpipe.errors import ConfigError

EXPECTED = "a directory, file:///directory or s3://bucket/prefix"


def canonical_root(root: str) -> str:
    """Return `file:///directory` or `s3://bucket/prefix`. Raises: ConfigError for another URL."""
    protocol, separator, rest = root.partition("://")
    if not separator and root.strip():
        try:
            directory = Path(root).expanduser()
        except RuntimeError as error:  # `~name` without such an account
            raise _refusal(f"{root}: {error}") from error
        return f"file://{directory.resolve()}"
    if protocol == "file" and rest.startswith("/"):
        return f"file://{Path(rest).resolve()}"
    if protocol == "s3" and rest.strip("/"):
        return f"s3://{rest.strip('/')}"
    raise _refusal(root)


def _refusal(found: str) -> ConfigError:
    return ConfigError("not a root for a store", where="store.root", found=found, expected=EXPECTED)
