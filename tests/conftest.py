"""What every test shares: a home of its own, and few threads, so that tests do not see each other
or the user's runs."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.browser import browser
from tests.garbage import exempt_imports
from tests.gpus import prepare, visible_gpus

os.environ.setdefault(
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120"
)  # 20 is too little while other tests run
os.environ.setdefault("RLPIPE_PREFECT_IDLE_S", "0")  # each home of a test would keep a server
# Threads of torch that wait sleep. On cores that other processes use, a small model took ten times
# the CPU seconds with threads that spin.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
REPOSITORY = Path(__file__).resolve().parents[1]

prepare()

# The same examples in every run: a change is not refused for what another one left. The search for
# new ones is `pytest --hypothesis-profile=search`.
settings.register_profile("rlpipe", deadline=None, max_examples=50, derandomize=True)
settings.register_profile("search", deadline=None, max_examples=2000)
settings.load_profile("rlpipe")


WHOLE_RUNS = (
    "tests/flows/test_train.py",
    "tests/deployments/test_apply.py",
    "tests/soak/test_chaos.py",
)
"""Files whose tests start a run with all its servers. They come first and in one process: of two at
once each would have half a machine."""

SHARED = {
    "engine and ranks": re.compile(
        r"\blive: Live\b|\blive_engine\b|def test_\w+\(\s*live\b|\btwo_ranks\b|\bslime_checkpoint\b"
        r"|\bforked_engines\b"
    ),
    "Ray": re.compile(r"\blocal_ray\b|\bfleet: Fleet\b"),
    "Prefect": re.compile(r"\bprefect_server\b"),
}
"""What test files use that takes seconds to start, and by which words. All files with one of these
run in one process, one after the other, so that each is started once."""

LONG_FILES = (
    "tests/actors/trainer/test_critic.py",
    "tests/actors/trainer/test_first_weights.py",
    "tests/actors/trainer/test_replay.py",
    "tests/actors/trainer/test_states.py",
    "tests/stores/test_releases.py",
)
"""Files with a minute of long tests or more. Each is a scope, so that no process gets them all and
works while the others have ended."""


@cache
def scope(path: str) -> tuple[int, str]:
    """Return the rank and the name of the tests that stay in one process: those of a file, or those
    that share a server. Files without real parts come last, because they fill the gaps."""
    if path.startswith(WHOLE_RUNS):
        return 0, "whole runs"
    if path.startswith(LONG_FILES):
        return len(SHARED) + 1, path
    source = (REPOSITORY / path).read_text(encoding="utf-8")
    for rank, (name, words) in enumerate(SHARED.items(), start=1):
        if words.search(source):
            return rank, name
    return len(SHARED) + (2 if "mark.integration" in source else 3), path


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort by `scope`, and leave out tests that need more GPUs than there are, a browser or a
    package that is not installed."""
    items.sort(key=lambda item: scope(item.nodeid.partition("::")[0])[0])
    without_browser = browser() is None
    packages = ("transformer_engine", "peft")
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if not os.environ.get("RLPIPE_VERIFIERS_PYTHON"):
        missing.append("verifiers")
    if any(item.get_closest_marker("bubblewrap") for item in items) and not _has_sandbox():
        missing.append("bubblewrap")
    if beyond := [
        item
        for item in items
        if ((needed := _gpus_of(item)) and needed > len(visible_gpus()))
        or (without_browser and item.get_closest_marker("browser"))
        or any(item.get_closest_marker(name) for name in missing)
    ]:
        config.hook.pytest_deselected(items=beyond)
        items[:] = [item for item in items if item not in beyond]


def _has_sandbox() -> bool:
    """Print why programs cannot run in a sandbox on this machine."""
    from rlpipe.errors import ConfigError
    from rlpipe.rollout.sandbox import Python

    try:
        Python()
    except ConfigError as error:
        print(f"\nno tests of the sandbox: {error}")
        return False
    return True


def _gpus_of(item: pytest.Item) -> int:
    marker = item.get_closest_marker("gpu")
    return 0 if marker is None else marker.args[0] if marker.args else 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several processes, the tests of one scope stay in one of them.
    (pytest-xdist 3.8's own groups do nothing under pytest 9.2.)"""
    from xdist.scheduler import LoadFileScheduling

    class ByScope(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope(super()._split_scope(nodeid))[1]

    return ByScope(config, log)


@pytest.fixture
def repository() -> Path:
    """The root of the checkout."""
    return REPOSITORY


@pytest.fixture(scope="session")
def prefect_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The API of the Prefect server that all tests share."""
    from tests.servers import prefect_api

    with prefect_api(tmp_path_factory.mktemp("prefect")) as url:
        yield url


@pytest.fixture
def prefect_server(prefect_url: str) -> Iterator[str]:
    """Flows of the test report to a real Prefect server; return the URL of its API."""
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings({PREFECT_API_URL: prefect_url}):
        yield prefect_url


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Any]:
    """Two processes for jobs of training ranks (`tests.engines.megatron.ranks.Ranks`)."""
    from tests.engines.megatron.ranks import Ranks  # imports torch

    ranks = Ranks(2)
    yield ranks
    ranks.stop()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect no garbage while pytest collects tests: it took a fifth of that time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_runtest_setup() -> None:
    exempt_imports()


def pytest_unconfigure() -> None:
    """Let the interpreter collect everything at its end; extension modules report leaks else."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def _homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Paths of folders that do not exist."""
    folder = tmp_path_factory.mktemp("homes")
    return (folder / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def _own_home(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, _homes: Iterator[Path]
) -> None:
    """Runs, models and the default store of a test go to its own temporary folder.

    Most tests write nothing, and a folder for each takes more than a millisecond.
    """
    has_folder = "tmp_path" in request.fixturenames
    home = request.getfixturevalue("tmp_path") / "home" if has_folder else next(_homes)
    monkeypatch.setenv("RLPIPE_HOME", str(home))
