"""Machine facts of a run as artifacts (tasks.artifacts, tasks.sync)."""

from __future__ import annotations

from rlpipe.types import Stage
from tasks.artifacts import machines_line, machines_of
from tasks.sync import distinct_machines

TRAINER = {
    "device": "NVIDIA H200",
    "torch": "2.11",
    "attention": "flash_attention_3",
    "nccl": "2.28",
}
ENGINE = {"device": "cuda", "sglang": "0.5.15", "attention": "fa3", "mem_fraction_static": 0.8}


def test_equal_engines_are_listed_once():
    assert distinct_machines([ENGINE, {}, dict(ENGINE), {**ENGINE, "attention": "triton"}]) == [
        ENGINE,
        {**ENGINE, "attention": "triton"},
    ]
    outputs = {Stage.TRAIN: {"machine": TRAINER}, Stage.SYNC: {"machines": [ENGINE]}}
    assert machines_of(outputs) == {"trainer": TRAINER, "engines": ENGINE}
    both = {Stage.SYNC: {"machines": [ENGINE, TRAINER]}}
    assert list(machines_of(both)) == ["engines 0", "engines 1"]
    assert machines_of({Stage.TRAIN: {"steps": []}, Stage.ROLLOUT: {}}) == {}, (
        "a node of an older run has none"
    )


def test_the_line_shows_the_main_facts():
    assert machines_line({"trainer": TRAINER, "engines": ENGINE}) == (
        "trainer: device NVIDIA H200, torch 2.11, attention flash_attention_3; "
        "engines: device cuda, sglang 0.5.15, attention fa3, mem_fraction_static 0.8"
    )
