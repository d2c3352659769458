"""`CriticRank`: one rank of a critic that has ranks of its own, as a Ray actor.

It gets the calls that the policy's ranks get, except those about engines, and works while they do:
values while they score, optimizer steps while they take theirs. Its part of a checkpoint lies in
the folder `critic` of it.

Not here: how the two agree on a state (`engines.megatron.meeting`).
"""

from __future__ import annotations

from typing import Any

from rlpipe.actors.trainer.rank import Address, Rank, collective
from rlpipe.actors.trainer.spec import TrainerSpec
from rlpipe.config.megatron_hooks import MegatronHooks
from rlpipe.engines.megatron.meeting import MeetingPlace
from rlpipe.engines.megatron.train.critic_engine import CriticEngine
from rlpipe.lineage.states import Lineage


class CriticRank(Rank[CriticEngine]):
    """One rank. See the module."""

    critic = True

    def __init__(self, rank: int, world_size: int, policy_ranks: int, cwd: str) -> None:
        super().__init__(rank, world_size, cwd, policy_ranks=policy_ranks)

    @collective
    def advantage(self, *, key: str, before: str, version: int, **about: Any) -> None:
        """Give the policy's ranks the values of the batch that these rows make; they write the node
        `key`. As `TrainerRank`'s."""
        engine, spec = self._require(before)
        batch = self._batch(before=before, version=version, **about)
        with self._profiled("train_log_probs", version):
            engine.values(batch.columns, max_tokens=spec.advantage.log_probs_max_tokens_per_gpu)

    def _made(self, spec: TrainerSpec, master: Address, meeting: Address | None) -> CriticEngine:
        assert spec.critic is not None and meeting is not None, "a critic's rank without a critic"
        return CriticEngine(
            spec.critic,
            spec.model_dir,
            spec.model,
            spec.train,
            optimizer_steps=spec.critic_optimizer_steps,
            rank=self.rank,
            world_size=self.world_size,
            master=master,
            meeting=MeetingPlace(meeting, spec.world_size, spec.critic_ranks, spec.patience_s),
            threads=spec.threads,
            deterministic=spec.deterministic,
            hooks=MegatronHooks(spec.train, spec.hook_args),
        )

    def _load_reference(self, lineage: Lineage) -> None:
        """The reference is the policy's."""

    def _remember_reference(self, version: int) -> None:
        """The reference is the policy's."""

    def _place(self, prefix: str) -> str:
        return f"{prefix}/critic"
