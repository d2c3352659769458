"""With what a run computes, in words (tasks.machine)."""

from __future__ import annotations

from rlpipe.types import Stage
from tasks.machine import distinct, line, machines_of

TRAINER = {
    "device": "NVIDIA H200",
    "torch": "2.11",
    "attention": "flash_attention_3",
    "nccl": "2.28",
}
ENGINE = {"device": "cuda", "sglang": "0.5.15", "attention": "fa3", "mem_fraction_static": 0.8}


def test_engines_that_are_alike_are_named_once():
    assert distinct([ENGINE, {}, dict(ENGINE), {**ENGINE, "attention": "triton"}]) == [
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


def test_the_line_says_what_matters_most():
    assert line({"trainer": TRAINER, "engines": ENGINE}) == (
        "trainer: device NVIDIA H200, torch 2.11, attention flash_attention_3; "
        "engines: device cuda, sglang 0.5.15, attention fa3, mem_fraction_static 0.8"
    )
