"""Import every file of the user in a process of its own first, under a deadline.

    with trial(config) as importing:      # the process works meanwhile
        ...
        importing.wait()                  # ConfigError if a file is not to be imported

Importing a file runs its code, which may do anything: raise, end Python, sleep for ever, crash,
fork, print gigabytes. In the process of the command that would be a traceback, silence with exit
code 0, or a hang. Here it is a ConfigError that names the file. Classes of rewards and tools are
made once too, with the arguments they are given.

One process takes all files of a configuration, and files that were found well are not tried again
in this process. Code that comes with this project is not tried: the models of its recipes import
torch, which takes seconds.

A file that behaves differently the second time is caught by `hooks.load_hook`, as far as the
process survives. Not here: how a function is called.
"""

from __future__ import annotations

import inspect
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from pydantic import BaseModel

from rlpipe.config.guard import error_text, guarded
from rlpipe.config.hooks import GENERATE_NAMES, ROLLOUT_NAMES, hook_digest, load_hook
from rlpipe.errors import ConfigError
from rlpipe.system.child_processes import ended_how

TIMEOUT_KEY = "resources.import_timeout_s"
MOST_OUTPUT_BYTES = 8 * 1024**2
LAST_OUTPUT_BYTES = 1500
LOOK_INTERVAL_S = 0.1
OWN_CODE = Path(__file__).resolve().parents[2]
OWN_FOLDERS = ("rlpipe", "flows", "tasks", "tools", "deployments")
_well: set[str] = set()
"""What was found well in this process: keys of `_key`."""


@dataclass(frozen=True)
class UserFile:
    """One function or class of the user that a configuration names."""

    key: str
    path: str
    names: tuple[str, ...] = ()
    arguments: dict[str, Any] | None = None
    """What a class is made with; None: it is only imported."""


def user_files(config: BaseModel, key: str = "") -> list[UserFile]:
    """Every function and class of the user that a configuration names: fields called `path`,
    `maker` or `..._path`."""
    found: list[UserFile] = []
    for name in type(config).model_fields:
        value = getattr(config, name)
        here = f"{key}.{name}" if key else name
        if isinstance(value, BaseModel):
            found += user_files(value, here)
        elif isinstance(value, list | tuple) and any(isinstance(item, BaseModel) for item in value):
            found += [
                file
                for number, item in enumerate(value)
                for file in user_files(item, f"{here}.{number}")
            ]
        elif name in ("path", "maker") or name.endswith("_path"):
            paths = [value] if isinstance(value, str) else list(value or ())
            made = getattr(config, "arguments", None) if name == "path" else None
            found += [UserFile(here, path, NAMES.get(name, ()), made) for path in paths]
    return found


NAMES = {
    "custom_generate_function_path": GENERATE_NAMES,
    "rollout_function_path": ROLLOUT_NAMES,
    "eval_function_path": ROLLOUT_NAMES,
}
"""Field → what a function is called in a file whose path gives no name."""


class Trial:
    """A process that imports files. Made by `trial`."""

    def __init__(self, files: list[UserFile], timeout_s: float) -> None:
        self._files = files
        self._timeout_s = timeout_s
        self._output = bytearray()
        self._printed = 0
        self._process: subprocess.Popen[bytes] | None = None
        if files:
            self._begin()

    def wait(self) -> None:
        """Wait until all files are imported. Raises: ConfigError naming the first one that cannot
        be."""
        if self._process is None:
            return
        for number in range(len(self._files)):
            self._wait_for(number)
        _well.update(map(_key, self._files))
        self.end()

    def end(self) -> None:
        """End the process, and what the files have started in it."""
        process = self._process
        self._process = None
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(self._answers)
        assert process.stdout is not None
        process.stdout.close()

    def _begin(self) -> None:
        self._answers, theirs = os.pipe()
        told = {
            "path": sys.path,
            "answers": theirs,
            "parent": os.getpid(),
            "files": [asdict(file) for file in self._files],
        }
        path = os.pathsep.join([str(OWN_CODE), *filter(None, [os.environ.get("PYTHONPATH")])])
        with (
            tempfile.TemporaryFile() as task
        ):  # not a pipe: a process that dies at once does not read it
            task.write(json.dumps(told).encode())
            task.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rlpipe.config.trial"],
                stdin=task,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": path},
                pass_fds=[theirs],
                start_new_session=True,
            )
        os.close(theirs)
        assert self._process.stdout is not None
        self._left, self._open = b"", [self._answers, self._process.stdout.fileno()]

    def _wait_for(self, number: int) -> None:
        """The answer about one file."""
        file = self._files[number]
        until = time.monotonic() + self._timeout_s
        assert self._process is not None
        while b"\n" not in self._left:
            ended = self._process.poll() is not None
            came = self._take(0.0 if ended else LOOK_INTERVAL_S)
            if ended and not came:
                self._refuse(
                    file,
                    f"it ended the process that imported it: {ended_how(self._process.returncode)}",
                )
            if self._printed > MOST_OUTPUT_BYTES:
                self._refuse(file, f"it printed more than {MOST_OUTPUT_BYTES // 1024**2} MiB")
            if time.monotonic() > until:
                self._refuse(
                    file,
                    "it is still being imported",
                    expected=f"imported within {self._timeout_s:g} s ({TIMEOUT_KEY})",
                )
        line, _, self._left = self._left.partition(b"\n")
        if (error := json.loads(line)) is not None:
            raise ConfigError(error.pop("problem"), **error)

    def _take(self, timeout_s: float) -> bool:
        """Read what the process has answered and printed by now; False if there was nothing."""
        if not self._open:
            time.sleep(timeout_s)
            return False
        ready, _, _ = select.select(self._open, [], [], timeout_s)
        for descriptor in ready:
            piece = os.read(descriptor, 65536)
            if not piece:
                self._open.remove(descriptor)
            elif descriptor == self._answers:
                self._left += piece
            else:
                self._printed += len(piece)
                self._output = (self._output + piece)[-LAST_OUTPUT_BYTES:]
        return bool(ready)

    def _refuse(self, file: UserFile, found: str, expected: str | None = None) -> NoReturn:
        printed = self._output.decode(errors="replace").strip()
        raise ConfigError(
            "the file cannot be imported",
            where=f"{file.key}: {file.path}",
            found=f"{found}\n{printed}" if printed else found,
            expected=expected,
            do="a file is imported by several processes of a run, so it should only define things: "
            "put what shall run as a program under `if __name__ == '__main__':`, and slow work into the function",
        )


@contextmanager
def trial(config: BaseModel, timeout_s: float) -> Iterator[Trial]:
    """Begin to import all files of a configuration in a process of their own."""
    begun = Trial(_to_try(config), timeout_s)
    try:
        yield begun
    finally:
        begun.end()


def _to_try(config: BaseModel) -> list[UserFile]:
    chosen: dict[str, UserFile] = {}
    for file in user_files(config):
        if not _is_own(file.path) and (key := _key(file)) not in _well:
            chosen.setdefault(key, file)
    return list(chosen.values())


def _is_own(path: str) -> bool:
    """True for code of this project."""
    file = path.partition(".py:")[0] + ".py" if ".py:" in path else path
    if file.endswith(".py"):
        return any(Path(file).resolve().is_relative_to(OWN_CODE / folder) for folder in OWN_FOLDERS)
    return path.partition(".")[0] in OWN_FOLDERS


def _key(file: UserFile) -> str:
    """What is imported: the path, the source, and what a class is made with.

    A source that is not there is for `load_hook` to refuse.
    """
    try:
        digest = hook_digest(file.path)
    except ConfigError:
        digest = ""
    return json.dumps([file.path, digest, file.arguments], sort_keys=True, default=str)


class _ForksError(BaseException):
    """Not an Exception, so that the file does not handle it by mistake."""


def main() -> None:
    """Import the files that standard input names, and answer a line of JSON for each: null, or a
    ConfigError's fields."""
    from rlpipe.system.orphan import end_with

    told = json.loads(sys.stdin.buffer.read())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if sys.platform == "linux":
        end_with(told["parent"])
    sys.path.extend(entry for entry in told["path"] if entry not in sys.path)
    answers = told["answers"]
    pid = os.getpid()
    os.set_inheritable(answers, False)
    sys.addaudithook(_refuse_forks)
    for values in told["files"]:
        answer = _answer(UserFile(**{**values, "names": tuple(values["names"])}))
        assert os.getpid() == pid
        os.write(answers, json.dumps(answer).encode() + b"\n")
        if answer is not None:
            break
    os._exit(0)  # whatever threads and exit handlers the files have left


def _answer(file: UserFile) -> dict[str, Any] | None:
    where = f"{file.key}: {file.path}"
    try:
        found = load_hook(file.path, file.names)
        if inspect.isclass(found) and file.arguments is not None:
            _make(found, file.arguments)
    except ConfigError as error:
        if isinstance(error.__cause__, _ForksError):
            problem = "the file forks while it is imported"
            do = "fork in the function, or start a program with `subprocess`"
            return {"problem": problem, "where": where, "found": str(error.__cause__), "do": do}
        fields = {"where": where, "found": error.found, "expected": error.expected, "do": error.do}
        return {
            "problem": error.problem,
            **{name: None if value is None else str(value) for name, value in fields.items()},
        }
    except BaseException as error:  # noqa: BLE001 - the code is the user's
        return {
            "problem": "the file cannot be imported",
            "where": where,
            "found": error_text(error),
        }
    return None


def _make(kind: type, arguments: dict[str, Any]) -> None:
    """Make a class of the user once. Arguments that it does not take are for `load_custom` and
    `Tool` to refuse."""
    try:
        inspect.signature(kind).bind(**arguments)
    except (TypeError, ValueError):
        return
    try:
        guarded(kind)(**arguments)
    except Exception as error:  # the class is the user's
        raise ConfigError("the class cannot be made", found=error_text(error)) from error


def _refuse_forks(event: str, _arguments: tuple[Any, ...]) -> None:
    if event in ("os.fork", "os.forkpty"):
        raise _ForksError(f"{event}()")


if __name__ == "__main__":
    main()
