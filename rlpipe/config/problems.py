"""What pydantic found wrong with a configuration, said so that it can be mended: key, line, found,
expected, nearest keys.

Not here: reading the text (`text`) or deciding what is valid (the models themselves).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from rlpipe.config.run import RunConfig
from rlpipe.errors import ConfigError


@dataclass(slots=True)
class Origin:
    """Where values came from: a file with the line of every dotted key, and the overrides by
    key."""

    file: str
    lines: dict[str, int]
    overrides: dict[str, str] = field(default_factory=dict)
    elsewhere: dict[str, str] = field(default_factory=dict)
    """`file:line` of keys that come from another file."""

    def of(self, key: str) -> str:
        """`override a.b=c`, or `file:line` of the key or of the nearest one around it; the file for
        the whole ("")."""
        while key:
            if key in self.overrides:
                return f"override {self.overrides[key]}"
            if key in self.lines:
                return f"{self.file}:{self.lines[key]}"
            if key in self.elsewhere:
                return self.elsewhere[key]
            made = next(
                (text for name, text in self.overrides.items() if name.startswith(f"{key}.")), None
            )
            if made:
                return f"override {made}"
            key = key.rpartition(".")[0]
        return self.file


@dataclass(slots=True)
class _Problem:
    key: str
    text: str
    found: object = None
    expected: list[str] = field(default_factory=list)


def nearest(name: str, names: Iterable[str], at_most: int = 3) -> list[str]:
    """The names most like this one, best first; none if nothing is."""
    return difflib.get_close_matches(name, list(names), n=at_most, cutoff=0.6)


def explain(error: ValidationError, origin: Origin) -> ConfigError:
    """One ConfigError for all that pydantic found. A single problem fills found / expected; several
    become lines."""
    problems: dict[tuple[str, str], _Problem] = {}
    for entry in error.errors():
        problem = _problem(entry)
        known = problems.setdefault((problem.key, repr(problem.found)), problem)
        known.expected.extend(text for text in problem.expected if text not in known.expected)
    if len(problems) == 1:
        (one,) = problems.values()
        where = f"{one.key} ({origin.of(one.key)})" if one.key else origin.of("")
        return ConfigError(
            one.text, where=where, found=one.found, expected="; or ".join(one.expected) or None
        )
    lines = [_line(problem, origin) for problem in problems.values()]
    return ConfigError(f"{len(lines)} problems\n" + "\n".join(lines), where=origin.file)


def _line(problem: _Problem, origin: Origin) -> str:
    text = f"  {problem.key or 'the whole'} ({origin.of(problem.key)}): {problem.text}"
    if problem.found is not None:
        text += f"; found {problem.found}"
    return text + (f"; expected {'; or '.join(problem.expected)}" if problem.expected else "")


def _problem(entry: Any) -> _Problem:
    keys, model, rest = _walk(entry["loc"])
    key = ".".join(keys)
    kind = entry["type"]
    message = entry["msg"].removeprefix("Value error, ")
    if kind == "extra_forbidden":
        name = str(rest[0]) if rest else keys[-1]
        return _Problem(
            ".".join([*keys, name]) if rest else key,
            "unknown key",
            expected=_expected_key(name, model),
        )
    if kind == "missing":
        return _Problem(key, "this key is needed")
    if kind.startswith("union_tag"):
        tags = entry.get("ctx", {}).get("expected_tags", "")
        found = entry.get("ctx", {}).get("tag")
        expected = [f"one of {tags}".replace("'", "")] if tags else []
        return _Problem(
            f"{key}.type", "unknown type" if found else "this key is needed", found, expected
        )
    if kind == "value_error":
        return _Problem(key, message)
    if kind == "too_short":
        return _Problem(
            key,
            "too few entries",
            _shown(entry["input"]),
            [f"at least {entry['ctx']['min_length']}"],
        )
    wanted = _WANTED.get(kind) or message.removeprefix("Input should be ").partition(", unable")[0]
    return _Problem(key, "not a valid value", _shown(entry["input"]), [_lower(wanted)])


_WANTED = {
    "model_type": "keys of its own",
    "model_attributes_type": "keys of its own, one of which is `type`",
    "int_type": "a whole number, without quotes, point or exponent",
    "float_type": "a finite number, without quotes",
    "bool_type": "true or false (yes, no, on, off and 1 are other values in YAML 1.2)",
    "finite_number": "a finite number",
    "tuple_type": "a list: [a, b]",
    "string_type": "a text, in quotes where it looks like a number",
}
"""What pydantic's words for some of its errors leave open."""


def _shown(value: Any) -> str:
    """A value as it was given, cut where it would fill the screen."""
    text = repr(value)
    return (
        text
        if len(text) <= _LONGEST_SHOWN
        else f"{text[:_LONGEST_SHOWN]}... ({len(text)} characters)"
    )


_LONGEST_SHOWN = 200


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _expected_key(name: str, model: type[BaseModel] | None) -> list[str]:
    """Keys like this one: first among its siblings, then the same name anywhere in the
    configuration."""
    if model is None:
        return []
    siblings = nearest(name, model.model_fields)
    elsewhere = [dotted for dotted in all_keys() if dotted.rpartition(".")[2] == name]
    if siblings or elsewhere:
        return [*siblings, *elsewhere][:4]
    return [f"one of {', '.join(model.model_fields)}"]


def all_keys(model: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[str]:
    """Every dotted key of a configuration model, parents before children."""
    for name, info in model.model_fields.items():
        yield prefix + name
        for inner in _models(info.annotation):
            if inner is not model:
                yield from all_keys(inner, f"{prefix}{name}.")


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The models an annotation can hold, directly, in a union, or as items of a tuple."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) is dict:
        return []
    return [model for part in get_args(annotation) for model in _models(part)]


def _walk(loc: tuple[int | str, ...]) -> tuple[list[str], type[BaseModel] | None, list[int | str]]:
    """Pydantic's location as (dotted key's parts, the model they end in, what is left).

    Pydantic puts the tag of a discriminated union into the location; a configuration's keys do not
    have it.
    """
    keys: list[str] = []
    models: list[type[BaseModel]] = [RunConfig]
    free = False
    for position, item in enumerate(loc):
        tagged = [model for model in models if item in _tags(model)]
        if tagged and len(models) > 1:
            models = tagged
        elif isinstance(item, int) or free:
            keys.append(str(item))
        else:
            info = next(
                (model.model_fields[item] for model in models if item in model.model_fields), None
            )
            if info is None:
                return keys, (models[0] if models else None), list(loc[position:])
            keys.append(item)
            models = _models(info.annotation)
            free = get_origin(info.annotation) is dict
    return keys, (models[0] if len(models) == 1 else None), []


def _tags(model: type[BaseModel]) -> tuple[Any, ...]:
    info = model.model_fields.get("type")
    return get_args(info.annotation) if info else ()
