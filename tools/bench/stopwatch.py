"""Measure seconds and memory of work on the device."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


def timed(work: Callable[[], Result]) -> tuple[float, float, Result]:
    """Return (seconds until the device is idle, peak GiB, result of `work`).

    The peak is torch's allocated memory on the GPU. Without CUDA it is the largest resident size of
    the process so far.
    """
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    started_s = time.perf_counter()
    result = work()
    if cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started_s
    peak_bytes = (
        torch.cuda.max_memory_allocated()
        if cuda
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )
    return seconds, peak_bytes / 2**30, result
