"""The records that move between stages, and the words of the project.

`Sample` is a mutable dataclass: hooks write into it, and thousands are made a second. `Plan`,
`Node` and `Commit` are frozen pydantic models. `rlpipe.store.columns` has the samples' columns.

The words, each with one meaning everywhere (rlpipe/store/README.md has the whole glossary):

    iteration            one run of the DAG, numbered from 0
    optimizer step       one parameter update; an iteration has one or more
    prompt, response     input tokens; the tokens after them, tool output included
    sample               prompt, response, behaviour log-probs and reward: one row
    group                all samples of one drawn prompt: the unit of exactly-once
    rollout              sampling of an iteration's groups
    plan                 prompts, group ids and seeds of a rollout, written before sampling
    buffer               groups that were drawn and are neither trained nor dropped yet
    batch                the samples that an iteration trains on
    loss mask            0 or 1 per response token: the token counts in the loss
    policy, reference    the trained model; its frozen copy for KL terms
    behaviour log-probs  `rollout_log_probs`: from the engine, when it sampled the token
    proximal log-probs   `proximal_log_probs`: from the trainer, before the first optimizer step
    weight version       number of iterations trained on the branch; the first weights are version 0
    staleness            weight version trained minus weight version that sampled the token
    trainer, rank        the Megatron processes of a run; one of them
    engine, router       an SGLang server; sglang-router before the engines
    generator, conductor Ray actors: one samples groups, the other orders calls to ranks and engines
    checkpoint           a stored state: weights, optimizer, schedule and random state
    node                 immutable result of a stage, named by the digest of its inputs
    input digest         sha256 of a stage's parents, settings, hooks and contract version
    commit               record of an iteration: its nodes, groups and cursor
    branch               the commits of a run; a fork begins at a commit of another branch
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field

Message = dict[str, Any]
Prompt = str | list[Message]
Image = tuple[str, int, int]
"""SHA-256 of a stored image file, and the rows and columns of patches that a model reads."""
RowDraw = tuple[int, str | None, str | None]
"""Number of a drawn row, its source, and its difficulty; None without sources or difficulties."""


class Stage(StrEnum):
    """Stages of the DAG, and the other kinds of nodes: first weights, evaluations, segments."""

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
    """Outcome of sampling one sample."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


STATUS_OF_REASON = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}
"""Finish reason of SGLang → status."""


@dataclass
class Sample:
    """One prompt with one response.

    `response_ids`, `rollout_log_probs` and `loss_mask` have the same length. `loss_mask` None means
    all ones; `rollout_log_probs` None means supervised. `weight_versions` are run lengths
    `(tokens, version)` that add up to the response. `t_start_s`, `t_end_s` are seconds since 1970.

    slime's names work as well. `tokens` is prompt + response, and `response_length` is the length
    of the response; set them in any order, or change `tokens` in place. `truncated` and `aborted`
    show and set the status. User attributes may be set; the store keeps the fields and `metadata`.

    Source: slime/utils/types.py. Differs: `index` counts within the group, and `weight_versions`
    are run lengths once a sample is a row (a generate function may append the engine's stamps).
    """

    group_id: str = ""
    index: int = 0
    prompt: Prompt = ""
    prompt_ids: list[int] = field(default_factory=list)
    images: list[Image] = field(default_factory=list)
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    response: str = ""
    response_ids: list[int] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: Any = field(default=None, compare=False)
    """[at most tokens - 1, layers × k] uint16: experts of each token. None: not recorded."""
    loss_mask: list[int] | None = None
    weight_versions: list[Any] = field(default_factory=list)
    status: Status = Status.PENDING
    finish_reason: str = ""
    error: str | None = None
    reward: Any = None
    """A number. A dict that a function sets becomes the reward and its parts."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    engine: str = ""
    t_start_s: float = 0.0
    t_end_s: float = 0.0
    rollout_id: int | None = None
    """Number, in the group, of the rollout; samples that fanned out share it. None: `index`."""
    remove_sample: bool = False
    """True: no token counts in the loss; the reward still counts in the group."""
    non_generation_time: float = 0.0
    """Seconds of the rollout that tools took."""
    num_turns: int = 1
    """Responses of the policy in the sample."""
    teacher_log_probs: list[float] | None = None
    """One per response token, for `teacher.opd_type: samples`."""
    session_id: str | None = None
    """Name of the rollout in the session URL. This field and the ones below are not stored."""
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
        """Token ids of prompt and response. Changes of the list change the sample."""
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
        """The last value set, as in slime also after `tokens` were replaced."""
        if self._declared_length is not None:
            return self._declared_length
        return len(self.response_ids) if self._length_before is None else self._length_before

    @response_length.setter
    def response_length(self, length: int) -> None:
        vars(self)["_declared_length"] = int(length)
        self._split([*self.prompt_ids, *self.response_ids], int(length))

    def settle_lengths(self) -> None:
        """Let `response_length` follow `response_ids` again.

        Raises: ValueError if it was set to more tokens than the sample has.
        """
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
        """Number of the group's draw in the run; None for a held-out group without a number."""
        number = self.group_id.rpartition(":")[2]
        return int(number) if number.isdigit() else None

    @property
    def effective_response_length(self) -> int:
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    @property
    def oldest_weight_version(self) -> int | None:
        """Oldest weight version that sampled a token; None if nothing was sampled."""
        return min((version for _, version in self.weight_versions), default=None)

    def get_reward_value(self, args: Any) -> Any:
        """Return the reward, or its entry `args.reward_key`."""
        key = getattr(args, "reward_key", None)
        return self.reward[key] if key and isinstance(self.reward, dict) else self.reward

    def update_from_meta_info(self, args: Any, meta_info: dict[str, Any]) -> None:
        """Set weight version and status from SGLang's `meta_info`, if its reason is known."""
        if stamp := meta_info.get("weight_version"):
            self.weight_versions.append(stamp)
        self.finish_reason = meta_info["finish_reason"]["type"]
        self.status = STATUS_OF_REASON.get(self.finish_reason, self.status)

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: Iterable[int] | None = None,
        log_probs: Iterable[float] | None = None,
        trainable: bool = True,
        meta_info: dict[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Append tokens of the policy (`trainable`, with log-probs) or of a tool (without).

        Raises: ValueError unless there is one log-prob per trainable token and none for others.
        """
        tokens = [int(token) for token in (() if tokens is None else tokens)]
        log_probs = [float(number) for number in (() if log_probs is None else log_probs)]
        if len(log_probs) != trainable * len(tokens):
            raise ValueError(f"{len(log_probs)} log-probs, expected one per trainable token")
        before = self.response_length
        self.response_length = before  # tokens set since then are the prompt's, as in slime
        self.settle_lengths()
        self.loss_mask = [1] * before if self.loss_mask is None else self.loss_mask
        self.loss_mask += [int(trainable)] * len(tokens)  # in place: functions keep the list
        log_probs = log_probs or [0.0] * len(tokens)
        self.rollout_log_probs = [*(self.rollout_log_probs or [0.0] * before), *log_probs]
        self.response_ids = [*self.response_ids, *tokens]
        self.response = self.response + (text or "")
        if update_terminal_info and meta_info and "finish_reason" in meta_info:
            self.update_from_meta_info(args, meta_info)

    def to_dict(self) -> dict[str, Any]:
        """Return all values of the sample, user attributes included."""
        return {
            **vars(self),
            "status": self.status.value,
            "tokens": [*self.tokens],
            "response_length": self.response_length,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Return the sample of a dict from `to_dict`, ours or slime's."""
        sample = cls()
        parts = ("prompt_ids", "response_ids")
        later = {name: value for name, value in values.items() if name not in parts}
        status = Status(later.pop("status", Status.PENDING))
        given = {"status": status, "tokens": later.pop("tokens", [])}
        for name, value in {**given, **later}.items():
            if name != "group_index":
                setattr(sample, name, value)
        sample.settle_lengths()
        return sample


class _Tokens(list[int]):
    """`Sample.tokens`: a list that writes its changes into the sample."""

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
"""Format of records. It changes if an older rlpipe could misread a record. A new key with a default
needs no new format: an older rlpipe refuses unknown keys.

1: before stages had contracts and commits named digests. `tools/migrate.py` makes it 2.
"""

CONTRACTS: dict[Stage, int] = dict.fromkeys(Stage, 1)
"""Newest contract version of each stage. A contract fixes the inputs of a stage and the result that
follows from them.

A version is raised when equal inputs would lead to another result: a loss is mended, a key gets
another meaning. A new key needs no new version (`rlpipe.config.introduced`). New runs begin with
the newest versions. An older run keeps the versions that its branch records;
`rlpipe.lineage.stage_inputs.SETTINGS` has the settings of each version.
"""


class Record(BaseModel):
    """Base of everything that is stored as JSON: frozen; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class VersionedRecord(Record):
    """Base of the records that are a file and name their format.

    Readers refuse an unknown format (`rlpipe.store.records.unseal`). A `Plan` has no format: the
    digest of its bytes is its name, and these bytes are older than this key.
    """

    format: int = RECORD_FORMAT


class PlannedGroup(Record):
    """One draw of a prompt, before sampling. Every retry uses the same ids and seeds."""

    group_id: str
    prompt: Prompt
    prompt_ids: tuple[int, ...]
    images: tuple[Image, ...] = Field(default=(), exclude_if=lambda images: not images)
    """Images of the prompt, in the order of their tokens. Not stored if empty."""
    label: str | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    seeds: tuple[int, ...]
    response_ids: tuple[int, ...] = ()
    """Supervised rows only: the response of the data set."""
    loss_mask: tuple[int, ...] = ()
    """Supervised rows only: 1 where a response token counts in the loss."""
    rejected_ids: tuple[int, ...] = Field(default=(), exclude_if=lambda ids: not ids)
    """Preference rows only: the rejected response. Not stored if empty, as in older plans."""
    row: RowDraw | None = Field(default=None, exclude_if=lambda row: row is None)
    """With `data.curriculum`: the row, and the pool that it was drawn from. None: not stored."""
    earlier: str | None = None
    """Buffered groups: digest of the plan with the rows so far. None: sample from the start."""


class BufferedGroup(Record):
    """A group that was drawn and is neither trained nor dropped yet."""

    group_id: str
    plan: str
    """Digest of the plan that has its prompt and seeds."""
    rows: str | None = None
    """Digest of the plan that has the rows, finished or cut off; None if nothing was sampled."""
    oldest: int | None = None
    """Oldest weight version of the tokens in these rows."""
    finished: int | None = None
    """Newest weight version of these tokens if every sample is finished; else None."""


class DataState(Record):
    """Cursor of the data source, and the groups in the buffer, oldest first."""

    epoch: int = 0
    offset: int = 0
    """Rows of this epoch that were drawn."""
    draws: int = 0
    """Groups drawn along the branch so far: the number of the next group id."""
    buffer: tuple[BufferedGroup, ...] = ()
    rows: str | None = Field(default=None, exclude_if=lambda rows: rows is None)
    """With `data.curriculum`: digest of the states of its rows. None: not stored."""


class Plan(Record):
    """Groups that iteration k samples, written before the first request.

    If the groups of part 0 turn out too few, part 1 follows.
    """

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
    """The immutable result of one stage, named by the digest of its inputs."""

    stage: Stage
    digest: str
    contract: int = 1
    """Version of the stage's contract (`CONTRACTS`)."""
    parents: dict[str, str] = Field(default_factory=dict)
    """Role → digest of the node or plan that the stage read."""
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
    """Iteration k of a branch: its nodes, the groups that it consumed, and the cursor after it.

    tasks/checkpoint.py builds it; `Branches.commit` adds the chain's keys (`rlpipe.store.chain`).
    """

    branch: str
    iteration: int
    parent: str | None = None
    """`branch/%08d` of the previous commit; None for the first commit of a root branch."""
    plans: tuple[str, ...]
    """Digests of the parts of the plan, in order."""
    nodes: dict[Stage, str]
    trained: tuple[str, ...] = ()
    """Group ids trained in this iteration."""
    dropped: dict[str, str] = Field(default_factory=dict)
    """Group id → reason, for groups that will never be trained."""
    data: DataState
    config_digest: str
    parent_sha256: str | None = None
    """sha256 of the parent commit's bytes. First commit of a root branch: of its configuration."""
    records: dict[str, str] = Field(default_factory=dict)
    """Path → sha256 of each record of this iteration that no earlier commit names."""
    leaves: dict[str, str] = Field(default_factory=dict)
    """Path → sha256 of the checkpoints and evaluations that were recorded by then."""
    awaited: tuple[str, ...] = ()
    """Paths of such records that were due but not stored yet; the next commit looks for them."""
    packages: dict[str, str] = Field(default_factory=dict)
    epoch: int = 0
    attempt: str = ""
    created: str = ""


class WeightVersion(Record):
    """Identity of weights: branch, number of iterations trained, and digest of the state."""

    branch: str
    version: int
    digest: str

    def stamp(self) -> str:
        """Return the stamp that an engine gets and returns with every response."""
        return f"{self.branch}@{self.version}@{self.digest[:16]}"

    @staticmethod
    def version_of(stamp: str) -> int:
        """Return the version of a stamp. Raises: ValueError if it is not a stamp of rlpipe."""
        branch, version, digest = stamp.rsplit("@", 2)
        if not branch or not digest:
            raise ValueError(f"not a weight version stamp: {stamp!r}")
        return int(version)
