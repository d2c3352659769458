"""`CriticEngine`: one rank of a critic that has ranks of its own, as the trainer actor holds it.

A world of its own beside the policy's, in its own parallel layout. Both get the same calls in the
same order and join where one needs the other (`meeting`): after `values`, and wherever a state is
made, whose digest and metrics are those of both.

    made → `load_hf` or `load_checkpoint` → any of values, train, save → `close`          as `MegatronEngine`

Not here: the mathematics (`critic`); hooks but the first, reference and teacher, which are the
policy's.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rlpipe.batch.packing import BatchColumns, PackingPlan
from rlpipe.config.megatron_hooks import MegatronHooks
from rlpipe.config.model import ModelConfig
from rlpipe.config.models import CriticConfig
from rlpipe.config.train import TrainConfig
from rlpipe.engines.megatron.arguments import give_arguments
from rlpipe.engines.megatron.checkpoint import checkpoint
from rlpipe.engines.megatron.checkpoint.state import state_digest
from rlpipe.engines.megatron.engine import TrainResult, agreed, room_of_both
from rlpipe.engines.megatron.meeting import Meeting, MeetingPlace
from rlpipe.engines.megatron.member import Member
from rlpipe.engines.megatron.model.build import drop
from rlpipe.engines.megatron.train.critic import Critic
from rlpipe.errors import TrainerError


class CriticEngine(Member):
    """One rank. All methods are collective over the critic's ranks, and those that say so over the
    policy's too."""

    def __init__(
        self,
        config: CriticConfig,
        policy_dir: str,
        model: ModelConfig,
        train: TrainConfig,
        *,
        optimizer_steps: int,
        rank: int,
        world_size: int,
        master: tuple[str, int],
        meeting: MeetingPlace,
        threads: int,
        deterministic: bool = False,
        hooks: MegatronHooks | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        """Join the critic's other ranks at `master` and the policy's at `meeting`; no weights yet.
        Arguments as `MegatronEngine`.

        `train`: the policy's settings, which are the critic's where it has none of its own.
        Raises: ConfigError for a configuration or model directory that cannot be trained.
        """
        own = train.model_copy(update={"parallel": config.parallel or train.parallel})
        place = {"rank": rank, "world_size": world_size, "master": master, "timeout_s": timeout_s}
        self._join(
            own, where="critic.parallel", threads=threads, deterministic=deterministic, **place
        )
        try:
            give_arguments(train)
            (hooks or MegatronHooks(TrainConfig())).init()
            critic = Critic(
                config, policy_dir, model, own, optimizer_steps, deterministic=deterministic
            )
            self._meeting: Meeting | None = Meeting(meeting, place=meeting.policy_ranks + rank)
        except BaseException:
            self._leave()
            raise
        self._critic: Critic | None = critic

    @property
    def critic(self) -> Critic:
        """Raises: TrainerError after `close`."""
        return self._open()[0]

    def load_hf(self) -> None:
        """Take the first weights; optimizer state stays."""
        self.critic.begin(None)

    def load_checkpoint(self, directory: str | Path, *, weights_only: bool = False) -> int:
        """Restore the critic of `directory`/iter_*, with or without ranks of its own there; returns
        the iteration.

        One that is not in it takes its first weights, if need be from the policy that is. Raises:
        TrainerError if there is no checkpoint.
        """
        loaded = checkpoint.load_critic(self.critic.trained, directory, weights_only=weights_only)
        if not loaded.critic:
            self.critic.begin(Path(directory))
        return loaded.iteration

    def save_checkpoint(self, directory: str | Path, iteration: int) -> Path:
        """Write `directory`/critic/iter_%07d; returns the folder. Every rank of the critic writes
        its part, and the policy is saved at the same time."""
        critic, meeting = self._open()
        together = partial(room_of_both, meeting)
        return checkpoint.save(
            critic.trained, Path(directory) / checkpoint.CRITIC, iteration, together=together
        )

    def require_room(self, directory: str | Path) -> None:
        """As the policy's, which asks at the same time. Raises: StoreFull."""
        critic, meeting = self._open()
        checkpoint.require_room([critic.trained], Path(directory), partial(room_of_both, meeting))

    def values(self, batch: BatchColumns, *, max_tokens: int | None = None) -> np.ndarray:
        """[R] float32: the value before every response token (masked or not). Collective over the
        policy's ranks too.

        `max_tokens`: packed tokens of a micro-batch; None: `self.max_tokens`.
        """
        critic, meeting = self._open()
        found = critic.values(batch, max_tokens=max_tokens or self.max_tokens)
        return meeting.values(found, batch.num_response_tokens)

    def train(
        self,
        batch: BatchColumns,
        plan: PackingPlan,
        *,
        version: int = 0,
        critic_only: bool = False,
        hook_args: Any = None,
    ) -> TrainResult:
        """Take the plan's optimizer steps, while the policy takes its own: the result of both.
        Collective over all of them.

        Raises: DataError for a batch without values and returns or a plan of another batch;
        TrainerError if a loss or gradient is not finite.
        """
        critic, meeting = self._open()
        plan.check(len(batch), self._data_parallel)
        steps = critic.train(batch, plan)
        return agreed(meeting, state_digest(critic.trained), steps)

    def state_digest(self) -> str:
        """That of policy and critic together. Collective over all of them."""
        critic, meeting = self._open()
        return agreed(meeting, state_digest(critic.trained), []).state_digest

    def close(self) -> None:
        """Leave all process groups and drop the model; this process may then make another engine.
        Twice is once."""
        if self._critic is not None:
            drop(self._critic.trained)
            self._critic = self._meeting = None
            self._leave()

    def _open(self) -> tuple[Critic, Meeting]:
        if self._critic is None or self._meeting is None:
            raise TrainerError("this engine is closed", where="trainer/critic", do="make a new one")
        return self._critic, self._meeting
