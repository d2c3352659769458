"""Child processes of tests, forked from one process that has imported the store.

A spawned process imports the store and the S3 client again: 0.7 CPU seconds.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping
from multiprocessing.context import ForkServerContext
from multiprocessing.pool import Pool

PRELOADED = ["s3fs", "tests.store.drivers"]


def fork_server(*preloaded: str) -> ForkServerContext:
    """Return the context of the fork server. Its first start imports these modules and the store's.

    Children have the environment of that start: see `adopt`.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*preloaded, *PRELOADED])
    return context


def pool(number: int) -> Pool:
    """Return a pool of processes with the present environment, to be entered."""
    return fork_server().Pool(number, initializer=adopt, initargs=(dict(os.environ),))


def adopt(environment: Mapping[str, str]) -> None:
    """Replace the environment of this process."""
    os.environ.clear()
    os.environ.update(environment)
