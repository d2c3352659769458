"""Run one conversion in a separate process without GPUs.

    python -m rlpipe.engines.megatron.checkpoint.conversion [--rlpipe-parent PID] JOB

JOB is JSON: `to` ("torch_dist", "huggingface", "adam_state" or "peft") and the arguments of
`convert.to_torch_dist`, `convert.to_hf`, `convert.to_adam_state` or `peft.to_peft`. The process
writes lines of JSON to standard output: `{"done": …, "total": …, "what": …}` as progress (`to_peft`
has none), and at the end `{"report": …}` or `{"error": …}`.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rlpipe.errors import RlpipeError
from rlpipe.system import orphan

os.environ["CUDA_VISIBLE_DEVICES"] = ""
PATHS = ("hf_dir", "save", "checkpoint", "output", "origin", "base")


def main() -> int:
    """Return the exit code: 0 for success, 1 for a failed conversion."""
    parent, words = orphan.take_parent(sys.argv[1:])
    if parent is not None:
        orphan.end_with(parent)
    from rlpipe.engines.megatron.checkpoint.conversion.convert import (
        to_adam_state,
        to_hf,
        to_torch_dist,
    )
    from rlpipe.engines.megatron.checkpoint.conversion.peft import to_peft

    job: dict[str, Any] = json.loads(words[0])
    progress = {
        "progress": lambda done, total, what: _print_message(done=done, total=total, what=what)
    }
    convert = {
        "torch_dist": partial(to_torch_dist, **progress),
        "huggingface": partial(to_hf, **progress),
        "adam_state": partial(to_adam_state, **progress),
        "peft": to_peft,
    }[job.pop("to")]
    job = {name: Path(value) if name in PATHS and value else value for name, value in job.items()}
    try:
        report = convert(**job)
    except RlpipeError as error:
        _print_message(error={"type": type(error).__name__, "text": str(error)})
        return 1
    _print_message(report=asdict(report))
    return 0


def _print_message(**content: Any) -> None:
    print(json.dumps(content), flush=True)


if __name__ == "__main__":
    sys.exit(main())
