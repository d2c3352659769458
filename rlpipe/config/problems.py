"""Turn pydantic's validation errors into one ConfigError: key, line, found, expected, nearest keys.

explain(error, origin)     ConfigError for all problems that pydantic found
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from rlpipe.config.introduced import models_in
from rlpipe.config.run import RunConfig
from rlpipe.config.similar_keys import nearest, similar_keys
from rlpipe.errors import ConfigError

LONGEST_SHOWN = 200
"""Characters of a value that an error message shows."""

UNKNOWN = "unknown key"
NEEDED = "this key is needed"
KEY_REFERENCE = "rlpipe/config/KEYS.md"
_BOUNDS = {"ge": "at least {}", "gt": "more than {}", "le": "at most {}", "lt": "less than {}"}
"""Names of a field's bounds → their text."""
_OUT_OF_RANGE = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")
"""Types of pydantic's errors of numbers that are out of range."""
_EXPECTED = {
    "model_type": "a mapping of keys",
    "model_attributes_type": "a mapping of keys, one of which is `type`",
    "int_type": "a whole number, without quotes, point or exponent",
    "float_type": "a finite number, without quotes",
    "bool_type": "true or false (yes, no, on, off and 1 are other values in YAML 1.2)",
    "finite_number": "a finite number",
    "tuple_type": "a list, as [a, b]",
    "string_type": "a text, in quotes if it looks like a number",
}
"""Type of a pydantic error → expected value, where pydantic's text does not say it for YAML."""
EXAMPLES = {
    "num_rollout": "num_rollout: 100",
    "model": "model: {source: {type: huggingface, hf_checkpoint: Qwen/Qwen3-0.6B}}",
    "data": "data: {prompts: {type: file, paths: [train.jsonl], label_key: label}}",
    "rollout": "rollout: {rollout_batch_size: 32, n_samples_per_prompt: 8}",
    "reward": "reward: {function: {type: math}}",
}
"""Needed key → an example of its line."""

EXAMPLES_OF_SECTIONS = {
    "train.lora": "train.lora={rank: 16}",
    "train.optimizer": "train.optimizer={lr: 1e-6}",
}
"""Key of a section → an example, for a value in its place."""

_KEY = re.compile(r"\b(?:[a-z][a-z0-9_]*(?:\.[a-z0-9_]+)+|async_buffer_size|num_rollout)\b")
"""A key in a text."""
_ADVICE = re.compile(r"\b(?:use|set|give|remove|write|expected|needs)\b")
"""Words of a text that says itself what to do."""

_OF_PATH = {
    "function": "{type: python, path: %s}",
    "prompts": "{type: file, paths: [%s]}",
    "source": "{type: huggingface, hf_checkpoint: %s}",
}
"""Last part of a key → its section, for a path that was given in place of the section."""


@dataclass(slots=True)
class Origin:
    """Source of values: a file with the line of every dotted key, and overrides by key."""

    file: str
    lines: dict[str, int]
    overrides: dict[str, str] = field(default_factory=dict)
    elsewhere: dict[str, str] = field(default_factory=dict)
    """`file:line` of keys that come from another file, such as a preset."""

    def of(self, key: str) -> str:
        """Return `override a.b=c` or `file:line` of the key or of its nearest parent.

        The file itself is the origin of the whole configuration ("").
        """
        # First: an override of a section or a list also replaced the keys of the file in it.
        parts = key.split(".")
        for length in range(len(parts), 0, -1):
            if override := self.overrides.get(".".join(parts[:length])):
                return f"override {override}"
        while key:
            if key in self.lines:
                return f"{self.file}:{self.lines[key]}"
            if key in self.elsewhere:
                return self.elsewhere[key]
            below = (text for name, text in self.overrides.items() if name.startswith(f"{key}."))
            if override := next(below, None):
                return f"override {override}"
            key = key.rpartition(".")[0]
        return self.file


@dataclass(slots=True)
class _Problem:
    key: str
    text: str
    found: object = None
    expected: list[str] = field(default_factory=list)
    do: str | None = None


def explain(error: ValidationError, origin: Origin) -> ConfigError:
    """Return one ConfigError for all problems of a validation.

    A single problem fills `found` and `expected`; several problems become lines of the message.
    """
    problems: dict[tuple[str, str], _Problem] = {}
    for entry in error.errors():
        problem = _problem(entry)
        # pydantic reports each member of a union separately: join what they expect.
        known = problems.setdefault((problem.key, repr(problem.found)), problem)
        known.expected.extend(text for text in problem.expected if text not in known.expected)
    problems = _without_misspelt(problems)
    if len(problems) == 1:
        (only,) = problems.values()
        where = f"{only.key} ({origin.of(only.key)})" if only.key else origin.of("")
        return ConfigError(
            only.text,
            where=where,
            found=only.found,
            expected="; or ".join(only.expected) or None,
            do=only.do,
        )
    lines = [_line(problem, origin) for problem in problems.values()]
    return ConfigError(f"{len(lines)} problems\n" + "\n".join(lines), where=origin.file)


def _without_misspelt(problems: dict[tuple[str, str], _Problem]) -> dict[tuple[str, str], _Problem]:
    """Join an unknown key and the needed key that it misspells."""
    needed = {key: problem for key, problem in problems.items() if problem.text == NEEDED}
    for problem in problems.values():
        found = next(
            (
                key
                for key, one in needed.items()
                if problem.text == UNKNOWN and one.key in problem.expected
            ),
            None,
        )
        if found is not None:
            problem.expected = [needed.pop(found).key]
            problem.do = f"rename it to {problem.expected[0]}"
    return {
        key: problem for key, problem in problems.items() if problem.text != NEEDED or key in needed
    }


def _line(problem: _Problem, origin: Origin) -> str:
    key = problem.key or "the configuration"
    text = f"  {key} ({origin.of(problem.key)}): {problem.text}"
    if problem.found is not None:
        text += f"; found {problem.found}"
    if problem.expected:
        text += f"; expected {'; or '.join(problem.expected)}"
    return text + (f"; {problem.do}" if problem.do else "")


def _problem(entry: Any) -> _Problem:
    keys, model, rest = _resolve_location(entry["loc"])
    key = ".".join(keys)
    kind = entry["type"]
    message = entry["msg"].removeprefix("Value error, ")
    if kind == "extra_forbidden":
        name = str(rest[0]) if rest else keys[-1]
        dotted = ".".join([*keys, name]) if rest else key
        similar = similar_keys(name, model, ".".join(keys[: len(keys) if rest else -1]))
        do = f"rename it, or remove it; {KEY_REFERENCE} lists all keys"
        return _Problem(dotted, UNKNOWN, expected=similar, do=do)
    if kind == "missing":
        example = f", such as `{EXAMPLES[key]}`" if key in EXAMPLES else ""
        return _Problem(key, NEEDED, do=f"add it to the recipe{example} ({KEY_REFERENCE})")
    if kind.startswith("union_tag"):
        tags = entry.get("ctx", {}).get("expected_tags", "")
        found = entry.get("ctx", {}).get("tag")
        expected = [f"one of {tags}".replace("'", "")] if tags else []
        text = "unknown type" if found else "this key is needed"
        return _Problem(f"{key}.type", text, found, expected, _nearest_word(found, tags))
    if kind == "value_error":
        error = entry.get("ctx", {}).get("error")
        if isinstance(error, ConfigError):
            expected = [] if error.expected is None else [str(error.expected)]
            found = None if error.found is None else str(error.found)
            return _Problem(key, error.problem, found, expected, error.do or _number(key, entry))
        return _Problem(key, message, do=_change(key, message))
    found = _shown(entry["input"])
    if kind == "too_short":
        return _Problem(key, "too few entries", found, [f"at least {entry['ctx']['min_length']}"])
    if kind in _OUT_OF_RANGE:
        return _out_of_range(key, _field(entry["loc"]), entry)
    expected = _EXPECTED.get(kind)
    if expected is None:
        text = message.removeprefix("Input should be ").partition(", unable")[0]
        expected = text[:1].lower() + text[1:]
    return _Problem(
        key,
        "not a valid value",
        found,
        [expected],
        _correction(kind, key, entry["input"], expected),
    )


def _out_of_range(key: str, field: FieldInfo | None, entry: Any) -> _Problem:
    """Return the problem of a number outside the range of its field, with a number to set."""
    bounds = _bounds(field, entry["ctx"])
    expected = " and ".join(_BOUNDS[name].format(bound) for name, bound in bounds.items())
    default = None if field is None else field.default
    if isinstance(default, int | float):
        value = f"{default} (the default)"
    else:
        value = str(bounds.get("ge", bounds.get("le", "a number")))
    if bounds.get("ge", "") == bounds.get("le"):
        expected, do = str(bounds["ge"]), f"set {key} to {value}"
    else:
        do = f"set {key} to {value}, or another number in this range"
    return _Problem(key, "not a valid value", _shown(entry["input"]), [expected], do)


def _bounds(field: FieldInfo | None, context: Mapping[str, Any]) -> dict[str, float]:
    """Return the bounds of a field, lower ones first; else those of the error, its context."""
    parts = [] if field is None else [*field.metadata, *_of_items(field.annotation)]
    found = {
        name: bound
        for name in _BOUNDS
        for part in parts
        if (bound := getattr(part, name, None)) is not None
    }
    return found or {name: context[name] for name in _BOUNDS if name in context}


def _of_items(annotation: Any) -> Iterator[Any]:
    """Yield the constraints inside a type, such as those of the items of a list."""
    for inner in get_args(annotation):
        if isinstance(inner, FieldInfo):
            yield from inner.metadata
        else:
            yield from (*getattr(inner, "__metadata__", ()), *_of_items(inner))


def _field(location: tuple[int | str, ...]) -> FieldInfo | None:
    """Return the last field of pydantic's location; None in a free mapping."""
    for length in range(len(location), 0, -1):
        _, model, _ = _resolve_location(location[: length - 1])
        if model is not None and (name := location[length - 1]) in model.model_fields:
            return model.model_fields[str(name)]
    return None


def _change(key: str, message: str) -> str | None:
    """Return the keys to change for the text of a conflict; None if the text has advice itself."""
    if _ADVICE.search(message):
        return None
    named = list(dict.fromkeys(_KEY.findall(message))) or [key or "the recipe"]
    return f"change {' or '.join(named)}; {KEY_REFERENCE} has their meaning"


def _number(key: str, entry: Any) -> str | None:
    """Return what to set in place of a number that a validator refuses; None for other values."""
    value, expected = entry["input"], entry["ctx"]["error"].expected
    if isinstance(value, bool) or not isinstance(value, int | float) or expected is None:
        return None
    return f"set {key} to {expected}"


def _nearest_word(found: Any, quoted: str) -> str | None:
    """Return `write ...` with the words in quotes that are most similar to `found`, if any is."""
    if not isinstance(found, str):
        return None
    near = nearest(found, re.findall(r"'([^']*)'", quoted))
    ratios = [difflib.SequenceMatcher(None, found, word).ratio() for word in near]
    best = [word for word, ratio in zip(near, ratios, strict=True) if ratio == max(ratios)]
    return f"write {' or '.join(sorted(best))}" if best else None


def _correction(kind: str, key: str, value: Any, expected: str) -> str | None:
    """Return what to write for a similar word, or in place of a list or a section."""
    if kind in ("model_type", "model_attributes_type") and key in EXAMPLES_OF_SECTIONS:
        return f"write {EXAMPLES_OF_SECTIONS[key]}"
    if not isinstance(value, str):
        return None
    if kind == "literal_error":
        return _nearest_word(value, expected)
    if kind == "model_attributes_type":
        of_path = _OF_PATH.get(key.rpartition(".")[2])
        is_path = any(sign in value for sign in "/.:")
        return f"write {of_path % value if of_path and is_path else f'{{type: {value}}}'}"
    return f"write [{value}]" if kind == "tuple_type" else None


def _shown(value: Any) -> str:
    """Return a value as in YAML, cut at LONGEST_SHOWN characters."""
    if value is None:
        return "null (no value)"
    text = repr(value).lower() if isinstance(value, bool) else repr(value)
    if len(text) <= LONGEST_SHOWN:
        return text
    return f"{text[:LONGEST_SHOWN]}... ({len(text)} characters)"


def _resolve_location(
    location: tuple[int | str, ...],
) -> tuple[list[str], type[BaseModel] | None, list[int | str]]:
    """Split pydantic's location into (parts of the dotted key, their last model, the rest)."""
    keys: list[str] = []
    models: list[type[BaseModel]] = [RunConfig]
    in_free_mapping = False
    for position, item in enumerate(location):
        # The location contains the tag of a discriminated union; a dotted key does not.
        tagged = [model for model in models if item in _tags(model)]
        if tagged and len(models) > 1:
            models = tagged
        elif isinstance(item, int) or in_free_mapping:
            keys.append(str(item))
        else:
            fields = (model.model_fields[item] for model in models if item in model.model_fields)
            info = next(fields, None)
            if info is None:
                return keys, (models[0] if models else None), list(location[position:])
            keys.append(item)
            models = list(models_in(info.annotation))
            in_free_mapping = get_origin(info.annotation) is dict
    return keys, (models[0] if len(models) == 1 else None), []


def _tags(model: type[BaseModel]) -> tuple[Any, ...]:
    info = model.model_fields.get("type")
    return get_args(info.annotation) if info else ()
