"""The trace of a run (rlpipe.observe.trace)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlpipe.errors import ObjectCorrupt
from rlpipe.observe.trace import FILE, read_trace, traced
from tests.processes import pool

LINES = 200


def write_many(folder: Path) -> None:
    for number in range(LINES):
        with traced(folder, "train", number):
            pass


def test_a_traced_block_writes_begin_and_end(tmp_path: Path):
    with traced(tmp_path, "train", 3):
        (begun,), _ = read_trace(tmp_path / FILE)
        assert begun[1:] == (3, "train", "begin", os.getpid(), None)
    (_, ended), _ = read_trace(tmp_path / FILE)
    assert ended[1:] == (3, "train", "end", os.getpid(), None)
    assert ended.time >= begun.time


def test_a_failed_block_writes_the_type_of_its_error(tmp_path: Path):
    with pytest.raises(ZeroDivisionError), traced(tmp_path, "sync", None):
        raise ZeroDivisionError
    assert [(e.event, e.error) for e in read_trace(tmp_path / FILE)[0]] == [
        ("begin", None),
        ("failed", "ZeroDivisionError"),
    ]


def test_an_unwritable_trace_does_not_hide_an_error_of_the_block(tmp_path: Path):
    with pytest.raises(ZeroDivisionError), traced(tmp_path / "not there", "train", 0):
        raise ZeroDivisionError
    with traced(tmp_path / "not there", "train", 0):
        pass


def test_reading_continues_at_the_offset_and_skips_incomplete_lines(tmp_path: Path):
    path = tmp_path / FILE
    assert read_trace(path) == ([], 0)
    with traced(tmp_path, "train", 0):
        pass
    first, offset = read_trace(path)
    with path.open("a") as trace:
        trace.write('{"time": 1.0, "iteration"')
    assert len(first) == 2
    assert read_trace(path, offset) == ([], offset)
    with path.open("a") as trace:
        trace.write(': 1, "stage": "train", "event": "begin", "pid": 7}\n')
    (late,), end = read_trace(path, offset)
    assert (late.iteration, late.pid, end) == (1, 7, path.stat().st_size)


def test_concurrent_processes_write_complete_lines(tmp_path: Path):
    with pool(3) as writers:
        writers.map(write_many, [tmp_path] * 3)
    events, _ = read_trace(tmp_path / FILE)
    assert len(events) == 3 * 2 * LINES


@pytest.mark.parametrize(
    "line",
    ["", "nonsense", "[]", '{"time": 1.0}', '{"time": 1.0, "iter{"time": 2.0}', "\xff", '"x"'],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str):
    with traced(tmp_path, "train", 0):
        pass
    path = tmp_path / FILE
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + line.encode("latin-1") + b"\n")
    with pytest.raises(ObjectCorrupt, match=f"{FILE}, byte {size}: not an event"):
        read_trace(path)
