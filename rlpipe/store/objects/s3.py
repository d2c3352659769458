"""Objects in an S3 bucket: one PUT with `If-None-Match: *`, errors told apart by their code.

Address and credentials come from the standard environment variables (AWS_ENDPOINT_URL,
AWS_ACCESS_KEY_ID, ...). s3fs signs, retries what may be retried, and splits large files. A retried
PUT whose first reply was lost answers "taken": the caller compares. Uploads of many parts that were
killed are not objects; a bucket's lifecycle rule removes them.

A store that has answered once and then cannot be reached (it restarts, the network is down) is
asked again for OUTAGE_S seconds; one that never answered is an error at once: its address is wrong.

Not here: comparing with what another writer wrote (`files`). Not fork-safe: `files` opens one per
process.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import s3fs
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError
from botocore.exceptions import ConnectionError as BotoConnectionError

from rlpipe.errors import ObjectMissing, StoreError, StoreFull
from rlpipe.store.objects.local import CHUNK_BYTES, Entry, ListedName

MISSING = {"NoSuchKey", "404"}
TAKEN = {"PreconditionFailed", "412", "NoSuchUpload"}
BUSY = {"ConditionalRequestConflict", "OperationAborted", "409"}
FULL = {"QuotaExceeded", "XMinioStorageFull", "InsufficientStorage", "507"}
AILING = {
    "500",
    "502",
    "503",
    "504",
    "InternalError",
    "ServiceUnavailable",
    "SlowDown",
    "RequestTimeout",
}
BUSY_ATTEMPTS = 8
OUTAGE_S = 120.0
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0
ADVICE = (
    "check the bucket and AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION"
)


def error_code(error: BaseException) -> str:
    """The S3 error code behind an exception of s3fs or botocore; "" if there is none."""
    for candidate in (error, error.__cause__):
        if isinstance(response := getattr(candidate, "response", None), dict):
            return str(response.get("Error", {}).get("Code", ""))
    return ""


def unreachable(error: BaseException) -> bool:
    """Did no store answer, or only to say that it cannot just now?"""
    if code := error_code(error):
        return code in AILING
    return isinstance(error, (ConnectionError, TimeoutError, HTTPClientError, BotoConnectionError))


@contextmanager
def named_failures(where: str) -> Iterator[None]:
    """Turns what S3 says into ObjectMissing, StoreFull or StoreError at `where`."""
    try:
        yield
    except (OSError, ClientError, BotoCoreError) as error:
        code = error_code(error)
        if code in MISSING:
            raise ObjectMissing("there is no such object", where=where) from error
        if code in FULL:
            raise StoreFull(
                "no space left", where=where, found=code, do="raise the quota or remove objects"
            ) from error
        raise StoreError(
            "the object store said no", where=where, found=f"{code} {error}".strip(), do=ADVICE
        ) from error


class S3Backend:
    """Objects under one prefix of one bucket. Thread-safe."""

    def __init__(self, root: str) -> None:
        for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
            if urlsplit(os.environ.get(name, "")).password:
                do = "give the keys in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY: every error of the store repeats its address"
                raise StoreError("a password in an address", where=name, do=do)
        self._bucket, _, prefix = root.partition("/")
        self._prefix = f"{prefix}/" if prefix else ""
        self._s3: Any = s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True)
        self._answered = False

    def url(self, path: str) -> str:
        return f"s3://{self._name(path)}".rstrip("/")

    def create(self, path: str, data: bytes) -> bool:
        """True: written. False: the name is taken. Raises: StoreFull, StoreError."""
        return self._exclusively(
            path, lambda: self._call("put_object", path, Body=data, IfNoneMatch="*")
        )

    def create_from(self, path: str, local: str) -> bool:
        """`create` with the content of the file `local`; above two chunks in parts, of which the
        last call decides."""

        def upload() -> None:
            name = self._name(path)
            self._ask(
                lambda: self._s3.put_file(
                    local, name, mode="create", chunksize=CHUNK_BYTES, max_concurrency=4
                )
            )

        return self._exclusively(path, upload)

    def read(self, path: str) -> bytes:
        with named_failures(self.url(path)):
            return self._ask(lambda: self._s3.cat_file(self._name(path), max_concurrency=1))

    def sha256(self, path: str) -> str:
        def digest() -> str:
            with self._s3.open(self._name(path), "rb", block_size=CHUNK_BYTES) as file:
                return hashlib.file_digest(file, "sha256").hexdigest()

        with named_failures(self.url(path)):
            return self._ask(digest)

    def download(self, path: str, local: str) -> None:
        with named_failures(self.url(path)):
            self._ask(
                lambda: self._s3.get_file(
                    self._name(path), local, chunksize=CHUNK_BYTES, max_concurrency=4
                )
            )

    def stat(self, path: str) -> Entry | None:
        try:
            with named_failures(self.url(path)):
                found = self._call("head_object", path)
        except ObjectMissing:
            return None
        return Entry(path, found["ContentLength"], found["LastModified"].timestamp())

    def entries(self, folder: str) -> Iterator[Entry]:
        """Every object below `folder`, in pages of a thousand."""
        return (Entry(*seen[:3]) for seen in self.survey(folder) if seen.kind is None)

    def survey(self, folder: str) -> Iterator[ListedName]:
        """Every key below `folder`, by name."""
        prefix = f"{self._prefix}{folder}/" if folder else self._prefix
        page = {}
        while True:
            with named_failures(self.url(folder)):
                where = {"Bucket": self._bucket, "Prefix": prefix, **page}
                page = self._ask(lambda where=where: self._s3.call_s3("list_objects_v2", **where))
            for found in page.get("Contents", ()):
                key = found["Key"]
                size = found["Size"]
                if (
                    key.endswith("/") and not size
                ):  # the marker of a folder, which consoles of S3 make
                    continue
                kind = "a key that ends in a slash" if key.endswith("/") else None
                yield ListedName(
                    key.removeprefix(self._prefix), size, found["LastModified"].timestamp(), kind
                )
            if not page.get("IsTruncated"):
                return
            page = {"ContinuationToken": page["NextContinuationToken"]}

    def delete(self, path: str) -> None:
        with named_failures(self.url(path)):
            self._call("delete_object", path)

    def _name(self, path: str) -> str:
        return f"{self._bucket}/{self._prefix}{path}"

    def _call(self, method: str, path: str, **arguments: Any) -> dict[str, Any]:
        return self._ask(
            lambda: self._s3.call_s3(
                method, Bucket=self._bucket, Key=self._prefix + path, **arguments
            )
        )

    def _ask(self, request: Callable[[], Any]) -> Any:
        """The answer to a request, which is made again while the store is out, if it was ever
        there."""
        end_s = time.monotonic() + OUTAGE_S
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                answer = request()
            except (OSError, ClientError, BotoCoreError) as error:
                out = unreachable(error)
                self._answered = self._answered or not out
                if not (out and self._answered) or time.monotonic() + pause_s > end_s:
                    raise
            else:
                self._answered = True
                return answer
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _exclusively(self, path: str, put: Callable[[], object]) -> bool:
        for attempt in range(BUSY_ATTEMPTS):
            try:
                put()
                return True
            except (OSError, ClientError, BotoCoreError) as error:
                code = error_code(error)
                if code in TAKEN or isinstance(error, FileExistsError):
                    return False
                if code not in BUSY:
                    with named_failures(self.url(path)):
                        raise
            time.sleep(0.05 * 2**attempt)
        found = f"{BUSY_ATTEMPTS} times 409"
        raise StoreError(
            "other writers of the same name kept this one out", where=self.url(path), found=found
        )
