"""JSON records in one canonical form, with a checksum inside.

The canonical form has sorted keys, no spaces and UTF-8. NaN and infinity are refused, because JSON
has neither. A sealed record has the key `sha256`: the digest of the canonical form of its other
keys. So a flipped digit in a commit is found. The seal is a checksum, not a signature.

Entry points: `seal`, `unseal`, `digest`, `canonical`.
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
    """Return the current time in the format of records: UTC, ISO 8601, milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def canonical(value: Any, where: str) -> bytes:
    """Return the canonical form of a JSON value.

    Raises: DataError if JSON cannot hold the value (NaN, an object, half a surrogate pair).
    """
    try:
        text = json.dumps(
            value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        )
        # A lone surrogate passes `dumps` and fails here.
        return text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(
            "the value cannot be written as JSON",
            where=where,
            found=error,
            expected="finite numbers, strings, lists and dictionaries",
        ) from error


def digest(value: Any, where: str) -> str:
    """Return the sha256 of the canonical form, in hex. Raises: DataError."""
    return hashlib.sha256(canonical(value, where)).hexdigest()


def seal(record: Record, where: str) -> bytes:
    """Return the bytes of a record with its checksum. Raises: DataError."""
    content = record.model_dump()
    return canonical({**content, "sha256": digest(content, where)}, where) + b"\n"


def unseal(kind: type[RecordType], data: bytes, where: str, *, do: str | None = None) -> RecordType:
    """Return the record in sealed bytes.

    `do`: advice for the error message. Raises: ObjectCorrupt for a wrong checksum, an unknown
    format, or content that is not a record of this kind.
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
    # The bytes may come from anywhere: a list instead of an object, or brackets nested too deeply.
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problem = f"not a readable {kind.__name__.lower()} record"
        found = _first_problem(error) if isinstance(error, ValidationError) else repr(error)
        raise ObjectCorrupt(problem, where=where, found=found, do=do) from error


def _refuse_unknown_format(content: dict[str, Any], kind: type[Record], where: str) -> None:
    """Refuse a record of another format, because its keys may have another meaning.

    Raises: ObjectCorrupt.
    """
    # Records of format 1 were written before the key existed.
    version = content.get("format", 1)
    if "format" in kind.model_fields and version != RECORD_FORMAT:
        raise ObjectCorrupt(
            f"this version of rlpipe cannot read the format of this {kind.__name__.lower()} record",
            where=where,
            found=f"format {version!r}",
            expected=f"format {RECORD_FORMAT}",
            do="use the version of rlpipe that wrote the store, or migrate a store of format 1: "
            "rlpipe migrate",
        )


def _first_problem(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
