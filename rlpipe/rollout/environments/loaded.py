"""Load the environment of a run: `rollout.environment`.

Entry points: `load_environment` in the generator, `check_environment` before the start.
"""

from __future__ import annotations

from typing import Protocol

from rlpipe.config.rollout import (
    EnvironmentConfig,
    GymEnvironment,
    RolloutConfig,
    VerifiersEnvironment,
)
from rlpipe.config.run import RunConfig
from rlpipe.data.verifiers_tasks import open_environment
from rlpipe.rollout.agent.chat_sessions import ChatSessions
from rlpipe.rollout.environments.gym import GymRollouts, load_gym
from rlpipe.rollout.environments.verifiers import Verifiers
from rlpipe.rollout.hooks.generate_function import GenerateHook


class Environment(Protocol):
    """The environment of a run. All its rollouts and evaluations share it."""

    def hook(
        self, config: RunConfig, rollout: RolloutConfig, sessions: ChatSessions, *, context_len: int
    ) -> GenerateHook:
        """Return the function that samples in the environment, for one rollout or evaluation.

        `rollout`: settings of this rollout. `context_len`: most tokens of prompt and response.
        """
        ...

    async def close(self) -> None:
        """End what the environment has started."""
        ...


class _Gym:
    def __init__(self, config: GymEnvironment) -> None:
        self._make = load_gym(config)
        self._path = config.path

    def hook(
        self, config: RunConfig, rollout: RolloutConfig, sessions: ChatSessions, *, context_len: int
    ) -> GenerateHook:
        rollouts = GymRollouts(
            self._make,
            rollout,
            sessions,
            chat=config.data.apply_chat_template,
            context_len=context_len,
            rollout_seed=config.data.rollout_seed,
        )
        return GenerateHook(self._path, rollouts, of_group=False, takes_evaluation=False)

    async def close(self) -> None:
        """Do nothing: each rollout has closed its own environment."""


def load_environment(config: EnvironmentConfig) -> Environment:
    """Load an environment. Raises: ConfigError if a class cannot be loaded, or lacks a method."""
    return Verifiers(config) if isinstance(config, VerifiersEnvironment) else _Gym(config)


def check_environment(config: EnvironmentConfig) -> None:
    """Raises: ConfigError if the environment cannot be loaded."""
    if isinstance(config, VerifiersEnvironment):
        open_environment(config)
    else:
        load_gym(config)
