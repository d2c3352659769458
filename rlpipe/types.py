"""The records that move between stages: samples and plans (bulk), nodes and commits (handles).

`Sample` is a plain mutable dataclass, because hooks write into it and thousands are made a second. What is read back from
the store (`Plan`, `Node`, `Commit`) is a frozen pydantic model, because its bytes may come from anywhere.

Not here: how any of them is laid out in Parquet (`store.schema`) or found by name (`store.nodes`, `store.branches`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

Message = dict[str, Any]
Prompt = str | list[Message]


class Stage(StrEnum):
    """The stages of the DAG, and what stands beside them: first weights, evaluations, states that a replay made anew."""

    INIT = "init"
    ROLLOUT = "rollout"
    REWARD = "reward"
    ADVANTAGE = "advantage"
    TRAIN = "train"
    SYNC = "sync"
    CHECKPOINT = "checkpoint"
    EVAL = "eval"
    SEGMENT = "segment"


class Status(StrEnum):
    """What became of one sample's generation."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(slots=True)
class Sample:
    """One prompt with one response.

    `response_ids`, `rollout_log_probs` and `loss_mask` have the same length. `loss_mask` None means all ones;
    `rollout_log_probs` None means that nothing was sampled (supervised rows). `weight_versions` are run lengths
    `(tokens, version)` that add up to the response. `t_start_s`, `t_end_s` are seconds since the epoch.
    """

    group_id: str
    index: int
    prompt: Prompt
    prompt_ids: list[int]
    label: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    response: str = ""
    response_ids: list[int] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[tuple[int, int]] = field(default_factory=list)
    status: Status = Status.PENDING
    finish_reason: str = ""
    error: str | None = None
    reward: float | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)
    engine: str = ""
    t_start_s: float = 0.0
    t_end_s: float = 0.0

    @property
    def truncated(self) -> bool:
        return self.status is Status.TRUNCATED

    @property
    def aborted(self) -> bool:
        return self.status is Status.ABORTED

    @property
    def oldest_weight_version(self) -> int | None:
        return min((version for _, version in self.weight_versions), default=None)


class Record(BaseModel):
    """Base of everything that is stored as JSON: frozen, and a key that is not known is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class PlannedGroup(Record):
    """One draw of a prompt, before anything is sampled: the same ids and seeds come out of every retry."""

    group_id: str
    prompt: Prompt
    prompt_ids: tuple[int, ...]
    label: str | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    seeds: tuple[int, ...]
    response_ids: tuple[int, ...] = ()
    """Supervised rows only: the response that is given rather than sampled."""
    loss_mask: tuple[int, ...] = ()
    """Supervised rows only: 1 where a response token counts in the loss."""
    earlier: str | None = None
    """Of a group from the buffer: digest of the plan below which its rows so far lie. None: sample it from the start."""


class BufferedGroup(Record):
    """A group that was drawn and is neither trained nor dropped yet."""

    group_id: str
    plan: str
    """Digest of the plan that has its prompt and seeds."""
    rows: str | None = None
    """Digest of the plan below which its rows (finished, or cut off) lie; None if nothing of it was sampled."""
    oldest: int | None = None
    """Oldest weight version among the tokens of those rows."""
    finished: int | None = None
    """Newest weight version among them, if every sample is finished; None: some go on."""


class DataState(Record):
    """Where the data source stands: the next draw, and the groups that wait in the buffer, oldest first."""

    epoch: int = 0
    offset: int = 0
    """Rows of this epoch already drawn."""
    draws: int = 0
    """Groups ever drawn along the branch; the next group id."""
    buffer: tuple[BufferedGroup, ...] = ()


class Plan(Record):
    """What iteration k will sample, written before the first request. Where that turns out too few, part 1 follows part 0."""

    branch: str
    iteration: int
    part: int = 0
    groups: tuple[PlannedGroup, ...]
    before: DataState
    after: DataState


class FileRecord(Record):
    """One data file of a node. `path` is relative to the store's root."""

    path: str
    size_bytes: int
    sha256: str
    rows: int | None = None


class Node(Record):
    """The immutable result of one stage, found by the digest of its inputs."""

    format: int = 1
    stage: Stage
    digest: str
    parents: dict[str, str] = Field(default_factory=dict)
    """Role → input digest of the node (or plan) that was read."""
    config: dict[str, Any] = Field(default_factory=dict)
    hooks: dict[str, str] = Field(default_factory=dict)
    """Hook path → sha256 of its source."""
    files: tuple[FileRecord, ...] = ()
    outputs: dict[str, Any] = Field(default_factory=dict)
    attempt: str = ""
    created: str = ""


class NodeRef(Record):
    """The handle that crosses a task boundary."""

    stage: Stage
    digest: str
    reused: bool = False
    outputs: dict[str, Any] = Field(default_factory=dict)


class Commit(Record):
    """Iteration k of a branch: the nodes it is made of, the groups it consumed, where the data source stands after it."""

    format: int = 1
    branch: str
    iteration: int
    parent: str | None = None
    """`branch/%08d` of the commit before; None for the first of a root branch."""
    plans: tuple[str, ...]
    """Digests of the parts of its plan, in order."""
    nodes: dict[Stage, str]
    trained: tuple[str, ...] = ()
    """Group ids trained in this iteration."""
    dropped: dict[str, str] = Field(default_factory=dict)
    """Group id → reason, for groups that will never be trained."""
    data: DataState
    config_digest: str
    packages: dict[str, str] = Field(default_factory=dict)
    epoch: int = 0
    attempt: str = ""
    created: str = ""


class WeightVersion(Record):
    """Which weights: number of iterations trained on the branch, and the digest of the state they are part of."""

    branch: str
    version: int
    digest: str

    def stamp(self) -> str:
        """What an engine is told, and echoes with every response."""
        return f"{self.branch}@{self.version}@{self.digest[:16]}"

    @staticmethod
    def version_of(stamp: str) -> int:
        """The version inside a stamp. Raises: ValueError if it is not one of ours."""
        branch, version, digest = stamp.rsplit("@", 2)
        if not branch or not digest:
            raise ValueError(f"not a weight version stamp: {stamp!r}")
        return int(version)
