"""Columns of the tables that SQL queries see and that are computed from stored ones.

They may change: no store depends on them.
"""

from __future__ import annotations

import pyarrow as pa

from rlpipe.store.columns import (
    BOOL,
    EPOCH_SECONDS,
    FLOAT32,
    FLOAT64,
    GROUP_ID,
    INDEX,
    INT32,
    INT64,
    NATS,
    PARTS,
    QUERY,
    REWARD,
    ROLLOUT,
    SECONDS,
    TEXT,
    Column,
    Shape,
    Table,
)

BRANCH = Column("branch", TEXT, "Run that committed the iteration.", QUERY)
ITERATION = Column("iteration", INT64, "Iteration of the commit.", QUERY)

SAMPLE_SCALARS = Table(
    "scalars.samples",
    1,
    "SQL table `samples`: one row per sample, without its tokens.",
    (
        BRANCH,
        ITERATION,
        GROUP_ID,
        INDEX,
        Column("prompt", TEXT, "First 16 hex digits of the prompt's sha256.", QUERY),
        Column("status", TEXT, "As in the stored samples.", ROLLOUT),
        Column("finish_reason", TEXT, "As in the stored samples.", ROLLOUT),
        Column("error", TEXT, "Error of sampling, else of the verifier.", QUERY, nullable=True),
        Column("reward", FLOAT64, "Reward. Null: not scored, or an error.", REWARD, nullable=True),
        Column("reward_parts", PARTS, "Named parts of the reward.", REWARD, Shape.NAMED),
        Column("prompt_tokens", INT32, "Tokens of the prompt.", QUERY, unit="tokens"),
        Column("response_tokens", INT32, "Tokens of the response.", QUERY, unit="tokens"),
        Column("num_turns", INT32, "As in the stored samples.", ROLLOUT, nullable=True),
        Column("accepted", BOOL, "True if the rollout accepted the group.", QUERY),
        Column("trained", BOOL, "True if this iteration trained the group.", QUERY),
        Column("drop_reason", TEXT, "Reason why the group was dropped.", QUERY, nullable=True),
        Column(
            "advantage",
            FLOAT32,
            "Mean over the tokens that count. Null: not trained.",
            QUERY,
            nullable=True,
        ),
        Column(
            "logprob_difference",
            FLOAT32,
            "Mean absolute difference of behaviour and proximal log-probs, tokens that count.",
            QUERY,
            unit=NATS,
            nullable=True,
        ),
        Column(
            "logprob_difference_max",
            FLOAT32,
            "The largest of these differences.",
            QUERY,
            unit=NATS,
            nullable=True,
        ),
        Column(
            "oldest_version", INT32, "Oldest weight version that sampled.", QUERY, nullable=True
        ),
        Column(
            "newest_version", INT32, "Newest weight version that sampled.", QUERY, nullable=True
        ),
        Column(
            "staleness",
            INT32,
            "Weight version trained minus `oldest_version`.",
            QUERY,
            unit="versions",
            nullable=True,
        ),
        Column("engine", TEXT, "URL of the engine.", ROLLOUT),
        Column("started", FLOAT64, "Start of sampling.", QUERY, unit=EPOCH_SECONDS),
        Column("seconds", FLOAT64, "Time of sampling.", QUERY, unit=SECONDS),
    ),
    derived=True,
)

METRICS = Table(
    "scalars.metrics",
    1,
    "SQL table `metrics`: one row per metric and iteration.",
    (
        BRANCH,
        ITERATION,
        Column("name", TEXT, "Metric of a stage, or `perf/<stage>_time` in seconds.", QUERY),
        Column("value", FLOAT64, "Its value.", QUERY),
    ),
    derived=True,
)

COMMITS = Table(
    "commits",
    1,
    "SQL table `commits`: one row per iteration.",
    (
        BRANCH,
        ITERATION,
        Column("created", TEXT, "Time of the commit, UTC.", QUERY),
        Column("epoch", INT64, "Epoch of the driver that committed.", QUERY),
        Column("attempt", TEXT, "Attempt that committed.", QUERY),
        Column("groups_trained", INT64, "Groups that the iteration trained.", QUERY),
        Column("groups_dropped", INT64, "Groups that the iteration dropped.", QUERY),
        Column("groups_buffered", INT64, "Groups in the buffer afterwards.", QUERY),
        Column("config_digest", TEXT, "sha256 of the run's configuration.", QUERY),
        Column("packages", pa.map_(TEXT, TEXT), "Versions of packages.", QUERY, Shape.NAMED),
    ),
    derived=True,
)

DERIVED = (SAMPLE_SCALARS, METRICS, COMMITS)
"""Tables that SQL queries see and that are computed from the stored ones."""
