"""The soak with kills (tests.soak.chaos): its choices and figures alone, and a few minutes of the
real thing."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import psutil
import pytest

from rlpipe.observe.trace import Event, traced
from rlpipe.store.branches import Branches
from rlpipe.store.objects.files import Files
from rlpipe.store.parquet.shards import ShardWriter
from rlpipe.store.plans import Plans
from tests.soak.chaos.measure import Hit, recovery_s, rows, table, undisturbed_s
from tests.soak.chaos.pairs import MAX_MISSES, Pair, Tally, pairs_of
from tests.soak.chaos.prefect_api import PrefectApi
from tests.soak.chaos.processes import Family, kill_now, runs
from tests.soak.chaos.verify import Ledger, lost
from tests.soak.chaos.watch import Watch
from tests.store.lineage import Run, group

PAIRS = ("generator@rollout", "trainer@train", "engine@sync", "flow@train")
PAIRS_OF_POOL = ("generator@rollout", "flow@train")
"""The two losses of a pool: with the generator, and with all that the driver started."""
CHILD_WITH_CHILD = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid, flush=True)
time.sleep(60)
"""


def hit(
    victim: str = "flow",
    stage: str = "train",
    *,
    s: int = 0,
    recovery_s: float | None = 1.0,
    stuck: bool = False,
) -> Hit:
    return Hit(
        s, victim, stage, iteration=3, time=0.0, pid=1, title="", recovery_s=recovery_s, stuck=stuck
    )


def test_pairs_are_all_combinations_or_the_ones_given():
    assert pairs_of(["flow", "s3"], ["train"]) == [Pair("flow", "train"), Pair("s3", "train")]
    assert pairs_of(["flow"], ["train"], ["router@rollout"]) == [Pair("router", "rollout")]
    with pytest.raises(ValueError, match="unknown@train"):
        pairs_of([], [], ["unknown@train"])


def test_the_least_hit_pair_comes_next_and_the_one_missed_least_among_equals():
    first, second, third = pairs = pairs_of(["flow", "s3", "router"], ["train"])
    tally = Tally(pairs, hits=2)
    present = {"flow", "s3", "router"}
    chance = random.Random(0)
    tally.hits.update({first: 1})
    tally.misses.update({second: 1})
    assert tally.next(present, chance) == third
    assert tally.next({"flow", "s3"}, chance) == second
    tally.hits.update({first: 1, second: 2, third: 2})
    assert tally.next(present, chance) is None
    assert tally.short == []


def test_a_pair_that_is_missed_too_often_is_given_up_and_said_to_be_short():
    tally = Tally(pairs := pairs_of(["flow"], ["reward"]), hits=1)
    tally.misses.update({pairs[0]: MAX_MISSES})
    assert tally.next({"flow"}, random.Random(0)) is None
    assert tally.short == pairs


def test_choices_are_those_of_the_seed_and_spread_over_all_pairs():
    def chosen(seed: int) -> list[Pair]:
        pairs = pairs_of(["flow", "s3", "router"], ["train", "sync"])
        chance = random.Random(seed)
        tally = Tally(pairs, hits=3)
        order = []
        while pair := tally.next({"flow", "s3", "router"}, chance):
            tally.hits[pair] += 1
            order.append(pair)
        return order

    assert chosen(1) == chosen(1) != chosen(2)
    assert set(Counter(chosen(1)).values()) == {3}
    assert len(set(chosen(1)[:6])) == 6


def test_lost_time_is_what_two_iterations_took_beyond_two_undisturbed_ones():
    commits = {0: 10.0, 1: 12.0, 2: 14.0, 3: 25.0, 4: 27.5, 5: 29.0}
    assert undisturbed_s(commits, (1, 2)) == 2.0
    assert undisturbed_s(commits, (9,)) is None
    assert recovery_s(commits, 3, undisturbed=2.0) == 9.5
    assert recovery_s(commits, 1, undisturbed=2.5) == 0.0
    assert recovery_s(commits, 5, undisturbed=2.0) is None


def test_a_row_counts_hits_and_stuck_ones_of_a_victim_in_a_stage():
    hits = [
        hit(recovery_s=4.0),
        hit(recovery_s=2.0),
        hit(recovery_s=None, stuck=True),
        hit("s3", "sync", s=2),
    ]
    first, second = rows(hits, lost={0: 0, 2: 1}, twice={0: 0, 2: 0})
    assert (first["victim"], first["stage"], first["hits"], first["stuck"], first["lost"]) == (
        "flow",
        "train",
        3,
        1,
        0,
    )
    assert (first["recovery_s_median"], first["recovery_s_max"]) == (3.0, 4.0)
    assert (second["s"], second["lost"], second["recovery_s_max"]) == (2, 1, 1.0)
    assert "recovery_s_median" in table([first, second])


def test_the_watch_knows_what_runs_and_when_iterations_were_committed(tmp_path: Path):
    watch = Watch(tmp_path / "trace.jsonl")
    with traced(tmp_path, "train", 0):
        watch.poll()
        (begun,) = watch.running("train")
        assert (begun.iteration, watch.ended(begun), watch.newest) == (0, None, -1)
    with traced(tmp_path, "checkpoint", 0):
        pass
    watch.poll()
    assert watch.running("train") == []
    assert watch.ended(begun)
    assert watch.newest == 0
    with traced(tmp_path, "advantage", 2):
        pass
    watch.poll()
    assert set(watch.commits) == {0, 1}


def test_a_stage_of_a_process_that_is_gone_does_not_run(tmp_path: Path):
    gone = Event(time.time(), 0, "train", "begin", 2**22 - 1)
    (tmp_path / "trace.jsonl").write_text(json.dumps(gone._asdict()) + "\n")
    watch = Watch(tmp_path / "trace.jsonl")
    assert watch.poll() == [gone]
    assert watch.running("train") == []


def test_a_process_whose_parent_is_killed_stays_in_the_family_and_is_ended():
    others = [child.pid for child in psutil.Process().children()]
    family = Family()
    with subprocess.Popen(
        [sys.executable, "-c", CHILD_WITH_CHILD], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        grandchild = psutil.Process(int(parent.stdout.readline()))
        assert {parent.pid, grandchild.pid} <= {process.pid for process in family.look()}
        assert kill_now(psutil.Process(parent.pid))
        assert parent.wait() == -signal.SIGKILL
    assert grandchild.pid in {process.pid for process in family.look()}
    family.end(kept=others)
    assert not runs(grandchild)


def test_the_ledger_remembers_shards_that_are_gone_later(local_store: Files):
    ledger = Ledger(local_store)
    local_store.create("plans/p/groups/a-0.parquet", b"rows")
    local_store.create("plans/p/plan.json", b"{}")
    ledger.look()
    local_store.delete("plans/p/groups/a-0.parquet")
    ledger.look()
    assert ledger.seen == {"plans/p/groups/a-0.parquet"}


def test_a_finished_group_is_looked_for_in_the_rollout_of_its_own_run_and_iteration(
    local_store: Files,
):
    for branch in ("before", "run"):
        written = Run(local_store, branch).start()
        written.iterate()
        written.iterate()
    ledger = Ledger(local_store)
    ledger.look()
    commits = list(Branches(local_store).walk("run"))
    assert lost(local_store, commits, ledger.seen) == ([], 6)
    seen = {*ledger.seen, "plans/p/groups/gone-0.parquet"}
    assert lost(local_store, commits, seen) == (["plans/p/groups/gone-0.parquet is gone"], 6)
    writer = ShardWriter(local_store, Plans.groups_prefix(commits[0].plans[0]), 1)
    writer.write([group("run:00000099")])
    ledger.look()
    (found,), _ = lost(local_store, commits, ledger.seen)
    assert "run:00000099" in found
    assert "is not in the rollout of iteration 1" in found


@pytest.fixture
def local_store(tmp_path: Path) -> Files:
    """An empty store on local disk."""
    return Files(tmp_path / "store")


class Requests(BaseHTTPRequestHandler):
    """Stands in for a Prefect server: keeps what it is asked, and answers a flow run that has
    failed."""

    asked: ClassVar[list[tuple[str, str, Any]]] = []

    def do_POST(self) -> None:
        size = int(self.headers["Content-Length"] or 0)
        self.asked.append((self.command, self.path, json.loads(self.rfile.read(size) or b"null")))
        body = json.dumps({"id": "made", "state": {"type": "FAILED", "name": "Failed"}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.do_POST()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_starting_and_retrying_a_flow_run_is_what_the_buttons_do():
    with ThreadingHTTPServer(("127.0.0.1", 0), Requests) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        api = PrefectApi(f"http://127.0.0.1:{server.server_port}/api")
        flow_run = api.run_deployment("train/train", {"recipe": "r"})
        assert api.state(flow_run) == ("FAILED", "Failed")
        api.retry(flow_run)
        server.shutdown()
    assert Requests.asked == [
        ("GET", "/api/deployments/name/train/train", None),
        ("POST", "/api/deployments/made/create_flow_run", {"parameters": {"recipe": "r"}}),
        ("GET", "/api/flow_runs/made", None),
        (
            "POST",
            "/api/flow_runs/made/set_state",
            {"state": {"type": "SCHEDULED", "name": "AwaitingRetry"}, "force": True},
        ),
    ]


@pytest.mark.long
@pytest.mark.integration
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("pairs", "layout"),
    [
        (PAIRS, ()),
        (PAIRS_OF_POOL, ("--s", "2", "--set", "rollout.selection=first_finished")),
    ],
    ids=["planned", "first_finished"],
)
def test_a_run_whose_processes_are_killed_in_its_stages_loses_and_doubles_nothing(
    tmp_path: Path, repository: Path, pairs: tuple[str, ...], layout: tuple[str, ...]
):
    home = tmp_path / "home"
    command = [
        sys.executable,
        "-m",
        "tests.soak.chaos",
        "--minutes",
        "15",
        "--hits",
        "1",
        "--home",
        str(home),
        "--pairs",
        *pairs,
        *layout,
    ]
    done = subprocess.run(
        command, cwd=repository, capture_output=True, text=True, timeout=1400, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((home / "summary.json").read_text())
    (run,) = summary["runs"]
    assert summary["violated"] == []
    assert run["short"] == []
    assert {f"{row['victim']}@{row['stage']}" for row in summary["rows"] if row["hits"]} >= set(
        pairs
    )
    assert run["replay_equal"]
    assert run["proof"]["replay"]["versions"] == run["proof"]["iterations"] > len(pairs)
    assert run["proof"]["groups_seen"] > 0
    assert not [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(home) in " ".join(process.info["cmdline"] or ())
    ]
