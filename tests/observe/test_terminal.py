"""The live block on a terminal (rlpipe.observe.terminal, captured_output)."""

from __future__ import annotations

import io
import json
import threading
import time
from pathlib import Path

import pytest

from rlpipe.observe import terminal
from rlpipe.observe.progress import Progress
from rlpipe.observe.terminal import (
    LAST_WAITS_FILE,
    ReportedWaits,
    Screen,
    current,
    waiting_for,
)
from tests.observe.terminals import Terminal

START = """
import faulthandler, logging, os, signal, subprocess, sys, time, warnings
# A shell starts background jobs with SIGINT ignored, and the tests inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)
earlier = logging.getLogger("earlier")
earlier.addHandler(logging.StreamHandler())
from rlpipe.observe.progress import Progress
from rlpipe.observe.terminal import Screen, waiting_for
"""

RUN = (
    START
    + """
with Screen(), Progress("spell", 4) as progress:
    progress.stage("train", note="first stage")
    time.sleep(0.6)
    os.write(2, b"C++ writes to descriptor 2\\n")
    earlier.warning("a handler made earlier")
    print("print writes to stdout")
    warnings.warn("a warning")
    subprocess.run(["echo", "a child process writes"])
    sys.stderr.write("bar 10 %\\rbar 100 %\\n")
    progress.iteration({"reward": 0.25})
    progress.stage("train", note="second stage")
    time.sleep(1.5)
print("the end")
"""
)
WRITTEN = (
    "C++ writes to descriptor 2",
    "a handler made earlier",
    "print writes to stdout",
    "a child process writes",
    "bar 100 %",
)


@pytest.mark.parametrize("width", [80, 160])
def test_lines_of_any_origin_appear_above_a_block_that_they_do_not_tear(tmp_path, width):
    shown = Terminal(RUN, tmp_path, width=width)
    live = shown.wait_for("second stage")
    assert set(WRITTEN) <= set(live)
    assert "first stage" not in "\n".join(live)
    run, values, stage = live[-3:]
    assert run.startswith("spell")
    assert "1/4" in run
    assert values == "  reward 0.250"
    assert stage.startswith("  train")
    end = shown.end()
    assert shown.process.returncode == 0
    assert set(WRITTEN) <= set(end)
    assert sum("UserWarning: a warning" in line for line in end) == 1
    assert "second stage" not in "\n".join(end)
    # The last values stay as a line, and what follows the screen is below it.
    assert end[-2].startswith("spell 1/4  reward 0.250")
    assert end[-1] == "the end"
    assert shown.has_cursor


def test_a_bar_that_redraws_its_line_is_the_last_row(tmp_path):
    source = (
        START
        + """
with Screen(), Progress("spell", 4):
    for percent in (10, 20):
        sys.stderr.write(f"\\rdownload {percent} %")
        time.sleep(0.5)
    time.sleep(60)
"""
    )
    shown = Terminal(source, tmp_path)
    lines = shown.wait_for("download 20 %")
    assert lines[-1] == "download 20 %"
    assert "download 10 %" not in "\n".join(lines)
    shown.interrupt()
    assert "download 20 %" in shown.end()[0]


def test_ctrl_c_leaves_a_clean_terminal(tmp_path):
    source = (
        START
        + """
try:
    with Screen(), waiting_for("SGLang engine"):
        time.sleep(60)
except KeyboardInterrupt:
    print("stopped")
"""
    )
    shown = Terminal(source, tmp_path)
    shown.wait_for("waiting for SGLang engine")
    shown.interrupt()
    assert shown.end() == ["stopped"]
    assert shown.has_cursor
    assert not (tmp_path / LAST_WAITS_FILE).exists()


def test_a_killed_process_leaves_the_cursor(tmp_path):
    shown = Terminal(START + 'with Screen(), waiting_for("it"): time.sleep(60)', tmp_path)
    shown.wait_for("waiting for it")
    shown.process.kill()
    shown.end()
    assert shown.has_cursor


def test_the_stack_trace_of_a_crash_reaches_the_terminal(tmp_path):
    source = (
        START
        + """
faulthandler.enable()
with Screen():
    faulthandler._sigsegv()
"""
    )
    shown = Terminal(source, tmp_path)
    end = shown.end()
    assert any("Segmentation fault" in line for line in end), end


def test_without_a_usable_terminal_lines_are_plain(tmp_path):
    shown = Terminal(RUN, tmp_path, TERM="dumb")
    end = shown.end()
    assert set(WRITTEN) <= {line.rpartition("\r")[2] for line in end}
    assert any(line.startswith("spell 1/4  reward 0.250") for line in end)
    assert "second stage" not in "\n".join(end)


def test_a_quiet_screen_shows_no_progress(tmp_path):
    shown = Terminal(RUN.replace("Screen()", "Screen(quiet=True)"), tmp_path)
    end = shown.end()
    assert set(WRITTEN) <= set(end)
    assert not any("spell" in line for line in end)


def test_a_wait_shows_how_long_it_took_last_time(tmp_path):
    source = (
        START
        + """
with Screen(), waiting_for("SGLang engine"), waiting_for("trainer"):
    time.sleep({seconds})
"""
    )
    first = Terminal(source.format(seconds=0.1), tmp_path)
    first.end()
    kept = json.loads((tmp_path / LAST_WAITS_FILE).read_text())
    assert kept.keys() == {"SGLang engine", "trainer"}
    assert 0.1 <= kept["trainer"] < 60
    (tmp_path / LAST_WAITS_FILE).write_text(json.dumps(kept | {"SGLang engine": 75}))
    second = Terminal(source.format(seconds=60), tmp_path)
    lines = second.wait_for("waiting for trainer")
    assert any("waiting for SGLang engine" in line and "(last time 1:15)" in line for line in lines)
    second.process.kill()
    second.end()


class Written:
    """Text that was written to standard error."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self._before = ""

    @property
    def text(self) -> str:
        self._before += self._capsys.readouterr().err
        return self._before

    def wait_for(self, text: str) -> None:
        deadline_s = time.monotonic() + 20
        while text not in self.text:
            assert time.monotonic() < deadline_s, self.text
            time.sleep(0.02)


@pytest.fixture
def plain(tmp_path, monkeypatch, capsys) -> Written:
    """Standard error as a file, with waits that are announced at once."""
    monkeypatch.setenv("RLPIPE_HOME", str(tmp_path))
    monkeypatch.setattr(terminal, "PLAIN_AFTER_S", 0.05)
    return Written(capsys)


def test_without_a_terminal_a_long_wait_is_a_line_with_its_end(plain, tmp_path):
    (tmp_path / LAST_WAITS_FILE).write_text('{"SGLang engine": 14}')
    with Screen(), waiting_for("SGLang engine"):
        plain.wait_for("waiting for SGLang engine  (last time 14.0 s)\n")
    assert plain.text.splitlines()[-1].startswith("SGLang engine: ")


def test_a_wait_that_found_a_running_server_does_not_replace_the_time_of_a_start(
    plain, tmp_path, monkeypatch
):
    (tmp_path / LAST_WAITS_FILE).write_text('{"Prefect server": 14}')
    # On a busy machine an empty wait took 0.1 s.
    monkeypatch.setattr(terminal, "PLAIN_AFTER_S", 10)
    with waiting_for("Prefect server"):
        pass
    assert json.loads((tmp_path / LAST_WAITS_FILE).read_text()) == {"Prefect server": 14}
    monkeypatch.setattr(terminal, "PLAIN_AFTER_S", 0.05)
    with waiting_for("Prefect server"):
        time.sleep(0.06)
    assert json.loads((tmp_path / LAST_WAITS_FILE).read_text())["Prefect server"] < 14


def test_without_a_terminal_a_short_wait_is_silent(plain):
    with waiting_for("trainer"):
        pass
    assert plain.text == ""


@pytest.mark.parametrize("content", ["", "[1]", '{"trainer": "soon"}', "\0"])
def test_a_damaged_file_of_last_waits_is_written_again(plain, tmp_path, content):
    path: Path = tmp_path / LAST_WAITS_FILE
    path.write_text(content)
    with waiting_for("trainer"):
        pass
    assert json.loads(path.read_text()).keys() == {"trainer"}


def test_a_wait_that_fails_is_not_the_last_one(plain, tmp_path):
    with pytest.raises(OSError, match="no"), waiting_for("trainer"):
        raise OSError("no")
    assert not (tmp_path / LAST_WAITS_FILE).exists()


def test_waits_of_several_threads_are_all_kept(plain, tmp_path):
    def wait(number: int) -> None:
        with waiting_for(f"rank {number}"):
            pass

    threads = [threading.Thread(target=wait, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kept = json.loads((tmp_path / LAST_WAITS_FILE).read_text())
    assert kept.keys() == {f"rank {number}" for number in range(16)}


def test_waits_of_another_process_begin_and_end_as_it_reports(plain, tmp_path):
    def kept() -> set[str]:
        path = tmp_path / LAST_WAITS_FILE
        return set(json.loads(path.read_text())) if path.exists() else set()

    with ReportedWaits() as waits:
        waits.show(["trainer", "engines"])
        plain.wait_for("waiting for trainer")
        waits.show(["engines"])
        assert kept() == {"trainer"}
        waits.show([])
        assert kept() == {"trainer", "engines"}
    failed = ReportedWaits()
    failed.show(["router"])
    failed.__exit__(OSError, OSError("died"), None)
    assert kept() == {"trainer", "engines"}


def test_a_screen_inside_another_is_the_outer_one(plain):
    with Screen() as outer:
        with Screen() as inner:
            assert inner is outer
        assert current() is outer
        with Progress("spell", 2) as progress:
            progress.say("hello")
        assert current() is outer
    assert current() is None
    assert plain.text == "hello\n"


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), BrokenPipeError()])
def test_a_terminal_that_is_gone_does_not_stop_a_run(error, monkeypatch):
    def write(*_: object) -> None:
        raise error

    stream = io.StringIO()
    monkeypatch.setattr(stream, "write", write, raising=False)
    with Progress("spell", 2, stream=stream) as progress:
        progress.iteration({"reward": 0.5})
        progress.say("hello")
