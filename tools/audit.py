"""Is a run what its records say, what is unusual in it, and where do its weights come from?

    python -m tools.audit verify  --run RUN                          every record, checksum and row; exit code 1 if one is wrong
    python -m tools.audit unusual --run RUN                          reward errors, truncation, staleness, log-prob drift, jumps
    python -m tools.audit lineage --run RUN[@K] [--out F.parquet]    back: what made these weights; F gets every sample trained on
    python -m tools.audit forward --run RUN --prompt TEXT            on: the steps that trained on a prompt, and what has it
    python -m tools.audit sql     --run RUN "SELECT ..."             tables: see rlpipe/store/query.py
    python -m tools.audit view    --run RUN[@K] --out F.html         samples with their tokens coloured

Each takes `--home DIR` or `--store URL`. Exit codes: 0 done, 1 something is wrong, 2 it could not be found out.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import pyarrow.parquet as pq
from rich.progress import Progress

from rlpipe import provenance
from rlpipe.config.load import HOME_VARIABLE, home
from rlpipe.config.problems import nearest
from rlpipe.errors import ConfigError, RlpipeError
from rlpipe.observe.viewer import write_viewer
from rlpipe.run_rollouts import iterations
from rlpipe.store.anomalies import find_anomalies
from rlpipe.store.audit import check_branch
from rlpipe.store.branches import Branches
from rlpipe.store.files import Files
from rlpipe.store.query import ask
from rlpipe.store.run_file import store_of
from rlpipe.token_rows import decoder, shown_samples, tokenizer_of
from tools.piped import piped


def main() -> int:
    """Parse, open the store, do what is asked."""
    arguments = parse_arguments()
    if arguments.home:
        os.environ[HOME_VARIABLE] = str(Path(arguments.home).expanduser().absolute())
    try:
        run, _, number = arguments.run.partition("@")
        if number and not number.isdigit():
            raise ConfigError("not an iteration", where="--run", found=arguments.run, expected="RUN or RUN@K")
        files = Files(arguments.store or store_of(home(), run))
        if not files.list(f"branches/{run}"):
            known = Branches(files).names()
            near = ", ".join(nearest(run, known) or known[:5]) or "none yet"
            raise ConfigError("there is no such run", where=f"--run {run}", found=files.root, expected=f"one of: {near}")
        return COMMANDS[arguments.command](files, run, int(number) if number else None, arguments)
    except RlpipeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.audit", description="Is a run what its records say?")
    parser.add_argument("command", choices=sorted(COMMANDS))
    parser.add_argument("question", nargs="?", help="of sql: one query")
    parser.add_argument("--run", required=True, metavar="RUN[@K]", help="name of the run, and an iteration (default: the newest)")
    parser.add_argument("--prompt", help="of forward: a piece of the prompt's text")
    parser.add_argument("--out", help="of lineage a .parquet file, of view the page (default: samples.html)")
    parser.add_argument("--samples", type=int, default=64, help="of view: at most so many (default: 64)")
    parser.add_argument("--tokenizer", help="of view: directory of a tokenizer (default: the model's, if it is on this machine)")
    parser.add_argument("--home", help=f"where runs are kept (default: ${HOME_VARIABLE} or ./runs)")
    parser.add_argument("--store", help="URL of the store (default: the one the run was started with)")
    return parser.parse_intermixed_args()


def verify(files: Files, run: str, _k: int | None, _arguments: argparse.Namespace) -> int:
    """Every finding on a line."""
    with Progress(transient=True) as bar:
        shown = bar.add_task(f"reading {run}", total=None)
        findings = check_branch(files, run, lambda done, total: bar.update(shown, completed=done, total=total))
    for finding in findings:
        print(f"{finding.rule:<10} {finding.where}\n           {finding.problem}")
    print(f"{run}: {len(findings)} findings" if findings else f"{run}: nothing is wrong")
    return 1 if findings else 0


def unusual(files: Files, run: str, _k: int | None, _arguments: argparse.Namespace) -> int:
    """A line for each thing that is unusual."""
    found = find_anomalies(files, run)
    for one in found:
        print(f"{one.branch}/{one.iteration:<6} {one.rule:<15} {one.value:<10.4g} usual: {one.usual}")
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
        print(f"{row['branch']}/{row['iteration']:<6} {row['group_id']}/{row['index']:<4} reward {row['reward']}  {step}")
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
    for row in ask(files, run, arguments.question, None if k is None else range(k, k + 1)).to_pylist():
        print(json.dumps(row, ensure_ascii=False, default=str))
    return 0


def view(files: Files, run: str, k: int | None, arguments: argparse.Namespace) -> int:
    """The page of samples."""
    there = iterations(files, run)
    if not there:
        raise ConfigError("no rollout of this run is stored", where="--run", found=files.root, do="give --home or --store")
    k = there[-1] if k is None else k
    decode = decoder(arguments.tokenizer) if arguments.tokenizer else tokenizer_of(files, run, home())
    samples = shown_samples(files, run, k, decode, most=arguments.samples)
    about = f"Iteration {k}: {len(samples)} samples." + ("" if decode else " The tokenizer is not here: tokens are numbers.")
    print(f"written: {write_viewer(f'{run} @ {k}', about, samples, arguments.out or 'samples.html')}")
    return 0


COMMANDS = {"verify": verify, "unusual": unusual, "lineage": lineage, "forward": forward, "sql": sql, "view": view}

if __name__ == "__main__":
    sys.exit(piped(main))
