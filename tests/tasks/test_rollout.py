"""Metrics of engines during a rollout (tasks.rollout)."""

from __future__ import annotations

from typing import Any

import pytest

from rlpipe.engines.sglang.admin import EngineLoad
from rlpipe.system.gpus import GpuReading
from tasks.rollout import EngineReadings


def seen(load: EngineLoad | None, *gpus: GpuReading) -> dict[str, Any]:
    return {"alive": load is not None, "load": load, "gpus": list(gpus)}


def test_readings_are_means_over_engines_and_times():
    readings = EngineReadings()
    busy = GpuReading("NVIDIA H200", 1.0, 70)
    idle = GpuReading("NVIDIA H200", 0.0, 90)
    readings.add([seen(EngineLoad(8, 4, 0.5), busy), seen(None)])
    readings.add([seen(EngineLoad(2, 0, 0.25), idle), seen(EngineLoad(2, 2, 0.75), busy)])
    assert (readings.gpu, readings.engines) == ("NVIDIA H200", 2)
    assert readings.metrics() == pytest.approx(
        {
            "engine/running_requests": (8 + (2 + 2) / 2) / 2,
            "engine/queued_requests": (4 + (0 + 2) / 2) / 2,
            "engine/kv_cache_usage": 0.5,
            "perf/rollout_gpu_utilization": (1 + (0 + 1) / 2) / 2,
            "perf/rollout_gpu_used_bytes": 90.0,
        }
    )


def test_a_rollout_without_a_reading_has_no_engine_metrics():
    readings = EngineReadings()
    assert readings.metrics() == {}
    readings.add([seen(None)])
    assert (readings.metrics(), readings.gpu, readings.engines) == ({}, None, 0)
