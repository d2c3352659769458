"""Tables over a whole branch that are small enough to ask anything: one row a sample, and one row a
metric of an iteration.

    branches/<branch>/scalars/<table>/%08d-%08d-<sha256[:16]>.parquet       the rows of iterations first … end - 1

They are drawn from the records and can be made again at any time: `update`, which a run's driver
calls, adds the iterations that were committed since it last ran, and puts files together, 16 of one
size into one of the next, so that a thousand iterations are a few dozen files at most. To read them
needs no permission to write. What is put together goes once the larger file is there; of iterations
that are in two files, the larger one counts.

Not here: tokens and texts, which stay where they are (`query` joins them), or what is unusual
(`anomalies`).
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
from rlpipe.store.branches import Branches, commit_name, parse_commit_name
from rlpipe.store.columns import KIND
from rlpipe.store.objects.files import Files
from rlpipe.store.tables.scalar_rows import TABLES, rows_of

TABLE_FILE_NAME = re.compile(r"branches/[^/]+/scalars/[^/]+/(\d{8})-(\d{8})-[0-9a-f]{16}\.parquet")
BLOCKS = (16, 256, 4096)
"""Iterations of a file that others are put together into; each begins at a multiple of its size."""
READERS = 8
ATTEMPTS = 5
"""How often a listing is made again because somebody put files together meanwhile."""


class Part(NamedTuple):
    """A file: iterations `first` … `end` - 1."""

    first: int
    end: int
    path: str


def update(files: Files, branch: str) -> int:
    """Bring the tables of a branch up to its newest commit; how many iterations were added. Whoever
    drives it does that.

    What it costs does not grow with the branch: iterations are looked for behind the last one that
    the tables have, and in gaps. Several processes may do it at once. Raises: ObjectMissing,
    ObjectCorrupt if an iteration cannot be read; StoreError.
    """
    known = set.intersection(*(_covered(parts_of(files, branch, table)) for table in TABLES))
    missing = _missing(files, branch, known)
    for chunk in _chunks(missing):
        made = _made(files, branch, chunk, tuple(TABLES))
        for table in TABLES:
            _write(
                files,
                branch,
                table,
                chunk[0],
                chunk[-1] + 1,
                pa.concat_tables([one[table] for one in made]),
            )
    for table in TABLES:
        _put_together(files, branch, table)
    return len(missing)


def _missing(files: Files, branch: str, known: set[int]) -> list[int]:
    """The iterations that a branch has committed and not all its tables have, which have these;
    without a listing, if any."""
    branches = Branches(files)
    last = max(known, default=None)
    if last is None or not _is_committed(files, branch, last):
        return [k for k in branches.committed(branch) if k not in known]
    parent = branches.get(branch).parent
    first = parse_commit_name(parent)[1] + 1 if parent else 0
    gaps = [k for k in range(first, last) if k not in known and _is_committed(files, branch, k)]
    return [*gaps, *branches.committed(branch, after=last)]


def _is_committed(files: Files, branch: str, k: int) -> bool:
    return files.exists(f"branches/{commit_name(branch, k)}.json")


def read(files: Files, branch: str, table: str = "samples", *, ancestors: bool = True) -> pa.Table:
    """The rows of a branch so far, oldest first; with those of what it was forked from, up to
    there. Writes nothing: what the tables have not yet is drawn from the records.

    Raises: ObjectMissing if there is no such branch; ObjectCorrupt if a file is not what its name
    says, or an iteration cannot be read.
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
    """Iterations that the newest file of each of a branch's tables has rows of: they were
    committed. A file that is not what its name says, or is put together with others meanwhile, says
    nothing."""
    found = set[int]()
    for table in TABLES:
        for part in sorted(parts_of(files, branch, table), key=lambda part: -part.end):
            with suppress(ObjectCorrupt, ObjectMissing):
                own = read_part(files, table, part).filter(pc.field("branch") == branch)
                found |= set(own["iteration"].to_pylist())
                break
    return found


def _read_own(files: Files, branch: str, table: str, last: int | None) -> pa.Table:
    """The rows of a branch's own commits, up to iteration `last`."""
    wanted = [k for k in Branches(files).committed(branch) if last is None or k <= last]
    for _ in range(ATTEMPTS):
        with suppress(ObjectMissing):  # put together since the listing: list again
            parts = parts_of(files, branch, table)
            stored = _read_parts(files, table, parts)
            break
    else:
        raise StoreError(
            "the files of a table do not stay long enough to be read",
            where=_folder(branch, table),
            do="try again",
        )
    known = _covered(parts)
    fresh = _made(files, branch, [k for k in wanted if k not in known], [table])
    rows = pa.concat_tables([stored, *(one[table] for one in fresh)])
    kept = rows.filter(pc.field("iteration").isin(wanted))
    return kept.sort_by("iteration") if fresh else kept


def _made(
    files: Files, branch: str, iterations: Sequence[int], tables: Sequence[str]
) -> list[dict[str, pa.Table]]:
    """What the records say, iteration by iteration."""
    branches = Branches(files)
    with ThreadPoolExecutor(READERS) as pool:
        return list(
            pool.map(lambda k: rows_of(files, branches.read(branch, k), tables), iterations)
        )


def _read_parts(files: Files, table: str, parts: Sequence[Part]) -> pa.Table:
    """Every iteration once, from the largest file that holds it."""
    chosen: list[tuple[Part, list[int]]] = []
    seen: set[int] = set()
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
    """The rows of a file. Raises: ObjectMissing; ObjectCorrupt if they are not what its name says,
    or of another kind."""
    data = files.read(part.path)
    url = files.url(part.path)
    sha256 = hashlib.sha256(data).hexdigest()
    do = "delete it: it is made again from the records"
    if not part.path.endswith(f"-{sha256[:16]}.parquet"):
        raise ObjectCorrupt(
            "a table is not what its name says", where=url, found=f"sha256 {sha256}", do=do
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
            "not a table of this kind",
            where=url,
            found=rows.schema.names,
            expected=TABLES[table].names,
            do=do,
        )
    return rows


def _write(files: Files, branch: str, table: str, first: int, end: int, rows: pa.Table) -> str:
    buffer = io.BytesIO()
    pq.write_table(rows, buffer, compression="zstd", write_page_checksum=True)
    data = buffer.getvalue()
    path = f"{_folder(branch, table)}/{first:08d}-{end:08d}-{hashlib.sha256(data).hexdigest()[:16]}.parquet"
    files.create(path, data)
    return path


def _put_together(files: Files, branch: str, table: str) -> None:
    """Every block that is whole becomes one file; what lies within another file goes."""
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
            if len(inside) > 1 and _covered(inside) >= set(range(first, end)):
                try:
                    rows = _read_parts(files, table, inside)
                except ObjectMissing:
                    return  # another process is at it
                parts.append(Part(first, end, _write(files, branch, table, first, end, rows)))
                parts = _without_inner(files, parts)
    _without_inner(files, parts)


def _without_inner(files: Files, parts: list[Part]) -> list[Part]:
    """Those that are left once each that lies within another is removed."""
    kept: list[Part] = []
    for part in sorted(set(parts), key=lambda part: (part.first - part.end, part)):
        if any(other.first <= part.first and part.end <= other.end for other in kept):
            files.delete(part.path)
        else:
            kept.append(part)
    return kept


def parts_of(files: Files, branch: str, table: str) -> list[Part]:
    """The files of a branch's table, by name."""
    found = ((TABLE_FILE_NAME.fullmatch(path), path) for path in files.list(_folder(branch, table)))
    parts = (Part(int(match[1]), int(match[2]), path) for match, path in found if match)
    return [part for part in parts if 0 < part.end - part.first <= BLOCKS[-1]]


def _covered(parts: Sequence[Part]) -> set[int]:
    return {k for part in parts for k in range(part.first, part.end)}


def _chunks(iterations: Sequence[int]) -> Iterator[list[int]]:
    """Runs without gaps that end at the end of a block."""
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
