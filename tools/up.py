"""A place to run in, on this machine: Prefect server, S3 store, Ray head and worker, up and down.   make up / make down

    python -m tools.up [--site FILE] [--without ray,s3]     start what does not run, declare the deployments, say where all is
    python -m tools.up --status | --down

Each is a process of its own session, remembered in `{home}/.up` (`place`). What runs stays as it
is; what died comes back with the same data, at the same port unless somebody else has it now: then
Ray and worker, which were told of the old one, are started anew, unless runs are under way. While
one brings the place up or down, another is refused. Everything listens on loopback only. The
store's key is made at the first start and lies in `{home}/.up/env`, which nobody else can read: `.
runs/.up/env` in a shell points Prefect's commands and any S3 client here.

Not here: what a run needs of a cluster (`deployments/*.md`), or a server for one run only
(`local_prefect`).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from types import MappingProxyType

import psutil
import yaml

from deployments.site import load_site
from flows.environment import keep_caches_in
from rlpipe.actors.ray.access import BEYOND_THIS_MACHINE
from rlpipe.actors.ray.access import settings as ray_settings
from rlpipe.config.load import HOME_VARIABLE, home, use_home
from rlpipe.errors import ResourceError, RlpipeError
from tools.local_prefect import SETTINGS, answers, free_port, listens
from tools.place import BUCKET, Place, alone
from tools.s3_server import PORTS, S3Server, free_ports

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("s3", "prefect", "ray", "worker")
"""In the order in which they start; they end in the opposite one."""
BEGINNING_S = 5.0
START_TIMEOUT_S = 180.0
END_TIMEOUT_S = 45.0
"""A run that is asked to end gets `resources.stop_grace_s` (20 s) for its iteration, and some for a
checkpoint."""
ENGINE = "prefect.engine"
"""The module that a worker starts a flow run with."""
POOL = "RLPIPE_POOL"
"""In a worker's environment: whose runs it starts. A site that gets a name gets another pool."""
MIN_CPUS = 16
"""Ray counts a CPU for each actor, most of which wait for a GPU or for each other."""


def start(
    place: Place, name: str, command: list[str], ports: Iterable[int], environment: dict[str, str]
) -> None:
    """A process that outlives this one."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    with place.log(name).open("ab") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    place.keep(name, process.pid, ports)


def wait(place: Place, name: str, ready: Callable[[], bool]) -> None:
    """Until it answers. Raises: ResourceError with the end of its log."""
    end_s = time.monotonic() + START_TIMEOUT_S
    while place.running(name) and time.monotonic() < end_s:
        if ready():
            return
        time.sleep(0.3)
    last = "\n".join(place.log(name).read_text(errors="replace").splitlines()[-12:])
    raise ResourceError(f"{name} did not come up", where=str(place.log(name)), found=last)


def start_s3(place: Place) -> None:
    """SeaweedFS, with a bucket and a key of this place's own."""
    ports = place.ports("s3", lambda: free_ports(len(PORTS)))
    server = S3Server(place.folder / "s3", BUCKET, ports=ports, secret=place.secret)
    place.keep("s3", server.process.pid, ports)
    server.wait_ready()


def start_prefect(place: Place) -> None:
    """The server, with its pages and its database."""
    (port,) = place.ports("prefect", lambda: [free_port(4200)])
    command = [
        sys.executable,
        "-m",
        "prefect",
        "server",
        "start",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    url = f"http://127.0.0.1:{port}"
    environment = {
        **SETTINGS,
        "PREFECT_HOME": str(place.folder / "prefect"),
        "PREFECT_UI_API_URL": f"{url}/api",
    }
    start(place, "prefect", command, [port], {**environment, "PREFECT_API_URL": f"{url}/api"})
    wait(place, "prefect", lambda: ours(place, "prefect", port) and answers(f"{url}/api/health"))


def ours(place: Place, name: str, port: int) -> bool:
    """Is it the process that was started here that listens at this port, and nobody else's?"""
    process = place.running(name)
    return process is not None and listens(process.pid, port)


def start_ray(place: Place) -> None:
    """The head of a cluster that others can join. Its processes end with it."""
    from rlpipe.actors.ray.local_ray import temporary_folder

    (port,) = place.ports("ray", lambda: [free_port(6379)])
    cpus = max(MIN_CPUS, os.cpu_count() or 1)
    ray = [sys.executable, "-m", "ray.scripts.scripts"]
    head = [
        "start",
        "--head",
        "--block",
        "--node-ip-address=127.0.0.1",
        f"--port={port}",
        f"--num-cpus={cpus}",
    ]
    quiet = [
        "--include-dashboard=false",
        "--disable-usage-stats",
        f"--object-store-memory={256 * 1024**2}",
    ]
    quiet.append(f"--temp-dir={temporary_folder(place.home)}")
    access = ray_settings(place.home)
    start(place, "ray", [*ray, *head, *quiet], [port], {**place.environment, **access})
    asks = {
        "args": [*ray, "status", f"--address=127.0.0.1:{port}"],
        "cwd": ROOT,
        "env": {**os.environ, **access},
    }
    wait(
        place,
        "ray",
        lambda: subprocess.run(**asks, capture_output=True, check=False).returncode == 0,
    )


def start_worker(place: Place, pool: str) -> None:
    """What starts flow runs, each in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "prefect",
        "worker",
        "start",
        "--pool",
        pool,
        "--type",
        "process",
    ]
    settings = {**SETTINGS, "PREFECT_HOME": str(place.folder / "prefect")}
    settings["PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"] = "INFO"
    start(place, "worker", command, [], {**settings, **place.environment, POOL: pool})


def up(place: Place, site: Path | None) -> int:
    """Start what does not run, then declare the deployments; the exit code of that, without a
    worker unless it is 0.

    Raises: ConfigError, ResourceError.
    """
    own = load_site(site)
    keep_caches_in(place.home)
    for name, begin in (("s3", start_s3), ("prefect", start_prefect), ("ray", start_ray)):
        if name == "ray":
            end_if_elsewhere(place, name)
        if name not in place.without and not place.running(name):
            print(f"starting {name} …", flush=True)
            begin(place)
    merged = own.model_copy(update={"overrides": (*place.overrides, *own.overrides)})
    (place.folder / "site.yaml").write_text(yaml.safe_dump(merged.model_dump(mode="json")))
    secret = place.folder / "env"
    secret.touch(mode=0o600)
    secret.write_text(exports(place))
    if code := declare(place):
        return code
    end_if_elsewhere(place, "worker", {POOL: merged.pool})
    if not place.running("worker"):
        start_worker(place, merged.pool)
    return 0


def exports(place: Place) -> str:
    """What a shell sources to be pointed here. A Ray of several machines can still be started from
    it."""
    return "".join(
        f"export {key}='{value}'\n"
        for key, value in place.environment.items()
        if key != BEYOND_THIS_MACHINE
    )


def declare(place: Place) -> int:
    """Declare the deployments of the place's site; the exit code, and if it is not 0 a word about
    what stays up."""
    command = [
        sys.executable,
        "-m",
        "deployments.apply",
        "--site",
        str(place.folder / "site.yaml"),
        "--home",
        str(place.home),
    ]
    print("declaring the deployments …", flush=True)
    settings = {**SETTINGS, **place.environment, "PREFECT_HOME": str(place.folder / "prefect")}
    code = subprocess.run(command, cwd=ROOT, env={**os.environ, **settings}, check=False).returncode
    if code:
        stays = ", ".join(name for name in NAMES if place.running(name)) or "nothing"
        print(
            f"the deployments were not declared (exit code {code}); up: {stays}. `make up` again goes on from here",
            file=sys.stderr,
        )
    return code


def environment_of(process: psutil.Process) -> dict[str, str]:
    """What it was started with. In its first moments a process has none yet. Raises:
    psutil.Error."""
    end_s = time.monotonic() + BEGINNING_S
    while not (found := process.environ()) and time.monotonic() < end_s:
        time.sleep(0.01)
    return found


def end_if_elsewhere(
    place: Place, name: str, also: Mapping[str, str] = MappingProxyType({})
) -> None:
    """End a process that was started for other servers than those that run now, some of which it
    would not find, or without what is to be in its environment `also`.

    Raises: ResourceError if that would end runs.
    """
    wanted = {**place.environment, **also}
    process = place.running(name)
    began_with = wanted
    if process is not None:
        with suppress(psutil.Error):
            began_with = environment_of(process)
        if not wanted.items() <= began_with.items():
            if runs := under_way(place):
                raise ResourceError(
                    f"{name} was started for other servers than those that run now, and starting it anew would end runs",
                    where=str(place.folder),
                    found=", ".join(
                        f"flow run {number} (PID {run.pid})" for number, run in runs.items()
                    ),
                    expected="no run under way",
                    do="wait for them or cancel them, then the same command; or `make down`, which stops them as SIGTERM does",
                )
            print(f"ending {name}, which was started for other servers …", flush=True)
            end(place, name)


def under_way(place: Place) -> dict[str, psutil.Process]:
    """The processes of flow runs of this home by the runs' ids, also of those whose worker has
    died."""
    found = {}
    for process in psutil.process_iter(["cmdline", "environ"]):
        given = process.info["environ"] or {}
        if ENGINE in (process.info["cmdline"] or ()) and given.get(HOME_VARIABLE) == str(
            place.home
        ):
            found[given.get("PREFECT__FLOW_RUN_ID", "?")] = process
    return found


def down(place: Place) -> list[str]:
    """End them: first the runs, as SIGTERM ends a run; the names of what was running."""
    _end([*under_way(place).values()])
    return [name for name in reversed(NAMES) if end(place, name)]


def end(place: Place, name: str) -> bool:
    """End it and what it started; False if it was not running."""
    process = place.running(name)
    if process is None:
        return False
    below: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        below = process.children(recursive=True)
    _end([process])
    _end(below)
    return True


def _end(processes: list[psutil.Process]) -> None:
    """SIGTERM, and SIGKILL for what has not ended by then; some may have ended by themselves."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    for process in psutil.wait_procs(processes, timeout=END_TIMEOUT_S)[1]:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def told(place: Place) -> str:
    """What runs, where, and what to do next."""
    lines = []
    for name in NAMES:
        process = place.running(name)
        where = place.url(name) if process and name != "worker" else ""
        lines.append(
            f"  {name:<8} {f'PID {process.pid}' if process else 'down':<12} {where}".rstrip()
        )
    if place.running("worker"):
        declared = place.folder / "site.yaml"
        demo = load_site(declared if declared.exists() else None).called("spell_backward")
        lines += [
            "",
            f"  . {place.folder / 'env'}",
            f"  .venv/bin/prefect deployment run train/{demo}",
        ]
        lines += [f"  its pages: {place.url('prefect')}   logs: {place.folder}/*.log"]
    return "\n".join(lines)


def main() -> int:
    """Parse, do it. Exit codes: 0 done, 1 something did not start, 2 bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.up", description="Prefect server, S3 store, Ray head and worker."
    )
    parser.add_argument(
        "--home", help=f"where everything is kept (default: ${HOME_VARIABLE} or ./runs)"
    )
    parser.add_argument(
        "--site",
        type=Path,
        help="YAML file with sets of GPUs, schedules, settings: deployments/site.example.yaml",
    )
    parser.add_argument(
        "--without",
        default="",
        metavar="NAMES",
        help="do not start these: of ray,s3 (runs then use their own)",
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--down", action="store_true", help="end them all")
    action.add_argument("--status", action="store_true", help="say what runs")
    arguments = parser.parse_args()
    without = {name for name in arguments.without.split(",") if name}
    if unknown := without - {"ray", "s3"}:
        parser.error(f"--without takes ray and s3, not {', '.join(sorted(unknown))}")
    code = 0
    try:
        use_home(arguments.home)
        place = Place(home(), without)
        with (
            nullcontext()
            if arguments.status
            else alone(place, "make down" if arguments.down else "make up")
        ):
            if arguments.down:
                print(f"ended: {', '.join(down(place)) or 'nothing was running'}")
            elif not arguments.status:
                code = up(place, arguments.site)
    except RlpipeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    print(told(place))
    return code


if __name__ == "__main__":
    sys.exit(main())
