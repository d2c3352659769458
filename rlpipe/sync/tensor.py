"""Weights over HTTP, from trainer rank 0 to each engine's `/update_weights_from_tensor`, in buckets.

To engines on this machine goes where in shared memory a bucket lies (`shared`), to others the bytes.

    pause → flush → begin → buckets → end → echo the stamp → continue

With a check, all of it is sent twice: after `end` the engine remembers what it holds and fills it with random numbers; then
begin → buckets → end again, and it compares. What was not sent, or was not taken, differs.

A tensor is checked against the model directory before it is sent: SGLang ignores a wrong name and dies of a wrong shape.
Not here: CUDA IPC handles, NCCL groups, or files. Where trainer and engine share no GPU this is right but not fast.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from urllib.parse import urlsplit

from safetensors import safe_open
from torch import Tensor

from rlpipe.engines.sglang.admin import Engine, PauseMode
from rlpipe.errors import ConfigError, DeadlineExceeded, EngineError, SyncError
from rlpipe.sync.base import PushReport
from rlpipe.sync.shared import SharedBuffer, references

Bucket = list[tuple[str, Tensor]]


class TensorTransport:
    """See `base.Transport`."""

    def __init__(self, model_dir: str | Path, *, buffer_size_bytes: int, timeout_s: float, tensor_parallel_size: int = 1) -> None:
        """`model_dir` says which names and shapes the engines hold. `timeout_s` is for a whole push; one call gets a quarter."""
        self.expected = expected_shapes(model_dir)
        self._shared = SharedBuffer()
        self.buffer_size_bytes, self.timeout_s, self.tensor_parallel_size = buffer_size_bytes, timeout_s, tensor_parallel_size

    def push(
        self,
        named_tensors: Iterable[tuple[str, Tensor]],
        engines: Sequence[str],
        stamp: str,
        *,
        pause: PauseMode = "abort",
        check: bool = False,
    ) -> PushReport:
        """See `base.Transport.push`. Must not be called on a running event loop.

        `pause`: what becomes of requests in flight. `retract` keeps them in the engine and computes their cache anew under the
        new weights; never `in_place`, with which old caches would be used on (see `Engine.pause`). `check`: see the module; an
        engine that differs makes the whole push fail.
        """
        assert pause != "in_place"
        tensors = iter(named_tensors)
        try:
            return asyncio.run(self._push(tensors, engines, stamp, pause, check))
        finally:
            for _ in tensors:
                pass

    async def _push(
        self, tensors: Iterator[tuple[str, Tensor]], engines: Sequence[str], stamp: str, pause: PauseMode, check: bool
    ) -> PushReport:
        start_s = time.monotonic()
        async with AsyncExitStack() as stack:
            admins = [await stack.enter_async_context(Engine(url, deadline_s=self.timeout_s / 4)) for url in engines]
            push = _Push(admins, stamp, self._shared if all(map(is_here, engines)) else None)
            try:
                async with asyncio.timeout(self.timeout_s):
                    await self._send(push, tensors, pause, check)
            except (TimeoutError, SyncError) as error:
                why = str(error) if isinstance(error, SyncError) else f"not finished within {self.timeout_s:g} s ({push.doing})"
                push.unknown.update({url: why for url in engines if url not in push.current and url not in push.unknown})
        push.judge()
        return PushReport(
            stamp, tuple(push.current), push.unknown, push.tensors, push.size_bytes, push.buckets, time.monotonic() - start_s
        )

    async def _send(self, push: _Push, tensors: Iterator[tuple[str, Tensor]], pause: PauseMode, check: bool) -> None:
        await push.each("pause", lambda engine: engine.pause(pause))
        await push.each("flush the cache", Engine.flush)
        await push.each("begin", push.begin)
        missing, sent = set(self.expected), []
        for bucket, last in _with_last(buckets(checked(tensors, self.expected, missing), self.buffer_size_bytes)):
            if last and missing:
                raise SyncError(
                    "tensors are missing", where=f"push of {push.stamp}", found=f"no {', '.join(sorted(missing)[:5])}"
                )
            await push.send(bucket, last, self.tensor_parallel_size)
            sent += [(bucket, last)] if check else []
        await push.each("end", push.end)
        if check:
            await self._again(push, sent)
        await push.each("echo", push.echo)
        await push.each("continue", Engine.continue_)
        push.current = [engine.url for engine in push.active]

    async def _again(self, push: _Push, sent: Sequence[tuple[Bucket, bool]]) -> None:
        """Send it all over random numbers. Raises: SyncError if an engine then holds anything else than before."""
        await push.all("remember the weights", lambda engine: engine.check_weights("snapshot"))
        await push.each("overwrite the weights", lambda engine: engine.check_weights("reset_tensors"))
        await push.each("begin again", push.begin)
        for bucket, last in sent:
            await push.send(bucket, last, self.tensor_parallel_size)
        await push.each("end again", push.end)
        await push.all("compare the weights", lambda engine: engine.check_weights("compare"))


class _Push:
    """One push: the engines still in it, and why the others are not."""

    def __init__(self, engines: list[Engine], stamp: str, shared: SharedBuffer | None) -> None:
        self.active, self.stamp, self.shared = engines, stamp, shared
        self.unknown: dict[str, str] = {}
        self.current: list[str] = []
        self.in_session: set[str] = set()
        self.tensors = self.size_bytes = self.buckets = 0
        self.doing = "start"

    async def each(self, doing: str, step) -> None:
        """Do one step on every engine at once; one that fails is out. Raises: SyncError when none is left."""
        self.doing = doing
        errors = await asyncio.gather(*(_error_of(step(engine)) for engine in self.active))
        for engine, error in zip(self.active, errors, strict=True):
            if error is not None:
                self.unknown[engine.url] = f"{doing}: {error}"
        self.active = [engine for engine in self.active if engine.url not in self.unknown]
        if not self.active:
            raise SyncError("no engine is left", where=f"push of {self.stamp}", found=self.unknown)

    async def all(self, doing: str, step) -> None:
        """Do one step of a check on every engine at once. Raises: SyncError if any of them does not pass it."""
        self.doing = doing
        errors = await asyncio.gather(*(_error_of(step(engine)) for engine in self.active))
        if found := {engine.url: str(error) for engine, error in zip(self.active, errors, strict=True) if error is not None}:
            raise SyncError(
                "an engine does not hold the weights that were sent (sync.check_weight_update_equal)",
                where=f"push of {self.stamp}: {doing}",
                found=found,
                do="an engine without /weights_checker (HTTP 404) cannot say: leave the check out",
            )

    async def begin(self, engine: Engine) -> None:
        if await engine.begin_weight_update():
            self.in_session.add(engine.url)

    async def end(self, engine: Engine) -> None:
        if engine.url in self.in_session:
            await engine.end_weight_update()

    async def send(self, bucket: Bucket, last: bool, copies: int) -> None:
        placed = self.shared.place(bucket) if self.shared is not None else None
        body = pickle.dumps(bucket, protocol=pickle.HIGHEST_PROTOCOL) if placed is None else b""
        stamp = self.stamp if last else None
        await self.each(
            f"bucket {self.buckets}",
            lambda engine: engine.update_from_tensors(
                [body or references(placed or ()) for _ in range(copies)], weight_version=stamp, flush_cache=last
            ),
        )
        self.buckets += 1
        self.tensors += len(bucket)
        self.size_bytes += sum(tensor.nbytes for _, tensor in bucket)

    async def echo(self, engine: Engine) -> None:
        """Raises: SyncError if the engine does not say that it holds these weights."""
        found = await engine.weight_version()
        if found != self.stamp:
            raise SyncError("it names other weights", where=engine.url, found=found, expected=self.stamp)

    def judge(self) -> None:
        if not self.current:
            raise SyncError("the weights arrived nowhere", where=f"push of {self.stamp}", found=self.unknown)


async def _error_of(step) -> Exception | None:
    try:
        await step
    except (EngineError, DeadlineExceeded, SyncError) as error:
        return error
    return None


def is_here(url: str) -> bool:
    """Is this address on the loopback interface of our machine?"""
    return urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")


def expected_shapes(model_dir: str | Path) -> dict[str, tuple[int, ...]]:
    """Name → shape of every tensor in the directory's safetensors files, read from their headers.

    Raises: ConfigError if there are none.
    """
    files = sorted(Path(model_dir).glob("*.safetensors"))
    if not files:
        raise ConfigError("the model directory has no weights", where="model.source", found=f"no *.safetensors in {model_dir}")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118 - no mapping
    config = json.loads((Path(model_dir) / "config.json").read_text())
    if config.get("tie_word_embeddings"):
        shapes.pop("lm_head.weight", None)
    return shapes


def checked(
    tensors: Iterable[tuple[str, Tensor]], expected: Mapping[str, tuple[int, ...]], missing: set[str]
) -> Iterator[tuple[str, Tensor]]:
    """Pass on each tensor that the engines expect, on the CPU and owning no more than itself; take its name out of `missing`.

    A tied `lm_head.weight` is left out. Raises: SyncError for another name, shape, or a dtype that is not floating point.
    """
    for name, tensor in tensors:
        if name == "lm_head.weight" and name not in expected:
            continue
        if name not in expected:
            raise SyncError(
                "the engines have no such tensor",
                where=name,
                found=f"shape {tuple(tensor.shape)}",
                expected="a name of the model",
            )
        if tuple(tensor.shape) != expected[name] or not tensor.is_floating_point():
            found = f"{tensor.dtype} {tuple(tensor.shape)}"
            raise SyncError(
                "a tensor is not what the engines hold", where=name, found=found, expected=f"floating point {expected[name]}"
            )
        missing.discard(name)
        own = tensor.detach().to("cpu").contiguous()
        yield name, own.clone() if own.untyped_storage().nbytes() != own.nbytes else own


def buckets(tensors: Iterable[tuple[str, Tensor]], size_bytes: int) -> Iterator[Bucket]:
    """Cut a stream of tensors into lists of at most `size_bytes`; a larger tensor is a bucket of its own."""
    bucket: Bucket = []
    held = 0
    for name, tensor in tensors:
        if bucket and held + tensor.nbytes > size_bytes:
            yield bucket
            bucket, held = [], 0
        bucket.append((name, tensor))
        held += tensor.nbytes
    if bucket:
        yield bucket


def _with_last(items: Iterator[Bucket]) -> Iterator[tuple[Bucket, bool]]:
    """Each item, and whether it is the last."""
    held = next(items, None)
    if held is None:
        raise SyncError("there is nothing to push")
    for item in items:
        yield held, False
        held = item
    yield held, True
