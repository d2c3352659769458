"""JSON records: one spelling, a digest of it, and a seal that shows every change.

The canonical spelling has sorted keys, no spaces, UTF-8, and refuses NaN and infinities (JSON has
none). A sealed record carries the sha256 of the canonical spelling of its other keys under
`sha256`, so a flipped digit in a commit is found.

Not here: where records live. A seal is a checksum, not a signature.
"""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from typing import Any, TypeVar

from pydantic import ValidationError

from rlpipe.errors import DataError, ObjectCorrupt
from rlpipe.types import RECORD_FORMAT, Record

RecordType = TypeVar("RecordType", bound=Record)


def now() -> str:
    """The time as records spell it: UTC, ISO 8601, milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def canonical(value: Any, where: str) -> bytes:
    """The one spelling of a JSON value. Raises: DataError if it is none (NaN, an object, half a
    surrogate pair)."""
    try:
        text = json.dumps(
            value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        )
        return text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(
            "this cannot be written as JSON",
            where=where,
            found=error,
            expected="finite, plain values",
        ) from error


def digest(value: Any, where: str) -> str:
    """sha256 of the canonical spelling, in hex. Raises: DataError."""
    return hashlib.sha256(canonical(value, where)).hexdigest()


def seal(record: Record, where: str) -> bytes:
    """The bytes of a record, with its own checksum. Raises: DataError."""
    content = record.model_dump()
    return canonical({**content, "sha256": digest(content, where)}, where) + b"\n"


def unseal(kind: type[RecordType], data: bytes, where: str, *, do: str | None = None) -> RecordType:
    """The record in sealed bytes.

    Raises: ObjectCorrupt naming what does not fit, and what to `do`; also for a format that this
    version cannot read.
    """
    try:
        content = json.loads(data)
        sha256 = content.pop("sha256")
        if sha256 != digest(content, where):
            raise ObjectCorrupt(
                "the record was changed after it was written",
                where=where,
                expected=f"sha256 {sha256}",
                do=do,
            )
        _refuse_unknown_format(content, kind, where)
        return kind.model_validate(content)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problem = f"not a readable {kind.__name__.lower()} record"
        found = _first_problem(error) if isinstance(error, ValidationError) else repr(error)
        raise ObjectCorrupt(problem, where=where, found=found, do=do) from error


def _refuse_unknown_format(content: dict[str, Any], kind: type[Record], where: str) -> None:
    """Raises: ObjectCorrupt for a record of an earlier or later format, whose keys may mean
    something else.

    A record without a format is older than the key: format 1.
    """
    if "format" in kind.model_fields and content.get("format", 1) != RECORD_FORMAT:
        raise ObjectCorrupt(
            f"this {kind.__name__.lower()} record has a format that this version of rlpipe cannot read",
            where=where,
            found=f"format {content.get('format', 1)!r}",
            expected=f"format {RECORD_FORMAT}",
            do="use the version of rlpipe that wrote the store; a store of format 1 can be migrated: python -m tools.migrate",
        )


def _first_problem(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
