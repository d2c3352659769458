"""Folders of compiled kernels (rlpipe.system.compile_caches)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlpipe.system.compile_caches import VARIABLES, keep_compiled


def test_kernels_are_kept_in_the_home_of_the_runs_unless_the_user_has_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "")  # so that the test restores all of them
        monkeypatch.delenv(variable)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine")
    keep_compiled(tmp_path)
    keep_compiled(tmp_path / "another home of this process")
    assert os.environ["TRITON_CACHE_DIR"] == "/mine"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == f"{tmp_path}/.compiled/inductor"
    assert os.environ["FLASHINFER_WORKSPACE_BASE"] == f"{tmp_path}/.compiled/flashinfer"


def test_the_libraries_read_these_variables(tmp_path: Path):
    program = (
        "from pathlib import Path; from rlpipe.system.compile_caches import keep_compiled\n"
        f"keep_compiled(Path({str(tmp_path)!r}))\n"
        "from torch._inductor.runtime.cache_dir_utils import cache_dir; print(cache_dir())\n"
        "from sglang.srt.environ import envs; print(envs.SGLANG_DG_CACHE_DIR.get())\n"
    )
    # torch sets its variable in each process that compiles, as in this one after other tests.
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    output = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout
    assert output.split() == [
        f"{tmp_path}/.compiled/inductor",
        f"{tmp_path}/.compiled/sglang/deep_gemm",
    ]
