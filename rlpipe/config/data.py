"""Prompts, rewards and held-out sets."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rlpipe.config.base import Config, Tuning


class FilePrompts(Config):
    """Rows of `.jsonl` or `.parquet` files."""

    type: Literal["file"]
    paths: tuple[str, ...] = Field(min_length=1)
    """Files, read in this order."""
    input_key: str = "prompt"
    """Column with the prompt: a string, or a list of chat messages."""
    label_key: str | None = None
    """Column with the reference answer; None if there is none."""
    metadata_key: str | None = "metadata"
    """Column with a JSON object handed through to rewards and hooks; ignored where a row has none."""


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

    prompts: PromptSource
    apply_chat_template: bool = False
    """Render prompts through the tokenizer's chat template."""
    apply_chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Extra variables of the template."""
    rollout_shuffle: bool = True
    """Shuffle each epoch with (rollout_seed, epoch)."""
    rollout_seed: int = 0
    """Seed of the order of prompts and of every sample's own seed; the run's `seed` unless given."""
    rollout_max_prompt_len: int | None = None
    """Longest prompt in tokens; a longer one is an error that names its row. None: no limit but the context."""


class ReasoningGymReward(Config):
    """The task's own `score_answer`; the row's metadata names task and entry."""

    type: Literal["reasoning_gym"]
    threshold: float | None = 1.0
    """Scores at or above it are 1, below it 0; None keeps the task's partial credit."""
    answer_pattern: str | None = None
    """Regular expression searched in the response; its first group is the answer. No match scores 0 with the part `format` 0."""


class MathReward(Config):
    """1 if the response's answer equals the label by math-verify, else 0."""

    type: Literal["math"]


class PythonReward(Config):
    """A function of yours: `reward(sample) -> float | dict`, plain or async, or `reward(samples) -> list`."""

    type: Literal["python"]
    path: str
    """`path/to/file.py:function` or `module.function`."""
    group: bool = False
    """Call it once with all samples of a group."""
    reward_key: str | None = None
    """Which entry of a returned dict is the reward; the others become reward parts."""


class NoReward(Config):
    """Supervised rows have none."""

    type: Literal["none"]


RewardFunction = Annotated[ReasoningGymReward | MathReward | PythonReward | NoReward, Field(discriminator="type")]


class RewardConfig(Config):
    """How rows are scored, and what an error of the verifier means."""

    function: RewardFunction
    on_error: Literal["exclude_group"] | float = "exclude_group"
    """A verifier's error leaves its group out of the batch with reason `reward_error`, unless a reward is given here."""
    max_error_fraction: float = Field(default=0.5, ge=0, le=1)
    """The stage fails if a larger share of rows could not be scored."""
    workers: int = Tuning(default=0, ge=0)
    """Processes that run the verifier; 0 runs it in the stage's own process (`math` always gets one)."""
    attempts: int = Tuning(default=1, ge=1)
    """Tries per row before an error stands."""
    sample_timeout_s: float = Tuning(default=30.0, gt=0)
    """Deadline of one call."""
    timeout_s: float = Tuning(default=3600.0, gt=0)
    """Deadline of the whole stage."""


class EvalDataset(Config):
    """One held-out set."""

    name: str
    """Its name in metrics: `eval/<name>/accuracy`."""
    prompts: PromptSource
    reward: RewardConfig | None = None
    """None: the run's reward."""
    n_samples_per_eval_prompt: int = Field(default=1, ge=1)
    """Responses per prompt."""
    temperature: float | None = None
    """None: the rollout's. 0 is greedy."""
    max_response_len: int | None = None
    """None: the rollout's."""


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
