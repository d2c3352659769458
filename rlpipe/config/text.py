"""Configuration as text: YAML 1.2 in, YAML out, each key with the line it stands on.

PyYAML speaks YAML 1.1, where `1e-5` is a string, `010` is 8, `1:30` is 90 and `no` is false. Here the scalars are those of
the YAML 1.2 core schema, and a key written twice is an error. What `dump` writes, `parse` reads back unchanged.

Not here: what the keys mean (`run`), or where recipes are kept (`load`).
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from rlpipe.errors import ConfigError

_SCALARS = (
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("tag:yaml.org,2002:int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list] = {}  # noqa: RUF012 - PyYAML's own class attribute


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, list] = {}  # noqa: RUF012 - PyYAML's own class attribute

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _integer(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node)
    return int(text, 0) if text.startswith(("0o", "0x")) else int(text)


def _float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    text = loader.construct_scalar(node).lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


for _tag, _pattern, _first in _SCALARS:
    for _kind in (_Loader, _Dumper):
        _kind.add_implicit_resolver(_tag, re.compile(f"^(?:{_pattern})$"), _first)
_Loader.add_constructor("tag:yaml.org,2002:int", _integer)
_Loader.add_constructor("tag:yaml.org,2002:float", _float)


def parse(text: str, where: str) -> tuple[Any, dict[str, int]]:
    """The value of a YAML document, and dotted key → line (from 1) of everything in it.

    Raises: ConfigError naming `where` and the line, for bad YAML and for a key that is written twice.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        lines: dict[str, int] = {}
        return (None if node is None else _construct(loader, node, "", lines, where)), lines
    except (yaml.YAMLError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        mark = getattr(error, "problem_mark", None)
        raise ConfigError(
            "not valid YAML", where=f"{where}:{mark.line + 1}" if mark else where, found=getattr(error, "problem", None) or error
        ) from error
    finally:
        loader.dispose()


def _construct(loader: _Loader, node: yaml.Node, key: str, lines: dict[str, int], where: str) -> Any:
    lines[key] = node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        return _mapping(loader, node, key, lines, where)
    if isinstance(node, yaml.SequenceNode):
        return [_construct(loader, child, _join(key, index), lines, where) for index, child in enumerate(node.value)]
    return loader.construct_object(node)


def _mapping(loader: _Loader, node: yaml.MappingNode, key: str, lines: dict[str, int], where: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name_node, child in node.value:
        name, line = str(loader.construct_object(name_node, deep=True)), name_node.start_mark.line + 1
        dotted = _join(key, name)
        if name in values:
            raise ConfigError(
                "this key is written twice",
                where=f"{where}:{line}",
                found=f"{dotted}, first on line {lines[dotted]}",
                do="keep one of them",
            )
        values[name] = _construct(loader, child, dotted, lines, where)
        lines[dotted] = line
    return values


def _join(key: str, name: object) -> str:
    return f"{key}.{name}" if key else str(name)


def dump(value: Any) -> str:
    """YAML of plain data, keys in their own order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
