"""Read utilization and used memory of NVIDIA GPUs through NVML.

NVML is the Python package `nvidia-ml-py`, which SGLang installs for GPUs. Without it, without a
driver, and after any error of NVML there are no readings: a run does not need them.

Entry points: `GpuReader` reads some GPUs once, `GpuWatch` reads them during a block.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple

INTERVAL_S = 1.0
"""Seconds between two readings of `GpuWatch`. NVML averages utilization over up to a second."""


class GpuReading(NamedTuple):
    """State of one GPU."""

    name: str
    utilization: float
    """Share of the last second or less in which a kernel ran, 0 to 1."""
    used_bytes: int
    """Used memory, of all processes."""


class GpuReader:
    """Reads some GPUs of this machine."""

    def __init__(self, gpus: Sequence[str | int]) -> None:
        """`gpus`: numbers or UUIDs, as in CUDA_VISIBLE_DEVICES."""
        self._handles: list[Any] = []
        try:
            self._nvml: Any = importlib.import_module("pynvml")
        except ImportError:
            return
        try:
            self._nvml.nvmlInit()
            self._handles = [self._handle(str(gpu)) for gpu in gpus]
        except (self._nvml.NVMLError, ValueError):
            self._handles = []

    def read(self) -> list[GpuReading]:
        """Return the state of each GPU; [] if one cannot be read. Takes about a millisecond."""
        if not self._handles:
            return []
        try:
            return [self._reading(handle) for handle in self._handles]
        except self._nvml.NVMLError:
            return []

    def _handle(self, gpu: str) -> Any:
        if gpu.isdigit():
            return self._nvml.nvmlDeviceGetHandleByIndex(int(gpu))
        return self._nvml.nvmlDeviceGetHandleByUUID(gpu)

    def _reading(self, handle: Any) -> GpuReading:
        name = self._nvml.nvmlDeviceGetName(handle)
        return GpuReading(
            # Older releases return bytes.
            name.decode() if isinstance(name, bytes) else str(name),
            self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            int(self._nvml.nvmlDeviceGetMemoryInfo(handle).used),
        )


def visible_gpus() -> list[str]:
    """Return the GPUs of CUDA_VISIBLE_DEVICES; [] without the variable."""
    return [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu.strip()]


def gpu_metrics(work: str, readings: Sequence[GpuReading]) -> dict[str, float]:
    """Return `perf/<work>_gpu_utilization`, the mean, and `_gpu_used_bytes`, the largest."""
    if not readings:
        return {}
    return {
        f"perf/{work}_gpu_utilization": sum(one.utilization for one in readings) / len(readings),
        f"perf/{work}_gpu_used_bytes": float(max(one.used_bytes for one in readings)),
    }


class GpuWatch:
    """Context manager that reads GPUs every `INTERVAL_S` and at the end of its block."""

    def __init__(self, reader: GpuReader) -> None:
        self.readings: list[GpuReading] = []
        self._reader = reader
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> GpuWatch:
        if self._reader.read():
            self._thread = threading.Thread(target=self._watch, name="gpu-watch", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            self.readings += self._reader.read()
        self.readings += self._reader.read()
