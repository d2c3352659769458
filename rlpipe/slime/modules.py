"""The modules that files written for slime import, where slime itself is not installed.

    from slime.utils.types import Sample                    our Sample, which has slime's names
    from slime.utils.http_utils import post, get            JSON over HTTP, tried again while nobody answers
    from slime.rollout.sglang_rollout import GenerateState  tokenizer, sampling_params, semaphore
    from slime.rollout.base_types import RolloutFnTrainOutput, RolloutFnEvalOutput
    from slime.rollout.filter_hub.base_types import DynamicFilterOutput
    from slime.rollout.filter_hub.dynamic_sampling_filters import check_reward_nonzero_std
    from slime.utils.async_utils import run

Only what such files use; anything else of slime is an ImportError of theirs. Not here: what the
functions are called with, and slime's functions for losses (`algorithms.logits`).
"""

from __future__ import annotations

import asyncio
import importlib.util
import statistics
import sys
from argparse import Namespace
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import httpx

from rlpipe.system.certificates import certificates
from rlpipe.types import Sample

ATTEMPTS = 60
PAUSE_S = 1.0


class SlimeSample(Sample):
    """Our Sample, made with any of slime's keywords."""

    def __init__(self, **values: Any) -> None:
        super().__init__()
        values.pop("group_index", None)
        length = values.pop("response_length", None)
        for name, value in values.items():
            setattr(self, name, value)
        if length is not None:
            self.response_length = length


@dataclass
class RolloutFnTrainOutput:
    """What a rollout function answers: groups of samples, and metrics."""

    samples: list[list[Any]]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """What it answers in an evaluation: by the name of the held-out set."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


@dataclass
class DynamicFilterOutput:
    """What a dynamic sampling filter answers."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False
    """A group that is not kept fills the batch when too few others are kept, in place of another
    sampling round."""


SMALLEST_STD = 1e-6
"""slime's bound: rewards that a verifier rounds differently by less are equal."""


def check_reward_nonzero_std(args: Any, samples: Sequence[Any], **_: Any) -> DynamicFilterOutput:
    """slime's: keep a group whose rewards have an unbiased standard deviation above 1e-6, in
    float64.

    A group of one has no deviation and is not kept, as in slime.
    """
    rewards = [float(sample.get_reward_value(args)) for sample in samples]
    keep = len(rewards) > 1 and statistics.stdev(rewards) > SMALLEST_STD
    return DynamicFilterOutput(keep, None if keep else f"zero_std_{round(rewards[0], 1) + 0.0:g}")


def check_reward_nonzero_std_with_fallback(
    args: Any, samples: Sequence[Any], **keywords: Any
) -> DynamicFilterOutput:
    """slime's: the same, and what is not kept fills the batch when too few others are kept."""
    output = check_reward_nonzero_std(args, samples, **keywords)
    output.keep_when_insufficient = True
    return output


@dataclass
class GenerateState:
    """What slime's functions share, made from `args` each time."""

    args: Namespace
    processor: Any = None
    aborted: bool = False
    tokenizer: Any = field(init=False)
    sampling_params: dict[str, Any] = field(init=False)
    semaphore: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        args = self.args
        self.tokenizer, self.semaphore = args.tokenizer, asyncio.Semaphore(512)
        names = {
            "temperature": "temperature",
            "top_p": "top_p",
            "top_k": "top_k",
            "max_new_tokens": "max_response_len",
        }
        params = {ours: getattr(args, f"rollout_{theirs}") for ours, theirs in names.items()}
        params |= {"stop": args.rollout_stop, "stop_token_ids": args.rollout_stop_token_ids}
        self.sampling_params = {
            **params,
            "skip_special_tokens": args.rollout_skip_special_tokens,
            "no_stop_trim": True,
        }


async def post(
    url: str, payload: Any, max_retries: int = ATTEMPTS, headers: dict[str, str] | None = None
) -> Any:
    """The answer's JSON. Raises: httpx.HTTPError after so many tries, or at once if the request is
    refused."""
    return await _asked("POST", url, max_retries, json=payload or {}, headers=headers)


async def get(url: str) -> Any:
    """The answer's JSON. Raises: as `post`."""
    return await _asked("GET", url, ATTEMPTS)


async def _asked(method: str, url: str, tries: int, **keywords: Any) -> Any:
    async with httpx.AsyncClient(timeout=None, verify=certificates()) as client:
        for left in range(tries - 1, -1, -1):
            try:
                answer = await client.request(method, url, **keywords)
                answer.raise_for_status()
                return answer.json()
            except httpx.HTTPError as error:
                refused = (
                    isinstance(error, httpx.HTTPStatusError) and error.response.status_code < 500
                )
                if refused or not left:
                    raise
            await asyncio.sleep(PAUSE_S)
    raise AssertionError("no try was made")


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine, for a plain function."""
    return asyncio.run(coroutine)


MODULES: dict[str, dict[str, Any]] = {
    "slime": {},
    "slime.utils": {},
    "slime.utils.types": {"Sample": SlimeSample},
    "slime.utils.http_utils": {"post": post, "get": get},
    "slime.utils.async_utils": {"run": run},
    "slime.rollout": {},
    "slime.rollout.base_types": {
        "RolloutFnTrainOutput": RolloutFnTrainOutput,
        "RolloutFnEvalOutput": RolloutFnEvalOutput,
    },
    "slime.rollout.sglang_rollout": {"GenerateState": GenerateState},
    "slime.rollout.filter_hub": {},
    "slime.rollout.filter_hub.base_types": {"DynamicFilterOutput": DynamicFilterOutput},
    "slime.rollout.filter_hub.dynamic_sampling_filters": {
        "check_reward_nonzero_std": check_reward_nonzero_std,
        "check_reward_nonzero_std_with_fallback": check_reward_nonzero_std_with_fallback,
    },
}


_ours: set[str] = set()


def provide(more: Mapping[str, dict[str, Any]] | None = None) -> None:
    """Make them, and `more` of the kind, importable in this process, unless slime is installed."""
    if "slime" not in _ours and (
        "slime" in sys.modules or importlib.util.find_spec("slime") is not None
    ):
        return
    for name, content in {**MODULES, **(more or {})}.items():
        if name in _ours:
            continue
        module = ModuleType(name, f"Stands for slime's: see {__name__}.")
        vars(module).update(content, __path__=[])
        sys.modules[name] = module
        _ours.add(name)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
