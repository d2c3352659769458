"""One conversion in a process of its own, which sees no GPU:

    python -m rlpipe.engines.megatron.checkpoint.conversion [--rlpipe-parent PID] JOB

JOB is JSON: `to` ("torch_dist" or "huggingface") and the arguments of `convert.to_torch_dist` or
`convert.to_hf`. Answers in lines of JSON on standard output: `{"done": …, "total": …, "what": …}`
as it goes, at the end `{"report": …}` or `{"error": …}`.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlpipe.errors import RlpipeError
from rlpipe.system import orphan

os.environ["CUDA_VISIBLE_DEVICES"] = ""
PATHS = ("hf_dir", "save", "checkpoint", "output", "origin")


def main() -> int:
    """Exit codes: 0 done, 1 it could not be done."""
    parent, words = orphan.take_parent(sys.argv[1:])
    if parent is not None:
        orphan.end_with(parent)
    from rlpipe.engines.megatron.checkpoint.conversion.convert import to_hf, to_torch_dist

    job: dict[str, Any] = json.loads(words[0])
    convert = {"torch_dist": to_torch_dist, "huggingface": to_hf}[job.pop("to")]
    job = {name: Path(value) if name in PATHS and value else value for name, value in job.items()}
    try:
        report = convert(
            **job, progress=lambda done, total, what: _say(done=done, total=total, what=what)
        )
    except RlpipeError as error:
        _say(error={"type": type(error).__name__, "text": str(error)})
        return 1
    _say(report=asdict(report))
    return 0


def _say(**content: Any) -> None:
    print(json.dumps(content), flush=True)


if __name__ == "__main__":
    sys.exit(main())
