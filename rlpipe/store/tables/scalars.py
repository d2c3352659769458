"""Small tables over a whole branch: one row for each sample, and one for each metric.

    branches/<branch>/scalars/<table>/%08d-%08d-<sha256[:16]>.parquet
        rows of the iterations from the first number up to the second one, exclusive

The tables are computed from the records, and can be computed again at any time. The driver of a run
calls `update`, which adds new iterations and merges files: 16 of one size become one of the next
size, so a thousand iterations have a few dozen files at most. The small files are deleted once the
merged file exists. If two files have an iteration, the larger file counts. Reading needs no
permission to write.

Tokens and texts stay in the shards (`query` adds them).

Entry points: `update`, `read`.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rlpipe.errors import ObjectCorrupt, ObjectMissing, StoreError
from rlpipe.store.branches import Branches, commit_path, parse_commit_name
from rlpipe.store.columns import KIND
from rlpipe.store.objects.files import Files
from rlpipe.store.tables.scalar_rows import TABLES, rows_of

TABLE_FILE_NAME = re.compile(r"branches/[^/]+/scalars/[^/]+/(\d{8})-(\d{8})-[0-9a-f]{16}\.parquet")
BLOCKS = (16, 256, 4096)
"""Sizes of merged files in iterations. Each begins at a multiple of its size."""
READERS = 8
ATTEMPTS = 5
"""Listings before a read fails because another process merges files."""


class Part(NamedTuple):
    """A file with the iterations `first` to `end` - 1."""

    first: int
    end: int
    path: str


def update(files: Files, branch: str) -> int:
    """Add the new iterations of a branch to its tables, and return their number.

    The driver of the branch calls this. The cost does not grow with the branch, because only gaps
    and iterations after the last one are looked for. Concurrent calls are allowed. Raises:
    ObjectMissing, ObjectCorrupt if an iteration cannot be read; StoreError.
    """
    # A driver that was killed between two tables left the second one behind the first.
    known = set.intersection(*(_covered(parts_of(files, branch, table)) for table in TABLES))
    missing = _missing(files, branch, known)
    for chunk in _chunks(missing):
        computed = _compute(files, branch, chunk, tuple(TABLES))
        for table in TABLES:
            rows = pa.concat_tables([tables[table] for tables in computed])
            _write(files, branch, table, chunk[0], chunk[-1] + 1, rows)
    for table in TABLES:
        _merge_files(files, branch, table)
    return len(missing)


def _missing(files: Files, branch: str, known: set[int]) -> list[int]:
    """Return the committed iterations that not all tables have. `known`: those that all have."""
    branches = Branches(files)
    last = max(known, default=None)
    if last is None or not _is_committed(files, branch, last):
        return [k for k in branches.committed(branch) if k not in known]
    # A listing would grow with the branch. The iterations after `last` are tried one by one.
    parent = branches.get(branch).parent
    first = parse_commit_name(parent)[1] + 1 if parent else 0
    gaps = [k for k in range(first, last) if k not in known and _is_committed(files, branch, k)]
    return [*gaps, *branches.committed(branch, after=last)]


def _is_committed(files: Files, branch: str, k: int) -> bool:
    return files.exists(commit_path(branch, k))


def read(files: Files, branch: str, table: str = "samples", *, ancestors: bool = True) -> pa.Table:
    """Return the rows of a branch, oldest first. `ancestors`: also those of its origins.

    Writes nothing: rows that the stored tables lack are computed. Raises: ObjectMissing if the
    branch does not exist; ObjectCorrupt if the bytes of a file do not match its name, or an
    iteration cannot be read.
    """
    branches = Branches(files)
    tables = []
    name: str | None = branch
    last: int | None = None
    while name is not None:
        tables.append(_read_own(files, name, table, last))
        parent = branches.get(name).parent if ancestors else None
        name, last = parse_commit_name(parent) if parent else (None, None)
    return pa.concat_tables(tables[::-1]).combine_chunks()


def newest_covered(files: Files, branch: str) -> set[int]:
    """Return the iterations in the newest file of each table of a branch.

    They were committed, because tables are written later. Files that are corrupt, or that another
    process merges, are skipped.
    """
    covered = set[int]()
    for table in TABLES:
        for part in sorted(parts_of(files, branch, table), key=lambda part: -part.end):
            with suppress(ObjectCorrupt, ObjectMissing):
                own = read_part(files, table, part).filter(pc.field("branch") == branch)
                covered |= set(own["iteration"].to_pylist())
                break
    return covered


def _read_own(files: Files, branch: str, table: str, last: int | None) -> pa.Table:
    """Return the rows of a branch's own commits, up to iteration `last`."""
    wanted = [k for k in Branches(files).committed(branch) if last is None or k <= last]
    for _ in range(ATTEMPTS):
        with suppress(ObjectMissing):  # merged since the listing: list again
            parts = parts_of(files, branch, table)
            stored = _read_parts(files, table, parts)
            break
    else:
        raise StoreError(
            "other processes merged the files of the table during each read",
            where=_folder(branch, table),
            do="try again",
        )
    known = _covered(parts)
    computed = _compute(files, branch, [k for k in wanted if k not in known], [table])
    rows = pa.concat_tables([stored, *(tables[table] for tables in computed)])
    selected = rows.filter(pc.field("iteration").isin(wanted))
    return selected.sort_by("iteration") if computed else selected


def _compute(
    files: Files, branch: str, iterations: Sequence[int], tables: Sequence[str]
) -> list[dict[str, pa.Table]]:
    """Return the tables of each iteration, computed from its records."""
    branches = Branches(files)
    with ThreadPoolExecutor(READERS) as pool:
        return list(
            pool.map(lambda k: rows_of(files, branches.read(branch, k), tables), iterations)
        )


def _read_parts(files: Files, table: str, parts: Sequence[Part]) -> pa.Table:
    """Return the rows of every iteration once, from the largest file that has it."""
    chosen: list[tuple[Part, list[int]]] = []
    seen: set[int] = set()
    # Largest files first. A merged file and its sources may exist at the same time.
    for part in sorted(parts, key=lambda part: (part.first - part.end, part)):
        fresh = [k for k in range(part.first, part.end) if k not in seen]
        seen.update(fresh)
        if fresh:
            chosen.append((part, fresh))
    chosen.sort(key=lambda entry: entry[0])
    with ThreadPoolExecutor(READERS) as pool:
        tables = list(pool.map(lambda entry: read_part(files, table, entry[0]), chosen))
    wanted = [
        rows
        if len(fresh) == part.end - part.first
        else rows.filter(pc.field("iteration").isin(fresh))
        for (part, fresh), rows in zip(chosen, tables, strict=True)
    ]
    return pa.concat_tables(
        [TABLES[table].empty_table(), *(rows.cast(TABLES[table]) for rows in wanted)]
    )


def read_part(files: Files, table: str, part: Part) -> pa.Table:
    """Return the rows of a file.

    Raises: ObjectMissing; ObjectCorrupt if its bytes do not match its name, or it is another table.
    """
    data = files.read(part.path)
    url = files.url(part.path)
    sha256 = hashlib.sha256(data).hexdigest()
    do = "delete it, and it is computed again from the records"
    if not part.path.endswith(f"-{sha256[:16]}.parquet"):
        raise ObjectCorrupt(
            "the bytes of the table do not match its name",
            where=url,
            found=f"sha256 {sha256}",
            do=do,
        )
    try:
        rows = pq.read_table(pa.BufferReader(data))
        rows.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ObjectCorrupt("not a readable Parquet file", where=url, found=error, do=do) from error
    if (
        not rows.schema.equals(TABLES[table])
        or (rows.schema.metadata or {}).get(KIND) != TABLES[table].metadata[KIND]
    ):
        raise ObjectCorrupt(
            "the file has another table",
            where=url,
            found=rows.schema.names,
            expected=TABLES[table].names,
            do=do,
        )
    return rows


def _write(files: Files, branch: str, table: str, first: int, end: int, rows: pa.Table) -> str:
    # Encode in memory, then write once: an exception must not publish a truncated object.
    buffer = io.BytesIO()
    pq.write_table(rows, buffer, compression="zstd", write_page_checksum=True)
    data = buffer.getvalue()
    sha256 = hashlib.sha256(data).hexdigest()
    path = f"{_folder(branch, table)}/{first:08d}-{end:08d}-{sha256[:16]}.parquet"
    files.create(path, data)
    return path


def _merge_files(files: Files, branch: str, table: str) -> None:
    """Merge the files of every complete block, and delete files that a larger one covers."""
    parts = parts_of(files, branch, table)
    for size in BLOCKS:
        for block in sorted({part.first // size for part in parts}):
            inside = [
                part
                for part in parts
                if block * size <= part.first and part.end <= (block + 1) * size
            ]
            first = min((part.first for part in inside), default=0)
            end = (block + 1) * size
            # The first block of a fork begins at its first iteration, so `first` may be inside.
            if len(inside) > 1 and _covered(inside) >= set(range(first, end)):
                try:
                    rows = _read_parts(files, table, inside)
                except ObjectMissing:
                    return  # another process merges them
                parts.append(Part(first, end, _write(files, branch, table, first, end, rows)))
                parts = _delete_covered(files, parts)
    _delete_covered(files, parts)


def _delete_covered(files: Files, parts: list[Part]) -> list[Part]:
    """Delete each file that another file covers, and return the others."""
    kept: list[Part] = []
    for part in sorted(set(parts), key=lambda part: (part.first - part.end, part)):
        if any(other.first <= part.first and part.end <= other.end for other in kept):
            files.delete(part.path)
        else:
            kept.append(part)
    return kept


def parts_of(files: Files, branch: str, table: str) -> list[Part]:
    """Return the files of a branch's table, by name."""
    parts = [
        Part(int(match[1]), int(match[2]), path)
        for path in files.list(_folder(branch, table))
        if (match := TABLE_FILE_NAME.fullmatch(path))
    ]
    # A name from elsewhere may claim any number of iterations.
    return [part for part in parts if 0 < part.end - part.first <= BLOCKS[-1]]


def _covered(parts: Sequence[Part]) -> set[int]:
    return {k for part in parts for k in range(part.first, part.end)}


def _chunks(iterations: Sequence[int]) -> Iterator[list[int]]:
    """Yield runs of consecutive iterations that do not cross the end of a block."""
    chunk: list[int] = []
    for k in iterations:
        if chunk and (k != chunk[-1] + 1 or k % BLOCKS[0] == 0):
            yield chunk
            chunk = []
        chunk.append(k)
    if chunk:
        yield chunk


def _folder(branch: str, table: str) -> str:
    return f"branches/{branch}/scalars/{table}"
