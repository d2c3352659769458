"""The table of points is whole, and what it names is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rlpipe.config.problems import all_keys
from rlpipe.slime.args import FLAGS
from tools import flags
from tools.points import POINTS

TESTS = Path(__file__).parents[1]
NUMBERS = [
    *(
        range(40, 49),
        range(50, 60),
        range(60, 66),
        range(70, 81),
        range(90, 103),
        range(110, 119),
        range(120, 125),
    ),
    *(
        range(130, 139),
        range(140, 146),
        range(150, 161),
        range(170, 188),
        range(190, 195),
        range(200, 205),
        range(210, 213),
    ),
    range(220, 223),
]
"""The points of sections 3 to 17 of the checklist."""


def test_every_point_is_in_the_table_and_no_other():
    assert list(POINTS) == [f"S-{number:03}" for numbers in NUMBERS for number in numbers]


def test_every_point_has_a_key_or_says_how_it_is_kept():
    kept = {"S-121", "S-122", "S-176", "S-177"}
    silent = {number for number, point in POINTS.items() if not point.keys and not point.note}
    assert silent <= kept | {"S-111"}


def test_every_key_of_a_point_is_in_the_configuration():
    assert {key for point in POINTS.values() for key in point.keys.split()} - set(
        all_keys()
    ) == set()


def test_every_test_of_a_point_is_there():
    assert {point.test for point in POINTS.values() if not (TESTS / point.test).is_file()} == set()


def test_every_flag_that_a_point_names_is_taken_or_refused_by_the_table():
    named = {
        word[2:].replace("-", "_")
        for point in POINTS.values()
        for word in point.known.split()
        if word.startswith("--")
    }
    own = {name for name in named if not name.startswith("sglang_")}
    assert own - FLAGS.keys() == {
        "head",
        "address",
        "recompute_granularity",
        "recompute_method",
        "recompute_num_layers",
    }


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["eval-interval"], "evaluation.eval_interval"),
        (["lora_rank"], "refused: LoRA is not supported"),
        (["use-fault"], "changes nothing: engines are always watched"),
        (["ckpt-format"], "only torch_dist"),
        (["sglang-*"], "names of sglang"),
        (["--points", "S-137"], "data.num_data_workers"),
    ],
)
def test_the_tables_are_printed(
    arguments: list[str],
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(sys, "argv", ["tools.flags", *arguments])
    assert flags.main() == 0
    assert line in capsys.readouterr().out


def test_a_name_that_nothing_has_ends_with_1(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["tools.flags", "no such flag"])
    assert flags.main() == 1


def test_a_list_of_which_only_the_head_is_read_ends_without_a_word():
    command = [sys.executable, "-m", "tools.flags"]
    with subprocess.Popen(
        command, cwd=TESTS.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout and process.stdout.readline()
        process.stdout.close()
        assert process.stderr and process.stderr.read() == ""
    assert process.returncode in (0, 141)
