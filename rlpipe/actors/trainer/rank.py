"""`Rank`: what a rank of the policy and one of a critic with ranks of its own have in common.

It holds a state and says which one. The state is named by the input digest of the train node (or
init node) that made it: `held`. A call that needs a state names it, and is refused if another is
held. While optimizer steps run the rank is *dirty*: it holds nothing that has a name, and only
`restore` makes it usable again. A repeated `train` of the key that is held answers what it answered
before.

All ranks get the same calls in the same order (`TrainerGroup` sees to it). Bulk data comes from and
goes to the store.

Not here: which state is needed and where its checkpoint lies (the driver reads that from the
store); what only the policy does (`trainer`).
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
from rlpipe.actors.trainer.checkpoints import Share, Upload, fetch_checkpoint, upload_share
from rlpipe.actors.trainer.first import check_first, made_with
from rlpipe.actors.trainer.profiling import Part as Work
from rlpipe.actors.trainer.profiling import check, profiled
from rlpipe.actors.trainer.spec import TrainerSpec
from rlpipe.batch.build import Batch, fix_batch
from rlpipe.batch.files import read_batch, read_packing, read_rewards, read_samples
from rlpipe.batch.packing import BatchColumns, PackingPlan, attention_length, plan
from rlpipe.engines.megatron.engine import MegatronEngine
from rlpipe.engines.megatron.facts import facts
from rlpipe.engines.megatron.train.critic_engine import CriticEngine
from rlpipe.errors import DeadlineExceeded, TrainerError
from rlpipe.lineage.states import Lineage, weight_version
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.sync.transports.group import use_nccl_as_engines_do
from rlpipe.system.ports import free_port
from rlpipe.types import FileRecord, Node, Stage

E = TypeVar("E", MegatronEngine, CriticEngine)
Address = tuple[str, int]
"""Host and port."""


def collective(method: Callable[..., Any]) -> Callable[..., Any]:
    """While this method of a rank runs, its status says so; after that, how often it was called and
    whether it failed."""
    name = method.__name__

    @wraps(method)
    def call(self: Rank[Any], *arguments: Any, **keywords: Any) -> Any:
        if self.busy:
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
    """Is this a rank of a critic that has its own?"""

    def __init__(self, rank: int, world_size: int, cwd: str, *, policy_ranks: int = 0) -> None:
        """`policy_ranks`: those that come before this one's world in the trainer's numbers."""
        os.chdir(cwd)
        use_nccl_as_engines_do()
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
        """Has its optimizer no past? Only then first weights make a first state."""
        self._engine: E | None = None
        self._spec: TrainerSpec | None = None
        self._uploads = ThreadPoolExecutor(1, thread_name_prefix="upload")
        self._upload: Share | None = None

    @property
    def name(self) -> str:
        """For errors."""
        return f"{'critic' if self.critic else 'trainer'}/{self.rank}"

    def address(self) -> tuple[str, int]:
        """A host and a free port for the ranks to meet at (asked of rank 0)."""
        address = own_address()
        return address, free_port(address)

    def status(self) -> dict[str, Any]:
        """What this rank holds and does: `{"rank", "held", "dirty", "fresh", "ready", "busy",
        "calls", "failed", …}`. It answers while a call runs, from another thread (concurrency group
        `status`).

        `busy` names that call, `failed` the last one if it ended with an error; `calls`: how many
        of each have begun.
        """
        state = {
            "held": self.held,
            "dirty": self.dirty,
            "fresh": self.fresh,
            "ready": self._engine is not None,
        }
        work = {"busy": self.busy, "calls": dict(self._calls), "failed": self._failed}
        deterministic = self._spec.deterministic if self._spec else None
        return {
            "rank": self.number,
            **state,
            **work,
            "deterministic": deterministic,
            "pid": os.getpid(),
        }

    @collective
    def setup(self, spec: TrainerSpec, master: Address, meeting: Address | None = None) -> None:
        """Build the engine of a spec, in place of another. Its weights are not loaded yet.
        `master`, and of a policy and a critic that have ranks of their own `meeting`: where the
        ranks meet. Raises: ConfigError, TrainerError."""
        check(spec.observe)
        if self._spec == spec:
            self._spec = spec
            return
        self.close()
        self._engine = self._made(spec, master, meeting)
        self._spec = spec
        self.dirty = False
        self.fresh = True
        self._files = Files(spec.store_root)
        self._nodes = Nodes(self._files)

    @collective
    def initialise(self, key: str, start_from: str | None) -> dict[str, Any]:
        """Load the first weights of a branch, from the model directory or from another branch's
        checkpoint node: the digests that its init node has."""
        engine, spec = self._ready()
        self._load_first(start_from)
        self._remember_reference(0)
        return self._now_holds(
            key,
            {
                "state_digest": engine.state_digest(),
                "made_with": made_with(spec.train),
                **self._of_weights(),
            },
        )

    @collective
    def require_room(self) -> None:
        """Is there room for a checkpoint on local disk? Raises: StoreFull."""
        engine, spec = self._ready()
        engine.require_room(Path(spec.work_dir) / "checkpoints" / "iter_0000000")

    @collective
    def restore(self, lineage: Lineage) -> dict[str, Any]:
        """Become the state at the end of a lineage: load its checkpoint and train its later batches
        again.

        Answers `{"replayed", "seconds", "state_digest", "mismatch"}`: `mismatch` names the first
        replayed node whose state came out different from the recorded one. What the ranks have then
        is not what that node says: they hold it under the name of `lineage.segment`, and without
        one they hold nothing.
        """
        start = time.perf_counter()
        engine, _ = self._ready()
        self.dirty = True
        self.held = None
        if lineage.base_stage is Stage.INIT:
            self._load_init(self._nodes.get(Stage.INIT, lineage.base))
        else:
            self.fresh = False
            self._load_reference(lineage)
            engine.load_checkpoint(self._fetched(lineage.base_stage, lineage.base))
        result = self._now_holds(lineage.base_state, {"state_digest": engine.state_digest()})
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
            self._now_holds(lineage.segment, {"state_digest": result["state_digest"]})
        answer = {"replayed": len(lineage.replay), "seconds": time.perf_counter() - start}
        return {**answer, "state_digest": result["state_digest"], "mismatch": mismatch}

    @collective
    def train(self, *, key: str, before: str, advantage: str) -> dict[str, Any]:
        """The optimizer steps of one iteration, once: answers `{"metrics", "state_digest",
        "packing", "machine", "seconds"}`."""
        if self.held == key and not self.dirty:
            return self._result
        engine, spec = self._require(before)
        start = time.perf_counter()
        batch = self._nodes.get(Stage.ADVANTAGE, advantage)
        columns = read_batch(self._files, batch)
        packing = self._recorded_packing(key) or self._planned(columns)
        version = weight_version(self._nodes, before)
        self.dirty = True
        self.held = None
        self.fresh = False
        critic_only = batch.outputs.get("critic_only", False)
        with self._profiled("train_actor", version):
            result = engine.train(
                columns, packing, version=version, critic_only=critic_only, hook_args=spec.hook_args
            )
        self._remember_reference(version + 1)
        return self._now_holds(
            key,
            {
                "steps": result.steps,
                "state_digest": result.state_digest,
                "packing": packing.model_dump(),
                "tokens": len(columns.tokens),
                "machine": facts(spec.model.dtype),
                "seconds": time.perf_counter() - start,
            },
        )

    @collective
    def save(self, *, held: str, version: int, upload: Upload) -> dict[str, Any]:
        """Write the held state as a torch_dist checkpoint on local disk, and begin to upload this
        rank's share."""
        start = time.perf_counter()
        engine, spec = self._require(held)
        if self._upload is not None:
            self._wait(self._upload)
        root = Path(spec.work_dir) / "checkpoints"
        directory = engine.save_checkpoint(root, version)
        send = partial(upload_share, self._files, directory, self._place(upload.prefix), self.rank)
        self._upload = Share(upload, lambda: self._uploads.submit(send))
        return {"seconds": time.perf_counter() - start, "directory": str(directory)}

    def upload(self) -> tuple[Upload, bool] | None:
        """The upload that `save` began in this process and nobody has recorded yet, and whether it
        has ended."""
        return None if self._upload is None else (self._upload.about, self._upload.future.done())

    @collective
    def uploaded(self, prefix: str) -> list[FileRecord] | None:
        """Wait for an upload: this rank's share in the store. None if this process has no such
        upload.

        It is kept until it is recorded (`forget_upload`), also if the store was away or full: then
        it is begun again when it is next asked for. Raises: DeadlineExceeded; StoreFull and what
        else the upload met.
        """
        if self._upload is None or self._upload.about.prefix != prefix:
            return None
        future = self._wait(self._upload)
        if error := future.exception():
            self._upload = self._upload.after(error)
        return future.result()

    def forget_upload(self, prefix: str) -> None:
        """This upload is recorded, or never will be."""
        if self._upload is not None and self._upload.about.prefix == prefix:
            self._upload = None

    def _wait(self, upload: Share) -> Future[list[FileRecord]]:
        """The upload, ended one way or the other. Raises: DeadlineExceeded."""
        _, spec = self._ready()
        future = upload.future
        try:
            future.exception(spec.upload_timeout_s)
        except FutureTimeout as error:
            raise DeadlineExceeded(
                "the upload of a checkpoint does not end",
                where=self.name,
                found=f"{upload.about.prefix} still on its way",
                expected=f"in the store within {spec.upload_timeout_s:g} s (checkpoint.timeout_s)",
                do="look whether the store answers; the same command goes on from the checkpoint before",
            ) from error
        return future

    def close(self) -> None:
        """Leave the process groups; the actor can be set up again."""
        if self._engine is not None:
            self._engine.close()
        self._engine = self._spec = self.held = None
        self.fresh = False

    @abstractmethod
    def _made(self, spec: TrainerSpec, master: Address, meeting: Address | None) -> E:
        """The engine of a spec."""

    def _load_first(self, start_from: str | None) -> None:
        """The first weights of a branch; the optimizer stays what it is."""
        engine, _ = self._ready()
        if start_from is None:
            engine.load_hf()
        else:
            engine.load_checkpoint(self._fetched(Stage.CHECKPOINT, start_from), weights_only=True)

    def _load_init(self, init: Node) -> None:
        """The first state of a branch, from where its weights came. Raises: Mismatch if it is
        another one than it was."""
        engine, spec = self._ready()
        if not self.fresh:
            raise TrainerError(
                "the first state needs ranks that have trained nothing",
                where=self.name,
                do="start them anew",
            )
        self._load_first(init.parents.get("start_from"))
        check_first(init, spec, "state_digest", engine.state_digest())
        self._remember_reference(0)

    def _of_weights(self) -> dict[str, str]:
        """What an init node says of the weights alone."""
        return {}

    @abstractmethod
    def _load_reference(self, lineage: Lineage) -> None:
        """Have the reference policy of a lineage's checkpoint, if there is one. The weights are
        anything afterwards."""

    @abstractmethod
    def _remember_reference(self, version: int) -> None:
        """Take what is held as the reference, if weight version `version` is one."""

    def _place(self, prefix: str) -> str:
        """Where in the store this rank's world writes its part of the checkpoint with this
        prefix."""
        return prefix

    def _batch(
        self,
        *,
        before: str,
        version: int,
        rollout: str,
        reward: str,
        max_staleness: int = 0,
        mask_stale: bool = False,
    ) -> Batch:
        """The batch of scored rows, for the state `before`, which must be held."""
        _, spec = self._require(before)
        sampled = self._nodes.get(Stage.ROLLOUT, rollout)
        routed = spec.train.use_rollout_routing_replay
        return fix_batch(
            read_samples(self._files, sampled, routed=routed),
            read_rewards(self._files, self._nodes.get(Stage.REWARD, reward)),
            accepted=sampled.outputs["accepted"],
            scored=spec.advantage.advantage_estimator != "none",
            version=version,
            max_staleness=max_staleness,
            mask_stale=mask_stale,
            routed=routed,
            own_teacher=spec.teacher is not None and spec.teacher.opd_type == "samples",
        )

    def _planned(self, columns: BatchColumns) -> PackingPlan:
        engine, spec = self._ready()
        return plan(
            columns.lengths,
            global_batch_size=spec.train.global_batch_size,
            max_tokens=engine.max_tokens,
            data_parallel=engine.data_parallel,
            num_steps=spec.train.num_steps_per_rollout,
            rollout=columns.rollout,
            micro_batch_size=spec.train.micro_batch_size,
            balance_by_flops=spec.train.balance_by_flops,
            attention_length=attention_length(
                json.loads((Path(spec.model_dir) / "config.json").read_text())
            ),
        )

    def _ready(self) -> tuple[E, TrainerSpec]:
        if self._engine is None or self._spec is None:
            raise TrainerError("this rank has not been set up", where=self.name)
        return self._engine, self._spec

    def _require(self, state: str) -> tuple[E, TrainerSpec]:
        if self.dirty or self.held != state:
            raise TrainerError(
                "this rank does not hold the state that is needed",
                where=self.name,
                found="a half-trained state" if self.dirty else self.held or "no weights",
                expected=state,
                do="restore the state first",
            )
        return self._ready()

    def _now_holds(self, key: str | None, result: dict[str, Any]) -> dict[str, Any]:
        self.held = key
        self.dirty = False
        self._result = result
        return result

    def _profiled(self, part: Work, iteration: int) -> AbstractContextManager[None]:
        _, spec = self._ready()
        return profiled(
            spec.observe, part, iteration=iteration, rank=self.number, work_dir=spec.work_dir
        )

    def _recorded_packing(self, key: str) -> PackingPlan | None:
        node = self._nodes.find(Stage.TRAIN, key)
        return read_packing(self._files, node, critic=self.critic) if node else None

    def _fetched(self, stage: Stage, digest: str) -> Path:
        _, spec = self._ready()
        node = self._nodes.get(stage, digest)
        return fetch_checkpoint(
            self._files, node, Path(spec.work_dir) / "checkpoints", timeout_s=spec.upload_timeout_s
        )
