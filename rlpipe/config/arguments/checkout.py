"""Read the arguments of a Megatron-LM checkout on PYTHONPATH.

Python imports the checkout instead of the installed wheel, so its arguments replace those of the
stored table. The source is parsed and not executed, because a configuration is checked without
torch. Parsed are the fields of the three configuration classes, and the literal calls
`add_argument("--name", type=int, default=1)` of `extra_args_provider` in `pretrain_gpt.py` and of
functions that it calls in the same file. `rlpipe.engines.megatron.arguments` passes these options
to the checkout's code.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlpipe.errors import ConfigError

PROVIDER = "extra_args_provider"
PROVIDER_FILE = "pretrain_gpt.py"
CLASSES = {
    "TransformerConfig": ("model_parallel_config.py", "transformer/transformer_config.py"),
    "OptimizerConfig": ("optimizer/optimizer_config.py",),
    "DistributedDataParallelConfig": ("distributed/distributed_data_parallel_config.py",),
}
"""Class → files under megatron/core with the class and its bases."""
_OBJECT = "object"
_PLAIN = {"int": "int", "float": "float", "str": "str", "bool": "bool", "None": "None"}
_CONTAINERS = {"list": "list", "tuple": "list", "set": "list", "dict": "dict"}
Entry = dict[str, Any]


def checkout() -> Path | None:
    """Return the folder of `megatron.core`; None if it is an installed distribution."""
    for entry in sys.path:
        folder = Path(entry or ".")
        if (folder / "megatron" / "core" / "__init__.py").is_file():
            # The first entry of sys.path wins in an import, so later ones do not matter.
            return None if any(folder.glob("megatron_core-*.dist-info")) else folder.absolute()
    return None


def arguments(folder: Path) -> dict[str, dict[str, Entry]]:
    """Return class → name → `{"type", "default"}` of a checkout, with the provider's options.

    Raises: ConfigError.
    """
    receivers = {
        kind: fields(kind, [folder / "megatron" / "core" / file for file in files])
        for kind, files in CLASSES.items()
    }
    provider = folder / PROVIDER_FILE
    return receivers | ({PROVIDER: options(_parsed(provider))} if provider.is_file() else {})


def fields(kind: str, files: list[Path]) -> dict[str, Entry]:
    """Return the fields of a dataclass, with those of its bases in the same files first."""
    classes = {
        node.name: node
        for file in files
        for node in _parsed(file).body
        if isinstance(node, ast.ClassDef)
    }

    def collect(name: str) -> dict[str, Entry]:
        node = classes[name]
        inherited = [
            collect(base.id)
            for base in node.bases
            if isinstance(base, ast.Name) and base.id in classes
        ]
        own = [
            item
            for item in node.body
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        ]
        entries = {
            item.target.id: _entry(item) for item in own if isinstance(item.target, ast.Name)
        }
        return {
            name: entry
            for part in [*inherited, entries]
            for name, entry in part.items()
            if not name.startswith("_")
        }

    if kind not in classes:
        raise ConfigError(
            "unsupported version of Megatron-LM",
            where=str(files[-1]),
            found=f"no class {kind}",
        )
    return collect(kind)


def options(tree: ast.Module) -> dict[str, Entry]:
    """Return the options that the argument provider of a file adds; {} without a provider."""
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    entries: dict[str, Entry] = {}
    for call in _add_argument_calls(PROVIDER, functions, set()):
        flags = [
            word.value
            for word in call.args
            if isinstance(word, ast.Constant) and str(word.value).startswith("--")
        ]
        if flags:
            name = str(flags[0])[2:].replace("-", "_")
            entries[name] = _option({item.arg: item.value for item in call.keywords})
    return entries


def _add_argument_calls(
    name: str, functions: dict[str, ast.FunctionDef], seen: set[str]
) -> Iterator[ast.Call]:
    """Yield the calls of `add_argument` in a function and in the functions that it calls."""
    if name not in functions or name in seen:
        return
    seen.add(name)
    for node in ast.walk(functions[name]):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "add_argument"
        ):
            yield node
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield from _add_argument_calls(node.func.id, functions, seen)


def _option(keywords: dict[str | None, ast.expr]) -> Entry:
    action = _literal(keywords.get("action"))
    if action in ("store_true", "store_false"):
        return {"type": "bool", "default": action == "store_false"}
    kind = keywords.get("type")
    type_text = _PLAIN.get(kind.id, "str") if isinstance(kind, ast.Name) else "str"
    choices = _literal(keywords.get("choices"))
    if isinstance(choices, list | tuple):
        type_text = " | ".join(map(repr, choices))
    if _literal(keywords.get("nargs")) is not None:
        type_text = "list"
    default = _literal(keywords.get("default"))
    return {"type": f"{type_text} | None" if default is None else type_text, "default": default}


def _entry(item: ast.AnnAssign) -> Entry:
    default = item.value
    if (
        isinstance(default, ast.Call)
        and isinstance(default.func, ast.Name)
        and default.func.id == "field"
    ):
        default = {word.arg: word.value for word in default.keywords}.get("default")
    return {
        "type": " | ".join(dict.fromkeys(_type_names(item.annotation))),
        "default": _literal(default),
    }


def _type_names(kind: ast.expr) -> list[str]:
    """Return a type in the names of the tables; `object` for types that YAML cannot contain."""
    if isinstance(kind, ast.Constant):
        return ["None"] if kind.value is None else [_OBJECT]
    if isinstance(kind, ast.BinOp):
        return [*_type_names(kind.left), *_type_names(kind.right)]
    if isinstance(kind, ast.Name):
        return [_PLAIN.get(kind.id) or _CONTAINERS.get(kind.id.lower(), _OBJECT)]
    if not (isinstance(kind, ast.Subscript) and isinstance(kind.value, ast.Name)):
        return [_OBJECT]
    outer = kind.value.id
    inner = kind.slice.elts if isinstance(kind.slice, ast.Tuple) else [kind.slice]
    if outer == "Literal":
        return [repr(_literal(item)) for item in inner]
    if outer in ("Union", "Optional"):
        members = [name for item in inner for name in _type_names(item)]
        return [*members, "None"] if outer == "Optional" else members
    return [_CONTAINERS.get(outer.lower(), _OBJECT)]


def _literal(value: ast.expr | None) -> Any:
    """Return the value of a literal, and None for any other expression."""
    try:
        return None if value is None else ast.literal_eval(value)
    except ValueError:
        return None


def _parsed(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_text(encoding="utf-8"), str(file))
    except (OSError, SyntaxError) as error:
        raise ConfigError(
            "the Megatron-LM on PYTHONPATH cannot be read", where=str(file), found=error
        ) from error
