"""Questions in SQL over a branch, answered by DuckDB.

    samples    one row a sample, without its tokens (`scalar_rows.SAMPLES`)
    metrics    one row a metric of an iteration (`scalar_rows.METRICS`)
    commits    one row an iteration: who committed what, when, with which packages
    texts      the samples as they were stored: prompt, response, tokens, log-probs (`schema.SAMPLES`), with `branch`
    batch      the rows that were trained (`schema.BATCH`), with `branch` and `iteration`

The last two are read from the shards if a question names them, checksums and rules included;
`iterations` keeps that small.

Not here: questions that are asked of every run (`anomalies`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import duckdb
import pyarrow as pa

from rlpipe.errors import ConfigError
from rlpipe.store import columns
from rlpipe.store.branches import Branches
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.store.parquet.rows import EXPERTS
from rlpipe.store.parquet.schema import BATCH, SAMPLES
from rlpipe.store.parquet.shards import read_rows
from rlpipe.store.tables import scalars
from rlpipe.types import Commit, Stage

READERS = 8
SETTINGS = "SET enable_external_access = false; SET lock_configuration = true"
"""A question reads these tables, and nothing else of the machine."""
COMMITS = columns.COMMITS.schema


def ask(files: Files, branch: str, question: str, iterations: range | None = None) -> pa.Table:
    """The answer to a question in SQL. `iterations` bounds every table.

    Raises: ConfigError if DuckDB refuses it; ObjectMissing if there is no such branch;
    ObjectCorrupt.
    """
    commits = [
        commit
        for commit in Branches(files).walk(branch)
        if iterations is None or commit.iteration in iterations
    ][::-1]
    made: dict[str, Callable[[], pa.Table]] = {
        "samples": lambda: _within(scalars.read(files, branch), iterations),
        "metrics": lambda: _within(scalars.read(files, branch, "metrics"), iterations),
        "commits": lambda: _commits(commits),
        "texts": lambda: _rows(
            files, commits, Stage.ROLLOUT, [name for name in SAMPLES.names if name != EXPERTS]
        ),
        "batch": lambda: _rows(
            files,
            commits,
            Stage.ADVANTAGE,
            [name for name in BATCH.names if name != "routed_experts"],
        ),
    }
    named = {word.lower() for word in re.findall(r"\w+", question)}
    with duckdb.connect(":memory:", config={"python_enable_replacements": "false"}) as connection:
        for name in made.keys() & named:
            connection.register(name, made[name]())
        connection.execute(SETTINGS)
        expected = f"one query over {', '.join(made)}"
        try:
            answer = connection.sql(question)
            if answer is None:
                raise ConfigError(
                    "this asks for nothing", where="sql", found=question, expected=expected
                )
            return answer.to_arrow_table()
        except duckdb.Error as error:
            raise ConfigError(
                "not a question that can be answered", where="sql", found=error, expected=expected
            ) from error


def _within(table: pa.Table, iterations: range | None) -> pa.Table:
    if iterations is None:
        return table
    return table.filter(
        pa.array([k in iterations for k in table["iteration"].to_pylist()], pa.bool_())
    )


def _commits(commits: Sequence[Commit]) -> pa.Table:
    rows = [
        {
            **{
                name: getattr(commit, name)
                for name in ("branch", "iteration", "created", "epoch", "attempt", "config_digest")
            },
            "groups_trained": len(commit.trained),
            "groups_dropped": len(commit.dropped),
            "groups_buffered": len(commit.data.buffer),
            "packages": list(commit.packages.items()),
        }
        for commit in commits
    ]
    return pa.Table.from_pylist(rows, schema=COMMITS)


def _rows(
    files: Files, commits: Sequence[Commit], stage: Stage, columns: Sequence[str]
) -> pa.Table:
    with ThreadPoolExecutor(READERS) as pool:
        tables = list(pool.map(lambda commit: _of(files, commit, stage, columns), commits))
    schema = SAMPLES if stage is Stage.ROLLOUT else BATCH
    fields = [pa.field("branch", pa.string()), pa.field("iteration", pa.int64())]
    empty = pa.schema(
        [*fields, *(schema.field(name) for name in columns if name != "iteration")]
    ).empty_table()
    return pa.concat_tables([empty, *(table for table in tables if table is not None)])


def _of(files: Files, commit: Commit, stage: Stage, columns: Sequence[str]) -> pa.Table | None:
    if (
        stage not in commit.nodes
        or not (node := Nodes(files).get(stage, commit.nodes[stage])).files
    ):
        return None
    table = read_rows(
        files, node.files, [name for name in columns if name != "iteration"]
    ).replace_schema_metadata(None)
    table = table.add_column(
        0, "iteration", pa.array([commit.iteration] * table.num_rows, pa.int64())
    )
    return table.add_column(0, "branch", pa.array([commit.branch] * table.num_rows, pa.string()))
