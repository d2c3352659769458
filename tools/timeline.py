"""Write a run's stages and responses as a timeline for https://ui.perfetto.dev.

    rlpipe timeline NAME                      # {home}/{run}/timeline.json.gz
    rlpipe timeline NAME --iterations 10:20   # responses of iterations 10 to 19

Open the file at that address; the page uploads nothing. Stages are always those of the whole run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from rlpipe.config.load import home, use_home
from rlpipe.errors import ConfigError, RlpipeError
from rlpipe.lineage.named_runs import require_run
from rlpipe.lineage.rollouts import find, sample_rows
from rlpipe.observe.perfetto import Response, write_timeline
from rlpipe.observe.trace import FILE, read_trace, works
from rlpipe.store.objects.files import Files
from rlpipe.store.run_file import store_of
from tools.command import parsers
from tools.rollouts import chosen_iterations

COLUMNS = (
    "iteration",
    "group_id",
    "index",
    "engine",
    "t_start_s",
    "t_end_s",
    "response_ids",
    "status",
    "reward",
)


def main() -> int:
    """Run the command. Exit codes: 0 done, 2 the run or rollout does not exist."""
    arguments = parsers.timeline().parse_args()
    try:
        use_home(arguments.home)
        folder = home() / arguments.run
        files = Files(store_of(home(), arguments.run))
        require_run(files, arguments.run, where=arguments.run)
        events = read_trace(folder / FILE)[0]
        if not events:
            raise ConfigError(
                "the run has no trace",
                where=str(folder / FILE),
                do="run this command on the machine that drove the run",
            )
        sampled = list(responses(files, arguments.run, arguments.iterations))
        path = arguments.out or folder / "timeline.json.gz"
        written = write_timeline(path, works(events), sampled)
    except RlpipeError as error:
        print(f"{error.kind}: {error}", file=sys.stderr)
        return 2
    print(f"written: {written} events, {path}; open it at https://ui.perfetto.dev")
    return 0


def responses(files: Files, run: str, iterations: str | None) -> Iterator[Response]:
    """Yield stored responses. Supervised rows are left out. Raises: as `chosen_iterations`."""
    for k in chosen_iterations(files, run, iterations):
        stored = find(files, run, k)
        if stored is None:
            continue
        table = sample_rows(files, stored).select(COLUMNS)
        for row in table.to_pylist():
            # Supervised rows have no times.
            if row["t_end_s"] > row["t_start_s"]:
                yield Response(
                    row["iteration"],
                    row["group_id"],
                    row["index"],
                    row["engine"],
                    row["t_start_s"],
                    row["t_end_s"],
                    len(row["response_ids"]),
                    row["status"],
                    row["reward"],
                )


if __name__ == "__main__":
    sys.exit(main())
