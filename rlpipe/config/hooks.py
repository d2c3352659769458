"""Functions of the user, named by a path in the configuration: how one is loaded, and the digest of
its source.

A path is `path/to/file.py:name`, `path/to/file.py` (the file's only public function) or
`package.module.name`. The digest covers the one file that defines the function, not what that file
imports.

Whatever a file does while it is imported is a ConfigError, as far as this process survives it;
`config.trial` imports files in a process of their own first. A function that is loaded cannot end
Python or answer from a forked copy (`config.guard`).

Not here: what a hook is called with, which is said by whoever calls it. Imports nothing heavy.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from rlpipe.config.guard import error_text, guarded, leave_if_copied
from rlpipe.errors import ConfigError
from rlpipe.slime.modules import provide
from rlpipe.system.plain_files import read_plain

MOST_SOURCE_BYTES = 16 * 1024**2
GENERATE_NAMES, ROLLOUT_NAMES = ("generate", "custom_generate"), ("generate_rollout",)
"""What a function that samples may be called in a file whose path gives no name."""
_FORMS = "'path/to/file.py:name', 'path/to/file.py' or 'package.module.name'"


def load_hook(path: str, names: Sequence[str] = ()) -> Callable[..., Any]:
    """The callable that `path` names. A file is imported once per content, without touching
    `sys.path`.

    `names`: the first of them that a path without a name has is meant, before its only public
    function.

    A plain or async function is guarded; a class is what it is.

    Raises: ConfigError if the file, module or name is not there (with the nearest names) or is not
    callable, or if its code raises something or ends Python while it is imported.
    """
    file, name = _split_file(path)
    if file is not None:
        module = _import_file(file, path)
        name = (
            name
            or next((known for known in names if hasattr(module, known)), "")
            or _only_function(module, path)
        )
    else:
        module_name, name = _split_dotted(path)
        module = _import_module(module_name, path)
    found = _callable_in(module, name, path)
    return _guarded_once(found) if inspect.isfunction(found) else found


def check_call(
    hook: Callable[..., Any], *arguments: Any, path: str, key: str, expected: str, **keywords: Any
) -> None:
    """Can the hook be called so? Known at start-up rather than in the middle of a run.

    Raises: ConfigError with the signature it has and the one it should have.
    """
    try:
        signature = inspect.signature(hook)
    except (TypeError, ValueError):  # some built-in callables have none
        return
    try:
        signature.bind(*arguments, **keywords)
    except TypeError as error:
        found = f"{path}: {getattr(hook, '__name__', type(hook).__name__)}{signature} ({error})"
        raise ConfigError(
            "the function cannot be called as it will be", where=key, found=found, expected=expected
        ) from error


def takes(hook: Callable[..., Any], name: str) -> bool:
    """Has the hook a parameter of this name, or any keyword?"""
    try:
        parameters = inspect.signature(hook).parameters
    except (TypeError, ValueError):  # some built-in callables have none
        return False
    return name in parameters or any(
        one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()
    )


def hook_digest(path: str) -> str:
    """sha256 (hex) of the bytes of the source file that `path` names. Raises: ConfigError if there
    is none."""
    file, _ = _split_file(path)
    if file is None:
        file = _source_of(_split_dotted(path)[0], path)
    return hashlib.sha256(_read(file, path)).hexdigest()


def _split_file(path: str) -> tuple[Path | None, str]:
    file, colon, name = path.rpartition(":")
    if colon and file.endswith(".py"):
        return Path(file), name
    return (Path(path), "") if path.endswith(".py") else (None, "")


def _split_dotted(path: str) -> tuple[str, str]:
    module, _, name = path.rpartition(".")
    if not module or not all(part.isidentifier() for part in path.split(".")):
        raise ConfigError(
            "not the path of a function", where=path, found=repr(path), expected=_FORMS
        )
    return module, name


def _read(file: Path, path: str) -> bytes:
    try:
        return read_plain(file, at_most_bytes=MOST_SOURCE_BYTES)
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        near = get_close_matches(
            file.name, [name for name in _python_files(file.parent) if name != file.name], n=3
        )
        raise ConfigError(
            "the hook's file cannot be read",
            where=path,
            found=ascii(f"{file.absolute()}: {getattr(error, 'strerror', error)}")[1:-1],
            expected="a Python file"
            + (f"; in that folder there is {', '.join(near)}" if near else ""),
            do="give a path from the folder the run is started in, or an absolute one",
        ) from error


def _python_files(folder: Path) -> list[str]:
    return sorted(item.name for item in folder.glob("*.py"))


def _import_file(file: Path, path: str) -> ModuleType:
    source = _read(file, path)
    digest = hashlib.sha256(str(file.absolute()).encode() + b"\0" + source).hexdigest()
    name = f"rlpipe_hook_{file.stem}_{digest[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    loader = spec.loader
    assert loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if b"slime" in source:
        provide()
    complete = False
    try:
        _run_import(lambda: loader.exec_module(module), "the hook's file cannot be imported", path)
        complete = True
    finally:
        if not complete:
            del sys.modules[name]
    return module


def _import_module(name: str, path: str) -> ModuleType:
    return _run_import(
        lambda: importlib.import_module(name),
        "the hook's module cannot be imported",
        path,
        expected=_FORMS,
    )


def _run_import(
    run: Callable[[], Any], problem: str, path: str, *, expected: str | None = None
) -> Any:
    """What `run` returns. Raises: ConfigError for everything that the imported code raises;
    KeyboardInterrupt of a Ctrl-C."""
    pid = os.getpid()
    try:
        return run()
    except (ImportError, SyntaxError, RecursionError) as error:
        raise ConfigError(
            problem, where=path, found=error_text(error), expected=expected
        ) from error
    except SystemExit as error:
        do = "put what shall run as a program under `if __name__ == '__main__':`"
        raise ConfigError(
            problem, where=path, found=f"it ends Python: {_at(error)}", do=do
        ) from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the file's own code may raise anything
        raise ConfigError(problem, where=path, found=_at(error)) from error
    finally:
        leave_if_copied(pid, run)


def _at(error: BaseException) -> str:
    """The error, and the line of the file that raised it."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "importlib" not in frame.filename
    ]
    last = frames[-1] if frames else None
    return error_text(error) + (f" ({last.filename}:{last.lineno})" if last else "")


_guarded_once = functools.cache(guarded)
"""A function has one guarded form, as a file has one module."""


def _source_of(module: str, path: str) -> Path:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError, RecursionError) as error:
        raise ConfigError(
            "the hook's module cannot be found",
            where=path,
            found=error_text(error),
            expected=_FORMS,
        ) from error
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        found = (
            f"no module {module!r}" if spec is None else f"module {module!r} without a source file"
        )
        raise ConfigError("the hook has no Python source", where=path, found=found, expected=_FORMS)
    return Path(spec.origin)


def _only_function(module: ModuleType, path: str) -> str:
    names = [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and not name.startswith("_")
    ]
    if len(names) != 1:
        raise ConfigError(
            "which function of this file?",
            where=path,
            found=f"{len(names)} public functions: {', '.join(sorted(names)) or 'none'}",
            expected="exactly one, or its name in the path",
            do=f"write {path}:{sorted(names)[0] if names else 'name'}",
        )
    return names[0]


def _callable_in(module: ModuleType, name: str, path: str) -> Callable[..., Any]:
    if not hasattr(module, name):
        near = get_close_matches(name, dir(module), n=3)
        raise ConfigError(
            f"there is no {name!r} in it",
            where=path,
            found=f"module {getattr(module, '__file__', module.__name__)}",
            expected=f"one of its names; nearest: {', '.join(near)}"
            if near
            else "one of its names",
        )
    value = getattr(module, name)
    if not callable(value):
        raise ConfigError(
            "the hook is not callable",
            where=path,
            found=type(value).__name__,
            expected="a function",
        )
    return value
