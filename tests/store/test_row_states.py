"""States of rows: named by their content, and refused if they are damaged."""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlpipe.errors import ObjectCorrupt
from rlpipe.store.objects.files import Files
from rlpipe.store.row_states import RowStates, StoredRowStates, row_states_path


def states(rows: int = 5, counted: int = 3) -> RowStates:
    rounds = np.arange(rows, dtype=np.uint32)
    return RowStates(rounds, rounds // 2, rounds * 2, counted, "d" * 64)


def written(files: Files, made: RowStates) -> str:
    stored = StoredRowStates(files)
    digest = stored.keep(made)
    stored.write(digest)
    return digest


def test_states_are_read_as_they_were_written(files: Files):
    digest = written(files, states())
    assert files.list() == [row_states_path(digest)]
    found = StoredRowStates(files).read(digest)
    assert (found.digest, found.counted, found.prompts) == (digest, 3, "d" * 64)
    for name in ("rounds", "passes", "samples"):
        assert getattr(found, name).tolist() == getattr(states(), name).tolist()


def test_the_digest_depends_on_every_number():
    changed = [states(), states(counted=4), states(rows=6)]
    for name in ("rounds", "passes", "samples"):
        one = {key: getattr(states(), key) for key in ("rounds", "passes", "samples")}
        one[name] = one[name] + np.uint32(1)
        changed.append(RowStates(**one, counted=3, prompts="d" * 64))
    changed.append(replace(states(), prompts="e" * 64))
    assert len({one.digest for one in changed}) == len(changed)


def test_another_compression_of_the_same_content_is_no_conflict(files: Files):
    made = states(1000)
    files.create(row_states_path(made.digest), zlib.compress(made.content, 9))
    assert written(files, made) == made.digest
    assert StoredRowStates(files).read(made.digest).digest == made.digest


@pytest.mark.parametrize(
    "data", [b"?", zlib.compress(states(4).content), zlib.compress(b"{}\n"), b""]
)
def test_damaged_states_are_refused(tmp_path: Path, data: bytes):
    files = Files(tmp_path)
    path = tmp_path / row_states_path(written(files, states()))
    path.chmod(0o644)
    path.write_bytes(data)
    with pytest.raises(ObjectCorrupt, match="not the states of rows"):
        StoredRowStates(files).read(path.name)
