"""SQL queries over a branch, run by DuckDB.

    samples    one row for each sample, without its tokens (`scalar_rows.SAMPLES`)
    metrics    one row for each metric of an iteration (`scalar_rows.METRICS`)
    commits    one row for each iteration: attempt, time, numbers of groups, packages
    texts      the stored samples with prompt, response, tokens and log-probs (`schema.SAMPLES`),
               and `branch`
    batch      the trained rows (`schema.BATCH`), with `branch` and `iteration`

`texts` and `batch` are read from the shards if a query names them, with all checks. `iterations`
limits that work.

Entry point: `run_query`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import duckdb
import pyarrow as pa

from rlpipe.errors import ConfigError
from rlpipe.store.branches import Branches
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.store.parquet.rows import EXPERTS
from rlpipe.store.parquet.schema import BATCH, SAMPLES
from rlpipe.store.parquet.shards import read_rows
from rlpipe.store.tables import derived, scalars
from rlpipe.types import Commit, Stage

READERS = 8
SETTINGS = "SET enable_external_access = false; SET lock_configuration = true"
"""A query reads these tables, and no file or address of the machine."""
COMMITS = derived.COMMITS.schema
TABLES = ("samples", "metrics", "commits", "texts", "batch")


def run_query(files: Files, branch: str, sql: str, iterations: range | None = None) -> pa.Table:
    """Return the result of a SQL query. `iterations` limits every table.

    Raises: ConfigError if DuckDB refuses the query; ObjectMissing if the branch does not exist;
    ObjectCorrupt.
    """
    commits = [
        commit
        for commit in Branches(files).walk(branch)
        if iterations is None or commit.iteration in iterations
    ][::-1]
    # Experts take most of the bytes of a row, and SQL can do little with them.
    texts = [name for name in SAMPLES.names if name != EXPERTS]
    batch = [name for name in BATCH.names if name != "routed_experts"]
    tables: dict[str, Callable[[], pa.Table]] = {
        "samples": lambda: _select_iterations(scalars.read(files, branch), iterations),
        "metrics": lambda: _select_iterations(scalars.read(files, branch, "metrics"), iterations),
        "commits": lambda: _commits(commits),
        "texts": lambda: _rows(files, commits, Stage.ROLLOUT, texts),
        "batch": lambda: _rows(files, commits, Stage.ADVANTAGE, batch),
    }
    words = {word.lower() for word in re.findall(r"\w+", sql)}
    with duckdb.connect(":memory:", config={"python_enable_replacements": "false"}) as connection:
        # Tables that the query does not mention are not read.
        for name in tables.keys() & words:
            connection.register(name, tables[name]())
        connection.execute(SETTINGS)
        try:
            answer = connection.sql(sql)
            if answer is None:
                raise ConfigError(
                    "the statement returns no rows",
                    where="sql",
                    found=sql,
                    expected=f"one query over {', '.join(TABLES)}",
                )
            return answer.to_arrow_table()
        except duckdb.Error as error:
            raise _refused(error, sql, connection) from error


def _refused(error: duckdb.Error, sql: str, connection: duckdb.DuckDBPyConnection) -> ConfigError:
    """Return the error with the columns of the tables that the query mentions."""
    names = connection.execute(
        "SELECT table_name, string_agg(column_name, ', ' ORDER BY column_index) "
        "FROM duckdb_columns() WHERE NOT internal GROUP BY 1 ORDER BY 1"
    ).fetchall()
    columns = "".join(f"\n            {table}: {listed}" for table, listed in names)
    if names:
        expected = f"columns of the tables in the query:{columns}"
    else:
        expected = f"one query over {', '.join(TABLES)}"
    others = "" if not names else f"the tables are {', '.join(TABLES)}; "
    return ConfigError(
        "DuckDB refused the query",
        where="sql",
        found=f"{error}" if sql in str(error) else f"{error}, in {sql}",
        expected=expected,
        do=f"{others}rlpipe/store/COLUMNS.md explains their columns",
    )


def _select_iterations(table: pa.Table, iterations: range | None) -> pa.Table:
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
        tables = list(pool.map(lambda commit: _commit_rows(files, commit, stage, columns), commits))
    schema = SAMPLES if stage is Stage.ROLLOUT else BATCH
    fields = [pa.field("branch", pa.string()), pa.field("iteration", pa.int64())]
    empty = pa.schema(
        [*fields, *(schema.field(name) for name in columns if name != "iteration")]
    ).empty_table()
    return pa.concat_tables([empty, *(table for table in tables if table is not None)])


def _commit_rows(
    files: Files, commit: Commit, stage: Stage, columns: Sequence[str]
) -> pa.Table | None:
    """Return the rows of a stage with `branch` and `iteration`; None if it has no files."""
    digest = commit.nodes.get(stage)
    if digest is None:
        return None
    node = Nodes(files).get(stage, digest)
    if not node.files:
        return None
    names = [name for name in columns if name != "iteration"]
    table = read_rows(files, node.files, names).replace_schema_metadata(None)
    iterations = pa.array([commit.iteration] * table.num_rows, pa.int64())
    branches = pa.array([commit.branch] * table.num_rows, pa.string())
    return table.add_column(0, "iteration", iterations).add_column(0, "branch", branches)
