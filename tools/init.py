"""Make a folder with a recipe, a reward with its test, and data; it trains at once on a CPU.

    rlpipe init my_run
    rlpipe train my_run/recipe.yaml

The folder's name is the name of the run. Nothing is overwritten.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from rlpipe.config.load import load_run
from rlpipe.errors import ConfigError, RlpipeError
from tools.command import parsers

TEMPLATE = Path(__file__).with_name("init_template")
TEMPLATE_NAME = "my_run"
"""Name of the run in the files of the template."""
FILES = (
    "README.md",
    "recipe.yaml",
    "reward.py",
    "test_reward.py",
    "pytest.ini",
    "train.jsonl",
)


def main() -> int:
    """Run the command. Exit codes: 0 done, 2 the folder cannot be made."""
    arguments = parsers.init().parse_args()
    folder = Path(arguments.name)
    try:
        make(folder)
    except RlpipeError as error:
        print(f"{error.kind}: {error}", file=sys.stderr)
        return 2
    print(
        f"made {folder}: {', '.join(FILES)}\n\n"
        f"    rlpipe train {folder}/recipe.yaml    # a tiny model on this machine, in minutes\n"
        f"    pytest {folder}                      # the test of the reward\n\n"
        f"{folder}/recipe.yaml says how to use a real model."
    )
    return 0


def make(folder: Path) -> None:
    """Write the files. Raises: ConfigError for a name that no run can have, or a used folder."""
    name = folder.absolute().name
    try:
        load_run(TEMPLATE / "recipe.yaml", (), name)
    except ConfigError as error:
        possible = re.sub("[^A-Za-z0-9._-]+", "_", name).strip("._-")
        raise ConfigError(
            "no run can have this name",
            where=str(folder),
            found=error.found,
            expected=error.expected,
            do=f"rlpipe init {possible if possible not in ('', name) else 'my_run'}",
        ) from error
    try:
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(
                "the folder is not empty", where=str(folder), do="give the name of a new folder"
            )
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("cannot make the folder", where=str(folder), found=error) from error
    for file in FILES:
        text = (TEMPLATE / file).read_text(encoding="utf-8")
        (folder / file).write_text(text.replace(TEMPLATE_NAME, name), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
