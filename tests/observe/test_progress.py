"""Progress in the terminal (rlpipe.observe.progress)."""

from __future__ import annotations

import io
import os
import pty
import threading

import pytest
from rich.console import Console

from rlpipe.observe.progress import Progress, duration


class Clock:
    """A clock that tests advance."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def tick(self, seconds: float) -> None:
        self.now += seconds


def live_text(progress: Progress) -> str:
    """Return the current live lines."""
    console = Console(file=io.StringIO(), width=140)
    with console.capture() as captured:
        console.print(progress._live_lines())
    return captured.get()


def test_without_a_terminal_one_plain_line_is_written_per_iteration():
    stream = io.StringIO()
    clock = Clock()
    with Progress("spell", 3, stream=stream, clock=clock) as progress:
        for reward in (0.25, 0.5):
            progress.stage("rollout", done=1, total=8, tokens=10, reward=reward)
            clock.tick(2)
            progress.stage("rollout", done=8, total=8)
            progress.stage("train")
            clock.tick(1)
            progress.iteration({"reward": reward, "tokens": 1234})
    assert stream.getvalue().splitlines() == [
        "spell 1/3  reward 0.250  tokens 1,234  3.0 s (rollout 2.0 train 1.0)  6.0 s left",
        "spell 2/3  reward 0.500  tokens 1,234  3.0 s (rollout 2.0 train 1.0)  3.0 s left",
    ]


def test_the_times_of_a_repeated_stage_add_up():
    stream = io.StringIO()
    clock = Clock()
    with Progress("spell", 1, stream=stream, clock=clock) as progress:
        for name, seconds in (("eval", 1), ("train", 2), ("eval", 3)):
            progress.stage(name)
            clock.tick(seconds)
        progress.iteration({})
    assert "(eval 4.0 train 2.0)" in stream.getvalue()


def test_a_resumed_run_counts_all_iterations_and_times_its_own():
    stream = io.StringIO()
    clock = Clock()
    with Progress("spell", 100, first_iteration=90, stream=stream, clock=clock) as progress:
        clock.tick(5)
        progress.iteration({})
    assert stream.getvalue().strip() == "spell  91/100  5.0 s  45.0 s left"


def test_time_before_the_first_iteration_counts_for_no_iteration():
    stream = io.StringIO()
    clock = Clock()
    with Progress("spell", 12, stream=stream, clock=clock) as progress:
        progress.stage("start", note="loading weights")
        clock.tick(60)
        progress.begin(10)
        progress.stage("train")
        clock.tick(2)
        progress.iteration({})
    assert stream.getvalue().strip() == "spell 11/12  2.0 s (train 2.0)  2.0 s left"


def test_the_live_lines_show_speed_reward_and_time_left():
    clock = Clock()
    progress = Progress("spell", 10, stream=io.StringIO(), clock=clock)
    progress.stage("rollout", total=256)
    clock.tick(4)
    progress.stage("rollout", done=64, total=256, tokens=2000, reward=0.41, note="2 engines")
    text_shown = live_text(progress)
    for text in (
        "iteration 1/10",
        "rollout",
        "64/256",
        "500 tokens/s",
        "reward 0.410",
        "2 engines",
        "12.0 s left",
    ):
        assert text in text_shown


def test_a_terminal_gets_live_lines_and_keeps_the_iteration_lines():
    master, slave = pty.openpty()
    chunks: list[bytes] = []

    def drain() -> None:
        while True:
            try:
                chunks.append(os.read(master, 65536))
            except OSError:
                return

    reader = threading.Thread(target=drain)
    reader.start()
    with os.fdopen(slave, "w") as stream, Progress("spell", 2, stream=stream) as progress:
        progress.stage("rollout", done=3, total=4)
        progress._live.refresh()
        progress.iteration({"reward": 1.0})
        progress.say("report: runs/spell/report.html")
    reader.join(timeout=10)
    os.close(master)
    text = b"".join(chunks).decode()
    assert "3/4" in text
    assert "reward" in text
    assert "report: runs/spell/report.html" in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.00 s"),
        (0.954, "0.95 s"),
        (4.25, "4.2 s"),
        (59.97, "1:00"),
        (65, "1:05"),
        (3599.9, "1:00:00"),
        (7389, "2:03:09"),
    ],
)
def test_durations_are_short_texts(seconds, text):
    assert duration(seconds) == text
