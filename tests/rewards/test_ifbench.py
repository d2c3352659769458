"""IFBench's reward, with a stand-in of its module that counts words (rlpipe.rewards.ifbench)."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from rlpipe.config.hooks import load_hook
from rlpipe.errors import ConfigError, DataError
from rlpipe.slime.reward_flags import reward_function
from rlpipe.types import Sample

LIBRARY = """
from collections import namedtuple

InputExample = namedtuple("InputExample", "key instruction_id_list prompt kwargs")
Result = namedtuple("Result", "follow_all_instructions")

def test_instruction_following_strict(example, responses):
    words = responses[example.prompt].split()
    return Result(all(len(words) == given["words"] for given in example.kwargs))
"""
NAME = "rlpipe.rewards.ifbench"


@pytest.fixture
def reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module with a stand-in of IFBench on the path."""
    (tmp_path / "evaluation_lib.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path)
    for name in (NAME, "evaluation_lib"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module(NAME)


def sample(response: str, **metadata) -> Sample:
    return Sample("g", 0, "Two words.", [1], metadata=metadata, response=response)


def test_all_instructions_must_be_followed(reward: ModuleType):
    row = {"instruction_id_list": ["count:a", "count:b"], "prompt_text": "Two words."}
    both = {"words": 2, "unused": None}
    assert reward.score(sample("two words", **row, kwargs=[both, both])) == 1.0
    assert reward.score(sample("two words", **row, kwargs=[both, {"words": 3}])) == 0.0
    assert reward.score(sample("two words", **row, kwargs=both)) == 1.0


def test_a_row_without_instructions_is_an_error(reward: ModuleType):
    with pytest.raises(DataError, match="instruction_id_list"):
        reward.score(sample("two words"))


def test_a_missing_repository_is_named_with_the_commands(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    monkeypatch.setitem(sys.modules, "evaluation_lib", None)
    with pytest.raises(ConfigError, match="git clone"):
        importlib.import_module(NAME)


def test_slime_s_flag_names_the_function():
    assert reward_function({"rm_type": "ifbench"}) == {
        "type": "python",
        "path": f"{NAME}.score",
        "group": False,
        "reward_key": None,
    }


def test_the_function_of_the_flag_is_found(reward: ModuleType):
    function = reward_function({"rm_type": "ifbench"})
    assert function is not None
    score = load_hook(function["path"])
    assert (score.__module__, score.__name__) == (reward.__name__, "score")
