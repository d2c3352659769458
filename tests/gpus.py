"""The GPUs that tests may use. One can stand in for several: `TEST_GPUS=0,0,0,0 pytest -m gpu`; for
a program that makes a Ray

    TEST_GPUS=0,0,0,0 python -m tests.gpus python -m tests.soak.chaos --ranks 2 --engines 2 …

NCCL refuses two ranks on one GPU of one host; so every process calls itself a host of its own
(`one_gpu/sitecustomize.py`), and what they send each other goes through sockets. All else is as on
several GPUs but speed: kernels that wait for each other take turns on the one there is.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

ONE_GPU = Path(__file__).with_name("one_gpu")
VARIABLE = "TEST_GPUS"


def visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them, one for each that a test may take."""
    if named := os.environ.get(VARIABLE):
        return named.split(",")
    import torch

    numbers = [str(number) for number in range(torch.cuda.device_count())]
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if numbers and named else numbers


def environment(gpus: Sequence[str]) -> dict[str, str]:
    """What a process is to be started with that makes a Ray of these."""
    several = (
        {"RAY_OVERRIDE_RESOURCES": json.dumps({"GPU": len(gpus)}), **_hosts()}
        if len(set(gpus)) < len(gpus)
        else {}
    )
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus), **several}


def prepare() -> None:
    """Have NCCL join this process and those that it starts, if some of their GPUs are one."""
    named = os.environ.get(VARIABLE, "").split(",")
    if len(set(named)) < len(named):
        os.environ.update(_hosts())
        os.environ["NCCL_HOSTID"] = f"{os.uname().nodename}-{os.getpid()}"


def _hosts() -> dict[str, str]:
    paths = [str(ONE_GPU), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, paths)))}


if __name__ == "__main__":
    os.execvpe(sys.argv[1], sys.argv[1:], {**os.environ, **environment(visible_gpus())})
