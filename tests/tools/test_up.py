"""Up and down on this machine: what runs is left alone, what died comes back where it was, nobody else's process is ended."""

from __future__ import annotations

import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rlpipe.errors import ResourceError
from tools.up import Place, down, start, start_s3, told, wait

PAUSES = "import signal; signal.pause()"
SLEEPS = [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {PAUSES!r}])"]
ENDS = [sys.executable, "-c", "raise SystemExit('no such pool')"]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path / "home")
    yield made
    down(made)


def test_a_process_is_known_by_its_number_and_when_it_began(tmp_path: Path):
    place = Place(tmp_path)
    place.keep("ray", psutil.Process(), [6379])
    assert place.running("ray") == psutil.Process()
    record = place.folder / "ray.json"
    record.write_text(record.read_text().replace('"began_s": ', '"began_s": 9'))
    assert place.running("ray") is None
    assert down(place) == []


def test_down_ends_what_a_process_started_too(place: Place):
    start(place, "worker", SLEEPS, [], {})
    worker = place.running("worker")
    assert worker is not None
    wait(place, "worker", lambda: bool(worker.children()))
    below = worker.children()
    assert down(place) == ["worker"]
    assert not any(process.is_running() for process in (worker, *below))
    assert "worker   down" in told(place)


def test_what_does_not_come_up_is_said_with_the_end_of_its_log(place: Place):
    start(place, "prefect", ENDS, [4200], {})
    with pytest.raises(ResourceError, match="no such pool"):
        wait(place, "prefect", lambda: False)


@pytest.mark.integration
def test_the_store_comes_back_at_its_port_with_its_key_which_nobody_else_can_read(place: Place):
    start_s3(place)
    first, key = place.environment, place.secret
    assert down(place) == ["s3"]
    start_s3(place)
    assert place.environment == first
    assert place.overrides == ["store.root=s3://rlpipe/runs"]
    assert stat.S_IMODE((place.folder / "s3.key").stat().st_mode) == 0o600
    assert key in (place.folder / "s3" / "s3.json").read_text()
    assert stat.S_IMODE(place.folder.stat().st_mode) == 0o700


def test_ports_are_kept(tmp_path: Path):
    place = Place(tmp_path)
    place.keep("prefect", psutil.Process(), [4207])
    assert place.ports("prefect", lambda: [1]) == [4207]
    assert place.url("prefect") == "http://127.0.0.1:4207"
    assert place.environment["PREFECT_API_URL"] == "http://127.0.0.1:4207/api"
