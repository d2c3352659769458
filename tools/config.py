"""Print the resolved configuration of a run, with the source of each value as a comment.

    rlpipe config my_run.yaml train.optimizer.lr=1e-6
    rlpipe config my_run.yaml --changed        # without the values of defaults
    rlpipe config my_run.yaml --plain > whole.yaml

A source is `default`, `FILE:LINE` of the recipe or its preset, an override, or a flag or default
of slime. The output is YAML: `rlpipe train` accepts it as a recipe. Nothing is checked on this
machine.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlpipe.config.load import load_with_origin, use_home
from rlpipe.config.problems import Origin
from rlpipe.config.text import dump, parse
from rlpipe.errors import RlpipeError
from rlpipe.slime.args import FLAGS
from rlpipe.slime.command_line import ParsedFlags, read_flags
from rlpipe.slime.flag_keys import BASE, keys_of
from rlpipe.slime.model_flags import weight_flags
from tools.command import parsers
from tools.command.run_words import apply_flags, notes, option_names, read_words
from tools.piped import piped

DEFAULT = "default"
SLIME_DEFAULT = "slime: default"
COMMENT_COLUMN = 56


def main() -> int:
    """Run the command. Exit codes: 0 done, 2 wrong input."""
    arguments, rest = read_words(parsers.config(), sys.argv[1:])
    try:
        use_home(arguments.home)
        flags = read_flags(rest, also=option_names(parsers.config()))
        apply_flags(arguments, flags)
        config, origin = load_with_origin(arguments.recipe, arguments.overrides, arguments.run)
    except RlpipeError as error:
        print(f"{error.kind}: {error}", file=sys.stderr)
        return 2
    for note in notes(flags):
        print(note, file=sys.stderr)
    values = config.model_dump(mode="json")
    sources = sources_of(origin, flags)
    if arguments.changed:
        values = given_values(values, sources)
    print(dump(values) if arguments.plain else annotated(values, sources), end="")
    return 0


def sources_of(origin: Origin, flags: ParsedFlags) -> dict[str, str]:
    """Return dotted key → source of every given value. A key without an entry has its default."""
    sources = {key: _shown(place) for key, place in origin.elsewhere.items()}
    for key, line in origin.lines.items():
        is_base = Path(origin.file) == BASE
        sources[key] = SLIME_DEFAULT if is_base else _shown(f"{origin.file}:{line}")
    options = flag_options(flags)
    for key, override in origin.overrides.items():
        # The override replaces the whole value, also keys below it.
        sources = {name: text for name, text in sources.items() if not _is_below(name, key)}
        value, _ = parse(override.partition("=")[2], f"override {key}")
        text = options.get(key, f"override {key}")
        # A section such as `model.source` may come from several flags.
        of_key = options if key in options else {}
        sources |= {name: of_key.get(name, text) for name, _ in _leaves(value, key)}
    return sources


def flag_options(flags: ParsedFlags) -> dict[str, str]:
    """Return dotted key → the flag that sets it."""
    given = {name: FLAGS[name].option for name in flags.own}
    keys = {FLAGS[name].key: option for name, option in given.items() if FLAGS[name].key}
    for key in keys_of(flags) if flags else ():
        nearest = next((name for name in keys if _is_below(key, name) or _is_below(name, key)), "")
        keys.setdefault(key, keys.get(nearest, "other flags"))
    keys |= {f"train.megatron.{name}": f"--{name.replace('_', '-')}" for name in flags.megatron}
    keys |= {f"engine.sglang.{name}": f"--sglang-{name.replace('_', '-')}" for name in flags.sglang}
    keys |= {f"engine.router.{name}": f"--router-{name.replace('_', '-')}" for name in flags.router}
    keys |= {f"flags.{name}": option for name, option in given.items()}
    keys |= {key: given[name] for key, name in weight_flags(flags.own).items() if name in given}
    for override in flags.overrides:
        keys.pop(override.partition("=")[0], None)
    return {key: f"slime: {option}" for key, option in keys.items()}


def annotated(values: dict[str, Any], sources: dict[str, str]) -> str:
    """Return the values as YAML with the source of each as a comment."""
    text = dump(values)
    lines = text.splitlines()
    _, numbers = parse(text, "the configuration")
    first_lines = {number - 1 for number in numbers.values()} | {len(lines)}
    for key, _ in _leaves(values, ""):
        index = numbers[key] - 1
        comment = f"# {sources.get(key, DEFAULT)}"
        if index + 1 in first_lines:
            lines[index] = f"{lines[index].ljust(COMMENT_COLUMN)} {comment}"
        else:  # a text of several lines would contain a comment behind it
            lines[index] = f"{comment}\n{lines[index]}"
    return "\n".join(lines) + "\n"


def given_values(values: dict[str, Any], sources: dict[str, str]) -> dict[str, Any]:
    """Return the values that have a source. A list stays whole if one of its items has one."""

    def kept(value: Any, key: str) -> Any:
        if isinstance(value, dict) and value:
            items = {name: kept(item, _join(key, name)) for name, item in value.items()}
            return {name: item for name, item in items.items() if item is not None} or None
        given = any(_join(key, name) in sources or key in sources for name in _below(value))
        return value if given else None

    return kept(values, "") or {}


def _shown(place: str) -> str:
    """Return `file:line` relative to the current folder, if the file is in it."""
    return place.removeprefix(f"{Path.cwd()}{os.sep}")


def _below(value: Any) -> list[str]:
    return [key for key, _ in _leaves(value, "")]


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of everything that has no keys or items."""
    if isinstance(value, dict | list) and value:
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(inner, _join(key, name))
    else:
        yield key, value


def _join(key: str, name: Any) -> str:
    return ".".join(part for part in (key, str(name)) if part)


def _is_below(key: str, parent: str) -> bool:
    return key == parent or key.startswith(f"{parent}.")


if __name__ == "__main__":
    sys.exit(piped(main))
