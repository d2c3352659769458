"""Read a store of record format 1, the format from before stages had contracts.

`Source` checks each record as it is read. `settings` converts the settings of a stage to the first
version of its contract.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from rlpipe.config.algorithms import AdvantageConfig
from rlpipe.config.data import DataConfig, EvalDataset, RewardConfig
from rlpipe.config.introduced import introduced, model_of, models_in
from rlpipe.config.model import EngineConfig, ModelConfig
from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.run import RunConfig
from rlpipe.config.train import CriticConfig, ReferenceConfig, TeacherConfig, TrainConfig
from rlpipe.errors import ConfigError, ObjectCorrupt
from rlpipe.store import epochs, notes, plans, receipts, segments
from rlpipe.store.audit.reachability import (
    CHECKPOINT_FILE,
    DATA_FOLDER,
    NODE_NAME,
    PLAN_NAME,
    SHARD_FOLDER,
)
from rlpipe.store.branches import (
    COMMIT_NAME,
    CONFIG_NAME,
)
from rlpipe.store.epochs import SKEW_S, Lease
from rlpipe.store.objects.files import Files
from rlpipe.store.records import RecordType, canonical, digest
from rlpipe.store.tables import scalars
from rlpipe.types import Stage

OLD_FORMAT = 1
WHO_AND_WHEN = ("attempt", "created", "epoch", "packages")
"""Keys of a record that its receipt of format 1 does not cover."""
AT_DEFAULT: dict[str, dict[str, Any]] = {
    "commit": {"parent": None, "trained": [], "dropped": {}},
    "node": {"parents": {}, "config": {}, "hooks": {}, "files": [], "outputs": {}},
    "file": {"rows": None},
    "data": {"epoch": 0, "offset": 0, "draws": 0, "buffer": []},
    "group": {"rows": None, "oldest": None, "finished": None},
}
"""Keys of format 1 that a receipt leaves out at these values."""
FLAT: dict[Stage, tuple[type[BaseModel], ...]] = {
    Stage.INIT: (TrainConfig, ModelConfig),
    Stage.ROLLOUT: (RolloutConfig, EngineConfig, TrainConfig, RunConfig),
    Stage.REWARD: (RewardConfig, RolloutConfig),
    Stage.ADVANTAGE: (
        AdvantageConfig,
        RolloutConfig,
        TrainConfig,
        ReferenceConfig,
        CriticConfig,
        RunConfig,
    ),
    Stage.TRAIN: (TrainConfig, RolloutConfig, RunConfig),
    Stage.EVAL: (EngineConfig,),
}
"""Models whose keys are settings of a stage under their own names. The first model with a key
counts.
"""
SECTIONS: dict[Stage, dict[str, type[BaseModel]]] = {
    Stage.INIT: {"critic": CriticConfig},
    Stage.ROLLOUT: {"reward": RewardConfig},
    Stage.ADVANTAGE: {"teacher": TeacherConfig},
    Stage.TRAIN: {"critic": CriticConfig},
    Stage.EVAL: {
        "dataset": EvalDataset,
        "rollout": RolloutConfig,
        "reward": RewardConfig,
        "data": DataConfig,
    },
}
"""Settings that are the identity of a model."""
PLAIN = {
    Stage.INIT: ("model", "layout"),
    Stage.ROLLOUT: ("model", "of", "judged_by"),
    Stage.REWARD: ("of",),
    Stage.TRAIN: ("layout",),
    Stage.EVAL: ("files",),
}
"""Settings that stay as they are."""
RENAMED = {"temperature": "rollout_temperature"}
"""Settings of batches and optimizer steps that now have the name of their key."""
STEPS = ("total_optimizer_steps", "critic_optimizer_steps")
"""Settings that are left out if they are null."""
FILES = (
    DATA_FOLDER,
    CHECKPOINT_FILE,
    SHARD_FOLDER,
    PLAN_NAME,
    plans.DRAW_NAME,
    scalars.TABLE_FILE_NAME,
)
"""Names of objects that are copied unchanged."""
RECORDS = (
    NODE_NAME,
    CONFIG_NAME,
    COMMIT_NAME,
    receipts.RECEIPT_NAME,
    receipts.NODE_RECEIPT_NAME,
    epochs.EPOCH_NAME,
    segments.SEGMENT_NAME,
    notes.NOTE_NAME,
    notes.GATE_NAME,
)
WRITTEN = (*FILES, *RECORDS)
NOT_COPIED = "weights/"


def settings(stage: Stage, old: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the settings of a stage from format 1 to the first version of its contract.

    Raises: ObjectCorrupt for an unknown setting.
    """
    if stage not in FLAT:
        return dict(old)
    new: dict[str, Any] = {}
    for key, value in old.items():
        name = RENAMED.get(key, key) if stage in (Stage.ADVANTAGE, Stage.TRAIN) else key
        owner = next((model for model in FLAT[stage] if name in model.model_fields), None)
        if key in PLAIN.get(stage, ()):
            new[key] = value
        elif section := SECTIONS.get(stage, {}).get(key):
            new[key] = identity(section, value)
        elif key in STEPS:
            new |= {} if value is None else {key: value}
        elif owner is not None:
            new |= identity(owner, {name: value})
        else:
            raise ObjectCorrupt(
                "unknown setting of format 1", where=f"a node of {stage}", found=key
            )
    return new


def identity(model: type[BaseModel], values: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the keys of an identity that have the default that they were introduced with."""
    entry = introduced(model)
    kept = {}
    for key, value in values.items():
        field = model.model_fields[key]
        value = _identity_below(list(models_in(field.annotation)), value)
        if not entry.leaves_out(key, value):
            kept[key] = value
    return kept


def _identity_below(models: list[type[BaseModel]], value: Any) -> Any:
    if isinstance(value, list):
        return [_identity_below(models, item) for item in value]
    model = model_of(models, value)
    return value if model is None else identity(model, value)


class Source:
    """The old store. Records are checked as they are read."""

    def __init__(self, files: Files, names: list[str]) -> None:
        """Raises: ObjectCorrupt for a name that no version of rlpipe wrote."""
        self.files = files
        self.names = names
        self.known = frozenset(names)
        for name in names:
            if not name.startswith(NOT_COPIED) and not any(form.match(name) for form in WRITTEN):
                raise ObjectCorrupt("unknown name of an object", where=files.url(name))

    def matching(self, form: re.Pattern[str]) -> Iterator[tuple[str, re.Match[str]]]:
        """Return the names that match a pattern."""
        return ((name, match) for name in self.names if (match := form.fullmatch(name)))

    def read(self, path: str) -> dict[str, Any]:
        """Return the content of a sealed record of format 1.

        Raises: ObjectCorrupt if damaged; ConfigError for another format.
        """
        data = self.files.read(path)
        try:
            content = json.loads(data)
            if canonical(content, path) + b"\n" != data or content.pop("sha256") != digest(
                content, path
            ):
                raise ValueError("the record has changed since it was written")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ObjectCorrupt(
                "not a sealed record", where=self.files.url(path), found=repr(error)[:200]
            ) from error
        if content.pop("format", OLD_FORMAT) != OLD_FORMAT:
            raise ConfigError(
                "only stores of format 1 are migrated",
                where=self.files.url(path),
                found="another format",
            )
        return content

    def valid(self, kind: type[RecordType], content: dict[str, Any], path: str) -> RecordType:
        """Return a record as today's type. Raises: ObjectCorrupt naming the first wrong key."""
        try:
            return kind.model_validate(content)
        except ValidationError as error:
            first = error.errors()[0]
            found = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            raise ObjectCorrupt(
                f"not a {kind.__name__.lower()} record", where=self.files.url(path), found=found
            ) from error

    def refuse_driven(self) -> None:
        """Raises: ConfigError if the lease of a driver is still valid."""
        newest: dict[str, str] = {}
        for name, match in self.matching(epochs.EPOCH_NAME):
            newest[match[1]] = max(newest.get(match[1], ""), name)
        for branch, name in newest.items():
            if not self.valid(Lease, self.read(name), name).expired(SKEW_S):
                raise ConfigError(
                    "a run of this store is being driven",
                    where=branch,
                    do="stop the run, or wait until its lease ends",
                )

    def check_receipts(
        self, kind: str, form: re.Pattern[str], record_of: Callable[[re.Match[str]], str]
    ) -> set[str]:
        """Compare receipts with their records; return the records with a receipt.

        Raises: ObjectCorrupt, ObjectMissing.
        """
        received = set()
        for name, match in self.matching(form):
            path = record_of(match)
            content = {
                key: value for key, value in self.read(path).items() if key not in WHO_AND_WHEN
            }
            receipt = self.read(name)
            if receipt["commit" if kind == "commit" else "record"] != digest(
                _without_defaults(kind, content), path
            ):
                raise ObjectCorrupt(
                    "a receipt does not match its record", where=self.files.url(name), found=path
                )
            received.add(path)
        return received


def _without_defaults(kind: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record of format 1 as its receipt contains it."""
    kept = {
        key: value
        for key, value in content.items()
        if key not in AT_DEFAULT[kind] or value != AT_DEFAULT[kind][key]
    }
    if kind == "node" and "files" in kept:
        kept["files"] = [_without_defaults("file", record) for record in kept["files"]]
    if kind == "commit":
        kept["data"] = _without_defaults("data", kept["data"])
    if kind == "data" and "buffer" in kept:
        kept["buffer"] = [_without_defaults("group", group) for group in kept["buffer"]]
    return kept


def branch_of(match: re.Match[str]) -> str:
    """Return the branch whose folder contains a record."""
    return match[0].split("/")[1]
