"""Modes of written safetensors files (rlpipe.system.tensor_files)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlpipe.system.tensor_files import save_tensors


@pytest.mark.parametrize(("folder", "file"), [(0o755, 0o644), (0o770, 0o660), (0o700, 0o600)])
def test_a_file_is_readable_by_the_readers_of_its_folder(tmp_path: Path, folder: int, file: int):
    tmp_path.chmod(folder)
    path = tmp_path / "model.safetensors"
    save_tensors({"weight": torch.ones(2)}, path)
    assert path.stat().st_mode & 0o777 == file
    assert torch.equal(load_file(path)["weight"], torch.ones(2))
