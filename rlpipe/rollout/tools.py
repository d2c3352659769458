"""Call the tools of the policy, and the built-in tools.

A tool is a user function or class, or a built-in one. Its result becomes text. A tool never ends a
rollout: the policy gets the text of an exception or of a missed deadline.

    calculator(expression)    arithmetic: + - * / // % ** and parentheses
    python(code)              output of a Python program in a separate process

`rlpipe.rollout.retrieval` and `rlpipe.rollout.sandbox` have other built-in tools. Entry points:
`load_tools`, `Tool`.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import operator
import resource
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from rlpipe.config.guard import error_text, guarded
from rlpipe.config.hooks import load_hook
from rlpipe.config.rollout import ToolConfig
from rlpipe.errors import ConfigError, RlpipeError
from rlpipe.rollout.hooks.generate_function import call_hook
from rlpipe.system.child_processes import end_group, exit_status

_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
# Bounds of the calculator: a policy writes expressions such as 9**9**9.
_LARGEST_POWER = 64
_LARGEST_NUMBER = 10**30
_LONGEST_EXPRESSION = 500
_MAX_OUTPUT_BYTES = 64 * 1024
_LAST_OUTPUT_S = 5.0


class Tool:
    """One tool. The policy calls it by `name`."""

    def __init__(self, config: ToolConfig, *, timeout_s: float) -> None:
        """Load a tool. Raises: ConfigError if it cannot be loaded or does not accept
        `config.arguments`."""
        loaded = load_hook(config.path)
        self.name = config.name or config.path.rpartition(":")[2].rpartition(".")[2].lower()
        self.timeout_s = timeout_s
        key = f"rollout.tools ({self.name})"
        try:
            if inspect.isclass(loaded):
                tool: Any = guarded(loaded)(**config.arguments)
            else:
                tool = partial(loaded, **config.arguments)
        except TypeError as error:
            raise ConfigError(
                "the tool does not take these arguments",
                where=key,
                found=f"{config.arguments}: {error}",
            ) from error
        except RlpipeError:
            raise
        except Exception as error:  # a user's class may raise any exception
            raise ConfigError(
                "the tool cannot be created", where=key, found=error_text(error)
            ) from error
        function = tool.func if isinstance(tool, partial) else tool
        if not callable(function):
            raise ConfigError(
                "the tool cannot be called",
                where=key,
                found=config.path,
                expected="a class with __call__",
            )
        self._function: Callable[..., Any] = tool if isinstance(tool, partial) else guarded(tool)
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__, not a test for callable
        )

    async def answer(self, arguments: str | dict[str, Any]) -> str:
        """Return the result as text, or the text of an error."""
        if isinstance(arguments, dict):
            call = partial(self._function, **arguments)
        else:
            call = partial(self._function, arguments)
        try:
            async with asyncio.timeout(self.timeout_s):
                return str(await (call() if self._is_async else call_hook(call)))
        except TimeoutError:
            return f"error: no answer within {self.timeout_s:g} s"
        except Exception as error:  # noqa: BLE001 - a tool may raise any exception; the policy gets it
            return f"error: {error_text(error)}"


def load_tools(configs: Sequence[ToolConfig], *, timeout_s: float) -> dict[str, Tool]:
    """Return the tools by name. Raises: ConfigError, also for two tools of one name."""
    tools = [Tool(config, timeout_s=timeout_s) for config in configs]
    names = [tool.name for tool in tools]
    if len(set(names)) != len(names):
        raise ConfigError(
            "two tools have one name",
            where="rollout.tools",
            found=names,
            do="give them names: rollout.tools.0.name",
        )
    return dict(zip(names, tools, strict=True))


def calculator(expression: str) -> str:
    """Return the value of an arithmetic expression; integers without a decimal point.

    Raises: ValueError, ZeroDivisionError.
    """
    if len(expression) > _LONGEST_EXPRESSION:
        raise ValueError(f"longer than {_LONGEST_EXPRESSION} characters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError:
        raise ValueError(f"not an expression: {expression.strip()}") from None
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return str(value)


def _value(node: ast.AST) -> Any:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _bounded(value)
        case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
            first = _value(left)
            second = _value(right)
            if isinstance(op, ast.Pow) and abs(second) > _LARGEST_POWER:
                raise ValueError(f"a power above {_LARGEST_POWER}")
            return _bounded(_OPERATORS[type(op)](first, second))
        case ast.UnaryOp(op, operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(operand))
    raise ValueError("only numbers, + - * / // % ** and parentheses")


def _bounded(value: Any) -> Any:
    if isinstance(value, complex) or abs(value) > _LARGEST_NUMBER:
        raise ValueError("the number is too large")
    return value


async def python(code: str, *, memory_bytes: int = 512 * 1024**2, cpu_s: int = 10) -> str:
    """Return the output of a Python program, including standard error and a failing exit status.

    The program runs with `python -I` in a separate process with these limits, in an empty folder
    that is removed. It is killed at the tool's deadline. These limits stop mistakes, not attacks:
    the program can read files and use the network as the run can. `rlpipe.rollout.sandbox.Python`
    stops both.
    """
    with tempfile.TemporaryDirectory(prefix="rlpipe-tool-") as folder:
        limits = {
            resource.RLIMIT_AS: memory_bytes,
            resource.RLIMIT_CPU: cpu_s,
            resource.RLIMIT_CORE: 0,
        }
        return await program_output([sys.executable, "-I", "-c", code], folder, limits)


async def program_output(
    command: Sequence[str],
    folder: str,
    limits: Mapping[int, int],
    *,
    pass_fds: Sequence[int] = (),
) -> str:
    """Run a program in `folder` and return its output, at most _MAX_OUTPUT_BYTES.

    `limits`: resource → its hard limit. `pass_fds`: file descriptors that the program inherits. A
    program that writes more is killed, and all its child processes are killed when it ends.
    """
    # Empty environment: the program does not see the run's secrets.
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=STDOUT,
        cwd=folder,
        env={},
        pass_fds=pass_fds,
        preexec_fn=partial(_set_limits, limits),
        start_new_session=True,
    )
    reading = asyncio.ensure_future(_output(process))
    ending = asyncio.ensure_future(exit_status(process))
    try:
        await asyncio.wait({reading, ending}, return_when=asyncio.FIRST_COMPLETED)
        if reading.done() and len(reading.result()) < _MAX_OUTPUT_BYTES:
            # The program closed its output and may still run.
            await ending
        # Kill the program's child processes: they hold its standard output open, and reading
        # the output would wait for them.
        status = await end_group(process)
        output = await asyncio.wait_for(reading, _LAST_OUTPUT_S)
    finally:
        reading.cancel()
        ending.cancel()
        await end_group(process)
    text = output.decode(errors="replace").strip()
    return text if not status else f"{text}\n(exit status {status})".strip()


async def _output(process: Process) -> bytes:
    """Read the output up to _MAX_OUTPUT_BYTES."""
    assert process.stdout is not None
    output = b""
    while len(output) < _MAX_OUTPUT_BYTES:
        chunk = await process.stdout.read(_MAX_OUTPUT_BYTES - len(output))
        if not chunk:
            break
        output += chunk
    return output


def _set_limits(limits: Mapping[int, int]) -> None:
    for limited, most in limits.items():
        resource.setrlimit(limited, (most, most))
