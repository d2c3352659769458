"""Load user functions that the configuration names, and compute the digest of their source.

    load_hook("path/to/file.py:name")       the function
    load_hook("path/to/file.py")            the file's only public function
    load_hook("package.module.name")        the function
    hook_digest("path/to/file.py:name")     sha256 of the file; imported files are not covered

Every exception of an import becomes a ConfigError, unless it ends the process. Therefore
`config.import_check` imports files in a separate process first. A loaded function cannot end Python
or return from a forked copy (`config.guard`). The module imports nothing heavy.
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

from rlpipe.config.guard import error_text, exit_if_forked, guarded
from rlpipe.errors import ConfigError
from rlpipe.slime.modules import is_provided, provide
from rlpipe.system.plain_files import read_plain
from rlpipe.system.project import hidden_file, in_project

MOST_SOURCE_BYTES = 16 * 1024**2
GENERATE_NAMES = ("generate", "custom_generate")
"""Default names of a generate function in a file whose path gives no name."""
ROLLOUT_NAMES = ("generate_rollout",)
"""Default name of a rollout function in a file whose path gives no name."""
OWN_PACKAGE = "rlpipe"
_FORMS = "'path/to/file.py:name', 'path/to/file.py' or 'package.module.name'"


def load_hook(path: str, names: Sequence[str] = ()) -> Callable[..., Any]:
    """Return the callable that `path` names; functions are guarded, classes are not.

    A file is imported once per content, without a change of `sys.path`.

    `names`: default names for a path without a name, tried before the only public function.

    Raises: ConfigError if the file, module or name does not exist (with the nearest names), if it
    is not callable, or if its import raises an exception or ends Python.
    """
    file, name = _split_file(path)
    if file is not None:
        module = _import_file(file, path)
        name = (
            name
            or next((default for default in names if hasattr(module, default)), "")
            or _only_function(module, path)
        )
    else:
        module_name, name = _split_dotted(path)
        module = _import_module(module_name, path)
    hook = _callable_in(module, name, path)
    return _guarded_once(hook) if inspect.isfunction(hook) else hook


def check_call(
    hook: Callable[..., Any], *arguments: Any, path: str, key: str, expected: str, **keywords: Any
) -> None:
    """Check at start-up that the hook accepts the arguments of its later calls.

    Raises: ConfigError with the signature found and the signature expected.
    """
    try:
        signature = inspect.signature(hook)
    except (TypeError, ValueError):  # some built-in callables have no signature
        return
    try:
        signature.bind(*arguments, **keywords)
    except TypeError as error:
        name = getattr(hook, "__name__", type(hook).__name__)
        raise ConfigError(
            "the function cannot be called with the expected arguments",
            where=key,
            found=f"{path}: {name}{signature} ({error})",
            expected=expected,
            do="change the function's parameters",
        ) from error


def load_positional(path: str, parameters: Sequence[str], key: str) -> Callable[..., Any]:
    """Return the hook of a key that is called with these positional parameters.

    Raises: as `load_hook` and `check_call`.
    """
    hook = load_hook(path)
    check_call(hook, *parameters, path=path, key=key, expected=f"({', '.join(parameters)})")
    return hook


def rollout_id(args: Any, iteration: int) -> int:
    """Return the number of an iteration for user functions: slime's, after `start_rollout_id`."""
    return getattr(args, "start_rollout_id", 0) + iteration


def accepts_keyword(hook: Callable[..., Any], name: str) -> bool:
    """True if the hook has a parameter of this name, or accepts any keyword."""
    try:
        parameters = inspect.signature(hook).parameters
    except (TypeError, ValueError):  # some built-in callables have no signature
        return False
    return name in parameters or any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()
    )


def hook_digest(path: str) -> str:
    """Return the sha256 (hex) of the source file that `path` names.

    For a dotted path in rlpipe, or of a function of slime that rlpipe provides, it is the sha256 of
    "rlpipe:" + path. Raises: ConfigError if the source does not exist.
    """
    file, _ = _split_file(path)
    if file is None:
        module, name = _split_dotted(path)
        provide()
        is_own = is_provided(module, name)
        if not is_own:
            file = _source_of(module, path)
            is_own = module.partition(".")[0] == OWN_PACKAGE
        if is_own:
            # Contract versions of the stages cover rlpipe's code. A digest of the file would give
            # stored runs another identity after each change of a comment.
            return hashlib.sha256(f"rlpipe:{path}".encode()).hexdigest()
    assert file is not None
    return hashlib.sha256(_read(file, path)).hexdigest()


def source_file(path: str) -> str | None:
    """Return the name of the file that defines a hook, as in its tracebacks; None if unknown."""
    return file_of(load_hook(path))


def file_of(function: Callable[..., Any]) -> str | None:
    """Return the name of the file that defines a function; None if unknown."""
    try:
        return inspect.getsourcefile(inspect.unwrap(function))
    except TypeError:  # an object without a source file, such as a built-in function
        return None


def _split_file(path: str) -> tuple[Path | None, str]:
    file, colon, name = path.rpartition(":")
    if not (colon and file.endswith(".py")):
        file, name = (path, "") if path.endswith(".py") else ("", "")
    return (Path(in_project(file)), name) if file else (None, "")


def _split_dotted(path: str) -> tuple[str, str]:
    module, _, name = path.rpartition(".")
    if not module or not all(part.isidentifier() for part in path.split(".")):
        raise ConfigError(
            "not the path of a function", where=path, found=repr(path), expected=_FORMS
        )
    if hidden := hidden_file(module):
        raise ConfigError(
            f"rlpipe has a package `{module.partition('.')[0]}` of its own, which is imported "
            "instead of yours",
            where=path,
            found=f"your file {hidden.absolute()}",
            do=f"name the file: {hidden}:{name}",
        )
    return module, name


def _read(file: Path, path: str) -> bytes:
    try:
        return read_plain(file, at_most_bytes=MOST_SOURCE_BYTES)
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        others = [name for name in _python_files(file.parent) if name != file.name]
        near = get_close_matches(file.name, others, n=3)
        raise ConfigError(
            "cannot read the file of the function",
            where=path,
            found=ascii(f"{file.absolute()}: {getattr(error, 'strerror', error)}")[1:-1],
            expected="a Python file" + (f"; the folder has {', '.join(near)}" if near else ""),
            do=f"write {file.with_name(near[0])}:{_split_file(path)[1] or 'FUNCTION'}"
            if near
            else "correct the path; a relative path counts from the recipe's folder, "
            "else from the current folder",
        ) from error


def _python_files(folder: Path) -> list[str]:
    return sorted(item.name for item in folder.glob("*.py"))


def _import_file(file: Path, path: str) -> ModuleType:
    source = _read(file, path)
    # The name contains path and content: a changed file is a new module, an equal one is reused.
    digest = hashlib.sha256(str(file.absolute()).encode() + b"\0" + source).hexdigest()
    name = f"rlpipe_hook_{file.stem}_{digest[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    # Registered before the execution, because dataclasses and pickle look the module up by name.
    sys.modules[name] = module
    vars(module)["print"] = _marked_print(file.name)
    provide()  # so that `from slime... import` works, here or in a module that the file imports
    complete = False
    try:
        _run_import(
            # Not `loader.exec_module`: cached byte code is compared by second and size only, and a
            # changed file could run its old code under the new digest.
            lambda: exec(compile(source, str(file), "exec", dont_inherit=True), vars(module)),
            "cannot import the file of the function",
            path,
        )
        complete = True
    finally:
        if not complete:
            del sys.modules[name]
    return module


def _marked_print(file: str) -> Callable[..., None]:
    """Return a `print` whose lines to the terminal begin with the name of the user's file."""
    begins_line = True

    def marked(
        *values: object, sep: str | None = None, end: str | None = None, **options: Any
    ) -> None:
        nonlocal begins_line
        if options.get("file") not in (None, sys.stdout, sys.stderr):
            print(*values, sep=sep, end=end, **options)
            return
        text = (" " if sep is None else sep).join(map(str, values))
        mark = f"{file}: " if begins_line else ""
        end = "\n" if end is None else end
        begins_line = f"{text}{end}".endswith("\n")
        print(f"{mark}{text}", end=end, **options)

    return marked


def _import_module(name: str, path: str) -> ModuleType:
    provide()  # slime's own functions are dotted paths, and import its modules
    return _run_import(
        lambda: importlib.import_module(name),
        "cannot import the module of the function",
        path,
        expected=_FORMS,
    )


def _run_import(
    run: Callable[[], Any], problem: str, path: str, *, expected: str | None = None
) -> Any:
    """Return the result of `run`.

    Raises: ConfigError for every exception of the imported code, except the KeyboardInterrupt of
    Ctrl-C.
    """
    pid = os.getpid()
    try:
        return run()
    except (ImportError, SyntaxError, RecursionError) as error:
        raise ConfigError(
            problem,
            where=path,
            found=_import_problem(error),
            expected=expected,
            do=_import_advice(error),
        ) from error
    except SystemExit as error:
        raise ConfigError(
            problem,
            where=path,
            found=f"the file ends Python: {error_with_line(error)}",
            do="put code of a program under `if __name__ == '__main__':`",
        ) from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the user's code may raise any exception
        raise ConfigError(
            problem, where=path, found=error_with_line(error), do="correct this line"
        ) from error
    finally:
        exit_if_forked(pid, run)


def _import_problem(error: Exception) -> str:
    """Return the text of an error of an import, with file and line where they help."""
    if isinstance(error, SyntaxError):  # its text has the name of the file without the folder
        line = f": {error.text.strip()}" if error.text else ""
        return f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno}{line})"
    return error_with_line(error)


def _import_advice(error: Exception) -> str:
    if isinstance(error, SyntaxError):
        return "correct this line"
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        return f"install {package} for {sys.executable}, or correct the import"
    return "correct the import"


def error_with_line(error: BaseException) -> str:
    """Return `Type: message (file:line)` of an exception of a user function."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "importlib" not in frame.filename
    ]
    last = frames[-1] if frames else None
    return error_text(error) + (f" ({last.filename}:{last.lineno})" if last else "")


_guarded_once = functools.cache(guarded)
"""Cached, so that a function has the same guarded form in every call."""


def _source_of(module: str, path: str) -> Path:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError, RecursionError) as error:
        raise ConfigError(
            "cannot find the module of the function",
            where=path,
            found=error_text(error),
            expected=_FORMS,
        ) from error
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        found = (
            f"no module {module!r}" if spec is None else f"module {module!r} without a source file"
        )
        raise ConfigError(
            "the function has no Python source", where=path, found=found, expected=_FORMS
        )
    return Path(spec.origin)


def _public_functions(module: ModuleType) -> list[str]:
    return sorted(
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and not name.startswith("_")
    )


def _only_function(module: ModuleType, path: str) -> str:
    names = _public_functions(module)
    if len(names) != 1:
        raise ConfigError(
            "the path names no function of this file",
            where=path,
            found=f"{len(names)} public functions: {', '.join(names) or 'none'}",
            expected="exactly one public function, or its name in the path",
            do=f"write {path}:NAME with one of these names" if names else "write a function",
        )
    return names[0]


def _callable_in(module: ModuleType, name: str, path: str) -> Callable[..., Any]:
    if not hasattr(module, name):
        functions = _public_functions(module)
        near = get_close_matches(name, dir(module), n=3, cutoff=0.7)
        names = near or functions[:10]
        raise ConfigError(
            f"the module has no {name!r}",
            where=path,
            found=f"no function of this name in {getattr(module, '__file__', module.__name__)}",
            expected="one of its names"
            + (f"; {'nearest: ' if near else ''}{', '.join(names)}" if names else ""),
            do=f"write {path.removesuffix(name)}{names[0] if near or len(names) == 1 else 'NAME'}",
        )
    value = getattr(module, name)
    if not callable(value):
        raise ConfigError(
            "the path names no function",
            where=path,
            found=f"{name} is a value of type {type(value).__name__}",
            expected="a function or a class",
        )
    return value
