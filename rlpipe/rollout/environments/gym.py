"""Sample in an environment with `reset` and `step`, as in Gymnasium: `rollout.environment`.

    class Game:                                     # path: games.py:Game
        def reset(self, *, seed, options) -> (observation, info)
        def step(self, action) -> (observation, reward, terminated, truncated, info)
        def close(self) -> None                     # if it exists

    prompt: reset's observation │ action 1 │ observation │ action 2 │ ... │ last action
                                  trained    masked        trained          trained

Each rollout makes one environment. `path` is a class, or a function that returns the environment.
A method is plain, which runs in a thread, or async. An action is the text of a reply, without
reasoning and without the text that stopped it.

    observation   text. With data.apply_chat_template it is a message of the user, or a list of
                  messages; otherwise its tokens follow the tokens of the reply as they are.
    seed          `metadata.seed` of the row, else a number from data.rollout_seed and the group's
                  id. All samples of a group have the same seed, so their rewards can be compared.
    options       {"prompt", "label", "metadata"} of the row, and "sample_seed", a number that
                  differs between the samples of a group.
    reward        a number. The sample's reward is the sum over all steps.
    info          a dict. Its entry "reward_parts" (name → number) is summed over all steps too.

The rollout ends if the environment is terminated or truncated, after `max_turns` actions, or
without room for another token; then the sample is `truncated`. `metadata.environment` of the row
has "reward", "parts", "turns" and "ended" (terminated, truncated, max_turns or length), and
`reward.function.type: environment` reads the reward there. A rollout that was cut off starts again,
because an environment cannot be stored.

Entry points: `load_gym`, `GymRollouts`.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

from rlpipe.config.guard import error_text, guarded, location
from rlpipe.config.hooks import error_with_line, file_of, load_hook
from rlpipe.config.rollout import GymEnvironment, RolloutConfig
from rlpipe.data.source import sample_seed
from rlpipe.errors import ConfigError, DataError, HookError
from rlpipe.rewards.scorer import ENVIRONMENT_KEY
from rlpipe.rollout.agent.chat_sessions import (
    ChatSessions,
    FinishedReply,
    ReplyRequest,
    Session,
)
from rlpipe.rollout.hooks.generate_function import call_hook
from rlpipe.types import Sample, Status

_KEY = "rollout.environment"
_FORMS = {
    "reset": "(observation, info)",
    "step": "(observation, reward, terminated, truncated, info)",
}


def load_gym(config: GymEnvironment) -> Callable[[], Any]:
    """Return the function that makes one environment.

    Raises: ConfigError if it cannot be loaded or does not accept `config.arguments`, or if a class
    lacks a method.
    """
    make = load_hook(config.path)
    try:
        inspect.signature(make).bind(**config.arguments)
    except TypeError as error:
        raise ConfigError(
            "the environment does not take these arguments",
            where=f"{_KEY}.arguments",
            found=f"{config.arguments}: {error}",
            expected=f"parameters of {config.path}",
        ) from error
    if inspect.isclass(make):
        _require_methods(make, config.path)
    return lambda: make(**config.arguments)


def _require_methods(owner: Any, path: str) -> None:
    missing = [name for name in _FORMS if not callable(getattr(owner, name, None))]
    if missing:
        raise ConfigError(
            f"the environment has no method {' and '.join(missing)}",
            where=f"{_KEY}.path",
            found=path,
            expected="reset(seed=..., options=...) and step(action)",
        )


@dataclass
class _Episode:
    """What one rollout has got from its environment."""

    reward: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    turns: int = 0
    ended: str | None = None

    def as_metadata(self) -> dict[str, Any]:
        return {
            "reward": self.reward,
            "parts": self.parts,
            "turns": self.turns,
            "ended": self.ended,
        }


class GymRollouts:
    """The generate function of a run with an environment. Called as a user function."""

    def __init__(
        self,
        make: Callable[[], Any],
        rollout: RolloutConfig,
        sessions: ChatSessions,
        *,
        chat: bool,
        context_len: int,
        rollout_seed: int,
    ) -> None:
        """`chat`: observations are messages. `context_len`: most tokens of prompt and response.
        `rollout_seed`: of the seeds of groups whose rows name none."""
        assert isinstance(rollout.environment, GymEnvironment)
        self._make = make
        self._rollout = rollout
        self._path = rollout.environment.path
        self._timeout_s = rollout.environment.call_timeout_s
        self._sessions = sessions
        self._chat = chat
        self._context_len = context_len
        self._rollout_seed = rollout_seed

    async def __call__(
        self, _args: Namespace, sample: Sample, sampling_params: dict[str, Any]
    ) -> Sample:
        """Return the sample with `metadata.environment`; its tokens are those of its session.

        Raises: HookError for a failure of the environment; DataError without room for an action;
        errors of `ChatSessions.replies`.
        """
        environment = await self._call("make", self._make)
        try:
            _require_methods(environment, self._path)
            return await self._play(environment, sample, sampling_params.get("sampling_seed"))
        finally:
            if close := getattr(environment, "close", None):
                await self._call("close", close)

    async def _play(self, environment: Any, sample: Sample, sampling_seed: int | None) -> Sample:
        session = self._sessions.session(sample.session_id)
        answer = await self._call(
            "reset", environment.reset, seed=self._seed(sample), options=_options(sample)
        )
        observation, _ = self._result("reset", answer)
        history = self._history(observation, "reset")
        episode = _Episode()
        num_prompt = 0
        is_cut = False
        while episode.ended is None:
            seed = None if sampling_seed is None else (sampling_seed + episode.turns) % 2**31
            request = self._request(history, seed)
            num_tokens = self._sessions.count_tokens(session, request)
            num_prompt = num_prompt or num_tokens
            room = self._room(num_prompt, num_tokens, sample)
            if room < 1:
                episode.ended = "length"
                is_cut = True
                break
            reply = await self._reply(session, request, room)
            reason = reply.generation.finish_reason
            if reason == "abort":
                return sample
            observation = await self._step(environment, reply.text.content, episode)
            # The limit of a turn ends an action, the limit of the response cuts one off.
            is_cut = reason == "length" and len(reply.generation.response_ids) >= room
            if episode.ended is None:
                history = self._continued(history, reply, observation)
        sample.status = Status.TRUNCATED if is_cut else Status.COMPLETED
        sample.metadata = {**sample.metadata, ENVIRONMENT_KEY: episode.as_metadata()}
        return sample

    async def _step(self, environment: Any, action: str, episode: _Episode) -> Any:
        """Take an action; add its reward and the end to the episode. Return the observation."""
        answer = await self._call("step", environment.step, action)
        observation, reward, terminated, truncated, info = self._result("step", answer)
        episode.reward += self._number(reward, "the reward")
        parts = (info.get("reward_parts") if isinstance(info, dict) else None) or {}
        if not isinstance(parts, dict):
            raise self._error("step", "reward_parts is not a dict", parts, "name → number")
        for name, value in parts.items():
            more = self._number(value, f"reward part {name!r}")
            episode.parts[str(name)] = episode.parts.get(str(name), 0.0) + more
        episode.turns += 1
        if terminated:
            episode.ended = "terminated"
        elif truncated:
            episode.ended = "truncated"
        elif episode.turns >= self._rollout.max_turns:
            episode.ended = "max_turns"
        return observation

    async def _reply(self, session: Session, request: ReplyRequest, room: int) -> FinishedReply:
        turn_len = self._rollout.max_turn_tokens
        most = room if turn_len is None else min(room, turn_len)
        request = replace(request, sampling={**request.sampling, "max_new_tokens": most})
        (reply,) = await self._sessions.replies(session, request)
        return reply

    def _request(self, history: Any, seed: int | None) -> ReplyRequest:
        sampling, _ = self._sessions.sampling(_KEY, {}, None, None)
        if seed is not None:
            sampling["sampling_seed"] = seed
        given = {"messages": history} if self._chat else {"prompt": history}
        return ReplyRequest(where=f"{_KEY} {self._path}", sampling=sampling, **given)

    def _room(self, num_prompt: int, num_tokens: int, sample: Sample) -> int:
        """Return the number of tokens that may still follow.

        Raises: DataError if the first observation leaves no room.
        """
        response_room = self._rollout.rollout_max_response_len - (num_tokens - num_prompt)
        room = min(response_room, self._context_len - num_tokens)
        if room < 1 and num_tokens == num_prompt:
            raise DataError(
                "the environment's first observation leaves no room for an action",
                where=f"{self._path} on {sample.group_id}/{sample.index}",
                found=f"{num_tokens} tokens",
                expected=f"fewer than {self._context_len}",
            )
        return room

    def _history(self, observation: Any, method: str) -> Any:
        """Return the first messages, or the first tokens."""
        if self._chat:
            return self._messages(observation, method)
        return self._sessions.gateway.encode(self._text(observation, method))

    def _continued(self, history: Any, reply: FinishedReply, observation: Any) -> Any:
        """Return the messages or the tokens up to the next action."""
        if self._chat:
            return [*history, reply.text.message(), *self._messages(observation, "step")]
        new = self._sessions.gateway.encode(self._text(observation, "step"))
        return [*history, *reply.generation.response_ids, *new]

    def _messages(self, observation: Any, method: str) -> list[dict[str, Any]]:
        if isinstance(observation, list) and all(
            isinstance(message, dict) and isinstance(message.get("role"), str)
            for message in observation
        ):
            return [dict(message) for message in observation]
        return [{"role": "user", "content": self._text(observation, method)}]

    def _text(self, observation: Any, method: str) -> str:
        if isinstance(observation, str):
            return observation
        expected = "text, or a list of messages" if self._chat else "text"
        raise self._error(method, "the observation is not text", observation, expected)

    def _result(self, method: str, answer: Any) -> tuple[Any, ...]:
        expected = _FORMS[method]
        if not isinstance(answer, tuple | list) or len(answer) != expected.count(",") + 1:
            raise self._error(method, "the environment returned another form", answer, expected)
        return tuple(answer)

    def _number(self, value: Any, name: str) -> float:
        value = value.item() if getattr(value, "ndim", None) == 0 else value
        if not isinstance(value, Real) or not math.isfinite(value):
            raise self._error("step", f"{name} is not a finite number", value, "a finite number")
        return float(value)

    def _error(self, method: str, problem: str, found: Any, expected: str) -> HookError:
        found = f"{type(found).__name__} {found!r}"[:200]
        return HookError(problem, where=f"{self._path}, {method}", found=found, expected=expected)

    async def _call(self, method: str, function: Callable[..., Any], *args: Any, **kw: Any) -> Any:
        """Call a method of the environment.

        Raises: HookError with file and line of its exception, or after the deadline.
        """
        where = f"{self._path}, {method}"
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                return await call_hook(guarded(function), *args, **kw)
        except Exception as error:
            if isinstance(error, TimeoutError) and deadline.expired():
                raise HookError(
                    "the environment took too long",
                    where=where,
                    expected=f"a result within {self._timeout_s:g} s ({_KEY}.call_timeout_s)",
                ) from error
            line = location(error, file_of(function))
            found = error_text(error) + line if line else error_with_line(error)
            raise HookError("the environment failed", where=where, found=found) from error

    def _seed(self, sample: Sample) -> int:
        seed = sample.metadata.get("seed")
        if isinstance(seed, int) and not isinstance(seed, bool):
            return seed
        return sample_seed(self._rollout_seed, sample.group_id, 0)


def _options(sample: Sample) -> dict[str, Any]:
    return {
        "prompt": sample.prompt,
        "label": sample.label,
        "metadata": dict(sample.metadata),
        "sample_seed": sample.seed,
    }
