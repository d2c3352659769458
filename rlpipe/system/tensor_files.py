"""Write safetensors files that other users and programs can read."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write contiguous tensors to one file, with the readers of its folder."""
    # An engine's actor, which has no tensors, uses the other function without torch.
    from safetensors.torch import save_file

    save_file(dict(tensors), path, metadata={"format": "pt"})
    share_with_folder(path)


def share_with_folder(path: Path) -> None:
    """Let the users who can read the folder of a file read the file.

    safetensors 0.8 creates files with mode 0600. A server of another user, which the run did not
    start, cannot open such weights. The umask cannot be read without setting it for all threads.
    """
    # Some mounted buckets have no modes.
    with suppress(OSError):
        path.chmod(path.parent.stat().st_mode & 0o666)
