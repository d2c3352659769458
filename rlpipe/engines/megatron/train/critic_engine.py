"""`CriticEngine`: one rank of a critic that has its own ranks, as the trainer actor holds it.

The critic's ranks are a separate world with their own parallel layout. Policy and critic get the
same calls in the same order. They exchange (`critic_exchange`) the values, and the digest and
metrics of every new state.

    construct → `load_hf` or `load_checkpoint` → any of values, train, save → `close`

Of the user's hooks only the first one runs here. The mathematics is in `critic`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rlpipe.batch.columns import BatchColumns
from rlpipe.batch.packing import PackingPlan
from rlpipe.config.megatron_hooks import MegatronHooks
from rlpipe.config.model import ModelConfig
from rlpipe.config.train import CriticConfig, TrainConfig
from rlpipe.engines.megatron.arguments import set_global_arguments
from rlpipe.engines.megatron.checkpoint import checkpoint, disk_space
from rlpipe.engines.megatron.checkpoint.state import state_digest
from rlpipe.engines.megatron.critic_exchange import CriticExchange, ExchangeAddress
from rlpipe.engines.megatron.model.build import release_models
from rlpipe.engines.megatron.process_groups import MegatronRank
from rlpipe.engines.megatron.results import TrainResult, combined_disk_space, combined_result
from rlpipe.engines.megatron.train.critic import Critic
from rlpipe.errors import TrainerError


class CriticEngine(MegatronRank):
    """One rank of the critic.

    All methods are collective over the critic's ranks. Those that exchange are also collective over
    the policy's ranks: `values`, `train`, `state_digest`, `save_checkpoint` and `require_room`.
    """

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
        critic_exchange: ExchangeAddress,
        threads: int,
        deterministic: bool = False,
        hooks: MegatronHooks | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        """Join the critic's other ranks at `master` and the policy's ranks at `critic_exchange`.

        The weights are undefined until they are loaded. `train`: the policy's settings; the critic
        uses them where it has no setting. Other arguments as `MegatronEngine`. Raises: ConfigError
        for a configuration or model directory that cannot be trained.
        """
        own = train.model_copy(update={"parallel": config.parallel or train.parallel})
        self._join(
            own, "critic.parallel", rank, world_size, master, threads, timeout_s, deterministic
        )
        try:
            set_global_arguments(train)
            (hooks or MegatronHooks(TrainConfig())).init()
            critic = Critic(
                config, policy_dir, model, own, optimizer_steps, deterministic=deterministic
            )
            self._exchange: CriticExchange | None = CriticExchange(
                critic_exchange, exchange_rank=critic_exchange.policy_ranks + rank
            )
        except BaseException:
            self._leave()
            raise
        self._critic: Critic | None = critic

    @property
    def critic(self) -> Critic:
        """The critic. Raises: TrainerError after `close`."""
        return self._open()[0]

    def load_hf(self) -> None:
        """Load the initial weights. The optimizer state stays."""
        self.critic.load_initial_weights(None)

    def load_adam_state(self, folder: str | Path) -> None:
        """Restore the optimizer state and schedule from a conversion of another run's.

        `folder`: of `convert.to_adam_state`. The weights must be loaded already.
        """
        checkpoint.load_adam_state(self.critic.trained, folder)

    def load_checkpoint(self, directory: str | Path, *, weights_only: bool = False) -> int:
        """Restore the critic of `directory`/iter_* and return the iteration of the checkpoint.

        The critic may have been saved in the policy's ranks or in its own. A critic that is not in
        the checkpoint loads its initial weights, if necessary from the checkpoint's policy. Raises:
        TrainerError if there is no checkpoint.
        """
        loaded = checkpoint.load_critic(self.critic.trained, directory, weights_only=weights_only)
        if not loaded.critic:
            self.critic.load_initial_weights(Path(directory))
        return loaded.iteration

    def save_checkpoint(self, directory: str | Path, iteration: int) -> Path:
        """Write `directory`/critic/iter_%07d and return the folder.

        Every rank of the critic writes its part. The policy must save at the same time.
        """
        critic, exchange = self._open()
        combine = partial(combined_disk_space, exchange)
        return checkpoint.save(
            critic.trained, Path(directory) / checkpoint.CRITIC, iteration, combine=combine
        )

    def require_room(self, directory: str | Path) -> None:
        """Require disk space for one checkpoint, together with the policy. Raises: StoreFull."""
        critic, exchange = self._open()
        disk_space.require_disk_space(
            [critic.trained], Path(directory), partial(combined_disk_space, exchange)
        )

    def values(self, batch: BatchColumns, *, max_tokens: int | None = None) -> np.ndarray:
        """Return the value before every response token (masked or not): [R] float32.

        `max_tokens`: packed tokens of a micro-batch; None: `self.max_tokens`.
        """
        critic, exchange = self._open()
        values = critic.values(batch, max_tokens=max_tokens or self.max_tokens)
        return exchange.values(values, batch.sizes.num_response_tokens)

    def reads_whole_batch(self, *, scored: bool) -> bool:
        """False: the critic's steps read this rank's samples."""
        return False

    def train(
        self,
        batch: BatchColumns,
        plan: PackingPlan,
        *,
        version: int = 0,
        critic_only: bool = False,
        hook_args: Any = None,
    ) -> TrainResult:
        """Take the plan's optimizer steps and return the combined result of policy and critic.

        Raises: DataError for a batch without values and returns or a plan of another batch;
        TrainerError if a loss or gradient is not finite.
        """
        critic, exchange = self._open()
        plan.check(len(batch.sizes), self._data_parallel)
        steps = critic.train(batch, plan)
        return combined_result(exchange, state_digest(critic.trained), steps)

    def state_digest(self) -> str:
        """Return the digest of policy and critic together, equal on all ranks."""
        critic, exchange = self._open()
        return combined_result(exchange, state_digest(critic.trained), []).state_digest

    def close(self) -> None:
        """Leave all process groups and release the model. Idempotent.

        This process may make another engine afterwards.
        """
        if self._critic is not None:
            release_models(self._critic.trained)
            self._critic = self._exchange = None
            self._leave()

    def _open(self) -> tuple[Critic, CriticExchange]:
        if self._critic is None or self._exchange is None:
            raise TrainerError("this engine is closed", where="trainer/critic", do="make a new one")
        return self._critic, self._exchange
