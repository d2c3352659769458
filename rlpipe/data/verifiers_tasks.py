"""Start the program that runs environments of the package `verifiers`, and read tasks from it.

`verifiers_worker` is the program, and describes its requests. Entry points: `read_tasks`,
`open_environment`, `worker_command`, `environment_block`, `require_result`.
"""

from __future__ import annotations

import json
import subprocess
from functools import lru_cache
from pathlib import Path
from typing import Any

from rlpipe.config.data import VerifiersPrompts
from rlpipe.config.rollout import VerifiersEnvironment
from rlpipe.errors import ConfigError, DataError

TASK_KEY = "verifiers_task"
"""Entry of a row's metadata with the task: the JSON of a `TaskData`."""
ANSWER_TAIL_CHARS = 2000
_INSTALL = "verifiers==0.4.0"
_WORKER = Path(__file__).with_name("verifiers_worker.py")


def worker_command(python: str, key: str, *, max_concurrent: int = 1) -> list[str]:
    """Return the command of the program. Raises: ConfigError if the interpreter does not exist."""
    # Not resolved: the path of a virtual environment's interpreter, a link, names the environment.
    path = Path(python).expanduser().absolute()
    if not path.is_file():
        raise ConfigError(
            "the Python interpreter for verifiers does not exist",
            where=f"{key}.python",
            found=str(path),
            expected="an interpreter that has the package verifiers",
            do="python -m venv verifiers-venv && "
            f"verifiers-venv/bin/pip install {_INSTALL} YOUR_TASKSET",
        )
    return [str(path), str(_WORKER), str(max_concurrent)]


def environment_block(taskset: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return verifiers' section `env` with the id of the taskset."""
    return {**arguments, "taskset": {**arguments.get("taskset", {}), "id": taskset}}


def require_result(answer: dict[str, Any], python: str, key: str, taskset: str) -> dict[str, Any]:
    """Return the answer of a request. Raises: ConfigError if the request failed.

    `python`: the interpreter, for the error.
    """
    if "error" not in answer:
        return answer
    missing = answer.get("missing")
    do = None
    if missing:
        package = _INSTALL if missing.partition(".")[0] == "verifiers" else missing
        do = f"{python} -m pip install {package}"
    line = f" ({answer['line']})" if answer.get("line") else ""
    raise ConfigError(
        "verifiers cannot load the environment",
        where=key,
        found=f"{taskset}: {answer['error']}{line}",
        do=do,
    )


def open_environment(config: VerifiersEnvironment, key: str = "rollout.environment") -> None:
    """Load an environment once. Raises: ConfigError if it cannot be loaded."""
    block = environment_block(config.id, config.arguments)
    _requests(config.python, [{"open": block}], key, config.id, config.start_timeout_s)


def read_tasks(source: VerifiersPrompts, key: str) -> list[tuple[str, dict[str, Any]]]:
    """Return (prompt as text, task) of each task. A taskset is read once in a process.

    `key`: of the source, for errors. Raises: ConfigError if the taskset cannot be loaded;
    DataError if it has no task.
    """
    tasks = json.loads(_tasks(source.model_dump_json(), key))
    if not tasks:
        raise DataError(
            "the taskset has no task",
            where=f"{key}: {source.id}",
            found=f"none after the first {source.skip}",
            do="choose a smaller skip",
        )
    return [(_prompt_text(task, source.skip + number), task) for number, task in enumerate(tasks)]


@lru_cache(maxsize=32)
def _tasks(source_json: str, key: str) -> str:
    source = VerifiersPrompts.model_validate_json(source_json)
    # Only the tasks are read, but an environment needs agents that can be built.
    block = environment_block(source.id, {"taskset": source.arguments})
    requests = [{"open": block}, {"tasks": [source.skip, source.size]}]
    answers = _requests(source.python, requests, key, source.id, source.start_timeout_s)
    return json.dumps(answers[1]["tasks"])


def _requests(
    python: str, requests: list[dict[str, Any]], key: str, taskset: str, timeout_s: float
) -> list[dict[str, Any]]:
    """Return the answers of a program that answers these requests only."""
    command = worker_command(python, key)
    lines = [json.dumps({"id": number, **request}) for number, request in enumerate(requests)]
    try:
        done = subprocess.run(
            command,
            input="\n".join(lines) + "\n",
            capture_output=True,
            text=True,
            timeout=timeout_s,
            start_new_session=True,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            "verifiers took too long to load the environment",
            where=key,
            found=taskset,
            expected=f"loaded within {timeout_s:g} s ({key}.start_timeout_s)",
        ) from error
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    for answer in answers:
        require_result(answer, command[0], key, taskset)
    if len(answers) < len(requests):
        raise ConfigError(
            "the program of verifiers ended",
            where=key,
            found=f"exit status {done.returncode}: {done.stderr[-ANSWER_TAIL_CHARS:].strip()}",
        )
    return answers


def _prompt_text(task: dict[str, Any], number: int) -> str:
    """Return the text of a task's prompt; the name or the number of a task without one."""
    prompt = task.get("prompt")
    if isinstance(prompt, list):
        contents = [message.get("content") for message in prompt]
        prompt = "\n\n".join(content for content in contents if isinstance(content, str))
    return prompt or task.get("name") or task.get("id") or str(number)
