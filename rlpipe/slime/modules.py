"""Modules of slime that user files import, for machines without slime.

    from slime.utils.types import Sample                    rlpipe's Sample with slime's keywords
    from slime.utils.http_utils import post, get            JSON over HTTP, with retries
    from slime.rollout.sglang_rollout import GenerateState  tokenizer, sampling_params, semaphore
    from slime.rollout.base_types import RolloutFnTrainOutput, RolloutFnEvalOutput
    from slime.rollout.filter_hub.base_types import DynamicFilterOutput
    from slime.rollout.filter_hub.dynamic_sampling_filters import check_reward_nonzero_std
    from slime.rollout.rm_hub import async_rm, grade_answer_verl, ...   and from its modules
    from slime.utils.misc import load_function, SingletonMeta
    from slime.utils.processing_utils import load_tokenizer
    from slime.utils.async_utils import run

`provide()` makes them importable. Any other module of slime raises ImportError. `algorithms.custom`
provides slime's functions for losses. A text in `MODULES` names the module with the functions; it
is imported when one of them is first used.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import statistics
import sys
from argparse import Namespace
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any, ClassVar

import httpx

from rlpipe.slime.sample import SlimeSample
from rlpipe.system.certificates import certificates

ATTEMPTS = 60
PAUSE_S = 1.0
MOST_REQUESTS = 512
"""Concurrent requests of slime's functions (the permits of `GenerateState.semaphore`)."""


@dataclass
class RolloutFnTrainOutput:
    """Result of a rollout function: groups of samples, and metrics."""

    samples: list[list[Any]]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """Result of a rollout function in an evaluation, by name of the held-out set."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


@dataclass
class DynamicFilterOutput:
    """Result of a dynamic sampling filter."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False
    """Fill the batch with this rejected group instead of another sampling round."""


SMALLEST_STD = 1e-6
"""slime's bound: smaller deviations are rounding errors of a verifier."""


def check_reward_nonzero_std(args: Any, samples: Sequence[Any], **_: Any) -> DynamicFilterOutput:
    """Keep a group if the unbiased standard deviation of its rewards is above 1e-6 in float64.

    A group of one sample has no deviation and is rejected, as in slime.
    """
    rewards = [float(sample.get_reward_value(args)) for sample in samples]
    keep = len(rewards) > 1 and statistics.stdev(rewards) > SMALLEST_STD
    return DynamicFilterOutput(keep, None if keep else f"zero_std_{round(rewards[0], 1) + 0.0:g}")


def check_reward_nonzero_std_with_fallback(
    args: Any, samples: Sequence[Any], **keywords: Any
) -> DynamicFilterOutput:
    """Filter in the same way; rejected groups fill the batch if too few others are kept."""
    output = check_reward_nonzero_std(args, samples, **keywords)
    output.keep_when_insufficient = True
    return output


@dataclass
class GenerateState:
    """Shared state of slime's functions, created from `args` in each call."""

    args: Namespace
    processor: Any = None
    aborted: bool = False
    tokenizer: Any = field(init=False)
    sampling_params: dict[str, Any] = field(init=False)
    semaphore: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        args = self.args
        self.tokenizer = args.tokenizer
        self.semaphore = asyncio.Semaphore(MOST_REQUESTS)
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
    """Return the JSON answer of a POST request.

    Raises: httpx.HTTPError after the last attempt, or at once for a status below 500.
    """
    return await _request("POST", url, max_retries, json=payload or {}, headers=headers)


async def get(url: str) -> Any:
    """Return the JSON answer of a GET request. Raises: httpx.HTTPError, like `post`."""
    return await _request("GET", url, ATTEMPTS)


async def _request(method: str, url: str, attempts: int, **keywords: Any) -> Any:
    async with httpx.AsyncClient(timeout=None, verify=certificates()) as client:
        for remaining in range(attempts - 1, -1, -1):
            try:
                response = await client.request(method, url, **keywords)
                response.raise_for_status()
                return response.json()
            except httpx.HTTPError as error:
                is_refused = (
                    isinstance(error, httpx.HTTPStatusError) and error.response.status_code < 500
                )
                if is_refused or not remaining:
                    raise
            await asyncio.sleep(PAUSE_S)
    raise AssertionError("at least one attempt is needed")


def call_rollout_fn(function: Any, *arguments: Any, evaluation: bool, **keywords: Any) -> Any:
    """Return the output of a rollout function in slime's present form."""
    output = function(*arguments, **keywords, evaluation=evaluation)
    if isinstance(output, RolloutFnTrainOutput | RolloutFnEvalOutput):
        return output
    return RolloutFnEvalOutput(output) if evaluation else RolloutFnTrainOutput(output)


def load_function(path: str) -> Any:
    """Return the object of a dotted path."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


class SingletonMeta(type):
    """Metaclass of classes with one instance in a process."""

    _instances: ClassVar[dict[type, Any]] = {}

    def __call__(cls, *arguments: Any, **keywords: Any) -> Any:
        if cls not in cls._instances:
            cls._instances[cls] = super().__call__(*arguments, **keywords)
        return cls._instances[cls]

    def clear_instances(cls) -> None:
        """Forget the instance of this class."""
        cls._instances.pop(cls, None)


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine, for a plain function."""
    return asyncio.run(coroutine)


_VERIFIERS = "rlpipe.rewards.slime_verifiers"
MODULES: dict[str, dict[str, Any] | str] = {
    "slime": {},
    "slime.utils": {},
    "slime.utils.types": {"Sample": SlimeSample},
    "slime.utils.http_utils": {"post": post, "get": get},
    "slime.utils.async_utils": {"run": run},
    "slime.utils.misc": {"load_function": load_function, "SingletonMeta": SingletonMeta},
    "slime.utils.processing_utils": "rlpipe.data.tokens",
    "slime.rollout": {},
    "slime.rollout.base_types": {
        "RolloutFnTrainOutput": RolloutFnTrainOutput,
        "RolloutFnEvalOutput": RolloutFnEvalOutput,
        "call_rollout_fn": call_rollout_fn,
    },
    "slime.rollout.rm_hub": _VERIFIERS,
    "slime.rollout.rm_hub.deepscaler": _VERIFIERS,
    "slime.rollout.rm_hub.f1": _VERIFIERS,
    "slime.rollout.rm_hub.gpqa": _VERIFIERS,
    "slime.rollout.rm_hub.math_dapo_utils": _VERIFIERS,
    "slime.rollout.rm_hub.math_utils": _VERIFIERS,
    "slime.rollout.sglang_rollout": {"GenerateState": GenerateState},
    "slime.rollout.filter_hub": {},
    "slime.rollout.filter_hub.base_types": {"DynamicFilterOutput": DynamicFilterOutput},
    "slime.rollout.filter_hub.dynamic_sampling_filters": {
        "check_reward_nonzero_std": check_reward_nonzero_std,
        "check_reward_nonzero_std_with_fallback": check_reward_nonzero_std_with_fallback,
    },
}
_provided: set[str] = set()


def _attribute(module: str, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)  # such as __file__, which tools look for in every module
    return getattr(importlib.import_module(module), name)


def provide(more: Mapping[str, dict[str, Any]] | None = None) -> None:
    """Make the modules, and those of `more`, importable in this process, unless slime is installed.

    `more`: module name → its attributes.
    """
    is_ours = "slime" in _provided
    if not is_ours and ("slime" in sys.modules or importlib.util.find_spec("slime") is not None):
        return
    for name, attributes in {**MODULES, **(more or {})}.items():
        if name in _provided:
            continue
        module = ModuleType(name, f"Replaces slime's module: see {__name__}.")
        if isinstance(attributes, str):
            attributes = {"__getattr__": partial(_attribute, attributes)}
        vars(module).update(attributes, __path__=[])
        sys.modules[name] = module
        _provided.add(name)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
