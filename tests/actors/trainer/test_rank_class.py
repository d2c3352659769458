"""The actor classes of trainer ranks without Megatron (rlpipe.actors.trainer.rank_class)."""

import subprocess
import sys

import pytest

from rlpipe.actors.trainer import rank_actors, rank_class


@pytest.mark.parametrize("name", ["TrainerRank", "CriticRank"])
def test_an_actor_class_forwards_every_public_method_of_its_rank(name: str):
    forwarded = {method for method in vars(getattr(rank_class, name)) if method[0] != "_"}
    rank = getattr(rank_actors, name)
    public = {
        method for method in dir(rank) if method[0] != "_" and callable(getattr(rank, method))
    }
    assert forwarded == public


def test_a_call_reaches_the_rank_with_its_arguments_and_its_error(tmp_path, monkeypatch):
    class Rank:
        def __init__(self, *arguments):
            self.arguments = arguments

        def address(self):
            return self.arguments

        def train(self, *, key):
            raise ValueError(key)

    monkeypatch.setattr(rank_actors, "TrainerRank", Rank)
    actor = rank_class.TrainerRank(0, 1, "here")
    assert actor.address() == (0, 1, "here")
    with pytest.raises(ValueError, match="a key"):
        actor.train(key="a key")


def test_processes_that_only_coordinate_import_no_torch():
    modules = ("rlpipe.actors.conductor", "rlpipe.actors.engines.engine", "rlpipe.actors.generator")
    program = f"""
import sys
import {", ".join(modules)}, rlpipe.actors.trainer.rank_class, flows.train, tools.train
print([name for name in ("torch", "transformers", "matplotlib", "megatron") if name in sys.modules])
"""
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert output.strip() == "[]"
