"""Prompts, rewards and held-out sets."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from rlpipe.config.base import MOST_PROCESSES, MOST_ROWS, MOST_TOKENS, Config, Tuning
from rlpipe.config.rollout import TokenId, TopK


class FilePrompts(Config):
    """Rows of `.jsonl` or `.parquet` files."""

    type: Literal["file"]
    paths: tuple[str, ...] = Field(min_length=1)
    """Files, read in this order. `path@[a:b]` takes rows a to b - 1 of a file; either may be left
    out, or count from the end."""
    input_key: str = "prompt"
    """Column with the prompt: a string, or a list of chat messages."""
    label_key: str | None = None
    """Column with the reference answer; None if there is none."""
    metadata_key: str | None = "metadata"
    """Column with a JSON object handed through to rewards and hooks; ignored where a row has
    none."""
    tool_key: str | None = None
    """Column with the tools of a row, a JSON list: handed to the chat template, and through as
    `metadata.tools`. None: there is no such column; ignored where a row has none."""


class ReasoningGymPrompts(Config):
    """Questions made by one task of the `reasoning-gym` package, which also scores the answers."""

    type: Literal["reasoning_gym"]
    task: str
    """Name of the task, as in `reasoning_gym.create_dataset`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Its own keyword arguments."""
    size: int = Field(ge=1)
    """Questions to make."""
    seed: int = 0
    """Items use seed + i, so two data sets need seeds further apart than `size`."""
    exclude: tuple[ReasoningGymPrompts, ...] = ()
    """Leave out every question that also occurs in these (held-out sets)."""
    prompt_format: str = "{question}"
    """Python format of the prompt, filled with `question` and `answer`."""
    question_pattern: str | None = None
    """Regular expression searched in the question; its first group replaces `question`."""
    answer_format: str = "{answer}"
    """Python format of the label (the response in supervised rows)."""


PromptSource = Annotated[FilePrompts | ReasoningGymPrompts, Field(discriminator="type")]


class DataConfig(Config):
    """The data source: which prompts, in which order, how they become token ids."""

    prompts: PromptSource | None = None
    """None: rollout.data_source_path gives them."""
    apply_chat_template: bool = False
    """Render prompts through the tokenizer's chat template."""
    apply_chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Extra variables of the template."""
    rollout_shuffle: bool = True
    """Shuffle each epoch with (rollout_seed, epoch)."""
    rollout_seed: int = 0
    """Seed of the order of prompts and of every sample's own seed; the run's `seed` unless
    given."""
    rollout_max_prompt_len: int | None = Field(default=None, ge=1, le=MOST_TOKENS)
    """Longest prompt in tokens; `overlong_prompts` says what becomes of a longer one. None: no
    limit but the context."""
    overlong_prompts: Literal["error", "drop", "truncate_left"] = "error"
    """What becomes of a prompt that is longer than rollout_max_prompt_len, or leaves no room for a
    response in rollout.rollout_max_context_len or in the model's context (this last one not where a
    function of yours samples).

    `error`: the run does not start; the error names the row. `drop`: the row is never drawn, and an
    epoch is all other rows. `truncate_left`: the prompt's last tokens are kept, as many as the
    limit allows; set rollout_max_prompt_len so that a response has room after them. Rows that are
    dropped or cut are counted when the run starts, and listed with their lengths in
    `overlong_prompts.jsonl` in the run's folder.

    Held-out sets are treated in the same way, as slime does: the accuracy of a set is that of the
    rows that are kept, which keep their ids and seeds. A rollout.data_source_path of yours gives
    rows one at a time, so there `drop` is an error too."""
    num_data_workers: int = Tuning(default=0, ge=0, le=MOST_PROCESSES)
    """Processes that read prompt files and check their rows; 0 is the generator's own."""
    streaming_data: bool = Tuning(False)
    """Read rows from their files when they are drawn, instead of keeping all in memory; order and
    results are the same."""


class ReasoningGymReward(Config):
    """The task's own `score_answer`; the row's metadata names task and entry."""

    type: Literal["reasoning_gym"]
    threshold: float | None = 1.0
    """Scores at or above it are 1, below it 0; None keeps the task's partial credit."""
    answer_pattern: str | None = None
    """Regular expression searched in the response; its first group is the answer. No match scores 0
    with the part `format` 0."""


class MathReward(Config):
    """1 if the response's answer equals the label by math-verify, else 0."""

    type: Literal["math"]
    boxed: bool = False
    """Only what the response's last \\boxed{} holds is the answer; none scores 0."""


class RuleReward(Config):
    """A rule that compares the response with the label; each is described in
    `rlpipe.rewards.rules`.

    `dapo`: `Answer: ...` in the last 300 characters, 1 or -1. `deepscaler`: the \\boxed{} after
    `</think>`, 1 or 0. `f1`: words in common, 0 to 1. `gpqa`: the letter of a choice, 1 or 0.
    `random`: 0 or 1 by the sample's seed.
    """

    type: Literal["dapo", "deepscaler", "f1", "gpqa", "random"]
    boxed: bool = False
    """Only what the response's last \\boxed{} holds is compared; none is an empty response."""


class RowReward(Config):
    """Each row says its own: `metadata.rm_type` is a type of the rules, `math` or `reasoning_gym`,
    after `boxed_` or alone."""

    type: Literal["by_row"]
    default: str | None = None
    """For rows that say none; None: such a row is an error."""
    reward_key: str | None = None
    """Which entry is the reward, of a rule that gives several: `dapo` gives `score` (1 or -1),
    `acc` (1 or 0) and `format`. None: `score`."""


class RemoteReward(Config):
    """A server of yours: POST `{"prompt", "response", "label", "metadata"}`, answered by a number
    or an object of numbers."""

    type: Literal["remote"]
    url: str = Tuning(...)
    """Where to post. `http://` or `https://`."""
    reward_key: str | None = None
    """Which entry of an object is the reward; the others become reward parts."""
    tries: int = Tuning(default=10, ge=1)
    """Posts before the server's error stands, 1, 2, 4 ... 30 s apart, within
    `reward.sample_timeout_s`."""


class JudgeReward(Config):
    """A model judges: any server with OpenAI's chat completions, such as SGLang's own
    (`http://host:port/v1`).

    Its key is read from the environment variable RLPIPE_JUDGE_KEY, if it needs one.
    """

    type: Literal["judge"]
    url: str = Tuning(...)
    """Base of its API, without `/chat/completions`."""
    model: str = "default"
    """Name of the model there."""
    prompt: str = (
        "Question:\n{prompt}\n\nReference answer:\n{label}\n\nAnswer to judge:\n{response}\n\n"
        "Is it right? End with one line: Score: 0 to 1."
    )
    """Python format of the judge's message, filled with `prompt`, `response` and `label`."""
    score_pattern: str = r"Score:\s*(-?[0-9]+(?:\.[0-9]+)?)"
    """Regular expression; the first group of its last match in the answer is the reward. No match
    is an error of the row."""
    scale: float = Field(default=1.0, gt=0)
    """The number is divided by it."""
    temperature: float = Field(default=0.0, ge=0)
    """Of the judge."""
    max_tokens: int = Field(default=1024, ge=1)
    """Longest judgement."""
    tries: int = Tuning(default=10, ge=1)
    """As for `remote`."""


class PythonReward(Config):
    """A function or class of yours; see `rlpipe.rewards.custom` for the forms.

    `reward(sample) -> float | dict`, plain or async, or `reward(samples) -> list`; slime's
    `custom_rm(args, sample)`; a class with `compute_reward(prompts, responses) -> list`.
    """

    type: Literal["python"]
    path: str
    """`path/to/file.py:function` or `module.function`."""
    group: bool = False
    """Call it once with all samples of a group."""
    reward_key: str | None = None
    """Which entry of a returned dict is the reward; the others become reward parts."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments that a class is made with."""


class NoReward(Config):
    """Supervised rows have none."""

    type: Literal["none"]


RewardFunction = Annotated[
    ReasoningGymReward
    | MathReward
    | RuleReward
    | RowReward
    | RemoteReward
    | JudgeReward
    | PythonReward
    | NoReward,
    Field(discriminator="type"),
]


class RewardConfig(Config):
    """How rows are scored, and what an error of the verifier means."""

    function: RewardFunction
    """Verifier of a response."""
    on_error: Literal["exclude_group"] | float = "exclude_group"
    """A verifier's error leaves its group out of the batch with reason `reward_error`, unless a
    reward is given here."""
    max_error_fraction: float = Field(default=0.5, ge=0, le=1)
    """The stage fails if a larger share of rows could not be scored."""
    custom_reward_post_process_path: str | None = None
    """Function of all scored samples of an iteration: `post_process(args, samples) -> (raw_rewards,
    rewards)`; the second are what advantages are estimated from. See
    `rlpipe.rewards.post_process`."""
    workers: int = Tuning(default=0, ge=0, le=MOST_PROCESSES)
    """Processes that run the verifier; 0 runs it in the stage's own process (what compares as
    mathematics always gets one)."""
    attempts: int = Tuning(default=1, ge=1)
    """Tries per row before an error stands."""
    sample_timeout_s: float = Tuning(default=30.0, gt=0)
    """Deadline of one call."""
    timeout_s: float = Tuning(default=3600.0, gt=0)
    """Deadline of the whole stage."""


class EvalDataset(Config):
    """One held-out set. What it does not say is the run's."""

    name: str = Field(max_length=100)
    """Its name in metrics: `eval/<name>/accuracy`."""
    prompts: PromptSource
    """Rows of the set."""
    reward: RewardConfig | None = None
    """None: the run's reward."""
    n_samples_per_eval_prompt: int = Field(default=1, ge=1, le=MOST_ROWS)
    """Responses per prompt."""
    temperature: float | None = Field(default=None, ge=0, le=100)
    """None: the rollout's. 0 is greedy."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """None: the rollout's."""
    top_k: TopK | None = None
    """None: the rollout's. -1 is all."""
    max_response_len: int | None = Field(default=None, ge=1)
    """None: the rollout's."""
    max_prompt_len: int | None = Field(default=None, ge=1)
    """None: data.rollout_max_prompt_len."""
    max_context_len: int | None = Field(default=None, ge=1)
    """None: the rollout's. More than the model's max_position_embeddings is an error."""
    min_new_tokens: int | None = Field(default=None, ge=0)
    """None: the rollout's."""
    stop: tuple[str, ...] | None = None
    """None: the rollout's."""
    stop_token_ids: tuple[TokenId, ...] | None = None
    """None: the rollout's."""
    custom_generate_function_path: str | None = None
    """As `rollout.custom_generate_function_path`, for this set alone. None: the rollout's."""
    skip_special_tokens: bool | None = None
    """As `rollout.rollout_skip_special_tokens`, for this set alone. None: the rollout's."""
    metadata_overrides: dict[str, Any] = Field(default_factory=dict)
    """Entries that every row's metadata gets, in place of its own of the same name."""
    pass_threshold: float = 1.0
    """A response with this reward or more counts as right in pass@k."""

    @field_validator("name")
    @classmethod
    def _is_part_of_a_metric(cls, value: str) -> str:
        if "/" in value or not value.isprintable() or value != value.strip():
            raise ValueError(
                f"part of the metric eval/<name>/accuracy: no '/', no spaces around it; found {value!r}"
            )
        return value

    def sampling(self) -> dict[str, Any]:
        """What it changes of the rollout's settings, by their names there; its temperature, which
        may be 0, is not among them."""
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
        given = {name: value for name, value in changes.items() if value is not None}
        return {**given, "type": "sample", "n_samples_per_prompt": self.n_samples_per_eval_prompt}

    def limited(self, data: DataConfig) -> DataConfig:
        """How its prompts become token ids: as the run's, but for their longest length."""
        return (
            data
            if self.max_prompt_len is None
            else data.model_copy(update={"rollout_max_prompt_len": self.max_prompt_len})
        )


class EvaluationConfig(Config):
    """When and on what the policy is evaluated."""

    datasets: tuple[EvalDataset, ...] = ()
    eval_interval: int | None = Tuning(default=None, ge=1)
    """Evaluate after every this many iterations; None: only before the first and after the last."""
    skip_eval_before_train: bool = Tuning(False)
    """Do not evaluate weight version 0."""

    @model_validator(mode="after")
    def _names_differ(self):
        names = [dataset.name for dataset in self.datasets]
        if len(set(names)) != len(names):
            raise ValueError(f"evaluation.datasets: names must differ, found {names}")
        return self


ReasoningGymPrompts.model_rebuild()
