"""`MegatronEngine`: one training rank of the policy, as the trainer actor holds it.

Every rank makes an engine with the same configuration. All methods are collective unless their
docstring says otherwise: every rank makes the same calls in the same order.

    construct → `load_hf` or `load_checkpoint` → any of score, train, save, export → `close`

After an error in `train` the state is undefined: restore it. Between two calls, parts of the state
can be offloaded (`occupy`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from rlpipe.batch.columns import BatchColumns
from rlpipe.batch.packing import PackingPlan
from rlpipe.config.megatron_hooks import MegatronHooks
from rlpipe.config.model import ModelConfig
from rlpipe.config.train import CriticConfig, TrainConfig
from rlpipe.engines.megatron.arguments import set_global_arguments
from rlpipe.engines.megatron.bridges.bridge import load_weights
from rlpipe.engines.megatron.bridges.stages import full_weights
from rlpipe.engines.megatron.checkpoint import checkpoint, disk_space
from rlpipe.engines.megatron.checkpoint.export import save_hf
from rlpipe.engines.megatron.checkpoint.first_adapters import begin_adapters
from rlpipe.engines.megatron.checkpoint.state import (
    initialize_adam_state,
    named_weights,
    state_digest,
    weights_digest,
)
from rlpipe.engines.megatron.critic_exchange import CriticExchange, ExchangeAddress
from rlpipe.engines.megatron.memory import (
    PARTS,
    DeviceMemory,
    HostCopy,
    Part,
    RankModels,
    distinct_storages,
)
from rlpipe.engines.megatron.model import lora
from rlpipe.engines.megatron.model.build import (
    ScoringModel,
    TrainedModel,
    build,
    build_scoring_model,
    release_models,
)
from rlpipe.engines.megatron.process_groups import MegatronRank
from rlpipe.engines.megatron.results import TrainResult, combined_disk_space, combined_result
from rlpipe.engines.megatron.train import token_weights
from rlpipe.engines.megatron.train.critic import Critic, load_head
from rlpipe.engines.megatron.train.routing import (
    RoutingRecorder,
    RoutingReplay,
    check_routing,
    layers_with_experts_only,
)
from rlpipe.engines.megatron.train.score import packed_for, score, score_packed
from rlpipe.engines.megatron.train.step import train_steps
from rlpipe.errors import DataError, TrainerError


def _load_teacher(
    teacher_dir: str, model: ModelConfig, train: TrainConfig, deterministic: bool
) -> ScoringModel:
    teacher = build_scoring_model(teacher_dir, model, train, deterministic=deterministic)
    load_weights(teacher.bridge, teacher.chunks, teacher_dir)
    return teacher


class MegatronEngine(MegatronRank):
    """One rank of the policy.

    Raises: ConfigError for a configuration or model directory that cannot be trained.
    """

    _trained: TrainedModel | None = None
    _reference: HostCopy | None = None
    _critic: Critic | None = None
    _teacher: ScoringModel | None = None
    _exchange: CriticExchange | None = None

    def __init__(
        self,
        model_dir: str,
        model: ModelConfig,
        train: TrainConfig,
        *,
        rollout_temperature: float,
        total_optimizer_steps: int,
        rank: int,
        world_size: int,
        master: tuple[str, int],
        threads: int,
        deterministic: bool = False,
        critic: CriticConfig | None = None,
        critic_optimizer_steps: int = 0,
        critic_exchange: ExchangeAddress | None = None,
        teacher_dir: str | None = None,
        hooks: MegatronHooks | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        """Join the other ranks at `master` (host, port; rank 0 listens) and build the model.

        The weights are undefined until they are loaded. `threads`: CPU threads of this rank without
        CUDA. `deterministic`: see `reproducibility`. `critic`: build a critic in the same ranks,
        with a schedule of `critic_optimizer_steps`. `critic_exchange`: address of the exchange with
        a critic that has its own ranks (`critic_engine`). `teacher_dir`: the teacher's Hugging Face
        directory. `hooks`: user functions. `timeout_s`: deadline of every collective.
        """
        self._model_dir = model_dir
        self._adapter = model.adapter
        self._temperature = rollout_temperature
        self._join(
            train, "train.parallel", rank, world_size, master, threads, timeout_s, deterministic
        )
        self._hooks = hooks or MegatronHooks(TrainConfig())
        try:
            set_global_arguments(train)
            self._hooks.init()
            policy = build(
                model_dir, model, train, total_optimizer_steps, deterministic=deterministic
            )
            check_routing(policy.bridge.config, train)
            if critic is not None:
                steps = critic_optimizer_steps
                self._critic = Critic(
                    critic, model_dir, model, train, steps, deterministic=deterministic
                )
            if teacher_dir is not None:
                self._teacher = _load_teacher(teacher_dir, model, train, deterministic)
            if critic_exchange is not None:
                self._exchange = CriticExchange(critic_exchange, exchange_rank=rank)
        except BaseException:
            self._leave()
            raise
        initialize_adam_state(policy.optimizer)
        self._trained = policy
        self._memory = DeviceMemory()

    @property
    def trained(self) -> TrainedModel:
        """The policy. Raises: TrainerError after `close` and while the weights are offloaded."""
        if self._trained is None:
            raise TrainerError("this engine is closed", where="trainer", do="make a new one")
        self._memory.require("weights")
        return self._trained

    @property
    def critic(self) -> Critic:
        """The critic of these ranks.

        Raises: TrainerError if this engine has none, and while the weights are offloaded.
        """
        if self._critic is None:
            raise TrainerError(
                "this engine has no critic",
                where="trainer",
                do="set advantage.advantage_estimator: ppo",
            )
        self._memory.require("weights")
        return self._critic

    def occupy(self, parts: Collection[Part] = PARTS) -> dict[str, float]:
        """Keep exactly these parts of the state in device memory (`DeviceMemory.occupy`).

        A call that needs an offloaded part raises TrainerError. Not collective, but call it on all
        ranks.
        """
        assert self._trained is not None, "this engine is closed"
        models = (self._trained,) if self._critic is None else (self._trained, self._critic.trained)
        return self._memory.occupy(RankModels(models, self._teacher).tensors(), parts)

    def load_hf(self, model_dir: str | Path | None = None) -> None:
        """Load the weights of a Hugging Face directory (default: the model's own).

        A critic loads its initial weights, adapters get their first values (`model.adapter`). The
        optimizer state stays.
        """
        self._memory.require("optimizer")
        source = str(model_dir or self._model_dir)
        load_weights(self.trained.bridge, self.trained.chunks, source)
        load_head(self.trained, source, "model.source.hf_checkpoint")
        begin_adapters(self.trained, self._adapter)
        self.trained.optimizer.reload_model_params()
        if self._critic is not None:
            self._critic.load_initial_weights(self.trained)

    def load_checkpoint(
        self, directory: str | Path, *, iteration: int | None = None, weights_only: bool = False
    ) -> int:
        """Restore from `directory`/iter_* and return the iteration of the checkpoint.

        `iteration`: None is the latest. `weights_only` keeps the optimizer state. A critic that is
        not in the checkpoint loads its initial weights. Raises: TrainerError if there is no
        checkpoint.
        """
        self._memory.require("optimizer")
        critic = self._critic.trained if self._critic else None
        loaded = checkpoint.load(
            self.trained, directory, iteration=iteration, weights_only=weights_only, critic=critic
        )
        if self._critic is not None and not loaded.critic:
            self._critic.load_initial_weights(self.trained)
        return loaded.iteration

    def load_adam_state(self, folder: str | Path) -> None:
        """Restore the policy's optimizer state and schedule from a conversion of another run's.

        `folder`: of `convert.to_adam_state`. The weights must be loaded already.
        """
        self._memory.require("optimizer")
        checkpoint.load_adam_state(self.trained, folder)

    def load_critic_adam_state(self, folder: str | Path) -> None:
        """Restore the optimizer state and schedule of the critic in these ranks.

        Arguments as `load_adam_state`. Raises: TrainerError without such a critic.
        """
        self._memory.require("optimizer")
        checkpoint.load_adam_state(self.critic.trained, folder)

    def load_reference(self, directory: str | Path) -> None:
        """Keep a checkpoint's weights as the reference policy.

        The policy has the reference's weights afterwards: load the policy's weights again.
        """
        self._memory.require("optimizer")
        checkpoint.load(self.trained, directory, weights_only=True)
        self.keep_reference()

    def save_checkpoint(self, directory: str | Path, iteration: int) -> Path:
        """Write `directory`/iter_%07d and the marker file, and return the folder.

        Every rank writes its part. A critic with its own ranks must save at the same time.
        """
        self._memory.require("optimizer")
        critic = self._critic.trained if self._critic else None
        combine = partial(combined_disk_space, self._exchange)
        return checkpoint.save(
            self.trained, directory, iteration, critic, model_dir=self._model_dir, combine=combine
        )

    def require_room(self, directory: str | Path) -> None:
        """Require disk space for one checkpoint below `directory`. Raises: StoreFull."""
        models = [self.trained] if self._critic is None else [self.trained, self._critic.trained]
        disk_space.require_disk_space(
            models, Path(directory), partial(combined_disk_space, self._exchange)
        )

    def save_hf(self, directory: str | Path) -> None:
        """Write a Hugging Face directory (from rank 0)."""
        save_hf(self.trained, self._model_dir, directory)

    def export(self, directory: Path) -> None:
        """Write a Hugging Face directory, unless rank 0 has it already."""
        existing = [directory.exists()]
        torch.distributed.broadcast_object_list(existing, src=0)
        if not existing[0]:
            unfinished = directory.with_name(f"{directory.name}.unfinished")
            self.save_hf(unfinished)
            if torch.distributed.get_rank() == 0:
                unfinished.rename(directory)

    def keep_reference(self) -> None:
        """Copy the current weights to CPU memory as the reference policy.

        Of a policy with adapters only these are copied: the other weights never change. Not
        collective, but call it on all ranks.
        """
        self._reference = self._reference or HostCopy()
        self._reference.copy_from(distinct_storages(self._weights()))

    def score(
        self,
        batch: BatchColumns,
        *,
        model: Literal["policy", "reference", "teacher"] = "policy",
        max_tokens: int | None = None,
        temperature: float | None = None,
        replay: bool = False,
    ) -> np.ndarray:
        """Return the log-prob of every response token (masked or not): [R] float32, on every rank.

        `max_tokens`: packed tokens of a micro-batch; None: `self.max_tokens`. `temperature`: None
        is the rollout's. `replay`: route the policy by the batch's experts; needs one of the two
        settings for routing replay. Raises: TrainerError for `reference` before `keep_reference`
        and for `teacher` without one; DataError for a token outside the teacher's vocabulary, or
        experts of another model.
        """
        limit = max_tokens or self.max_tokens
        temperature = self._temperature if temperature is None else temperature
        if model == "teacher":
            return self._score_by_teacher(batch, temperature, limit)
        with self._reference_weights() if model == "reference" else contextlib.nullcontext():
            self._hooks.before_log_prob(self.trained.chunks, "ref_" if model == "reference" else "")
            if not replay:
                return score(self.trained, batch, temperature=temperature, max_tokens=limit)
        assert model == "policy" and batch.routed_experts is not None
        routing = RoutingReplay(self.trained, batch.routed_experts)
        try:
            return score(
                self.trained,
                batch,
                temperature=temperature,
                max_tokens=limit,
                forward_context=routing.forward_context,
            )
        finally:
            routing.close()

    def routing_of_engines(self, batch: BatchColumns) -> np.ndarray:
        """Return the experts that the engines recorded, without the layers that have no experts.

        [S, layers with experts × k] uint16. Not collective. Raises: DataError if the experts are of
        another model, or an engine did not record a layer.
        """
        assert batch.routed_experts is not None
        return layers_with_experts_only(self.trained.bridge.config, batch.routed_experts)

    def score_with_reference(
        self, batch: BatchColumns, *, max_tokens: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the `score` of policy and reference, from one packing of the batch.

        Equal to two calls of `score`. Raises: as `score`.
        """
        packed = packed_for(self.trained, batch, max_tokens or self.max_tokens)

        def scored(prefix: str) -> np.ndarray:
            self._hooks.before_log_prob(self.trained.chunks, prefix)
            return score_packed(self.trained, packed, batch, temperature=self._temperature)

        policy = scored("")
        with self._reference_weights():
            return policy, scored("ref_")

    def score_and_route(
        self, batch: BatchColumns, *, max_tokens: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the policy's `score` and the experts of every token, on every rank.

        The experts are [S, layers with experts × k] uint16. Needs `train.use_routing_replay`.
        """
        recorder = RoutingRecorder(self.trained)
        self._hooks.before_log_prob(self.trained.chunks, "")
        log_probs = score(
            self.trained,
            batch,
            temperature=self._temperature,
            max_tokens=max_tokens or self.max_tokens,
            forward_context=recorder.forward_context,
        )
        return log_probs, recorder.column(batch)

    def values(self, batch: BatchColumns, *, max_tokens: int | None = None) -> np.ndarray:
        """Return the critic's value before every response token: [R] float32, on every rank.

        `max_tokens`: as `score`. Raises: TrainerError without a critic.
        """
        if self._exchange is not None:
            return self._exchange.values(None, batch.sizes.num_response_tokens)
        return self.critic.values(batch, max_tokens=max_tokens or self.max_tokens)

    def reads_whole_batch(self, *, scored: bool) -> bool:
        """True if the optimizer steps read samples of other ranks. Arguments as `token_weights`."""
        # The loss of multi-token prediction counts tokens by their positions in all samples.
        predicts = bool(self.trained.bridge.config.mtp_num_layers)
        return predicts or token_weights.reads_whole_batch(self._train.loss, scored=scored)

    def train(
        self,
        batch: BatchColumns,
        plan: PackingPlan,
        *,
        version: int = 0,
        critic_only: bool = False,
        hook_args: Any = None,
    ) -> TrainResult:
        """Take the plan's optimizer steps, the critic's first. The result is equal on every rank.

        `batch`: the whole batch, or at least this rank's `trained_samples` unless
        `reads_whole_batch`.
        `version`: the weight version that is trained, for hooks. `hook_args`: the `args` of user
        functions. Raises: DataError for a batch without the columns of its loss or a plan of
        another batch; TrainerError if a loss or gradient is not finite.
        """
        plan.check(len(batch.sizes), self._data_parallel)
        self._memory.require("optimizer", "gradients")
        start_s = time.perf_counter()
        steps: list[dict[str, float]] = [{} for _ in plan.steps]
        proximal = None
        if self._critic is not None or (critic_only and self._exchange is None):
            steps = self.critic.train(batch, plan)
        if not critic_only:
            policy = train_steps(
                self.trained,
                batch,
                plan,
                self._train.loss,
                self._temperature,
                hook_args,
                partial(self._before_step, version),
            )
            steps = [mine | other for mine, other in zip(policy.metrics, steps, strict=True)]
            proximal = policy.proximal_log_probs
        # The last metrics of a step are read from the device, so the device has finished.
        seconds = time.perf_counter() - start_s
        if self._exchange is not None:
            combined = combined_result(self._exchange, state_digest(self.trained), steps)
            return replace(combined, proximal_log_probs=proximal, seconds=seconds)
        return TrainResult(steps, self.state_digest(), proximal, seconds)

    def state_digest(self) -> str:
        """Return 128 bits in hex over the state of policy and critic, equal on all ranks.

        The state: weights, main weights, moments and schedule.
        """
        self._memory.require("optimizer")
        if self._exchange is not None:
            return combined_result(self._exchange, state_digest(self.trained), []).state_digest
        return state_digest(self.trained, *([self._critic.trained] if self._critic else []))

    def weights_digest(self) -> str:
        """Return 128 bits in hex over the policy's weights, equal on all ranks."""
        return weights_digest(self.trained)

    def named_hf_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield full tensors by Hugging Face name, on every rank.

        Exhaust the iterator on all ranks. Tensors may alias the parameters.
        """
        return full_weights(self.trained.bridge, self.trained.chunks)

    def close(self) -> None:
        """Leave all process groups and release the models. Idempotent.

        This process may make another engine afterwards.
        """
        if self._trained is not None:
            release_models(self._trained, self._teacher, self._critic and self._critic.trained)
            self._trained = self._reference = self._critic = self._teacher = self._exchange = None
            self._leave()

    def _score_by_teacher(
        self, batch: BatchColumns, temperature: float, max_tokens: int
    ) -> np.ndarray:
        teacher = self._teacher
        if teacher is None:
            raise TrainerError(
                "this engine has no teacher",
                where="trainer/score",
                do="set teacher.opd_type and advantage.use_opd",
            )
        self._memory.require("teacher")
        hf_config: Any = teacher.bridge.hf_config
        if (largest := int(batch.tokens.max(initial=0))) >= hf_config.vocab_size:
            raise DataError(
                "a token is outside the teacher's vocabulary",
                where="teacher.opd_teacher_load",
                found=f"token {largest} in the batch",
                expected=f"tokens below the teacher's vocabulary size {hf_config.vocab_size}",
                do="use a teacher with the policy's tokenizer",
            )
        self._hooks.before_log_prob(teacher.chunks, "teacher_")
        return score(teacher, batch, temperature=temperature, max_tokens=max_tokens)

    def _before_step(self, version: int, step: int) -> None:
        trained = self.trained
        self._hooks.before_train_step(
            version, step, trained.chunks, trained.optimizer, trained.scheduler
        )

    def _weights(self) -> list[torch.Tensor]:
        """Return the weights in which policy and reference can differ."""
        if self.trained.lora is not None:
            return lora.adapter_weights(self.trained.models)
        return [tensor for _, tensor in named_weights(self.trained.models)]

    def _reference_weights(self) -> contextlib.AbstractContextManager[None]:
        if self._reference is None:
            raise TrainerError(
                "this engine has no reference policy",
                where="trainer/score",
                do="call keep_reference first",
            )
        return self._memory.swapped_weights(self._reference, self._weights())
