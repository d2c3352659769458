"""Check this machine before a run: a line for each check, `ok`, `note` or `NOT OK` with what to do.

    rlpipe doctor                       packages, GPUs, memory, disks, limits, ports, servers, store
    rlpipe doctor my_run.yaml           and all checks that a start of this recipe makes

Versions are read from the packages' metadata: nothing heavy is imported without a recipe. The check
of the store writes one small object, tries to write it again, and deletes it.
"""

from __future__ import annotations

import csv
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import psutil
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rlpipe.config.load import home, load_run, require_files, use_home
from rlpipe.errors import ConfigError, ObjectConflict, RlpipeError
from rlpipe.system.ports import is_free
from rlpipe.system.project import PROJECT
from tools.command import parsers
from tools.local_prefect import answers, check_reachable, url_of_profile
from tools.local_servers import NAMES, LocalServers
from tools.piped import piped

if TYPE_CHECKING:
    from rlpipe.config.run import RunConfig

OK, NOTE, NOT_OK = "ok", "note", "NOT OK"
GB = 1024**3
PYTHON = (3, 11)
WITHOUT_REQUIREMENTS = ("sglang", "mbridge")
"""Packages that tools/setup.sh installs without their declared requirements."""
SHOWN = ("torch", "sglang", "megatron-core", "ray", "prefect", "transformers", "mbridge")
"""Packages with a line of their own."""
MIN_DISK_BYTES = GB
MIN_SHARED_BYTES = 256 * 1024**2
"""Object store of a Ray of our own; in Docker, /dev/shm has 64 MB by default."""
MIN_MEMORY_BYTES = 6 * GB
MIN_OPEN_FILES = 4096
FULLEST = 0.95
"""Ray stops writing objects to a disk that is fuller."""
PORTS = {"Prefect": 4200, "Ray": 6379}
INSTALL = "make setup, or: pip install --constraint {constraints} rlpipe"


@dataclass(frozen=True, slots=True)
class Line:
    """The result of one check."""

    state: str
    name: str
    found: str
    do: str = ""

    def __str__(self) -> str:
        text = f"{self.state:<6}  {self.name:<16} {self.found}"
        return f"{text}\n{'':8}{'':<16} do: {self.do}" if self.do else text


def main() -> int:
    """Run the command. Exit codes: 0 all is ok, 1 something is not ok, 2 wrong input."""
    arguments = parsers.doctor().parse_args()
    try:
        use_home(arguments.home)
        folder = home()
        config = None
        missing = None
        if arguments.recipe is not None:
            config = load_run(arguments.recipe, arguments.overrides)
            missing = missing_files(arguments.recipe, arguments.overrides)
    except RlpipeError as error:
        print(f"{error.kind}: {error}", file=sys.stderr)
        return 2
    root = arguments.store or (config.store.root if config else None) or f"{folder}/store"
    failed = 0
    found = lines(folder, root, None if missing else config)
    for line in chain(found, [missing] if missing else []):
        print(line, flush=True)
        failed += line.state == NOT_OK
    print(f"\n{failed} not ok" if failed else "\nall is ok")
    return 1 if failed else 0


def lines(folder: Path, root: str, config: RunConfig | None) -> Iterator[Line]:
    """Yield the results of all checks."""
    checks: list[Callable[[], Iterable[Line]]] = [
        python_version,
        packages,
        gpus,
        lambda: memory(folder),
        limits,
        ports,
        prefect_server,
        lambda: servers_of_up(folder),
        lambda: [store(root)],
        hugging_face,
    ]
    for check in checks:
        yield from check()
    if config is not None:
        yield recipe(config, folder)


def python_version() -> Iterator[Line]:
    """Check the version of Python."""
    found = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info >= PYTHON:
        yield Line(OK, "Python", found)
    else:
        yield Line(NOT_OK, "Python", found, f"use Python {PYTHON[0]}.{PYTHON[1]} or newer")


def packages() -> Iterator[Line]:
    """Compare the installed packages with the versions that were tested together."""
    constraints = PROJECT / "constraints.txt"
    tested = tested_versions(constraints.read_text(encoding="utf-8"))
    install = INSTALL.format(constraints=constraints)
    same = 0
    for name in required_packages():
        expected = tested.get(canonicalize_name(name))
        try:
            found = version(name)
        except PackageNotFoundError:
            yield Line(NOT_OK, name, f"not installed; tested: {expected}", install)
            continue
        if expected is not None and found.partition("+")[0] != expected:
            yield Line(NOT_OK, name, f"{found}; tested: {expected}", install)
        elif name in SHOWN:
            yield Line(OK, name, found)
        else:
            same += 1
    yield Line(OK, "other packages", f"{same} at their tested versions")


def tested_versions(text: str) -> dict[str, str]:
    """Return package → version of constraints.txt."""
    pins = (line.split("==") for line in text.splitlines() if "==" in line and line[0] != "#")
    return {canonicalize_name(name.strip()): pin.strip() for name, pin in pins}


def required_packages() -> list[str]:
    """Return the packages that every run needs, without extras."""
    declared = map(Requirement, requires("rlpipe") or ())
    needed = {one.name for one in declared if not one.marker or one.marker.evaluate({"extra": ""})}
    return sorted({*needed, *WITHOUT_REQUIREMENTS}, key=str.lower)


def gpus() -> Iterator[Line]:
    """Check driver, GPUs and the CUDA version of torch."""
    cuda = cuda_of_torch()
    fields = "index,name,memory.total,memory.used,driver_version"
    listed = output_of("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    if listed is None:
        yield Line(NOTE, "GPUs", "none (no nvidia-smi): trainer and engines run on the CPU")
        return
    for index, name, total, used, driver in csv.reader(listed.splitlines(), skipinitialspace=True):
        found = f"{name}, {total} MiB, driver {driver}"
        if int(used) > int(total) / 10:
            yield Line(
                NOT_OK,
                f"GPU {index}",
                f"{found}; {used} MiB are in use",
                "end the other process (nvidia-smi lists it), or set CUDA_VISIBLE_DEVICES",
            )
        else:
            yield Line(OK, f"GPU {index}", found)
    supported = re.search(r"CUDA Version:\s*(\d+\.\d+)", output_of("nvidia-smi") or "")
    if cuda is None:
        yield Line(
            NOT_OK,
            "CUDA",
            "this torch is a build for CPUs",
            "RLPIPE_EXTRAS=gpu,dev make setup, or: pip install 'rlpipe[gpu]'",
        )
    elif supported and numbers(supported[1]) < numbers(cuda):
        yield Line(
            NOT_OK,
            "CUDA",
            f"torch needs {cuda}, the driver supports {supported[1]}",
            "install a newer NVIDIA driver",
        )
    else:
        yield Line(OK, "CUDA", f"{cuda} (torch)")


def cuda_of_torch() -> str | None:
    """Return the CUDA version of the installed torch, without importing it; None for CPUs."""
    spec = find_spec("torch")
    for folder in (spec and spec.submodule_search_locations) or ():
        text = (Path(folder) / "version.py").read_text(encoding="utf-8")
        if match := re.search(r"^cuda\b[^=]*= *'([\d.]+)'", text, re.MULTILINE):
            return match[1]
    return None


def numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of a version, for comparison."""
    return tuple(map(int, text.split(".")))


def output_of(*command: str) -> str | None:
    """Return the standard output of a command, or None if it is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout if done.returncode == 0 else None


def memory(folder: Path) -> Iterator[Line]:
    """Check memory, shared memory and free space of the disks."""
    available = psutil.virtual_memory().available
    yield enough(
        "memory", available, MIN_MEMORY_BYTES, "available", "end other programs, or add memory"
    )
    shared = Path("/dev/shm")
    if shared.is_dir():
        yield enough(
            "/dev/shm",
            shutil.disk_usage(shared).free,
            MIN_SHARED_BYTES,
            "free",
            "remove old files there; in Docker: --shm-size=8g",
        )
    for place, use in ((folder, "runs"), (Path(tempfile.gettempdir()), "Ray")):
        usage = shutil.disk_usage(existing(place))
        line = enough(
            f"disk of {use}",
            usage.free,
            MIN_DISK_BYTES,
            f"free at {place}",
            "free some space, or choose another --home" if place == folder else "free some space",
        )
        if line.state == OK and usage.used / usage.total > FULLEST:
            found = f"{usage.used / usage.total:.0%} of {place} are used; Ray needs 5% free"
            line = Line(NOT_OK, line.name, found, "free some space")
        yield line


def enough(name: str, found: int, least: int, what: str, do: str) -> Line:
    """Return the line of an amount of bytes."""
    text = f"{found / GB:.1f} GB {what}"
    if found >= least:
        return Line(OK, name, text)
    return Line(NOT_OK, name, f"{text}; at least {least / GB:.2g} GB are needed", do)


def existing(path: Path) -> Path:
    """Return the path, or its nearest parent that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def limits() -> Iterator[Line]:
    """Check the limit of open files. Ray raises the soft limit to the hard one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= MIN_OPEN_FILES:
        yield Line(OK, "open files", "unlimited" if hard == resource.RLIM_INFINITY else f"{hard}")
    else:
        found = f"at most {hard}; at least {MIN_OPEN_FILES} are needed"
        yield Line(NOT_OK, "open files", found, f"ulimit -n {MIN_OPEN_FILES}, as root if needed")


def ports() -> Iterator[Line]:
    """Check the usual ports. Runs and `rlpipe up` choose another one if a port is taken."""
    for name, port in PORTS.items():
        if is_free("127.0.0.1", port):
            yield Line(OK, f"port {port}", f"free for {name}")
        elif port == PORTS["Prefect"] and answers(f"http://127.0.0.1:{port}/api/health"):
            yield Line(OK, f"port {port}", "a Prefect server answers")
        else:
            yield Line(NOTE, f"port {port}", f"another program has it; {name} takes another port")


def prefect_server() -> Iterator[Line]:
    """Check the configured Prefect server."""
    url = os.environ.get("PREFECT_API_URL") or url_of_profile()
    if url is None:
        yield Line(OK, "Prefect server", "this shell names none, so runs start their own")
        return
    try:
        check_reachable(url)
    except RlpipeError as error:
        yield _failed("Prefect server", error)
    else:
        yield Line(OK, "Prefect server", f"answers at {re.sub(r'//[^/@]*@', '//', url)}")


def servers_of_up(folder: Path) -> Iterator[Line]:
    """Note the servers of `rlpipe up` in this home if the shell is not connected to them."""
    if not (folder / ".up").is_dir():
        return
    servers = LocalServers(folder)
    running = [name for name in NAMES if servers.running(name)]
    needed = servers.environment.items()
    if running and any(os.environ.get(name) != value for name, value in needed):
        found = f"{', '.join(running)} run; this shell does not use them"
        yield Line(NOTE, "rlpipe up", found, f". {servers.folder / 'env'}")


def store(root: str) -> Line:
    """Check that the store accepts an object once, refuses it twice, and deletes it."""
    from rlpipe.store.objects.files import Files

    def probe(files: Files) -> None:
        path = f"doctor/{uuid.uuid4().hex}.json"
        files.create(path, b"{}")
        try:
            files.create(path, b'{"another": 1}')
        except ObjectConflict:
            return
        finally:
            files.delete(path)
        raise ConfigError(
            "the store replaces objects that exist",
            where=root,
            expected="conditional writes (`If-None-Match: *`)",
            do="use a store with conditional writes, such as S3, SeaweedFS or a local directory",
        )

    try:
        if urlsplit(root).scheme in ("", "file"):
            # Without a trace in the store: the folder of a store may not exist yet.
            directory = existing(Path(root.removeprefix("file://")).absolute())
            with tempfile.TemporaryDirectory(prefix=".rlpipe-doctor-", dir=directory) as folder:
                probe(Files(folder))
        else:
            probe(Files(root))
    except RlpipeError as error:
        return _failed("store", error)
    except OSError as error:
        found = f"{root}: {error.strerror}"
        return Line(NOT_OK, "store", found, "choose a folder that you can write to")
    return Line(OK, "store", f"{root}: readable and writable, refuses to overwrite")


def hugging_face() -> Iterator[Line]:
    """Check cache and settings of the Hugging Face Hub."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    if os.access(existing(cache), os.W_OK):
        yield Line(OK, "Hugging Face", f"cache {cache}")
    else:
        yield Line(NOT_OK, "Hugging Face", f"cannot write to {cache}", "set HF_HOME to a folder")
    has_token = bool(os.environ.get("HF_TOKEN")) or Path(constants.HF_TOKEN_PATH).is_file()
    network = "offline (HF_HUB_OFFLINE)" if constants.HF_HUB_OFFLINE else constants.ENDPOINT
    token = "a token" if has_token else "no token: gated models need HF_TOKEN"
    yield Line(OK if has_token else NOTE, "Hub", f"{network}, {token}")


def missing_files(recipe: str, overrides: Sequence[str]) -> Line | None:
    """Return the line of all files of a recipe that do not exist; None without any."""
    try:
        require_files(recipe, overrides, absolute=True)
    except RlpipeError as error:
        return _failed("recipe", error)
    return None


def recipe(config: RunConfig, folder: Path) -> Line:
    """Make all checks that a start makes: model, data, functions, processes, store."""
    from rlpipe.data.hub_commits import pinned
    from rlpipe.preflight import check

    try:
        check(pinned(config, folder), folder)
    except RlpipeError as error:
        return _failed("recipe", error)
    return Line(OK, "recipe", f"{config.run}: model, data and functions pass the checks of a start")


def _failed(name: str, error: RlpipeError) -> Line:
    """Return the line of an error, whose message says what to do."""
    return Line(NOT_OK, name, str(error).replace("\n", f"\n{'':8}{'':<16} "))


if __name__ == "__main__":
    sys.exit(piped(main))
