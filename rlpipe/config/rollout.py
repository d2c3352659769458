"""Sampling of responses: lengths, sampling parameters, tools, user functions, choice of groups."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from rlpipe.config.base import MOST_ROWS, MOST_TOKENS, Config, Tuning
from rlpipe.errors import ConfigError


def _top_k(value: int) -> int:
    if value != -1 and value < 1:
        raise ConfigError(
            "not a valid value", found=value, expected="a number of tokens, or -1 for all of them"
        )
    return value


TopK = Annotated[int, AfterValidator(_top_k)]
"""Number of the most likely tokens; -1: all tokens."""
TokenId = Annotated[int, Field(ge=0, le=MOST_TOKENS)]
"""Id of a token. `rlpipe.model_dir.check_stop_ids` compares it with the model's vocabulary."""

_SLIME_FILTER = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
_FILTER = "rlpipe.rollout.filters.reward_nonzero_std"
SLIME_FILTERS = {
    _SLIME_FILTER: _FILTER,
    f"{_SLIME_FILTER}_with_fallback": f"{_FILTER}_with_fallback",
}
"""Dotted path of a slime filter → rlpipe's filter with the same result. slime need not be
installed."""


class ToolConfig(Config):
    """One tool of the policy."""

    path: str
    """Function of the tool, plain or async; or a class that is created once with `arguments` and
    then called. Built in: `rlpipe.rollout.tools.calculator`, `rlpipe.rollout.sandbox.Python`,
    `rlpipe.rollout.tools.python` without a sandbox, `rlpipe.rollout.retrieval.Retrieval`."""
    name: str | None = None
    """Name of the tool in the policy's calls; None: the function's own name."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class, or of each call of the function."""


class GymEnvironment(Config):
    """An environment with `reset` and `step`, as in Gymnasium, whose observations and actions are
    texts. `rlpipe.rollout.environments.gym` describes its methods."""

    type: Literal["gym"]
    path: str
    """Class or function that makes one environment for each rollout: `path/to/file.py:make` or
    `package.module.make`. A method may be plain, which runs in a thread, or async."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class or function."""
    call_timeout_s: float = Tuning(default=60.0, gt=0)
    """Deadline of one call of the environment. After a missed deadline the rollout fails."""


class VerifiersEnvironment(Config):
    """An environment of the package `verifiers`, as it is. It runs in a Python interpreter of its
    own, because verifiers 0.4.0 and SGLang need different versions of `openai`. Its agents use the
    session of the rollout as their model. See `rlpipe.rollout.environments.verifiers`."""

    type: Literal["verifiers"]
    id: str
    """Id of the taskset, as in `vf-eval ID`. Its package is installed in `python`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Other keys of verifiers' section `env`, such as `agent: {runtime: {type: subprocess}}`."""
    python: str = Tuning(...)
    """Python interpreter that has the package `verifiers`: `venv/bin/python`."""
    max_concurrent: int = Tuning(default=64, ge=1)
    """Episodes at once; the others wait."""
    start_timeout_s: float = Tuning(default=120.0, gt=0)
    """Deadline of the import of verifiers and the environment."""


EnvironmentConfig = Annotated[GymEnvironment | VerifiersEnvironment, Field(discriminator="type")]


class RolloutConfig(Config):
    """Number of responses and their sampling. `type: dataset` uses the rows' own answers
    (supervised)."""

    type: Literal["sample", "dataset"] = "sample"
    """`sample`: engines sample responses. `dataset`: the labels of the rows are the responses."""
    rollout_batch_size: int = Field(ge=1, le=MOST_ROWS)
    """Prompts (groups) per iteration."""
    n_samples_per_prompt: int = Field(default=1, ge=1, le=MOST_ROWS)
    """Responses per prompt. Estimators that compare the responses of a prompt (grpo, gspo, cispo,
    rloo, reinforce_plus_plus_baseline) refuse 1."""
    rollout_max_response_len: int = Field(default=1024, ge=1, le=MOST_TOKENS)
    """Longest response in tokens."""
    rollout_max_context_len: int | None = Field(default=None, ge=1, le=MOST_TOKENS)
    """Longest prompt + response in tokens; None: the model's own limit. More than the model's
    max_position_embeddings is an error, because it would have no effect."""
    rollout_temperature: float = Field(default=1.0, ge=1e-3, le=100)
    """Sampling temperature; training divides its logits by the same number. Below 0.001 the
    quotients overflow and engines sample greedily. Above 100 all tokens are about equally
    likely."""
    rollout_top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling threshold. Below 1 the engine samples from fewer tokens than training
    assumes, because all log-probs, also the engine's, are those of the full distribution. Keep 1 to
    train on the distribution that was sampled."""
    rollout_top_k: TopK = -1
    """Sample among the k most likely tokens; -1: all tokens. The remark on rollout_top_p applies
    too."""
    rollout_stop: tuple[str, ...] = ()
    """Texts that end a response. The response contains the text and the whole token that completes
    it."""
    rollout_stop_token_ids: tuple[TokenId, ...] = ()
    """Token ids that end a response, in addition to the model's end-of-sequence token."""
    rollout_skip_special_tokens: bool | None = None
    """Leave special tokens, such as the end-of-sequence token, out of `sample.response`, the text
    that rewards, filters and hooks read. The response's token ids always contain them. False keeps
    them in the text, which is slime's default.

    User functions that sample get the value as `skip_special_tokens` of their sampling parameters.
    None: like True, but these functions get False, because text with its special tokens can be
    tokenized again."""
    rollout_min_new_tokens: int = Field(default=0, ge=0)
    """Least number of tokens of a response; 0: no minimum. Until then the engine sets the
    probability of the end to 0. Training does not know that; the metric
    `train/train_rollout_logprob_abs_diff` shows the difference."""
    custom_generate_function_path: str | None = None
    """User function that samples: `async generate(args, sample, sampling_params) -> Sample |
    list[Sample]` for one rollout, or `async generate(args, samples) -> list[Sample]` for a group.
    Both may have a parameter `evaluation`. None: the built-in sampling. See
    `rlpipe.rollout.hooks.generate_function`."""
    custom_config: dict[str, Any] = Field(default_factory=dict)
    """Additional attributes of `args` for user functions."""
    rollout_sample_hook_path: tuple[str, ...] = ()
    """User functions `hook(args, sample, *, rollout_id, evaluation) -> Sample | None`, called in
    this order on each finished sample before it is stored as a row."""
    tools: tuple[ToolConfig, ...] = ()
    """Tools of the policy. If not empty, responses have several turns with the tools' answers
    between them. See `rlpipe.rollout.multi_turn`."""
    environment: EnvironmentConfig | None = None
    """Environment that the policy acts in: each reply is an action, the observations follow as
    tokens with loss mask 0, and `reward.function.type: environment` is the sum of its rewards.
    None: no environment."""
    tool_call_format: Literal["tags", "hermes"] = "tags"
    """`tags`: `<name>argument</name>`, answered by `<result>...</result>`. `hermes`: JSON in
    `<tool_call>` tags, answered in the format of Qwen's chat template."""
    max_turns: int = Field(default=5, ge=1, le=MOST_ROWS)
    """Turns of the policy in one rollout with tools or an environment. User functions read it as
    `args.max_turns`."""
    max_turn_tokens: int | None = Field(default=None, ge=1)
    """Longest single turn in tokens; None: the rest of rollout_max_response_len, which counts the
    answers of tools and the observations too."""
    tool_timeout_s: float = Field(default=10.0, gt=0)
    """Deadline of one tool call. After a missed deadline the tool's answer says so."""
    max_tool_response_len: int = Field(default=512, ge=1)
    """Longest answer of a tool in tokens; the rest is cut off."""
    loss_mask_type: Literal["last", "all_assistant"] = "last"
    """Supervised rows in chat form: train on the last answer, or on every assistant message."""
    selection: Literal["planned", "first_finished"] = "planned"
    """`planned`: an iteration samples the groups of its plan. `first_finished`: groups are sampled
    across iterations. The batch is the first rollout_batch_size accepted groups, and the other
    groups continue during the next iteration. Needs async_buffer_size above 0. Which groups form a
    batch depends on timing; the node of the rollout records them."""
    pool_size: int | None = Field(default=None, ge=1, le=MOST_ROWS)
    """Groups in flight with `selection: first_finished`. More groups in flight keep engines busy,
    but more of them finish too late for async_buffer_size and are dropped. None: 3/8 of
    async_buffer_size × rollout_batch_size."""
    over_sampling_batch_size: int | None = Field(default=None, ge=1, le=MOST_ROWS)
    """Prompts requested per sampling round. The first rollout_batch_size accepted groups are the
    batch, the others wait in the buffer. None: rollout_batch_size."""
    dynamic_sampling_filter_path: str | None = None
    """User function of a finished, scored group: `keep(samples) -> bool` (or `(keep, reason)`, or
    slime's form with `args`). A rejected group is dropped with its reason, and a new prompt is
    drawn. Built in: `rlpipe.rollout.filters.reward_nonzero_std`, and
    `reward_nonzero_std_with_fallback`, which fills the batch with rejected groups instead of
    another sampling round. slime's paths of these two work too. None: accept all groups."""
    rollout_sample_filter_path: str | None = None
    """User function `filter(args, groups) -> None` of the batch's scored groups. A sample with
    `remove_sample` set gets loss mask 0; its reward still counts in its group. None: no filter."""
    rollout_all_samples_process_path: str | None = None
    """User function `process(args, all_groups, data_source) -> None`, called once at the end of a
    rollout with all scored groups, dropped ones included. `data_source` is the object of
    data_source_path, else None. None: no function."""
    rollout_function_path: str | None = None
    """User function for whole rollouts: `generate_rollout(args, rollout_id, data_source,
    evaluation=False)`. None: the built-in rollout. See `rlpipe.rollout.hooks.rollout_function`."""
    eval_function_path: str | None = None
    """The same for evaluations; None: rollout_function_path."""
    data_source_path: str | None = None
    """User class `source(args)` with `get_samples(n)` and `add_samples(groups)`. None:
    `data.prompts`. See `rlpipe.data.user_source`."""
    buffer_filter_path: str | None = None
    """User function `filter(args, rollout_id, buffer, num_samples) -> groups` (or without
    rollout_id) that takes groups out of the buffer. Groups that it removes and does not return are
    dropped. None: the oldest groups first."""
    partial_rollout: bool = False
    """Continue a group that the full batch cut off, from its tokens in a later iteration. False:
    sample the group again from the start. With `selection: first_finished` a full batch cuts off
    no group, and the key has no effect."""
    mask_offpolicy_in_partial_rollout: bool = False
    """Keep tokens older than async_buffer_size, with loss mask 0. False: sample their group again
    from the start, or with `selection: first_finished` drop the group (`stale`)."""
    max_sampling_rounds: int = Tuning(default=20, ge=1)
    """The stage fails if this number of sampling rounds gave too few accepted groups."""
    flush_interval_s: float = Tuning(default=5.0, gt=0)
    """Longest time until a finished group is written to the store."""
    timeout_s: float = Tuning(default=3600.0, gt=0)
    """Deadline of the whole stage."""
    min_completed_fraction: float = Field(default=1.0, gt=0, le=1)
    """The stage fails if a smaller fraction of its groups completed."""

    @field_validator("dynamic_sampling_filter_path", mode="before")
    @classmethod
    def _replace_slime_filter(cls, value: Any) -> Any:
        return SLIME_FILTERS.get(value, value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _only_one_sampling_method(self):
        methods = {
            "rollout_function_path": self.rollout_function_path,
            "custom_generate_function_path": self.custom_generate_function_path,
            "tools": self.tools,
            "environment": self.environment,
        }
        given = [name for name, value in methods.items() if value]
        if len(given) > 1 and given != ["rollout_function_path", "custom_generate_function_path"]:
            raise ValueError(
                f"rollout.{given[0]} and rollout.{given[1]} are two sampling methods; remove one "
                "of them"
            )
        function = "rollout_function_path" if self.rollout_function_path else "environment"
        if self.type == "dataset" and getattr(self, function):
            raise ValueError(f"rollout.type: dataset samples nothing; remove rollout.{function}")
        return self

    @property
    def samples_by_user_function(self) -> bool:
        """True if a function or environment of the user determines the requests to the engines."""
        functions = (self.custom_generate_function_path, self.rollout_function_path)
        return self.environment is not None or any(functions)

    @property
    def hook_paths(self) -> tuple[str, ...]:
        """Paths of all user functions that can change a rollout."""
        functions = (
            self.custom_generate_function_path,
            self.rollout_function_path,
            self.rollout_sample_filter_path,
            self.rollout_all_samples_process_path,
            self.dynamic_sampling_filter_path,
            self.buffer_filter_path,
            self.data_source_path,
        )
        return self._with_sample_hooks_and_tools(functions)

    @property
    def evaluation_hook_paths(self) -> tuple[str, ...]:
        """Paths of all user functions that can change an evaluation."""
        whole = self.eval_function_path or self.rollout_function_path
        return self._with_sample_hooks_and_tools((self.custom_generate_function_path, whole))

    def _with_sample_hooks_and_tools(self, functions: tuple[str | None, ...]) -> tuple[str, ...]:
        paths = [path for path in functions if path]
        if isinstance(self.environment, GymEnvironment):
            paths.append(self.environment.path)
        paths += [*self.rollout_sample_hook_path, *(tool.path for tool in self.tools)]
        return tuple(dict.fromkeys(paths))

    @property
    def needs_text(self) -> bool:
        """True if the engines need the tokenizer.

        Stop texts and minimum lengths need it, and user functions may ask for both.
        """
        sources = (
            self.custom_generate_function_path,
            self.rollout_function_path,
            self.eval_function_path,
            self.environment,
            self.tools,
        )
        return bool(self.rollout_stop or self.rollout_min_new_tokens or any(sources))

    @property
    def responses_skip_special_tokens(self) -> bool:
        """True if the text of a response leaves out special tokens."""
        return self.rollout_skip_special_tokens is not False

    @property
    def functions_skip_special_tokens(self) -> bool:
        """`skip_special_tokens` of the sampling parameters of user functions."""
        return self.rollout_skip_special_tokens is True

    @property
    def scores_while_sampling(self) -> bool:
        """True if a finished group needs its reward while the rollout still runs."""
        hooks = (
            self.dynamic_sampling_filter_path,
            self.rollout_sample_filter_path,
            self.rollout_all_samples_process_path,
        )
        return any(hooks)

    @property
    def groups_per_round(self) -> int:
        """Prompts requested per sampling round."""
        return max(self.rollout_batch_size, self.over_sampling_batch_size or 0)

    @property
    def pooled(self) -> bool:
        """True if groups are sampled across iterations."""
        return self.selection == "first_finished"

    def groups_in_pool(self, async_buffer_size: int) -> int:
        """Return the groups in flight with `selection: first_finished`.

        In a simulation of reasoning lengths (tools/bench/README.md), 3/8 of a batch for each
        iteration of async_buffer_size left at most 1 % of the tokens too old, for 2 and more. 1/2
        left 8 %.
        """
        return self.pool_size or math.ceil(3 * async_buffer_size * self.rollout_batch_size / 8)

    @property
    def static(self) -> bool:
        """True if the groups of a batch are known before sampling.

        The next rollout can then be planned at once.
        """
        choosing = (self.dynamic_sampling_filter_path, self.rollout_function_path, self.pooled)
        return self.groups_per_round == self.rollout_batch_size and not any(choosing)
