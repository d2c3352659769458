"""Objects that are written once: races, lost replies, conflicts, damage, full disks, killed
writers."""

from __future__ import annotations

import errno
import hashlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest
from botocore.exceptions import ClientError
from s3fs.errors import translate_boto_error

from rlpipe.errors import ObjectConflict, ObjectCorrupt, ObjectMissing, StoreError, StoreFull
from rlpipe.store.objects import local, s3
from rlpipe.store.objects.files import Files
from tests.processes import pool
from tests.servers import LossyProxy
from tools.s3_server import S3Server, s3_environment


def try_to_create(files: Files, path: str, data: bytes) -> str:
    """Return the outcome of one writer: `wrote`, `equal` or `conflict`."""
    try:
        return "wrote" if files.create(path, data) else "equal"
    except ObjectConflict:
        return "conflict"


def test_an_object_reads_back_as_it_was_written(files: Files):
    assert files.create("a/b/c.bin", b"\x00data\xff") is True
    assert files.read("a/b/c.bin") == b"\x00data\xff"
    assert files.size("a/b/c.bin") == 6
    assert [files.exists(path) for path in ("a/b/c.bin", "a/b", "a/b/c")] == [True, False, False]
    assert files.url("a/b/c.bin") == f"{files.root}/a/b/c.bin"


def test_an_empty_object_is_an_object(files: Files):
    assert files.create("empty", b"")
    assert (files.read("empty"), files.size("empty"), files.list()) == (b"", 0, ["empty"])


def test_a_second_writer_of_equal_bytes_succeeds(files: Files):
    assert files.create("x", b"same") is True
    assert files.create("x", b"same") is False


def test_a_second_writer_of_other_bytes_is_refused_and_changes_nothing(files: Files):
    files.create("x", b"first")
    with pytest.raises(ObjectConflict) as caught:
        files.create("x", b"second")
    assert caught.value.where == files.url("x")
    assert files.read("x") == b"first"


def test_one_of_many_racing_threads_writes_and_the_others_know(files: Files):
    for number in range(2):
        with ThreadPoolExecutor(10) as threads:
            bodies = [b"equal"] * 4 + [f"other {writer}".encode() for writer in range(6)]
            results = list(
                threads.map(lambda body, n=number: try_to_create(files, f"race/{n}", body), bodies)
            )
        assert results.count("wrote") == 1
        won = files.read(f"race/{number}")
        assert [result != "conflict" for result in results] == [body == won for body in bodies]


@pytest.mark.integration
def test_exactly_one_of_many_racing_processes_writes(files: Files):
    with pool(3) as writers:
        jobs = [(files, f"race/{n}", f"writer {w}".encode()) for n in range(6) for w in range(3)]
        results = writers.starmap(try_to_create, jobs, chunksize=1)
    assert (results.count("wrote"), results.count("conflict")) == (6, 12)
    assert len(files.list("race")) == 6


def test_a_missing_object_is_named_in_the_error(files: Files, tmp_path: Path):
    attempts: list[Callable[[], object]] = [
        lambda: files.read("not/there"),
        lambda: files.size("not/there"),
        lambda: files.get_file("not/there", tmp_path / "copy"),
    ]
    for attempt in attempts:
        with pytest.raises(ObjectMissing) as caught:
            attempt()
        assert caught.value.where == files.url("not/there")
    assert not (tmp_path / "copy").exists()


def test_a_wrong_checksum_is_corruption(files: Files):
    files.create("x", b"data")
    assert files.read("x", sha256=hashlib.sha256(b"data").hexdigest()) == b"data"
    with pytest.raises(ObjectCorrupt, match="not the bytes that were written"):
        files.read("x", sha256=hashlib.sha256(b"Data").hexdigest())


def test_a_flipped_byte_on_disk_is_found(local_files: Files):
    local_files.create("x", b"data")
    Path(local_files.url("x").removeprefix("file://")).write_bytes(b"dat\x60")
    with pytest.raises(ObjectCorrupt):
        local_files.read("x", sha256=hashlib.sha256(b"data").hexdigest())


def test_listing_is_sorted_recursive_and_relative_to_the_root(files: Files):
    for path in ("b/2", "b/1", "b/c/3", "bb/4", "a"):
        files.create(path, b"")
    assert files.list() == ["a", "b/1", "b/2", "b/c/3", "bb/4"]
    assert files.list("b") == files.list("b/") == ["b/1", "b/2", "b/c/3"]
    assert files.list("nothing") == []


@pytest.mark.integration
def test_listing_on_s3_follows_every_page(s3_root: str):
    files = Files(s3_root)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda n: files.create(f"many/{n:04d}", b""), range(1003)))
    assert files.list("many") == [f"many/{n:04d}" for n in range(1003)]


def test_a_deleted_object_is_gone_and_deleting_twice_is_no_error(files: Files):
    files.create("x", b"1")
    files.delete("x")
    files.delete("x")
    assert not files.exists("x")
    assert files.create("x", b"2") is True


def test_large_files_are_uploaded_and_downloaded_in_chunks(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for module in (local, s3):
        monkeypatch.setattr(module, "CHUNK_BYTES", 5 * 1024**2)
    data = bytes(range(256)) * 4096 * 12
    (tmp_path / "source").write_bytes(data)
    record = files.put_file(tmp_path / "source", "big/file")
    assert (record.path, record.size_bytes, record.sha256) == (
        "big/file",
        len(data),
        hashlib.sha256(data).hexdigest(),
    )
    assert files.put_file(tmp_path / "source", "big/file") == record
    assert files.get_file("big/file", tmp_path / "deep/copy", record.sha256) == record
    assert (tmp_path / "deep/copy").read_bytes() == data
    (tmp_path / "other").write_bytes(data[:-1] + b"\x00")
    with pytest.raises(ObjectConflict):
        files.put_file(tmp_path / "other", "big/file")
    (tmp_path / "source").unlink()
    assert files.read("big/file", record.sha256) == data


@pytest.mark.parametrize(("code", "names"), [(None, 2), (errno.EXDEV, 1)])
def test_a_file_of_the_store_s_own_file_system_becomes_the_object_without_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int | None, names: int
):
    files = Files(tmp_path / "store")
    source = tmp_path / "source"
    source.write_bytes(b"a checkpoint")
    os.utime(source, (0, 0))
    link = Path.hardlink_to

    def between_file_systems(target: Path, local: Path) -> None:
        if code and Path(local) == source:
            raise OSError(code, os.strerror(code))
        link(target, local)

    monkeypatch.setattr(Path, "hardlink_to", between_file_systems)
    record = files.put_file(source, "checkpoints/x")
    assert source.stat().st_nlink == names
    entry = next(files.entries("checkpoints"))
    assert (entry.size_bytes, entry.modified_s > time.time() - 60) == (12, True)
    assert files.put_file(source, "checkpoints/x") == record
    source.unlink()
    assert files.read("checkpoints/x", record.sha256) == b"a checkpoint"


def test_a_corrupt_download_leaves_no_file(files: Files, tmp_path: Path):
    files.create("x", b"data")
    with pytest.raises(ObjectCorrupt):
        files.get_file("x", tmp_path / "copy", sha256="0" * 64)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("copy")] == []


INHERITED: list[Files] = []


def read_and_create(files: Files | None) -> None:
    """Read and create in a child process, with the store that it received or inherited through
    fork."""
    files = files or INHERITED[-1]
    assert files.read("x") == b"from the parent"
    files.create("y", b"from the child")


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_process_opens_the_store_again(files: Files, method: str):
    files.create("x", b"from the parent")
    INHERITED.append(files)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(method)) as child:
        child.submit(read_and_create, None if method == "fork" else files).result(timeout=60)
    assert files.read("y") == b"from the child"


def test_a_pickle_holds_the_root_and_no_credentials(files: Files, monkeypatch: pytest.MonkeyPatch):
    files.create("x", b"1")
    pickled = pickle.dumps(files)
    assert len(pickled) < 250
    assert os.environ.get("AWS_SECRET_ACCESS_KEY", "not-a-secret").encode() not in pickled
    assert pickle.loads(pickled).read("x") == b"1"


def test_a_relative_root_means_the_same_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    files = Files("store")
    monkeypatch.chdir("/")
    assert files.root == Files(f"file://{tmp_path}/store/").root == f"file://{tmp_path}/store"


@pytest.mark.parametrize(
    "root", ["gs://bucket/x", "memory://x", "s3://", "file://relative", "http://host/x"]
)
def test_an_untested_kind_of_store_is_refused(root: str):
    with pytest.raises(StoreError, match="not a root"):
        Files(root)


@pytest.mark.parametrize(
    "path",
    ["", "/etc/passwd", "a/../../b", "a//b", "./a", "a/", "a\\b", "a\nb", "a.tmp-" + "0" * 32],
)
def test_a_path_cannot_leave_the_store(local_files: Files, path: str):
    for attempt in (
        local_files.read,
        local_files.exists,
        lambda path: local_files.create(path, b""),
    ):
        with pytest.raises(StoreError):
            attempt(path)


def test_a_full_disk_is_named_and_leaves_no_file(
    local_files: Files, small_disk: Path | None, monkeypatch: pytest.MonkeyPatch
):
    files = Files(small_disk) if small_disk else local_files
    files.create("small", b"fits")
    if small_disk is None:
        monkeypatch.setattr(local.os, "fsync", _no_space)
    with pytest.raises(StoreFull, match="no space left"):
        files.create("x/large", bytes(2 * 1024**2))
    monkeypatch.undo()
    assert files.list() == ["small"]
    assert list(files.entries(temporary=True)) == []
    assert files.create("x/large", b"now it fits")


def _no_space(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def small_disk(tmp_path: Path):
    """A disk of one MiB, or None without permission to mount one (then the test makes the write
    fail)."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)],
        capture_output=True,
        check=False,
    )
    yield disk if mounted.returncode == 0 else None
    if mounted.returncode == 0:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.ENOSPC])
def test_a_quota_is_a_full_disk(local_files: Files, number: int, monkeypatch: pytest.MonkeyPatch):
    def refuse(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(local.os, "fsync", refuse)
    with pytest.raises(StoreFull) as caught:
        local_files.create("x", b"1")
    assert caught.value.found == os.strerror(number)
    assert "repeat the command" in str(caught.value.do)


WRITE_FOREVER = """
import sys
from rlpipe.store.objects import local
from rlpipe.store.objects.files import Files
def slowly(file):
    file.write(b"half")
    file.flush()
    print("half", flush=True)
    sys.stdin.read()
local.LocalBackend(sys.argv[1])._publish("x", slowly)
"""


@pytest.mark.integration
def test_a_killed_writer_leaves_no_object(local_files: Files):
    directory = local_files.root.removeprefix("file://")
    command = [sys.executable, "-c", WRITE_FOREVER, directory]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"half\n"
        writer.send_signal(signal.SIGKILL)
    assert local_files.list() == []
    assert [entry.size_bytes for entry in local_files.entries(temporary=True)] == [4]
    assert local_files.create("x", b"whole") is True


@pytest.fixture
def lossy_files(s3_server: S3Server, s3_root: str, monkeypatch: pytest.MonkeyPatch):
    """A store on S3 behind a proxy that loses replies."""
    proxy = LossyProxy(s3_server.url)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    yield Files(s3_root), proxy
    proxy.close()


@pytest.mark.integration
def test_a_lost_reply_is_success(lossy_files: tuple[Files, LossyProxy]):
    files, proxy = lossy_files
    proxy.lose(b"PUT ")
    assert files.create("x", b"data") is False
    assert proxy.lost == 1
    assert files.read("x") == b"data"


@pytest.mark.integration
def test_a_lost_reply_at_the_end_of_a_large_upload_is_success(
    lossy_files: tuple[Files, LossyProxy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    files, proxy = lossy_files
    monkeypatch.setattr(s3, "CHUNK_BYTES", 5 * 1024**2)
    data = bytes(11 * 1024**2)
    (tmp_path / "source").write_bytes(data)
    proxy.lose(b"?uploadId=")
    record = files.put_file(tmp_path / "source", "x")
    assert proxy.lost == 1
    assert files.read("x", record.sha256) == data


@pytest.mark.integration
def test_a_wrong_secret_is_named(
    s3_server: S3Server, s3_root: str, monkeypatch: pytest.MonkeyPatch
):
    for name, value in s3_environment(s3_server.url, secret="wrong").items():
        monkeypatch.setenv(name, value)
    for attempt in (lambda: Files(s3_root).create("x", b""), lambda: Files(s3_root).list()):
        with pytest.raises(StoreError, match="SignatureDoesNotMatch"):
            attempt()


@pytest.mark.integration
def test_a_missing_bucket_is_not_a_missing_object(s3_root: str):
    with pytest.raises(StoreError, match="NoSuchBucket") as caught:
        Files("s3://no-such-bucket/x").read("y")
    assert not isinstance(caught.value, ObjectMissing)


@pytest.mark.integration
def test_an_unreachable_server_is_named_in_time(s3_root: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    started = time.monotonic()
    with pytest.raises(StoreError, match=r"127\.0\.0\.1:9"):
        Files(s3_root).create("x", b"")
    assert time.monotonic() - started < 60


@pytest.mark.integration
def test_busy_answers_are_retried_until_they_end(s3_root: str, monkeypatch: pytest.MonkeyPatch):
    backend = s3.S3Backend(s3_root.removeprefix("s3://"))
    answers = [s3_error("ConditionalRequestConflict")] * 2
    real = backend._s3.call_s3

    def busy(method: str, **arguments):
        if method == "put_object" and answers:
            raise answers.pop()
        return real(method, **arguments)

    monkeypatch.setattr(backend._s3, "call_s3", busy)
    assert backend.create("x", b"data") is True
    answers += [s3_error("OperationAborted")] * 99
    monkeypatch.setattr(s3.time, "sleep", lambda seconds: None)
    with pytest.raises(StoreError, match="concurrent writes of the same key"):
        backend.create("y", b"data")
    answers[:] = [s3_error("QuotaExceeded")]
    with pytest.raises(StoreFull, match="QuotaExceeded"):
        backend.create("z", b"data")


def s3_error(code: str) -> OSError:
    """Return an error as s3fs raises it for an S3 error code."""
    return translate_boto_error(
        ClientError({"Error": {"Code": code, "Message": code}}, "PutObject")
    )


@pytest.mark.parametrize("large", [False, True])
def test_a_taken_name_that_is_free_again_is_written(
    local_files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: bool
):
    """S3 answers like this for an aborted multipart upload, or an object that is being deleted."""
    (tmp_path / "file").write_bytes(b"bytes")

    def write() -> object:
        return (
            local_files.put_file(tmp_path / "file", "name")
            if large
            else local_files.create("name", b"bytes")
        )

    for name in ("create", "create_from"):
        monkeypatch.setattr(local.LocalBackend, name, lambda *_: False)
    with pytest.raises(
        StoreError, match="the name is taken, but the object does not exist"
    ) as caught:
        write()
    assert not isinstance(caught.value, ObjectMissing), "so the stage is retried"
    monkeypatch.undo()
    method = "create_from" if large else "create"
    answers = [False]
    plain = getattr(local.LocalBackend, method)
    monkeypatch.setattr(
        local.LocalBackend, method, lambda *given: answers.pop() if answers else plain(*given)
    )
    write()
    assert local_files.read("name") == b"bytes"
