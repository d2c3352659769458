"""Start and stop the local servers (`rlpipe up`, `rlpipe down`).

They are a Prefect server, an S3 store, a Ray head and a worker.

    rlpipe up [--site FILE] [--without ray,s3]   # start servers, declare deployments
    rlpipe up --status; rlpipe down

Each server has its own session and a record in `{home}/.up` (`tools.local_servers`). Running
servers stay as they are. A dead server restarts with its data, at its old port if that is free.
With another port, Ray and worker restart too, because they have the old address; not during a run.
A second `make up` or `make down` at the same time is refused.

Everything listens on loopback only. The first start creates the store's key. `{home}/.up/env` has
the key and is readable by its owner only: `. runs/.up/env` points Prefect's commands and any S3
client to these servers.
"""

from __future__ import annotations

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
from rlpipe.system import leftovers
from tools.command import parsers
from tools.kept_server import PREFECT, TEMPLATE, KeptServer
from tools.local_prefect import SETTINGS, answers, free_port, listens
from tools.local_servers import BUCKET, NAMES, LocalServers, exclusive
from tools.s3_server import PORTS, S3Server, free_ports

ROOT = Path(__file__).resolve().parents[1]
SESSION_OPTION = "--session-dir="
BEGINNING_S = 5.0
START_TIMEOUT_S = 180.0
SHOW_AFTER_S = 20.0
"""Seconds between two lines about a server that is still starting."""
END_TIMEOUT_S = 45.0
"""A terminated run needs `resources.stop_grace_s` (20 s) for its iteration, then a checkpoint."""
ENGINE = "prefect.engine"
"""Module with which a worker starts a flow run."""
POOL = "RLPIPE_POOL"
"""Variable in a worker's environment: its pool. A site that gets a name gets another pool."""
RAY_STARTED = b"Ray runtime started."
"""Line of `ray start` after its raylet has joined."""
MIN_CPUS = 16
"""Ray counts a CPU for each actor. Most actors wait for a GPU or for each other."""


def start(
    servers: LocalServers,
    name: str,
    command: list[str],
    ports: Iterable[int],
    environment: dict[str, str],
) -> None:
    """Start a process that outlives this one, and record it."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    with servers.log(name).open("ab") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    servers.keep(name, process.pid, ports)


def wait(servers: LocalServers, name: str, ready: Callable[[], bool]) -> None:
    """Wait until a server is ready. Raises: ResourceError with the end of its log."""
    began_s = time.monotonic()
    deadline_s = began_s + START_TIMEOUT_S
    shown_s = began_s + SHOW_AFTER_S
    while (runs := servers.running(name)) and (now_s := time.monotonic()) < deadline_s:
        if ready():
            return
        if now_s > shown_s:
            print(f"starting {name} … {now_s - began_s:.0f} s", flush=True)
            shown_s += SHOW_AFTER_S
        time.sleep(0.3)
    last = "\n".join(servers.log(name).read_text(errors="replace").splitlines()[-12:])
    raise ResourceError(
        f"{name} did not start",
        where=str(servers.log(name)),
        found=f"not ready after {START_TIMEOUT_S:.0f} s; its log ends:\n{last}" if runs else last,
        do="on a busy machine, repeat the command: it continues from here",
    )


def start_s3(servers: LocalServers) -> None:
    """Start SeaweedFS with a bucket and this home's key."""
    ports = servers.ports("s3", lambda: free_ports(len(PORTS)))
    server = S3Server(servers.folder / "s3", BUCKET, ports=ports, secret=servers.secret)
    servers.keep("s3", server.process.pid, ports)
    server.wait_ready()


def start_prefect(servers: LocalServers) -> None:
    """Start the Prefect server with its UI and database."""
    end_kept_server(servers)  # it may have the port
    (port,) = servers.ports("prefect", lambda: [free_port(4200)])
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
        "PREFECT_HOME": str(servers.folder / "prefect"),
        "PREFECT_UI_API_URL": f"{url}/api",
    }
    start(servers, "prefect", command, [port], {**environment, "PREFECT_API_URL": f"{url}/api"})
    wait(
        servers,
        "prefect",
        lambda: listens_itself(servers, "prefect", port) and answers(f"{url}/api/health"),
    )


def listens_itself(servers: LocalServers, name: str, port: int) -> bool:
    """True if the recorded process, not another one, listens at this port."""
    process = servers.running(name)
    return process is not None and listens(process.pid, port)


def start_ray(servers: LocalServers) -> None:
    """Start the head of a Ray cluster that others can join. Its processes end with it."""
    from rlpipe.actors.ray.local_ray import temporary_folder

    (port,) = servers.ports("ray", lambda: [free_port(6379)])
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
    quiet.append(f"--temp-dir={temporary_folder(servers.home)}")
    access = ray_settings(servers.home)
    log = servers.log("ray")
    old_bytes = log.stat().st_size if log.exists() else 0
    start(servers, "ray", [*ray, *head, *quiet], [port], {**servers.environment, **access})
    # `ray status` succeeds as soon as the GCS server answers. The head ends if its raylet is late.
    wait(servers, "ray", lambda: RAY_STARTED in log.read_bytes()[old_bytes:])
    head = servers.running("ray")
    if head is not None:
        leftovers.sweep()
        leftovers.record(head.pid, *session_folders(head))


def session_folders(head: psutil.Process) -> set[Path]:
    """Return the folder of the session of a Ray head, from the command lines of its processes."""
    folders = set()
    with suppress(psutil.Error):
        for process in head.children(recursive=True):
            with suppress(psutil.Error):
                folders |= {
                    Path(word.removeprefix(SESSION_OPTION))
                    for word in process.cmdline()
                    if word.startswith(SESSION_OPTION)
                }
    return folders


def start_worker(servers: LocalServers, pool: str) -> None:
    """Start the worker, which starts a process for each flow run."""
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
    settings = {**SETTINGS, "PREFECT_HOME": str(servers.folder / "prefect")}
    settings["PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"] = "INFO"
    start(servers, "worker", command, [], {**settings, **servers.environment, POOL: pool})


def up(servers: LocalServers, site: Path | None) -> int:
    """Start servers that do not run, then declare the deployments, then start the worker.

    Returns the exit code of the declaration; the worker starts only if it is 0.
    Raises: ConfigError, ResourceError.
    """
    given = load_site(site)
    keep_caches_in(servers.home)
    for name, begin in (("s3", start_s3), ("prefect", start_prefect), ("ray", start_ray)):
        # Ray got the address of the store when it started.
        if name == "ray":
            end_if_outdated(servers, name)
        if name not in servers.without and not servers.running(name):
            print(f"starting {name} …", flush=True)
            begin(servers)
    (servers.folder / "site.yaml").write_text(yaml.safe_dump(given.model_dump(mode="json")))
    variables = servers.folder / "env"
    variables.touch(mode=0o600)  # It contains the key of the store.
    variables.write_text(exports(servers))
    if code := declare(servers):
        return code
    end_if_outdated(servers, "worker", {POOL: given.pool})
    if not servers.running("worker"):
        start_worker(servers, given.pool)
    return 0


def exports(servers: LocalServers) -> str:
    """Return shell exports of the environment. Variables of a single-machine Ray are left out."""
    return "".join(
        f"export {key}='{value}'\n"
        for key, value in servers.environment.items()
        # A shell that sources the file can still start a Ray of several machines.
        if key != BEYOND_THIS_MACHINE
    )


def declare(servers: LocalServers) -> int:
    """Declare the deployments of the site; return the exit code."""
    command = [
        sys.executable,
        "-m",
        "deployments.apply",
        "--site",
        str(servers.folder / "site.yaml"),
        "--home",
        str(servers.home),
        # The Prefect server keeps them, for a later `deployments.apply --site FILE`.
        "--server-overrides",
        *servers.overrides,
    ]
    print("declaring deployments …", flush=True)
    settings = {**SETTINGS, **servers.environment, "PREFECT_HOME": str(servers.folder / "prefect")}
    code = subprocess.run(command, cwd=ROOT, env={**os.environ, **settings}, check=False).returncode
    if code:
        names = ", ".join(name for name in NAMES if servers.running(name)) or "none"
        print(
            f"declaring deployments failed (exit code {code}); running servers: {names}. "
            "`make up` continues from here",
            file=sys.stderr,
        )
    return code


def environment_of(process: psutil.Process) -> dict[str, str]:
    """Return the environment of a process. A process has none at first. Raises: psutil.Error."""
    deadline_s = time.monotonic() + BEGINNING_S
    while not (environment := process.environ()) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return environment


def end_if_outdated(
    servers: LocalServers, name: str, also: Mapping[str, str] = MappingProxyType({})
) -> None:
    """End a process that was started with other addresses than today's, or without `also`.

    Raises: ResourceError if that would end runs.
    """
    process = servers.running(name)
    if process is None:
        return
    expected = {**servers.environment, **also}
    environment = expected
    with suppress(psutil.Error):
        environment = environment_of(process)
    if expected.items() <= environment.items():
        return
    if runs := running_flow_runs(servers):
        raise ResourceError(
            f"{name} has outdated addresses, and a restart would end runs",
            where=str(servers.folder),
            found=", ".join(f"flow run {number} (PID {run.pid})" for number, run in runs.items()),
            expected="no running flow run",
            do="wait for the runs or cancel them, then repeat the command; "
            "or `make down`, which stops them with SIGTERM",
        )
    print(f"ending {name}, which has outdated addresses …", flush=True)
    end(servers, name)


def running_flow_runs(servers: LocalServers) -> dict[str, psutil.Process]:
    """Return flow run id → process, of this home. Includes runs whose worker has died."""
    runs = {}
    for process in psutil.process_iter(["cmdline", "environ"]):
        environment = process.info["environ"] or {}
        own = environment.get(HOME_VARIABLE) == str(servers.home)
        if own and ENGINE in (process.info["cmdline"] or ()):
            runs[environment.get("PREFECT__FLOW_RUN_ID", "?")] = process
    return runs


def down(servers: LocalServers) -> list[str]:
    """End runs with SIGTERM, then the servers; return the names of ended servers."""
    _end([*running_flow_runs(servers).values()])
    ended = [name for name in reversed(NAMES) if end(servers, name)]
    if end_kept_server(servers):
        ended.append("the Prefect server of the last run")
    if end_kept_server(servers, TEMPLATE):
        ended.append("the template of engines and workers")
    leftovers.sweep()
    return ended


def end_kept_server(servers: LocalServers, kind: str = PREFECT) -> bool:
    """End a server of earlier runs in this home. False if none runs, or a run uses it."""
    kept = KeptServer.of_home(servers.home, kind)
    return kept is not None and kept.running and kept.end()


def end(servers: LocalServers, name: str) -> bool:
    """End a server and its children. False if it was not running."""
    process = servers.running(name)
    if process is None:
        return False
    children: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        children = process.children(recursive=True)
    _end([process])
    _end(children)
    return True


def _end(processes: list[psutil.Process]) -> None:
    """Send SIGTERM, then SIGKILL after END_TIMEOUT_S."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # some have ended already
            process.terminate()
    for process in psutil.wait_procs(processes, timeout=END_TIMEOUT_S)[1]:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def status_text(servers: LocalServers) -> str:
    """Return the state and address of each server, and the next commands."""
    lines = []
    for name in NAMES:
        process = servers.running(name)
        where = servers.url(name) if process and name != "worker" else ""
        absent = "left out" if name in servers.without else "down"
        state = f"PID {process.pid}" if process else absent
        lines.append(f"  {name:<8} {state:<12} {where}".rstrip())
    if servers.running("worker"):
        declared = servers.folder / "site.yaml"
        demo = load_site(declared if declared.exists() else None).deployment_name("spell_backward")
        lines += [
            "",
            "start a run:",
            f"  . {servers.folder / 'env'}",
            f"  {shown_prefect()} deployment run train/{demo}",
            f"  rlpipe train RECIPE {' '.join(servers.overrides)}".rstrip(),
            f"watch it: {servers.url('prefect')}",
            f"logs: {servers.folder}/*.log",
            "end the servers: make down (or rlpipe down)",
        ]
    return "\n".join(lines)


def shown_prefect() -> str:
    """Return the prefect command of this environment, relative to the current folder if in it."""
    return str(Path(sys.executable).with_name("prefect")).removeprefix(f"{Path.cwd()}{os.sep}")


def main() -> int:
    """Run the command. Exit codes: 0 done, 1 a server did not start, 2 wrong input."""
    parser = parsers.up()
    arguments = parser.parse_args()
    without = {name for name in arguments.without.split(",") if name}
    if unknown := without - {"ray", "s3"}:
        parser.error(f"--without takes ray and s3, not {', '.join(sorted(unknown))}")
    code = 0
    try:
        use_home(arguments.home)
        servers = LocalServers(home(), without)
        with (
            nullcontext()
            if arguments.status
            else exclusive(servers, "make down" if arguments.down else "make up")
        ):
            if arguments.down:
                print(f"ended: {', '.join(down(servers)) or 'no server was running'}")
            elif not arguments.status:
                code = up(servers, arguments.site)
    except RlpipeError as error:
        print(f"{error.kind}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    print(status_text(servers))
    return code


if __name__ == "__main__":
    sys.exit(main())
