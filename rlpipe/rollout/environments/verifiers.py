"""Sample in an environment of the package `verifiers`: `rollout.environment.type: verifiers`.

    generator ──lines of JSON──▶ program verifiers_worker: one episode for each sample
    gateway, session of the sample ◀──HTTP── agents of the episode

The environment is used as it is: its harness, tools, users and rewards. The agents that have no
`client` of their own use the session's address as their model, so the tokens are those of the
engine. A conversation that an agent rewrites is another sample of the rollout.

    row of prompts of type verifiers     its task, in `metadata.verifiers_task`
    another row                          the task has `prompt`, `answer` (the label) and the
                                         entries of the metadata as its fields
    reward                               sum of the environment's weighted rewards
    reward parts                         each weighted reward and each metric, by its name

`metadata.environment` has "reward", "parts", "turns" (calls of the model), "ended" (verifiers'
stop condition) and "source" (sha256 of the taskset's files). An episode with an error is a failed
row. verifiers' own retries (`arguments.retries`) leave the conversations of failed attempts in the
session, so keep them off. An episode that was cut off starts again.

The program starts with the first episode of a generator and ends with it. Entry point: `Verifiers`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from argparse import Namespace
from asyncio.subprocess import PIPE, Process
from typing import Any

from rlpipe.config.rollout import RolloutConfig, VerifiersEnvironment
from rlpipe.config.run import RunConfig
from rlpipe.data.verifiers_tasks import (
    ANSWER_TAIL_CHARS,
    TASK_KEY,
    environment_block,
    require_result,
    worker_command,
)
from rlpipe.errors import HookError
from rlpipe.rewards.scorer import ENVIRONMENT_KEY
from rlpipe.rollout.agent.chat_sessions import ChatSessions
from rlpipe.rollout.hooks.generate_function import GenerateHook
from rlpipe.system.child_processes import end_group, ended_how
from rlpipe.types import Sample

_KEY = "rollout.environment"
_MOST_ANSWER_BYTES = 2**30


class Verifiers:
    """The environment of a run. Its program starts with the first episode."""

    def __init__(self, config: VerifiersEnvironment) -> None:
        """Raises: ConfigError if the interpreter does not exist."""
        self._config = config
        self._command = worker_command(config.python, _KEY, max_concurrent=config.max_concurrent)
        self._program: _Program | None = None
        self._starting = asyncio.Lock()

    def hook(
        self, config: RunConfig, rollout: RolloutConfig, sessions: ChatSessions, *, context_len: int
    ) -> GenerateHook:
        """Return the function that runs one episode. See `loaded.Environment`."""

        async def generate(
            args: Namespace, sample: Sample, _sampling_params: dict[str, Any]
        ) -> Sample:
            base_url = f"{args.session_url}/{sample.session_id}/v1"
            run = {"task": _task(sample), "base_url": base_url, "model": config.run}
            program = await self._started()
            episode = await program.episode(run)
            where = f"{_KEY}: {self._config.id}"
            if episode["errors"] or not episode["ok"]:
                found = "; ".join(episode["errors"]) or "an episode that is not ok"
                raise HookError("the episode failed", where=where, found=found)
            sample.metadata = {**sample.metadata, ENVIRONMENT_KEY: _summary(episode)}
            return sample

        return GenerateHook(self._config.id, generate, of_group=False, takes_evaluation=False)

    async def close(self) -> None:
        """End the program."""
        program = self._program
        self._program = None
        if program is not None:
            await program.end()

    async def _started(self) -> _Program:
        async with self._starting:
            if self._program is None or not self._program.alive:
                await self.close()
                self._program = await _Program.start(self._command, self._config)
        return self._program


class _Program:
    """A running program, and the requests that it has not answered."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._log = b""
        self._reading = [
            asyncio.ensure_future(self._read_answers()),
            asyncio.ensure_future(self._read_log()),
        ]

    @classmethod
    async def start(cls, command: list[str], config: VerifiersEnvironment) -> _Program:
        """Start the program and load the environment. Raises: ConfigError; HookError after the
        deadline."""
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            limit=_MOST_ANSWER_BYTES,
            start_new_session=True,
        )
        program = cls(process)
        block = environment_block(config.id, config.arguments)
        try:
            async with asyncio.timeout(config.start_timeout_s):
                answer = await program._ask({"open": block, "serve": True})
            require_result(answer, command[0], _KEY, config.id)
        except TimeoutError as error:
            await program.end()
            raise HookError(
                "verifiers took too long to load the environment",
                where=f"{_KEY}: {config.id}",
                expected=f"loaded within {config.start_timeout_s:g} s ({_KEY}.start_timeout_s)",
            ) from error
        except BaseException:
            await program.end()
            raise
        return program

    @property
    def alive(self) -> bool:
        return self._process.returncode is None and not self._reading[0].done()

    async def episode(self, run: dict[str, Any]) -> dict[str, Any]:
        """Run one episode. Raises: HookError if the program cannot run it."""
        answer = await self._ask({"run": run})
        if "error" in answer:
            line = f" ({answer['line']})" if answer.get("line") else ""
            raise HookError("the episode failed", where=_KEY, found=f"{answer['error']}{line}")
        return answer["episode"]

    async def end(self) -> None:
        """Kill the program and the programs that it started."""
        await end_group(self._process)
        for task in self._reading:
            task.cancel()
        await asyncio.gather(*self._reading, return_exceptions=True)

    async def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return its answer. Raises: HookError if the program ends before."""
        number = next(self._numbers)
        answer = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            if not self.alive:
                raise self._ended()
            self._send({"id": number, **request})
            return await answer
        except asyncio.CancelledError:
            self._send({"id": number, "cancel": True})
            raise
        finally:
            self._waiting.pop(number, None)

    def _send(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        if not self._process.stdin.is_closing():
            self._process.stdin.write((json.dumps(request) + "\n").encode())

    async def _read_answers(self) -> None:
        assert self._process.stdout is not None
        try:
            while line := await self._process.stdout.readline():
                answer = json.loads(line)
                waiting = self._waiting.get(answer["id"])
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
        finally:
            await asyncio.wait({self._reading[1]}, timeout=1.0)
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(self._ended())

    async def _read_log(self) -> None:
        assert self._process.stderr is not None
        while data := await self._process.stderr.read(65536):
            self._log = (self._log + data)[-ANSWER_TAIL_CHARS:]

    def _ended(self) -> HookError:
        status = self._process.returncode
        log = self._log.decode(errors="replace").strip()
        how = "its output ended" if status is None else ended_how(status)
        return HookError("the program of verifiers ended", where=_KEY, found=f"{how}\n{log}")


def _task(sample: Sample) -> dict[str, Any]:
    """Return the JSON of the task of a row."""
    if TASK_KEY in sample.metadata:
        return sample.metadata[TASK_KEY]
    return {"prompt": sample.prompt, "answer": sample.label, **sample.metadata}


def _summary(episode: dict[str, Any]) -> dict[str, Any]:
    rewards = episode["rewards"]
    return {
        "reward": sum(rewards.values()),
        "parts": {**episode["metrics"], **rewards},
        "turns": episode["turns"],
        "ended": episode["stop"],
        "source": episode["source"],
    }
