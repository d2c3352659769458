"""Models without a chat template are refused before the start (rlpipe.data.chat_templates)."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlpipe.errors import ConfigError
from rlpipe.preflight import check
from tests.test_preflight import CHAT, config, folder, prompts

__all__ = ["folder"]

MAKER = """
import pathlib
from rlpipe.errors import ConfigError

def need():
    if not pathlib.Path(__file__).with_name("package").exists():
        raise ConfigError("the package is not installed", where="x", do="pip install package")

def make(directory):
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (pathlib.Path(directory) / name).write_text("{}")
    CHAT

make.check = need
"""
TEMPLATE = (
    '(pathlib.Path(directory) / "tokenizer_config.json").write_text(\'{"chat_template": "x"}\')'
)


def test_a_made_model_is_checked_before_anything_starts(folder: Path):
    (folder / "maker.py").write_text(MAKER.replace("CHAT", ""))
    model = {"source": {"type": "made", "maker": f"{folder}/maker.py:make"}}
    chat = {"prompts": prompts(folder, "train.jsonl")} | CHAT
    with pytest.raises(ConfigError, match="pip install package"):
        check(config(folder, model=model), folder / "home")
    (folder / "package").touch()
    check(config(folder, model=model), folder / "home")
    assert not (folder / "home/models").exists(), "a model without a chat template is made later"
    with pytest.raises(ConfigError, match=r"sets tokenizer\.chat_template before .*maker\.py:make"):
        check(config(folder, model=model, data=chat), folder / "home")
    (folder / "maker.py").write_text(MAKER.replace("CHAT", TEMPLATE))
    check(config(folder, model=model, data=chat), folder / "home")
