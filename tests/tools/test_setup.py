"""Setup script: uv or pip, the CPU build of torch, refusals with advice.

A recording `uv` stands in for the real one, which downloads 3.5 GB. CI runs the script itself.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
UV = """#!/bin/sh
echo "$@" >> calls
echo "find-links=$UV_FIND_LINKS default-index=$UV_DEFAULT_INDEX" >> variables
[ "$1" = venv ] || exit 0
mkdir -p .venv/bin
printf '#!/bin/sh\nexec {python} "$@"\n' > .venv/bin/python
chmod +x .venv/bin/python
"""
TOO_OLD = """#!/bin/sh
[ "$1" = --version ] && echo "Python 3.9.2"
exit 1
"""


def executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the script and the files that it reads, and a `bin` for the PATH."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "bin").mkdir()
    for name in ("tools/setup.sh", "constraints.txt", "pyproject.toml"):
        shutil.copy(REPOSITORY / name, tmp_path / name)
    return tmp_path


def setup(checkout: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the script with `bin` before the system's programs."""
    path = f"{checkout / 'bin'}:/usr/bin:/bin"
    return subprocess.run(
        ["bash", str(checkout / "tools" / "setup.sh")],
        env={"PATH": path, "HOME": os.environ["HOME"], "RLPIPE_EXTRAS": "cpu,dev", **variables},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def uv(checkout: Path) -> Path:
    """The recording `uv`; returns the file of its calls."""
    executable(checkout / "bin" / "uv", UV.format(python=sys.executable))
    return checkout / "calls"


def test_uv_installs_the_cpu_build_of_torch(checkout: Path, uv: Path):
    result = setup(checkout, PYTHON=sys.executable)
    assert result.returncode == 0, result.stderr
    venv, requirements, without_dependencies = uv.read_text().splitlines()
    assert venv == f"venv --quiet --seed --python {sys.executable} .venv"
    assert "--torch-backend cpu" in requirements
    assert requirements.endswith("--constraint constraints.txt --editable .[cpu,dev]")
    assert without_dependencies.endswith("--no-deps --constraint constraints.txt sglang mbridge")


def test_a_long_installation_shows_its_time_and_the_size_of_the_environment(
    checkout: Path, uv: Path
):
    executable(checkout / "bin" / "sleep", "#!/bin/sh\nexec /bin/sleep 0.2\n")
    program = checkout / "bin" / "uv"
    executable(program, program.read_text().replace("#!/bin/sh", "#!/bin/sh\n/bin/sleep 2", 1))
    result = setup(checkout, PYTHON=sys.executable)
    assert result.returncode == 0 and not result.stderr
    for step in result.stdout.split("setup: 1/2")[1].split("setup: 2/2"):
        assert re.search(r"^setup: \d+ s, \S+ of 3.5 GB in \.venv$", step, re.MULTILINE)


def test_uv_on_a_gpu_machine_takes_torch_as_published(checkout: Path, uv: Path):
    assert setup(checkout, PYTHON=sys.executable, RLPIPE_EXTRAS="gpu,dev").returncode == 0
    assert "--torch-backend" not in uv.read_text()


def test_uv_uses_wheels_and_the_index_that_the_variables_of_pip_name(checkout: Path, uv: Path):
    variables = {"PIP_FIND_LINKS": "/wheels /more", "PIP_INDEX_URL": "https://mirror/simple"}
    assert setup(checkout, PYTHON=sys.executable, **variables).returncode == 0
    assert "--torch-backend" not in uv.read_text()
    used = (checkout / "variables").read_text().splitlines()[-1]
    assert used == "find-links=/wheels,/more default-index=https://mirror/simple"


def test_a_second_call_does_nothing(checkout: Path, uv: Path):
    setup(checkout, PYTHON=sys.executable)
    uv.unlink()
    assert "up to date (extras: cpu,dev)" in setup(checkout).stdout
    assert not uv.exists()


def test_uv_brings_an_interpreter_where_the_one_of_the_machine_is_too_old(checkout: Path, uv: Path):
    executable(checkout / "bin" / "python3.11", TOO_OLD)
    setup(checkout)
    assert uv.read_text().startswith("venv --quiet --seed --python 3.11 .venv")


def test_pip_refuses_an_old_interpreter_with_advice(checkout: Path):
    executable(checkout / "bin" / "python3.11", TOO_OLD)
    result = setup(checkout, RLPIPE_INSTALLER="pip")
    assert result.returncode == 1
    assert "Python 3.11 or newer is needed, found" in result.stderr
    assert "Python 3.9.2" in result.stderr and "set PYTHON=" in result.stderr


@pytest.mark.parametrize(
    ("installer", "message"),
    [("poetry", "expected uv or pip"), ("uv", "uv is not on the PATH")],
)
def test_an_installer_that_cannot_be_used_is_refused(checkout: Path, installer: str, message: str):
    result = setup(checkout, RLPIPE_INSTALLER=installer)
    assert result.returncode == 1
    assert message in result.stderr


def test_the_environment_of_another_checkout_stays_as_it_is(checkout: Path, tmp_path: Path):
    (tmp_path / "other").mkdir()
    (checkout / ".venv").symlink_to(tmp_path / "other")
    result = setup(checkout)
    assert result.returncode == 1
    assert ".venv is a link to" in result.stderr
    assert list((tmp_path / "other").iterdir()) == []
