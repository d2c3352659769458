"""Draws of rows in another order than epoch by epoch: a curriculum, or the position of a slime run.

`CurriculumConfig` chooses rows by source and difficulty. `rlpipe.data.curriculum` draws them.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Literal

from pydantic import Field, field_validator, model_validator

from rlpipe.config.base import LARGEST, Config, Tuning

if TYPE_CHECKING:
    from rlpipe.config.run import RunConfig


class SlimePosition(Config):
    """Position of a run of slime in its prompts, from `rollout/global_dataset_state_dict_….pt`."""

    epoch: int = Field(ge=0)
    """Epoch of that run, from 0."""
    offset: int = Field(ge=0)
    """Prompts of the epoch that were drawn."""
    draws: int | None = Field(default=None, ge=0)
    """Prompts drawn in all epochs. Another number of rows is an error. None: not compared."""
    file: str | None = Tuning(None)
    """File of the position, for the record of the run's sources. None: no record."""


class SourceWeights(Config):
    """Weights of the sources from an iteration on."""

    from_iteration: int = Field(ge=0)
    """First iteration with these weights."""
    weights: dict[str, float]
    """Source → weight. A draw is from a source with probability weight / sum of the weights,
    however many rows the source has. 0: no draw."""

    @field_validator("weights")
    @classmethod
    def _are_weights(cls, value: dict[str, float]) -> dict[str, float]:
        if any(not 0 <= weight <= LARGEST for weight in value.values()) or not any(value.values()):
            raise ValueError(f"expected weights from 0 on, and one above 0; found {value}")
        return value


class DifficultyConfig(Config):
    """Pools of rows by the pass rate of their latest visit, and the weights of the pools. A row
    without a visit is normal. The weights of empty pools do not count."""

    easy_above: float = Field(default=0.8, ge=0, lt=1)
    """A row is easy if more than this share of its samples passed."""
    hard_below: float = Field(default=0.2, gt=0, le=1)
    """A row is hard if less than this share of its samples passed."""
    easy: float = Field(default=1.0, ge=0)
    """Weight of draws from the easy rows. 0: a row that becomes easy is not drawn again."""
    normal: float = Field(default=1.0, gt=0)
    """Weight of draws from the other rows."""
    hard: float = Field(default=1.0, ge=0)
    """Weight of draws from the hard rows. 0: a row that becomes hard is not drawn again."""

    @model_validator(mode="after")
    def _pools_do_not_overlap(self):
        if self.hard_below > self.easy_above:
            raise ValueError(
                f"hard_below = {self.hard_below:g} must be at most easy_above = "
                f"{self.easy_above:g}: a row has one difficulty"
            )
        return self


class CurriculumConfig(Config):
    """Draws by source, with weights that change over training, and by difficulty."""

    source_key: str | None = None
    """Entry of a row's metadata that names its source; `a.b` is the entry `b` of the entry `a`.
    None: the name of the row's file, without folders and extension."""
    weights: tuple[SourceWeights, ...] = ()
    """Weights of the sources over time; the first entry is from iteration 0. Each entry has all
    sources. `[]`: sources do not decide."""
    between: Literal["constant", "linear"] = "constant"
    """Weights between two entries: those of the first one, or linear from the first to the
    second."""
    difficulty: DifficultyConfig | None = None
    """Draws by the pass rates of rows. Iteration k counts the visits that are committed up to
    iteration k - 1 - async_buffer_size. None: pass rates do not decide."""
    pass_threshold: float = 1.0
    """Least reward of a sample that passed, as `evaluation.datasets.pass_threshold`."""

    @model_validator(mode="after")
    def _entries_fit_together(self):
        if not self.weights and self.difficulty is None:
            raise ValueError("expected weights or difficulty; without both, remove the section")
        if self.source_key is not None and not self.weights:
            raise ValueError("source_key names the sources of `weights`, which is empty")
        starts = [entry.from_iteration for entry in self.weights]
        if starts and (starts[0] != 0 or any(later <= one for one, later in pairwise(starts))):
            raise ValueError(
                f"weights: expected entries from iteration 0 on, in order; found {starts}"
            )
        for entry in self.weights:
            if entry.weights.keys() != self.weights[0].weights.keys():
                raise ValueError(
                    "weights: each entry needs all sources; found "
                    f"{sorted(self.weights[0].weights)}, and from iteration "
                    f"{entry.from_iteration} {sorted(entry.weights)}"
                )
        return self

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the sources, sorted; empty if sources do not decide."""
        return tuple(sorted(self.weights[0].weights)) if self.weights else ()

    def weights_at(self, iteration: int) -> dict[str, float]:
        """Return the weights of an iteration; {} if sources do not decide."""
        begun = [entry for entry in self.weights if entry.from_iteration <= iteration]
        if not begun:
            return {}
        entry = begun[-1]
        if self.between == "constant" or len(begun) == len(self.weights):
            return entry.weights
        following = self.weights[len(begun)]
        passed = iteration - entry.from_iteration
        share = passed / (following.from_iteration - entry.from_iteration)
        return {
            source: weight + share * (following.weights[source] - weight)
            for source, weight in entry.weights.items()
        }


def source_of_path(path: str) -> str:
    """Return the source of the rows of a file: its name without folders, extension and slice."""
    return PurePosixPath(path.partition("@[")[0]).stem


def curriculum_conflict(config: RunConfig) -> str | None:
    """Describe the settings that a curriculum cannot be used with; None if they fit."""
    curriculum = config.data.curriculum
    if curriculum is None:
        return None
    paths = getattr(config.data.prompts, "paths", None)
    by_file = bool(curriculum.weights) and curriculum.source_key is None
    difficulty = curriculum.difficulty is not None
    conflicts = {
        "data.curriculum: rollout.data_source_path draws the rows itself; remove one of them": (
            config.rollout.data_source_path is not None
        ),
        "data.curriculum: data.slime_position continues slime's order; remove one of them": (
            config.data.slime_position is not None
        ),
        "data.curriculum.source_key is needed: only prompts of type file have files that name the "
        "sources": by_file and paths is None,
        "data.curriculum.difficulty needs pass rates; rollout.type: dataset samples nothing": (
            difficulty and config.rollout.type == "dataset"
        ),
        "data.curriculum.difficulty needs pass rates; reward.function.type: none gives no "
        "rewards": difficulty and config.reward.function.type == "none",
        "data.curriculum.difficulty counts committed visits; debug.debug_rollout_only commits "
        "nothing": difficulty and config.debug.debug_rollout_only,
    }
    if found := next((text for text, conflict in conflicts.items() if conflict), None):
        return found
    if by_file:
        files = {path.partition("@[")[0] for path in paths or ()}
        names = {source_of_path(path) for path in files}
        if len(names) < len(files):
            return (
                "data.curriculum.source_key is needed: the files of data.prompts.paths have equal "
                f"names, and names are the sources; found {sorted(files)}"
            )
    return None
