"""`TrainerRank`: one Megatron rank of the policy as a Ray actor, and of a critic that lives in the
policy's ranks.

Beside what any rank does (`rank`) it scores batches, keeps reference and teacher, and gives weights
to engines.

Not here: a critic with ranks of its own (`critic_rank`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlpipe.actors.trainer.first import check_first
from rlpipe.actors.trainer.pushing import Pusher, served_dir, served_tensors
from rlpipe.actors.trainer.rank import Address, Rank, collective
from rlpipe.actors.trainer.scoring import critic_metrics, scored, with_server_s_scores
from rlpipe.actors.trainer.spec import TrainerSpec
from rlpipe.batch.build import with_advantages
from rlpipe.batch.files import read_batch, write_batch
from rlpipe.batch.metrics import batch_metrics
from rlpipe.config.megatron_hooks import MegatronHooks
from rlpipe.config.train import SyncConfig
from rlpipe.engines.megatron import platform
from rlpipe.engines.megatron.engine import MegatronEngine
from rlpipe.engines.megatron.meeting import MeetingPlace
from rlpipe.engines.megatron.memory import Part
from rlpipe.lineage.states import Lineage
from rlpipe.sync.probe import Probe, compare, mean_difference, spread
from rlpipe.sync.transports.disk import WeightWriter
from rlpipe.sync.transports.versions import Share, WeightStore
from rlpipe.types import Stage


class TrainerRank(Rank[MegatronEngine]):
    """One rank. See the module."""

    def __init__(self, rank: int, world_size: int, cwd: str) -> None:
        super().__init__(rank, world_size, cwd)
        self._reference_version = 0
        self._pusher: Pusher | None = None
        self._writer: WeightWriter | None = None
        self._probe: Probe | None = None

    @collective
    def advantage(
        self, *, key: str, before: str, version: int, **about: Any
    ) -> dict[str, Any] | None:
        """Fix the batch of scored rows, score it, estimate advantages and store it as
        `data/advantage/<key>`.

        `version` is the weight version held; `about`: which rows, as `_batch` takes it. Rank 0
        answers `{"files", "outputs", "seconds"}`, the others None.
        """
        start = time.perf_counter()
        engine, spec = self._require(before)
        supervised = spec.advantage.advantage_estimator == "none"
        batch = self._batch(before=before, version=version, **about)
        with self._profiled("train_log_probs", version):
            columns = batch.columns if supervised else scored(engine, batch.columns, spec)
        if self.rank != 0:
            return None
        if not supervised:
            columns = with_advantages(
                batch, with_server_s_scores(columns, spec), spec.advantage, spec.hook_args
            )
        record = write_batch(self._files, key, batch, columns)
        outputs = {"groups": list(batch.groups), "dropped": batch.dropped, "samples": len(columns)}
        if spec.advantage.reference:
            outputs["reference_version"] = self._reference_version
        if spec.critic is not None:
            outputs["critic_only"] = version < spec.critic.num_critic_only_steps
        metrics = batch_metrics(batch, columns) | critic_metrics(columns)
        return {
            "files": [record],
            "outputs": {**outputs, "metrics": metrics},
            "seconds": time.perf_counter() - start,
        }

    @collective
    def push(
        self,
        *,
        held: str,
        engines: list[str],
        stamp: str,
        sync: SyncConfig,
        places: dict[str, list[int]] | None = None,
    ) -> dict[str, Any]:
        """Send the held weights to the engines under a stamp: `{"bytes", "seconds", "unknown"}`.
        Rank 0 sends, all ranks gather.

        `places`: of the engines on our GPUs, by URL, the trainer ranks there in the order of the
        engine's own. `unknown` names the engines (by URL, with the reason) that did not get them.
        Raises: SyncError (on rank 0) if none did.
        """
        start = time.perf_counter()
        engine, spec = self._require(held)
        if self._pusher is None:
            self._pusher = Pusher(engine, spec, rank=self.rank, world_size=self.world_size)
        return {
            **self._pusher.push(engines, stamp, sync, places or {}),
            "seconds": time.perf_counter() - start,
        }

    def remembers(self) -> str | None:
        """Stamp of the weights whose bytes this rank keeps, so that it can write what changes of
        them."""
        return self._writer.remembered if self._writer else None

    @collective
    def write(self, *, held: str, stamp: str, base: str | None, sync: SyncConfig) -> Share:
        """Write this rank's share of the held weights as files, all of it or changes since `base`.
        As `WeightWriter.write`."""
        engine, spec = self._require(held)
        if self._writer is None or self._writer.sync != sync:
            Path(spec.work_dir).mkdir(parents=True, exist_ok=True)
            store = WeightStore(
                sync.disk_dir(spec.store_root, spec.engine_quantization),
                scratch=Path(spec.work_dir),
            )
            self._writer = WeightWriter(
                store, served_dir(spec), sync, rank=self.rank, world_size=self.world_size
            )
        return self._writer.write(served_tensors(engine, spec), stamp, base)

    @collective
    def probe(self, *, held: str, batch: str, samples: int) -> None:
        """Score `samples` samples of a batch node with the held weights, for `compare`."""
        engine, spec = self._require(held)
        columns = read_batch(self._files, self._nodes.get(Stage.ADVANTAGE, batch))
        chosen = columns.select(spread(len(columns), samples))
        log_probs = engine.score(chosen, temperature=1.0)
        # One by one and backward: what changes with the packing is noise.
        backward = np.arange(len(chosen))[::-1]
        alone = engine.score(chosen.select(backward), temperature=1.0, max_tokens=1)
        again = np.concatenate(chosen.select(backward).split(alone)[::-1])
        update = None
        if chosen.proximal_log_probs is not None:
            # Scored as the advantage stage did: at the rollout's temperature, with its routing.
            replay = spec.train.use_rollout_routing_replay
            after = engine.score(chosen, max_tokens=1, replay=replay)
            update = chosen.proximal_log_probs - after
        self._probe = Probe(chosen, log_probs, mean_difference(log_probs, again), update)

    @collective
    def compare(self, *, engines: list[str], timeout_s: float) -> list[dict[str, Any]] | None:
        """Have engines score the samples of `probe`; the model is not needed.

        Rank 0 returns an `Agreement` of each engine as a dict, the others None.
        Raises: EngineError, DeadlineExceeded.
        """
        assert self._probe is not None, "probe first"
        if self.rank > 0:
            return None
        return compare(self._probe, engines, timeout_s, at_once=platform.CUDA_FOUND)

    @collective
    def occupy(self, parts: Sequence[Part]) -> dict[str, float]:
        """As `MegatronEngine.occupy`; {} of a rank that has not been set up, which has nothing."""
        return {} if self._engine is None else self._engine.occupy(parts)

    def close(self) -> None:
        """Leave the process groups, also those with engines; the actor can be set up again."""
        if self._pusher is not None:
            self._pusher.close()
        self._pusher = self._writer = None
        super().close()

    def _made(self, spec: TrainerSpec, master: Address, meeting: Address | None) -> MegatronEngine:
        return MegatronEngine(
            spec.model_dir,
            spec.model,
            spec.train,
            rollout_temperature=spec.rollout_temperature,
            total_optimizer_steps=spec.total_optimizer_steps,
            rank=self.rank,
            world_size=self.world_size,
            master=master,
            threads=spec.threads,
            deterministic=spec.deterministic,
            critic=spec.critic if meeting is None else None,
            critic_optimizer_steps=spec.critic_optimizer_steps,
            meeting=MeetingPlace(meeting, spec.world_size, spec.critic_ranks, spec.patience_s)
            if meeting
            else None,
            teacher_dir=spec.teacher.opd_teacher_load if spec.teacher else None,
            hooks=MegatronHooks(spec.train, spec.hook_args),
        )

    def _load_reference(self, lineage: Lineage) -> None:
        engine, spec = self._ready()
        if spec.advantage.reference:
            refreshed = lineage.reference
            init = self._nodes.get(Stage.INIT, lineage.init)
            kept = refreshed.checkpoint if refreshed else init.parents.get("start_from")
            if kept:
                engine.load_reference(self._fetched(Stage.CHECKPOINT, kept))
            else:
                engine.load_hf()
                check_first(init, spec, "weights_digest", engine.weights_digest())
                engine.keep_reference()
            self._reference_version = refreshed.version if refreshed else 0

    def _of_weights(self) -> dict[str, str]:
        engine, _ = self._ready()
        return {"weights_digest": engine.weights_digest()}

    def _remember_reference(self, version: int) -> None:
        engine, spec = self._ready()
        interval = spec.ref_update_interval
        if spec.advantage.reference and (version == 0 or (interval and version % interval == 0)):
            engine.keep_reference()
            self._reference_version = version
