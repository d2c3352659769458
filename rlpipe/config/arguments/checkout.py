"""A Megatron-LM checkout on PYTHONPATH: it is imported instead of the installed wheel, and its
arguments are taken instead of the stored table's.

Its source is read, not run: a configuration is checked without torch. Read are the fields of its
three configuration classes, and the options that `extra_args_provider` of its `pretrain_gpt.py`
adds to a parser in so many words (`add_argument("--name", type=int, default=1)`), also through
functions of the same file.

Not here: giving those options to its code (`rlpipe.engines.megatron.arguments`).
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
"""Receiver → the files under megatron/core that it and its bases are in."""
_OBJECT = "object"
_PLAIN = {"int": "int", "float": "float", "str": "str", "bool": "bool", "None": "None"}
_CONTAINERS = {"list": "list", "tuple": "list", "set": "list", "dict": "dict"}
Entry = dict[str, Any]


def checkout() -> Path | None:
    """The folder that `megatron.core` comes from, if that is no installed distribution."""
    for entry in sys.path:
        folder = Path(entry or ".")
        if (folder / "megatron" / "core" / "__init__.py").is_file():
            return None if any(folder.glob("megatron_core-*.dist-info")) else folder.absolute()
    return None


def arguments(folder: Path) -> dict[str, dict[str, Entry]]:
    """Receiver → name → `{"type", "default"}` of a checkout, the provider's options among them.
    Raises: ConfigError."""
    found = {
        kind: fields(kind, [folder / "megatron" / "core" / file for file in files])
        for kind, files in CLASSES.items()
    }
    provider = folder / PROVIDER_FILE
    return found | ({PROVIDER: options(_parsed(provider))} if provider.is_file() else {})


def fields(kind: str, files: list[Path]) -> dict[str, Entry]:
    """The fields of a dataclass, those of its bases in the same files first."""
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
            "this is no Megatron-LM that is known here",
            where=str(files[-1]),
            found=f"no class {kind}",
        )
    return collect(kind)


def options(tree: ast.Module) -> dict[str, Entry]:
    """What the argument provider of a file adds to a parser; {} without one."""
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    found: dict[str, Entry] = {}
    for call in _calls(PROVIDER, functions, set()):
        spelled = [
            word.value
            for word in call.args
            if isinstance(word, ast.Constant) and str(word.value).startswith("--")
        ]
        if spelled:
            found[str(spelled[0])[2:].replace("-", "_")] = _option(
                {item.arg: item.value for item in call.keywords}
            )
    return found


def _calls(name: str, functions: dict[str, ast.FunctionDef], seen: set[str]) -> Iterator[ast.Call]:
    """The calls of `add_argument` in a function, and in those that it calls."""
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
            yield from _calls(node.func.id, functions, seen)


def _option(given: dict[str | None, ast.expr]) -> Entry:
    action = _literal(given.get("action"))
    if action in ("store_true", "store_false"):
        return {"type": "bool", "default": action == "store_false"}
    kind = given.get("type")
    plain = _PLAIN.get(kind.id, "str") if isinstance(kind, ast.Name) else "str"
    choices = _literal(given.get("choices"))
    spelled = " | ".join(map(repr, choices)) if isinstance(choices, list | tuple) else plain
    spelled = "list" if _literal(given.get("nargs")) is not None else spelled
    default = _literal(given.get("default"))
    return {"type": f"{spelled} | None" if default is None else spelled, "default": default}


def _entry(item: ast.AnnAssign) -> Entry:
    default = item.value
    if (
        isinstance(default, ast.Call)
        and isinstance(default.func, ast.Name)
        and default.func.id == "field"
    ):
        default = {word.arg: word.value for word in default.keywords}.get("default")
    return {
        "type": " | ".join(dict.fromkeys(_spelled(item.annotation))),
        "default": _literal(default),
    }


def _spelled(kind: ast.expr) -> list[str]:
    """A type in the words of the tables; what YAML cannot hold is an object."""
    if isinstance(kind, ast.Constant):
        return ["None"] if kind.value is None else [_OBJECT]
    if isinstance(kind, ast.BinOp):
        return [*_spelled(kind.left), *_spelled(kind.right)]
    if isinstance(kind, ast.Name):
        return [_PLAIN.get(kind.id) or _CONTAINERS.get(kind.id.lower(), _OBJECT)]
    if not (isinstance(kind, ast.Subscript) and isinstance(kind.value, ast.Name)):
        return [_OBJECT]
    outer = kind.value.id
    inner = kind.slice.elts if isinstance(kind.slice, ast.Tuple) else [kind.slice]
    if outer == "Literal":
        return [repr(_literal(one)) for one in inner]
    if outer in ("Union", "Optional"):
        return [word for one in inner for word in _spelled(one)] + (
            ["None"] if outer == "Optional" else []
        )
    return [_CONTAINERS.get(outer.lower(), _OBJECT)]


def _literal(value: ast.expr | None) -> Any:
    """None of what is no literal."""
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
