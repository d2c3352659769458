"""The default that each key of the configuration had when it was introduced.

`introduced.json` holds them, by model and key. A stage's identity leaves a key out while the key
has that default, so a new key changes no digest of a run that does not set it. The table only
grows:

- A new key gets its present default: `python -m rlpipe.config.introduced` adds every key that is
  missing.
- A default that is changed later leaves its entry as it is. The key is then part of the identity at
  its new default.
- A key that is removed leaves its entry. A stored run that had the key at that default goes on
  without it. A stored run that had another value is refused by name (`upgraded`).

`required` keys had no default and are always part of the identity. `tuning` keys never are.
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
    """The entry of one model."""

    required: frozenset[str]
    defaults: dict[str, Any]
    tuning: frozenset[str]

    def leaves_out(self, key: str, value: Any) -> bool:
        """True if the identity leaves out `key` at this plain value."""
        return key in self.defaults and spelled(value) == spelled(self.defaults[key])


@cache
def read_table() -> dict[str, Introduced]:
    """The table: model name to entry."""
    return {
        model: Introduced(
            frozenset(entry["required"]), entry["defaults"], frozenset(entry["tuning"])
        )
        for model, entry in stored_table().items()
    }


def introduced(model: type[BaseModel]) -> Introduced:
    """The entry of a model. Raises: LookupError with the command that adds it."""
    try:
        return read_table()[model.__name__]
    except KeyError:
        raise LookupError(f"{model.__name__} is not in {TABLE.name}: run `{EXTEND}`") from None


def spelled(value: Any) -> str:
    """A plain value as JSON: 1, 1.0 and true are three values, a tuple is a list, the order of keys
    does not matter."""
    return json.dumps(value, sort_keys=True)


def is_tuning(field: FieldInfo) -> bool:
    """True if a field was declared with `Tuning`."""
    return isinstance(field.json_schema_extra, dict) and bool(field.json_schema_extra.get("tuning"))


def models_of(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """A model and all models that its fields can hold, by name. Raises: ValueError if two have one
    name."""
    found: dict[str, type[BaseModel]] = {}
    waiting = [model]
    while waiting:
        one = waiting.pop()
        if found.setdefault(one.__name__, one) is not one:
            raise ValueError(
                f"two models of the configuration are called {one.__name__}; the table needs one name for each"
            )
        for field in one.model_fields.values():
            waiting += [
                inner for inner in models_in(field.annotation) if inner.__name__ not in found
            ]
    return found


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models that an annotation names, such as the members of a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from models_in(argument)


def differences(root: type[BaseModel]) -> list[str]:
    """What the table lacks of the models below `root`, and keys that moved between identity and
    tuning, in words."""
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
                    f"{name}.{key} is {now} and was not when it was introduced: raise the contract of its stages"
                )
    return problems


def removed(root: type[BaseModel]) -> list[str]:
    """Keys of the table that no model below `root` has any more, as `Model.key`."""
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
    """Stored values of the model `root`, as the model is today, so that they mean what they meant
    when they were stored.

    A key that was introduced since gets the default that it was introduced with, if that is another
    one than today's. A key that was removed since is left out. Raises: ConfigError naming a removed
    key that was not at the default of its introduction.
    """
    entry = introduced(root)
    table = stored_table()
    whole: dict[str, Any] = {}
    for key, value in stored.items():
        path = f"{where}.{key}" if where else key
        if (field := root.model_fields.get(key)) is not None:
            whole[key] = _upgraded_below(list(models_in(field.annotation)), value, path)
        elif key in entry.required or (key in entry.defaults and not entry.leaves_out(key, value)):
            raise ConfigError(
                "a stored run has a setting that was removed",
                where=path,
                found=value,
                expected=f"{entry.defaults[key]!r}, with which a run is the same"
                if key in entry.defaults
                else "no such key",
                do="use a version of rlpipe that has this key",
            )
        elif key not in entry.defaults and key not in entry.tuning:
            whole[key] = value  # never a key: validation refuses it
    for key in entry.defaults.keys() & root.model_fields.keys() - stored.keys():
        field = root.model_fields[key]
        default = entry.defaults[key]
        value = _upgraded_below(
            list(models_in(field.annotation)), default, f"{where}.{key}" if where else key
        )
        if value != default or not entry.leaves_out(key, default_of(field, table)):
            whole[key] = value
    return whole


def _upgraded_below(models: list[type[BaseModel]], value: Any, where: str) -> Any:
    if isinstance(value, list | tuple):
        return [
            _upgraded_below(models, one, f"{where}.{number}") for number, one in enumerate(value)
        ]
    model = model_of(models, value)
    return value if model is None else upgraded(model, value, where)


def model_of(models: list[type[BaseModel]], value: Any) -> type[BaseModel] | None:
    """The model that a plain value is of; of a union, the member that allows its `type`. None: the
    value is of no model."""
    if not isinstance(value, dict) or len(models) < 2:
        return models[0] if models and isinstance(value, dict) else None
    fits = (
        model
        for model in models
        if value.get("type") in get_args(model.model_fields["type"].annotation)
    )
    return next(fits, None)


def extended(root: type[BaseModel], stored: dict[str, Any]) -> dict[str, Any]:
    """The table with an entry for every key of the models below `root`. What `stored` has stays as
    it is."""
    table: dict[str, Any] = copy.deepcopy(stored)
    _extend(table, root, set())
    return dict(sorted(table.items()))


def _extend(table: dict[str, Any], model: type[BaseModel], seen: set[type[BaseModel]]) -> None:
    """Add what is missing of a model. The models of its fields come first: the default of a section
    is given by theirs."""
    if model in seen:
        return
    seen.add(model)
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
    """The identity of a field's present default. A required field has none, which no entry is equal
    to."""
    if field.is_required():
        return {"required": True}
    return _identity(field.get_default(call_default_factory=True, validated_data={}), table)


def _identity(value: Any, table: dict[str, Any]) -> Any:
    """As `Config.identity`, by a table that is not complete yet."""
    if isinstance(value, BaseModel):
        defaults = table[type(value).__name__]["defaults"]
        of_keys = {
            key: _identity(getattr(value, key), table)
            for key, field in type(value).model_fields.items()
            if not is_tuning(field)
        }
        return {
            key: one
            for key, one in of_keys.items()
            if key not in defaults or spelled(one) != spelled(defaults[key])
        }
    if isinstance(value, list | tuple):
        return [_identity(item, table) for item in value]
    if isinstance(value, dict):
        return {key: _identity(item, table) for key, item in value.items()}
    return value


@cache
def stored_table() -> dict[str, Any]:
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
