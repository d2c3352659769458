"""`MegatronEngine`: one training rank, as the trainer actor holds it.

Made by every rank with the same configuration; all methods are collective: every rank makes the
same calls in the same order. Made → `load_hf` or `load_checkpoint` → any of score, train, save,
export → `close`. After an error in `train` the state is neither the old nor the new one: restore
it. Between any two calls parts of it may be put to sleep (`occupy`).

Not here: which batch is trained when (the train stage), records, retries.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from rlpipe.batch.packing import BatchColumns, PackingPlan
from rlpipe.config.megatron_hooks import MegatronHooks
from rlpipe.config.model import ModelConfig
from rlpipe.config.models import CriticConfig
from rlpipe.config.train import TrainConfig
from rlpipe.engines.megatron.arguments import give_arguments
from rlpipe.engines.megatron.bridges.bridge import load_weights
from rlpipe.engines.megatron.bridges.stages import whole_weights
from rlpipe.engines.megatron.checkpoint import checkpoint
from rlpipe.engines.megatron.checkpoint.export import save_hf
from rlpipe.engines.megatron.checkpoint.state import (
    fill_adam,
    joined,
    state_digest,
    weights,
    weights_digest,
)
from rlpipe.engines.megatron.meeting import Meeting, MeetingPlace
from rlpipe.engines.megatron.member import Member
from rlpipe.engines.megatron.memory import PARTS, DeviceMemory, HostCopy, Part, Resident, distinct
from rlpipe.engines.megatron.model.build import Scorer, Trained, build, build_scorer, drop
from rlpipe.engines.megatron.train.critic import Critic
from rlpipe.engines.megatron.train.routing import (
    Recording,
    Replaying,
    check_routing,
    layers_with_experts_only,
)
from rlpipe.engines.megatron.train.score import score
from rlpipe.engines.megatron.train.step import train_steps
from rlpipe.errors import DataError, TrainerError


@dataclass(slots=True)
class TrainResult:
    """What one iteration's optimizer steps did. Equal on every rank."""

    steps: list[dict[str, float]] = field(default_factory=list)
    """Metrics of every optimizer step. Policy: loss, pg_loss, entropy, clipfrac, ppo_kl, ratio,
    kl_loss, train_rollout_logprob_abs_diff, with use_opsm opsm_clipfrac, with use_tis tis, tis_abs
    and tis_clipfrac, with rejection rs_rejectfrac and rs_vetofrac; supervised: loss, entropy; a
    custom loss also what it names; all: grad_norm (before clipping), lr, tokens, samples. All but
    the last four are aggregated over tokens like the loss. With a critic also value_loss,
    value_clipfrac, critic_grad_norm, critic_lr; while it is trained alone, only those."""
    state_digest: str = ""
    """Of the state after the last step."""


def agreed(meeting: Meeting, digest: str, steps: list[dict[str, float]]) -> TrainResult:
    """The result of policy and critic together, from what this rank's one of them has: the same on
    every rank of both."""
    policy, critic = meeting.exchange({"digest": digest, "steps": steps})
    both = [mine | other for mine, other in zip(policy["steps"], critic["steps"], strict=True)]
    return TrainResult(both, joined(policy["digest"], critic["digest"]))


def room_of_both(meeting: Meeting | None, mine: checkpoint.Room) -> checkpoint.Room:
    """What the checkpoints of policy and critic need together, from what this rank's one of them
    does: the same on every rank."""
    if meeting is None:
        return mine
    policy, critic = (checkpoint.Room(**said) for said in meeting.exchange(asdict(mine)))
    return policy.beside(critic)


class MegatronEngine(Member):
    """One rank. Raises: ConfigError for a configuration or model directory that cannot be
    trained."""

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
        meeting: MeetingPlace | None = None,
        teacher_dir: str | None = None,
        hooks: MegatronHooks | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        """Join the other ranks at `master` (host, port; rank 0 listens there) and build the model,
        without weights yet.

        A second engine of the same processes needs another port: a rank that is ahead could meet
        the old one. `threads`: CPU threads of this rank where there is no CUDA. `deterministic`:
        see `determinism`. `critic`: make one too, whose schedule is `critic_optimizer_steps` long.
        `meeting`: where to join one that has ranks of its own (`critic_engine`) and gets the calls
        that it has too at the same time. `teacher_dir`: the teacher's Hugging Face directory.
        `hooks`: functions of the user. `timeout_s`: deadline of every collective.
        """
        self._model_dir = model_dir
        self._temperature = rollout_temperature
        place = {"rank": rank, "world_size": world_size, "master": master, "timeout_s": timeout_s}
        self._join(
            train, where="train.parallel", threads=threads, deterministic=deterministic, **place
        )
        self._reference: HostCopy | None = None
        self._critic: Critic | None = None
        self._teacher: Scorer | None = None
        self._meeting: Meeting | None = None
        self._hooks = hooks or MegatronHooks(TrainConfig())
        try:
            give_arguments(train)
            self._hooks.init()
            self._trained: Trained | None = build(
                model_dir, model, train, total_optimizer_steps, deterministic=deterministic
            )
            if train.replays_routing:
                which = (
                    "use_rollout_routing_replay"
                    if train.use_rollout_routing_replay
                    else "use_routing_replay"
                )
                check_routing(self._trained.bridge.config, where=f"train.{which}")
            if critic is not None:
                steps = critic_optimizer_steps
                self._critic = Critic(
                    critic, model_dir, model, train, steps, deterministic=deterministic
                )
            if teacher_dir is not None:
                self._teacher = build_scorer(teacher_dir, model, train, deterministic=deterministic)
                load_weights(self._teacher.bridge, [self._teacher.ddp], teacher_dir)
            if meeting is not None:
                self._meeting = Meeting(meeting, place=rank)
        except BaseException:
            self._leave()
            raise
        fill_adam(self._trained.optimizer)
        self._memory = DeviceMemory()

    @property
    def trained(self) -> Trained:
        """Raises: TrainerError after `close`, and while the weights sleep."""
        if self._trained is None:
            raise TrainerError("this engine is closed", where="trainer", do="make a new one")
        self._memory.require("weights")
        return self._trained

    @property
    def critic(self) -> Critic:
        """Raises: TrainerError if this engine has none, and while the weights sleep."""
        if self._critic is None:
            raise TrainerError(
                "this engine has no critic",
                where="trainer",
                do="advantage.advantage_estimator: ppo",
            )
        self._memory.require("weights")
        return self._critic

    def occupy(self, parts: Collection[Part] = PARTS) -> dict[str, float]:
        """Keep these parts of the state in device memory and no others, until the next time:
        `DeviceMemory.occupy`.

        What sleeps cannot be used: a call that needs it raises TrainerError. Not collective, but
        call it on all ranks.
        """
        assert self._trained is not None, "this engine is closed"
        models = (self._trained,) if self._critic is None else (self._trained, self._critic.trained)
        return self._memory.occupy(Resident(models, self._teacher).tensors(), parts)

    def load_hf(self, model_dir: str | Path | None = None) -> None:
        """Take the weights of a Hugging Face directory (default: the model's own), and of a critic
        its first ones; optimizer state stays."""
        self._memory.require("optimizer")
        load_weights(self.trained.bridge, [self.trained.ddp], str(model_dir or self._model_dir))
        self.trained.optimizer.reload_model_params()
        if self._critic is not None:
            self._critic.begin(self.trained)

    def load_checkpoint(
        self, directory: str | Path, *, iteration: int | None = None, weights_only: bool = False
    ) -> int:
        """Restore from `directory`/iter_*; returns the iteration it was saved under. `weights_only`
        keeps the optimizer state.

        A critic that is not in it takes its first weights. Raises: TrainerError if there is no
        checkpoint.
        """
        self._memory.require("optimizer")
        critic = self._critic.trained if self._critic else None
        loaded = checkpoint.load(
            self.trained, directory, iteration=iteration, weights_only=weights_only, critic=critic
        )
        if self._critic is not None and not loaded.critic:
            self._critic.begin(self.trained)
        return loaded.iteration

    def load_reference(self, directory: str | Path) -> None:
        """Take the reference policy from a checkpoint. The weights are the reference's afterwards:
        load them anew."""
        self._memory.require("optimizer")
        checkpoint.load(self.trained, directory, weights_only=True)
        self.keep_reference()

    def save_checkpoint(self, directory: str | Path, iteration: int) -> Path:
        """Write `directory`/iter_%07d and the marker file beside it; returns the folder. Every rank
        writes its part, and a critic that has ranks of its own is saved at the same time."""
        self._memory.require("optimizer")
        critic = self._critic.trained if self._critic else None
        together = partial(room_of_both, self._meeting)
        return checkpoint.save(
            self.trained, directory, iteration, critic, model_dir=self._model_dir, together=together
        )

    def require_room(self, directory: str | Path) -> None:
        """Is there room for a checkpoint below `directory`? Collective, as `save_checkpoint`.
        Raises: StoreFull."""
        models = [self.trained] if self._critic is None else [self.trained, self._critic.trained]
        checkpoint.require_room(models, Path(directory), partial(room_of_both, self._meeting))

    def save_hf(self, directory: str | Path) -> None:
        """Write a Hugging Face directory (from rank 0)."""
        save_hf(self.trained, self._model_dir, directory)

    def keep_reference(self) -> None:
        """Take the current weights as the reference policy (a copy in CPU memory). Not collective,
        but call it on all ranks."""
        self._reference = self._reference or HostCopy()
        self._reference.take(distinct(self._weights()))

    def score(
        self,
        batch: BatchColumns,
        *,
        model: Literal["policy", "reference", "teacher"] = "policy",
        max_tokens: int | None = None,
        temperature: float | None = None,
        replay: bool = False,
    ) -> np.ndarray:
        """[R] float32 log-prob of every response token (masked or not) at the rollout's
        temperature, on every rank.

        `max_tokens`: packed tokens of a micro-batch; None: `self.max_tokens`. `temperature`:
        another one than the rollout's. `replay`: the policy routes as the batch's experts say; the
        engine must be made with one of the two settings for that. Raises: TrainerError for
        `reference` before `keep_reference` and for `teacher` without one; DataError for a token
        that the teacher does not have, or experts that are not this model's.
        """
        limit = max_tokens or self.max_tokens
        temperature = self._temperature if temperature is None else temperature
        if model == "teacher":
            return self._score_by_teacher(batch, temperature, limit)
        with self._reference_weights() if model == "reference" else contextlib.nullcontext():
            self._hooks.before_log_prob(self.trained.ddp, "ref_" if model == "reference" else "")
            if not replay:
                return score(self.trained, batch, temperature=temperature, max_tokens=limit)
        assert model == "policy" and batch.routed_experts is not None
        replaying = Replaying(self.trained, batch.routed_experts)
        try:
            return score(
                self.trained,
                batch,
                temperature=temperature,
                max_tokens=limit,
                around=replaying.around,
            )
        finally:
            replaying.close()

    def routing_of_engines(self, batch: BatchColumns) -> np.ndarray:
        """[S, layers with experts × k] uint16: the batch's experts as the engines named them, for
        all layers. Not collective.

        Raises: DataError if they are not this model's, or an engine did not notice where it routed.
        """
        assert batch.routed_experts is not None
        return layers_with_experts_only(self.trained.bridge.config, batch.routed_experts)

    def score_and_route(
        self, batch: BatchColumns, *, max_tokens: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """The policy's `score`, and the experts that it routed every token to: [S, layers × k]
        uint16, on every rank.

        The engine must be made with `train.use_routing_replay`.
        """
        recording = Recording(self.trained)
        self._hooks.before_log_prob(self.trained.ddp, "")
        limit = max_tokens or self.max_tokens
        found = score(
            self.trained,
            batch,
            temperature=self._temperature,
            max_tokens=limit,
            around=recording.around,
        )
        return found, recording.column(len(batch.tokens))

    def values(self, batch: BatchColumns, *, max_tokens: int | None = None) -> np.ndarray:
        """[R] float32: the critic's value before every response token (masked or not), on every
        rank. `max_tokens`: as `score`.

        Raises: TrainerError without a critic.
        """
        if self._meeting is not None:
            return self._meeting.values(None, batch.num_response_tokens)
        return self.critic.values(batch, max_tokens=max_tokens or self.max_tokens)

    def train(
        self,
        batch: BatchColumns,
        plan: PackingPlan,
        *,
        version: int = 0,
        critic_only: bool = False,
        hook_args: Any = None,
    ) -> TrainResult:
        """Take the plan's optimizer steps, with the critic's first. The same result on every rank.

        `version`: the weight version that is trained, for hooks. `hook_args`: what functions of the
        user get as `args`.

        Raises: DataError for a batch without the columns its loss needs or a plan of another batch;
        TrainerError if a loss or gradient is not finite.
        """
        plan.check(len(batch), self._data_parallel)
        self._memory.require("optimizer", "gradients")
        steps: list[dict[str, float]] = [{} for _ in plan.steps]
        if self._critic is not None or (critic_only and self._meeting is None):
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
            steps = [mine | other for mine, other in zip(policy, steps, strict=True)]
        if self._meeting is not None:
            return agreed(self._meeting, state_digest(self.trained), steps)
        return TrainResult(steps, self.state_digest())

    def state_digest(self) -> str:
        """128 bits in hex over weights, main weights, moments and schedule, a critic's too, of all
        ranks; on all the same."""
        self._memory.require("optimizer")
        if self._meeting is not None:
            return agreed(self._meeting, state_digest(self.trained), []).state_digest
        return state_digest(self.trained, *([self._critic.trained] if self._critic else []))

    def weights_digest(self) -> str:
        """128 bits in hex over the policy's weights of all ranks; on all the same."""
        return weights_digest(self.trained)

    def named_hf_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Full tensors by Hugging Face name, on every rank; exhaust it on all of them. They may
        alias the parameters."""
        return whole_weights(self.trained.bridge, self.trained.ddp)

    def close(self) -> None:
        """Leave all process groups and drop the model; this process may then make another engine.
        Twice is once."""
        if self._trained is not None:
            drop(self._trained, self._teacher, self._critic and self._critic.trained)
            self._trained = self._reference = self._critic = self._teacher = self._meeting = None
            self._leave()

    def _score_by_teacher(
        self, batch: BatchColumns, temperature: float, max_tokens: int
    ) -> np.ndarray:
        teacher = self._teacher
        if teacher is None:
            raise TrainerError(
                "there is no teacher",
                where="trainer/score",
                do="set teacher.opd_type and advantage.use_opd",
            )
        self._memory.require("teacher")
        hf_config: Any = teacher.bridge.hf_config
        if (largest := int(batch.tokens.max(initial=0))) >= hf_config.vocab_size:
            raise DataError(
                "the teacher does not have this token",
                where="teacher.opd_teacher_load",
                found=f"token {largest} in the batch",
                expected=f"the policy's tokens; the teacher has {hf_config.vocab_size}",
            )
        self._hooks.before_log_prob(teacher.ddp, "teacher_")
        return score(teacher, batch, temperature=temperature, max_tokens=max_tokens)

    def _before_step(self, version: int, step: int) -> None:
        trained = self.trained
        self._hooks.before_train_step(
            version, step, trained.ddp, trained.optimizer, trained.scheduler
        )

    def _weights(self) -> list[torch.Tensor]:
        return [tensor for _, tensor in weights(self.trained.model)]

    def _reference_weights(self) -> contextlib.AbstractContextManager[None]:
        if self._reference is None:
            raise TrainerError(
                "there is no reference policy",
                where="trainer/score",
                do="call keep_reference first",
            )
        return self._memory.showing(self._reference, self._weights())
