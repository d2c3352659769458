"""Command lines that a checkout of slime starts training with.

    scripts(checkout, scratch)      one launch of each shell script that starts training
    launchers(checkout, scratch)    each launch of its Python launchers (end-to-end tests)

A launcher runs in a process of its own, in which `exec_command` records the command instead of
running it. bash expands a recorded command as it expands a script (`rlpipe.slime.launch_script`).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rlpipe.errors import RlpipeError
from rlpipe.slime.launch_script import train_words

STARTS_TRAINING = re.compile(r"\btrain(_async)?\.py\b")
LAUNCHES = re.compile(r"\bexecute_train\(")
LIBRARY = "slime/utils/external_utils/command_utils.py"
VARIABLES = {
    "BASE_DIR": "/root",
    "BASE_FOLDER": "/root",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "6000",
    "WORLD_SIZE": "1",
    "RANK": "0",
    "HOSTFILE": "/dev/null",
    "WANDB_KEY": "none",
}
"""Variables that launch scripts read from the environment of a cluster."""
TIMEOUT_S = 120.0
_RECORDER = """
import json, os, runpy, shutil, sys, types
from pathlib import Path

checkout, launcher = sys.argv[1:]
sys.path[:0] = [checkout, str(Path(launcher).parent)]
commands = []

def exec_command(command, capture_output=False, **_):
    commands.append(command)
    return "0"

misc = types.ModuleType("slime.utils.misc")
misc.exec_command = exec_command
sys.modules["slime.utils.misc"] = misc
import slime.utils.external_utils.command_utils as library

execute_train = library.execute_train

def start(*args, before_ray_job_submit=None, **kwargs):
    return execute_train(*args, **kwargs)

library.execute_train = misc.execute_train = start
sys.argv = [launcher]
functions = runpy.run_path(launcher, run_name="launcher")
commands.clear()
# The launch reads files that the launcher removes at its end.
os.unlink = os.remove = shutil.rmtree = lambda *_, **__: None
try:
    functions["execute"]()
finally:  # its checks of the result fail
    print(json.dumps(commands), file=sys.__stdout__)
"""
"""Program that runs a launcher's `execute` and prints its shell commands as a JSON list."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One start of training: its name in the checkout, and its words or why it has none."""

    name: str
    words: tuple[str, ...] = ()
    problem: str = ""


def scripts(checkout: Path, scratch: Path) -> Iterator[Launch]:
    """Yield the launch of each shell script that starts training, in order of path.

    `scratch`: folder of the files that the scripts write.
    """
    for script in sorted(checkout.rglob("*.sh")):
        if STARTS_TRAINING.search(script.read_text(encoding="utf-8")):
            yield _launch(script.relative_to(checkout).as_posix(), script, checkout, scratch)


def launchers(checkout: Path, scratch: Path) -> Iterator[Launch]:
    """Yield each launch of the Python launchers, in order of path. A launcher can have several.

    `scratch`: folder of the files that the launchers write.
    """
    for launcher in sorted(checkout.rglob("*.py")):
        name = launcher.relative_to(checkout).as_posix()
        if name != LIBRARY and LAUNCHES.search(launcher.read_text(encoding="utf-8")):
            yield from _launches(name, launcher, checkout, scratch)


def _launches(name: str, launcher: Path, checkout: Path, scratch: Path) -> Iterator[Launch]:
    """Yield the launches of one launcher, or one with the problem."""
    done = subprocess.run(
        [sys.executable, "-c", _RECORDER, str(checkout), str(launcher)],
        env={**os.environ, **_variables(checkout), "TMPDIR": str(scratch)},
        cwd=checkout,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    lines = done.stdout.splitlines()
    commands = json.loads(lines[-1]) if lines and lines[-1].startswith("[") else []
    starts = [command for command in commands if STARTS_TRAINING.search(command)]
    if not starts:
        error = (done.stderr.strip().splitlines() or ["no command"])[-1]
        yield Launch(name, problem=f"the launcher does not start training: {error}")
    for number, command in enumerate(starts, start=1):
        script = scratch / f"{launcher.stem}-{number}.sh"
        script.write_text(command, encoding="utf-8")
        yield _launch(f"{name}#{number}" if len(starts) > 1 else name, script, checkout, scratch)


def _launch(name: str, script: Path, checkout: Path, scratch: Path) -> Launch:
    try:
        return Launch(name, tuple(train_words(script, _variables(checkout), scratch)))
    except RlpipeError as error:
        return Launch(name, problem=str(error))


def _variables(checkout: Path) -> Mapping[str, str]:
    return {**VARIABLES, "SLIME_DIR": str(checkout)}
