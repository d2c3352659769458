"""Start Ray's workers from a template process, which has imported the packages of all actors.

Ray starts this file in place of its `default_worker.py` (`local_ray`):

    python .../rlpipe/actors/ray/worker.py ARGUMENTS

It asks the template for a worker and waits for its end. Without a template it is the worker itself.
Ray finds a worker by its identifier among the arguments, not by the PID that it started.
"""

from __future__ import annotations

import importlib
import os
import runpy
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the folder of this file, which is not for the modules of a worker
    sys.path.insert(0, str(Path(__file__).parents[3]))

from rlpipe.system import forked

if __name__ == "__main__":
    del sys.path[0]

TEMPLATE = "worker"
"""Name of the template."""


PACKAGES = (
    "rlpipe.engines.megatron.engine",
    "rlpipe.engines.megatron.train.critic_engine",
    "rlpipe.engines.sglang.external",
    "rlpipe.engines.sglang.router",
    "rlpipe.rollout.generators",
    "rlpipe.rollout.pool",
    "rlpipe.sync.fp8",
    "rlpipe.sync.probe",
    "rlpipe.sync.session",
    "rlpipe.sync.transports.registry",
    "attrs",
    "google.protobuf.json_format",
    "jsonschema",
    "msgpack",
    "requests",
    "uvloop",
)
"""What actors import, and what Ray imports. Not Ray itself: its library reads the environment of a
worker (RAY_JOB_ID, RAY_RAYLET_PID) when it is loaded, which takes 0.07 s."""


def load() -> None:
    """Import the packages of all actors, for the template."""
    from rlpipe.system.imports import quick_imports

    with quick_imports():
        for package in PACKAGES:
            importlib.import_module(package)
    assert "ray" not in sys.modules


def main(argv: list[str]) -> None:
    """Work until Ray ends this process, which the template has forked."""
    # As in an actor that imports torch itself: Ray sets the variable first, for its share of CPUs.
    if "OMP_NUM_THREADS" not in os.environ:
        sys.modules["torch"].set_num_threads(1)
    _work(argv)


def _start(argv: list[str]) -> int:
    """Work in a forked process, or in this one; return the exit status."""
    if not sys.flags.safe_path:
        sys.path.insert(0, str(Path(_script()).parent))
    process = forked.fork(
        TEMPLATE,
        "rlpipe.actors.ray.worker",
        argv,
        environment=dict(os.environ),
        streams=(0, 1, 2),
        leads_session=False,
    )
    if process is None:
        _work(argv)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: os.kill(process.pid, signal.SIGTERM))
    status = process.wait()
    assert status is not None
    return status if status >= 0 else 128 - status


def _work(argv: list[str]) -> None:
    sys.argv = [_script(), *argv]
    runpy.run_path(sys.argv[0], run_name="__main__")


def _script() -> str:
    """Return the path of Ray's own program of a worker, without importing Ray."""
    ray = find_spec("ray")
    assert ray is not None and ray.submodule_search_locations is not None
    return str(Path(ray.submodule_search_locations[0]) / "_private/workers/default_worker.py")


if __name__ == "__main__":
    sys.exit(_start(sys.argv[1:]))
