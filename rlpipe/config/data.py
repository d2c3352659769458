"""Prompts, rewards and held-out sets."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from rlpipe.config.base import MOST_PROCESSES, MOST_ROWS, MOST_TOKENS, Config, Tuning
from rlpipe.config.draws import CurriculumConfig, SlimePosition
from rlpipe.config.rollout import TokenId, TopK
from rlpipe.errors import ConfigError


class FilePrompts(Config):
    """Rows of `.jsonl` or `.parquet` files."""

    type: Literal["file"]
    paths: tuple[str, ...] = Field(min_length=1)
    """Files, read in this order: paths, fsspec URLs, or files on the Hugging Face Hub as
    `hf://datasets/org/name/path` and `hf://datasets/org/name@revision/path`. The stored
    configuration has the commit of a file on the Hub. `path@[a:b]` is rows a to b - 1 of a file, as
    in a Python slice: a and b may be missing or negative."""
    input_key: str = "prompt"
    """Column with the prompt: a string, or a list of chat messages. An integer becomes a string:
    the number of a task for a generate function of yours."""
    label_key: str | None = None
    """Column with the reference answer: a string or a number, or a JSON object or list for
    functions of yours. None: no such column."""
    rejected_key: str | None = None
    """Column with the rejected response of preference rows; label_key is the chosen one. Both are
    strings, or lists of chat messages, which may repeat the prompt. A row without the column of
    the prompt has the common beginning of both as its prompt. None: no preference rows."""
    metadata_key: str | None = "metadata"
    """Column with a JSON object for rewards and hooks. A row may have no such object. None: no such
    column."""
    tool_key: str | None = None
    """Column with the tools of a row, a JSON list, for the chat template and for
    `metadata.tools`. A row may have no such list. None: no such column."""
    prompt_format: str = "{prompt}"
    """Python format of the prompt, filled with the text of the column as `prompt`; other braces are
    doubled: `{prompt} Put the answer in \\boxed{{}}.` Only for columns of strings."""
    label_pattern: str | None = None
    """Regular expression searched in the label; its first group is the label. `#### (.*)` reads the
    answers of GSM8K. A row without a match is an error. None: the whole text."""

    @field_validator("prompt_format")
    @classmethod
    def _format_contains_the_prompt(cls, value: str) -> str:
        try:
            contains_prompt = "\0" in value.format(prompt="\0")
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise ValueError(
                f"not a format of the prompt ({type(error).__name__}: {error}); expected "
                "{prompt} once, and every other brace twice"
            ) from error
        if not contains_prompt:
            raise ValueError("the format has no {prompt}, so all prompts would be equal")
        return value

    @field_validator("label_pattern")
    @classmethod
    def _pattern_has_a_group(cls, value: str | None) -> str | None:
        try:
            num_groups = None if value is None else re.compile(value).groups
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from error
        if num_groups == 0:
            raise ValueError("the pattern has no group; put the label in parentheses")
        return value

    @model_validator(mode="after")
    def _pattern_has_a_label(self):
        if self.label_pattern is not None and self.label_key is None:
            raise ValueError("label_pattern is for the label; set label_key, its column")
        if self.rejected_key is not None and self.label_pattern:
            raise ValueError("rejected_key needs label_key without label_pattern")
        return self


class ReasoningGymPrompts(Config):
    """Questions of one task of the `reasoning-gym` package, which also scores the answers. The task
    `composite` mixes several tasks: its argument `datasets` is a list of `{name, weight, config}`,
    where `config` has the arguments of the task `name`."""

    type: Literal["reasoning_gym"]
    task: str
    """Name of the task, as in `reasoning_gym.create_dataset`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the task."""
    size: int = Field(ge=1)
    """Number of questions."""
    seed: int = 0
    """Seed of the questions. Question i uses seed + i, so the seeds of two data sets must differ by
    more than `size`. Task number n of `composite` uses seed + n + i, n from 1."""
    exclude: tuple[ReasoningGymPrompts, ...] = ()
    """Leave out every question of these sources, such as held-out sets."""
    prompt_format: str = "{question}"
    """Python format of the prompt, filled with `question` and `answer`."""
    question_pattern: str | None = None
    """Regular expression searched in the question; its first group replaces `question`. None: the
    whole question."""
    answer_format: str = "{answer}"
    """Python format of the label (the response in supervised rows)."""


class SeedPrompts(Config):
    """Rows for `rollout.environment` that only have a seed, in `metadata.seed`. The environment
    makes the task of the seed."""

    type: Literal["seeds"]
    size: int = Field(ge=1, le=MOST_ROWS)
    """Number of rows."""
    seed: int = Field(default=0, ge=0)
    """Row i has the seed `seed` + i. The seeds of training and of held-out sets must not
    overlap."""


class VerifiersPrompts(Config):
    """The tasks of a taskset of the package `verifiers`, for `rollout.environment`."""

    type: Literal["verifiers"]
    id: str
    """Id of the taskset."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keys of the taskset: verifiers' section `env.taskset`."""
    size: int = Field(ge=1, le=MOST_ROWS)
    """Most tasks. A finite taskset may have fewer."""
    skip: int = Field(default=0, ge=0)
    """Tasks before the first one, for a held-out set of the same taskset."""
    python: str = Tuning(...)
    """Python interpreter that has the package `verifiers`."""
    start_timeout_s: float = Tuning(default=120.0, gt=0)
    """Deadline of reading the tasks."""


PromptSource = Annotated[
    FilePrompts | ReasoningGymPrompts | SeedPrompts | VerifiersPrompts,
    Field(discriminator="type"),
]


class DataConfig(Config):
    """The data source: prompts, their order and their tokenization."""

    prompts: PromptSource | None = None
    """Source of prompts; None: rollout.data_source_path gives prompts."""
    multimodal_keys: dict[Literal["image"], str] | None = None
    """`{image: NAME}`: the column with the images of a row, for a model that reads images: paths,
    URLs, base64 or bytes, one or a list. The prompt has `<image>`, or a message part of type
    `image`, in the place of each. None: prompts are text."""
    apply_chat_template: bool = False
    """Render prompts through the tokenizer's chat template."""
    apply_chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Extra variables of the template."""
    rollout_shuffle: bool = True
    """Shuffle each epoch with (rollout_seed, epoch)."""
    rollout_seed: int = 0
    """Seed of the order of prompts and of every sample's seed. If the key is not set: the run's
    `seed`."""
    slime_position: SlimePosition | None = None
    """Begin after the prompts that a run of slime has drawn, in slime's order of rollout_seed and
    epoch. The first epoch of the run is the rest of slime's. None: begin with all prompts, in
    rlpipe's order. A `rollout.data_source_path` does not use it."""
    curriculum: CurriculumConfig | None = None
    """Draw rows by source and difficulty. None: draw every row once in each epoch."""
    rollout_max_prompt_len: int | None = Field(default=None, ge=1, le=MOST_TOKENS)
    """Longest prompt in tokens; `overlong_prompts` handles longer ones. None: only the context
    limits the length."""
    overlong_prompts: Literal["error", "drop", "truncate_left"] = "error"
    """Handling of a prompt that is longer than rollout_max_prompt_len or leaves no room for a
    response. The room is limited by rollout.rollout_max_context_len and, unless a user function
    samples, by the model's context.

    `error`: the run does not start; the error names the row. `drop`: the row is never drawn, and an
    epoch consists of the other rows. `truncate_left`: keep the last tokens of the prompt, as many
    as the limit allows; set rollout_max_prompt_len so that a response has room after them. The run
    counts dropped and truncated rows at its start, and lists them with their lengths in
    `overlong_prompts.jsonl` in the run's folder.

    Held-out sets are handled in the same way, as in slime: the accuracy of a set is that of the
    kept rows, which keep their ids and seeds. A rollout.data_source_path gives rows one at a time,
    so `drop` is an error there."""
    num_data_workers: int = Tuning(default=0, ge=0, le=MOST_PROCESSES)
    """Processes that read prompt files and check their rows; 0: the generator's process."""
    streaming_data: bool = Tuning(False)
    """Read rows from their files when they are drawn. False: keep all rows in memory. Order and
    results are the same."""

    @property
    def image_key(self) -> str | None:
        """Column with the images; None: prompts are text."""
        return (self.multimodal_keys or {}).get("image")


class ReasoningGymReward(Config):
    """The task's `score_answer`; the row's metadata contains task and entry."""

    type: Literal["reasoning_gym"]
    threshold: float | None = 1.0
    """Scores at or above the threshold become 1, others 0; None: keep the task's partial
    credit."""
    answer_pattern: str | None = None
    """Regular expression searched in the response; its first group is the answer. Without a match
    the reward and its part `format` are 0. None: the whole response is the answer."""


class MathReward(Config):
    """1 if the response's answer equals the label according to math-verify, else 0."""

    type: Literal["math"]
    boxed: bool = False
    """Read the answer from the response's last \\boxed{}; without a box the reward is 0."""


class RuleReward(Config):
    """A rule that compares the response with the label. `rlpipe.rewards.rules` describes each rule.

    `dapo`: `Answer: ...` in the last 300 characters, 1 or -1. `deepscaler`: the \\boxed{} after
    `</think>`, 1 or 0. `f1`: common words, 0 to 1. `gpqa`: the letter of a choice, 1 or 0.
    `random`: 0 or 1, from the sample's seed.
    """

    type: Literal["dapo", "deepscaler", "f1", "gpqa", "random"]
    boxed: bool = False
    """Compare only the content of the response's last \\boxed{}; without a box the response is
    empty."""


class RowReward(Config):
    """The row names its rule: `metadata.rm_type` is a rule's type, `math` or `reasoning_gym`, with
    or without the prefix `boxed_`."""

    type: Literal["by_row"]
    default: str | None = None
    """Rule of rows without `metadata.rm_type`; None: such a row is an error."""
    reward_key: str | None = None
    """Entry that is the reward, for a rule with several: `dapo` gives `score` (1 or -1), `acc` (1
    or 0) and `format`. None: `score`."""


class RemoteReward(Config):
    """A user's server: POST `{"prompt", "response", "label", "metadata"}`. The answer is a
    number or an object of numbers."""

    type: Literal["remote"]
    url: str = Tuning(...)
    """URL of the request, `http://` or `https://`."""
    reward_key: str | None = None
    """Entry of an object that is the reward; the others become reward parts. None: the answer is a
    number."""
    tries: int = Tuning(default=10, ge=1)
    """Attempts before a server error counts, with pauses of 1, 2, 4 ... 30 s, within
    `reward.sample_timeout_s`."""


class JudgeReward(Config):
    """A judge model behind OpenAI's chat completions API, such as SGLang's
    (`http://host:port/v1`).

    The environment variable RLPIPE_JUDGE_KEY contains the API key, if the server needs one.
    """

    type: Literal["judge"]
    url: str = Tuning(...)
    """Base URL of the API, without `/chat/completions`."""
    model: str = "default"
    """Name of the model on the server."""
    prompt: str = (
        "Question:\n{prompt}\n\nReference answer:\n{label}\n\nAnswer to judge:\n{response}\n\n"
        "Is it right? End with one line: Score: 0 to 1."
    )
    """Python format of the message to the judge, filled with `prompt`, `response` and `label`."""
    score_pattern: str = r"Score:\s*(-?[0-9]+(?:\.[0-9]+)?)"
    """Regular expression; the first group of its last match in the answer is the score. A missing
    match is an error of the row."""
    scale: float = Field(default=1.0, gt=0)
    """The reward is the score divided by this."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature of the judge; 0: greedy."""
    max_tokens: int = Field(default=1024, ge=1)
    """Longest answer of the judge in tokens."""
    tries: int = Tuning(default=10, ge=1)
    """Attempts before a server error counts, as for `remote`."""


class PythonReward(Config):
    """A user function or class; `rlpipe.rewards.user_rewards` describes the forms.

    `reward(sample) -> float | dict`, plain or async, or `reward(samples) -> list`; slime's
    `custom_rm(args, sample)`; a class with `compute_reward(prompts, responses) -> list`.
    """

    type: Literal["python"]
    path: str
    """`path/to/file.py:function` or `module.function`."""
    group: bool = False
    """Call it once with all samples of a group."""
    reward_key: str | None = None
    """Entry of a returned dict that is the reward, by default `reward`; the others become reward
    parts."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class's constructor."""


class EnvironmentReward(Config):
    """The reward and the reward parts that `rollout.environment` gave, in `metadata.environment`
    of each row."""

    type: Literal["environment"]


class NoReward(Config):
    """No reward, for supervised rows."""

    type: Literal["none"]


RewardFunction = Annotated[
    ReasoningGymReward
    | MathReward
    | RuleReward
    | RowReward
    | RemoteReward
    | JudgeReward
    | PythonReward
    | EnvironmentReward
    | NoReward,
    Field(discriminator="type"),
]


class RewardConfig(Config):
    """The verifier, and the handling of its errors."""

    function: RewardFunction
    """Verifier of a response."""
    on_error: Literal["exclude_group"] | float = "exclude_group"
    """Handling of a verifier error. `exclude_group`: the batch leaves out the group with reason
    `reward_error`. A number: the reward of the row."""
    max_error_fraction: float = Field(default=0.5, ge=0, le=1)
    """The stage fails if a larger fraction of rows has verifier errors."""
    custom_reward_post_process_path: str | None = None
    """User function of all scored samples of an iteration: `post_process(args, samples) ->
    (raw_rewards, rewards)`. Advantages are estimated from the second. None: no function. See
    `rlpipe.rewards.post_process`."""
    workers: int = Tuning(default=0, ge=0, le=MOST_PROCESSES)
    """Processes that run the verifier; 0: the stage's process runs it. Verifiers that use
    math-verify always get a process."""
    worker_labels: dict[str, str] | None = Tuning(default=None)
    """Labels of the Ray nodes on which the processes of `workers` run, one CPU each, such as
    `{kind: cpu}`; `{}`: any node. None: on the machine of the stage. `rlpipe reprocess` scores on
    its own machine."""
    attempts: int = Tuning(default=1, ge=1)
    """Attempts per row before an error counts."""
    sample_timeout_s: float = Tuning(default=30.0, gt=0)
    """Deadline of one call of the verifier."""
    timeout_s: float = Tuning(default=3600.0, gt=0)
    """Deadline of the whole stage."""

    @model_validator(mode="after")
    def _check_workers(self) -> Self:
        if self.worker_labels is not None and not self.workers:
            raise ValueError("worker_labels: set workers to the number of processes")
        return self

    @property
    def reads_tokens(self) -> bool:
        """True if a user function gets the samples; built-in verifiers read text and row only."""
        return (
            isinstance(self.function, PythonReward)
            or self.custom_reward_post_process_path is not None
        )


class EvalDataset(Config):
    """One held-out set. Keys with None use the run's settings."""

    name: str = Field(max_length=100)
    """Name of the set in metrics: `eval/<name>/accuracy`."""
    prompts: PromptSource
    """Rows of the set."""
    reward: RewardConfig | None = None
    """Reward of the set; None: the run's reward."""
    n_samples_per_eval_prompt: int = Field(default=1, ge=1, le=MOST_ROWS)
    """Responses per prompt."""
    temperature: float | None = Field(default=None, ge=0, le=100)
    """Sampling temperature; 0: greedy. None: rollout.rollout_temperature."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Nucleus sampling threshold; None: rollout.rollout_top_p."""
    top_k: TopK | None = None
    """Sample among the k most likely tokens; -1: all tokens. None: rollout.rollout_top_k."""
    max_response_len: int | None = Field(default=None, ge=1)
    """Longest response in tokens; None: rollout.rollout_max_response_len."""
    max_prompt_len: int | None = Field(default=None, ge=1)
    """Longest prompt in tokens; None: data.rollout_max_prompt_len."""
    max_context_len: int | None = Field(default=None, ge=1)
    """Longest prompt + response in tokens; None: rollout.rollout_max_context_len. More than the
    model's max_position_embeddings is an error."""
    min_new_tokens: int | None = Field(default=None, ge=0)
    """Least number of tokens of a response; 0: no minimum. None: rollout.rollout_min_new_tokens."""
    stop: tuple[str, ...] | None = None
    """Texts that end a response; None: rollout.rollout_stop."""
    stop_token_ids: tuple[TokenId, ...] | None = None
    """Token ids that end a response; None: rollout.rollout_stop_token_ids."""
    custom_generate_function_path: str | None = None
    """User function that samples this set; None: rollout.custom_generate_function_path."""
    skip_special_tokens: bool | None = None
    """Leave special tokens out of the text of a response; None:
    rollout.rollout_skip_special_tokens."""
    metadata_overrides: dict[str, Any] = Field(default_factory=dict)
    """Entries that replace entries of the same name in every row's metadata."""
    pass_threshold: float = 1.0
    """Least reward of a response that counts as correct in pass@k."""

    @field_validator("name")
    @classmethod
    def _fits_into_a_metric_name(cls, value: str) -> str:
        if "/" in value or not value.isprintable() or value != value.strip():
            raise ConfigError(
                "not a valid name, because the metric eval/<name>/accuracy contains it",
                found=f"{value!r}",
                expected="no '/' and no spaces around it",
            )
        return value

    def sampling(self) -> dict[str, Any]:
        """Return the set's changes of the rollout's settings, by their names in RolloutConfig.

        The temperature is not included, because it may be 0 only in an evaluation.
        """
        changes = {
            "rollout_top_p": self.top_p,
            "rollout_top_k": self.top_k,
            "rollout_max_response_len": self.max_response_len,
            "rollout_max_context_len": self.max_context_len,
            "rollout_min_new_tokens": self.min_new_tokens,
            "rollout_stop": self.stop,
            "rollout_stop_token_ids": self.stop_token_ids,
            "custom_generate_function_path": self.custom_generate_function_path,
            "rollout_skip_special_tokens": self.skip_special_tokens,
        }
        changes = {name: value for name, value in changes.items() if value is not None}
        return {**changes, "type": "sample", "n_samples_per_prompt": self.n_samples_per_eval_prompt}

    def limited(self, data: DataConfig) -> DataConfig:
        """Return the run's data settings with the set's longest prompt."""
        if self.max_prompt_len is None:
            return data
        return data.model_copy(update={"rollout_max_prompt_len": self.max_prompt_len})


class EvaluationConfig(Config):
    """Held-out sets, and the iterations that evaluate the policy on them."""

    datasets: tuple[EvalDataset, ...] = ()
    """Held-out sets; `[]`: no evaluation."""
    eval_interval: int | None = Tuning(default=None, ge=1)
    """Iterations between two evaluations; None: only before the first and after the last."""
    skip_eval_before_train: bool = Tuning(False)
    """Skip the evaluation of weight version 0."""

    @model_validator(mode="after")
    def _names_differ(self):
        names = [dataset.name for dataset in self.datasets]
        if len(set(names)) != len(names):
            raise ValueError(f"evaluation.datasets: names must differ, found {names}")
        return self


def needs_environment(
    data: DataConfig, reward: RewardConfig, evaluation: EvaluationConfig
) -> str | None:
    """Return the key with its type that needs `rollout.environment`; None if no key does."""
    sections: list[tuple[str, PromptSource | None, RewardConfig | None]] = [
        ("", data.prompts, reward),
        *(("evaluation.datasets.", one.prompts, one.reward) for one in evaluation.datasets),
    ]
    for where, prompts, own_reward in sections:
        if isinstance(prompts, SeedPrompts | VerifiersPrompts):
            return f"{where or 'data.'}prompts.type: {prompts.type}"
        if own_reward is not None and isinstance(own_reward.function, EnvironmentReward):
            return f"{where}reward.function.type: environment"
    return None


ReasoningGymPrompts.model_rebuild()
