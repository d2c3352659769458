"""Write the tables of arguments of the installed Megatron-core, SGLang and router.

    python -m tools.argument_tables            # rlpipe/config/arguments/{table}-{version}.json
    python -m tools.argument_tables --check    # exit code 1 if the files are out of date

Run it after changing a pin of these packages, and delete tables of unsupported versions. A name is
the package's own spelling: a dataclass field of Megatron, a command line option with underscores of
SGLang and the router. Options that set the same field name that field. The packages are imported by
name at run time.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib
import inspect
import json
import sys
import types
import typing
from importlib.metadata import version
from typing import Any, Literal, Union

from rlpipe.config.arguments.names import FOLDER, OBJECT, TABLES, installed

RECEIVERS = {
    "megatron": (
        "megatron-core",
        (
            "megatron.core.transformer.transformer_config:TransformerConfig",
            "megatron.core.optimizer.optimizer_config:OptimizerConfig",
            "megatron.core.distributed.distributed_data_parallel_config:DistributedDataParallelConfig",
        ),
    ),
    "sglang": ("sglang", ("sglang.srt.server_args:ServerArgs",)),
    "router": ("sglang-router", ("sglang_router.router_args:RouterArgs",)),
}
_PLAIN = {bool: "bool", int: "int", float: "float", str: "str", type(None): "None"}
_CONTAINERS = {list: "list", tuple: "list", set: "list", dict: "dict"}


def table(name: str) -> str:
    """Return the JSON text of one table."""
    package, receivers = RECEIVERS[name]
    content = {"package": package, "version": version(package), "receivers": {}}
    for receiver in receivers:
        module, _, kind = receiver.partition(":")
        content["receivers"][kind] = _arguments(getattr(importlib.import_module(module), kind))
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _arguments(kind: type) -> dict[str, dict[str, Any]]:
    if hasattr(kind, "add_cli_args"):
        return _options(kind)
    hints = typing.get_type_hints(kind)
    return {
        field.name: {"type": spell(hints[field.name]), "default": _plain(field.default)}
        for field in dataclasses.fields(kind)
        if not field.name.startswith("_")
    }


def _options(kind: Any) -> dict[str, dict[str, Any]]:
    """Return every long option of a class with `add_cli_args`, with aliases, and its field."""
    parser = argparse.ArgumentParser(add_help=False)
    kind.add_cli_args(parser)
    hints = typing.get_type_hints(kind)
    options = {}
    for action in parser._actions:
        kinds = spell(hints[action.dest]) if action.dest in hints else _argument_type(action)
        if action.type not in (None, int, float, str, bool) and "str" not in kinds.split(" | "):
            kinds += " | str"
        for option in action.option_strings:
            name = option.removeprefix("--").replace("-", "_")
            negation = isinstance(action, argparse.BooleanOptionalAction) and name.startswith("no_")
            if option.startswith("--") and not negation:
                options[name] = {"type": kinds, "default": _plain(action.default), **_shape(action)}
                if name != action.dest:
                    options[name]["field"] = action.dest
    return options


def _shape(action: argparse.Action) -> dict[str, Any]:
    """Return how the words of an option are read (see `rlpipe.config.arguments.names`)."""
    shape: dict[str, Any] = {}
    if action.choices:
        shape["choices"] = sorted(action.choices, key=str)  # some choices are sets
    if action.nargs in ("*", "+"):
        shape["words"] = True
    reader = getattr(action.type, "__name__", "")
    if action.type is json.loads or reader == "json_list_type":
        shape["reads"] = "json"
    if reader == "human_readable_int":
        shape["reads"] = "size"
    if isinstance(action, argparse.BooleanOptionalAction):
        shape["off"] = next(
            option.removeprefix("--").replace("-", "_")
            for option in action.option_strings
            if option.startswith("--no-")
        )
    return shape


def _argument_type(action: argparse.Action) -> str:
    """Return the type of an option without a field: the type that argparse gives."""
    return "list" if action.nargs in ("*", "+") else "str"


def spell(kind: Any) -> str:
    """Return a type as text: `int | None`, `'full' | 'selective' | None`, `list`, or OBJECT.

    OBJECT stands for types that YAML cannot express.
    """
    if kind in _PLAIN:
        return _PLAIN[kind]
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if origin is Literal:
        return " | ".join(repr(value) for value in arguments)
    if origin in (Union, types.UnionType):
        return " | ".join(dict.fromkeys(spell(argument) for argument in arguments))
    if origin in _CONTAINERS or kind in _CONTAINERS:
        return _CONTAINERS[origin or kind]
    return OBJECT


def _plain(value: Any) -> Any:
    """Return a default as JSON; `<name>` for values that JSON cannot express."""
    if value is dataclasses.MISSING or value is inspect.Parameter.empty:
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple | dict):
        return value if json.dumps(value, default=str) else None
    return f"<{getattr(value, '__name__', str(value))}>"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check = parser.parse_args().check
    differences = []
    for name in TABLES:
        path = FOLDER / f"{name}-{installed(RECEIVERS[name][0])}.json"
        new = table(name)
        old = path.read_text(encoding="utf-8") if path.is_file() else ""
        if not check:
            path.write_text(new, encoding="utf-8")
        elif old != new:
            differences += difflib.unified_diff(
                old.splitlines(),
                new.splitlines(),
                f"stored {name}",
                f"installed {name}",
                lineterm="",
            )
    print("\n".join(differences) or f"{', '.join(TABLES)}: {'up to date' if check else 'written'}")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
