"""`Rank`: common part of a policy rank and of a rank of a critic that has its own.

A rank holds one state and names it: `held` is the input digest of the train or init node that made
the state. A call that needs a state names the state, and is refused if the rank holds another one.
During optimizer steps the rank is *dirty*: it holds no named state, and only `restore` makes it
usable again. A repeated `train` call for the held state returns the recorded result.

`TrainerGroup` sends the same calls in the same order to all ranks. Bulk data is read from the store
and written to it.
"""

from __future__ import annotations

import json
import os
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import AbstractContextManager
from functools import partial, wraps
from pathlib import Path
from typing import Any, Generic, TypeVar

from rlpipe.actors.ray.placement import own_address
from rlpipe.actors.trainer.checkpoints import (
    BackgroundUpload,
    Upload,
    fetch_checkpoint,
    upload_share,
)
from rlpipe.actors.trainer.first_weights import check_first_weights, made_with
from rlpipe.actors.trainer.profiling import ProfiledPart, Work, check_profiling, profiled
from rlpipe.actors.trainer.scoring import choose_rows, with_pixels
from rlpipe.actors.trainer.trainer_spec import TrainerSpec
from rlpipe.batch.build import ChosenRows
from rlpipe.batch.columns import BatchColumns, BatchSizes
from rlpipe.batch.files import StoredBatch, read_packing
from rlpipe.batch.packing import PackingPlan, attention_length, plan
from rlpipe.engines.megatron.engine import MegatronEngine
from rlpipe.engines.megatron.reproducibility import facts
from rlpipe.engines.megatron.results import TrainResult
from rlpipe.engines.megatron.train.critic_engine import CriticEngine
from rlpipe.errors import DeadlineExceeded, TrainerError
from rlpipe.lineage.states import Lineage, weight_version
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.sync.transports.distributed import use_sglang_nccl_settings
from rlpipe.system.compile_caches import keep_compiled
from rlpipe.system.ports import free_port
from rlpipe.types import FileRecord, Node, Stage

E = TypeVar("E", MegatronEngine, CriticEngine)
Address = tuple[str, int]
"""Host and port."""


def collective(method: Callable[..., Any]) -> Callable[..., Any]:
    """Report the call of a rank's method in `status`: while it runs, its count, and its failure."""
    name = method.__name__

    @wraps(method)
    def call(self: Rank[Any], *arguments: Any, **keywords: Any) -> Any:
        if self.busy:  # a call inside another one, such as `train` in `restore`
            return method(self, *arguments, **keywords)
        self._calls[name] += 1
        self.busy = name
        self._failed = None
        try:
            return method(self, *arguments, **keywords)
        except BaseException:
            self._failed = name
            raise
        finally:
            self.busy = None

    return call


class Rank(ABC, Generic[E]):
    """One rank. See the module."""

    critic = False
    """True for a rank of a critic that has its own ranks."""

    def __init__(self, rank: int, world_size: int, cwd: str, *, policy_ranks: int = 0) -> None:
        """`policy_ranks`: ranks of the trainer that precede this rank's world."""
        os.chdir(cwd)
        use_sglang_nccl_settings()  # before torch.distributed starts NCCL
        self.rank = rank
        self.world_size = world_size
        self.number = policy_ranks + rank
        self.held: str | None = None
        self.dirty = False
        self.busy: str | None = None
        self._calls: Counter[str] = Counter()
        self._failed: str | None = None
        self._result: dict[str, Any] = {}
        self.fresh = False
        """True if the optimizer has never stepped. Only then first weights make a first state."""
        self._engine: E | None = None
        self._spec: TrainerSpec | None = None
        self._uploads = ThreadPoolExecutor(1, thread_name_prefix="upload")
        self._upload: BackgroundUpload | None = None

    @property
    def name(self) -> str:
        """Name in error messages."""
        return f"{'critic' if self.critic else 'trainer'}/{self.rank}"

    def address(self) -> tuple[str, int]:
        """Return this host and a free port, as the rendezvous of the ranks."""
        address = own_address()
        return address, free_port(address)

    def status(self) -> dict[str, Any]:
        """Return the state and the work of this rank, also while another call runs.

        `{"rank", "held", "dirty", "fresh", "ready", "busy", "calls", "failed", "deterministic",
        "pid"}`: `busy` is the method that runs, `failed` the last method if it raised, `calls` the
        number of calls begun, by method. The concurrency group `status` has its own thread.
        """
        return {
            "rank": self.number,
            "held": self.held,
            "dirty": self.dirty,
            "fresh": self.fresh,
            "ready": self._engine is not None,
            "busy": self.busy,
            "calls": dict(self._calls),
            "failed": self._failed,
            "deterministic": self._spec.deterministic if self._spec else None,
            "pid": os.getpid(),
        }

    @collective
    def setup(
        self, spec: TrainerSpec, master: Address, critic_exchange: Address | None = None
    ) -> None:
        """Build the engine of a spec, in place of another one. Weights are not loaded yet.

        `master`: rendezvous of this rank's world. `critic_exchange`: rendezvous of the policy's and
        the critic's ranks, if the critic has its own. Raises: ConfigError, ResourceError,
        TrainerError.
        """
        check_profiling(spec.observe)
        spec = spec.here()
        if self._spec == spec:
            self._spec = spec  # the profiler's settings may differ; they are not compared
            return
        self.close()
        keep_compiled(Path(spec.work_dir).parent)
        self._engine = self._create_engine(spec, master, critic_exchange)
        self._spec = spec
        self.dirty = False
        self.fresh = True
        self._files = Files(spec.store_root)
        self._nodes = Nodes(self._files)

    @collective
    def initialise(
        self, key: str, start_from: str | None, adapter: str | None = None
    ) -> dict[str, Any]:
        """Load the first weights of a branch, and return the digests for its init node.

        `start_from`: checkpoint node of another branch; None: the model directory. `adapter`: train
        node of another branch with the adapters.
        """
        engine, spec = self._ready()
        reference = self._load_own_reference()
        self._load_first(start_from, adapter)
        self._refresh_reference(0)
        result = {
            **reference,
            "state_digest": engine.state_digest(),
            "made_with": made_with(spec.train),
            **self._weights_outputs(),
        }
        return self._set_held(key, result)

    @collective
    def require_room(self) -> None:
        """Check that the local disk has room for a checkpoint. Raises: StoreFull."""
        engine, spec = self._ready()
        engine.require_room(Path(spec.work_dir) / "checkpoints" / "iter_0000000")

    @collective
    def restore(self, lineage: Lineage) -> dict[str, Any]:
        """Restore the state at the end of a lineage: load its checkpoint, replay later batches.

        Return `{"replayed", "seconds", "state_digest", "mismatch"}`. `mismatch` is the first
        replayed node with another state than recorded, or None. After a mismatch the ranks hold
        their state under the name `lineage.segment`; without that name they hold nothing.
        """
        start = time.perf_counter()
        engine, _ = self._ready()
        self.dirty = True
        self.held = None
        if lineage.base_stage is Stage.INIT:
            self._load_init(self._nodes.get(Stage.INIT, lineage.base))
        else:
            self.fresh = False
            # first: it overwrites the policy's weights
            self._load_reference(lineage)
            engine.load_checkpoint(self._fetched(lineage.base_stage, lineage.base))
        result = self._set_held(lineage.base_state, {"state_digest": engine.state_digest()})
        mismatch = None
        for digest in lineage.replay:
            node = self._nodes.get(Stage.TRAIN, digest)
            result = self.train(
                key=digest, before=node.parents["before"], advantage=node.parents["advantage"]
            )
            if mismatch is None and result["state_digest"] != node.outputs["state_digest"]:
                mismatch = digest
        if mismatch is not None and lineage.segment is None:
            self.held = None
            self.dirty = True
        elif mismatch is not None:
            self._set_held(lineage.segment, {"state_digest": result["state_digest"]})
        return {
            "replayed": len(lineage.replay),
            "seconds": time.perf_counter() - start,
            "state_digest": result["state_digest"],
            "mismatch": mismatch,
        }

    @collective
    def train(self, *, key: str, before: str, advantage: str) -> dict[str, Any]:
        """Take the optimizer steps of one iteration, at most once.

        Return `{"steps", "metrics", "state_digest", "packing", "files", "tokens", "machine",
        "seconds"}` on rank 0, `{"state_digest"}` on the others: a plan names every sample of the
        batch.
        """
        # a retry after a lost answer must not train the batch twice
        if self.held == key and not self.dirty:
            return self._result
        engine, spec = self._require(before)
        start = time.perf_counter()
        batch = self._nodes.get(Stage.ADVANTAGE, advantage)
        stored = StoredBatch(self._files, batch)
        recorded = self._recorded_packing(key)
        packing = recorded or self._plan_packing(stored.sizes)
        whole = engine.reads_whole_batch(scored=stored.scored)
        columns = stored.columns(None if whole else engine.trained_samples(packing))
        columns = with_pixels(columns, self._files, spec)
        version = weight_version(self._nodes, before)
        # before the first step: after a crash in the middle the state has no name
        self.dirty = True
        self.held = None
        self.fresh = False
        critic_only = batch.outputs.get("critic_only", False)
        with self._profiled("train_actor", version) as work:
            steps = engine.train(
                columns, packing, version=version, critic_only=critic_only, hook_args=spec.hook_args
            )
        self._refresh_reference(version + 1)
        files = self._write_adapters(key) if recorded is None else []
        metrics = self._metrics_of(batch, stored, columns, steps, version, work)
        if self.rank > 0:
            return self._set_held(key, {"state_digest": steps.state_digest})
        result = {
            "steps": steps.steps,
            "metrics": metrics,
            "state_digest": steps.state_digest,
            "packing": packing.model_dump(),
            "files": files,
            "tokens": stored.sizes.num_tokens,
            "machine": facts(spec.model.dtype),
            "seconds": time.perf_counter() - start,
        }
        return self._set_held(key, result)

    @collective
    def save(self, *, held: str, version: int, upload: Upload) -> dict[str, Any]:
        """Write the held state as a local torch_dist checkpoint, and start to upload this share.

        Return `{"seconds", "directory"}`.
        """
        start = time.perf_counter()
        engine, spec = self._require(held)
        if self._upload is not None:
            self._wait(self._upload)
        root = Path(spec.work_dir) / "checkpoints"
        directory = engine.save_checkpoint(root, version)
        self._export(version)
        prefix = self._checkpoint_prefix(upload.prefix)
        send = partial(upload_share, self._files, directory, prefix, self.rank)
        self._upload = BackgroundUpload(upload, lambda: self._uploads.submit(send))
        return {"seconds": time.perf_counter() - start, "directory": str(directory)}

    def uploading(self) -> str | None:
        """Return the prefix of this process's unrecorded upload, or None. Asked of rank 0 alone."""
        return None if self._upload is None else self._upload.upload.prefix

    def upload(self) -> tuple[Upload, bool] | None:
        """Return this process's unrecorded upload and whether it has ended, or None."""
        return None if self._upload is None else (self._upload.upload, self._upload.future.done())

    @collective
    def uploaded(self, prefix: str) -> list[FileRecord] | None:
        """Wait for an upload; return this rank's share, or None if this process has no such upload.

        The upload is kept until `forget_upload`. If the store was unreachable or full, the next
        call starts it again. Raises: DeadlineExceeded; StoreFull and other errors of the upload.
        """
        if self._upload is None or self._upload.upload.prefix != prefix:
            return None
        future = self._wait(self._upload)
        if error := future.exception():
            self._upload = self._upload.after_failure(error)
        return future.result()

    def forget_upload(self, prefix: str) -> None:
        """Forget an upload that is recorded, or will never be."""
        if self._upload is not None and self._upload.upload.prefix == prefix:
            self._upload = None

    def _export(self, version: int) -> None:
        """Write the held weights as a Hugging Face directory, if the run asks for it."""

    def _wait(self, upload: BackgroundUpload) -> Future[list[FileRecord]]:
        """Wait until the upload has succeeded or failed. Raises: DeadlineExceeded."""
        _, spec = self._ready()
        future = upload.future
        try:
            future.exception(spec.upload_timeout_s)
        except FutureTimeout as error:
            raise DeadlineExceeded(
                "the upload of a checkpoint does not end",
                where=self.name,
                found=f"{upload.upload.prefix} still on its way",
                expected=f"in the store within {spec.upload_timeout_s:g} s (checkpoint.timeout_s)",
                do="check that the store answers; the same command continues from the checkpoint "
                "before",
            ) from error
        return future

    def close(self) -> None:
        """Leave the process groups. The actor can be set up again."""
        if self._engine is not None:
            self._engine.close()
        self._engine = None
        self._spec = None
        self.held = None
        self.fresh = False

    @abstractmethod
    def _create_engine(
        self, spec: TrainerSpec, master: Address, critic_exchange: Address | None
    ) -> E:
        """Create the engine of a spec. Arguments as `setup`."""

    def _write_adapters(self, key: str) -> list[FileRecord]:
        """Write the held adapters, if any, for the train node `key`. Collective."""
        return []

    def _load_first(self, start_from: str | None, adapter: str | None = None) -> None:
        """Load the first weights of a branch. Arguments as `initialise`.

        The optimizer stays unchanged, unless the run continues one of Megatron-LM.
        """
        engine, _ = self._ready()
        if start_from is None:
            engine.load_hf()
        else:
            # not the optimizer of the other branch
            engine.load_checkpoint(self._fetched(Stage.CHECKPOINT, start_from), weights_only=True)

    def _load_init(self, init: Node) -> None:
        """Load the first state of a branch. Raises: Mismatch if it is not the recorded one."""
        engine, spec = self._ready()
        if not self.fresh:
            raise TrainerError(
                "the first state needs ranks that have trained nothing",
                where=self.name,
                do="restart the ranks",
            )
        for digest in self._load_own_reference().values():
            check_first_weights(init, spec, "reference_digest", digest)
        self._load_first(init.parents.get("start_from"), init.parents.get("adapter"))
        check_first_weights(init, spec, "state_digest", engine.state_digest())
        self._refresh_reference(0)

    def _load_own_reference(self) -> dict[str, str]:
        """Load a reference that is not the first weights, if the run has one.

        Return its digest for the init node. The weights of the policy are undefined afterwards.
        """
        return {}

    def _weights_outputs(self) -> dict[str, str]:
        """Return the outputs of an init node that describe the weights alone."""
        return {}

    @abstractmethod
    def _load_reference(self, lineage: Lineage) -> None:
        """Load the reference policy of a lineage's checkpoint, if the run has one.

        The weights of the policy are undefined afterwards.
        """

    @abstractmethod
    def _refresh_reference(self, version: int) -> None:
        """Copy the held weights to the reference, if weight version `version` refreshes it."""

    def _metrics_of(
        self,
        batch: Node,
        stored: StoredBatch,
        columns: BatchColumns,
        steps: TrainResult,
        version: int,
        work: Work,
    ) -> dict[str, float]:
        """Return the metrics of a trained batch that its advantage node could not have.

        `columns`: the samples that this rank has read. `work`: the optimizer steps. Collective.
        """
        return {}

    def _checkpoint_prefix(self, prefix: str) -> str:
        """Return the store prefix for this world's part of a checkpoint."""
        return prefix

    def _batch(self, *, before: str, alone: bool = False, **rows: Any) -> ChosenRows:
        """Return the rows of the batch for the held state `before`, without their tokens.

        Rank 0 chooses them. `rows`: arguments of `choose_rows`. Collective, unless it is `alone`.
        """
        engine, spec = self._require(before)
        choose = partial(choose_rows, self._files, spec, **rows)
        return choose() if alone else engine.from_rank_0(choose)

    def _scored_samples(self, chosen: ChosenRows) -> BatchColumns:
        """Return the samples that this rank scores."""
        engine, spec = self._ready()
        limit = spec.advantage.log_probs_max_tokens_per_gpu
        samples = engine.scored_samples(chosen.sizes, max_tokens=limit)
        return with_pixels(chosen.columns(samples), self._files, spec)

    def _plan_packing(self, sizes: BatchSizes) -> PackingPlan:
        engine, spec = self._ready()
        model_config = json.loads((Path(spec.model_dir) / "config.json").read_text())
        return plan(
            sizes.lengths,
            global_batch_size=spec.train.global_batch_size,
            max_tokens=engine.max_tokens,
            data_parallel=engine.data_parallel,
            num_steps=spec.train.num_steps_per_rollout,
            rollout=sizes.rollout,
            micro_batch_size=spec.train.micro_batch_size,
            balance_by_flops=spec.train.balance_by_flops,
            attention_length=attention_length(model_config),
            whole_rollouts=spec.train.loss.compares_pairs,
        )

    def _recorded_packing(self, key: str) -> PackingPlan | None:
        """Return the packing of a recorded train node: a replay packs as the first time."""
        node = self._nodes.find(Stage.TRAIN, key)
        return read_packing(self._files, node, critic=self.critic) if node else None

    def _ready(self) -> tuple[E, TrainerSpec]:
        if self._engine is None or self._spec is None:
            raise TrainerError("this rank has not been set up", where=self.name)
        return self._engine, self._spec

    def _require(self, state: str) -> tuple[E, TrainerSpec]:
        """Return engine and spec. Raises: TrainerError if this rank does not hold the state."""
        if self.dirty or self.held != state:
            raise TrainerError(
                "this rank does not hold the required state",
                where=self.name,
                found="a half-trained state" if self.dirty else self.held or "no weights",
                expected=state,
                do="restore the state first",
            )
        return self._ready()

    def _set_held(self, key: str | None, result: dict[str, Any]) -> dict[str, Any]:
        self.held = key
        self.dirty = False
        self._result = result
        return result

    def _profiled(self, part: ProfiledPart, iteration: int) -> AbstractContextManager[Work]:
        _, spec = self._ready()
        return profiled(
            spec.observe, part, iteration=iteration, rank=self.number, work_dir=spec.work_dir
        )

    def _fetched(self, stage: Stage, digest: str) -> Path:
        """Return the local directory of a checkpoint node, downloaded if it is missing."""
        _, spec = self._ready()
        node = self._nodes.get(stage, digest)
        return fetch_checkpoint(
            self._files, node, Path(spec.work_dir) / "checkpoints", timeout_s=spec.upload_timeout_s
        )
