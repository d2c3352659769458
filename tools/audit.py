"""Is a run what its records say, what is unusual in it, and where do its weights come from?

    python -m tools.audit verify  [--run RUN [--head SHA256]]        every object, record, checksum and row; exit code 1 if wrong
    python -m tools.audit head    --run RUN[@K]                      branch, iteration and sha256 of the newest commit, or of K's
    python -m tools.audit unusual --run RUN                          reward errors, truncation, staleness, log-prob drift, jumps
    python -m tools.audit lineage --run RUN[@K] [--out F.parquet]    back: what made these weights; F gets every sample trained on
    python -m tools.audit forward --run RUN --prompt TEXT            on: the steps that trained on a prompt, and what has it
    python -m tools.audit sql     --run RUN "SELECT ..."             tables: see rlpipe/store/tables/query.py
    python -m tools.audit view    --run RUN[@K] --out F.html         samples with their tokens coloured

`verify` without `--run` checks every run of the store. With it the files, rows and bookkeeping of
that run alone are read. The objects that no run explains are named either way: what nothing refers
to could be anybody's. Damage and unexplained objects are findings. With `--head`, a digest that
`head` printed earlier and somebody kept elsewhere, it also proves that nothing below that commit
was changed, even where records, files and checksums were rewritten together. What killed attempts
and removed runs leave behind are notes: these are listed, and nothing is wrong. With `--public-key`
the same holds for the newest commit that is signed with that key (`RLPIPE_SIGNING_KEY`, see
rlpipe/store/signatures.py).

Each takes `--home DIR` or `--store URL`. Exit codes: 0 done, 1 something is wrong, 2 wrong usage,
or the store does not answer.
"""

from __future__ import annotations

import argparse
import json
import sys

import pyarrow.parquet as pq
from rich.progress import Progress

from rlpipe.config.load import HOME_VARIABLE, home, use_home
from rlpipe.config.problems import nearest
from rlpipe.errors import ConfigError, RlpipeError
from rlpipe.lineage import provenance
from rlpipe.lineage.rollouts import iterations
from rlpipe.lineage.token_rows import decoder, shown_samples, tokenizer_of
from rlpipe.observe.viewer import write_viewer
from rlpipe.store.audit.anomalies import find_anomalies
from rlpipe.store.audit.verification import check_store
from rlpipe.store.branches import Branches
from rlpipe.store.objects.files import Files
from rlpipe.store.run_file import store_of
from rlpipe.store.signatures import PublicKey
from rlpipe.store.tables.query import ask
from tools.piped import piped


def main() -> int:
    """Parse, open the store, do what is asked."""
    arguments = parse_arguments()
    try:
        use_home(arguments.home)
        if arguments.run is None and arguments.command != "verify":
            raise ConfigError(
                "which run?",
                where="--run",
                expected="the name of a run; only verify takes them all",
            )
        run, _, number = (arguments.run or "").partition("@")
        if number and not number.isdecimal():
            raise ConfigError(
                "not an iteration", where="--run", found=arguments.run, expected="RUN or RUN@K"
            )
        store = arguments.store or (store_of(home(), run) if run else home() / "store")
        files = Files(store)
        if arguments.run is not None:
            refuse_unknown(files, run)
        return COMMANDS[arguments.command](files, run, int(number) if number else None, arguments)
    except RlpipeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2


def refuse_unknown(files: Files, run: str) -> None:
    """Raises: ConfigError if the store has nothing of such a run, with the names that are near."""
    if run and not any(seen.path for seen in files.survey(f"branches/{run}")):
        known = sorted(
            {
                seen.path.split("/")[1]
                for seen in files.survey("branches")
                if seen.path.endswith("/config.json")
            }
        )
        near = ", ".join(nearest(run, known) or known[:5]) or "none yet"
        raise ConfigError(
            "there is no such run",
            where=f"--run {run}",
            found=files.root,
            expected=f"one of: {near}",
        )
    if not run:
        raise ConfigError(
            "which run?", where="--run", found="an empty name", expected="the name of a run"
        )


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.audit", description="Is a run what its records say?"
    )
    parser.add_argument("command", choices=sorted(COMMANDS))
    parser.add_argument("question", nargs="?", help="of sql: one query")
    parser.add_argument(
        "--run",
        metavar="RUN[@K]",
        help="name of the run, and an iteration (default: the newest; verify: all runs)",
    )
    parser.add_argument(
        "--head",
        metavar="SHA256",
        help="of verify: digest of a commit of the run, at least its first 16 digits",
    )
    parser.add_argument(
        "--public-key",
        metavar="FILE",
        help="of verify: the newest commit signed with this key is the --head",
    )
    parser.add_argument("--prompt", help="of forward: a piece of the prompt's text")
    parser.add_argument(
        "--out", help="of lineage a .parquet file, of view the page (default: samples.html)"
    )
    parser.add_argument(
        "--samples", type=int, default=64, help="of view: at most so many (default: 64)"
    )
    parser.add_argument(
        "--tokenizer",
        help="of view: directory of a tokenizer (default: the model's, if it is on this machine)",
    )
    parser.add_argument("--home", help=f"where runs are kept (default: ${HOME_VARIABLE} or ./runs)")
    parser.add_argument(
        "--store", help="URL of the store (default: the one the run was started with)"
    )
    return parser.parse_intermixed_args()


def verify(files: Files, run: str, _k: int | None, arguments: argparse.Namespace) -> int:
    """Every finding and note on a line, and what a digest proves."""
    with Progress(transient=True) as bar:
        shown = bar.add_task(f"reading {run or files.root}", total=None)
        report = check_store(
            files,
            run or None,
            lambda done, total: bar.update(shown, completed=done, total=total),
            arguments.head,
            PublicKey(arguments.public_key) if arguments.public_key else None,
        )
    for finding in report.findings:
        print(printable(f"{finding.rule:<11} {finding.where}\n            {finding.problem}"))
    for note in report.notes:
        print(printable(f"note        {note.where}\n            {note.problem}"))
    if report.proof is not None:
        print(report.proof)
    about = run or files.root
    notes = f"; {len(report.notes)} notes" if report.notes else ""
    print(
        f"{about}: {len(report.findings)} findings{notes}"
        if report.findings
        else f"{about}: nothing is wrong{notes}"
    )
    return 1 if report.findings else 0


def head(files: Files, run: str, k: int | None, _arguments: argparse.Namespace) -> int:
    """Branch, iteration and sha256 of a commit, on one line. Of a fork that has committed nothing,
    its parent's."""
    branches = Branches(files)
    commit = branches.newest(run) if k is None else branches.read(run, k)
    if commit is None:
        raise ConfigError("this run has committed nothing", where=f"--run {run}", found=files.root)
    _, sha256 = branches.read_stored(commit.branch, commit.iteration)
    print(commit.branch, commit.iteration, sha256)
    return 0


def printable(text: str) -> str:
    """Text that any terminal takes: names and values in a store may be no UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


def unusual(files: Files, run: str, _k: int | None, _arguments: argparse.Namespace) -> int:
    """A line for each thing that is unusual."""
    found = find_anomalies(files, run)
    for one in found:
        print(
            f"{one.branch}/{one.iteration:<6} {one.rule:<15} {one.value:<10.4g} usual: {one.usual}"
        )
    print(f"{run}: {len(found)} unusual" if found else f"{run}: nothing is unusual")
    return 0


def lineage(files: Files, run: str, k: int | None, arguments: argparse.Namespace) -> int:
    """What made these weights, as JSON."""
    if arguments.out:
        table = provenance.trained_on(files, run, k)
        pq.write_table(table, arguments.out, compression="zstd")
        print(f"written: {table.num_rows} samples, {arguments.out}", file=sys.stderr)
    print(json.dumps(provenance.backward(files, run, k), indent=1, ensure_ascii=False))
    return 0


def forward(files: Files, run: str, _k: int | None, arguments: argparse.Namespace) -> int:
    """A line for each sample of the prompt, then the newest weights that have it."""
    if not arguments.prompt:
        raise ConfigError("which prompt?", where="--prompt", expected="a piece of its text")
    prompts = provenance.find_prompts(files, run, arguments.prompt)
    rows, damaged = provenance.forward(files, list(prompts))
    for row in rows:
        step = (
            f"step {row['optimizer_step']}, weights {row['weight_version']}"
            if row["trained"]
            else row["drop_reason"] or "not trained"
        )
        print(
            f"{row['branch']}/{row['iteration']:<6} {row['group_id']}/{row['index']:<4} reward {row['reward']}  {step}"
        )
    first: dict[str, int] = {}
    for row in (row for row in rows if row["trained"]):
        first[row["branch"]] = min(row["iteration"], first.get(row["branch"], row["iteration"]))
    having, unread = provenance.descendants(files, first)
    print(f"in the weights of: {', '.join(sorted(having)) or 'none'}")
    for branch, why in sorted({**damaged, **unread}.items()):
        print(f"left out, it cannot be read: {branch}: {why}", file=sys.stderr)
    return 0


def sql(files: Files, run: str, k: int | None, arguments: argparse.Namespace) -> int:
    """The answer, a row a line as JSON."""
    if not arguments.question:
        raise ConfigError("what is the question?", where="sql", expected="one query, in quotes")
    for row in ask(
        files, run, arguments.question, None if k is None else range(k, k + 1)
    ).to_pylist():
        print(json.dumps(row, ensure_ascii=False, default=str))
    return 0


def view(files: Files, run: str, k: int | None, arguments: argparse.Namespace) -> int:
    """The page of samples."""
    there = iterations(files, run)
    if not there:
        raise ConfigError(
            "no rollout of this run is stored",
            where="--run",
            found=files.root,
            do="give --home or --store",
        )
    k = there[-1] if k is None else k
    decode = (
        decoder(arguments.tokenizer) if arguments.tokenizer else tokenizer_of(files, run, home())
    )
    samples = shown_samples(files, run, k, decode, most=arguments.samples)
    about = f"Iteration {k}: {len(samples)} samples." + (
        "" if decode else " The tokenizer is not here: tokens are numbers."
    )
    print(
        f"written: {write_viewer(f'{run} @ {k}', about, samples, arguments.out or 'samples.html')}"
    )
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
