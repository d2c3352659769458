"""Read and write YAML 1.2 with the line of every key.

    values, lines = parse(text, "recipe.yaml")
    parse(dump(values), "copy")[0] == values

PyYAML implements YAML 1.1: `1e-5` is a string, `010` is 8, `1:30` is 90 and `no` is false. The
loader below resolves the scalars of the YAML 1.2 core schema instead. It refuses duplicate keys,
other types (`!!binary`), merge keys, recursive or exploding aliases, and text that no file can
contain.

ruamel.yaml 0.19 does not replace this loader. In YAML 1.2 mode it still reads `1_000` as 1000,
`0b11` as 3 and `2024-01-01` as a date, merges `<<`, and constructs `!!binary`. A resolver and a
walk over the nodes would be needed as here.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from rlpipe.errors import ConfigError
from rlpipe.system.plain_files import read_plain

_SCALARS = (
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("tag:yaml.org,2002:int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
)
_PATTERNS = {"tag:yaml.org,2002:str": ".*", **{tag: pattern for tag, pattern, _ in _SCALARS}}
_COLLECTIONS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
_MOST_LEVELS = 50
_MOST_VALUES = 100_000
_MOST_DIGITS = 100
MOST_BYTES = 1024**2
"""Largest document. PyYAML reads about 1 MB per second; the project's longest recipe has 4000
bytes."""


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list] = {}  # noqa: RUF012 - PyYAML's own class attribute


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, list] = {}  # noqa: RUF012 - PyYAML's own class attribute

    def ignore_aliases(self, data: Any) -> bool:
        return True  # repeated values are written out instead of `*id001`


def _integer(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node)
    if len(text) > _MOST_DIGITS:  # int() of a long text takes quadratic time
        raise ValueError(f"a number of {len(text)} digits")
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
    """Return the value of a YAML document, and dotted key → line (from 1) of all its values.

    `where`: name of the document in errors. Raises: ConfigError with the line for invalid YAML,
    duplicate keys and values that are not plain data.
    """
    if len(text) > MOST_BYTES:
        raise ConfigError(
            "the document is too long for a configuration",
            where=where,
            found=f"{len(text)} characters",
            expected=f"at most {MOST_BYTES}",
        )
    loader: _Loader | None = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        lines: dict[str, int] = {}
        return (None if node is None else _construct(loader, node, "", lines, where)), lines
    except RecursionError as error:
        raise ConfigError("not valid YAML", where=where, found="too many levels") from error
    except (yaml.YAMLError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error)
        if problem.startswith("but "):  # PyYAML's sentence begins in its context
            problem = f"{getattr(error, 'context', '')}, {problem}"
        tab = "'\\t'" in problem
        do = "indent with spaces" if tab else "check brackets, quotes and colons of this line"
        raise ConfigError(
            "not valid YAML",
            where=f"{where}:{mark.line + 1}" if mark else where,
            found=problem,
            do=do,
        ) from error
    finally:
        if loader is not None:
            loader.dispose()  # breaks reference cycles of PyYAML's state machine


def read(path: Path, title: str, flag: str | None = None) -> str:
    """Return the text of a YAML file.

    `title`: name of the file's role in errors, such as "the recipe". `flag`: command line flag that
    gives the path. Raises: ConfigError unless the path is a regular file with UTF-8 text.
    """
    expected = f"a YAML file in UTF-8 of at most {MOST_BYTES} bytes"
    try:
        content = read_plain(path, at_most_bytes=MOST_BYTES)
        if content.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise ValueError("UTF-16")  # clearer than an error about byte 0xff
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except (OSError, ValueError) as error:
        found = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{title} cannot be read",
            where=flag or str(path),
            found=f"{path}: {found}" if flag else found,
            expected=expected,
        ) from error


def _construct(
    loader: _Loader, node: yaml.Node, key: str, lines: dict[str, int], where: str, depth: int = 0
) -> Any:
    line = lines[key] = node.start_mark.line + 1
    if depth > _MOST_LEVELS or len(lines) > _MOST_VALUES:
        # An alias inside its own anchor is endless, and nested aliases grow exponentially.
        levels = f"more than {_MOST_LEVELS} levels"
        values = f"more than {_MOST_VALUES} values"
        raise ConfigError(
            "not valid YAML",
            where=f"{where}:{line}",
            found=levels if depth > _MOST_LEVELS else values,
            do="check the document's aliases (*name)",
        )
    if isinstance(node, yaml.CollectionNode) and node.tag not in _COLLECTIONS:
        raise _unsupported(node.tag, f"{where}:{line}")
    if isinstance(node, yaml.MappingNode):
        return _mapping(loader, node, key, lines, where, depth + 1)
    if isinstance(node, yaml.SequenceNode):
        return [
            _construct(loader, child, _join(key, index), lines, where, depth + 1)
            for index, child in enumerate(node.value)
        ]
    return _scalar(loader, node, f"{where}:{line}")


def _scalar(loader: _Loader, node: yaml.Node, where: str) -> Any:
    if node.tag not in _PATTERNS or not re.fullmatch(_PATTERNS[node.tag], node.value, re.DOTALL):
        raise _unsupported(f"{node.tag} {node.value[:80]}", where)
    if re.search("[\0\ud800-\udfff]", node.value):
        raise ConfigError(
            "not valid YAML",
            where=where,
            found=ascii(node.value[:80]),
            expected="text without NUL and surrogate characters",
        )
    try:
        return loader.construct_object(node)
    except ValueError as error:
        raise ConfigError("not valid YAML", where=where, found=error) from error


def _unsupported(found: str, where: str) -> ConfigError:
    return ConfigError(
        "not valid YAML",
        where=where,
        found=found,
        expected="null, true, false, a number, a text, a list or a mapping",
        do="remove the tag (!...), or put the value in quotes",
    )


def _mapping(
    loader: _Loader, node: yaml.MappingNode, key: str, lines: dict[str, int], where: str, depth: int
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name_node, child in node.value:
        line = name_node.start_mark.line + 1
        if not isinstance(name_node, yaml.ScalarNode):
            raise ConfigError(
                "not valid YAML",
                where=f"{where}:{line}",
                found="a list or mapping as a key",
                expected="a name",
            )
        name = str(_scalar(loader, name_node, f"{where}:{line}"))
        dotted = _join(key, name)
        if name == "<<":
            raise ConfigError(
                "not valid YAML",
                where=f"{where}:{line}",
                found="a merge key (<<), which YAML 1.2 does not have",
                do="write the keys out",
            )
        if name in values:
            raise ConfigError(
                "the mapping has this key twice",
                where=f"{where}:{line}",
                found=f"{dotted}, first on line {lines[dotted]}",
                do="remove one of them",
            )
        values[name] = _construct(loader, child, dotted, lines, where, depth)
        lines[dotted] = line  # the line of the key; `_construct` stored the line of its value
    return values


def _join(key: str, name: object) -> str:
    return f"{key}.{name}" if key else str(name)


def dump(value: Any) -> str:
    """Return plain data as YAML, with keys in their given order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
