"""Defaults that the configuration's keys had at their introduction.

`introduced.json` contains them by model and key. A stage's identity leaves out a key that has this
default, so a new key changes no digest of a run that does not set it. The table only grows:

- A new key gets its present default: `python -m rlpipe.config.introduced` adds all missing keys.
- A later change of a default does not change the entry. The key at its new default is then part of
  the identity.
- The removal of a key does not remove the entry. A stored run with the key at that default remains
  valid without the key. A stored run with another value is refused by name (`upgraded`).

`required` keys have no default and are always part of the identity. `tuning` keys never are.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rlpipe.errors import ConfigError

TABLE = Path(__file__).with_name("introduced.json")
EXTEND = "python -m rlpipe.config.introduced"


class Introduced(NamedTuple):
    """Entry of one model."""

    required: frozenset[str]
    defaults: dict[str, Any]
    tuning: frozenset[str]

    def leaves_out(self, key: str, value: Any) -> bool:
        """True if the identity leaves out `key` at this plain value."""
        return key in self.defaults and canonical_json(value) == canonical_json(self.defaults[key])


@cache
def read_table() -> dict[str, Introduced]:
    """Return the table: model name → entry."""
    return {
        model: Introduced(
            frozenset(entry["required"]), entry["defaults"], frozenset(entry["tuning"])
        )
        for model, entry in stored_table().items()
    }


def introduced(model: type[BaseModel]) -> Introduced:
    """Return the entry of a model. Raises: LookupError with the command that adds the entry."""
    try:
        return read_table()[model.__name__]
    except KeyError:
        raise LookupError(f"{model.__name__} is not in {TABLE.name}: run `{EXTEND}`") from None


def canonical_json(value: Any) -> str:
    """Return a plain value as JSON with sorted keys.

    1, 1.0 and true are three different values; a tuple equals a list.
    """
    return json.dumps(value, sort_keys=True)


def is_tuning(field: FieldInfo) -> bool:
    """True if the field was declared with `Tuning`."""
    return isinstance(field.json_schema_extra, dict) and bool(field.json_schema_extra.get("tuning"))


def models_of(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """Return a model and all models of its fields by name. Raises: ValueError if two share a
    name."""
    models: dict[str, type[BaseModel]] = {}
    waiting = [model]
    while waiting:
        current = waiting.pop()
        if models.setdefault(current.__name__, current) is not current:
            raise ValueError(
                f"two models of the configuration have the name {current.__name__}; the table needs"
                " different names"
            )
        for field in current.model_fields.values():
            waiting += [
                inner for inner in models_in(field.annotation) if inner.__name__ not in models
            ]
    return models


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models of an annotation, such as the members of a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from models_in(argument)


def differences(root: type[BaseModel]) -> list[str]:
    """Describe keys that the table lacks, and keys that moved between identity and tuning."""
    problems = []
    for name, model in sorted(models_of(root).items()):
        entry = read_table().get(name)
        if entry is None:
            problems.append(f"{name} has no entry in {TABLE.name}: run `{EXTEND}`")
            continue
        known = {*entry.required, *entry.defaults, *entry.tuning}
        for key, field in model.model_fields.items():
            if key not in known:
                problems.append(f"{name}.{key} has no entry in {TABLE.name}: run `{EXTEND}`")
            elif is_tuning(field) != (key in entry.tuning):
                now = "Tuning(...)" if is_tuning(field) else "part of the identity"
                problems.append(
                    f"{name}.{key} is {now} and was not when it was introduced: raise the contract "
                    "of its stages"
                )
    return problems


def removed(root: type[BaseModel]) -> list[str]:
    """Return `Model.key` for all keys of the table that no model below `root` has any more."""
    models = models_of(root)
    keys = []
    for name, entry in sorted(read_table().items()):
        known = models[name].model_fields if name in models else {}
        keys += [
            f"{name}.{key}"
            for key in sorted({*entry.required, *entry.defaults, *entry.tuning} - set(known))
        ]
    return keys


def upgraded(root: type[BaseModel], stored: dict[str, Any], where: str = "") -> dict[str, Any]:
    """Return stored values of the model `root` as values of today's model, with equal meaning.

    A key that is younger than the values gets the default of its introduction, if today's default
    differs. A key that was removed is left out. Raises: ConfigError for a removed key with a value
    other than that default.
    """
    entry = introduced(root)
    table = stored_table()
    values: dict[str, Any] = {}
    for key, value in stored.items():
        path = f"{where}.{key}" if where else key
        if (field := root.model_fields.get(key)) is not None:
            values[key] = _upgraded_below(list(models_in(field.annotation)), value, path)
        elif key in entry.required or (key in entry.defaults and not entry.leaves_out(key, value)):
            equivalent = f"{entry.defaults.get(key)!r}, which has the same effect as no key"
            raise ConfigError(
                "a stored run has a setting that was removed",
                where=path,
                found=value,
                expected=equivalent if key in entry.defaults else "no such key",
                do="use a version of rlpipe that has this key",
            )
        elif key not in entry.defaults and key not in entry.tuning:
            values[key] = value  # never was a key: validation refuses it
    for key in entry.defaults.keys() & root.model_fields.keys() - stored.keys():
        field = root.model_fields[key]
        default = entry.defaults[key]
        value = _upgraded_below(
            list(models_in(field.annotation)), default, f"{where}.{key}" if where else key
        )
        if value != default or not entry.leaves_out(key, default_of(field, table)):
            values[key] = value
    return values


def _upgraded_below(models: list[type[BaseModel]], value: Any, where: str) -> Any:
    if isinstance(value, list | tuple):
        return [
            _upgraded_below(models, item, f"{where}.{number}") for number, item in enumerate(value)
        ]
    model = model_of(models, value)
    return value if model is None else upgraded(model, value, where)


def model_of(models: list[type[BaseModel]], value: Any) -> type[BaseModel] | None:
    """Return the model of a plain value; in a union, the member with the value's `type`.

    None: the value belongs to no model.
    """
    if not isinstance(value, dict) or len(models) < 2:
        return models[0] if models and isinstance(value, dict) else None
    fits = (
        model
        for model in models
        if value.get("type") in get_args(model.model_fields["type"].annotation)
    )
    return next(fits, None)


def extended(root: type[BaseModel], stored: dict[str, Any]) -> dict[str, Any]:
    """Return the table with an entry for every key below `root`; stored entries stay."""
    table: dict[str, Any] = copy.deepcopy(stored)
    _extend(table, root, set())
    return dict(sorted(table.items()))


def _extend(table: dict[str, Any], model: type[BaseModel], seen: set[type[BaseModel]]) -> None:
    """Add missing entries of a model in place."""
    if model in seen:
        return
    seen.add(model)
    # Models of fields come first, because the default of a section depends on their entries.
    for field in model.model_fields.values():
        for inner in models_in(field.annotation):
            _extend(table, inner, seen)
    entry = table.setdefault(model.__name__, {"required": [], "defaults": {}, "tuning": []})
    for key, field in model.model_fields.items():
        if key in {*entry["required"], *entry["defaults"], *entry["tuning"]}:
            continue
        if is_tuning(field):
            entry["tuning"].append(key)
        elif field.is_required():
            entry["required"].append(key)
        else:
            entry["defaults"][key] = default_of(field, table)


def default_of(field: FieldInfo, table: dict[str, Any]) -> Any:
    """Return the identity of a field's present default.

    A required field gives a value that equals no entry.
    """
    if field.is_required():
        return {"required": True}
    return _identity(field.get_default(call_default_factory=True, validated_data={}), table)


def _identity(value: Any, table: dict[str, Any]) -> Any:
    """Return the identity of a value, like `Config.identity`, from an incomplete table."""
    if isinstance(value, BaseModel):
        defaults = table[type(value).__name__]["defaults"]
        values = {
            key: _identity(getattr(value, key), table)
            for key, field in type(value).model_fields.items()
            if not is_tuning(field)
        }
        return {
            key: item
            for key, item in values.items()
            if key not in defaults or canonical_json(item) != canonical_json(defaults[key])
        }
    if isinstance(value, list | tuple):
        return [_identity(item, table) for item in value]
    if isinstance(value, dict):
        return {key: _identity(item, table) for key, item in value.items()}
    return value


@cache
def stored_table() -> dict[str, Any]:
    """Return the content of introduced.json."""
    return json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.exists() else {}


def main() -> int:
    """Add an entry for every key that has none."""
    from rlpipe.config.run import RunConfig

    TABLE.write_text(
        json.dumps(extended(RunConfig, stored_table()), indent=1, ensure_ascii=False) + "\n",
        encoding="utf-8",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
