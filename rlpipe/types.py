"""The records that move between stages: samples and plans (bulk), nodes and commits (handles).

`Sample` is a plain mutable dataclass, because hooks write into it and thousands are made a second.
What is read back from the store (`Plan`, `Node`, `Commit`) is a frozen pydantic model, because its
bytes may come from anywhere.

Not here: how any of them is laid out in Parquet (`store.parquet.schema`) or found by name
(`store.nodes`, `store.branches`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field

Message = dict[str, Any]
Prompt = str | list[Message]


class Stage(StrEnum):
    """The stages of the DAG, and what stands beside them: first weights, evaluations, states that a
    replay made anew."""

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


@dataclass
class Sample:
    """One prompt with one response, under our names and under slime's.

    `response_ids`, `rollout_log_probs` and `loss_mask` have the same length. `loss_mask` None means
    all ones; `rollout_log_probs` None means that nothing was sampled (supervised rows).
    `weight_versions` are run lengths `(tokens, version)` that add up to the response. `t_start_s`,
    `t_end_s` are seconds since the epoch.

    slime's names: `tokens` is prompt + response and `response_length` says where the response
    begins; set them in any order, or change `tokens` in place. `truncated` and `aborted` show and
    set the status. Attributes of your own may be set; what is stored are the fields, and
    `metadata`. Source: slime/utils/types.py. Differs: `index` counts within the group, and
    `weight_versions` are run lengths once a sample is a row (a generate function may append the
    engine's stamps as in slime).
    """

    group_id: str = ""
    index: int = 0
    prompt: Prompt = ""
    prompt_ids: list[int] = field(default_factory=list)
    label: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    response: str = ""
    response_ids: list[int] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: Any = field(default=None, compare=False)
    """[tokens - 1 or fewer, layers × k] uint16: experts the engine routed each token to
    (`rlpipe.store.routed_experts`). None: not known."""
    loss_mask: list[int] | None = None
    weight_versions: list[Any] = field(default_factory=list)
    status: Status = Status.PENDING
    finish_reason: str = ""
    error: str | None = None
    reward: Any = None
    """A number; a function that answers several may set a dict, which becomes the reward and its
    parts."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    engine: str = ""
    t_start_s: float = 0.0
    t_end_s: float = 0.0
    rollout_id: int | None = None
    """Number within its group of the rollout it came from: samples that one rollout fanned out into
    share it. None: `index`."""
    remove_sample: bool = False
    """No token of it counts in the loss; its reward still counts in its group."""
    non_generation_time: float = 0.0
    """Seconds of its rollout that went into tools and the like."""
    num_turns: int = 1
    """Responses of the policy in it."""

    teacher_log_probs: list[float] | None = None
    """With `teacher.opd_type: samples`: the teacher's, one for each response token."""
    session_id: str | None = None
    """Names the rollout in a URL; not stored, as all that follows. Of those only custom_rm_path is
    read; the rest is refused."""
    custom_rm_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    generate_function_path: str | None = None

    Status: ClassVar = Status
    _declared_length: ClassVar[int | None] = None
    _length_before: ClassVar[int | None] = None

    @property
    def tokens(self) -> list[int]:
        """Prompt and response; changes in place arrive in the sample."""
        return _Tokens(self)

    @tokens.setter
    def tokens(self, tokens: Sequence[int]) -> None:
        ids = list(tokens)
        prompt = len(self.prompt_ids)
        length = self._declared_length
        if length is None:
            vars(self).setdefault("_length_before", len(self.response_ids))
            length = len(ids) - prompt if ids[:prompt] == self.prompt_ids else 0
        self._split(ids, length)

    @property
    def response_length(self) -> int:
        """Tokens after the first prompt: as it was last set, as in slime also after `tokens` were
        set to others."""
        if self._declared_length is not None:
            return self._declared_length
        return len(self.response_ids) if self._length_before is None else self._length_before

    @response_length.setter
    def response_length(self, length: int) -> None:
        vars(self)["_declared_length"] = int(length)
        self._split([*self.prompt_ids, *self.response_ids], int(length))

    def settle_lengths(self) -> None:
        """`response_length` is that of `response_ids` from now on. Raises: ValueError if it was set
        to more than there is."""
        declared = vars(self).pop("_declared_length", None)
        vars(self).pop("_length_before", None)
        if declared is not None and declared != len(self.response_ids):
            raise ValueError(f"response_length {declared}, but {len(self.tokens)} tokens")

    def _split(self, ids: list[int], length: int) -> None:
        start = max(0, len(ids) - length)
        self.prompt_ids = ids[:start]
        self.response_ids = ids[start:]

    @property
    def truncated(self) -> bool:
        return self.status is Status.TRUNCATED

    @truncated.setter
    def truncated(self, truncated: bool) -> None:
        self._flag(Status.TRUNCATED, truncated)

    @property
    def aborted(self) -> bool:
        return self.status is Status.ABORTED

    @aborted.setter
    def aborted(self, aborted: bool) -> None:
        self._flag(Status.ABORTED, aborted)

    def _flag(self, status: Status, on: bool) -> None:
        if on:
            self.status = status
        elif self.status in (status, Status.PENDING):
            self.status = Status.COMPLETED

    @property
    def group_index(self) -> int | None:
        """Which draw of the run its group is; None for a held-out one without a number."""
        number = self.group_id.rpartition(":")[2]
        return int(number) if number.isdigit() else None

    @property
    def effective_response_length(self) -> int:
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    @property
    def oldest_weight_version(self) -> int | None:
        """Of the versions that sampled it."""
        return min((version for _, version in self.weight_versions), default=None)

    def get_reward_value(self, args: Any) -> Any:
        """The reward, or its entry `args.reward_key`."""
        key = getattr(args, "reward_key", None)
        return self.reward[key] if key and isinstance(self.reward, dict) else self.reward

    def update_from_meta_info(self, args: Any, meta_info: dict[str, Any]) -> None:
        """Take weight version and status from SGLang's `meta_info`."""
        if stamp := meta_info.get("weight_version"):
            self.weight_versions.append(stamp)
        reason = self.finish_reason = meta_info["finish_reason"]["type"]
        self.status = {"length": Status.TRUNCATED, "abort": Status.ABORTED}.get(
            reason, Status.COMPLETED
        )

    def append_response_tokens(
        self,
        args: Any,
        *,
        tokens: Sequence[int],
        log_probs: Sequence[float] | None = None,
        trainable: bool = True,
        meta_info: dict[str, Any] | None = None,
        text: str = "",
        update_terminal_info: bool = True,
    ) -> None:
        """Go on with tokens of the policy (`trainable`, which have log-probs) or of a tool (which
        have none).

        Raises: ValueError if there is not one log-prob per trainable token, or any for others.
        """
        if trainable and len(log_probs or ()) != len(tokens):
            raise ValueError(
                f"{len(tokens)} trainable tokens with {len(log_probs or ())} log-probs"
            )
        if not trainable and log_probs:
            raise ValueError("tokens that are not trainable have no log-probs")
        before = len(self.response_ids)
        self.loss_mask = [*(self.loss_mask or [1] * before), *([int(trainable)] * len(tokens))]
        self.rollout_log_probs = [
            *(self.rollout_log_probs or [0.0] * before),
            *(log_probs or [0.0] * len(tokens)),
        ]
        self.settle_lengths()
        self.response_ids = [*self.response_ids, *tokens]
        self.response = self.response + text
        if meta_info and update_terminal_info:
            self.update_from_meta_info(args, meta_info)

    def to_dict(self) -> dict[str, Any]:
        """Everything it holds; attributes of yours included."""
        return {
            **vars(self),
            "status": self.status.value,
            "tokens": [*self.tokens],
            "response_length": self.response_length,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The inverse of `to_dict`; also of slime's."""
        sample = cls()
        later = {
            name: value
            for name, value in values.items()
            if name not in ("prompt_ids", "response_ids")
        }
        given = {
            "status": Status(later.pop("status", Status.PENDING)),
            "tokens": later.pop("tokens", []),
        }
        for name, value in {**given, **later}.items():
            if name != "group_index":
                setattr(sample, name, value)
        sample.settle_lengths()
        return sample


class _Tokens(list[int]):
    """`Sample.tokens`: a list whose changes are the sample's too."""

    def __init__(self, sample: Sample) -> None:
        super().__init__([*sample.prompt_ids, *sample.response_ids])
        self._sample = sample

    def append(self, token: int, /) -> None:
        self.extend((token,))

    def extend(self, tokens: Iterable[int], /) -> None:
        super().extend(tokens)
        self._sample.tokens = self

    def __iadd__(self, tokens: Iterable[int], /) -> Self:
        self.extend(tokens)
        return self

    def __delitem__(self, key: Any, /) -> None:
        super().__delitem__(key)
        self._sample.tokens = self

    def __setitem__(self, key: Any, value: Any, /) -> None:
        super().__setitem__(key, value)
        self._sample.tokens = self

    def __reduce__(self) -> Any:
        return list, (list(self),)


RECORD_FORMAT = 2
"""How records are written. It changes when an older rlpipe could read a record and misunderstand
it.

1: before stages had contracts and commits named digests; nodes have other names. `tools/migrate.py`
makes a store of format 2 of such a store.
"""

CONTRACTS: dict[Stage, int] = dict.fromkeys(Stage, 1)
"""The newest contract of each stage: how its inputs are made and what its result is, given these
inputs.

A version is raised when equal inputs lead to another result than before: a defect of a loss is
mended, a key gets another meaning. A new key needs no version (`rlpipe.config.introduced`). New
runs begin with the newest versions. A run that was begun with older ones keeps them: its branch
says which, and `rlpipe.lineage.stage_inputs.SETTINGS` has the settings of each version.
"""


class Record(BaseModel):
    """Base of everything that is stored as JSON: frozen, and a key that is not known is an
    error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class VersionedRecord(Record):
    """Base of the records that have a file of their own and say in which format they are written.

    Readers refuse a format that they do not know (`rlpipe.store.records.unseal`). A `Plan` has
    none: the digest of a plan's bytes is its name, and those bytes are older than this key.
    """

    format: int = RECORD_FORMAT


class PlannedGroup(Record):
    """One draw of a prompt, before anything is sampled: the same ids and seeds come out of every
    retry."""

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
    """Of a group from the buffer: digest of the plan below which its rows so far lie. None: sample
    it from the start."""


class BufferedGroup(Record):
    """A group that was drawn and is neither trained nor dropped yet."""

    group_id: str
    plan: str
    """Digest of the plan that has its prompt and seeds."""
    rows: str | None = None
    """Digest of the plan below which its rows (finished, or cut off) lie; None if nothing of it was
    sampled."""
    oldest: int | None = None
    """Oldest weight version among the tokens of those rows."""
    finished: int | None = None
    """Newest weight version among them, if every sample is finished; None: some go on."""


class DataState(Record):
    """Where the data source stands: the next draw, and the groups that wait in the buffer, oldest
    first."""

    epoch: int = 0
    offset: int = 0
    """Rows of this epoch already drawn."""
    draws: int = 0
    """Groups ever drawn along the branch; the next group id."""
    buffer: tuple[BufferedGroup, ...] = ()


class Plan(Record):
    """What iteration k will sample, written before the first request. Where that turns out too few,
    part 1 follows part 0."""

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


class Node(VersionedRecord):
    """The immutable result of one stage, found by the digest of its inputs."""

    stage: Stage
    digest: str
    contract: int = 1
    """Version of the stage's contract (`CONTRACTS`)."""
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


class Commit(VersionedRecord):
    """Iteration k of a branch: the nodes it is made of, the groups it consumed, where the data
    source stands after it.

    `Branches.commit` fills in the keys of the chain (`rlpipe.store.chain`).
    """

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
    parent_sha256: str | None = None
    """sha256 of the parent commit's bytes; for the first commit of a root branch, of the branch's
    configuration record."""
    records: dict[str, str] = Field(default_factory=dict)
    """Path → sha256 of the bytes of each record that this iteration is made of and that no commit
    before it names."""
    leaves: dict[str, str] = Field(default_factory=dict)
    """Path → sha256 of records about weights (checkpoints, evaluations) that were in the store by
    then."""
    awaited: tuple[str, ...] = ()
    """Paths of such records that were due and not in the store yet. The next commit looks for
    them."""
    packages: dict[str, str] = Field(default_factory=dict)
    epoch: int = 0
    attempt: str = ""
    created: str = ""


class WeightVersion(Record):
    """Which weights: number of iterations trained on the branch, and the digest of the state they
    are part of."""

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
