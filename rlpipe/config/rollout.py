"""How responses are sampled: lengths, sampling, tools, functions of yours, which groups make a
batch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from rlpipe.config.base import MOST_ROWS, MOST_TOKENS, Config, Tuning


def _top_k(value: int) -> int:
    if value != -1 and value < 1:
        raise ValueError(f"a number of tokens, or -1 for all of them; found {value}")
    return value


TopK = Annotated[int, AfterValidator(_top_k)]
"""How many of the likeliest tokens; -1 is all."""
TokenId = Annotated[int, Field(ge=0, le=MOST_TOKENS)]
"""Number of a token of the model's vocabulary. Whether it is one is known with the model
(`rlpipe.model_dir.check_stop_ids`)."""

_THEIRS = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
_OURS = "rlpipe.rollout.filters.reward_nonzero_std"
SLIMES_FILTERS = {_THEIRS: _OURS, f"{_THEIRS}_with_fallback": f"{_OURS}_with_fallback"}
"""slime's own filters by their dotted paths → ours, which compute the same. slime need not be
installed."""


class ToolConfig(Config):
    """One tool of the policy."""

    path: str
    """Function of the tool, plain or async, or a class that is made once with `arguments` and
    called then. Built in: `rlpipe.rollout.tools.calculator`, `rlpipe.rollout.tools.python`,
    `rlpipe.rollout.retrieval.Retrieval`."""
    name: str | None = None
    """What the policy calls it; None: the function's own name."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments that are yours to set: of the class, or of each call of the function."""


class RolloutConfig(Config):
    """How many responses, and how they are sampled. `type: dataset` takes the rows' own answers
    (supervised)."""

    type: Literal["sample", "dataset"] = "sample"
    """`sample`: engines sample responses. `dataset`: the labels of the rows are the responses."""
    rollout_batch_size: int = Field(ge=1, le=MOST_ROWS)
    """Prompts (groups) per iteration."""
    n_samples_per_prompt: int = Field(default=1, ge=1, le=MOST_ROWS)
    """Responses per prompt. Estimators that compare them with each other (grpo, gspo, cispo, rloo,
    reinforce_plus_plus_baseline) refuse 1."""
    rollout_max_response_len: int = Field(default=1024, ge=1, le=MOST_TOKENS)
    """Longest response in tokens."""
    rollout_max_context_len: int | None = Field(default=None, ge=1, le=MOST_TOKENS)
    """Longest prompt + response in tokens; None is the model's own limit. More than the model's
    max_position_embeddings is an error, because it would have no effect."""
    rollout_temperature: float = Field(default=1.0, ge=1e-3, le=100)
    """Sampling temperature; training divides its logits by the same number. Below 0.001 the
    quotients overflow and engines sample greedily; above 100 every token is as likely as any
    other."""
    rollout_top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling threshold. Below 1 the engine samples from fewer tokens than training
    reckons with: log-probs, of the engine too, are those of the whole distribution. Keep 1 to train
    on the distribution that was sampled."""
    rollout_top_k: TopK = -1
    """Sample among the k likeliest tokens; -1 is all. The same holds as for rollout_top_p."""
    rollout_stop: tuple[str, ...] = ()
    """Texts that end a response; they stay in it, with the whole token that completed them."""
    rollout_stop_token_ids: tuple[TokenId, ...] = ()
    """Token ids that end a response, beside the model's end-of-sequence token."""
    rollout_skip_special_tokens: bool | None = None
    """Leave special tokens, such as the end-of-sequence token, out of `sample.response`, the text
    that rewards, filters and hooks read. The response's tokens always have them. False keeps them,
    which is slime's default.

    True and False also go to functions of yours that sample, as `skip_special_tokens` of their
    sampling parameters. None: as True, but those functions are given False, because text with its
    special tokens can be tokenized again."""
    rollout_min_new_tokens: int = Field(default=0, ge=0)
    """A response cannot end before so many tokens. The engine takes the probability of ending away
    until then, which training does not know of: `train/...logprob_abs_diff` shows it."""
    custom_generate_function_path: str | None = None
    """Your own way to sample: `async generate(args, sample, sampling_params) -> Sample |
    list[Sample]` for one rollout, or `async generate(args, samples) -> list[Sample]` for a group;
    either may take `evaluation`. See `rlpipe.rollout.hooks.generate_function`."""
    custom_config: dict[str, Any] = Field(default_factory=dict)
    """Attributes of `args` for functions of yours."""
    rollout_sample_hook_path: tuple[str, ...] = ()
    """Functions `hook(args, sample, *, rollout_id, evaluation) -> Sample | None`, called one after
    another on each finished sample, before it becomes a row."""
    tools: tuple[ToolConfig, ...] = ()
    """What the policy may call. Not empty: responses of several turns, the tools' answers between
    them. See `rlpipe.rollout.multi_turn`."""
    tool_call_format: Literal["tags", "hermes"] = "tags"
    """`tags`: `<name>argument</name>`, answered by `<result>...</result>`. `hermes`: JSON in
    `<tool_call>` tags, answered as Qwen's chat template has it."""
    max_turns: int = Field(default=5, ge=1, le=MOST_ROWS)
    """Responses of the policy in one rollout with tools; functions of yours find it as
    `args.max_turns`."""
    max_turn_tokens: int | None = Field(default=None, ge=1)
    """Longest single turn in tokens; None: what is left of rollout_max_response_len, which counts
    the tools' answers too."""
    tool_timeout_s: float = Field(default=10.0, gt=0)
    """Deadline of one call of a tool; the policy is told when it was missed."""
    max_tool_response_len: int = Field(default=512, ge=1)
    """Longest answer of a tool in tokens; the rest of it is cut off."""
    loss_mask_type: Literal["last", "all_assistant"] = "last"
    """Supervised rows in chat form: train on the last answer, or on every assistant message."""
    over_sampling_batch_size: int | None = Field(default=None, ge=1, le=MOST_ROWS)
    """Prompts asked for at a time; the first rollout_batch_size groups that are accepted make the
    batch, the others wait in the buffer. None: rollout_batch_size."""
    dynamic_sampling_filter_path: str | None = None
    """Function of a finished, scored group: `keep(samples) -> bool` (or `(keep, reason)`, or
    slime's form with `args`). A rejected group is dropped with its reason and another prompt is
    drawn. Built in: `rlpipe.rollout.filters.reward_nonzero_std`, and
    `reward_nonzero_std_with_fallback`, which fills the batch with rejected groups instead of
    sampling another round. slime's names of the two are taken too. None accepts all."""
    rollout_sample_filter_path: str | None = None
    """Function `filter(args, groups) -> None` of the batch's scored groups: a sample whose
    `remove_sample` it sets gets loss mask 0, and its reward still counts in its group."""
    rollout_all_samples_process_path: str | None = None
    """Function `process(args, all_groups, data_source) -> None`, called once at the end of a
    rollout with every group that was scored, those it dropped included; `data_source` is the object
    of your data_source_path, else None."""
    rollout_function_path: str | None = None
    """Your own rollout: `generate_rollout(args, rollout_id, data_source, evaluation=False)`. See
    `rlpipe.rollout.hooks.rollout_function`."""
    eval_function_path: str | None = None
    """The same for evaluations; None: rollout_function_path."""
    data_source_path: str | None = None
    """Class `source(args)` with `get_samples(n)` and `add_samples(groups)`. See
    `rlpipe.data.custom`. None: `data.prompts`."""
    buffer_filter_path: str | None = None
    """Function `filter(args, rollout_id, buffer, num_samples) -> groups` (or without rollout_id)
    that takes groups out of the buffer; what it takes out without returning it is dropped. None:
    the oldest first."""
    partial_rollout: bool = False
    """A group that is cut off because the batch is full goes on from its tokens in a later
    iteration; False: it starts again."""
    mask_offpolicy_in_partial_rollout: bool = False
    """Tokens older than async_buffer_size are kept without a part in the loss; False: their group
    is sampled from the start."""
    max_sampling_rounds: int = Tuning(default=20, ge=1)
    """The stage fails if it asked for prompts so many times and still has too few accepted
    groups."""
    flush_interval_s: float = Tuning(default=5.0, gt=0)
    """Finished groups wait at most this long before they are written."""
    timeout_s: float = Tuning(default=3600.0, gt=0)
    """Deadline of the whole stage."""
    min_completed_fraction: float = Field(default=1.0, gt=0, le=1)
    """The stage fails if fewer of its groups than this came back."""

    @field_validator("dynamic_sampling_filter_path", mode="before")
    @classmethod
    def _slimes_filter_is_ours(cls, value: Any) -> Any:
        return SLIMES_FILTERS.get(value, value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_way_to_sample(self):
        ways = {
            "rollout_function_path": self.rollout_function_path,
            "custom_generate_function_path": self.custom_generate_function_path,
            "tools": self.tools,
        }
        given = [name for name, value in ways.items() if value]
        if len(given) > 1 and given != ["rollout_function_path", "custom_generate_function_path"]:
            raise ValueError(
                f"rollout.{given[0]} and rollout.{given[1]}: a rollout is sampled in one way; leave one of them out"
            )
        if self.rollout_function_path and self.type == "dataset":
            raise ValueError(
                "rollout.type: dataset samples nothing; leave rollout.rollout_function_path out"
            )
        return self

    @property
    def hook_paths(self) -> tuple[str, ...]:
        """Functions of yours that decide what a rollout gives."""
        single = (
            self.custom_generate_function_path, self.rollout_function_path, self.rollout_sample_filter_path,
            self.rollout_all_samples_process_path, self.dynamic_sampling_filter_path, self.buffer_filter_path,
            self.data_source_path,
        )  # fmt: skip
        paths = [
            *(path for path in single if path),
            *self.rollout_sample_hook_path,
            *(tool.path for tool in self.tools),
        ]
        return tuple(dict.fromkeys(paths))

    @property
    def evaluation_hook_paths(self) -> tuple[str, ...]:
        """Those of them that an evaluation uses too."""
        single = (
            self.custom_generate_function_path,
            self.eval_function_path or self.rollout_function_path,
        )
        paths = [
            *(path for path in single if path),
            *self.rollout_sample_hook_path,
            *(tool.path for tool in self.tools),
        ]
        return tuple(dict.fromkeys(paths))

    @property
    def needs_text(self) -> bool:
        """Do the engines need the tokenizer? For stop texts and least lengths, which functions of
        yours may ask for too."""
        functions = (
            self.custom_generate_function_path,
            self.rollout_function_path,
            self.eval_function_path,
        )
        return bool(
            self.rollout_stop or self.rollout_min_new_tokens or self.tools or any(functions)
        )

    @property
    def responses_skip_special_tokens(self) -> bool:
        """True if special tokens are left out of the text of a response."""
        return self.rollout_skip_special_tokens is not False

    @property
    def functions_skip_special_tokens(self) -> bool:
        """`skip_special_tokens` of the sampling parameters that a function of the user is given."""
        return self.rollout_skip_special_tokens is True

    @property
    def judged_by_reward(self) -> bool:
        """Does a finished group need its reward while the rollout still runs?"""
        hooks = (
            self.dynamic_sampling_filter_path,
            self.rollout_sample_filter_path,
            self.rollout_all_samples_process_path,
        )
        return any(hooks)

    @property
    def groups_per_round(self) -> int:
        """Prompts asked for at a time."""
        return max(self.rollout_batch_size, self.over_sampling_batch_size or 0)

    @property
    def static(self) -> bool:
        """Is it known before sampling which groups a rollout uses up? Then the next one can be
        planned at once."""
        choosing = (self.dynamic_sampling_filter_path, self.rollout_function_path)
        return self.groups_per_round == self.rollout_batch_size and not any(choosing)
