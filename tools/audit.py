"""Audit a run: verify its records, list anomalies, trace weights and prompts, query samples.

    rlpipe audit verify  [--run RUN [--head SHA256]]      # every record, file and row
    rlpipe audit head    --run RUN[@K]                    # branch, iteration, sha256
    rlpipe audit unusual --run RUN                        # anomalies of metrics
    rlpipe audit lineage --run RUN[@K] [--out F.parquet]  # the origin of these weights
    rlpipe audit forward --run RUN --prompt TEXT          # uses of a prompt
    rlpipe audit sql     RUN "SELECT ..."               # see rlpipe/store/tables/query.py
    rlpipe audit view    --run RUN[@K] --out F.html       # samples, tokens coloured

`verify` without `--run` checks every run of each store in which this home has a run. With `--run`
it reads files, rows and bookkeeping of that run. Objects that no run refers to are reported in both
cases. They and damage are findings. Leftovers of killed attempts and removed runs are notes, not
findings.

`--head` takes a digest that `head` printed earlier and that was kept outside the store. It proves
that nothing below that commit was changed, even if records, files and checksums were rewritten
together. `--public-key` proves the same from the newest commit signed with that key
(`RLPIPE_SIGNING_KEY`, see rlpipe/store/signatures.py).

`unusual` lists reward errors, truncation, staleness, log-prob drift and jumps. With `--out`,
`lineage` writes every trained sample.

All commands take `--home DIR` or `--store URL`. Exit codes: 0 done, 1 findings, 2 wrong usage, or
the store does not answer.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import pyarrow.parquet as pq
from rich.progress import Progress

from rlpipe.config.load import home, use_home
from rlpipe.errors import ConfigError, ObjectMissing, RlpipeError
from rlpipe.lineage import provenance
from rlpipe.lineage.named_runs import require_commit, unknown_run
from rlpipe.lineage.rollouts import iterations
from rlpipe.lineage.sample_sets import write_samples
from rlpipe.lineage.token_rows import decoder, tokenizer_of
from rlpipe.store.audit.anomalies import Anomaly, find_anomalies
from rlpipe.store.audit.verification import check_store
from rlpipe.store.branches import Branches
from rlpipe.store.objects.files import Files
from rlpipe.store.run_file import store_of, stores_of
from rlpipe.store.signatures import PublicKey
from rlpipe.store.tables.query import run_query
from tools.command import parsers
from tools.piped import piped


def main() -> int:
    """Run the command."""
    arguments = parsers.audit().parse_intermixed_args()
    try:
        use_home(arguments.home)
        arguments.run, arguments.query = run_and_query(arguments)
        if arguments.run is None and arguments.command != "verify":
            raise ConfigError(
                "no run given",
                where="--run",
                expected="the name of a run; only verify accepts all runs",
            )
        run, _, number = (arguments.run or "").partition("@")
        if number and not number.isdecimal():
            raise ConfigError(
                "not the name of a commit",
                where="--run",
                found=arguments.run,
                expected="RUN or RUN@K",
            )
        if arguments.run is None:
            stores = [arguments.store] if arguments.store else stores_of(home())
            return max(verify(Files(store), "", None, arguments) for store in stores)
        files = Files(arguments.store or store_of(home(), run))
        check_run_exists(files, run)
        return COMMANDS[arguments.command](files, run, int(number) if number else None, arguments)
    except RlpipeError as error:
        print(f"{error.kind}: {error}", file=sys.stderr)
        return 2


def run_and_query(arguments: argparse.Namespace) -> tuple[str | None, str | None]:
    """Return the run and the query of `sql`, which are given in any order.

    Raises: ConfigError for two runs, or without a query.
    """
    words: list[str] = list(arguments.words)
    query = None
    if arguments.command == "sql":
        # A name has no spaces, and a query has some.
        query = next((word for word in words if " " in word.strip()), None)
        if query is None and words and arguments.run is not None:
            query = words[0]
        if query is None:
            raise ConfigError(
                "no query given",
                where="audit sql",
                found=" ".join(words) or "nothing",
                expected='a run and one query in quotes: audit sql RUN "SELECT ..."',
            )
        words.remove(query)
    named: str | None = arguments.run
    runs = list(dict.fromkeys(words if named is None else [*words, named]))
    if len(runs) > 1:
        raise ConfigError(
            "two runs given",
            where=f"audit {arguments.command}",
            found=", ".join(runs),
            expected='one run, and one query in quotes: audit sql RUN "SELECT ..."'
            if query
            else "one of the two",
        )
    return (runs[0] if runs else None), query


def check_run_exists(files: Files, run: str) -> None:
    """Refuse an unknown run, with the nearest names. Raises: ConfigError."""
    if not run:
        raise ConfigError(
            "the run has no name",
            where="--run",
            found="an empty name",
            expected="the name of a run",
        )
    # Also a run whose configuration was lost is verified.
    if not any(entry.path for entry in files.survey(f"branches/{run}")):
        raise unknown_run(files, run, where=f"--run {run}")


def verify(files: Files, run: str, _k: int | None, arguments: argparse.Namespace) -> int:
    """Print every finding and note, and the proof of a digest."""
    read = 0

    def say(done: int, total: int) -> None:
        nonlocal read
        read = done
        bar.update(task, completed=done, total=total)

    with Progress(transient=True, disable=not sys.stdout.isatty()) as bar:
        task = bar.add_task(f"reading {run or files.root}", total=None)
        report = check_store(
            files,
            run or None,
            say,
            arguments.head,
            PublicKey(arguments.public_key) if arguments.public_key else None,
        )
    for finding in report.findings:
        print(printable(f"{finding.rule:<11} {finding.where}\n            {finding.problem}"))
    for note in report.notes:
        print(printable(f"note        {note.where}\n            {note.problem}"))
    if report.proof is not None:
        print(report.proof)
    count = len(report.notes)
    notes = f"; {count} note{'s' if count > 1 else ''}" if count else ""
    findings = f"{len(report.findings)} findings" if report.findings else "nothing is wrong"
    checked = f"; every record, checksum and row of {read} iterations was read" if run else ""
    print(f"{run or files.root}: {findings}{notes}{checked}")
    return 1 if report.findings else 0


def head(files: Files, run: str, k: int | None, _arguments: argparse.Namespace) -> int:
    """Print branch, iteration and sha256 of a commit.

    A fork without commits prints its parent's.
    """
    branches = Branches(files)
    commit = branches.newest(run) if k is None else branches.read(run, k)
    if commit is None:
        raise ConfigError("the run has no commit", where=f"--run {run}", found=files.root)
    _, sha256 = branches.read_stored(commit.branch, commit.iteration)
    print(commit.branch, commit.iteration, sha256)
    return 0


def printable(text: str) -> str:
    """Return text that any terminal accepts: names in a store may be invalid UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


def unusual(files: Files, run: str, _k: int | None, _arguments: argparse.Namespace) -> int:
    """Print a line for each kind of anomaly, with its iterations and values."""
    anomalies = find_anomalies(files, run)
    for line in anomaly_lines(anomalies):
        print(line)
    print(f"{run}: {len(anomalies)} unusual" if anomalies else f"{run}: no anomalies")
    return 0


def anomaly_lines(anomalies: Iterable[Anomaly]) -> list[str]:
    """Return a line for each branch and rule: number of iterations, first, last, values, limit."""
    kinds: dict[tuple[str, str], list[Anomaly]] = {}
    for anomaly in anomalies:
        kinds.setdefault((anomaly.branch, anomaly.rule), []).append(anomaly)
    return [_anomaly_line(kind) for kind in kinds.values()]


def _anomaly_line(kind: Sequence[Anomaly]) -> str:
    first = kind[0]
    last = kind[-1]
    if len(kind) == 1:
        iterations = f"iteration {first.iteration}"
    else:
        iterations = f"{len(kind)} iterations, {first.iteration} to {last.iteration}"
    form = ".1%" if first.usual.endswith("%") else ".4g"
    low = f"{min(anomaly.value for anomaly in kind):{form}}"
    high = f"{max(anomaly.value for anomaly in kind):{form}}"
    values = low if low == high else f"{low} to {high}"
    # The usual value of a jump depends on the iteration.
    more = "" if all(anomaly.usual == first.usual for anomaly in kind) else " (of the first)"
    return (
        f"{first.branch:<12} {first.rule:<15} {iterations:<28} {values:<18} "
        f"usual: {first.usual}{more}"
    )


def lineage(files: Files, run: str, k: int | None, arguments: argparse.Namespace) -> int:
    """Print the origin of these weights, as JSON."""
    if k is not None:
        require_commit(files, run, k, where="--run")
    if arguments.out:
        table = provenance.trained_on(files, run, k)
        pq.write_table(table, arguments.out, compression="zstd")
        print(f"written: {table.num_rows} samples, {arguments.out}", file=sys.stderr)
    origin = provenance.backward(files, run, k)
    for part in origin["branches"]:
        if part["reward"] is not None:
            part["reward"] = float(f"{part['reward']:.4g}")
    print(json.dumps(origin, indent=1, ensure_ascii=False))
    return 0


def forward(files: Files, run: str, _k: int | None, arguments: argparse.Namespace) -> int:
    """Print a line for each sample of the prompt, then the branches whose weights trained on it.

    Samples of the run's history are first; those of other runs have a title.
    """
    if not arguments.prompt:
        raise ConfigError("no prompt given", where="--prompt", expected="a part of its text")
    prompts = provenance.find_prompts(files, run, arguments.prompt)
    rows, damaged = provenance.forward(files, list(prompts))
    own = {commit.branch for commit in Branches(files).walk(run)}
    others = [row for row in rows if row["branch"] not in own]
    for number, row in enumerate([*(row for row in rows if row["branch"] in own), *others]):
        if others and number == len(rows) - len(others):
            print(f"samples of other runs in this store, not of {run}:")
        step = (
            f"step {row['optimizer_step']}, weights {row['weight_version']}"
            if row["trained"]
            else row["drop_reason"] or "not trained"
        )
        print(
            f"{row['branch']}/{row['iteration']:<6} {row['group_id']}/{row['index']:<4} "
            f"reward {row['reward']}  {step}"
        )
    first: dict[str, int] = {}
    for row in (row for row in rows if row["trained"]):
        first[row["branch"]] = min(row["iteration"], first.get(row["branch"], row["iteration"]))
    branches, unread = provenance.descendants(files, first)
    print(f"in the weights of: {', '.join(sorted(branches)) or 'none'}")
    for branch, reason in sorted({**damaged, **unread}.items()):
        print(f"unreadable, left out: {branch}: {reason}", file=sys.stderr)
    return 0


def sql(files: Files, run: str, k: int | None, arguments: argparse.Namespace) -> int:
    """Print the result of a query, a JSON object a row."""
    for row in run_query(
        files, run, arguments.query, None if k is None else range(k, k + 1)
    ).to_pylist():
        print(json.dumps(row, ensure_ascii=False, default=str))
    return 0


def view(files: Files, run: str, k: int | None, arguments: argparse.Namespace) -> int:
    """Write the page of samples, of one iteration or of the whole run."""
    stored = iterations(files, run)
    if not stored:
        raise ConfigError(
            "the run has no stored rollout",
            where="--run",
            found=files.root,
            do="give --home or --store",
        )
    decode = (
        decoder(arguments.tokenizer) if arguments.tokenizer else tokenizer_of(files, run, home())
    )
    if k is not None and k not in stored:
        raise ObjectMissing(
            "no rollout of this iteration is stored",
            where=f"{run}@{k}",
            expected=f"an iteration from {stored[0]} to {stored[-1]}",
        )
    out = Path(arguments.out or "samples.html")
    only = None if k is None else [k]
    page = write_samples(files, run, out, decode, only=only, most=arguments.samples)
    print(f"written: {page}")
    return 0


COMMANDS = {
    "verify": verify,
    "head": head,
    "unusual": unusual,
    "lineage": lineage,
    "forward": forward,
    "sql": sql,
    "view": view,
}

if __name__ == "__main__":
    sys.exit(piped(main))
