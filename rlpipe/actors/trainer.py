"""`TrainerRank`: one Megatron rank as a Ray actor. It holds a state and says which one.

The state is named by the input digest of the train node (or init node) that made it: `held`. A call that needs a state
names it, and is refused if another is held. While optimizer steps run the rank is *dirty*: it holds nothing that has a
name, and only `restore` makes it usable again. A repeated `train` of the key that is held answers what it answered before.

All ranks get the same calls in the same order (`TrainerGroup` sees to it). Bulk data comes from and goes to the store.

Not here: which state is needed and where its checkpoint lies (the driver reads that from the store).
"""

from __future__ import annotations

import os
import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray

from rlpipe.actors.checkpoints import fetch_checkpoint, upload_share
from rlpipe.actors.probe import largest_difference
from rlpipe.algorithms.advantages import token_advantages
from rlpipe.batch import Batch, fix_batch
from rlpipe.config.model import ModelConfig
from rlpipe.config.train import AdvantageConfig, SyncConfig, TrainConfig
from rlpipe.engines.megatron.engine import MegatronEngine
from rlpipe.errors import TrainerError
from rlpipe.lineage import Lineage
from rlpipe.packing import BatchColumns, PackingPlan, plan
from rlpipe.stage_files import read_batch, read_packing, read_rewards, read_samples, write_batch
from rlpipe.store.files import Files
from rlpipe.store.nodes import Nodes
from rlpipe.sync.tensor import TensorTransport
from rlpipe.types import FileRecord, Stage


@dataclass(frozen=True)
class TrainerSpec:
    """What a group of trainer ranks is built from. Equal specs are the same engine."""

    model_dir: str
    store_root: str
    work_dir: str
    """Local folder for checkpoints."""
    model: ModelConfig
    train: TrainConfig
    advantage: AdvantageConfig
    rollout_temperature: float
    total_optimizer_steps: int
    engine_tensor_parallel_size: int
    world_size: int
    num_nodes: int
    threads: int


class TrainerRank:
    """One rank. See the module."""

    def __init__(self, rank: int, world_size: int, cwd: str) -> None:
        os.chdir(cwd)
        self.rank, self.world_size = rank, world_size
        self.held: str | None = None
        self.dirty = False
        self._result: dict[str, Any] = {}
        self._engine: MegatronEngine | None = None
        self._spec: TrainerSpec | None = None
        self._transport: TensorTransport | None = None
        self._uploads = ThreadPoolExecutor(1, thread_name_prefix="upload")
        self._upload: tuple[str, Future[list[FileRecord]]] | None = None

    def address(self, num_nodes: int) -> tuple[str, int]:
        """A host and a free port for the ranks to meet at (asked of rank 0)."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address() if num_nodes > 1 else "127.0.0.1", probe.getsockname()[1]

    def status(self) -> dict[str, Any]:
        """What this rank holds: `{"rank", "held", "dirty", "ready", "pid"}`."""
        ready = self._engine is not None
        return {"rank": self.rank, "held": self.held, "dirty": self.dirty, "ready": ready, "pid": os.getpid()}

    def setup(self, spec: TrainerSpec, master: tuple[str, int]) -> None:
        """Build the engine of a spec, in place of another. Its weights are not loaded yet. Raises: ConfigError, TrainerError."""
        if self._spec == spec:
            return
        if self._engine is not None:
            self._engine.close()
        self._engine = self._spec = self._transport = self.held = None
        self._engine = MegatronEngine(
            spec.model_dir,
            spec.model,
            spec.train,
            rollout_temperature=spec.rollout_temperature,
            total_optimizer_steps=spec.total_optimizer_steps,
            rank=self.rank,
            world_size=self.world_size,
            master=master,
            threads=spec.threads,
        )
        self._spec, self.dirty = spec, False
        self._files = Files(spec.store_root)
        self._nodes = Nodes(self._files)

    def initialise(self, key: str, start_from: str | None) -> dict[str, Any]:
        """Load the first weights of a branch, from the model directory or from another branch's checkpoint node."""
        engine, _ = self._ready()
        if start_from is None:
            engine.load_hf()
        else:
            engine.load_checkpoint(self._fetched(Stage.CHECKPOINT, start_from), weights_only=True)
        self._remember_reference()
        return self._now_holds(key, {"state_digest": engine.state_digest()})

    def restore(self, lineage: Lineage) -> dict[str, Any]:
        """Become the state at the end of a lineage: load its checkpoint and train its later batches again.

        Answers `{"replayed", "seconds", "mismatch"}`: `mismatch` names the first replayed node whose state came out
        different from the recorded one. The ranks then hold nothing: what they have is not what that node says.
        """
        start = time.perf_counter()
        engine, spec = self._ready()
        self.dirty, self.held = True, None
        if spec.advantage.reference:
            engine.load_checkpoint(self._fetched(Stage.INIT, lineage.init), weights_only=True)
            engine.keep_reference()
        engine.load_checkpoint(self._fetched(lineage.base_stage, lineage.base))
        self._now_holds(lineage.base_state, {})
        mismatch = None
        for digest in lineage.replay:
            node = self._nodes.get(Stage.TRAIN, digest)
            result = self.train(key=digest, before=node.parents["before"], advantage=node.parents["advantage"])
            if mismatch is None and result["state_digest"] != node.outputs["state_digest"]:
                mismatch = digest
        if mismatch is not None:
            self.held, self.dirty = None, True
        return {"replayed": len(lineage.replay), "seconds": time.perf_counter() - start, "mismatch": mismatch}

    def advantage(self, *, key: str, before: str, version: int, rollout: str, reward: str) -> dict[str, Any] | None:
        """Fix the batch of scored rows, score it, estimate advantages and store it as `data/advantage/<key>`.

        `version` is the weight version held. Rank 0 answers `{"files", "outputs", "seconds"}`, the others None.
        """
        start = time.perf_counter()
        engine, spec = self._require(before)
        supervised = spec.advantage.advantage_estimator == "none"
        samples = read_samples(self._files, self._nodes.get(Stage.ROLLOUT, rollout))
        rewards = read_rewards(self._files, self._nodes.get(Stage.REWARD, reward))
        batch = fix_batch(samples, rewards, scored=not supervised, version=version)
        columns = batch.columns
        if not supervised:
            limit = spec.advantage.log_probs_max_tokens_per_gpu
            proximal = engine.score(columns, max_tokens=limit)
            reference = engine.score(columns, model="reference", max_tokens=limit) if spec.advantage.reference else None
            advantages = token_advantages(batch.rewards, batch.group_ids, columns.response_lengths, spec.advantage)
            columns = columns.with_columns(proximal_log_probs=proximal, reference_log_probs=reference, advantages=advantages)
        if self.rank != 0:
            return None
        record = write_batch(self._files, key, batch, columns)
        outputs = {"groups": list(batch.groups), "dropped": batch.dropped, "samples": len(columns)}
        metrics = batch_metrics(batch, columns)
        return {"files": [record], "outputs": {**outputs, "metrics": metrics}, "seconds": time.perf_counter() - start}

    def train(self, *, key: str, before: str, advantage: str) -> dict[str, Any]:
        """The optimizer steps of one iteration, once: answers `{"metrics", "state_digest", "packing", "seconds"}`."""
        if self.held == key and not self.dirty:
            return self._result
        engine, spec = self._require(before)
        start = time.perf_counter()
        columns = read_batch(self._files, self._nodes.get(Stage.ADVANTAGE, advantage))
        recorded = self._recorded_packing(key)
        packing = recorded or plan(
            columns.lengths,
            global_batch_size=spec.train.global_batch_size,
            max_tokens=engine.max_tokens,
            data_parallel=engine.data_parallel,
        )
        self.dirty, self.held = True, None
        result = engine.train(columns, packing)
        return self._now_holds(
            key,
            {
                "steps": result.steps,
                "state_digest": result.state_digest,
                "packing": packing.model_dump(),
                "tokens": len(columns.tokens),
                "seconds": time.perf_counter() - start,
            },
        )

    def push(self, *, held: str, engines: list[str], stamp: str, sync: SyncConfig) -> dict[str, Any]:
        """Send the held weights to the engines under a stamp: `{"bytes", "seconds"}`. Rank 0 sends, all ranks gather.

        Raises: SyncError (on rank 0) naming the engines whose weights are unknown now.
        """
        start = time.perf_counter()
        engine, spec = self._require(held)
        if self._transport is None:
            self._transport = TensorTransport(
                spec.model_dir,
                buffer_size_bytes=sync.update_weight_buffer_size,
                timeout_s=sync.timeout_s,
                tensor_parallel_size=spec.engine_tensor_parallel_size,
            )
        tensors = engine.named_hf_tensors()
        if self.rank == 0:
            sent = self._transport.push(tensors, engines, stamp).size_bytes
        else:
            sent = sum(tensor.nbytes for _, tensor in tensors)
        return {"bytes": sent, "seconds": time.perf_counter() - start}

    def probe(self, *, held: str, engines: list[str], batch: str, sync: SyncConfig) -> float | None:
        """Score the first samples of a batch node with the held weights and with the engines.

        Rank 0 answers the largest difference of a log-prob, the others None.
        """
        engine, _ = self._require(held)
        columns = read_batch(self._files, self._nodes.get(Stage.ADVANTAGE, batch))
        chosen = columns.select(np.arange(min(sync.probe_samples, len(columns))))
        ours = engine.score(chosen, temperature=1.0)
        return largest_difference(chosen, ours, engines, sync.timeout_s) if self.rank == 0 else None

    def save(self, *, held: str, version: int, prefix: str) -> dict[str, Any]:
        """Write the held state as a torch_dist checkpoint on local disk, and begin to upload this rank's share below `prefix`."""
        start = time.perf_counter()
        engine, spec = self._require(held)
        if self._upload is not None:
            self._upload[1].exception()
        root = Path(spec.work_dir) / "checkpoints"
        directory = engine.save_checkpoint(root, version)
        self._upload = prefix, self._uploads.submit(upload_share, self._files, directory, prefix, self.rank)
        return {"seconds": time.perf_counter() - start, "directory": str(directory)}

    def upload_done(self, prefix: str) -> bool:
        """Would `uploaded` answer at once?"""
        return self._upload is None or self._upload[0] != prefix or self._upload[1].done()

    def uploaded(self, prefix: str) -> list[FileRecord] | None:
        """Wait for the upload that `save` began: this rank's share in the store. None if this process began no such upload
        (it is not the one that saved). Raises: StoreFull and what else the upload met."""
        if self._upload is None or self._upload[0] != prefix:
            return None
        (_, upload), self._upload = self._upload, None
        return upload.result()

    def close(self) -> None:
        """Leave the process groups; the actor can be set up again."""
        if self._engine is not None:
            self._engine.close()
        self._engine = self._spec = self.held = None

    def _ready(self) -> tuple[MegatronEngine, TrainerSpec]:
        if self._engine is None or self._spec is None:
            raise TrainerError("this rank has not been set up", where=f"trainer/{self.rank}")
        return self._engine, self._spec

    def _require(self, state: str) -> tuple[MegatronEngine, TrainerSpec]:
        if self.dirty or self.held != state:
            raise TrainerError(
                "this rank does not hold the state that is needed",
                where=f"trainer/{self.rank}",
                found="a half-trained state" if self.dirty else self.held or "no weights",
                expected=state,
                do="restore the state first",
            )
        return self._ready()

    def _now_holds(self, key: str, result: dict[str, Any]) -> dict[str, Any]:
        self.held, self.dirty, self._result = key, False, result
        return result

    def _remember_reference(self) -> None:
        engine, spec = self._ready()
        if spec.advantage.reference:
            engine.keep_reference()

    def _recorded_packing(self, key: str) -> PackingPlan | None:
        node = self._nodes.find(Stage.TRAIN, key)
        return read_packing(self._files, node) if node else None

    def _fetched(self, stage: Stage, digest: str) -> Path:
        _, spec = self._ready()
        return fetch_checkpoint(self._files, self._nodes.get(stage, digest), Path(spec.work_dir) / "checkpoints")


def batch_metrics(batch: Batch, columns: BatchColumns) -> dict[str, float]:
    """What is worth watching of a batch: rewards, lengths, and how far engine and trainer are apart."""
    lengths = columns.response_lengths
    metrics = {"rollout/response_len/mean": float(lengths.mean()), "rollout/response_len/max": float(lengths.max())}
    if columns.advantages is not None:
        metrics["rollout/raw_reward"] = float(batch.rewards.mean())
        metrics["rollout/zero_std_fraction"] = zero_std_fraction(batch)
    if columns.proximal_log_probs is not None and columns.rollout_log_probs is not None:
        apart = np.abs(columns.proximal_log_probs - columns.rollout_log_probs)[columns.loss_mask > 0]
        metrics["rollout/logprob_abs_diff/mean"] = float(apart.mean())
        metrics["rollout/logprob_abs_diff/max"] = float(apart.max())
    return metrics


def zero_std_fraction(batch: Batch) -> float:
    """Share of groups whose rewards are all equal: they teach nothing."""
    rewards: dict[str, set[float]] = {}
    for group_id, reward in zip(batch.group_ids, batch.rewards.tolist(), strict=True):
        rewards.setdefault(group_id, set()).add(reward)
    return sum(len(values) == 1 for values in rewards.values()) / len(rewards)
