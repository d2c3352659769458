"""Which way a run samples, made ready for one rollout: given rows, a turn, turns with tools, a
function of the user.

Not here: the ways themselves (`dataset`, `generate`, `multi_turn`, `custom`), or a whole rollout by
the user (`function`).
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiohttp.web import RouteDef

from rlpipe.config.arguments.check import size_of
from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.run import RunConfig
from rlpipe.errors import RlpipeError
from rlpipe.model_dir import model_context_len
from rlpipe.rollout.agent.gateway import Gateway
from rlpipe.rollout.agent.openai_api import ChatSessions
from rlpipe.rollout.client.generate_client import GenerateClient
from rlpipe.rollout.generate import (
    FINISHED,
    Decode,
    Generate,
    GroupFailed,
    SingleTurn,
    SupervisedRows,
    sampling_params,
)
from rlpipe.rollout.hooks.checked import Limits
from rlpipe.rollout.hooks.generate_function import (
    CustomGenerate,
    GenerateHook,
    SampleHooks,
    load_generate,
)
from rlpipe.rollout.hooks.own_rewards import score_by_own_functions
from rlpipe.rollout.hooks.rollout_function import FunctionRollout, load_rollout_function
from rlpipe.rollout.multi_turn import MultiTurn, TurnLimits
from rlpipe.rollout.tool_calls import Hermes, Tags
from rlpipe.rollout.tools import Tool, load_tools
from rlpipe.slime.args import slime_args
from rlpipe.store.routed_experts import routed_width
from rlpipe.types import PlannedGroup, Sample, Status

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Ground:
    """What all rollouts of a run stand on. Made once by the generator."""

    config: RunConfig
    tokenizer: PreTrainedTokenizerBase
    model_dir: str
    vocab_size: int
    longest: int
    """Tokens the model can read at most."""
    routed_width: int
    """Numbers per token of the experts that engines route to, where the trainer replays that; 0: it
    does not."""
    tools: dict[str, Tool]
    hook: GenerateHook | None
    eval_hooks: dict[str, GenerateHook]
    """Generate functions of held-out sets, by path."""
    rollout_function: Callable[..., Any] | None
    eval_function: Callable[..., Any] | None
    sample_hooks: SampleHooks

    @classmethod
    def of(
        cls,
        config: RunConfig,
        tokenizer: PreTrainedTokenizerBase,
        model: dict[str, Any],
        model_dir: str,
    ) -> Ground:
        """`model` is the content of config.json. Raises: ConfigError if a function cannot be loaded
        or called as it will be."""
        path = config.rollout.custom_generate_function_path
        whole = config.rollout.rollout_function_path
        held = config.rollout.eval_function_path or whole
        return cls(
            config=config,
            tokenizer=tokenizer,
            model_dir=model_dir,
            vocab_size=model["vocab_size"],
            longest=model_context_len(model) or 2**31,
            routed_width=routed_width(model) if config.train.use_rollout_routing_replay else 0,
            tools=load_tools(config.rollout.tools, timeout_s=config.rollout.tool_timeout_s),
            hook=load_generate(path) if path else None,
            eval_hooks={
                own: load_generate(own, "evaluation.datasets.custom_generate_function_path")
                for dataset in config.evaluation.datasets
                if (own := dataset.custom_generate_function_path)
            },
            rollout_function=load_rollout_function(whole) if whole else None,
            eval_function=load_rollout_function(held, "rollout.eval_function_path")
            if held
            else None,
            sample_hooks=SampleHooks(config.rollout.rollout_sample_hook_path),
        )

    def hook_of(self, occasion: Occasion) -> GenerateHook | None:
        """The generate function of a rollout: of the held-out set if it has its own, else of the
        run."""
        own = (
            self.eval_hooks.get(occasion.rollout.custom_generate_function_path or "")
            if occasion.evaluation
            else None
        )
        return own or self.hook

    def decode(self, ids: Sequence[int]) -> str:
        """Ids as text, special tokens left out: how calls of tools and their answers are read."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def response_text(self, rollout: RolloutConfig) -> Decode:
        """The function from response ids to `sample.response`, by
        `rollout.rollout_skip_special_tokens`."""
        skip = rollout.responses_skip_special_tokens
        return lambda ids: str(self.tokenizer.decode(list(ids), skip_special_tokens=skip))

    def encode(self, text: str) -> list[int]:
        """Text as ids, as it stands."""
        return list(self.tokenizer.encode(text, add_special_tokens=False)) if text else []

    def limits(self, rollout: RolloutConfig) -> Limits:
        """What a row may hold."""
        key = getattr(self.config.reward.function, "reward_key", None)
        of_engines = self.config.engine.sglang.get("context_length")
        bounds = (self.longest, rollout.rollout_max_context_len, of_engines and size_of(of_engines))
        longest = min(bound for bound in bounds if bound)
        return Limits(
            self.vocab_size, longest, key, self.routed_width, self.config.teacher_of_samples
        )

    def routed(self, occasion: Occasion) -> bool:
        """Are engines asked for the experts that they route to? Nothing of an evaluation is
        trained."""
        return bool(self.routed_width) and not occasion.evaluation

    def seeded(self, *, on_gpus: bool) -> bool:
        """Do the engines sample by each request's seed?"""
        given = bool(self.config.engine.sglang.get("enable_deterministic_inference"))
        return given or (self.config.deterministic and on_gpus)

    @property
    def affinity(self) -> bool:
        """Does the router keep requests of one routing key together?"""
        return self.config.engine.router.get("policy") == "consistent_hashing"


@dataclass(frozen=True)
class Occasion:
    """One rollout: how it is sampled, and what for."""

    rollout: RolloutConfig
    iteration: int = 0
    evaluation: bool = False
    temperature: float | None = None
    """None: the rollout's."""
    stop: asyncio.Event | None = None
    """Once it is set, what is aborted stays so."""
    on_gpus: bool = False


@asynccontextmanager
async def sampling(
    ground: Ground, occasion: Occasion, client: GenerateClient | None
) -> AsyncIterator[Generate]:
    """The generate function of one rollout, and what it needs for as long as it runs. Raises:
    RlpipeError without engines."""
    if occasion.rollout.type == "dataset":
        yield SupervisedRows(decode=ground.response_text(occasion.rollout))
        return
    if client is None:
        raise _no_engines()
    async with AsyncExitStack() as stack:
        args: Namespace | None = None
        hook = ground.hook_of(occasion)
        if hook is not None or ground.sample_hooks:
            doors = await stack.enter_async_context(Doors.opened(ground, occasion, client))
            args = arguments(ground, doors.gateway)
        generate: Generate = (
            _turns(ground, occasion, client) if ground.tools else _single(ground, occasion, client)
        )
        if hook is not None:
            assert args is not None
            generate = _custom(ground, hook, occasion, args, doors)
        yield _Hooked(generate, ground, occasion, args) if args is not None else generate


@asynccontextmanager
async def by_function(
    ground: Ground, occasion: Occasion, client: GenerateClient | None
) -> AsyncIterator[FunctionRollout]:
    """A rollout (or an evaluation) by the user's function, and what it may ask meanwhile."""
    rollout = ground.config.rollout
    function = ground.eval_function if occasion.evaluation else ground.rollout_function
    path = (
        rollout.eval_function_path if occasion.evaluation else None
    ) or rollout.rollout_function_path
    assert function is not None and path is not None
    if client is None:
        raise _no_engines()
    async with Doors.opened(ground, occasion, client) as doors:
        args = arguments(ground, doors.gateway)
        limits = ground.limits(occasion.rollout)
        keep = {
            "iteration": occasion.iteration,
            "timeout_s": rollout.timeout_s,
            "reward": ground.config.reward,
        }
        yield FunctionRollout(function, path, args, doors.gateway.journal, limits, **keep)


def _no_engines() -> RlpipeError:
    return RlpipeError(
        "this run has no engines to sample from", where="generator", do="call connect first"
    )


@dataclass(frozen=True)
class Doors:
    """The addresses that functions of one rollout may ask."""

    gateway: Gateway
    sessions: ChatSessions

    @classmethod
    @asynccontextmanager
    async def opened(
        cls, ground: Ground, occasion: Occasion, client: GenerateClient
    ) -> AsyncIterator[Doors]:
        """Open while the block runs."""
        made: list[ChatSessions] = []

        def routes(gateway: Gateway) -> list[RouteDef]:
            params = sampling_params(occasion.rollout, temperature=occasion.temperature)
            options = ground.config.data.apply_chat_template_kwargs
            evaluation = occasion.evaluation
            skip = occasion.rollout.responses_skip_special_tokens
            keep = {
                "model": ground.config.run,
                "evaluation": evaluation,
                "skip_special_tokens": skip,
            }
            made.append(ChatSessions(gateway, params, options, **keep))
            return made[0].routes()

        context_len = ground.limits(occasion.rollout).context_len
        keep = {
            "stop": occasion.stop,
            "affinity": ground.affinity,
            "routed": ground.routed(occasion),
        }
        async with Gateway(
            client, ground.tokenizer, context_len=context_len, routes=routes, **keep
        ) as gateway:
            yield cls(gateway, made[0])


def arguments(ground: Ground, gateway: Gateway) -> Namespace:
    """`args` as functions of the user get it."""
    args = slime_args(ground.config, router=gateway.url)
    args.session_url = f"{gateway.url}/sessions"
    args.hf_checkpoint = ground.model_dir
    args.max_turns = (
        ground.config.rollout.max_turns if not hasattr(args, "max_turns") else args.max_turns
    )
    args.tokenizer = ground.tokenizer
    return args


def _single(ground: Ground, occasion: Occasion, client: GenerateClient) -> SingleTurn:
    rollout = occasion.rollout
    return SingleTurn(
        client,
        sampling_params(rollout, temperature=occasion.temperature),
        decode=ground.response_text(rollout),
        context_len=ground.limits(rollout).context_len,
        seeded=ground.seeded(on_gpus=occasion.on_gpus),
        routed=ground.routed(occasion),
        stop=occasion.stop,
    )


def _turns(ground: Ground, occasion: Occasion, client: GenerateClient) -> MultiTurn:
    rollout = occasion.rollout
    return MultiTurn(
        client,
        sampling_params(rollout, temperature=occasion.temperature),
        ground.tools,
        Tags(ground.tools) if rollout.tool_call_format == "tags" else Hermes(),
        TurnLimits(
            max_turns=rollout.max_turns,
            response_len=rollout.rollout_max_response_len,
            context_len=ground.limits(rollout).context_len,
            turn_len=rollout.max_turn_tokens,
            answer_len=rollout.max_tool_response_len,
        ),
        encode=ground.encode,
        decode=ground.decode,
        response_text=ground.response_text(rollout),
        seeded=ground.seeded(on_gpus=occasion.on_gpus),
        affinity=ground.affinity,
        routed=ground.routed(occasion),
        stop=occasion.stop,
    )


def _custom(
    ground: Ground, hook: GenerateHook, occasion: Occasion, args: Namespace, doors: Doors
) -> CustomGenerate:
    params = sampling_params(occasion.rollout, temperature=occasion.temperature)
    shown = {
        "skip_special_tokens": occasion.rollout.functions_skip_special_tokens,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
        "stop": list(occasion.rollout.rollout_stop) or None,
    }
    return CustomGenerate(
        hook,
        args,
        {**params, **shown},
        journal=doors.gateway.journal,
        sessions=doors.sessions,
        limits=ground.limits(occasion.rollout),
        evaluation=occasion.evaluation,
        seeded=ground.seeded(on_gpus=occasion.on_gpus),
        stop=occasion.stop,
    )


class _Hooked:
    """A generate function of a run that has functions of the user.

    Finished samples pass the sample hooks, then those that name a reward function of their own are
    scored by it. What one of these raises makes its sample a failed row.
    """

    def __init__(
        self, generate: Generate, ground: Ground, occasion: Occasion, args: Namespace
    ) -> None:
        self.generate = generate
        self.ground = ground
        self.occasion = occasion
        self.args = args
        self.limits = ground.limits(occasion.rollout)

    async def __call__(self, group: PlannedGroup, so_far: Sequence[Sample] = ()) -> list[Sample]:
        seen = {sample.index for sample in so_far if sample.status in FINISHED}
        rows = [
            await self._hooked(row) if row.index not in seen else row
            for row in await self.generate(group, so_far)
        ]
        await score_by_own_functions(
            rows, self.ground.config.reward, slime_args(self.ground.config)
        )
        if failed := next((row for row in rows if row.error is not None), None):
            raise GroupFailed(
                "a function of a sample failed",
                rows,
                where=f"group {group.group_id}",
                found=failed.error,
            )
        return rows

    async def _hooked(self, row: Sample) -> Sample:
        if row.status not in FINISHED:
            return row
        occasion = self.occasion
        hooks = self.ground.sample_hooks
        try:
            return await hooks.apply(
                self.args,
                row,
                self.limits,
                rollout_id=occasion.iteration,
                evaluation=occasion.evaluation,
            )
        except RlpipeError as error:
            row.status, row.error = Status.FAILED, str(error)
            return row
