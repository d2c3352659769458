"""Build the generate function of a run.

A run samples in one turn, in turns with tools, in an environment, with a user function, or takes
given responses.

Entry points: `RolloutResources.load` once per run; then per rollout `open_generate_function`, or
`open_rollout_function` where a user function replaces the whole rollout.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiohttp.web import RouteDef

from rlpipe.config.arguments.check import size_of
from rlpipe.config.hooks import rollout_id
from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.run import RunConfig
from rlpipe.errors import RlpipeError
from rlpipe.model_dir import model_context_len
from rlpipe.rollout.agent.chat_sessions import ChatSessions
from rlpipe.rollout.agent.gateway import Gateway, GatewayPorts
from rlpipe.rollout.agent.replies import ReplyFormat
from rlpipe.rollout.agent.routes import agent_routes
from rlpipe.rollout.client.generate_client import GenerateClient
from rlpipe.rollout.client.image_requests import ImageRequests
from rlpipe.rollout.environments.loaded import Environment, load_environment
from rlpipe.rollout.generate import (
    FINISHED,
    Decode,
    Generate,
    GroupFailed,
    SingleTurn,
    SupervisedRows,
    sampling_params,
)
from rlpipe.rollout.hooks.generate_function import (
    GenerateHook,
    SampleHooks,
    UserGenerate,
    load_generate,
)
from rlpipe.rollout.hooks.rollout_function import RolloutFunction, load_rollout_function
from rlpipe.rollout.hooks.sample_checks import Limits
from rlpipe.rollout.hooks.sample_rewards import score_with_sample_functions
from rlpipe.rollout.multi_turn import MultiTurn, TurnLimits
from rlpipe.rollout.tool_calls import Hermes, Tags
from rlpipe.rollout.tools import Tool, load_tools
from rlpipe.slime.args import slime_args
from rlpipe.store.routed_experts import routed_width
from rlpipe.system.model_files import text_model
from rlpipe.types import PlannedGroup, Sample, Status

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Limit for a model whose config.json names no context length.
_UNLIMITED_TOKENS = 2**31


@dataclass(frozen=True)
class RolloutResources:
    """Objects that all rollouts of a run share. The generator loads them once."""

    config: RunConfig
    tokenizer: PreTrainedTokenizerBase
    model_dir: str
    vocab_size: int
    model_context_len: int
    """Context length of the model in tokens."""
    routed_width: int
    """Numbers per token of the routed experts that the trainer replays. 0: it replays none."""
    tools: dict[str, Tool]
    environment: Environment | None
    """`rollout.environment`."""
    generate_hook: GenerateHook | None
    eval_generate_hooks: dict[str, GenerateHook]
    """Generate functions of held-out sets, by path."""
    rollout_function: Callable[..., Any] | None
    eval_function: Callable[..., Any] | None
    sample_hooks: SampleHooks
    images: ImageRequests | None = None
    """Reads the images of prompts. None: a model of text."""
    reply_format: ReplyFormat | None = None
    """Format of tool calls and reasoning in an agent's conversations. None: no calls are read."""
    gateway_ports: GatewayPorts = field(default_factory=GatewayPorts)
    function_metadata: dict[str, Any] = field(default_factory=dict)
    """Values that a rollout function keeps in its data source."""

    async def close(self) -> None:
        """End what the environment has started. The resources are not used afterwards."""
        if self.environment is not None:
            await self.environment.close()

    @classmethod
    def load(
        cls,
        config: RunConfig,
        tokenizer: PreTrainedTokenizerBase,
        model: dict[str, Any],
        model_dir: str,
        reply_format: ReplyFormat | None = None,
        images: ImageRequests | None = None,
    ) -> RolloutResources:
        """Load the tools and user functions of a run. `model` is the content of config.json.

        Raises: ConfigError if a function cannot be loaded or has another signature.
        """
        rollout = config.rollout
        generate_path = rollout.custom_generate_function_path
        rollout_path = rollout.rollout_function_path
        eval_path = rollout.eval_function_path or rollout_path
        eval_generate_paths = dict.fromkeys(
            dataset.custom_generate_function_path for dataset in config.evaluation.datasets
        )
        eval_generate_key = "evaluation.datasets.custom_generate_function_path"
        return cls(
            config=config,
            tokenizer=tokenizer,
            model_dir=model_dir,
            vocab_size=text_model(model)["vocab_size"],
            model_context_len=model_context_len(model) or _UNLIMITED_TOKENS,
            routed_width=routed_width(model) if config.train.use_rollout_routing_replay else 0,
            tools=load_tools(rollout.tools, timeout_s=rollout.tool_timeout_s),
            environment=load_environment(rollout.environment) if rollout.environment else None,
            generate_hook=load_generate(generate_path) if generate_path else None,
            eval_generate_hooks={
                path: load_generate(path, eval_generate_key) for path in eval_generate_paths if path
            },
            rollout_function=load_rollout_function(rollout_path) if rollout_path else None,
            eval_function=load_rollout_function(eval_path, "rollout.eval_function_path")
            if eval_path
            else None,
            sample_hooks=SampleHooks(rollout.rollout_sample_hook_path),
            reply_format=reply_format,
            images=images,
        )

    def generate_hook_for(self, context: RolloutContext) -> GenerateHook | None:
        """Return the generate function of a rollout: the held-out set's, else the run's."""
        path = context.rollout.custom_generate_function_path or ""
        eval_hook = self.eval_generate_hooks.get(path) if context.evaluation else None
        return eval_hook or self.generate_hook

    def decode(self, ids: Sequence[int]) -> str:
        """Return ids as text without special tokens. Calls of tools are read from this text."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def response_text(self, rollout: RolloutConfig) -> Decode:
        """Return the function from response ids to `sample.response`; special tokens as in
        `rollout.rollout_skip_special_tokens`."""
        skip = rollout.responses_skip_special_tokens
        return lambda ids: str(self.tokenizer.decode(list(ids), skip_special_tokens=skip))

    def encode(self, text: str) -> list[int]:
        """Return text as ids, without a chat template."""
        return list(self.tokenizer.encode(text, add_special_tokens=False)) if text else []

    def limits(self, context: RolloutContext) -> Limits:
        """Return the limits that a row must respect."""
        engine_context = self.config.engine.sglang.get("context_length")
        bounds = (
            self.model_context_len,
            context.rollout.rollout_max_context_len,
            engine_context and size_of(engine_context),
        )
        return Limits(
            vocab_size=self.vocab_size,
            context_len=min(bound for bound in bounds if bound),
            reward_key=getattr(self.config.reward.function, "reward_key", None),
            routed_width=self.routed_width,
            teacher=self.config.teacher_of_samples,
            trained=not context.evaluation,
        )

    def wants_routed_experts(self, context: RolloutContext) -> bool:
        """True if requests ask for routed experts. Evaluations are not trained and need none."""
        return bool(self.routed_width) and not context.evaluation

    def seeded(self, *, on_gpus: bool) -> bool:
        """True if the engines sample with each request's seed."""
        deterministic = bool(self.config.engine.sglang.get("enable_deterministic_inference"))
        return deterministic or (self.config.deterministic and on_gpus)

    @property
    def affinity(self) -> bool:
        """True if the router sends requests of one routing key to one engine."""
        return self.config.engine.router.get("policy") == "consistent_hashing"


@dataclass(frozen=True)
class RolloutContext:
    """Settings of one rollout or evaluation."""

    rollout: RolloutConfig
    iteration: int = 0
    evaluation: bool = False
    temperature: float | None = None
    """None: the temperature of `rollout`."""
    stop: asyncio.Event | None = None
    """Once set, aborted responses are not continued."""
    on_gpus: bool = False

    def sampling_params(self) -> dict[str, Any]:
        """Return SGLang's sampling parameters."""
        return sampling_params(self.rollout, temperature=self.temperature)


@asynccontextmanager
async def open_generate_function(
    resources: RolloutResources, context: RolloutContext, client: GenerateClient | None
) -> AsyncIterator[Generate]:
    """Yield the generate function of one rollout; its servers run until the block ends.

    Raises: RlpipeError without a client, except for supervised rows.
    """
    if context.rollout.type == "dataset":
        yield SupervisedRows(decode=resources.response_text(context.rollout))
        return
    if client is None:
        raise _no_engines()
    hook = resources.generate_hook_for(context)
    generate: Generate
    if resources.tools:
        generate = _multi_turn(resources, context, client)
    else:
        generate = _single_turn(resources, context, client)
    if hook is None and resources.environment is None and not resources.sample_hooks:
        yield generate
        return
    async with UserEndpoints.open(resources, context, client) as endpoints:
        args = hook_args(resources, endpoints.gateway, context)
        continues = True
        if hook is None and resources.environment is not None:
            hook = resources.environment.hook(
                resources.config,
                context.rollout,
                endpoints.sessions,
                context_len=resources.limits(context).context_len,
            )
            continues = False
        if hook is not None:
            generate = _user_generate(
                resources, hook, context, args, endpoints, continues=continues
            )
        yield _WithSampleHooks(generate, resources, context, args)


@asynccontextmanager
async def open_rollout_function(
    resources: RolloutResources, context: RolloutContext, client: GenerateClient | None
) -> AsyncIterator[RolloutFunction]:
    """Yield the user function that replaces a rollout or evaluation; its servers run until the
    block ends. Raises: RlpipeError without a client."""
    rollout = resources.config.rollout
    function = resources.rollout_function
    path = rollout.rollout_function_path
    if context.evaluation:
        function = resources.eval_function
        path = rollout.eval_function_path or path
    assert function is not None and path is not None
    if client is None:
        raise _no_engines()
    async with UserEndpoints.open(resources, context, client) as endpoints:
        yield RolloutFunction(
            function,
            path,
            hook_args(resources, endpoints.gateway, context),
            endpoints.gateway.journal,
            resources.limits(context),
            iteration=context.iteration,
            timeout_s=rollout.timeout_s,
            reward=resources.config.reward,
            metadata=resources.function_metadata,
        )


def _no_engines() -> RlpipeError:
    return RlpipeError(
        "this run has no engines to sample from", where="generator", do="call connect first"
    )


@dataclass(frozen=True)
class UserEndpoints:
    """HTTP servers that the user functions of one rollout call."""

    gateway: Gateway
    sessions: ChatSessions

    @classmethod
    @asynccontextmanager
    async def open(
        cls, resources: RolloutResources, context: RolloutContext, client: GenerateClient
    ) -> AsyncIterator[UserEndpoints]:
        """Start the servers; stop them when the block ends."""
        opened: list[ChatSessions] = []

        # The gateway needs the session routes before it starts, and sessions need the gateway.
        def session_routes(gateway: Gateway) -> list[RouteDef]:
            sessions = ChatSessions(
                gateway,
                context.sampling_params(),
                resources.config.data.apply_chat_template_kwargs,
                model=resources.config.run,
                evaluation=context.evaluation,
                reply_format=resources.reply_format,
                skip_special_tokens=context.rollout.responses_skip_special_tokens,
            )
            opened.append(sessions)
            return agent_routes(sessions)

        with resources.gateway_ports.listener() as listener:
            async with Gateway(
                client,
                resources.tokenizer,
                context_len=resources.limits(context).context_len,
                stop=context.stop,
                affinity=resources.affinity,
                routed=resources.wants_routed_experts(context),
                routes=session_routes,
                listener=listener,
            ) as gateway:
                yield cls(gateway, opened[0])


def hook_args(resources: RolloutResources, gateway: Gateway, context: RolloutContext) -> Namespace:
    """Return `args` of user functions: slime's names, and the addresses of this rollout.

    In an evaluation the attributes of held-out sets are those of the set that is sampled.
    """
    args = slime_args(resources.config, router=gateway.url)
    if context.evaluation:
        vars(args).update(_of_held_out_set(context))
    args.session_url = f"{gateway.url}/sessions"
    args.hf_checkpoint = resources.model_dir
    # `rollout.custom_config` may set another value for the function.
    if not hasattr(args, "max_turns"):
        args.max_turns = resources.config.rollout.max_turns
    args.tokenizer = resources.tokenizer
    return args


def _of_held_out_set(context: RolloutContext) -> dict[str, Any]:
    """Return slime's attributes of the set that an evaluation samples."""
    own = context.rollout
    temperature = context.temperature
    return {
        "eval_temperature": own.rollout_temperature if temperature is None else temperature,
        "eval_top_p": own.rollout_top_p,
        "eval_top_k": own.rollout_top_k,
        "eval_max_response_len": own.rollout_max_response_len,
        "eval_max_context_len": own.rollout_max_context_len,
        "eval_min_new_tokens": own.rollout_min_new_tokens,
        "n_samples_per_eval_prompt": own.n_samples_per_prompt,
        "rollout_stop": list(own.rollout_stop) or None,
        "rollout_stop_token_ids": list(own.rollout_stop_token_ids) or None,
        "rollout_skip_special_tokens": own.functions_skip_special_tokens,
    }


def _single_turn(
    resources: RolloutResources, context: RolloutContext, client: GenerateClient
) -> SingleTurn:
    return SingleTurn(
        client,
        context.sampling_params(),
        decode=resources.response_text(context.rollout),
        context_len=resources.limits(context).context_len,
        seeded=resources.seeded(on_gpus=context.on_gpus),
        routed=resources.wants_routed_experts(context),
        stop=context.stop,
        images=resources.images,
    )


def _multi_turn(
    resources: RolloutResources, context: RolloutContext, client: GenerateClient
) -> MultiTurn:
    rollout = context.rollout
    return MultiTurn(
        client,
        context.sampling_params(),
        resources.tools,
        Tags(resources.tools) if rollout.tool_call_format == "tags" else Hermes(),
        TurnLimits(
            max_turns=rollout.max_turns,
            response_len=rollout.rollout_max_response_len,
            context_len=resources.limits(context).context_len,
            turn_len=rollout.max_turn_tokens,
            tool_response_len=rollout.max_tool_response_len,
        ),
        encode=resources.encode,
        decode=resources.decode,
        response_text=resources.response_text(rollout),
        seeded=resources.seeded(on_gpus=context.on_gpus),
        affinity=resources.affinity,
        routed=resources.wants_routed_experts(context),
        stop=context.stop,
    )


def _user_generate(
    resources: RolloutResources,
    hook: GenerateHook,
    context: RolloutContext,
    args: Namespace,
    endpoints: UserEndpoints,
    *,
    continues: bool,
) -> UserGenerate:
    # The parameters have slime's values for text, because the function may tokenize it again.
    params = {
        **context.sampling_params(),
        "skip_special_tokens": context.rollout.functions_skip_special_tokens,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
        "stop": list(context.rollout.rollout_stop) or None,
    }
    return UserGenerate(
        hook,
        args,
        params,
        journal=endpoints.gateway.journal,
        sessions=endpoints.sessions,
        limits=resources.limits(context),
        evaluation=context.evaluation,
        seeded=resources.seeded(on_gpus=context.on_gpus),
        continues=continues,
        stop=context.stop,
    )


class _WithSampleHooks:
    """Apply the sample hooks to the finished samples of a generate function.

    Then score the samples that name a reward function (`custom_rm_path`). An exception of either
    makes the sample a failed row.
    """

    def __init__(
        self,
        generate: Generate,
        resources: RolloutResources,
        context: RolloutContext,
        args: Namespace,
    ) -> None:
        self.generate = generate
        self.resources = resources
        self.context = context
        self.args = args
        self.limits = resources.limits(context)

    async def __call__(self, group: PlannedGroup, so_far: Sequence[Sample] = ()) -> list[Sample]:
        # Samples that an earlier rollout finished have passed the hooks there.
        hooked = {sample.index for sample in so_far if sample.status in FINISHED}
        rows = [
            row if row.index in hooked or row.status not in FINISHED else await self._hooked(row)
            for row in await self.generate(group, so_far)
        ]
        config = self.resources.config
        await score_with_sample_functions(rows, config.reward, slime_args(config))
        failed = next((row for row in rows if row.error is not None), None)
        if failed is not None:
            raise GroupFailed(
                "a function of a sample failed",
                rows,
                where=f"group {group.group_id}",
                found=failed.error,
            )
        return rows

    async def _hooked(self, row: Sample) -> Sample:
        try:
            return await self.resources.sample_hooks.apply(
                self.args,
                row,
                self.limits,
                rollout_id=rollout_id(self.args, self.context.iteration),
                evaluation=self.context.evaluation,
            )
        except RlpipeError as error:
            row.status = Status.FAILED
            row.error = str(error)
            return row
