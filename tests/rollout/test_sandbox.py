"""Programs in a real sandbox of bubblewrap, and attempts to leave it."""

from __future__ import annotations

import asyncio
import os
import platform
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from rlpipe.config.rollout import ToolConfig
from rlpipe.errors import ConfigError
from rlpipe.rollout import sandbox
from rlpipe.rollout.sandbox import Python
from rlpipe.rollout.tools import Tool

SECRET = "the secret of this run"
MEMORY_BYTES = 256 * 1024**2
FILE_BYTES = 16 * 1024**2


_CALL = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    result = getattr(libc, name)(*arguments)
    print("escaped" if result >= 0 else f"refused: {os.strerror(ctypes.get_errno())}")
"""
_TRY = """
import errno, os, socket, sys
def attempt(function, *arguments):
    try:
        print("escaped", function(*arguments))
    except OSError as error:
        print("refused:", error.strerror)
"""

REFUSED = {
    "a TCP connection": "attempt(socket.create_connection, ('127.0.0.1', {port}), 2)",
    "a UDP packet": "attempt(socket.socket, socket.AF_INET, socket.SOCK_DGRAM)",
    "a raw socket": "attempt(socket.socket, socket.AF_INET, socket.SOCK_RAW, 1)",
    "a Unix socket": "attempt(socket.socket, socket.AF_UNIX)",
    "a socket of the virtual machine": "attempt(socket.socket, 40, socket.SOCK_STREAM)",
    "a name look-up": "attempt(socket.getaddrinfo, 'localhost.localdomain.test', 80)",
    "the users": "attempt(open, '/etc/passwd')",
    "the home": "attempt(os.listdir, {home!r})",
    "a file of the run": "attempt(open, {secret!r})",
    "a file of the run by a link": "os.symlink({secret!r}, 'link'); attempt(open, 'link')",
    "a file of the run by parents": "attempt(open, '/tmp/../../../../../..' + {secret!r})",
    "a hard link to a library": "attempt(os.link, os.__file__, '/tmp/library')",
    "the environment of the parent": "attempt(open, '/proc/%d/environ' % os.getppid())",
    "the environment of process 1": "attempt(open, '/proc/1/environ')",
    "the folder of the test": "attempt(os.listdir, {folder!r})",
    "a new file in the folder of the test": "attempt(open, {folder!r} + '/new', 'w')",
    "a new file in the root": "attempt(open, '/new', 'w')",
    "another standard library": "attempt(open, os.__file__, 'a')",
    "another interpreter": "attempt(open, os.path.realpath(sys.executable), 'r+b')",
    "another system library": "attempt(open, '/lib64/new', 'w')",
    "the memory of the machine": "attempt(open, '/dev/mem')",
    "the log of the kernel": "attempt(open, '/dev/kmsg')",
    "a disk": "attempt(os.mknod, '/tmp/disk', 0o60666, os.makedev(8, 0))",
    "the terminal": "attempt(open, '/dev/tty')",
    "shared memory": "attempt(open, '/dev/shm/new', 'w')",
    "a signal to the test": "attempt(os.kill, {pid}, 9)",
    "a signal to the parent's group": "attempt(os.killpg, {pid}, 9)",
    "a child process": "attempt(os.fork)",
    "a program": "import subprocess; attempt(subprocess.Popen, [sys.executable])",
    "another root": "attempt(os.chroot, '/tmp')",
    "another user": "attempt(os.setuid, 0)",
    "memory without a limit": "attempt(os.memfd_create, 'bomb')",
    "higher limits": "import resource\n"
    "try: resource.setrlimit(resource.RLIMIT_AS, (-1, -1)); print('escaped')\n"
    "except ValueError as error: print('refused:', error)",
    "higher priority": "attempt(os.nice, -5)",
}
"""Attempt → program that prints `refused` and not `escaped`."""

REFUSED_CALLS = {
    "ptrace of the parent": "call('ptrace', 16, os.getppid(), 0, 0)",
    "ptrace by the parent": "call('ptrace', 0, 0, 0, 0)",
    "a mount": "call('mount', b'none', b'/tmp', b'tmpfs', 0, None)",
    "a bind mount": "call('mount', b'/', b'/tmp', None, 4096, None)",
    "a user namespace": "call('unshare', 0x10000000)",
    "a network namespace": "call('unshare', 0x40000000)",
    "System V memory": "call('shmget', 0, 1 << 30, 0o1666)",
    "the tracing of the kernel": "call('syscall', {perf_event_open}, 0, 0, -1, -1, 0)",
    "a program of the kernel": "call('syscall', {bpf}, 0, 0, 0)",
    "io_uring": "call('syscall', 425, 8, ctypes.create_string_buffer(512))",
    "clone3": "call('syscall', 435, ctypes.create_string_buffer(88), 88)",
    "clone": "call('syscall', {clone}, 17, 0, 0, 0, 0)",
    "a key of the kernel": "call('syscall', {keyctl}, 0, -3, 0)",
    "the mounts of the kernel": "call('syscall', 428, -100, b'/', 1)",
}
NUMBERS = {
    name: numbers[0 if platform.machine() == "x86_64" else 1]
    for name, numbers in {**sandbox._REFUSED, "clone": sandbox._CLONE}.items()
}


@pytest.fixture(scope="module")
def tool() -> Tool:
    """The tool as a run has it."""
    arguments = {"memory_bytes": MEMORY_BYTES, "file_bytes": FILE_BYTES, "cpu_s": 3}
    config = ToolConfig(path="rlpipe.rollout.sandbox.Python", arguments=arguments)
    return Tool(config, timeout_s=60)


@pytest.mark.bubblewrap
async def test_a_program_prints_and_fails_as_in_an_interpreter(tool: Tool):
    assert tool.name == "python"
    assert await tool.answer("print(6 * 7)") == "42"
    assert await tool.answer({"code": "import math; print(math.comb(9, 3))"}) == "84"
    failed = await tool.answer("x = 1\nprint(x / 0)")
    assert 'File "/program.py", line 2' in failed
    assert failed.endswith("ZeroDivisionError: division by zero\n(exit status 1)")
    long = f"text = '{'a' * 500_000}'\nprint(len(text))"  # more than an argument of a program
    assert await tool.answer(long) == "500000"
    threads = "import asyncio\nprint(asyncio.run(asyncio.to_thread(sum, [1, 2])))"
    assert await tool.answer(threads) == "3"
    files = "open('a', 'w').write('text')\nprint(open('/tmp/a').read())"
    assert await tool.answer(files) == "text"


@pytest.mark.bubblewrap
@pytest.mark.parametrize("attempt", REFUSED)
async def test_an_escape_is_refused(attempt: str, tool: Tool, tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = _TRY + REFUSED[attempt].format(
            port=server.getsockname()[1],
            home=str(Path.home()),
            secret=str(secret),
            folder=str(tmp_path),
            pid=os.getpid(),
        )
        answer = await tool.answer(code)
    assert answer.startswith("refused: ") and "escaped" not in answer
    assert SECRET not in answer
    assert os.listdir(tmp_path) == ["secret"]  # noqa: PTH208 - the test may wait


@pytest.mark.bubblewrap
@pytest.mark.parametrize("attempt", REFUSED_CALLS)
async def test_a_system_call_of_an_escape_is_refused(attempt: str, tool: Tool):
    answer = await tool.answer(_CALL + REFUSED_CALLS[attempt].format(**NUMBERS))
    assert answer.startswith("refused: ") and "escaped" not in answer


@pytest.mark.bubblewrap
async def test_a_program_sees_neither_environment_nor_files_nor_processes_of_the_run(
    tool: Tool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RLPIPE_JUDGE_KEY", SECRET)
    code = (
        "import os, socket\n"
        "print(dict(os.environ), socket.gethostname(), os.getuid(), os.getgid())\n"
        "print(sorted(os.listdir('/')), os.listdir('/tmp'))\n"
        "def is_open(fd):\n"
        "    try: os.fstat(fd)\n"
        "    except OSError: return False\n"
        "    return True\n"
        "print([fd for fd in range(64) if is_open(fd)], os.getpid() < 10)\n"
        "try: print(input())\n"
        "except EOFError: print('no input')\n"
    )
    answer = await tool.answer(code)
    assert SECRET not in answer and str(Path.home()) not in answer
    _, folders, descriptors, read = answer.splitlines()
    assert answer.splitlines()[0].endswith("} sandbox 65534 65534")
    assert set(eval(folders.partition("] [")[0] + "]")) <= {
        *("dev", "lib", "lib64", "program.py", "python", "tmp", "usr")
    }
    assert folders.endswith(" []") and descriptors == "[0, 1, 2] True" and read == "no input"


@pytest.mark.bubblewrap
async def test_two_programs_share_no_files(tool: Tool):
    assert await tool.answer("open('left', 'w').write('x')\nprint('written')") == "written"
    assert await tool.answer("import os; print(os.listdir('.'))") == "[]"


@pytest.mark.bubblewrap
@pytest.mark.parametrize(
    ("code", "end"),
    [
        ("x = bytearray(1 << 30)", "MemoryError\n(exit status 1)"),
        (
            "import mmap\nkept = []\nwhile True: kept.append(mmap.mmap(-1, 1 << 24))",
            "Cannot allocate memory\n(exit status 1)",
        ),
        (
            "import threading, time\n"
            "while True: threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
            "can't start new thread\n(exit status 1)",
        ),
        (
            "file = open('/tmp/huge', 'wb')\nwhile True: file.write(bytes(1 << 20))",
            "No space left on device\n(exit status 1)",
        ),
        (
            "import os\nkept = []\nwhile True: kept.append(os.pipe())",
            "Too many open files\n(exit status 1)",
        ),
        ("while True: pass", "(exit status 137)"),  # after cpu_s: bubblewrap reports 128 + 9
        (
            "import threading\n"
            "def spin():\n    while True: pass\n"
            "for _ in range(8): threading.Thread(target=spin).start()",
            "(exit status 137)",
        ),
        ("import os\nos.kill(os.getpid(), 9)", "(exit status 137)"),
    ],
)
async def test_memory_files_threads_and_time_have_limits(code: str, end: str, tool: Tool):
    started_s = time.monotonic()
    assert (await tool.answer(code)).endswith(end)
    assert time.monotonic() - started_s < 50


@pytest.mark.bubblewrap
async def test_all_memory_and_files_together_stay_below_the_limits(tool: Tool):
    lowest = before = psutil.virtual_memory().available
    ended = threading.Event()

    def watch() -> None:
        nonlocal lowest
        while not ended.wait(0.01):
            lowest = min(lowest, psutil.virtual_memory().available)

    watching = threading.Thread(target=watch)
    watching.start()
    code = (
        "kept = []\n"
        "try:\n"
        "    while True: kept.append(bytearray(b'x' * (1 << 20)))\n"
        "except MemoryError: kept.pop(); print('no memory')\n"
        "try:\n"
        "    for number in range(10**6): open(f'/tmp/{number}', 'wb').write(kept[0])\n"
        "except OSError as error: print(error.strerror)\n"
    )
    answer = await tool.answer(code)
    ended.set()
    watching.join()
    assert answer == "no memory\nNo space left on device"
    # Other processes of the machine use memory too.
    assert before - lowest < 4 * (MEMORY_BYTES + FILE_BYTES)


@pytest.mark.bubblewrap
async def test_output_ends_at_its_limit(tool: Tool):
    answer = await tool.answer("while True: print('y' * 1000)")
    assert 60_000 < len(answer) < 70_000 and set(answer.partition("(")[0].strip()) == {"y", "\n"}


@pytest.mark.bubblewrap
@pytest.mark.parametrize(
    "code",
    [
        "import time; time.sleep(600)",
        # Closed output, ignored signals and another session do not keep a program alive.
        "import os, signal, time\n"
        "for number in range(1, 32):\n"
        "    if number not in (9, 19): signal.signal(number, signal.SIG_IGN)\n"
        "os.setsid() if os.getsid(0) != os.getpid() else None\n"
        "os.close(1); os.close(2)\n"
        "time.sleep(600)",
    ],
)
async def test_nothing_is_left_of_a_program_after_its_deadline(code: str):
    config = ToolConfig(path="rlpipe.rollout.sandbox.Python")
    answer = await Tool(config, timeout_s=1).answer(code)
    assert answer == "error: no answer within 1 s"
    await _no_programs()


@pytest.mark.bubblewrap
async def test_a_thread_that_outlives_the_main_thread_is_killed_at_the_deadline(tool: Tool):
    code = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()"
    short = Tool(ToolConfig(path="rlpipe.rollout.sandbox.Python"), timeout_s=1)
    assert await short.answer(code) == "error: no answer within 1 s"
    assert await tool.answer("print(1)") == "1"
    await _no_programs()


@pytest.mark.bubblewrap
async def test_without_file_bytes_a_program_writes_nothing():
    tool = Python(file_bytes=0)
    assert (await tool("open('/tmp/a', 'w')")).endswith(
        "Read-only file system: '/tmp/a'\n(exit status 1)"
    )


@pytest.mark.bubblewrap
async def test_packages_of_the_run_can_be_imported_if_allowed():
    code = "import numpy; print(numpy.arange(4).sum())"
    assert await Python(packages=True, memory_bytes=2 * 1024**3)(code) == "6"
    assert "No module named 'numpy'" in await Python()(code)


def test_the_tool_is_refused_without_bubblewrap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    config = ToolConfig(path="rlpipe.rollout.sandbox.Python")
    with pytest.raises(ConfigError, match=r"no program bwrap in PATH.*apt-get install bubblewrap"):
        _one_line_error(config)


def test_the_tool_is_refused_if_bubblewrap_cannot_make_a_sandbox(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    # What bwrap prints where AppArmor forbids user namespaces.
    bubblewrap = tmp_path / "bwrap"
    bubblewrap.write_text(
        "#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied'\nexit 1\n"
    )
    bubblewrap.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    config = ToolConfig(path="rlpipe.rollout.sandbox.Python")
    with pytest.raises(ConfigError, match=r"uid map: Permission denied.*user namespaces"):
        _one_line_error(config)


def _one_line_error(config: ToolConfig) -> None:
    try:
        Tool(config, timeout_s=1)
    except ConfigError as error:
        raise ConfigError(" ".join(str(error).split())) from error


async def _no_programs() -> None:
    # SIGKILL takes a moment on a busy machine.
    for _ in range(600):
        if not _programs():
            return
        await asyncio.sleep(0.05)
    pytest.fail(f"processes are left: {_programs()}")


def _programs() -> list[int]:
    """Return the processes of sandboxes that this test started."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE and "/program.py" in process.cmdline():
                found.append(process.pid)
    return found
