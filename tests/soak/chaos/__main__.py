"""`make chaos`:  python -m tests.soak.chaos --minutes 60 --seed 0 --s 0 --s 2 --home runs/chaos

Run a real stack (S3 and Prefect servers, the train flow with its actors and engines), kill
processes in chosen stages, and prove at the end that every batch was trained once. Writes
`{home}/summary.json`; exit code 1 for a violation. Ctrl-C ends the soak early and still proves.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from rlpipe.store.objects.files import Files
from tests.soak.chaos.measure import as_record, rows, table
from tests.soak.chaos.pairs import STAGES, TITLES, Pair, Tally, pairs_of
from tests.soak.chaos.processes import Family
from tests.soak.chaos.replay import replay_branch
from tests.soak.chaos.servers import Servers
from tests.soak.chaos.soak import Soak
from tests.soak.chaos.stack import Layout, Stack
from tests.soak.chaos.verify import Ledger, Proof, prove
from tests.soak.chaos.watch import Watch
from tools.local_prefect import keep_caches_in


def main() -> int:
    """Soak each layout, prove, report. Exit codes: 0 no violation, 1 a violation, 2 bad input."""
    arguments = parse_arguments()
    home = Path(arguments.home).absolute()
    home.mkdir(parents=True, exist_ok=True)
    try:
        pairs = pairs_of(arguments.victims, arguments.stages, arguments.pairs)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    keep_caches_in(home)
    over = StopRequest()
    family = Family()
    results: list[tuple[Soak, Proof]] = []
    try:
        servers = Servers(home, random.Random(arguments.seed))
        os.environ.update(servers.environment)
        started = time.monotonic()
        for number, s in enumerate(arguments.s, start=1):
            end_s = started + arguments.minutes * 60 * number / len(arguments.s)
            results.append(
                soak(
                    layout_of(s, arguments),
                    home,
                    servers,
                    family,
                    pairs,
                    arguments,
                    partial(is_over, over, end_s),
                )
            )
            write_summary(home, results)
    finally:
        family.end()
    return report(home, results)


def layout_of(s: int, arguments: argparse.Namespace) -> Layout:
    """Return a layout with a new run name, so earlier soaks are not continued."""
    name = f"s{s}-{datetime.now():%m%d-%H%M%S}"
    return Layout(
        name, s, arguments.ranks, arguments.engines, arguments.worker, tuple(arguments.overrides)
    )


def is_over(requested: Callable[[], bool], end_s: float) -> bool:
    """True if the time is up or a person asked to end."""
    return requested() or time.monotonic() > end_s


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak.chaos",
        description="Kill processes of a real run and prove that nothing is lost.",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=60.0,
        help="for all layouts together, without the proof at the end",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the choice of victims and moments"
    )
    parser.add_argument(
        "--s", type=int, action="append", help="async_buffer_size; may be repeated (default: 0)"
    )
    parser.add_argument("--home", default="runs/chaos", help="folder for all files")
    parser.add_argument("--hits", type=int, default=3, help="hits for each victim and stage")
    parser.add_argument("--victims", nargs="+", default=list(TITLES), choices=list(TITLES))
    parser.add_argument("--stages", nargs="+", default=list(STAGES), choices=list(STAGES))
    parser.add_argument("--pairs", nargs="+", default=[], metavar="victim@stage", help="these only")
    parser.add_argument("--ranks", type=int, default=1, help="of the trainer")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument(
        "--worker",
        action="store_true",
        help="through a Prefect worker, each iteration a flow run of its own",
    )
    parser.add_argument(
        "--stuck-s",
        type=float,
        default=120.0,
        help="seconds without a commit after which a run is stuck",
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        nargs="+",
        default=[],
        metavar="key=value",
        help="overrides of the recipe",
    )
    arguments = parser.parse_args()
    arguments.s = arguments.s or [0]
    return arguments


class StopRequest:
    """End the soak at the first Ctrl-C or SIGTERM; interrupt at a second Ctrl-C."""

    def __init__(self) -> None:
        self._requested = False
        signal.signal(signal.SIGINT, self._request)
        signal.signal(signal.SIGTERM, self._request)

    def __call__(self) -> bool:
        return self._requested

    def _request(self, *_: Any) -> None:
        self._requested = True
        signal.signal(signal.SIGINT, signal.default_int_handler)


def soak(
    layout: Layout,
    home: Path,
    servers: Servers,
    family: Family,
    pairs: list[Pair],
    arguments: argparse.Namespace,
    over: Callable[[], bool],
) -> tuple[Soak, Proof]:
    """Soak one layout until `over`, stop it, and prove what it left in the store."""
    stack = Stack(home, layout, servers, family)
    files = Files(stack.root)
    ledger = Ledger(files)
    soak = Soak(
        stack=stack,
        watch=Watch(stack.folder / "trace.jsonl"),
        tally=Tally(pairs, arguments.hits),
        ledger=ledger,
        chance=random.Random(f"{arguments.seed} {layout.s}"),
        stuck_s=arguments.stuck_s,
        over=over,
        say=partial(_say, layout.run),
    )
    try:
        soak.run()
    finally:
        stack.stop()
    servers.wait_ready()
    iterations = soak.watch.newest + 1
    soak.say(f"stopped after {iterations} iterations and {len(soak.hits)} hits; checking the store")
    return soak, prove(files, layout.run, ledger, partial(replay_branch, home=home))


def write_summary(home: Path, results: list[tuple[Soak, Proof]]) -> dict[str, Any]:
    """Write `{home}/summary.json`: a row per S, victim and stage, all hits, a proof per run."""
    by_s = [(soak.stack.layout.s, soak, proof) for soak, proof in results]
    hits = [hit for _, soak, _ in by_s for hit in soak.hits]
    counts = {s: (len(proof.lost), len(proof.twice)) for s, _, proof in by_s}
    runs = [
        {
            "s": s,
            "run": soak.stack.layout.run,
            "undisturbed_s": soak.undisturbed,
            "dead": soak.dead,
            "short": [str(pair) for pair in soak.tally.short],
            "orphans": soak.stack.orphans,
            "exits": soak.stack.exits,
            "replay_equal": proof.replay is not None and proof.replay.equal,
            "proof": proof.record(),
            "hits": [as_record(hit) for hit in soak.hits],
        }
        for s, soak, proof in by_s
    ]
    violated = [f"s={s}: {problem}" for s, soak, proof in by_s for problem in problems(soak, proof)]
    lost = {s: count[0] for s, count in counts.items()}
    twice = {s: count[1] for s, count in counts.items()}
    summary = {"rows": rows(hits, lost, twice), "runs": runs, "violated": violated}
    (home / "summary.json").write_text(json.dumps(summary, indent=1))
    return summary


def problems(soak: Soak, proof: Proof) -> list[str]:
    """Return the violations as sentences."""
    found = [
        f"stuck after {hit.victim}@{hit.stage} in iteration {hit.iteration}"
        for hit in soak.hits
        if hit.stuck
    ]
    found += (
        [f"the flow does not continue; its last end: {soak.stack.exits[-1:]}"] if soak.dead else []
    )
    found += [] if soak.hits else ["nothing was hit"]
    found += proof.findings + proof.lost + [f"{group} was trained twice" for group in proof.twice]
    found += [proof.error] if proof.error else []
    if proof.replay is not None and not proof.replay.equal:
        found.append(f"the replay differs from train node {proof.replay.first_difference} on")
    return found


def report(home: Path, results: list[tuple[Soak, Proof]]) -> int:
    """Print the table and the violations; return the exit code."""
    summary = write_summary(home, results)
    print(table(summary["rows"]))
    for run in summary["runs"]:
        proof = run["proof"]
        counts = f"{proof['iterations']} iterations, {proof['shards_seen']} shards seen"
        print(f"{run['run']}: {counts}, replay {proof['replay']}")
        if run["short"]:
            print(f"{run['run']}: {len(run['short'])} pairs of victim and stage have too few hits")
    for problem in summary["violated"]:
        print(f"VIOLATED {problem}", file=sys.stderr)
    print(f"see {home}/summary.json")
    return 1 if summary["violated"] or not results else 0


def _say(run: str, text: str) -> None:
    print(f"{datetime.now():%H:%M:%S} {run}: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
