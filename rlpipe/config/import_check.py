"""Import all user files of a configuration in a separate process first, with a deadline.

    with check_imports(config, timeout_s) as importing:   # the process works meanwhile
        ...
        importing.wait()                                  # ConfigError for a file that fails

An import runs the file's code, which can raise, end Python, sleep for ever, crash, fork or print
gigabytes. In the process of a command that would be a traceback, exit status 0 without a message,
or a hang. Here it is a ConfigError that names the file. Classes of rewards and tools are also
created once with their arguments.

One process imports all files of a configuration. Files that passed are not imported again by a
later check in the same process. The project's own code is not checked: its model makers import
torch, which takes seconds. `hooks.load_hook` handles a file that behaves differently in its second
import, unless it ends the process.
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
"""Bytes at the end of the process's output that an error shows."""
POLL_INTERVAL_S = 0.1
PROJECT = Path(__file__).resolve().parents[2]
PROJECT_FOLDERS = ("rlpipe", "flows", "tasks", "tools", "deployments")
DEFAULT_NAMES = {
    "custom_generate_function_path": GENERATE_NAMES,
    "rollout_function_path": ROLLOUT_NAMES,
    "eval_function_path": ROLLOUT_NAMES,
}
"""Field → default names of its function in a file whose path gives no name."""
_passed: set[str] = set()
"""`_key` of files that passed in this process."""


@dataclass(frozen=True)
class UserFile:
    """One user function or class of a configuration."""

    key: str
    path: str
    names: tuple[str, ...] = ()
    arguments: dict[str, Any] | None = None
    """Arguments of a class; None: the class is only imported."""


def user_files(config: BaseModel, key: str = "") -> list[UserFile]:
    """Return every user function and class of a configuration.

    They are the fields `path`, `maker` and `..._path`.
    """
    files: list[UserFile] = []
    for name in type(config).model_fields:
        value = getattr(config, name)
        dotted = f"{key}.{name}" if key else name
        if isinstance(value, BaseModel):
            files += user_files(value, dotted)
        elif isinstance(value, list | tuple) and any(isinstance(item, BaseModel) for item in value):
            for number, item in enumerate(value):
                files += user_files(item, f"{dotted}.{number}")
        elif name in ("path", "maker") or name.endswith("_path"):
            paths = [value] if isinstance(value, str) else list(value or ())
            arguments = getattr(config, "arguments", None) if name == "path" else None
            default_names = DEFAULT_NAMES.get(name, ())
            files += [UserFile(dotted, path, default_names, arguments) for path in paths]
    return files


class ImportCheck:
    """A process that imports files; created by `check_imports`."""

    def __init__(self, files: list[UserFile], timeout_s: float) -> None:
        self._files = files
        self._timeout_s = timeout_s
        self._output = bytearray()
        self._printed_bytes = 0
        self._process: subprocess.Popen[bytes] | None = None
        if files:
            self._start()

    def wait(self) -> None:
        """Wait for the import of all files. Raises: ConfigError for the first that fails."""
        if self._process is None:
            return
        for file in self._files:
            self._wait_for(file)
        _passed.update(map(_key, self._files))
        self.end()

    def end(self) -> None:
        """End the process and all processes that the files started."""
        process = self._process
        self._process = None
        if process is None:
            return
        with suppress(ProcessLookupError):  # the process may have ended by itself
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(self._results)
        assert process.stdout is not None
        process.stdout.close()

    def _start(self) -> None:
        self._results, child_end = os.pipe()
        task = {
            "path": sys.path,
            "results": child_end,
            "parent": os.getpid(),
            "files": [asdict(file) for file in self._files],
        }
        path = os.pathsep.join([str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])])
        # A file and not a pipe: a write to a pipe fails if the process dies before it reads.
        with tempfile.TemporaryFile() as stdin:
            stdin.write(json.dumps(task).encode())
            stdin.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rlpipe.config.import_check"],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": path},
                pass_fds=[child_end],
                # A process group, so that `end` also kills processes that the files started.
                start_new_session=True,
            )
        os.close(child_end)
        assert self._process.stdout is not None
        self._unread = b""
        self._open = [self._results, self._process.stdout.fileno()]

    def _wait_for(self, file: UserFile) -> None:
        """Wait for the result of one file."""
        deadline = time.monotonic() + self._timeout_s
        assert self._process is not None
        while b"\n" not in self._unread:
            # Poll before the read: output written just before the end is still received.
            ended = self._process.poll() is not None
            received = self._receive(0.0 if ended else POLL_INTERVAL_S)
            if ended and not received:
                status = ended_how(self._process.returncode)
                self._refuse(file, f"it ended the process that imported it: {status}")
            if self._printed_bytes > MOST_OUTPUT_BYTES:
                self._refuse(file, f"it printed more than {MOST_OUTPUT_BYTES // 1024**2} MiB")
            if time.monotonic() > deadline:
                self._refuse(
                    file,
                    "it is still being imported",
                    expected=f"imported within {self._timeout_s:g} s ({TIMEOUT_KEY})",
                )
        line, _, self._unread = self._unread.partition(b"\n")
        if (error := json.loads(line)) is not None:
            raise ConfigError(error.pop("problem"), **error)

    def _receive(self, timeout_s: float) -> bool:
        """Read available results and output; False if there is none."""
        if not self._open:
            time.sleep(timeout_s)
            return False
        ready, _, _ = select.select(self._open, [], [], timeout_s)
        for descriptor in ready:
            data = os.read(descriptor, 65536)
            if not data:
                self._open.remove(descriptor)
            elif descriptor == self._results:
                self._unread += data
            else:
                self._printed_bytes += len(data)
                self._output = (self._output + data)[-LAST_OUTPUT_BYTES:]
        return bool(ready)

    def _refuse(self, file: UserFile, found: str, expected: str | None = None) -> NoReturn:
        output = self._output.decode(errors="replace").strip()
        raise ConfigError(
            "the file cannot be imported",
            where=f"{file.key}: {file.path}",
            found=f"{found}\n{output}" if output else found,
            expected=expected,
            do="several processes of a run import the file, so it should only define functions and "
            "classes: put code of a program under `if __name__ == '__main__':`, and slow work into "
            "the function",
        )


@contextmanager
def check_imports(config: BaseModel, timeout_s: float) -> Iterator[ImportCheck]:
    """Start to import all user files of a configuration in a separate process."""
    check = ImportCheck(_unchecked_files(config), timeout_s)
    try:
        yield check
    finally:
        check.end()


def _unchecked_files(config: BaseModel) -> list[UserFile]:
    files: dict[str, UserFile] = {}
    for file in user_files(config):
        if not _is_of_project(file.path) and (key := _key(file)) not in _passed:
            files.setdefault(key, file)
    return list(files.values())


def _is_of_project(path: str) -> bool:
    """True for code of this project."""
    file = path.partition(".py:")[0] + ".py" if ".py:" in path else path
    if file.endswith(".py"):
        resolved = Path(file).resolve()
        return any(resolved.is_relative_to(PROJECT / folder) for folder in PROJECT_FOLDERS)
    return path.partition(".")[0] in PROJECT_FOLDERS


def _key(file: UserFile) -> str:
    """Return path, source digest and arguments of a file as one text."""
    try:
        digest = hook_digest(file.path)
    except ConfigError:
        digest = ""  # `load_hook` refuses a missing source
    return json.dumps([file.path, digest, file.arguments], sort_keys=True, default=str)


class _ForkError(BaseException):
    """A file forked. No Exception, so that the file does not catch it by accident."""


def main() -> None:
    """Import the files of standard input and write one line of JSON for each.

    The line is null, or the fields of a ConfigError.
    """
    from rlpipe.system.orphan import end_with

    task = json.loads(sys.stdin.buffer.read())
    # A file that reads standard input gets its end instead of the rest of the task.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if sys.platform == "linux":
        end_with(task["parent"])
    sys.path.extend(entry for entry in task["path"] if entry not in sys.path)
    results = task["results"]
    pid = os.getpid()
    # A program that a file starts must not keep the pipe open or write to it.
    os.set_inheritable(results, False)
    # An audit hook also sees the forks of multiprocessing.
    sys.addaudithook(_refuse_forks)
    for values in task["files"]:
        error = _import_error(UserFile(**{**values, "names": tuple(values["names"])}))
        assert os.getpid() == pid
        os.write(results, json.dumps(error).encode() + b"\n")
        if error is not None:
            break
    os._exit(0)  # threads and exit handlers of the files do not run


def _import_error(file: UserFile) -> dict[str, Any] | None:
    """Import one file; return the fields of its ConfigError, or None."""
    where = f"{file.key}: {file.path}"
    try:
        hook = load_hook(file.path, file.names)
        if inspect.isclass(hook) and file.arguments is not None:
            _create(hook, file.arguments)
    except ConfigError as error:
        if isinstance(error.__cause__, _ForkError):
            problem = "the file forks while it is imported"
            do = "fork in the function, or start a program with `subprocess`"
            return {"problem": problem, "where": where, "found": str(error.__cause__), "do": do}
        fields = {"where": where, "found": error.found, "expected": error.expected, "do": error.do}
        return {
            "problem": error.problem,
            **{name: None if value is None else str(value) for name, value in fields.items()},
        }
    except BaseException as error:  # noqa: BLE001 - the user's code may raise any exception
        return {
            "problem": "the file cannot be imported",
            "where": where,
            "found": error_text(error),
        }
    return None


def _create(kind: type, arguments: dict[str, Any]) -> None:
    """Create an object of a user class once."""
    try:
        inspect.signature(kind).bind(**arguments)
    except (TypeError, ValueError):
        return  # `load_custom` and `Tool` refuse arguments that the class does not accept
    try:
        guarded(kind)(**arguments)
    except Exception as error:  # the user's class may raise any exception
        raise ConfigError("the class cannot be created", found=error_text(error)) from error


def _refuse_forks(event: str, _arguments: tuple[Any, ...]) -> None:
    if event in ("os.fork", "os.forkpty"):
        raise _ForkError(f"{event}()")


if __name__ == "__main__":
    main()
