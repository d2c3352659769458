"""Readings of GPUs (rlpipe.system.gpus), with a stand-in for NVML."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from rlpipe.system import gpus
from rlpipe.system.gpus import GpuReader, GpuReading, GpuWatch, gpu_metrics, visible_gpus


class NvmlError(Exception):
    """As pynvml's NVMLError."""


class Nvml:
    """GPUs with numbers 0 and 1, and the UUID GPU-b of number 1. A busy GPU uses 7 GB."""

    def __init__(self) -> None:
        self.driver = True
        self.lost = False
        self.busy = {0: 0, 1: 100}

    def init(self) -> None:
        if not self.driver:
            raise NvmlError("driver not loaded")

    def by_index(self, index: int) -> int:
        if index not in self.busy:
            raise NvmlError("invalid argument")
        return index

    def by_uuid(self, uuid: str) -> int:
        if uuid != "GPU-b":
            raise NvmlError("not found")
        return 1

    def name(self, handle: int) -> Any:
        return b"NVIDIA H100 PCIe" if handle else "NVIDIA H200"

    def utilization(self, handle: int) -> Any:
        if self.lost:
            raise NvmlError("GPU is lost")
        return SimpleNamespace(gpu=self.busy[handle], memory=0)

    def memory(self, handle: int) -> Any:
        return SimpleNamespace(used=7 * 10**9 if self.busy[handle] else 10**9)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    made = Nvml()
    functions = {
        "NVMLError": NvmlError,
        "nvmlInit": made.init,
        "nvmlDeviceGetHandleByIndex": made.by_index,
        "nvmlDeviceGetHandleByUUID": made.by_uuid,
        "nvmlDeviceGetName": made.name,
        "nvmlDeviceGetUtilizationRates": made.utilization,
        "nvmlDeviceGetMemoryInfo": made.memory,
    }
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(**functions))
    return made


def test_gpus_are_read_by_number_and_by_uuid(nvml: Nvml):
    first = GpuReading("NVIDIA H200", 0.0, 10**9)
    second = GpuReading("NVIDIA H100 PCIe", 1.0, 7 * 10**9)
    assert GpuReader(["0", 1]).read() == [first, second]
    assert GpuReader(["GPU-b"]).read() == [second]


def test_without_nvml_driver_or_gpu_there_are_no_readings(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch
):
    assert GpuReader(["7"]).read() == []
    assert GpuReader(["GPU-c", "0"]).read() == []
    reader = GpuReader(["0"])
    nvml.lost = True
    assert reader.read() == []
    nvml.driver = False
    assert GpuReader(["0"]).read() == []
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert GpuReader(["0"]).read() == []


def test_a_watch_reads_during_its_block_and_at_the_end(nvml: Nvml, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpus, "INTERVAL_S", 0.01)
    read_twice = threading.Event()
    reader = GpuReader(["1"])
    with GpuWatch(reader) as watch:
        while len(watch.readings) < 2:
            read_twice.wait(0.01)
        nvml.busy[1] = 0
    assert watch.readings[0].utilization == 1.0
    assert watch.readings[-1].utilization == 0.0
    with GpuWatch(GpuReader([])) as idle:
        pass
    assert idle.readings == []


def test_metrics_are_the_mean_utilization_and_the_largest_memory():
    readings = [GpuReading("x", 0.25, 5), GpuReading("x", 0.75, 9)]
    assert gpu_metrics("train", readings) == {
        "perf/train_gpu_utilization": 0.5,
        "perf/train_gpu_used_bytes": 9.0,
    }
    assert gpu_metrics("train", []) == {}


def test_visible_gpus_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-b")
    assert visible_gpus() == ["3", "GPU-b"]
    for hidden in ("", " "):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert visible_gpus() == []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible_gpus() == []
