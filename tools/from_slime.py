"""Convert a launch script of slime, or its arguments, to a recipe.

    rlpipe from-slime run-qwen3-4B.sh -o my_run.yaml
    rlpipe from-slime run-qwen3-235B-A22B.sh BASE_FOLDER=/data MASTER_ADDR=10.0.0.1 --num-rollout 9
    rlpipe from-slime ${MODEL_ARGS[@]} ${CKPT_ARGS[@]} ${ROLLOUT_ARGS[@]}

The recipe has each value that differs from rlpipe's defaults, with the flag that it comes from.
Notes on flags that act differently go to standard error, and the command that trains the recipe.
Flags after the script replace its own. `--num-epoch` counts the prompts, so their file must be on
this machine; `--num-rollout` replaces it.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from rlpipe.config.load import load_with_origin
from rlpipe.errors import ConfigError, RlpipeError
from rlpipe.slime.command_line import ParsedFlags, read_flags
from rlpipe.slime.launch_script import read_launch
from tools.command import parsers
from tools.command.run_words import apply_flags, notes, read_words
from tools.config import annotated, given_values, sources_of
from tools.piped import piped

OF_SLIME = ("PYTHONPATH", "MASTER_ADDR", "no_proxy", "NO_PROXY", "CUDA_DEVICE_MAX_CONNECTIONS")
"""Variables that slime's processes need, or that rlpipe sets itself."""
INT4 = "OPEN_TRAINING_INT4_"
INT4_TRAINING = f"{INT4}FAKE_QAT_FLAG"
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")


def main() -> int:
    """Run the command. Exit codes: 0 done, 2 wrong input."""
    arguments, words = read_words(parsers.from_slime(), sys.argv[1:])
    try:
        with tempfile.TemporaryDirectory() as scratch:
            source, given, environment = words_of(words, Path(scratch))
            flags = read_flags(given)
            recipe = recipe_of(flags, source)
            remarks = [*notes(flags), *environment_notes(environment)]
        if arguments.output:
            write(Path(arguments.output), recipe)
    except RlpipeError as error:
        print(f"{error.kind}: {error}", file=sys.stderr)
        return 2
    for note in remarks:
        print(note, file=sys.stderr)
    if not arguments.output:
        print(recipe, end="")
    name = arguments.output or "my_run.yaml"
    first = "" if arguments.output else f"save the recipe as {name}, then "
    print(f"{first}check it: rlpipe doctor {name}; train: rlpipe train {name}", file=sys.stderr)
    return 0


def words_of(words: list[str], scratch: Path) -> tuple[str, list[str], dict[str, str]]:
    """Return the source of the arguments, the arguments of slime, and the job's environment.

    `scratch`: folder of the files that a script makes. Raises: ConfigError.
    """
    if not words or words[0].startswith("-"):
        return "arguments of slime", words, {}
    script, *rest = words
    first = next((n for n, word in enumerate(rest) if word.startswith("-")), len(rest))
    rest, more = rest[:first], rest[first:]
    if wrong := [word for word in rest if not VARIABLE.match(word)]:
        raise ConfigError(
            "not a variable of the script",
            where=" ".join(wrong),
            expected=f"NAME=VALUE after {script}",
        )
    variables = dict(word.split("=", 1) for word in rest)
    launch = read_launch(Path(script), variables, scratch)
    return Path(script).name, [*launch.words, *more], launch.environment


def environment_notes(environment: Mapping[str, str]) -> list[str]:
    """Return notes on variables of the Ray job, which are no part of a recipe."""
    lines = []
    others = {name: value for name, value in environment.items() if name not in OF_SLIME}
    if others.pop(INT4_TRAINING, "0") not in ("", "0"):
        others = {name: value for name, value in others.items() if not name.startswith(INT4)}
        lines.append(
            f"note: {INT4_TRAINING}: INT4 training is not supported; weights are trained and "
            "sampled in the dtype of the model"
        )
    if others:
        words = " ".join(f"{name}={shlex.quote(value)}" for name, value in others.items())
        lines.append(f"note: the environment of slime's job, for that of rlpipe train: {words}")
    return lines


def recipe_of(flags: ParsedFlags, source: str) -> str:
    """Return the recipe as YAML with the flag of each value. Raises: ConfigError."""
    chosen = argparse.Namespace(
        recipe=None, overrides=[], run=None, seed=None, fork=None, smoke=False
    )
    apply_flags(chosen, flags)
    config, origin = load_with_origin(chosen.recipe, chosen.overrides, chosen.run)
    sources = sources_of(origin, flags)
    sources["run"] = "name of the run"
    values = given_values(config.model_dump(mode="json"), sources)
    header = f"# Converted from {source} by `rlpipe from-slime`.\n"
    return header + annotated(values, sources)


def write(path: Path, recipe: str) -> None:
    """Write the recipe to a new file. Raises: ConfigError."""
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(
            "not the name of a recipe", where="--output", found=path, expected="a .yaml file"
        )
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(recipe)
    except OSError as error:
        raise ConfigError(
            "cannot write the recipe",
            where="--output",
            found=error,
            do="give the name of a new file",
        ) from error


if __name__ == "__main__":
    sys.exit(piped(main))
