"""Objects in an S3 bucket, created with `If-None-Match: *`.

Address and credentials come from the standard environment variables (AWS_ENDPOINT_URL,
AWS_ACCESS_KEY_ID, ...). s3fs signs requests, retries them, and splits large files. After a lost
reply, a retried PUT returns "taken", and the caller compares the bytes. Multipart uploads that were
killed are not objects; a lifecycle rule of the bucket removes them.

If a store answered before and then cannot be reached (a restart, a network failure), requests are
repeated for OUTAGE_S seconds. A store that never answered is an error at once, because its address
is probably wrong.

Not fork-safe: `files` opens a backend in each process.
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

# Error codes of Amazon, MinIO and others. Some operations have no body, and give the HTTP status.
MISSING = {"NoSuchKey", "404"}
TAKEN = {"PreconditionFailed", "412", "NoSuchUpload"}
BUSY = {"ConditionalRequestConflict", "OperationAborted", "409"}
FULL = {"QuotaExceeded", "XMinioStorageFull", "InsufficientStorage", "507"}
UNAVAILABLE = {
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
    "check the bucket and AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION "
    "(the store of `rlpipe up`: start it, then `. $RLPIPE_HOME/.up/env`, by default runs/.up/env)"
)


def error_code(error: BaseException) -> str:
    """Return the S3 error code of an exception from s3fs or botocore, or ""."""
    # s3fs translates errors of botocore to OSError, and keeps the original as the cause.
    for candidate in (error, error.__cause__):
        if isinstance(response := getattr(candidate, "response", None), dict):
            return str(response.get("Error", {}).get("Code", ""))
    return ""


def unreachable(error: BaseException) -> bool:
    """True if no store answered, or it answered that it is temporarily unavailable."""
    if code := error_code(error):
        return code in UNAVAILABLE
    return isinstance(error, (ConnectionError, TimeoutError, HTTPClientError, BotoConnectionError))


@contextmanager
def named_failures(where: str) -> Iterator[None]:
    """Turn an S3 error in the block into ObjectMissing, StoreFull or StoreError at `where`."""
    try:
        yield
    except (OSError, ClientError, BotoCoreError) as error:
        code = error_code(error)
        if code in MISSING:
            raise ObjectMissing("the object does not exist", where=where) from error
        if code in FULL:
            raise StoreFull(
                "no space left", where=where, found=code, do="raise the quota or delete objects"
            ) from error
        raise StoreError(
            "S3 request failed", where=where, found=f"{code} {error}".strip(), do=ADVICE
        ) from error


class S3Backend:
    """Objects under one prefix of one bucket. Thread-safe."""

    def __init__(self, root: str) -> None:
        for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
            if urlsplit(os.environ.get(name, "")).password:
                # Every error of the store repeats its address, and would print the password.
                raise StoreError(
                    "the address of the S3 server has a password in it",
                    where=name,
                    do="give the keys in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
                )
        self._bucket, _, prefix = root.partition("/")
        self._prefix = f"{prefix}/" if prefix else ""
        # Another process may write at any time, so listings are never cached.
        self._s3: Any = s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True)
        self._answered = False

    def url(self, path: str) -> str:
        return f"s3://{self._name(path)}".rstrip("/")

    def create(self, path: str, data: bytes) -> bool:
        """Write an object. False if the name is taken. Raises: StoreFull, StoreError."""
        return self._exclusively(
            path, lambda: self._call("put_object", path, Body=data, IfNoneMatch="*")
        )

    def create_from(self, path: str, local: str) -> bool:
        """Write an object from the file `local`. False if the name is taken."""

        def upload() -> None:
            name = self._name(path)
            # Above two chunks s3fs uploads parts, and the call that completes them decides.
            self._request(
                lambda: self._s3.put_file(
                    local, name, mode="create", chunksize=CHUNK_BYTES, max_concurrency=4
                )
            )

        return self._exclusively(path, upload)

    def read(self, path: str) -> bytes:
        with named_failures(self.url(path)):
            return self._request(lambda: self._s3.cat_file(self._name(path), max_concurrency=1))

    def sha256(self, path: str) -> str:
        def digest() -> str:
            with self._s3.open(self._name(path), "rb", block_size=CHUNK_BYTES) as file:
                return hashlib.file_digest(file, "sha256").hexdigest()

        with named_failures(self.url(path)):
            return self._request(digest)

    def download(self, path: str, local: str) -> None:
        with named_failures(self.url(path)):
            self._request(
                lambda: self._s3.get_file(
                    self._name(path), local, chunksize=CHUNK_BYTES, max_concurrency=4
                )
            )

    def stat(self, path: str) -> Entry | None:
        try:
            with named_failures(self.url(path)):
                head = self._call("head_object", path)
        except ObjectMissing:
            return None
        return Entry(path, head["ContentLength"], head["LastModified"].timestamp())

    def entries(self, folder: str) -> Iterator[Entry]:
        """Yield every object below `folder`, in pages of a thousand."""
        return (Entry(*name[:3]) for name in self.survey(folder) if name.kind is None)

    def survey(self, folder: str) -> Iterator[ListedName]:
        """Yield every key below `folder`, by name."""
        prefix = f"{self._prefix}{folder}/" if folder else self._prefix
        page = {}
        while True:
            with named_failures(self.url(folder)):
                query = {"Bucket": self._bucket, "Prefix": prefix, **page}
                page = self._request(
                    lambda query=query: self._s3.call_s3("list_objects_v2", **query)
                )
            for item in page.get("Contents", ()):
                key = item["Key"]
                size = item["Size"]
                if key.endswith("/") and not size:  # S3 consoles create such markers of folders
                    continue
                kind = "a key that ends in a slash" if key.endswith("/") else None
                yield ListedName(
                    key.removeprefix(self._prefix), size, item["LastModified"].timestamp(), kind
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
        return self._request(
            lambda: self._s3.call_s3(
                method, Bucket=self._bucket, Key=self._prefix + path, **arguments
            )
        )

    def _request(self, request: Callable[[], Any]) -> Any:
        """Return the answer to a request. Repeat it during an outage of a store that answered
        before."""
        end_s = time.monotonic() + OUTAGE_S
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                answer = request()
            except (OSError, ClientError, BotoCoreError) as error:
                outage = unreachable(error)
                # Any other error is an answer: the address is right.
                self._answered = self._answered or not outage
                if not (outage and self._answered) or time.monotonic() + pause_s > end_s:
                    raise
            else:
                self._answered = True
                return answer
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _exclusively(self, path: str, put: Callable[[], object]) -> bool:
        """Run a conditional write. False if the name is taken."""
        # S3 answers 409 while another conditional write of the same key is in progress.
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
        raise StoreError(
            "S3 refused the write because of concurrent writes of the same key",
            where=self.url(path),
            found=f"{BUSY_ATTEMPTS} times 409",
        )
