"""Stand-in for the package `e2b`: sandboxes without files and processes of their own.

A command does nothing and succeeds, but for these:

- A launcher that starts a coding agent sends one message to the agent's model, as the agent does.
- A launcher leaves its exit code in the file that its last line names.
- `cat` prints a file.

`tools.slime_counts.services` puts this file on the path of a run as `e2b`. It imports the standard
library only.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import types
import urllib.request
import uuid
from dataclasses import dataclass
from typing import Any

REQUEST_S = 120


class CommandExitException(Exception):
    """A command that failed; none does here."""


@dataclass
class Result:
    """Outcome of a command."""

    stdout: str = ""
    stderr: str = ""
    exit_code: int = 0


class AsyncSandbox:
    """A sandbox: files by path."""

    def __init__(self) -> None:
        self.sandbox_id = uuid.uuid4().hex
        self.content: dict[str, str] = {}
        self.commands = self.files = self

    @classmethod
    async def create(cls, **_settings: Any) -> AsyncSandbox:
        """Return a new sandbox."""
        return cls()

    async def kill(self) -> None:
        """Do nothing: there is no process."""

    async def write(self, path: str, data: Any, **_settings: Any) -> None:
        """Write a file; the content of a binary file is not kept."""
        self.content[path] = data if isinstance(data, str) else ""

    async def read(self, path: str, **_settings: Any) -> str:
        """Return a file. Raises: FileNotFoundError."""
        if path not in self.content:
            raise FileNotFoundError(path)
        return self.content[path]

    async def run(
        self, command: str, envs: dict[str, str] | None = None, **_settings: Any
    ) -> Result:
        """Run a command, as the module describes."""
        if started := re.search(r"setsid bash (\S+)", command):
            return await self._launch(self.content[started[1]], envs or {})
        printed = re.search(r"\bcat (\S+)", command)
        return Result(self.content.get(printed[1], "") if printed else "")

    async def _launch(self, body: str, envs: dict[str, str]) -> Result:
        if "ANTHROPIC_BASE_URL" in envs:
            await asyncio.to_thread(_ask, envs)
        marker = re.search(r"echo \$\? > (\S+)", body)
        if marker:
            self.content[marker[1]] = "0\n"
        return Result()


def _ask(envs: dict[str, str]) -> None:
    """Send one message to the model of a coding agent."""
    body = {
        "model": envs["ANTHROPIC_MODEL"],
        "max_tokens": 8,
        "messages": [{"role": "user", "content": "What is 2 + 3?"}],
    }
    request = urllib.request.Request(
        f"{envs['ANTHROPIC_BASE_URL']}/v1/messages",
        json.dumps(body).encode(),
        {
            "Authorization": f"Bearer {envs['ANTHROPIC_AUTH_TOKEN']}",
            "Content-Type": "application/json",
        },
    )
    with urllib.request.urlopen(request, timeout=REQUEST_S) as answer:
        answer.read()


def _submodules() -> None:
    """Make `e2b.sandbox.commands.command_handle` importable."""
    name = __name__
    for part in ("sandbox", "commands", "command_handle"):
        name = f"{name}.{part}"
        module = types.ModuleType(name)
        module.__path__ = []
        sys.modules[name] = module
    module.__dict__["CommandExitException"] = CommandExitException


if __name__ == "e2b":
    __path__: list[str] = []
    _submodules()
