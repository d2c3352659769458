"""Write a run's summary.json, report.html, report.png and samples.html again from its records.

rlpipe report NAME
"""

from __future__ import annotations

import sys
from pathlib import Path

from rlpipe.config.load import home, use_home, validate_stored
from rlpipe.errors import RlpipeError
from rlpipe.lineage.history import HistoryReader
from rlpipe.lineage.sample_sets import write_run_samples
from rlpipe.observe.pictures import write_figure
from rlpipe.observe.run_report import write_report
from rlpipe.observe.summary import write_summary
from rlpipe.store.objects.files import Files
from rlpipe.store.run_file import get_run
from tools.command import parsers


def main() -> int:
    """Run the command. Exit codes: 0 done, 2 the run does not exist."""
    arguments = parsers.report().parse_args()
    try:
        use_home(arguments.home)
        print(f"written: {write(home() / arguments.run)}")
    except RlpipeError as error:
        print(f"{error.kind}: {error}", file=sys.stderr)
        return 2
    return 0


def write(directory: Path) -> Path:
    """Write the four files into a run's directory; return the page's path. Raises: ConfigError."""
    run = get_run(directory.parent, directory.name)
    files = Files(run.store)
    reader = HistoryReader(files, validate_stored(run.config), directory)
    links = reader.read().links
    write_run_samples(files, directory.name, directory, reader.evaluation_nodes, links)
    # Read again: the report links to the page of samples that exists now.
    history = reader.read()
    write_summary(history, directory / "summary.json")
    write_figure(history, directory / "report.png")
    return write_report(history, directory / "report.html")


if __name__ == "__main__":
    sys.exit(main())
