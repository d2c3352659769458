"""Configuration as text: YAML 1.2 in, YAML out, each key with the line it stands on.

PyYAML speaks YAML 1.1, where `1e-5` is a string, `010` is 8, `1:30` is 90 and `no` is false. Here
the scalars are those of the YAML 1.2 core schema, and a key written twice is an error. What `dump`
writes, `parse` reads back unchanged.

What no configuration needs is an error too, because nobody else would say so: other types
(`!!binary`), aliases that make the document endless or too large, text that no file can hold.

Not here: what the keys mean (`run`), or where recipes are kept (`load`).
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
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
)
_PATTERNS = {"tag:yaml.org,2002:str": ".*", **{tag: pattern for tag, pattern, _ in _SCALARS}}
_COLLECTIONS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
_DEEPEST = 50
_MOST_VALUES = 100_000
_MOST_DIGITS = 100
MOST_BYTES = 1024**2
"""Of a document. PyYAML reads a megabyte in a second; the longest recipe of the project has 4000
bytes."""


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list] = {}  # noqa: RUF012 - PyYAML's own class attribute


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, list] = {}  # noqa: RUF012 - PyYAML's own class attribute

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _integer(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node)
    if len(text) > _MOST_DIGITS:
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
    """The value of a YAML document, and dotted key → line (from 1) of everything in it.

    Raises: ConfigError naming `where` and the line, for bad YAML, for a key that is written twice,
    for what is no plain data.
    """
    if len(text) > MOST_BYTES:
        raise ConfigError(
            "too long to be a configuration",
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
        raise ConfigError("not valid YAML", where=where, found="it is nested too deeply") from error
    except (yaml.YAMLError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error)
        if problem.startswith("but "):
            problem = f"{getattr(error, 'context', '')}, {problem}"
        do = "indent with spaces" if "'\\t'" in problem else None
        raise ConfigError(
            "not valid YAML",
            where=f"{where}:{mark.line + 1}" if mark else where,
            found=problem,
            do=do,
        ) from error
    finally:
        if loader is not None:
            loader.dispose()


def read(path: Path, what: str, flag: str | None = None) -> str:
    """The text of a YAML file. Raises: ConfigError naming `what` it is, for anything but a regular
    file of UTF-8 text.

    `flag`: what names the file on a command line.
    """
    expected = f"a YAML file in UTF-8 of at most {MOST_BYTES} bytes"
    try:
        content = read_plain(path, at_most_bytes=MOST_BYTES)
        if content.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise ValueError("UTF-16")
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except (OSError, ValueError) as error:
        found = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{what} cannot be read",
            where=flag or str(path),
            found=f"{path}: {found}" if flag else found,
            expected=expected,
        ) from error


def _construct(
    loader: _Loader, node: yaml.Node, key: str, lines: dict[str, int], where: str, depth: int = 0
) -> Any:
    line = lines[key] = node.start_mark.line + 1
    if depth > _DEEPEST or len(lines) > _MOST_VALUES:
        found = (
            f"more than {_MOST_VALUES} values"
            if depth <= _DEEPEST
            else f"more than {_DEEPEST} levels"
        )
        raise ConfigError(
            "not valid YAML", where=f"{where}:{line}", found=found, do="look at its aliases (*name)"
        )
    if isinstance(node, yaml.CollectionNode) and node.tag not in _COLLECTIONS:
        raise _foreign(node.tag, f"{where}:{line}")
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
        raise _foreign(f"{node.tag} {node.value[:80]}", where)
    if re.search("[\0\ud800-\udfff]", node.value):
        raise ConfigError(
            "not valid YAML",
            where=where,
            found=ascii(node.value[:80]),
            expected="text that a file can hold",
        )
    try:
        return loader.construct_object(node)
    except ValueError as error:
        raise ConfigError("not valid YAML", where=where, found=error) from error


def _foreign(found: str, where: str) -> ConfigError:
    return ConfigError(
        "not valid YAML",
        where=where,
        found=found,
        expected="a value of its core schema, without a tag",
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
            found = "a merge key (<<), which YAML 1.2 does not have"
            do = "write the keys out"
            raise ConfigError("not valid YAML", where=f"{where}:{line}", found=found, do=do)
        if name in values:
            raise ConfigError(
                "this key is written twice",
                where=f"{where}:{line}",
                found=f"{dotted}, first on line {lines[dotted]}",
                do="keep one of them",
            )
        values[name] = _construct(loader, child, dotted, lines, where, depth)
        lines[dotted] = line
    return values


def _join(key: str, name: object) -> str:
    return f"{key}.{name}" if key else str(name)


def dump(value: Any) -> str:
    """YAML of plain data, keys in their own order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
