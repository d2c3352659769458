"""What this machine remembers of a run (rlpipe.config.run_record)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlpipe.config.run_record import read_record, record_path, store_of
from rlpipe.errors import ConfigError


def test_the_store_of_a_run_is_the_recorded_one_else_the_homes_own(tmp_path: Path):
    assert store_of(tmp_path, "new") == tmp_path / "store"
    (tmp_path / "old").mkdir()
    record_path(tmp_path, "old").write_text(json.dumps({"store": "s3://bucket/x", "config": {}, "ray": None}))
    assert store_of(tmp_path, "old") == "s3://bucket/x"


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"\xff", b"{}", b'{"store": 1, "config": {}}', b'{"store": "a"}', b"[" * 100_000]
)
def test_a_record_that_is_none_is_named_and_how_to_have_another(data: bytes, tmp_path: Path):
    path = tmp_path / "run.json"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="start the run again") as caught:
        read_record(path)
    assert caught.value.where == str(path)
