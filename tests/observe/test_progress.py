"""Progress in the terminal (rlpipe.observe.progress)."""

from __future__ import annotations

import io
import math
import threading

import pytest
from rich.console import Console

from rlpipe.observe.progress import Progress, sparkline, value_text
from rlpipe.observe.terminal import Screen, duration


class Clock:
    """A clock that tests advance."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def tick(self, seconds: float) -> None:
        self.now += seconds


def block(progress: Progress, width: int = 140) -> list[str]:
    """Return the rows of the live block."""
    console = Console(file=io.StringIO(), width=width)
    with console.capture() as captured:
        console.print(progress)
    return [line.rstrip() for line in captured.get().splitlines()]


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


WAITS = "the reward function mine.py:score; each call has 30 s (reward.sample_timeout_s)"


def test_a_stage_that_hangs_shows_what_it_waits_for_in_its_row():
    clock = Clock()
    progress = Progress("spell", 3, stream=io.StringIO(), clock=clock)
    progress.stage("reward", 0, done=0, total=8, waits_for=WAITS)
    clock.tick(9)
    assert "waiting" not in block(progress, 200)[-1]
    clock.tick(3)
    progress.stage("reward", 0, done=0, total=8, waits_for=WAITS)
    assert f"8 of 8 samples open, waiting 12.0 s for {WAITS}" in block(progress, 200)[-1]
    progress.stage("reward", 0, done=3, total=8, waits_for=WAITS)
    assert "waiting" not in block(progress, 200)[-1]
    clock.tick(75)
    assert f"5 of 8 samples open, waiting 1:15 for {WAITS}" in block(progress, 200)[-1]


def test_without_a_terminal_a_stage_that_hangs_is_named_ever_less_often():
    stream = io.StringIO()
    clock = Clock()
    progress = Progress("spell", 3, stream=stream, clock=clock)
    progress.stage("reward", 2, done=5, total=8, waits_for=WAITS)
    progress.stage("train", 1)  # it does not say what it waits for
    for _ in range(260):
        clock.tick(1)
        progress.say_waits()
    expected = [
        f"spell: iteration 2: reward: 3 of 8 samples open, running for {ran}, waiting for {WAITS}"
        for ran in ("30.0 s", "1:00", "2:00", "4:00")
    ]
    assert stream.getvalue().splitlines() == expected
    progress.end_stage(2)
    clock.tick(600)
    progress.say_waits()
    progress.stage("eval", waits_for="samples of held")
    clock.tick(31)
    progress.say_waits()
    expected = "spell: eval: running for 31.0 s, waiting for samples of held"
    assert stream.getvalue().splitlines()[-1] == expected


def test_a_stage_whose_calls_reach_their_deadlines_is_named_too():
    stream = io.StringIO()
    clock = Clock()
    progress = Progress("spell", 3, stream=stream, clock=clock)
    for done in range(4):
        progress.stage("reward", 0, done=done, total=8, waits_for=WAITS)
        clock.tick(29)
        progress.say_waits()
    said = stream.getvalue().splitlines()
    assert len(said) == 2
    assert f"7 of 8 samples open, running for 58.0 s, waiting for {WAITS}" in said[0]


def test_a_run_without_a_terminal_says_by_itself_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("rlpipe.observe.progress.CHECK_S", 0.01)
    said = threading.Event()
    clock = Clock()
    with Progress("spell", 3, stream=io.StringIO(), clock=clock) as progress:
        monkeypatch.setattr(progress, "say_waits", said.set)
        assert said.wait(60)


def test_the_time_left_is_an_upper_bound_if_the_run_may_end_early():
    stream = io.StringIO()
    clock = Clock()
    with Progress("spell", 3, may_end_early=True, stream=stream, clock=clock) as progress:
        clock.tick(3)
        progress.iteration({})
        assert block(progress)[0].endswith("at most 6.0 s left")
    assert stream.getvalue().strip() == "spell 1/3  3.0 s  at most 6.0 s left"


def test_an_explanation_of_values_is_left_out_with_the_lines_of_iterations():
    for quiet in (False, True):
        stream = io.StringIO()
        with Screen(quiet=quiet, stream=stream), Progress("spell", 1) as progress:
            progress.explain("what a value means")
        assert ("what a value means" in stream.getvalue()) is not quiet


def test_the_time_between_stages_is_named():
    stream = io.StringIO()
    clock = Clock()
    with Progress("spell", 1, stream=stream, clock=clock) as progress:
        progress.stage("rollout", 0)
        clock.tick(2)
        progress.end_stage(0)
        clock.tick(0.5)
        progress.stage("train", 0)
        clock.tick(1)
        progress.iteration({}, 0)
    assert "3.5 s (rollout 2.0 train 1.0 between stages 0.5)" in stream.getvalue()


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


def test_the_block_shows_the_speed_of_the_stage_its_reward_and_the_time_left():
    clock = Clock()
    progress = Progress("spell", 10, stream=io.StringIO(), clock=clock)
    progress.stage("rollout", total=256)
    clock.tick(4)
    progress.stage("rollout", done=64, total=256, tokens=2000, reward=0.41, note="2 engines")
    run, stage = block(progress)
    assert run.split() == ["spell", "0/10", "4.0", "s"]
    assert stage.split("━")[0].strip() == "rollout"
    assert stage.split("━")[-1].strip() == (
        "64/256  500 tokens/s  reward 0.410  2 engines  4.0 s  12.0 s left"
    )


def test_stages_of_iterations_in_flight_have_rows_and_clocks_of_their_own():
    stream = io.StringIO()
    clock = Clock()
    progress = Progress("spell", 10, stream=stream, clock=clock)
    progress.stage("rollout", 0, tokens=0)
    clock.tick(2)
    for second in range(1, 5):
        # Two watchers report by turns, as those of `async_buffer_size: 1` do.
        progress.stage("rollout", 1, done=1, total=8, tokens=100 * second)
        progress.stage("train", 0)
        clock.tick(1)
    rows = [" ".join(row.replace("━", " ").split()) for row in block(progress)[1:]]
    assert rows == ["train 0 4.0 s", "rollout 1 1/8 100 tokens/s 4.0 s 28.0 s left"]
    progress.iteration({}, 0)
    assert "  6.0 s (rollout 2.0 train 4.0)" in stream.getvalue()
    clock.tick(1)
    progress.end_stage(1)
    progress.stage("train", 1)
    clock.tick(1)
    progress.iteration({}, 1)
    assert "  2.0 s (rollout 5.0 train 1.0)" in stream.getvalue()


def test_the_time_of_rollouts_that_overlap_counts_once():
    clock = Clock()
    progress = Progress("spell", 10, stream=io.StringIO(), clock=clock)
    assert progress.busy_seconds("rollout") == 0
    progress.stage("rollout", 0)
    clock.tick(1)
    progress.stage("rollout", 1)
    clock.tick(1)
    progress.stage("train", 0)
    clock.tick(1)
    progress.end_stage(1)
    clock.tick(5)
    assert progress.busy_seconds("rollout") == 3
    progress.stage("rollout", 2)
    clock.tick(2)
    progress.iteration({}, 0)
    clock.tick(4)
    assert progress.busy_seconds("rollout") == 4


def test_a_stage_of_no_iteration_ends_with_its_block():
    clock = Clock()
    progress = Progress("spell", 10, stream=io.StringIO(), clock=clock)
    progress.stage("train", 3)
    with progress.running("restore", note="from the store"):
        assert len(block(progress)) == 3
        clock.tick(1)
    (_, train) = block(progress)
    assert train.strip().startswith("train")


def block_of_a_run(width: int) -> list[str]:
    """The block after iterations with rising reward."""
    clock = Clock()
    progress = Progress("spell_backward", 150, stream=io.StringIO(), clock=clock)
    for reward in (0.1, 0.2, 0.3, 0.4):
        progress.stage("train")
        clock.tick(2)
        progress.iteration(
            {"reward": reward, "Δlogp": "1.1e-06 (limit 0.0001)", "tok/s": 1234, "loss": 9.31e-10}
        )
    progress.stage("train")
    return block(progress, width)


def test_the_block_shows_the_values_of_the_last_iteration_and_the_curve_of_the_reward():
    run, values, stage = block_of_a_run(160)
    assert run.endswith("4/150  8.0 s  4:52 left")
    assert values == "  reward 0.400 ▁▃▆█  Δlogp 1.1e-06 (limit 0.0001)  tok/s 1,234  loss 0.000"
    assert stage.strip().startswith("train")


@pytest.mark.parametrize("width", [40, 60, 80, 160])
def test_no_row_of_the_block_is_wider_than_the_terminal(width):
    rows = block_of_a_run(width)
    assert max(map(len, rows)) <= width
    assert "loss 0.000" in " ".join(rows)


def test_a_terminal_without_unicode_gets_no_curve():
    progress = Progress("spell", 2, stream=io.StringIO())
    progress.iteration({"reward": 0.0})
    progress.iteration({"reward": 1.0})
    console = Console(file=io.TextIOWrapper(io.BytesIO(), encoding="ascii"), width=80)
    with console.capture() as captured:
        console.print(progress)
    assert "reward 1.000" in captured.get()
    assert captured.get().isascii()


def test_a_long_curve_is_the_means_of_equal_parts():
    assert sparkline([0.0, 0.0, 1.0, 1.0, 0.0, 2.0, 2.0, 2.0], 4) == "▁▅▅█"
    assert sparkline([0.5] * 9, 4) == "▁▁▁▁"
    assert len(sparkline([float(number % 7) for number in range(2000)], 40)) == 40


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (9.31e-10, "0.000"),
        (-9.31e-10, "0.000"),
        (-0.0123, "-0.012"),
        (1234.5678, "1,234.568"),
        (1e-300, "0.000"),
        (math.nan, "nan"),
        (1234, "1,234"),
        ("1e-06 of 0.0001", "1e-06 of 0.0001"),
    ],
)
def test_values_are_in_fixed_notation_with_three_decimals(value, text):
    assert value_text(value) == text


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
