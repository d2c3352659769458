"""Re-targeting of Megatron-core's source."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlpipe.engines.megatron import platform
from rlpipe.engines.megatron.platform import CUDA, _retargeted

OURS = sorted(Path(platform.__file__).parent.rglob("*.py"))


def run(source: str) -> dict:
    names: dict = {}
    exec(_retargeted(source.encode(), "example.py"), names)
    return names


def test_cuda_literals_are_replaced_by_cpu():
    names = run(
        '"""A module."""\nfrom __future__ import annotations\nimport torch\n'
        'a = torch.empty(2, device="cuda")\nb = torch.ones(2).cuda(non_blocking=True)\n'
        'c = torch.empty(1, pin_memory=True)\nd = "torch.cuda.FloatTensor"\n'
        "e = torch.cuda.current_device()\n"
    )
    assert names["__doc__"] == "A module."
    assert {names[name].device.type for name in "abc"} == {"cpu"}
    assert names["d"] == "torch.FloatTensor"
    assert names["e"] == torch.device("cpu")


def test_torch_itself_is_untouched():
    run("import torch\nx = torch.cuda.is_available()")
    assert torch.cuda is not CUDA
    assert torch.cuda.Stream is not CUDA.Stream


def test_other_attributes_of_torch_cuda_are_unchanged():
    assert CUDA.OutOfMemoryError is torch.cuda.OutOfMemoryError


def test_importing_the_platform_after_megatron_is_an_error():
    program = (
        "import sys, types; sys.modules['megatron.core'] = types.ModuleType('x'); "
        "import rlpipe.engines.megatron.platform"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert found.returncode != 0
    assert "must be imported before megatron.core" in found.stderr


@pytest.mark.parametrize("file", OURS, ids=lambda file: file.name)
def test_every_module_imports_the_platform_before_megatron(file):
    imports = [
        node
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    names = [
        f"{getattr(node, 'module', '')}.{alias.name}" for node in imports for alias in node.names
    ]
    theirs = [
        i for i, name in enumerate(names) if name.lstrip(".").startswith(("megatron", "mbridge"))
    ]
    safe = [i for i, name in enumerate(names) if "rlpipe.engines.megatron" in name]
    assert not theirs or (safe and safe[0] < theirs[0])


def test_retargeted_code_is_cached_until_the_source_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    compiled: list[bytes] = []
    original = platform._retargeted

    def retargeted(source: bytes, path: str):
        compiled.append(source)
        return original(source, path)

    monkeypatch.setattr(platform, "_retargeted", retargeted)
    (tmp_path / "__pycache__").mkdir()
    path = str(tmp_path / "module.py")

    def device(source: bytes) -> str:
        names: dict[str, str] = {}
        exec(platform._cached(source, path), names)
        return names["device"]

    assert [device(b"device = 'cuda'"), device(b"device = 'cuda'")] == ["cpu", "cpu"]
    assert len(compiled) == 1
    assert device(b"device = 'cuda' + ':0'") == "cpu:0"
    (file,) = (tmp_path / "__pycache__").iterdir()
    file.write_bytes(file.read_bytes()[:-3])
    assert device(b"device = 'cuda' + ':0'") == "cpu:0"
    assert len(compiled) == 3
