"""Write a run's summary.json, report.html and report.png again from its records.

python -m tools.report --run NAME
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rlpipe.config.load import HOME_VARIABLE, home, use_home, validate_stored
from rlpipe.errors import RlpipeError
from rlpipe.lineage.history import HistoryReader
from rlpipe.observe.pictures import write_figure
from rlpipe.observe.run_report import write_report
from rlpipe.observe.summary import write_summary
from rlpipe.store.objects.files import Files
from rlpipe.store.run_file import get_run


def main() -> int:
    """Run the command. Exit codes: 0 done, 2 the run does not exist."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.report", description="Write a run's report again from its records."
    )
    parser.add_argument("--run", required=True)
    parser.add_argument("--home", help=f"directory of runs (default: ${HOME_VARIABLE} or ./runs)")
    arguments = parser.parse_args()
    try:
        use_home(arguments.home)
        print(f"written: {write(home() / arguments.run)}")
    except RlpipeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


def write(directory: Path) -> Path:
    """Write the three files into a run's directory; return the page's path. Raises: ConfigError."""
    run = get_run(directory.parent, directory.name)
    history = HistoryReader(Files(run.store), validate_stored(run.config), directory).read()
    write_summary(history, directory / "summary.json")
    write_figure(history, directory / "report.png")
    return write_report(history, directory / "report.html")


if __name__ == "__main__":
    sys.exit(main())
