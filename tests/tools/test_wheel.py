"""The wheel, installed in an environment of its own and used outside the checkout (tools.wheel)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from rlpipe.config.load import recipes
from rlpipe.system.project import PACKAGES
from tools.init import FILES

pytestmark = [pytest.mark.integration, pytest.mark.long]
ROOT = Path(__file__).resolve().parents[2]
COPIED = ("pyproject.toml", "README.md", "LICENSE", "constraints.txt", "rlpipe", *PACKAGES)
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built from a copy: a build writes into its source."""
    source = tmp_path_factory.mktemp("source")
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    target = tmp_path_factory.mktemp("dist")
    alone = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    subprocess.run([*PIP, "wheel", *alone, "--wheel-dir", target, source], check=True)
    (built,) = target.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def rlpipe(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command in a new environment with the wheel.

    The other packages are those of this environment, without its editable rlpipe: a directory in a
    .pth file is searched, but its own .pth files are not read.
    """
    environment = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = environment / "lib" / version / "site-packages"
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    python = environment / "bin" / "python"
    alone = ("--quiet", "--no-deps", "--no-index", "--ignore-installed")
    subprocess.run([*PIP, "--python", python, "install", *alone, wheel], check=True)
    return environment / "bin" / "rlpipe"


@pytest.fixture
def user(tmp_path: Path, rlpipe: Path) -> Path:
    """A folder of a user with a run, and with packages that are called as those of the project."""
    for name in PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    call(rlpipe, tmp_path, "init", "mine")
    shutil.copy(tmp_path / "mine" / "reward.py", tmp_path / "tools" / "my_reward.py")
    return tmp_path


def call(rlpipe: Path, folder: Path, *words: str, code: int = 0) -> str:
    """Run the command in a folder; return its output. AssertionError for another exit code."""
    outside = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [rlpipe, *words],
        cwd=folder,
        env=outside | {"RLPIPE_HOME": str(folder / "runs")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout
    return done.stdout


def test_the_wheel_has_one_top_level_package_with_all_files_of_the_project(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (listed,) = (name for name in names if name.endswith("/top_level.txt"))
        assert archive.read(listed).decode().split() == ["rlpipe"]
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"rlpipe"}
    listing = subprocess.run(
        ["git", "ls-files", "rlpipe", *PACKAGES],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    left_out = (".md", ".png", ".sh", ".sbatch", "Containerfile", ".dockerignore")
    wanted = {
        name if name.startswith("rlpipe/") else f"rlpipe/_project/{name}"
        for name in listing.stdout.split()
        if (ROOT / name).exists() and not name.endswith(left_out)
    }
    assert wanted - names == set()
    assert {f"rlpipe/_project/tools/init_template/{name}" for name in FILES} <= set(names)
    assert "rlpipe/_project/constraints.txt" in names


def test_commands_work_outside_the_checkout(rlpipe: Path, user: Path):
    assert "rlpipe init" in call(rlpipe, user)
    assert "mine/recipe.yaml:" in call(rlpipe, user, "config", "mine/recipe.yaml", "--changed")
    for recipe in recipes():
        call(rlpipe, user, "config", recipe, "--plain")
    doctor = call(rlpipe, user, "doctor", "mine/recipe.yaml")
    assert "other packages" in doctor and "all is ok" in doctor
    assert str(rlpipe.parent) in doctor


def test_a_hidden_module_is_refused(rlpipe: Path, user: Path):
    words = ("train", "mine/recipe.yaml", "reward.function.path=tools.my_reward.score")
    assert "name the file: tools/my_reward.py:score" in call(rlpipe, user, *words, code=2)


def test_a_recipe_of_the_user_trains_to_its_end(rlpipe: Path, user: Path):
    words = ("num_rollout=1", "reward.function.path=tools/my_reward.py:score")
    output = call(rlpipe, user, "train", "mine/recipe.yaml", *words)
    assert "1/1" in output
    summary = json.loads((user / "runs" / "mine" / "summary.json").read_text())
    assert summary["iterations"] == 1
    assert "nothing is wrong" in call(rlpipe, user, "audit", "verify", "--run", "mine")
    # Titles, 32 samples of each of ten prompts, and how to get whole rows.
    lines = call(rlpipe, user, "rollouts", "mine", "--limit", "0").splitlines()
    assert len(lines) == 1 + 10 * 32 + 1
