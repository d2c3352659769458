"""Tools of the policy: how one is called, within its deadline, and those that come along.

A tool is a function of the user or one of ours; what it returns becomes text. Nothing it does ends
a rollout: what it raises, and a deadline it misses, is what the policy is told.

    calculator(expression)    arithmetic: + - * / // % ** and parentheses
    python(code)              a Python program in a process of its own; what it prints

Not here: search (`retrieval`), how a call is written (`tool_calls`).
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
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rlpipe.config.guard import error_text, guarded
from rlpipe.config.hooks import load_hook
from rlpipe.config.rollout import ToolConfig
from rlpipe.errors import ConfigError
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
_LARGEST_POWER = 64
_LARGEST_NUMBER = 10**30
_LONGEST_EXPRESSION = 500
_KEPT_BYTES = 64 * 1024
_LAST_WORDS_S = 5.0


class Tool:
    """One tool. `name` is what the policy calls it."""

    def __init__(self, config: ToolConfig, *, timeout_s: float) -> None:
        """Raises: ConfigError if it cannot be loaded, or does not take `config.arguments`."""
        found = load_hook(config.path)
        self.name = config.name or config.path.rpartition(":")[2].rpartition(".")[2].lower()
        self.timeout_s = timeout_s
        key = f"rollout.tools ({self.name})"
        try:
            made: Any = (
                guarded(found)(**config.arguments)
                if inspect.isclass(found)
                else partial(found, **config.arguments)
            )
        except TypeError as error:
            raise ConfigError(
                "the tool does not take these arguments",
                where=key,
                found=f"{config.arguments}: {error}",
            ) from error
        except Exception as error:  # the class is the user's
            raise ConfigError(
                "the tool cannot be made", where=key, found=error_text(error)
            ) from error
        function = made.func if isinstance(made, partial) else made
        if not callable(function):
            raise ConfigError(
                "the tool cannot be called",
                where=key,
                found=config.path,
                expected="a class with __call__",
            )
        self._function: Callable[..., Any] = made if isinstance(made, partial) else guarded(made)
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__, not a test for callable
        )

    async def answer(self, arguments: str | dict[str, Any]) -> str:
        """What the policy is told: the result as text, or what went wrong."""
        call = (
            partial(self._function, **arguments)
            if isinstance(arguments, dict)
            else partial(self._function, arguments)
        )
        try:
            async with asyncio.timeout(self.timeout_s):
                return str(await (call() if self._is_async else call_hook(call)))
        except TimeoutError:
            return f"error: no answer within {self.timeout_s:g} s"
        except Exception as error:  # noqa: BLE001 - a tool may raise anything; the policy is told
            return f"error: {error_text(error)}"


def load_tools(configs: Sequence[ToolConfig], *, timeout_s: float) -> dict[str, Tool]:
    """The tools by name. Raises: ConfigError; also if two have one name."""
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
    """The value of an arithmetic expression; whole numbers without a decimal point. Raises:
    ValueError, ZeroDivisionError."""
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
    """What a Python program prints, standard error included, and how it ended if not well.

    It runs in a process of its own with `python -I`, in an empty folder that is removed, within
    these limits; it is killed when the tool's deadline passes. Processes that it leaves running are
    killed when it ends: they hold its standard output, and would keep the answer waiting. That
    bounds mistakes, not malice: it can read files and the network as the run can.
    """
    with tempfile.TemporaryDirectory(prefix="rlpipe-tool-") as folder:
        limits = partial(_limit, memory_bytes, cpu_s)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-c",
            code,
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
            cwd=folder,
            env={},
            preexec_fn=limits,
            start_new_session=True,
        )
        reading = asyncio.ensure_future(_printed(process))
        ending = asyncio.ensure_future(exit_status(process))
        try:
            await asyncio.wait({reading, ending}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done() and len(reading.result()) < _KEPT_BYTES:
                await ending  # it has closed its output, and may still be at work
            status = await end_group(process)
            printed = await asyncio.wait_for(reading, _LAST_WORDS_S)
        finally:
            reading.cancel()
            ending.cancel()
            await end_group(process)
    text = printed.decode(errors="replace").strip()
    return text if not status else f"{text}\n(exit status {status})".strip()


async def _printed(process: Process) -> bytes:
    assert process.stdout is not None
    printed = b""
    while len(printed) < _KEPT_BYTES and (
        piece := await process.stdout.read(_KEPT_BYTES - len(printed))
    ):
        printed += piece
    return printed


def _limit(memory_bytes: int, cpu_s: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
