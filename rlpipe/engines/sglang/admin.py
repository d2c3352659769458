"""`Engine`: everything that is said to one SGLang server except to sample. Addressed directly: the
router passes none of it on.

SGLang 0.5.15 to 0.5.21 are told apart by what they answer, not by number: an endpoint that is not
there answers 404. Not here: the order of calls that makes a weight push safe (`rlpipe.sync`).
"""

from __future__ import annotations

import asyncio
import base64
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any, Literal, TypeVar, get_args

import httpx

from rlpipe.errors import DeadlineExceeded, EngineRejected
from rlpipe.rollout.client.http import call
from rlpipe.rollout.generation import no_spans
from rlpipe.system.certificates import certificates

_POLL_S = 0.05
_SHOWN_CHARACTERS = 500
Answer = TypeVar("Answer")
PauseMode = Literal["abort", "retract", "in_place"]
MemoryTag = Literal["weights", "kv_cache", "cuda_graph"]
MEMORY_TAGS: tuple[MemoryTag, ...] = get_args(MemoryTag)
"""What an engine has on its GPU, by SGLang's names."""


class Engine:
    """One engine's control interface. Methods raise EngineUnavailable, EngineRejected or
    DeadlineExceeded, naming the engine."""

    def __init__(self, url: str, *, deadline_s: float = 120.0) -> None:
        """`deadline_s` is for each call."""
        self.url = url.rstrip("/")
        self.deadline_s = deadline_s
        self._http = httpx.AsyncClient(timeout=None, verify=certificates())

    async def __aenter__(self) -> Engine:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._http.aclose()

    async def info(self) -> dict[str, Any]:
        """What it serves: `model_path`, `weight_version` … It answers while paused too."""
        try:
            return await self._ask("GET", "/model_info", read=dict)
        except EngineRejected as error:
            if not _missing(error):
                raise
            return await self._ask("GET", "/get_model_info", read=dict)

    async def server_info(self) -> dict[str, Any]:
        """What it was started with and what came of it, SGLang's version among it."""
        return await self._ask("GET", "/server_info", read=dict)

    async def weight_version(self) -> str:
        """The stamp of the last push, or the one it was started with."""
        version = (await self.info()).get("weight_version")
        if version is None:
            version = await self._ask(
                "GET", "/get_weight_version", read=itemgetter("weight_version")
            )
        return str(version)

    async def health(self) -> None:
        """Returns if it could generate one token just now. It does not answer while it is
        paused."""
        await self._call("GET", "/health_generate")

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Sample nothing until `continue_`; new requests wait inside.

        What is in flight: `abort` returns it with what it has (about 1 s if there is any); the
        others hold it. Weights may change under `abort` and `retract`: the cache can be flushed and
        is computed anew. Under `in_place` it cannot: what is in flight goes on with keys and values
        of the old weights, and so does, through the prefix cache, every later request with a prompt
        it has seen, under the new weights' name (measured on 0.5.21: log-probs off by 6.5 and 4.7).
        """
        await self._call("POST", "/pause_generation", {"mode": mode})

    async def require_spans(self) -> None:
        """Returns if its answers say which weights sampled which token, as requests that live
        through a push need it.

        It samples one token. Raises: EngineError naming the setting if they do not: SGLang before
        0.5.21.
        """
        body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}, "return_logprob": True}
        meta = await self._ask("POST", "/generate", body, read=lambda said: dict(said["meta_info"]))
        if not meta.get("weight_versions"):
            raise no_spans(f"engine {self.url}")

    async def continue_(self) -> None:
        await self._call("POST", "/continue_generation", {})

    async def flush(self) -> None:
        """Empty the prefix cache, which belongs to the weights that filled it; waits until no
        request holds it."""
        end_s = time.monotonic() + self.deadline_s
        while True:
            try:
                await self._call("POST", "/flush_cache")
                return
            except EngineRejected as error:
                if time.monotonic() > end_s:
                    raise DeadlineExceeded(
                        "the cache is still in use",
                        where=self.url,
                        found=error.found,
                        expected=f"idle within {self.deadline_s:g} s",
                    ) from error
            await asyncio.sleep(_POLL_S)

    async def abort_all(self) -> None:
        """End every request; each returns what it has."""
        await self._call("POST", "/abort_request", {"rid": "", "abort_all": True})

    async def begin_weight_update(self) -> bool:
        """Open an update; ends one that a failed push has left open. False if this version of
        SGLang has no such thing."""
        try:
            await self._call("POST", "/begin_weight_update", {})
        except EngineRejected as error:
            if _missing(error):
                return False
            if "already open" not in str(error.found):
                raise
            await self.end_weight_update()
            await self._call("POST", "/begin_weight_update", {})
        return True

    async def end_weight_update(self) -> None:
        await self._call("POST", "/end_weight_update", {})

    async def update_from_tensors(
        self,
        serialized: Sequence[bytes],
        *,
        weight_version: str | None,
        flush_cache: bool,
        flattened: bool = False,
    ) -> None:
        """Load one bucket: one entry per tensor parallel rank, each the pickle of [(name, tensor)],
        or as `handles` makes it.

        `weight_version` belongs to the last bucket only. A wrong name is ignored and a wrong shape
        ends the engine, so both are the caller's to check.
        """
        body: dict[str, Any] = {
            "serialized_named_tensors": [base64.b64encode(item).decode() for item in serialized],
            "flush_cache": flush_cache,
        }
        if flattened:
            body["load_format"] = "flattened_bucket"
        if weight_version is not None:
            body["weight_version"] = weight_version
        await self._call("POST", "/update_weights_from_tensor", body)

    async def join_group(
        self, name: str, *, address: str, port: int, first_rank: int, world_size: int, backend: str
    ) -> None:
        """Have its ranks join a process group, as `first_rank` and following, with one that waits
        at `address`.

        One of that name which another process has left behind in it ends first.
        """
        await self.leave_group(name)
        body = {
            "master_address": address,
            "master_port": port,
            "rank_offset": first_rank,
            "world_size": world_size,
        }
        await self._call(
            "POST", "/init_weights_update_group", {**body, "group_name": name, "backend": backend}
        )

    async def leave_group(self, name: str) -> None:
        """Have its ranks leave a process group, if they are in it."""
        try:
            await self._call("POST", "/destroy_weights_update_group", {"group_name": name})
        except EngineRejected as error:
            if "does not exist" not in str(error.found):
                raise

    async def update_from_group(
        self,
        name: str,
        tensors: Sequence[tuple[str, str, Sequence[int]]],
        *,
        weight_version: str | None,
        flush_cache: bool,
    ) -> None:
        """Load one bucket that is broadcast to the group as one tensor of bytes: name, dtype
        (torch's word) and shape of each.

        It answers once it has received and loaded it, and waits for the broadcast for as long as
        that takes. For `weight_version`, names and shapes see `update_from_tensors`.
        """
        names, dtypes, shapes = zip(*tensors, strict=True)
        body: dict[str, Any] = {
            "names": names,
            "dtypes": dtypes,
            "shapes": [list(shape) for shape in shapes],
            "group_name": name,
            "load_format": "flattened_bucket",
            "flush_cache": flush_cache,
        }
        if weight_version is not None:
            body["weight_version"] = weight_version
        await self._call("POST", "/update_weights_from_distributed", body)

    async def release_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Give up this GPU memory. It must be paused and flushed: with a request at work the server
        ends.

        What is given up twice, or taken back without, ends it too: the caller remembers. Without
        `enable_memory_saver` (or CUDA) it answers and keeps everything.
        """
        await self._call("POST", "/release_memory_occupation", {"tags": list(tags)})

    async def resume_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Take it back. Weights are not what they were: push some."""
        await self._call("POST", "/resume_memory_occupation", {"tags": list(tags)})

    async def update_from_disk(self, directory: str, *, weight_version: str) -> None:
        """Load all weights from the safetensors files of a directory on its machine; needs no begin
        and no end.

        A tensor that is not there keeps its old weights. Files that cannot be read end the engine:
        SGLang 0.5.21 means to go back to the old weights, but reads the same files again.
        """
        await self._call(
            "POST",
            "/update_weights_from_disk",
            {"model_path": directory, "weight_version": weight_version},
        )

    async def check_weights(self, action: Literal["snapshot", "reset_tensors", "compare"]) -> None:
        """Remember what it holds; fill it with random numbers; compare it with what is remembered,
        and forget that.

        Raises: EngineRejected naming the tensors that differ, or if this version of SGLang has no
        such thing.
        """
        await self._call("POST", "/weights_checker", {"action": action})

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probability of each token but the first, given those before it, at temperature 1.
        Token ids are not checked here.

        Shapes: sequences [N][T_i]; returns [N][T_i - 1].
        """
        body = {
            "input_ids": [list(map(int, sequence)) for sequence in sequences],
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        return await self._ask("POST", "/generate", body, read=partial(_scores, sequences))

    async def _ask(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        read: Callable[[Any], Answer],
    ) -> Answer:
        """What `read` makes of the JSON of an answer. Raises also: EngineRejected if there is none,
        or another than it reads."""
        answer = await self._call(method, path, body)
        try:
            return read(answer.json())
        except (
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            OverflowError,
            RecursionError,
        ) as error:
            raise EngineRejected(
                "its answer cannot be read",
                where=f"engine {self.url} {path}",
                found=f"{answer.text[:_SHOWN_CHARACTERS]} ({error!r})",
            ) from error

    async def _call(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> httpx.Response:
        answer = await call(
            self._http,
            method,
            f"{self.url}{path}",
            json=body,
            deadline_s=self.deadline_s,
            where=f"engine {self.url} {path}",
        )
        if "json" in answer.headers.get("content-type", ""):
            with suppress(ValueError, RecursionError):
                said = answer.json()
                if isinstance(said, dict) and said.get("success") is False:
                    raise EngineRejected(
                        "it failed",
                        where=f"engine {self.url} {path}",
                        found=said.get("message", said),
                    )
        return answer


def _scores(sequences: Sequence[Sequence[int]], rows: list[dict[str, Any]]) -> list[list[float]]:
    scores = [
        [float(pair[0]) for pair in row["meta_info"]["input_token_logprobs"][1:]] for row in rows
    ]
    if [len(row) + 1 for row in scores] != [len(sequence) for sequence in sequences]:
        raise ValueError("not a log-probability for each token but the first")
    if not all(map(math.isfinite, chain.from_iterable(scores))):
        raise ValueError("a log-probability is not finite")
    return scores


def _missing(error: EngineRejected) -> bool:
    return str(error.found).startswith("HTTP 404 ")
