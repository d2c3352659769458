"""Run Python programs of the policy in a sandbox, as a tool.

Entry point: `Python`, a tool for `rollout.tools`. bubblewrap (0.8 or newer) makes namespaces of its
own for each program, and a seccomp filter removes the system calls that lead out of them:

    network         none, not even a loopback interface; `socket` is refused
    files           Python's standard library and system libraries, read-only; an empty /tmp in
                    memory; no /proc, no /sys, no terminal
    processes       one: `fork`, and `clone` without CLONE_THREAD, are refused; threads work
    privileges      no capabilities, no user namespaces, uid and gid 65534
    memory          address space `memory_bytes`, files `file_bytes`; memory outside of both
                    (memfd, System V) is refused
    time            CPU time of all threads `cpu_s`; wall time `rollout.tool_timeout_s`
    output          64 KiB; a program that writes more is killed

Nothing of one program is there for the next. The kernel is shared: a program with an exploit of the
kernel escapes. The kernel's own memory for empty files has no limit but the CPU time; with
`file_bytes=0` there are none.

Source: bwrap(1); seccomp(2); linux/filter.h.
"""

from __future__ import annotations

import asyncio
import os
import platform
import resource
import shutil
import struct
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from rlpipe.errors import ConfigError
from rlpipe.rollout.tools import program_output

_NOBODY = "65534"
_FEW_FILES = 64
_CHECK_TIMEOUT_S = 30.0
# The check of a machine: the program runs, and the filter is in force.
_CHECK = "import os\ntry: os.fork()\nexcept PermissionError: print('ready')"

_LOAD_WORD = 0x20
_JUMP_IF_EQUAL = 0x15
_JUMP_IF_AT_LEAST = 0x35
_JUMP_IF_SET = 0x45
_RETURN = 0x06
_ALLOW = 0x7FFF0000
_KILL = 0x80000000
_EPERM = 0x00050000 | 1
_ENOSYS = 0x00050000 | 38
_NUMBER_AT = 0
_ARCHITECTURE_AT = 4
_FIRST_ARGUMENT_AT = 16
_CLONE_THREAD = 0x00010000
_X32_BIT = 0x40000000

_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Machine → (column of `_REFUSED`, AUDIT_ARCH of linux/audit.h)."""
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    # The network. `socketpair`, which asyncio needs, stays.
    "socket": (41, 198),
    # Other processes.
    "fork": (57, None),
    "vfork": (58, None),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    # Mounts and namespaces.
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "mknod": (133, None),
    "mknodat": (259, 33),
    # Memory that no limit counts.
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    # Parts of the kernel that programs rarely need and exploits often use. io_uring also opens
    # sockets past a filter.
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "personality": (135, 92),
    "vmsplice": (278, 75),
    "fanotify_init": (300, 262),
    "syslog": (103, 116),
    "lookup_dcookie": (212, 18),
}
"""System call → its number on x86_64 and on aarch64; None: the machine does not have it."""
_CLONE = (56, 220)
_CLONE3 = 435


class Python:
    """The tool: takes a program and returns its output, with errors and a failing exit status."""

    def __init__(
        self,
        memory_bytes: int = 512 * 1024**2,
        file_bytes: int = 64 * 1024**2,
        cpu_s: int = 10,
        packages: bool = False,
    ) -> None:
        """Check that the sandbox works on this machine.

        `memory_bytes`: address space of a program. `file_bytes`: size of its /tmp; 0: it cannot
        write files. `cpu_s`: CPU time in seconds. `packages`: the program can import the packages
        of the run's interpreter, such as numpy.

        Raises: ConfigError if bubblewrap is missing, or cannot make a sandbox here.
        """
        self._limits = {
            resource.RLIMIT_AS: memory_bytes,
            resource.RLIMIT_CPU: cpu_s,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_NOFILE: _FEW_FILES,
        }
        self._filter = _seccomp_filter(platform.machine())
        self._command = _command(_bubblewrap(), file_bytes, packages=packages)
        answer = _check(self)
        if answer != "ready":
            raise _refused(
                f"bwrap: {answer[-500:] or 'no output'}",
                "allow user namespaces to the user of the run (in a container: its seccomp and "
                "AppArmor profiles; on Ubuntu: kernel.apparmor_restrict_unprivileged_userns=0), "
                "with bubblewrap 0.8 or newer",
            )

    async def __call__(self, code: str) -> str:
        """Return the output of a program."""
        program = _in_memory("program", code.encode(errors="replace"))
        try:
            filter_fd = _in_memory("filter", self._filter)
            try:
                command = [
                    *self._command,
                    *("--ro-bind-data", str(program), "/program.py"),
                    *("--seccomp", str(filter_fd)),
                    # The namespace's root is in memory too, without the limit of /tmp.
                    *("--remount-ro", "/"),
                    *("--", "/python/bin/python", "-s", "-P", "-B", "/program.py"),
                ]
                return await program_output(
                    command, "/", self._limits, pass_fds=(program, filter_fd)
                )
            finally:
                os.close(filter_fd)
        finally:
            os.close(program)


def _bubblewrap() -> str:
    path = shutil.which("bwrap")
    if path is None:
        raise _refused("no program bwrap in PATH", "install bubblewrap: apt-get install bubblewrap")
    return path


def _refused(found: str, do: str) -> ConfigError:
    return ConfigError(
        "programs cannot run in a sandbox on this machine",
        where="rollout.tools (rlpipe.rollout.sandbox.Python)",
        found=found,
        expected="bubblewrap (bwrap) 0.8 or newer, on Linux with user namespaces",
        do=f"{do}; or let programs read files and use the network: rlpipe.rollout.tools.python",
    )


def _check(tool: Python) -> str:
    """Return the output of `_CHECK`. The caller may run in an event loop, so a loop of its own."""
    from concurrent.futures import ThreadPoolExecutor

    async def run() -> str:
        async with asyncio.timeout(_CHECK_TIMEOUT_S):
            return await tool(_CHECK)

    with ThreadPoolExecutor(1) as pool:
        try:
            return pool.submit(asyncio.run, run()).result()
        except (OSError, TimeoutError) as error:
            return f"{type(error).__name__}: {error}"


def _in_memory(name: str, content: bytes) -> int:
    """Return the descriptor of a file in memory, read from its start."""
    descriptor = os.memfd_create(name)
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _command(bubblewrap: str, file_bytes: int, *, packages: bool) -> list[str]:
    """Return bubblewrap's arguments that are equal for all programs."""
    command = [
        *(bubblewrap, "--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL"),
        *("--uid", _NOBODY, "--gid", _NOBODY, "--hostname", "sandbox"),
        # A program that leaves the process group of bwrap ends with bwrap.
        *("--die-with-parent", "--new-session", "--clearenv"),
        *("--setenv", "LD_LIBRARY_PATH", "/python/lib", "--setenv", "HOME", "/tmp"),
        # A pool of threads for each core takes more address space than the limit.
        *("--setenv", "OPENBLAS_NUM_THREADS", "1", "--setenv", "OMP_NUM_THREADS", "1"),
    ]
    for source, target in _libraries():
        command += ["--ro-bind", str(source), target]
    stdlib = Path(sysconfig.get_path("stdlib"))
    for installed in (stdlib / "site-packages", stdlib / "dist-packages"):
        if installed.is_dir():
            hidden = _in_sandbox(installed)
            command += ["--tmpfs", hidden, "--remount-ro", hidden]
    if packages:
        command += ["--ro-bind", sysconfig.get_path("purelib"), "/packages"]
        command += ["--setenv", "PYTHONPATH", "/packages"]
    for device in ("/dev/null", "/dev/zero", "/dev/urandom"):
        command += ["--dev-bind", device, device]
    writable = ("--size", str(file_bytes), "--tmpfs", "/tmp") if file_bytes else ("--dir", "/tmp")
    return [*command, *writable, "--chdir", "/tmp"]


def _libraries() -> Iterable[tuple[Path, str]]:
    """Yield (path on this machine, path in the sandbox) of what an interpreter needs.

    Python is in /python, so its path on this machine, such as a home, does not appear.
    """
    base = Path(sys.base_prefix)
    yield Path(sys.executable).resolve(), "/python/bin/python"
    folders = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
    yield from ((folder, _in_sandbox(folder)) for folder in folders if folder.is_relative_to(base))
    for library in (base / "lib").glob("libpython*.so*"):
        yield library, f"/python/lib/{library.name}"
    triplet = sysconfig.get_config_var("MULTIARCH") or ""
    candidates = [Path(root, "lib", triplet) for root in ("/", "/usr") if triplet]
    candidates += [Path("/lib64"), Path("/usr/lib64")]
    if platform.machine() == "aarch64":
        candidates.append(Path("/lib/ld-linux-aarch64.so.1"))
    yield from ((path, str(path)) for path in candidates if path.exists())


def _in_sandbox(folder: Path) -> str:
    """Return the path of a folder of the standard library in the sandbox."""
    base = Path(sys.base_prefix)
    # A virtual environment reports the folders of its base interpreter.
    return f"/python/{folder.relative_to(base)}" if folder.is_relative_to(base) else str(folder)


def _seccomp_filter(machine: str) -> bytes:
    """Return the filter as `struct sock_filter[]`. Raises: ConfigError for other machines."""
    if machine not in _MACHINES:
        raise _refused(f"machine {machine}", f"use a machine of type {' or '.join(_MACHINES)}")
    column, architecture = _MACHINES[machine]
    steps = [
        _step(_LOAD_WORD, _ARCHITECTURE_AT),
        # 32-bit system calls have other numbers.
        _step(_JUMP_IF_EQUAL, architecture, 1, 0),
        _step(_RETURN, _KILL),
        _step(_LOAD_WORD, _NUMBER_AT),
        _step(_JUMP_IF_AT_LEAST, _X32_BIT, 0, 1),
        _step(_RETURN, _EPERM),
    ]
    for numbers in _REFUSED.values():
        if (number := numbers[column]) is not None:
            steps += [_step(_JUMP_IF_EQUAL, number, 0, 1), _step(_RETURN, _EPERM)]
    steps += [
        # Its flags are in memory, which a filter cannot read. glibc then calls clone.
        _step(_JUMP_IF_EQUAL, _CLONE3, 0, 1),
        _step(_RETURN, _ENOSYS),
        _step(_JUMP_IF_EQUAL, _CLONE[column], 0, 3),
        _step(_LOAD_WORD, _FIRST_ARGUMENT_AT),
        _step(_JUMP_IF_SET, _CLONE_THREAD, 1, 0),
        _step(_RETURN, _EPERM),
        _step(_RETURN, _ALLOW),
    ]
    return b"".join(steps)


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
