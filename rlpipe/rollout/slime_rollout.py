"""slime's default rollout as functions: `slime.rollout.sglang_rollout` of user functions.

    generate, generate_streaming        one response of a sample
    generate_and_rm                     the sample's generate function, sample hooks and reward
    generate_and_rm_group               the samples of a group at once
    generate_rollout                    groups until a batch is full, or the held-out sets
    GenerateState                       tokenizer, sampling parameters and tasks of a rollout

They send requests to `args.sglang_router_ip` and `args.sglang_router_port`. This is the gateway of
a rollout (`rlpipe.rollout.agent.gateway`), so log-probs and weight versions are recorded. Without
user functions a run does not call them: `rlpipe.rollout.sampler` samples.

Differs: `abort` waits for requests in flight and does not cancel them, because the gateway has no
part of a response to return; with `args.partial_rollout` their groups go to the data source.
An evaluation takes its prompts from the data source, which holds one held-out set.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import random
import uuid
import weakref
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import httpx

from rlpipe.data.slime_data import load_processor, load_tokenizer
from rlpipe.rewards.slime_verifiers import async_rm, batched_async_rm
from rlpipe.slime.modules import source_attribute
from rlpipe.slime.outputs import (
    MetricGatherer,
    RolloutFnEvalOutput,
    RolloutFnTrainOutput,
    call_dynamic_filter,
    should_drop_dynamic_filter_output,
)
from rlpipe.slime.utilities import (
    apply_rollout_sample_hooks,
    get,
    get_rollout_num_engines,
    load_function,
    post,
    run,
)
from rlpipe.system.certificates import certificates
from rlpipe.types import Sample, Status

__all__ = ["generate_rollout", "get", "get_model_url"]
__getattr__ = partial(source_attribute, "slime.rollout.sglang_rollout")
Samples = list[Any]
"""Samples of a group; a rollout that fanned out is a list in its place."""
EVALUATION_PARAMS = {
    "temperature": "eval_temperature",
    "top_p": "eval_top_p",
    "top_k": "eval_top_k",
    "max_new_tokens": "eval_max_response_len",
    "min_new_tokens": "eval_min_new_tokens",
}
"""Sampling parameter → attribute of `args` in evaluations."""


def get_model_url(args: Namespace, model_name: str, endpoint: str = "/generate") -> str:
    """Return the URL of a named model, or of the policy for an unknown name."""
    routers = getattr(args, "sglang_model_routers", None) or {}
    host, port = routers.get(model_name) or (args.sglang_router_ip, args.sglang_router_port)
    return f"http://{host}:{port}{endpoint}"


class _PerArgs(type):
    """Metaclass: one instance per `args` object, which belongs to one rollout."""

    _instances: ClassVar[dict[int, Any]] = {}

    def __call__(cls, args: Namespace) -> Any:
        key = id(args)
        if key not in cls._instances:
            cls._instances[key] = super().__call__(args)
            weakref.finalize(args, cls._instances.pop, key, None)
        return cls._instances[key]


class GenerateState(metaclass=_PerArgs):
    """State that the functions of one rollout share."""

    def __init__(self, args: Namespace) -> None:
        # A weak reference: the state would keep `args`, and thereby itself, for ever.
        self._args = weakref.ref(args)
        self.tokenizer = getattr(args, "tokenizer", None) or load_tokenizer(args.hf_checkpoint)
        self.processor = load_processor(args.hf_checkpoint)
        engines = max(1, get_rollout_num_engines(args))
        self.semaphore = asyncio.Semaphore(args.sglang_server_concurrency * engines)
        self.sampling_params: dict[str, Any] = {
            "temperature": args.rollout_temperature,
            "top_p": args.rollout_top_p,
            "top_k": args.rollout_top_k,
            "max_new_tokens": args.rollout_max_response_len,
            "stop": args.rollout_stop,
            "stop_token_ids": args.rollout_stop_token_ids,
            "skip_special_tokens": args.rollout_skip_special_tokens,
            "no_stop_trim": True,
            "spaces_between_special_tokens": False,
        }
        if getattr(args, "sglang_enable_deterministic_inference", False):
            seeds = range(args.rollout_seed, args.rollout_seed + args.n_samples_per_prompt)
            self.group_sampling_seeds = list(seeds)
        self.dp_counts = [0] * (getattr(args, "sglang_dp_size", None) or 1)
        self.dp_rank = 0
        self.reset()

    @property
    def args(self) -> Namespace:
        """The `args` of the rollout."""
        args = self._args()
        assert args is not None, "a state is not used after its rollout"
        return args

    @contextmanager
    def dp_rank_context(self) -> Iterator[int]:
        """Count a request on the least loaded data parallel rank of the engines."""
        fewest = min(self.dp_counts)
        ranks = [rank for rank, count in enumerate(self.dp_counts) if count == fewest]
        rank = self.dp_rank = random.choice(ranks)
        self.dp_counts[rank] += 1
        try:
            yield rank
        finally:
            self.dp_counts[rank] -= 1

    def reset(self) -> None:
        """Forget the tasks of a rollout."""
        self.remaining_batch_size = 0
        self.pendings: set[asyncio.Task[Samples]] = set()
        self.aborted = False

    def submit_generate_tasks(self, samples: list[list[Sample]]) -> None:
        """Start a task for each group."""
        for group in samples:
            work = generate_and_rm_group(self.args, group, self.sampling_params.copy())
            self.pendings.add(asyncio.create_task(work))
        self.remaining_batch_size += len(samples)


def _request(args: Namespace, sample: Sample, params: dict[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of a request for the rest of a response; None if its length is used up.

    Raises: ValueError for a finished sample.
    """
    if sample.status not in (Status.PENDING, Status.ABORTED):
        raise ValueError(f"Sample status is {sample.status}")
    params["max_new_tokens"] -= sample.response_length
    if params["max_new_tokens"] < 0:
        raise ValueError(f"max_new_tokens: {params['max_new_tokens']} should not be less than 0")
    if params["max_new_tokens"] == 0:
        sample.status = Status.TRUNCATED
        return None
    if not sample.tokens:
        tokenizer = GenerateState(args).tokenizer
        sample.tokens = tokenizer.encode(sample.prompt, add_special_tokens=False)
    payload: dict[str, Any] = {
        "input_ids": list(sample.tokens),
        "sampling_params": params,
        "return_logprob": True,
    }
    if args.use_rollout_routing_replay:
        payload["return_routed_experts"] = True
    headers = None
    if sample.session_id and getattr(args, "router_policy", None) == "consistent_hashing":
        headers = {"X-SMG-Routing-Key": sample.session_id}
    return {"payload": payload, "headers": headers}


def _append(args: Namespace, sample: Sample, answer: dict[str, Any]) -> None:
    """Append the tokens of an answer to a sample."""
    pairs = answer["meta_info"].get("output_token_logprobs") or []
    sample.append_response_tokens(
        args,
        tokens=[pair[1] for pair in pairs],
        log_probs=[pair[0] for pair in pairs],
        meta_info=answer["meta_info"],
        text=answer["text"],
    )


async def generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Sample the rest of a response. Raises: ValueError for a finished sample."""
    request = _request(args, sample, sampling_params)
    if request is not None:
        _append(args, sample, await post(get_model_url(args, ""), **request))
    return sample


async def generate_streaming(
    args: Namespace, sample: Sample, sampling_params: dict[str, Any]
) -> Sample:
    """Sample the rest of a response as a stream. An abort leaves the tokens received so far."""
    request = _request(args, sample, sampling_params)
    if request is None:
        return sample
    payload = {**request["payload"], "stream": True}
    state = GenerateState(args)
    last: dict[str, Any] | None = None
    async with (
        httpx.AsyncClient(timeout=None, verify=certificates()) as client,
        client.stream(
            "POST", get_model_url(args, ""), json=payload, headers=request["headers"]
        ) as response,
    ):
        response.raise_for_status()
        async for line in response.aiter_lines():
            data = line.removeprefix("data:").strip()
            if not line.startswith("data:") or data in ("", "[DONE]"):
                continue
            last = json.loads(data)  # SGLang repeats the earlier tokens in every part
            if state.aborted:
                break
    if last is not None:
        _append(args, sample, last)
    if state.aborted and not (last or {}).get("meta_info", {}).get("finish_reason"):
        sample.status = Status.ABORTED
    return sample


async def generate_and_rm(
    args: Namespace,
    sample: Any,
    sampling_params: dict[str, Any],
    evaluation: bool = False,
) -> Any:
    """Sample a response with the sample's generate function, and score it.

    Returns the sample, or the list of a generate function that fans out.
    """
    partial_rollout = args.partial_rollout and args.mask_offpolicy_in_partial_rollout
    if partial_rollout and sample.response_length > 0:
        sample.loss_mask = [0] * sample.response_length
    if sample.status in (Status.COMPLETED, Status.TRUNCATED):
        return sample
    state = GenerateState(args)
    async with state.semaphore:
        if state.aborted:
            sample.status = Status.ABORTED
            return sample
        with state.dp_rank_context():
            sample = await _generated(args, sample, sampling_params, evaluation=evaluation)
    sample = await apply_rollout_sample_hooks(args, sample, evaluation=evaluation)
    samples = sample if isinstance(sample, list) else [sample]
    if args.group_rm or any(one.status is Status.ABORTED for one in samples):
        return sample
    unscored = [one for one in samples if one.reward is None]
    if isinstance(sample, list):
        rewards = await batched_async_rm(args, unscored)
    else:
        rewards = [await async_rm(args, one) for one in unscored]
    for one, reward in zip(unscored, rewards, strict=True):
        one.reward = reward
    return sample


async def _generated(
    args: Namespace, sample: Sample, params: dict[str, Any], *, evaluation: bool
) -> Any:
    path = getattr(sample, "generate_function_path", None) or args.custom_generate_function_path
    if path is None:
        return await generate(args, sample, params)
    function = load_function(path)
    if "evaluation" in inspect.signature(function).parameters:
        return await function(args, sample, params, evaluation=evaluation)
    return await function(args, sample, params)


async def generate_and_rm_group(
    args: Namespace, group: list[Sample], sampling_params: dict[str, Any], evaluation: bool = False
) -> Samples:
    """Sample and score the samples of a group at once."""
    state = GenerateState(args)
    if state.aborted:
        return group
    work = []
    for number, sample in enumerate(group):
        sample.session_id = sample.session_id or str(uuid.uuid4())
        params = sampling_params.copy()
        if getattr(args, "sglang_enable_deterministic_inference", False):
            params["sampling_seed"] = state.group_sampling_seeds[number]
        work.append(generate_and_rm(args, sample, params, evaluation=evaluation))
    group = list(await asyncio.gather(*work))
    if args.group_rm and not state.aborted:
        rewards = await batched_async_rm(args, group)
        for sample, reward in zip(group, rewards, strict=True):
            sample.reward = reward
    return group


async def abort(args: Namespace, rollout_id: int) -> list[Samples]:
    """Start no further request, wait for those in flight, and return their groups.

    Without `args.partial_rollout` the groups are not returned.
    """
    state = GenerateState(args)
    state.aborted = True
    groups = list(await asyncio.gather(*state.pendings))
    state.pendings = set()
    if not args.partial_rollout:
        return []
    for sample in _flat(groups):
        if sample.response:
            sample.metadata.setdefault("start_rollout_id", rollout_id)
    return groups


def _flat(groups: Any) -> list[Sample]:
    if not isinstance(groups, list):
        return [groups]
    return [sample for group in groups for sample in _flat(group)]


def _number(group: Samples) -> tuple[int, int]:
    first = _flat(group)[0]
    return first.group_index or 0, first.index or 0


async def generate_rollout_async(
    args: Namespace, rollout_id: int, data_source: Callable[[int], list[list[Sample]]]
) -> tuple[RolloutFnTrainOutput, list[Samples]]:
    """Sample groups until `args.rollout_batch_size` pass the dynamic filter.

    `data_source(n)` returns the next n groups. Returns the batch, and the groups cut off.
    """
    state = GenerateState(args)
    path = args.dynamic_sampling_filter_path
    keep = None if path is None else load_function(path)
    metrics = MetricGatherer()
    batch: list[Samples] = []
    finished: list[Samples] = []
    size = args.rollout_batch_size
    while len(batch) < size:
        while state.remaining_batch_size < size:
            state.submit_generate_tasks(data_source(args.over_sampling_batch_size))
        done, state.pendings = await asyncio.wait(
            state.pendings, return_when=asyncio.FIRST_COMPLETED
        )
        for group in (task.result() for task in done):
            finished.append(group)
            verdict = call_dynamic_filter(keep, args, group)
            if should_drop_dynamic_filter_output(
                verdict, remaining_batch_size=state.remaining_batch_size, target_data_size=size
            ):
                metrics.on_dynamic_filter_drop(verdict.reason)
                state.remaining_batch_size -= 1
            elif len(batch) < size:
                batch.append(group)
    cut_off = await abort(args, rollout_id)
    state.reset()
    batch.sort(key=_number)
    if args.rollout_sample_filter_path is not None:
        load_function(args.rollout_sample_filter_path)(args, batch)
    if args.rollout_all_samples_process_path is not None:
        process = load_function(args.rollout_all_samples_process_path)
        process(args, sorted(finished, key=_number), data_source)
    return RolloutFnTrainOutput(batch, metrics.collect()), cut_off


def evaluation_params(args: Namespace) -> dict[str, Any]:
    """Return the sampling parameters of the held-out set that `args` describes."""
    return {
        ours: value
        for ours, name in EVALUATION_PARAMS.items()
        if (value := getattr(args, name, None)) is not None
    }


async def eval_rollout(
    args: Namespace, rollout_id: int, data_source: Any
) -> tuple[RolloutFnEvalOutput, list[Samples]]:
    """Sample and score the groups of a held-out set, which are those of `data_source`."""
    state = GenerateState(args)
    groups = data_source.get_samples(len(data_source))
    params = state.sampling_params | evaluation_params(args)
    answers = await asyncio.gather(
        *(generate_and_rm(args, sample, dict(params), evaluation=True) for sample in _flat(groups))
    )
    data = _flat(list(answers))
    key = args.eval_reward_key or args.reward_key
    rewards = [sample.reward[key] if key else sample.reward for sample in data]
    truncated = [sample.status is Status.TRUNCATED for sample in data]
    name = data[0].group_id.rpartition(":")[0].removeprefix("eval/")
    result = {name: {"rewards": rewards, "truncated": truncated, "samples": data}}
    return RolloutFnEvalOutput(result), []


def generate_rollout(
    args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Sample the batch of an iteration, or a held-out set."""
    if evaluation:
        return run(eval_rollout(args, rollout_id, data_source))[0]
    output, cut_off = run(generate_rollout_async(args, rollout_id, data_source.get_samples))
    if cut_off:
        data_source.add_samples(cut_off)
    return output
