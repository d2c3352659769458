"""The folder of the project's packages, and modules of the user that it hides."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlpipe.config.hooks import hook_digest, load_hook
from rlpipe.errors import ConfigError
from rlpipe.system.project import PACKAGES, PROJECT, hidden_file

REWARD = "def score(sample):\n    return 0.5\n"


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a user with packages that are called as those of the project."""
    for name in PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
        (tmp_path / name / "my_reward.py").write_text(REWARD)
    (tmp_path / "tools" / "train.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("use", [load_hook, hook_digest])
def test_a_hidden_module_is_refused_and_its_file_is_accepted(mine: Path, package: str, use):
    with pytest.raises(ConfigError) as caught:
        use(f"{package}.my_reward.score")
    assert f"name the file: {package}/my_reward.py:score" in str(caught.value)
    assert str(mine / package / "my_reward.py") in str(caught.value)
    assert use(f"{package}/my_reward.py:score")


def test_only_modules_that_the_project_lacks_are_hidden(mine: Path):
    assert hidden_file("tools.my_reward") == Path("tools/my_reward.py")
    for module in (
        "tools.train",
        "tools.bench",
        "tools.nothing",
        "my_reward",
        "deployments.recipes",
    ):
        assert hidden_file(module) is None, module


def test_the_project_comes_before_a_folder_with_packages_of_the_same_names(mine: Path):
    program = (
        "from rlpipe.system.project import use_project; use_project()\n"
        "import subprocess, sys, tools.train, mine\n"
        "print(tools.__path__[0])\n"
        "print(subprocess.run([sys.executable, '-c', 'import tools; print(tools.__path__[0])'],"
        " cwd='/', capture_output=True, text=True, check=True).stdout.strip())\n"
    )
    (mine / "mine.py").touch()
    printed = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert printed == [str(PROJECT / "tools")] * 2
