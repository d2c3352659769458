"""A run as a timeline (rlpipe.observe.perfetto)."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from rlpipe.observe.perfetto import ENGINES, STAGES, Response, timeline, write_timeline
from rlpipe.observe.trace import Event, Work, works

EVENTS = [
    Event(10.0, 0, "rollout", "begin", 1),
    Event(12.0, 0, "rollout", "end", 1),
    Event(11.0, 1, "rollout", "begin", 2),
    Event(13.0, 1, "rollout", "end", 2),
    Event(12.5, 0, "train", "begin", 1),
    Event(13.5, 0, "train", "failed", 1, "ActorLost"),
    Event(14.0, 0, "train", "begin", 1),
]


def response(index: int, begin: float, end: float, engine: str = "http://e:1") -> Response:
    return Response(0, "run:0", index, engine, begin, end, 7, "completed", 1.0)


def read(path: Path) -> list[dict]:
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def test_overlapping_stages_have_rows_and_unfinished_work_is_omitted(tmp_path: Path):
    count = write_timeline(tmp_path / "t.json.gz", works(EVENTS), [])
    events = read(tmp_path / "t.json.gz")
    assert count == len(events) and {event["pid"] for event in events} == {STAGES}
    spans = [
        (event["name"], event["tid"], event["ts"], event["dur"])
        for event in events
        if event["ph"] == "X"
    ]
    assert spans == [
        ("rollout 0", 1, 10_000_000, 2_000_000),
        ("rollout 1", 2, 11_000_000, 2_000_000),
        ("train 0", 3, 12_500_000, 1_000_000),
    ]
    assert [event["args"].get("error") for event in events if event["ph"] == "X"] == [
        None,
        None,
        "ActorLost",
    ]


def test_each_engine_has_as_many_rows_as_concurrent_responses(tmp_path: Path):
    found = [
        response(0, 1.0, 3.0),
        response(1, 2.0, 4.0),
        response(2, 3.0, 5.0),
        response(0, 1.0, 2.0, "http://e:2"),
    ]
    write_timeline(tmp_path / "t.json.gz", [], found)
    events = [event for event in read(tmp_path / "t.json.gz") if event["pid"] == ENGINES]
    rows = [event["tid"] for event in events if event["ph"] == "X"]
    assert rows == [1, 2, 1, 3]
    counts = [
        event["args"]["responses"]
        for event in events
        if event["ph"] == "C" and event["name"].startswith("http://e:1")
    ]
    assert max(counts) == 2 and counts[-1] == 0
    assert {event["args"]["name"] for event in events if event["name"] == "thread_name"} == {
        "http://e:1",
        "http://e:2",
    }


def test_work_that_ends_before_its_start_has_duration_0():
    (span,) = [event for event in timeline([Work("train", 0, 2.0, 1.0)], []) if event["ph"] == "X"]
    assert (span["ts"], span["dur"]) == (2_000_000, 0)
