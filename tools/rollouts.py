"""Print or export stored rollouts with rewards and advantages.

    rlpipe rollouts NAME                             # the newest, a line a sample
    rlpipe rollouts NAME --iterations 10:20 --out some.jsonl

Samples of an iteration that runs or has failed are printed too: of a run without a finished
iteration, or with `--iterations K`. The second command writes whole rows of iterations 10 to 19
(also .parquet). Messages and metadata are JSON text in .parquet and objects in .jsonl.
`rlpipe.lineage.rollouts` describes the columns. A name in .html gives the page of
samples.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlpipe.config.load import home, use_home
from rlpipe.errors import ConfigError, RlpipeError
from rlpipe.lineage.named_runs import require_run
from rlpipe.lineage.rollouts import find, iterations, sample_rows, unfinished
from rlpipe.lineage.sample_sets import write_samples
from rlpipe.lineage.token_rows import tokenizer_of
from rlpipe.observe.pages import SAMPLES_PAGE
from rlpipe.store.objects.files import Files
from rlpipe.store.run_file import store_of
from tools.command import parsers
from tools.command.parsers import COMMAND
from tools.piped import piped

HEADER = (
    "iteration",
    "group",
    "n",
    "status",
    "tokens",
    "reward",
    "advantage",
    "dropped",
    "prompt",
    "label",
    "response",
)
WIDTHS = (9, 24, 3, 9, 6, 8, 9, 14, 24, 16, 60)


def main() -> int:
    """Run the command. Exit codes: 0 done, 2 the run or rollout does not exist."""
    arguments = parsers.rollouts().parse_args()
    try:
        use_home(arguments.home)
        files = Files(arguments.store or store_of(home(), arguments.run))
        opened = unfinished(files, arguments.run)
        if arguments.out and Path(arguments.out).suffix == ".html":
            chosen = chosen_iterations(files, arguments.run, arguments.iterations, list(opened))
            decode = tokenizer_of(files, arguments.run, home())
            page = Path(arguments.out)
            print(f"written: {write_samples(files, arguments.run, page, decode, only=chosen)}")
            return 0
        chosen = chosen_iterations(files, arguments.run, arguments.iterations, list(opened))
        tables = (
            sample_rows(files, stored)
            for k in chosen
            if (stored := opened.get(k) or find(files, arguments.run, k))
        )
        for k in opened:
            shown = "its samples follow" if k in chosen else f"its samples: --iterations {k}"
            print(f"iteration {k} is not finished; {shown}", file=sys.stderr)
        if arguments.out:
            print(f"written: {export(tables, Path(arguments.out))} samples, {arguments.out}")
        else:
            left_out, errors = show(tables, arguments.limit)
            for error, count in errors.most_common():
                print(f"error of {count:,} samples: {error}", file=sys.stderr)
            rest = f"{left_out:,} further samples: --limit 0; " if left_out else ""
            # Not among the lines, which another program may read.
            print(
                f"{rest}whole rows: --out rows.jsonl; a page: {COMMAND} rollouts {arguments.run} "
                "--out samples.html",
                file=sys.stderr,
            )
    except RlpipeError as error:
        print(f"{error.kind}: {error}", file=sys.stderr)
        return 2
    return 0


def chosen_iterations(
    files: Files, run: str, text: str | None, opened: Sequence[int] = ()
) -> list[int]:
    """Return the iterations that `--iterations` names.

    `opened`: iterations that are not finished. Raises: ConfigError if none is stored.
    """
    if not any(entry.path for entry in files.survey("branches")):
        raise ConfigError(
            "the store has no runs",
            where=files.root,
            do="name another store or folder of runs: --store, --home or RLPIPE_HOME",
        )
    finished = iterations(files, run)
    stored = [*finished, *opened]
    if not stored:
        branch = require_run(files, run, where=f"--run {run}")
        page = home() / run / SAMPLES_PAGE
        raise ConfigError(
            "the run has no stored rollout",
            where=f"--run {run}",
            found=files.root,
            do=f"an evaluation has no iterations; see {page}"
            if branch.config.get("num_rollout") == 0
            else "wait for its first rollout, or start the run again",
        )
    if text is None:
        return (finished or stored)[-1:]
    first, colon, end = text.partition(":")
    if not all(
        number.isdigit() or (colon and not number)
        for number in ((first, end) if colon else (first,))
    ):
        raise ConfigError(
            "not a range of iterations",
            where="--iterations",
            found=text,
            expected="A:B, A:, :B, : or one number",
        )
    low = int(first or 0)
    high = (int(end) if end else stored[-1] + 1) if colon else low + 1
    if chosen := [k for k in stored if low <= k < high]:
        return chosen
    raise ConfigError(
        "rollouts are not stored",
        where="--iterations",
        found=text,
        expected=f"iterations {stored[0]} to {stored[-1]}",
    )


def export(tables: Iterator[pa.Table], path: Path) -> int:
    """Write all rows; return their number. Raises: ConfigError for an unknown file type."""
    writers = {".jsonl": _write_jsonl, ".parquet": _write_parquet}
    if path.suffix not in writers:
        raise ConfigError(
            "unknown file type",
            where="--out",
            found=path,
            expected=f"{', '.join(writers)} or .html",
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    return writers[path.suffix](tables, path)


def _write_jsonl(tables: Iterator[pa.Table], path: Path) -> int:
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for table in tables:
            for row in table.to_pylist():
                row |= {
                    "prompt": json.loads(row["prompt"]),
                    "metadata": json.loads(row["metadata"]),
                }
                row["reward_parts"] = dict(row["reward_parts"])
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += table.num_rows
    return count


def _write_parquet(tables: Iterator[pa.Table], path: Path) -> int:
    first = next(tables)
    count = first.num_rows
    with pq.ParquetWriter(path, first.schema, compression="zstd") as writer:
        writer.write_table(first)
        for table in tables:
            writer.write_table(table)
            count += table.num_rows
    return count


def show(tables: Iterator[pa.Table], limit: int) -> tuple[int, Counter[str]]:
    """Print a line for each of the first `limit` samples, 0: all, by iteration and group.

    Returns the number of the others, and how many samples have each error.
    """
    print(_line(HEADER))
    count = 0
    errors: Counter[str] = Counter()
    for table in tables:
        for row in sorted(table.to_pylist(), key=lambda row: (row["group_id"], row["index"])):
            count += 1
            errors.update([row["error"]] if row["error"] else [])
            if limit < 1 or count <= limit:
                print(_line(_cells(row)))
    return (max(count - limit, 0) if limit > 0 else 0), errors


def _cells(row: dict[str, Any]) -> tuple[Any, ...]:
    reward = row["reward"]
    advantages = row["advantages"]
    return (
        row["iteration"],
        row["group_id"],
        row["index"],
        row["status"],
        len(row["response_ids"]),
        "-" if reward is None else f"{reward:.3f}",
        f"{statistics.fmean(advantages):.3f}" if advantages else "-",
        row["drop_reason"] or ("-" if row["accepted"] else "not accepted"),
        _on_a_line(_prompt(row["prompt"])),
        "-" if row["label"] is None else _on_a_line(row["label"]),
        _on_a_line(row["response"]),
    )


def _prompt(stored: str) -> str:
    """Return the text of a stored prompt: of messages the content of the last one."""
    prompt = json.loads(stored)
    content = prompt[-1].get("content") if isinstance(prompt, list) and prompt else prompt
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def _on_a_line(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _line(cells: tuple[Any, ...]) -> str:
    fitted = (
        str(cell) if len(str(cell)) <= width else f"{str(cell)[: width - 1]}…"
        for cell, width in zip(cells, WIDTHS, strict=True)
    )
    return "  ".join(text.ljust(width) for text, width in zip(fitted, WIDTHS, strict=True)).rstrip()


if __name__ == "__main__":
    sys.exit(piped(main))
