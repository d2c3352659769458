"""Write the table of Megatron-LM's command line options, read from its own parser.

    python -m tools.megatron_options MEGATRON_LM     # a checkout of the installed version's tag

The table, `rlpipe/config/arguments/megatron_options-{version}.json`, has for each option the field
of Megatron-core's configuration classes that it sets. Most options have the name of their field.
The others are converted in Megatron-LM's code, in assignments such as
`kw_args['persist_layer_norm'] = not args.no_persist_layer_norm`, which are read from its source.
The wheel of Megatron-core has no parser, so the table is stored.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from rlpipe.config.arguments.names import FOLDER, entries, installed

PARSER = "megatron.training.arguments:add_megatron_arguments"
CONVERSIONS = ("megatron/training/arguments.py", "megatron/training/training.py")
"""Files with the assignments from options to fields."""
Entry = dict[str, Any]


def table(folder: Path) -> dict[str, Entry]:
    """Return option (with underscores) → entry (see `entry_of`) of a checkout."""
    sys.path.insert(0, str(folder))
    module, _, function = PARSER.partition(":")
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    getattr(importlib.import_module(module), function)(parser)
    fields = conversions(folder)
    known = set(entries("megatron"))
    return {
        option.removeprefix("--").replace("-", "_"): entry_of(action, fields, known)
        for action in parser._actions
        for option in action.option_strings
        if option.startswith("--")
    }


def conversions(folder: Path) -> dict[str, tuple[str, bool]]:
    """Return option's destination → (field, True if the field is its negation)."""
    found = {}
    for file in CONVERSIONS:
        for node in ast.walk(ast.parse((folder / file).read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript)):
                continue
            key, value = node.targets[0].slice, node.value
            negated = False
            if isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.Not):
                negated, value = True, value.operand
            if (
                isinstance(key, ast.Constant)
                and isinstance(value, ast.Attribute)
                and isinstance(value.value, ast.Name)
                and value.value.id == "args"
            ):
                found[value.attr] = (key.value, negated)
    return found


def entry_of(
    action: argparse.Action, fields: dict[str, tuple[str, bool]], known: set[str]
) -> Entry:
    """Return the entry of an option.

    `field`: the field that it sets; without one, only Megatron-LM's own training loop reads it.
    `value`: the field's value for an option without words. `words`: it has one or more words.
    """
    field, negated = fields.get(action.dest, (action.dest, False))
    entry: Entry = {"field": field} if field in known else {}
    if action.nargs == 0:
        value = getattr(action, "const", None)
        if isinstance(value, bool):
            entry["value"] = value != negated
    elif action.nargs in ("*", "+"):
        entry["words"] = True
    return entry


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, help="checkout of Megatron-LM")
    options = table(parser.parse_args().folder)
    version = installed("megatron-core")
    content = {"package": "Megatron-LM", "version": str(version), "options": options}
    path = FOLDER / f"megatron_options-{version}.json"
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"{path}: {len(options)} options")
    return 0


if __name__ == "__main__":
    sys.exit(main())
