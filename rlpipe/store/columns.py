"""Every column of every table: the single list from which all others are made.

A `Column` says name, Arrow type, shape, unit, writer and meaning. From these rows come the Arrow
schemas and Parquet encodings (`rlpipe.store.parquet.schema`), the columns of a batch
(`rlpipe.batch.columns`), the names under which hooks see a column (`hook_names`), the tables of SQL
queries (`rlpipe.store.tables`) and the reference `COLUMNS.md` (`python -m tools.column_reference`).

SAMPLES, REWARDS and BATCH are stored. Their columns are never renamed or retyped, and a new one is
nullable: stores of earlier releases stay readable. `rlpipe.store.tables.derived` has the tables
that are computed from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import pyarrow as pa

from rlpipe.types import Stage

KIND = b"rlpipe"
"""Key of the schema metadata that names the table and its version."""


class Shape(StrEnum):
    """How many values a column has in one row."""

    VALUE = "one value"
    PROMPT = "one value per prompt token"
    RESPONSE = "one value per response token"
    TOKENS = "one value per token of prompt and response"
    EXPERTS = "W values per token of prompt and response"
    RUNS = "one value per run of tokens with the same weight version"
    NAMED = "one value per name"


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    name: str
    type: pa.DataType
    meaning: str
    written_by: str
    """Stage that writes the column, or "query" for columns that are computed from stored ones."""
    shape: Shape = Shape.VALUE
    unit: str = ""
    nullable: bool = False
    hook: str | None = None
    """slime's name of the column in the batch that hooks get; None: the same name, or no hook."""
    dictionary: bool = False
    """Encode as a Parquet dictionary: few different values."""
    statistics: bool = False
    """Write minimum and maximum: readers filter by this column."""
    optional: bool = False
    """Leave the column out of a file in which every row is null."""

    @property
    def field(self) -> pa.Field:
        """The column as an Arrow field."""
        return pa.field(self.name, self.type, nullable=self.nullable)

    @property
    def leaves(self) -> list[str]:
        """Paths of the column's values inside Parquet; of a map only the keys."""
        if pa.types.is_map(self.type):
            return [f"{self.name}.key_value.key"]
        if not (pa.types.is_list(self.type) or pa.types.is_large_list(self.type)):
            return [self.name]
        element = f"{self.name}.list.element"
        if pa.types.is_struct(self.type.value_type):
            return [f"{element}.{part.name}" for part in self.type.value_type]
        return [element]


@dataclass(frozen=True)
class Table:
    """The columns of one kind of table."""

    name: str
    version: int
    meaning: str
    columns: tuple[Column, ...]
    derived: bool = False
    """Computed from stored tables. Every column may be null."""

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema. Its metadata has the name and version of the table."""
        fields = [column.field for column in self.columns]
        if self.derived:
            fields = [field.with_nullable(True) for field in fields]
        return pa.schema(fields, metadata={KIND: f"{self.name}/{self.version}".encode()})

    def named(self, shape: Shape) -> tuple[str, ...]:
        """Return the names of the columns of one shape, in order."""
        return tuple(column.name for column in self.columns if column.shape is shape)


def list_of(kind: pa.DataType) -> pa.DataType:
    """Return the type of a list whose elements are never null."""
    return pa.list_(pa.field("element", kind, nullable=False))


def large_list_of(kind: pa.DataType) -> pa.DataType:
    """Return the type of a list for tables with more than 2^31 elements in all."""
    return pa.large_list(pa.field("element", kind, nullable=False))


INT32 = pa.int32()
INT64 = pa.int64()
FLOAT32 = pa.float32()
FLOAT64 = pa.float64()
TEXT = pa.string()
BOOL = pa.bool_()
TOKEN_IDS = list_of(pa.int32())
LOG_PROBS = list_of(pa.float32())
MASK = list_of(pa.uint8())
EXPERTS = large_list_of(pa.uint16())
VERSION_RUN = pa.struct(
    [pa.field("tokens", INT32, nullable=False), pa.field("version", INT32, nullable=False)]
)
IMAGES = list_of(
    pa.struct(
        [
            pa.field("sha256", TEXT, nullable=False),
            pa.field("rows", INT32, nullable=False),
            pa.field("columns", INT32, nullable=False),
        ]
    )
)
PARTS = pa.map_(TEXT, pa.field("value", FLOAT64, nullable=False))

NATS = "nats"
SECONDS = "s"
EPOCH_SECONDS = "s since 1970"

ROLLOUT = Stage.ROLLOUT.value
REWARD = Stage.REWARD.value
ADVANTAGE = Stage.ADVANTAGE.value
QUERY = "query"

GROUP_ID = Column(
    "group_id",
    TEXT,
    "Group of the sample: `run:number`, the same in every table and every iteration.",
    ROLLOUT,
    dictionary=True,
    statistics=True,
)
INDEX = Column(
    "index", INT32, "Number of the sample in its group, from 0.", ROLLOUT, statistics=True
)
BEHAVIOUR_LOG_PROBS = Column(
    "rollout_log_probs",
    LOG_PROBS,
    "Behaviour log-probs: the engine's, when it sampled the token. Null in supervised rows.",
    ROLLOUT,
    Shape.RESPONSE,
    NATS,
    nullable=True,
)
IMAGE_REFERENCES = (
    "Images of the prompt, in the order of their tokens: sha256 of the file `images/<sha256>`, and "
    "rows and columns of patches. Null: no image in the file."
)
ROUTED_EXPERTS = "W = layers with experts × experts a token; 65535 where no engine read the token."

SAMPLES = Table(
    "samples",
    2,
    "Every sample of a rollout or an evaluation, trained or not.",
    (
        Column(
            "iteration",
            INT64,
            "Iteration that sampled the row. A buffered group is trained in a later one.",
            ROLLOUT,
            dictionary=True,
            statistics=True,
        ),
        GROUP_ID,
        INDEX,
        Column("prompt", TEXT, "Text or messages, as JSON.", ROLLOUT, dictionary=True),
        Column("prompt_ids", TOKEN_IDS, "Token ids of the prompt.", ROLLOUT, Shape.PROMPT),
        Column("label", TEXT, "Label of the prompt.", ROLLOUT, nullable=True, dictionary=True),
        Column("metadata", TEXT, "Metadata of the prompt, as JSON.", ROLLOUT, dictionary=True),
        Column("seed", INT64, "Seed of the sample.", ROLLOUT),
        Column("response", TEXT, "Text of the response.", ROLLOUT),
        Column(
            "response_ids",
            TOKEN_IDS,
            "Token ids of the response, tool output included.",
            ROLLOUT,
            Shape.RESPONSE,
        ),
        BEHAVIOUR_LOG_PROBS,
        Column(
            "loss_mask",
            MASK,
            "1 where the token counts in the loss, else 0. Null: every token counts.",
            ROLLOUT,
            Shape.RESPONSE,
            nullable=True,
            dictionary=True,
        ),
        Column(
            "weight_versions",
            list_of(VERSION_RUN),
            "Run lengths (tokens, version) of the weight versions that sampled the response.",
            ROLLOUT,
            Shape.RUNS,
            dictionary=True,
        ),
        Column(
            "status",
            TEXT,
            "completed, truncated, aborted, failed or pending.",
            ROLLOUT,
            dictionary=True,
            statistics=True,
        ),
        Column("finish_reason", TEXT, "SGLang's reason.", ROLLOUT, dictionary=True),
        Column("error", TEXT, "Error of the sample.", ROLLOUT, nullable=True, dictionary=True),
        Column(
            "reward",
            FLOAT64,
            "Reward, where the rollout or the evaluation scored the sample itself.",
            ROLLOUT,
            nullable=True,
            statistics=True,
        ),
        Column("reward_parts", PARTS, "Named parts.", ROLLOUT, Shape.NAMED, dictionary=True),
        Column("engine", TEXT, "URL of the engine.", ROLLOUT, dictionary=True),
        Column("t_start_s", FLOAT64, "Start of sampling.", ROLLOUT, unit=EPOCH_SECONDS),
        Column("t_end_s", FLOAT64, "End of sampling.", ROLLOUT, unit=EPOCH_SECONDS),
        Column(
            "drop_reason",
            TEXT,
            "Null in shards: the group is judged later, and its commit names the reason.",
            ROLLOUT,
            nullable=True,
            dictionary=True,
            statistics=True,
        ),
        Column(
            "rollout_id",
            INT32,
            "Number, within the group, of the rollout that made the sample; samples that one "
            "rollout fanned out into share it. Null: `index`.",
            ROLLOUT,
            nullable=True,
        ),
        Column(
            "remove_sample",
            BOOL,
            "True: no token counts in the loss; the reward counts in the group. Null: false.",
            ROLLOUT,
            nullable=True,
        ),
        Column(
            "non_generation_time",
            FLOAT64,
            "Time of the rollout that tools took. Null: 0.",
            ROLLOUT,
            unit=SECONDS,
            nullable=True,
        ),
        Column("num_turns", INT32, "Responses of the policy. Null: 1.", ROLLOUT, nullable=True),
        Column(
            "rollout_routed_experts",
            EXPERTS,
            "Experts to which the engine routed each token. Null: not recorded. " + ROUTED_EXPERTS,
            ROLLOUT,
            Shape.EXPERTS,
            nullable=True,
            dictionary=True,
        ),
        Column(
            "teacher_log_probs",
            LOG_PROBS,
            "Log-probs of the teacher that the sample brought (`teacher.opd_type: samples`).",
            ROLLOUT,
            Shape.RESPONSE,
            NATS,
            nullable=True,
        ),
        Column(
            "prompt_tokens",
            INT32,
            "Tokens of the prompt. Null: not counted, version 1.",
            ROLLOUT,
            nullable=True,
        ),
        Column(
            "response_tokens",
            INT32,
            "Tokens of the response. Null: not counted, version 1.",
            ROLLOUT,
            nullable=True,
        ),
        Column(
            "images",
            IMAGES,
            IMAGE_REFERENCES,
            ROLLOUT,
            nullable=True,
            dictionary=True,
            optional=True,
        ),
    ),
)

REWARDS = Table(
    "rewards",
    1,
    "One row for each sample that was scored: a reward or an error.",
    (
        GROUP_ID,
        INDEX,
        Column(
            "reward", FLOAT64, "Reward. Null: see `error`.", REWARD, nullable=True, statistics=True
        ),
        Column("parts", PARTS, "Named parts of the reward.", REWARD, Shape.NAMED, dictionary=True),
        Column("error", TEXT, "Error of the verifier.", REWARD, nullable=True, dictionary=True),
    ),
)

BATCH = Table(
    "batch",
    3,
    "All that an iteration trains on. A nullable column is null in all rows or in none.",
    (
        GROUP_ID,
        INDEX,
        Column("tokens", TOKEN_IDS, "Token ids of prompt and response.", ADVANTAGE, Shape.TOKENS),
        Column("prompt_len", INT32, "Tokens of the prompt.", ADVANTAGE, dictionary=True),
        Column(
            "rollout",
            INT64,
            "Number, within the batch, of the sample's rollout. Samples with equal numbers share "
            "one denominator in the loss. Null: each sample its own.",
            ADVANTAGE,
            nullable=True,
        ),
        Column(
            "loss_mask",
            MASK,
            "1 where the token counts in the loss, else 0. Stale tokens that are masked are 0.",
            ADVANTAGE,
            Shape.RESPONSE,
            dictionary=True,
        ),
        BEHAVIOUR_LOG_PROBS,
        Column(
            "proximal_log_probs",
            LOG_PROBS,
            "Proximal log-probs: the trainer's, before the iteration's first optimizer step.",
            ADVANTAGE,
            Shape.RESPONSE,
            NATS,
            nullable=True,
            hook="log_probs",
        ),
        Column(
            "reference_log_probs",
            LOG_PROBS,
            "Log-probs of the reference policy.",
            ADVANTAGE,
            Shape.RESPONSE,
            NATS,
            nullable=True,
            hook="ref_log_probs",
        ),
        Column(
            "teacher_log_probs",
            LOG_PROBS,
            "Log-probs of the teacher of on-policy distillation.",
            ADVANTAGE,
            Shape.RESPONSE,
            NATS,
            nullable=True,
        ),
        Column(
            "advantages",
            LOG_PROBS,
            "Weight of the token in the policy loss.",
            ADVANTAGE,
            Shape.RESPONSE,
            nullable=True,
        ),
        Column(
            "values",
            LOG_PROBS,
            "The critic's value of the state before the token, before the first optimizer step.",
            ADVANTAGE,
            Shape.RESPONSE,
            nullable=True,
        ),
        Column(
            "returns", LOG_PROBS, "Target of the critic.", ADVANTAGE, Shape.RESPONSE, nullable=True
        ),
        Column(
            "routed_experts",
            EXPERTS,
            "Experts that the optimizer steps replay. " + ROUTED_EXPERTS,
            ADVANTAGE,
            Shape.EXPERTS,
            nullable=True,
            dictionary=True,
        ),
        Column(
            "response_len",
            INT32,
            "Tokens of the response. Null: not counted, version 2.",
            ADVANTAGE,
            nullable=True,
        ),
        Column(
            "loss_tokens",
            INT32,
            "Tokens of the response that count in the loss. Null: not counted, version 2.",
            ADVANTAGE,
            nullable=True,
        ),
        Column(
            "row",
            INT32,
            "Number of the sample in the batch, by group id and index, from 0. Packing plans have "
            "these numbers. Null: the number of the row in the file.",
            ADVANTAGE,
            nullable=True,
        ),
        Column(
            "images",
            IMAGES,
            IMAGE_REFERENCES,
            ADVANTAGE,
            nullable=True,
            dictionary=True,
            optional=True,
        ),
    ),
)

STORED = (SAMPLES, REWARDS, BATCH)
"""Tables that are Parquet files of the store."""
EARLIER = {b"samples/1": SAMPLES, b"batch/2": BATCH}
"""Kinds of earlier releases, and the tables that they are read as: they lack nullable columns."""


def hook_names() -> dict[str, str]:
    """Return, for each response column of a batch but the mask, its name in a hook's batch.

    Hooks of training see the batch under slime's names: the proximal log-probs are `log_probs`.
    """
    columns = (column for column in BATCH.columns if column.shape is Shape.RESPONSE)
    return {
        column.name: column.hook or column.name for column in columns if column.name != "loss_mask"
    }
