"""Trainer ranks without a model: they read and write what real ranks do, and sleep for the rest.

`SimulatedRank` is `TrainerRank` with another engine, so everything but Megatron is real: the rows
of a rollout, the batch, the packing plan, checkpoints, the calls to the engines in a push.
`SimulatedMegatron` sleeps for the time that the FLOPs of its samples take. A push has the real
requests to each engine; its one bucket has no tensors, and the engine waits for the bandwidth.

Every rank gets every call. The first WORKING_RANKS work one after another, because they share a
process: each call then has the cost that it has on a machine of its own. The others answer at once.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rlpipe.actors.trainer.rank import Address, collective
from rlpipe.actors.trainer.rank_actors import TrainerRank
from rlpipe.actors.trainer.trainer_spec import TrainerSpec
from rlpipe.batch.columns import BatchColumns, BatchSizes
from rlpipe.batch.packing import PackingPlan
from rlpipe.config.train import SyncConfig
from rlpipe.engines.megatron.results import TrainResult
from rlpipe.engines.sglang.admin import Engine
from rlpipe.sync.probe import compare
from rlpipe.sync.session import Session, run_session
from rlpipe.types import FileRecord
from tools.bench.shapes import SHAPES
from tools.bench.simulated_server import LOG_PROB

T = TypeVar("T")
SHAPE = SHAPES["0.6b"]
"""Model whose FLOPs and bytes the ranks and pushes take time for."""
FLOPS_PER_S = 0.34 * 989e12
"""FLOPs a second of a rank: the measured MFU of this model on an H100."""
WORKING_RANKS = 4
PUSH_BYTES_PER_S = 20e9
PUSH_S = 2 * SHAPE.parameters / PUSH_BYTES_PER_S
"""Seconds in which an engine receives all weights."""
WORKING = threading.Lock()
"""Held by the rank of this process that works."""


class SimulatedMegatron:
    """The parts of `MegatronEngine` that `TrainerRank` calls. A state is the count of updates."""

    def __init__(self, spec: TrainerSpec, rank: int, world_size: int) -> None:
        self.spec = spec
        self.rank = rank
        self.data_parallel = world_size
        self.max_tokens = spec.train.micro_batch_tokens
        self._state = hashlib.sha256(b"first").hexdigest()[:32]

    def reads_whole_batch(self, *, scored: bool) -> bool:
        return False

    def trained_samples(self, packing: PackingPlan) -> np.ndarray:
        own = [i for step in packing.steps for micro in step[self.rank] for i in micro]
        return np.sort(np.array(own, np.int64))

    def scored_samples(self, sizes: BatchSizes, *, max_tokens: int | None = None) -> np.ndarray:
        order = np.arange(len(sizes)) if sizes.stored_order is None else sizes.stored_order
        return np.sort(np.array_split(order, self.data_parallel)[self.rank])

    def from_rank_0(self, make: Callable[[], T]) -> T:
        """Return what this rank makes: the ranks of a process work one after another."""
        return make()

    def score(self, batch: BatchColumns, **_: Any) -> np.ndarray:
        """Sleep for one forward pass; return the log-probs of all response tokens."""
        self._compute(batch, passes=1)
        return np.full(batch.sizes.num_response_tokens, LOG_PROB, np.float32)

    def rows_of_all(self, batch: BatchColumns, values: np.ndarray) -> np.ndarray:
        """Return the values as if all samples were this rank's, in place of an all-reduce."""
        return np.resize(values, (len(batch.sizes), values.shape[1]))

    def train(self, batch: BatchColumns, plan: PackingPlan, **_: Any) -> TrainResult:
        """Sleep for forward and backward passes; change the state."""
        self._compute(batch, passes=3)
        self.change_state()
        log_probs = np.full(batch.sizes.num_response_tokens, LOG_PROB, np.float32)
        steps = [{"loss": 0.0, "grad_norm": 1.0, "lr": 0.0} for _ in plan.steps]
        return TrainResult(steps, self._state, log_probs)

    def change_state(self) -> str:
        """Return the next state, which is held then."""
        self._state = hashlib.sha256(self._state.encode()).hexdigest()[:32]
        return self._state

    def state_digest(self) -> str:
        return self._state

    def weights_digest(self) -> str:
        return self._state

    def load_hf(self, model_dir: str | Path | None = None) -> None:
        """Do nothing: there are no weights."""

    def keep_reference(self) -> None:
        """Do nothing: there are no weights."""

    def require_room(self, directory: Path) -> None:
        """Do nothing: a checkpoint is a few bytes."""

    def occupy(self, parts: Collection[str]) -> dict[str, float]:
        return {}

    def save_checkpoint(self, root: Path, version: int) -> Path:
        """Write this rank's file of a checkpoint, with the state's name as content."""
        directory = root / f"iter_{version:07d}"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"__{self.rank}_0.distcp").write_text(f"{self._state} {self.rank}")
        if self.rank == 0:
            (directory / ".metadata").write_text(self._state)
        return directory

    def load_checkpoint(self, directory: Path, **_: Any) -> None:
        """Take the state of the checkpoint in a directory."""
        (metadata,) = directory.glob("iter_*/.metadata")
        self._state = metadata.read_text()

    def close(self) -> None:
        """Do nothing: there are no process groups."""

    def _compute(self, batch: BatchColumns, *, passes: int) -> None:
        responses = batch.response_lengths
        flops = SHAPE.forward_flops(batch.prompt_lengths + responses, responses)
        # On a GPU, all ranks compute at the same time.
        WORKING.release()
        try:
            time.sleep(passes * flops / FLOPS_PER_S)
        finally:
            WORKING.acquire()


class SimulatedRank(TrainerRank):
    """A rank of the policy without Megatron."""

    @property
    def _works(self) -> bool:
        return self.rank < WORKING_RANKS

    @collective
    def advantage(self, **arguments: Any) -> dict[str, Any] | None:
        """As a real rank, or do nothing."""
        if not self._works:
            return None
        with WORKING:
            return super().advantage(**arguments)

    @collective
    def train(self, *, key: str, before: str, advantage: str) -> dict[str, Any]:
        """As a real rank, or only hold the new state."""
        if not self._works and (self.held != key or self.dirty):
            engine: Any = self._require(before)[0]
            self.fresh = False
            return self._set_held(key, {"state_digest": engine.change_state()})
        if not self._works:
            return self._result
        with WORKING:
            return super().train(key=key, before=before, advantage=advantage)

    @collective
    def probe(self, **arguments: Any) -> dict[str, float]:
        """As a real rank, or do nothing."""
        if not self._works:
            return {}
        with WORKING:
            return super().probe(**arguments)

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
        """Send one bucket without tensors to all engines, with the steps of a real push."""
        start_s = time.perf_counter()
        self._require(held)
        if self.rank > 0:
            return {"bytes": 0, "paused_s": 0.0, "steps": {}, "unknown": {}, "seconds": 0.0}

        async def load(engine: Engine) -> None:
            await engine.update_from_tensors([], weight_version=stamp, flush_cache=True)

        async def work(session: Session) -> None:
            await session.open("abort")
            await session.each("bucket", load)
            await session.resume()

        report = asyncio.run(run_session(engines, stamp, work, timeout_s=sync.timeout_s))
        return {
            "bytes": 2 * SHAPE.parameters,
            "paused_s": report.paused_s,
            "steps": report.steps,
            "unknown": report.unknown,
            "seconds": time.perf_counter() - start_s,
        }

    @collective
    def compare(self, *, engines: list[str], timeout_s: float) -> list[dict[str, Any]]:
        """Let all engines score the probed samples at once, as on GPUs."""
        assert self._probe is not None, "probe first"
        return compare(self._probe, engines, timeout_s, at_once=True)

    def _write_adapters(self, key: str) -> list[FileRecord]:
        """Write nothing: there are no weights, so no adapters either."""
        return []

    def _create_engine(
        self, spec: TrainerSpec, master: Address, critic_exchange: Address | None
    ) -> Any:
        return SimulatedMegatron(spec, self.rank, self.world_size)
