"""Ray actor classes of trainer ranks that import Megatron only inside the actor.

Ray reads an actor's methods from its class in the process that starts the actor. That is the
conductor, which computes nothing: importing torch, transformers and Megatron there cost 6 s of CPU
time at every start. These classes have the methods of `rank_actors`, and forward each call.

Entry point: `rank_actor`, the class and arguments of a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlpipe.config.model import ResourcesConfig
from rlpipe.system.imports import quick_imports

BOTH = (
    "address",
    "advantage",
    "close",
    "forget_upload",
    "initialise",
    "require_room",
    "restore",
    "save",
    "setup",
    "status",
    "train",
    "upload",
    "uploaded",
    "uploading",
)
"""Methods of every rank."""
POLICY_METHODS = ("compare", "occupy", "probe", "push", "remembers", "write")
"""Methods that only the policy's ranks have."""


def _forwarding(name: str, methods: tuple[str, ...]) -> type:
    """Return an actor class that makes a `rank_actors.<name>` and forwards these methods to it."""

    def make(self: Any, *arguments: Any) -> None:
        with quick_imports():
            from rlpipe.actors.trainer import rank_actors

        self._rank = getattr(rank_actors, name)(*arguments)

    def forward(method: str) -> Callable[..., Any]:
        def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
            return getattr(self._rank, method)(*arguments, **keywords)

        call.__name__ = method
        return call

    # By this module and name, Ray's workers find the class instead of unpickling a copy.
    members = {"__init__": make, "__module__": __name__, "__qualname__": name}
    return type(name, (), {**members, **{method: forward(method) for method in methods}})


TrainerRank = _forwarding("TrainerRank", (*BOTH, *POLICY_METHODS))
"""Actor of a rank of the policy. Ray shows the process by this name."""
CriticRank = _forwarding("CriticRank", BOTH)
"""Actor of a rank of a critic that has its own ranks."""


def rank_actor(number: int, resources: ResourcesConfig, cwd: str) -> tuple[type, tuple[Any, ...]]:
    """Return the actor class of a rank, and the arguments to start it with.

    Numbers of the critic's own ranks follow those of the policy.
    """
    policy_ranks = resources.trainer_ranks
    if number < policy_ranks:
        return TrainerRank, (number, policy_ranks, cwd)
    rank = number - policy_ranks
    return CriticRank, (rank, resources.critic_ranks, policy_ranks, cwd)
