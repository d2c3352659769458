"""slime's modules with and without slime's source (rlpipe.slime.modules)."""

from __future__ import annotations

import hashlib
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlpipe.config.hooks import hook_digest
from rlpipe.slime import sample as slime_sample
from rlpipe.slime.modules import ALIASES, MODULES, is_provided, provide
from rlpipe.types import Sample, Status

ROOT = str(Path(__file__).parents[2])


def printed(program: str, folder: Path, *paths: str) -> list[str]:
    """Return the printed lines of a program that runs in a folder."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([ROOT, *paths])},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def checkout(folder: Path) -> str:
    """Write a small source of slime and return its folder."""
    package = folder / "slime"
    (package / "utils").mkdir(parents=True)
    (package / "agent").mkdir()
    for name in ("", "utils/", "agent/"):
        (package / name / "__init__.py").write_text("")
    (package / "utils" / "types.py").write_text("class Sample: pass\nclass ParamInfo: pass\n")
    (package / "agent" / "turns.py").write_text("from slime.utils.types import ParamInfo, Sample\n")
    return str(folder)


def test_every_module_is_importable_without_slime(tmp_path):
    program = (
        "import importlib\n"
        "from rlpipe.slime.modules import ALIASES, MODULES, provide\n"
        "provide()\n"
        "for name in (*MODULES, *ALIASES):\n"
        "    importlib.import_module(name)\n"
        "try:\n"
        "    import slime.agent\n"
        "except ModuleNotFoundError as error:\n"
        "    print(error)\n"
        "try:\n"
        "    from slime.utils.misc import nothing\n"
        "except ImportError as error:\n"
        "    print('nothing' in str(error))\n"
    )
    assert printed(program, tmp_path) == ["No module named 'slime.agent'", "True"]


def test_source_of_slime_shares_the_sample_of_rlpipe(tmp_path):
    program = (
        "from rlpipe.slime.modules import provide\n"
        "provide()\n"
        "from slime.agent import turns\n"
        "from slime.utils.types import ParamInfo\n"
        "print(turns.Sample.__module__, turns.ParamInfo is ParamInfo, ParamInfo.__module__)\n"
    )
    lines = printed(program, tmp_path, checkout(tmp_path / "source"))
    assert lines == ["rlpipe.slime.sample True slime.utils.types"]


def test_modules_of_slime_imported_before_are_replaced(tmp_path):
    program = (
        "import slime.utils.types as before\n"
        "from rlpipe.slime.modules import provide\n"
        "provide()\n"
        "import slime.utils.types as after\n"
        "print(before.Sample.__module__, after.Sample.__module__)\n"
    )
    lines = printed(program, tmp_path, checkout(tmp_path / "source"))
    assert lines == ["slime.utils.types rlpipe.slime.sample"]


def test_a_folder_named_slime_is_no_source(tmp_path):
    # A git checkout of slime in the current folder: its package is one level below.
    checkout(tmp_path / "slime")
    program = (
        "from rlpipe.slime.modules import provide, source_spec\n"
        "provide()\n"
        "from slime.utils.types import Sample\n"
        "print(Sample.__module__, source_spec('slime.agent'))\n"
    )
    assert printed(program, tmp_path, str(tmp_path)) == ["rlpipe.slime.sample None"]


def test_replaced_names_of_an_alias_are_used_by_its_functions():
    provide()
    from slime.rollout import sglang_rollout  # pyright: ignore[reportMissingImports]

    assert sglang_rollout.__name__ == ALIASES["slime.rollout.sglang_rollout"]


def test_the_digest_of_a_provided_function_is_that_of_its_name():
    path = "slime.rollout.on_policy_distillation.reward_func"
    assert hook_digest(path) == hashlib.sha256(f"rlpipe:{path}".encode()).hexdigest()
    assert not is_provided("slime.utils.misc", "nothing")
    assert "slime.utils.misc" in MODULES


def test_a_sample_of_slimes_own_class_is_taken_by_value():
    class Foreign:
        response_length = 1

        def to_dict(self) -> dict:
            return {"tokens": [1, 2], "response_length": 1, "status": "truncated", "reward": 2.0}

    Foreign.__name__ = "Sample"
    sample = slime_sample.own_sample(Foreign())
    assert (sample.prompt_ids, sample.response_ids) == ([1], [2])
    assert (sample.status, sample.reward) == (Status.TRUNCATED, 2.0)
    other = SimpleNamespace(tokens=[1])
    assert slime_sample.own_sample(other) is other


def test_every_sample_is_an_instance_of_slimes_class_and_survives_pickle():
    assert isinstance(Sample(), slime_sample.Sample)
    assert not isinstance("text", slime_sample.Sample)
    sample = slime_sample.Sample(tokens=[1, 2, 3], response_length=2)
    assert pickle.loads(pickle.dumps(sample)).response_ids == [2, 3]


@pytest.mark.parametrize("name", ["image", "video", "audio"])
def test_kinds_of_inputs_have_placeholders(name):
    kind = slime_sample.MultimodalTypes.get(name)
    assert kind is not None and kind.placeholder == f"<{name}>"
