"""Ray actors of the trainer: ranks of the policy, and ranks of a critic that has its own.

`TrainerRank` adds to `Rank`: scoring of batches, reference and teacher, weights for the engines.
`CriticRank` gets the same calls except those about engines, and works at the same time: values
while the policy scores, optimizer steps while the policy takes its own. Its part of a checkpoint is
in the subfolder `critic`.

Ray gets these classes through `rank_class`, which forwards every call.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlpipe.actors.trainer.first_weights import check_first_weights
from rlpipe.actors.trainer.profiling import Work
from rlpipe.actors.trainer.pushing import Pusher
from rlpipe.actors.trainer.rank import Address, Rank, collective
from rlpipe.actors.trainer.scoring import (
    NO_LOGITS,
    critic_flops,
    critic_metrics,
    gpu_name,
    never_scores,
    score_batch,
    scoring_metrics,
    trains_fp8,
    with_pixels,
    with_teacher_server_scores,
    without_sampled_placeholders,
)
from rlpipe.actors.trainer.trainer_spec import TrainerSpec
from rlpipe.batch.build import staleness_of
from rlpipe.batch.columns import BatchColumns, BatchPart, BatchSizes
from rlpipe.batch.estimate import with_advantages
from rlpipe.batch.files import StoredBatch, adapters_of, write_adapters, write_batch
from rlpipe.batch.metrics import ProximalSums, batch_metrics
from rlpipe.batch.packing import number_of_steps, shares_of
from rlpipe.batch.rows import RolloutRows, RowScalars
from rlpipe.config.megatron_hooks import MegatronHooks
from rlpipe.config.train import SyncConfig
from rlpipe.engines.megatron import platform
from rlpipe.engines.megatron.checkpoint.adapter_file import adapter_file, load_adapter_file
from rlpipe.engines.megatron.critic_exchange import ExchangeAddress
from rlpipe.engines.megatron.engine import MegatronEngine
from rlpipe.engines.megatron.memory import Part
from rlpipe.engines.megatron.results import TrainResult
from rlpipe.engines.megatron.train.critic_engine import CriticEngine
from rlpipe.errors import ObjectMissing
from rlpipe.lineage.states import Lineage
from rlpipe.observe.flops import ModelFlops, model_flops, speed_metrics
from rlpipe.sync.probe import Probe, compare, mean_difference, spread
from rlpipe.sync.transports.versions import Share
from rlpipe.system.gpus import gpu_metrics
from rlpipe.system.parts import Parts
from rlpipe.types import FileRecord, Node, Stage


class TrainerRank(Rank[MegatronEngine]):
    """One rank of the policy, and of a critic that shares the policy's ranks."""

    def __init__(self, rank: int, world_size: int, cwd: str) -> None:
        super().__init__(rank, world_size, cwd)
        self._reference_version = 0
        self._pusher: Pusher | None = None
        self._probe: Probe | None = None
        self._own_proximal: tuple[str, np.ndarray] | None = None
        """Digest of the batch trained last, and the log-probs that its step computed itself."""
        self._last_batch: StoredBatch | None = None
        """The batch trained last, until the probe of its push."""

    @collective
    def advantage(
        self, *, key: str, before: str, version: int, **rows: Any
    ) -> dict[str, Any] | None:
        """Fix the batch, score it, estimate advantages, and write `data/advantage/<key>`.

        `version`: the weight version held. `rows`: the rows, as arguments of `_batch`. Return
        `{"files", "outputs", "seconds"}` on rank 0, None on the others.
        """
        start = time.perf_counter()
        engine, spec = self._require(before)
        supervised = spec.advantage.advantage_estimator == "none"
        scored = not supervised or spec.train.loss.reads_reference
        # The rows of all ranks together grow with the square of the ranks.
        alone = not scored or never_scores(spec)
        if self.rank > 0 and alone:
            return None
        chosen = self._batch(before=before, version=version, alone=alone, **rows)
        # One rank holds and writes the whole batch. The others hold the samples that they score.
        batch = chosen.batch(with_samples=bool(spec.advantage.hooks)) if self.rank == 0 else None
        scores: dict[str, np.ndarray | None] = {}
        speed: dict[str, float] = {}
        if scored:
            if batch is None:
                columns = self._scored_samples(chosen)
            else:
                every = np.arange(len(batch.columns))
                # The sizes tell which samples each rank scores.
                columns = replace(batch.columns, part=BatchPart(chosen.sizes, every))
                columns = with_pixels(columns, self._files, spec)
            proximal = self._scores(chosen.sizes)
            with self._profiled("train_log_probs", version) as work:
                scores = score_batch(engine, columns, spec, proximal=proximal)
            speed = scoring_metrics(spec, chosen.sizes, work, proximal=proximal)
        if batch is None:
            return None
        columns = batch.columns.with_columns(**scores)
        if not supervised:
            scored = with_teacher_server_scores(columns, spec)
            columns = with_advantages(
                batch, scored, spec.advantage, spec.hook_args, iteration=version
            )
        shares = shares_of(self._plan_packing(columns.sizes))
        written = write_batch(self._files, key, batch, columns, shares)
        outputs = {"groups": list(batch.groups), "dropped": batch.dropped, "samples": len(columns)}
        outputs |= written.outputs
        if spec.advantage.reference:
            outputs["reference_version"] = self._reference_version
        if spec.critic is not None:
            outputs["critic_only"] = version < spec.critic.num_critic_only_steps
        outputs["metrics"] = batch_metrics(batch, columns) | critic_metrics(columns) | speed
        seconds = time.perf_counter() - start
        return {"files": list(written.files), "outputs": outputs, "seconds": seconds}

    def _scores(self, batch: BatchSizes) -> bool:
        """True if the policy scores this batch before it is trained."""
        _, spec = self._ready()
        if spec.advantage.advantage_estimator == "none":
            return False
        if spec.score_proximal is not None:
            return spec.score_proximal
        # User functions may give a batch more rollouts than the configuration says.
        rollouts = len(np.unique(batch.rollouts))
        train = spec.train
        return number_of_steps(rollouts, train.global_batch_size, train.num_steps_per_rollout) > 1

    def _metrics_of(
        self,
        batch: Node,
        stored: StoredBatch,
        columns: BatchColumns,
        steps: TrainResult,
        version: int,
        work: Work,
    ) -> dict[str, float]:
        self._last_batch = stored
        own = steps.proximal_log_probs
        # Every rank, because `probe` is collective, and in a replay: a resumed run pushes too.
        self._own_proximal = None if own is None else (batch.digest, own)
        # A replay repeats steps whose metrics are recorded.
        if self.busy == "restore":
            return {}
        critic_only = batch.outputs.get("critic_only", False)
        engine, spec = self._ready()
        speed = train_metrics(spec, stored.sizes, steps.seconds, work, critic_only=critic_only)
        if own is None:
            return speed
        staleness = None
        if batch.outputs.get("metrics", {}).get("rollout/staleness/max"):
            trained = engine.from_rank_0(lambda: self._trained_scalars(batch, stored))
            held = np.arange(len(stored)) if columns.part is None else columns.part.samples
            staleness = staleness_of(trained.select(held), version)
        columns = columns.with_columns(proximal_log_probs=own[columns.response_index()])
        sums = ProximalSums.of(columns, staleness)
        values = engine.rows_of_all(columns, np.column_stack([sums.values, sums.largest]))
        return replace(sums, values=values[:, :-1], largest=values[:, -1]).metrics() | speed

    def _trained_scalars(self, batch: Node, stored: StoredBatch) -> RowScalars:
        """Return the scalars of all samples of a batch. Reads all shards of its rollout."""
        rollout = self._nodes.get(Stage.ROLLOUT, batch.parents["rollout"])
        rows = RolloutRows.of_node(self._files, rollout)
        return rows.scalars.select(rows.numbers_of(stored.keys()))

    @collective
    def push(
        self,
        *,
        held: str,
        engines: list[str],
        stamp: str,
        sync: SyncConfig,
        shared_ranks: dict[str, list[int]] | None = None,
    ) -> dict[str, Any]:
        """Send the held weights to the engines. Rank 0 sends, all ranks gather.

        `stamp`: weight version that engines report afterwards. `shared_ranks`: for each engine on
        the trainer's GPUs, by URL, the trainer ranks there in the order of the engine's own ranks.
        Return `{"bytes", "seconds", "unknown"}`; `unknown` has the reason for each engine, by URL,
        that did not get the weights. Raises: SyncError on rank 0 if no engine got them.
        """
        start = time.perf_counter()
        engine, spec = self._require(held)
        report = self._pusher_of(engine, spec).push(engines, stamp, sync, shared_ranks or {})
        return {**report, "seconds": time.perf_counter() - start}

    def remembers(self) -> str | None:
        """Return the stamp of the weights that this rank can write a delta against, or None."""
        return self._pusher.remembered if self._pusher else None

    @collective
    def write(
        self, *, held: str, stamp: str, base: str | None, sync: SyncConfig, engines: list[str]
    ) -> Share:
        """Write this rank's share of the held weights as files: all weights, or a delta to `base`.

        `engines`: URLs, for the user function that is called afterwards.
        Raises: as `Pusher.write`.
        """
        engine, spec = self._require(held)
        return self._pusher_of(engine, spec).write(stamp, base, sync, engines)

    def _pusher_of(self, engine: MegatronEngine, spec: TrainerSpec) -> Pusher:
        if self._pusher is None:
            self._pusher = Pusher(engine, spec, rank=self.rank, world_size=self.world_size)
        return self._pusher

    @collective
    def probe(self, *, held: str, batch: str, samples: int) -> dict[str, float]:
        """Score `samples` samples of a batch node with the held weights, for `compare`.

        Return the seconds of each part.
        """
        engine, spec = self._require(held)
        parts = Parts()
        with parts.part("read"):
            # The file of the whole batch, which each rank reads.
            stored, self._last_batch = self._last_batch, None
            if stored is None or stored.digest != batch:
                stored = StoredBatch(self._files, self._nodes.get(Stage.ADVANTAGE, batch))
            probed = stored.columns(spread(len(stored), samples))
            probed = with_pixels(probed, self._files, spec)
        own = self._own_proximal
        scored_by_step = False
        if own is not None and own[0] == batch:
            scored_by_step = True
            log_probs = own[1][probed.response_index()]
            probed = probed.with_columns(proximal_log_probs=log_probs)
        chosen = probed.select(range(len(probed)))
        chosen = without_sampled_placeholders(chosen, spec)
        with parts.part("score packed"):
            log_probs = engine.score(chosen, temperature=1.0)
        # Score again in halves: differences due to packing are noise. One pass for each sample took
        # 0.3 to 0.5 s of a push on an H200, two passes take about 0.1 s.
        half = max(1, min(math.ceil(len(chosen.tokens) / 2), engine.max_tokens // 2))
        with parts.part("score in halves"):
            halves = engine.score(chosen, temperature=1.0, max_tokens=half)
        update = None
        if chosen.proximal_log_probs is not None:
            # Scores as of the advantage stage: at the rollout's temperature, with its routing.
            replay = spec.train.use_rollout_routing_replay
            after = halves
            if replay or spec.rollout_temperature != 1:
                with parts.part("score as sampled"):
                    after = engine.score(chosen, max_tokens=half, replay=replay)
            update = chosen.proximal_log_probs - after
            if scored_by_step:
                # An optimizer step computes no log-probs of masked tokens.
                update = np.where(chosen.loss_mask > 0, update, 0)
        self._probe = Probe(chosen, log_probs, mean_difference(log_probs, halves), update)
        return parts.seconds

    @collective
    def compare(self, *, engines: list[str], timeout_s: float) -> list[dict[str, Any]]:
        """Let engines score the samples of `probe`, without using the trainer's model.

        Called on rank 0 alone. Return an `Agreement` of each engine as a dict. Raises:
        EngineError, DeadlineExceeded.
        """
        assert self._probe is not None, "probe first"
        return compare(self._probe, engines, timeout_s, at_once=platform.CUDA_FOUND)

    @collective
    def occupy(self, parts: Sequence[Part]) -> dict[str, float]:
        """Keep these parts in GPU memory, as `MegatronEngine.occupy`; {} before the set-up."""
        return {} if self._engine is None else self._engine.occupy(parts)

    def close(self) -> None:
        """Leave all process groups, also those with engines. The actor can be set up again."""
        if self._pusher is not None:
            self._pusher.close()
        self._pusher = None  # belongs to the engine that is closed
        super().close()

    def _create_engine(
        self, spec: TrainerSpec, master: Address, critic_exchange: Address | None
    ) -> MegatronEngine:
        exchange = None
        if critic_exchange:
            exchange = ExchangeAddress(
                critic_exchange, spec.world_size, spec.critic_ranks, spec.exchange_timeout_s
            )
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
            critic=spec.critic if critic_exchange is None else None,
            critic_optimizer_steps=spec.critic_optimizer_steps,
            critic_exchange=exchange,
            teacher_dir=spec.teacher.opd_teacher_load if spec.teacher else None,
            hooks=MegatronHooks(spec.train, spec.hook_args),
        )

    def _load_reference(self, lineage: Lineage) -> None:
        engine, spec = self._ready()
        if spec.advantage.reference:
            refreshed = lineage.reference
            init = self._nodes.get(Stage.INIT, lineage.init)
            checkpoint = refreshed.checkpoint if refreshed else init.parents.get("start_from")
            adapter = None if refreshed else init.parents.get("adapter")
            if refreshed is None and spec.reference_dir is not None:
                for digest in self._load_own_reference().values():
                    check_first_weights(init, spec, "reference_digest", digest)
            elif checkpoint and adapter is None:
                engine.load_reference(self._fetched(Stage.CHECKPOINT, checkpoint))
            else:
                self._load_weights(checkpoint, adapter)
                # the first reference is the model directory, which may have changed since
                if checkpoint is None:
                    check_first_weights(init, spec, "weights_digest", engine.weights_digest())
                engine.keep_reference()
            self._reference_version = refreshed.version if refreshed else 0

    def _write_adapters(self, key: str) -> list[FileRecord]:
        engine, _ = self._ready()
        data = adapter_file(engine.trained)
        return [] if data is None else [write_adapters(self._files, key, data)]

    def _load_weights(self, start_from: str | None, adapter: str | None) -> None:
        """Load first weights, without an optimizer state. Arguments as `initialise`."""
        super()._load_first(start_from)
        if adapter is None:
            return
        engine, _ = self._ready()
        record = adapters_of(self._nodes, adapter)
        if record is None:
            raise ObjectMissing(
                "the adapters of the first weights are missing",
                where=f"nodes/{Stage.TRAIN}/{adapter}.json",
                do="audit the store",
            )
        data = self._files.read(record.path, sha256=record.sha256)
        load_adapter_file(engine.trained, data, self._files.url(record.path))

    def _load_first(self, start_from: str | None, adapter: str | None = None) -> None:
        self._load_weights(start_from, adapter)
        engine, spec = self._ready()
        if spec.adam_dir is not None:
            engine.load_adam_state(spec.adam_dir)
        if spec.critic_adam_dir is not None and not spec.critic_ranks:
            engine.load_critic_adam_state(spec.critic_adam_dir)

    def _export(self, version: int) -> None:
        engine, spec = self._ready()
        directory = spec.checkpoint.hf_directory(spec.start_rollout_id + version - 1)
        if directory is not None and version > 0:
            engine.export(directory)

    def _load_own_reference(self) -> dict[str, str]:
        engine, spec = self._ready()
        if spec.reference_dir is None:
            return {}
        engine.load_hf(spec.reference_dir)
        engine.keep_reference()
        return {"reference_digest": engine.weights_digest()}

    def _weights_outputs(self) -> dict[str, str]:
        engine, _ = self._ready()
        return {"weights_digest": engine.weights_digest()}

    def _refresh_reference(self, version: int) -> None:
        engine, spec = self._ready()
        interval = spec.ref_update_interval
        if not spec.advantage.reference:
            return
        if version == 0 and spec.reference_dir is not None:
            self._reference_version = version  # loaded by `_load_own_reference`
        elif version == 0 or (interval and (version + spec.ref_update_offset) % interval == 0):
            engine.keep_reference()
            self._reference_version = version


def train_metrics(
    spec: TrainerSpec, sizes: BatchSizes, seconds: float, work: Work, *, critic_only: bool
) -> dict[str, float]:
    """Return TFLOP/s, MFU and GPU use of the optimizer steps of a batch.

    `sizes`: of the whole batch. `seconds`: of all steps. `critic_only`: the policy is not trained.
    """
    models: list[tuple[ModelFlops | None, np.ndarray]] = []
    if not critic_only:
        models.append((model_flops(spec.model_dir), sizes.response_lengths))
    if spec.critic is not None and not spec.critic_ranks:
        models.append((critic_flops(spec), NO_LOGITS))
    flops = 0.0
    for model, logits in models:
        if model is None:
            return gpu_metrics("train", work.readings)
        frozen = spec.train.lora is not None
        flops += model.train(sizes.lengths, logits, frozen_matrices=frozen)
    speed = speed_metrics(
        "train", flops, seconds, devices=spec.world_size, gpu=gpu_name(), fp8=trains_fp8(spec)
    )
    return speed | gpu_metrics("train", work.readings)


class CriticRank(Rank[CriticEngine]):
    """One rank of a critic that has ranks of its own."""

    critic = True

    def __init__(self, rank: int, world_size: int, policy_ranks: int, cwd: str) -> None:
        super().__init__(rank, world_size, cwd, policy_ranks=policy_ranks)

    @collective
    def advantage(self, *, key: str, before: str, version: int, **rows: Any) -> None:
        """Send the values of the batch to the policy's ranks, which write the node `key`.

        Arguments as `TrainerRank.advantage`.
        """
        engine, spec = self._require(before)
        chosen = self._batch(before=before, version=version, **rows)
        columns = self._scored_samples(chosen)
        with self._profiled("train_log_probs", version):
            engine.values(columns, max_tokens=spec.advantage.log_probs_max_tokens_per_gpu)

    def _create_engine(
        self, spec: TrainerSpec, master: Address, critic_exchange: Address | None
    ) -> CriticEngine:
        assert spec.critic is not None and critic_exchange is not None, (
            "a critic's rank without a critic"
        )
        return CriticEngine(
            spec.critic,
            spec.model_dir,
            spec.model,
            spec.train,
            optimizer_steps=spec.critic_optimizer_steps,
            rank=self.rank,
            world_size=self.world_size,
            master=master,
            critic_exchange=ExchangeAddress(
                critic_exchange, spec.world_size, spec.critic_ranks, spec.exchange_timeout_s
            ),
            threads=spec.threads,
            deterministic=spec.deterministic,
            hooks=MegatronHooks(spec.train, spec.hook_args),
        )

    def _load_first(self, start_from: str | None, adapter: str | None = None) -> None:
        super()._load_first(start_from, adapter)
        engine, spec = self._ready()
        if spec.critic_adam_dir is not None:
            engine.load_adam_state(spec.critic_adam_dir)

    def _load_reference(self, lineage: Lineage) -> None:
        """Do nothing: the policy's ranks hold the reference."""

    def _refresh_reference(self, version: int) -> None:
        """Do nothing: the policy's ranks hold the reference."""

    def _checkpoint_prefix(self, prefix: str) -> str:
        return f"{prefix}/critic"
