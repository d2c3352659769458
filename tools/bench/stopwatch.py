"""Seconds and memory of a piece of work on the device."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import TypeVar

import torch

Answer = TypeVar("Answer")


def timed(work: Callable[[], Answer]) -> tuple[float, float, Answer]:
    """(seconds until the device is done, GiB at the peak, the answer).

    The peak is what torch had allocated on the GPU; without CUDA the process's largest resident
    size so far.
    """
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    begun_s = time.perf_counter()
    answer = work()
    if cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begun_s
    held = (
        torch.cuda.max_memory_allocated()
        if cuda
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )
    return seconds, held / 2**30, answer
