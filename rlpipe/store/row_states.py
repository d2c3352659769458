"""States of the rows of a curriculum: rounds and pass rates, each stored once under its content.

    row_states/<sha256>     zlib: a line of JSON, then `rounds`, `passes`, `samples` as uint32

The digest is that of the content before compression, which may differ between versions of zlib. A
data state names the states after its draws (`DataState.rows`), so a plan reads no history. A fork
continues with the states of its origin.

Entry points: `RowStates`, `StoredRowStates`, `row_states_path`, `row_states_of_plan`.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rlpipe.errors import ObjectConflict, ObjectCorrupt
from rlpipe.store.objects.files import Files
from rlpipe.types import Plan

FOLDER = "row_states"
ROW_STATES_NAME = re.compile(r"row_states/([0-9a-f]{64})")
ARRAYS = ("rounds", "passes", "samples")
HEADER = {"format", "rows", "counted", "prompts"}
STORED = np.dtype("<u4")
LEVEL = 1
"""Level of zlib. Higher levels save little and take several times as long."""
KEPT = 4
"""States in memory: those before and after the newest plans."""


@dataclass(frozen=True, eq=False)
class RowStates:
    """States of R rows. The arrays are never written to.

    Two objects are equal if their digests are.
    """

    rounds: np.ndarray
    """[R] uint32: round of its pool in which the row is drawn next."""
    passes: np.ndarray
    """[R] uint32: samples of the latest visit that passed."""
    samples: np.ndarray
    """[R] uint32: scored samples of the latest visit; 0: no visit yet."""
    counted: int = 0
    """Number of commits whose visits are counted: those of iterations 0 to counted - 1."""
    prompts: str = ""
    """Digest of the rows' prompts and labels."""

    def __len__(self) -> int:
        return len(self.rounds)

    @cached_property
    def content(self) -> bytes:
        """The stored content, before compression."""
        facts = {"format": 1, "rows": len(self), "counted": self.counted, "prompts": self.prompts}
        header = json.dumps(facts)
        arrays = (getattr(self, name).astype(STORED).tobytes() for name in ARRAYS)
        return b"".join([header.encode(), b"\n", *arrays])

    @cached_property
    def digest(self) -> str:
        """sha256 of the content."""
        return hashlib.sha256(self.content).hexdigest()

    @classmethod
    def of_content(cls, content: bytes) -> RowStates:
        """Return the states of a content. Raises: ValueError if it is malformed."""
        line, _, data = content.partition(b"\n")
        header = json.loads(line)
        if not isinstance(header, dict) or header.keys() != HEADER:
            raise ValueError(f"header {line[:80]!r}")
        if header["format"] != 1:
            raise ValueError(f"format {header['format']}, expected 1")
        arrays = np.frombuffer(data, STORED).reshape(len(ARRAYS), header["rows"])
        rounds, passes, samples = arrays.astype(np.uint32)
        return cls(rounds, passes, samples, header["counted"], header["prompts"])


def row_states_path(digest: str) -> str:
    """Return the path of stored states."""
    return f"{FOLDER}/{digest}"


def row_states_of_plan(plan: Plan) -> set[str]:
    """Return the digests of the states before and after a plan; empty without a curriculum."""
    return {state.rows for state in (plan.before, plan.after) if state.rows is not None}


class StoredRowStates:
    """The states of rows in a store. The newest ones stay in memory."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._kept: OrderedDict[str, RowStates] = OrderedDict()

    def keep(self, states: RowStates) -> str:
        """Keep states in memory, for `write` and `read`, and return their digest."""
        self._kept[states.digest] = states
        self._kept.move_to_end(states.digest)
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return states.digest

    def write(self, digest: str) -> None:
        """Store states that `keep` has kept. Raises: StoreError."""
        path = row_states_path(digest)
        if not self._files.exists(path):
            try:
                self._files.create(path, zlib.compress(self._kept[digest].content, LEVEL))
            except ObjectConflict:
                # Another version of zlib compressed the same content.
                self._stored(digest)

    def read(self, digest: str) -> RowStates:
        """Return the states of a digest. Raises: ObjectMissing, ObjectCorrupt."""
        if digest not in self._kept:
            self.keep(self._stored(digest))
        return self._kept[digest]

    def _stored(self, digest: str) -> RowStates:
        path = row_states_path(digest)
        data = self._files.read(path)
        try:
            content = zlib.decompress(data)
            found = hashlib.sha256(content).hexdigest()
            if found != digest:
                raise ValueError(f"contents {found}")
            return RowStates.of_content(content)
        except (ValueError, zlib.error) as error:
            raise ObjectCorrupt(
                "not the states of rows that were written",
                where=self._files.url(path),
                found=str(error),
                expected=f"contents {digest}",
                do="restore the object from a copy",
            ) from error
