"""`RankActor`: which actor a trainer rank is, by its number. Not here: its name (`layout`), where
it is placed (`placement`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlpipe.actors.trainer.critic_rank import CriticRank
from rlpipe.actors.trainer.trainer import TrainerRank
from rlpipe.config.model import ResourcesConfig


@dataclass(frozen=True, slots=True)
class RankActor:
    """What one is started from."""

    kind: type[TrainerRank | CriticRank]
    arguments: tuple[Any, ...]

    @classmethod
    def of(cls, number: int, resources: ResourcesConfig, cwd: str) -> RankActor:
        """The policy's ranks, and after them those that the critic has to itself."""
        policy_ranks = resources.trainer_ranks
        if number < policy_ranks:
            return cls(TrainerRank, (number, policy_ranks, cwd))
        rank = number - policy_ranks
        return cls(CriticRank, (rank, resources.critic_ranks, policy_ranks, cwd))
