"""Make a store of today of a store of record format 1:  python -m tools.migrate --store OLD --to NEW

Format 1 is that of the stores from before stages had contracts. A node of it has every setting in
its name; now a setting at the default that it was introduced with is left out. So every node gets
another name, and so does all that refers to a node.

The old store is only read. NEW must be empty. Data files are copied, and compared with the sha256
that their node recorded. The old store must be whole: a record that was changed, a file that is not
what its node says, or an object that no writer names ends the migration, and so does whatever the
audit of the new store finds. Nothing is left in NEW then. Exit codes: 0 done, 1 the store is not
whole, 2 it could not be tried.

Not copied: exported weights (`weights/`), which the next push makes again.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from rlpipe.config.algorithms import AdvantageConfig
from rlpipe.config.data import DataConfig, EvalDataset, RewardConfig
from rlpipe.config.introduced import introduced, model_of, models_in
from rlpipe.config.model import EngineConfig, ModelConfig
from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.run import RunConfig
from rlpipe.config.train import CriticConfig, ReferenceConfig, TeacherConfig, TrainConfig
from rlpipe.errors import ConfigError, ObjectCorrupt, ObjectMissing, RlpipeError
from rlpipe.store import epochs, notes, plans, receipts, segments
from rlpipe.store.audit.reachability import (
    CHECKPOINT_FILE,
    DATA_FOLDER,
    NODE_NAME,
    PLAN_NAME,
    SHARD_FOLDER,
)
from rlpipe.store.audit.verification import check_store
from rlpipe.store.branches import (
    COMMIT_NAME,
    CONFIG_NAME,
    Branch,
    Branches,
    config_path,
    parse_commit_name,
)
from rlpipe.store.epochs import SKEW_S, Lease
from rlpipe.store.nodes import Nodes, input_digest
from rlpipe.store.objects.files import Files
from rlpipe.store.records import RecordType, canonical, digest, seal
from rlpipe.store.tables import scalars
from rlpipe.types import CONTRACTS, Commit, Node, Stage, VersionedRecord
from tools.piped import piped

OLD_FORMAT = 1
WHO_AND_WHEN = ("attempt", "created", "epoch", "packages")
"""Keys that a receipt of format 1 is not of."""
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
"""Models whose keys are settings of a stage by their own names, the first that has a key counts."""
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
"""Settings that are kept as they are."""
RENAMED = {"temperature": "rollout_temperature"}
"""Settings of batches and optimizer steps that have the name of their key now."""
STEPS = ("total_optimizer_steps", "critic_optimizer_steps")
"""Settings that are left out where they are null."""

FILES = (
    DATA_FOLDER,
    CHECKPOINT_FILE,
    SHARD_FOLDER,
    PLAN_NAME,
    plans.DRAW_NAME,
    scalars.TABLE_FILE_NAME,
)
"""Names of what is copied as it is."""
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

Say = Callable[[str], object]


def main() -> int:
    """Parse, migrate, report."""
    arguments = parse_arguments()
    try:
        found = migrate(Files(arguments.store), Files(arguments.to), say=print)
    except (ObjectCorrupt, ObjectMissing) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except RlpipeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    for problem in found:
        print(problem, file=sys.stderr)
    return 1 if found else 0


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.migrate", description="A store of format 1 as one of today."
    )
    parser.add_argument(
        "--store", required=True, help="URL or directory of the old store; it is only read"
    )
    parser.add_argument(
        "--to", required=True, help="URL or directory of the new store, which must be empty"
    )
    return parser.parse_args()


def migrate(old: Files, new: Files, say: Say) -> list[str]:
    """Make the new store; what its audit finds wrong, in which case nothing is left of it.

    Raises: ConfigError if the new root is not empty, the old store is empty or of another format,
    or a run of it is being driven; ObjectCorrupt, ObjectMissing, StoreError if the old store is not
    whole.
    """
    if new.root == old.root or new.list():
        raise ConfigError(
            "a migrated store needs an empty root",
            where="--to",
            found=new.root,
            do="name another directory",
        )
    names = old.list()
    if not any(CONFIG_NAME.fullmatch(name) for name in names):
        raise ConfigError("there is no run in this store", where="--store", found=old.root)
    source = Source(old, names)
    source.refuse_driven()
    try:
        written = Migration(source, new).run(say)
        if old.list() != names:
            raise ConfigError(
                "the store was changed meanwhile",
                where=old.root,
                do="stop its runs, and start again",
            )
        say(f"{new.root}: auditing")
        report = check_store(new)
        found = [
            f"{finding.rule}: {finding.where}: {finding.problem}" for finding in report.findings
        ]
    except BaseException:
        remove(new)
        raise
    if found:
        remove(new)
        return [
            *found,
            f"{old.root} is not whole, nothing was kept of {new.root}: audit it with the rlpipe that wrote it",
        ]
    say(f"{new.root}: " + ", ".join(f"{number} {kind}" for kind, number in sorted(written.items())))
    say(
        f"{new.root}: audited, nothing wrong; {len(report.notes)} notes (python -m tools.audit verify)"
    )
    return []


def remove(files: Files) -> None:
    """Remove everything that was written."""
    for path in files.list():
        files.delete(path)


def settings(stage: Stage, old: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a stage by the first version of its contract, from those of format 1. Raises:
    ObjectCorrupt."""
    if stage not in FLAT:
        return dict(old)
    made: dict[str, Any] = {}
    for key, value in old.items():
        name = RENAMED.get(key, key) if stage in (Stage.ADVANTAGE, Stage.TRAIN) else key
        owner = next((model for model in FLAT[stage] if name in model.model_fields), None)
        if key in PLAIN.get(stage, ()):
            made[key] = value
        elif section := SECTIONS.get(stage, {}).get(key):
            made[key] = identity(section, value)
        elif key in STEPS:
            made |= {} if value is None else {key: value}
        elif owner is not None:
            made |= identity(owner, {name: value})
        else:
            raise ObjectCorrupt(
                "no rlpipe of format 1 wrote such a setting", where=f"a node of {stage}", found=key
            )
    return made


def identity(model: type[BaseModel], values: Mapping[str, Any]) -> dict[str, Any]:
    """An identity of format 1, which has every key, without those that have the default they were
    introduced with."""
    entry = introduced(model)
    made = {}
    for key, value in values.items():
        field = model.model_fields[key]
        value = _identity_below(list(models_in(field.annotation)), value)
        if not entry.leaves_out(key, value):
            made[key] = value
    return made


def _identity_below(models: list[type[BaseModel]], value: Any) -> Any:
    if isinstance(value, list):
        return [_identity_below(models, one) for one in value]
    model = model_of(models, value)
    return value if model is None else identity(model, value)


class Source:
    """The old store: its records, checked as they are read."""

    def __init__(self, files: Files, names: list[str]) -> None:
        """Raises: ObjectCorrupt for a name that no writer gives."""
        self.files, self.names, self.known = files, names, frozenset(names)
        for name in names:
            if not name.startswith(NOT_COPIED) and not any(form.match(name) for form in WRITTEN):
                raise ObjectCorrupt("no writer gives an object such a name", where=files.url(name))

    def matching(self, form: re.Pattern[str]) -> Iterator[tuple[str, re.Match[str]]]:
        """Names of this form."""
        return ((name, match) for name in self.names if (match := form.fullmatch(name)))

    def read(self, path: str) -> dict[str, Any]:
        """The content of a sealed record of format 1. Raises: ObjectCorrupt if it is none;
        ConfigError if it is of another."""
        data = self.files.read(path)
        try:
            content = json.loads(data)
            if canonical(content, path) + b"\n" != data or content.pop("sha256") != digest(
                content, path
            ):
                raise ValueError("its bytes are not those that were written")
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

    def valid(self, kind: type[RecordType], said: dict[str, Any], path: str) -> RecordType:
        """What a record says, as a record of today. Raises: ObjectCorrupt naming its first wrong
        key."""
        try:
            return kind.model_validate(said)
        except ValidationError as error:
            first = error.errors()[0]
            found = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            raise ObjectCorrupt(
                f"not a {kind.__name__.lower()} record", where=self.files.url(path), found=found
            ) from error

    def refuse_driven(self) -> None:
        """Raises: ConfigError if a driver has a lease of some run that is not over."""
        newest: dict[str, str] = {}
        for name, match in self.matching(epochs.EPOCH_NAME):
            newest[match[1]] = max(newest.get(match[1], ""), name)
        for branch, name in newest.items():
            if not self.valid(Lease, self.read(name), name).expired(SKEW_S):
                raise ConfigError(
                    "a run of this store is being driven",
                    where=branch,
                    do="stop it first, or wait for its lease",
                )

    def check_receipts(
        self, kind: str, form: re.Pattern[str], record_of: Callable[[re.Match[str]], str]
    ) -> set[str]:
        """The records that have a receipt; each fits its record. Raises: ObjectCorrupt,
        ObjectMissing."""
        found = set()
        for name, match in self.matching(form):
            path = record_of(match)
            said = {key: value for key, value in self.read(path).items() if key not in WHO_AND_WHEN}
            receipt = self.read(name)
            if receipt["commit" if kind == "commit" else "record"] != digest(
                _without_defaults(kind, said), path
            ):
                raise ObjectCorrupt(
                    "a receipt does not fit its record", where=self.files.url(name), found=path
                )
            found.add(path)
        return found


def _without_defaults(kind: str, said: Mapping[str, Any]) -> dict[str, Any]:
    """A record of format 1 as its receipt has it."""
    kept = {
        key: value
        for key, value in said.items()
        if key not in AT_DEFAULT[kind] or value != AT_DEFAULT[kind][key]
    }
    if kind == "node" and "files" in kept:
        kept["files"] = [_without_defaults("file", record) for record in kept["files"]]
    if kind == "commit":
        kept["data"] = _without_defaults("data", kept["data"])
    if kind == "data" and "buffer" in kept:
        kept["buffer"] = [_without_defaults("group", group) for group in kept["buffer"]]
    return kept


def _branch(match: re.Match[str]) -> str:
    """The branch in whose folder a record is."""
    return match[0].split("/")[1]


class Migration:
    """Writes the new store from the old one."""

    def __init__(self, source: Source, new: Files) -> None:
        self._source = source
        self._new = new
        self._old_nodes: dict[str, dict[str, Any]] = {}
        self._made: dict[str, Node] = {}
        """Old digest → new node."""
        self._sha256: dict[str, str] = {}
        """Old path of a data file → the sha256 that a node recorded."""
        self._written: Counter[str] = Counter()

    def run(self, say: Say) -> Counter[str]:
        """Check the old records, then write all of the new store; how many objects of each kind
        were written."""
        say(f"{self._source.files.root}: reading {len(self._source.names)} objects")
        self._read_nodes()
        self._check_old_receipts()
        for old in self._old_nodes:
            self._make(old)
        say(f"{self._new.root}: copying data files")
        self._copy_files()
        self._write_nodes()
        self._write_branches()
        self._write_beside()
        return self._written

    def _read_nodes(self) -> None:
        for path, match in self._source.matching(NODE_NAME):
            content = self._source.read(path)
            self._source.valid(Node, content, path)
            parts = {key: content.get(key, {}) for key in ("parents", "config", "hooks")}
            found = digest({"stage": content["stage"], **parts}, path)
            if (content["stage"], content["digest"]) != (match[1], match[2]) or found != match[2]:
                raise ObjectCorrupt(
                    "this is another node",
                    where=self._source.files.url(path),
                    found=found,
                    expected=match[2],
                )
            self._old_nodes[match[2]] = content
            for record in content.get("files", ()):
                self._sha256[record["path"]] = record["sha256"]

    def _check_old_receipts(self) -> None:
        """Only the newest commit of a branch may be without a receipt, or all, if they are older
        than receipts."""
        source = self._source
        source.check_receipts(
            "node", receipts.NODE_RECEIPT_NAME, lambda match: f"nodes/{match[1]}/{match[2]}.json"
        )
        received = source.check_receipts(
            "commit",
            receipts.RECEIPT_NAME,
            lambda match: f"branches/{_branch(match)}/{match[1]}.json",
        )
        committed: dict[str, list[str]] = {}
        for path, match in source.matching(COMMIT_NAME):
            committed.setdefault(match[1], []).append(path)
        for paths in committed.values():
            missing = sorted(set(paths[:-1]) - received)
            if missing and set(paths) & received:
                raise ObjectCorrupt(
                    "the receipt of a commit is gone", where=source.files.url(missing[0])
                )

    def _make(self, old: str) -> Node:
        """The new node of an old digest; the nodes that it refers to first."""
        waiting = [old]
        while waiting:
            current = waiting[-1]
            content = self._old_nodes[current]
            of_rollout = [content["config"].get(key) for key in ("of", "judged_by")]
            referred = [
                one for one in (*content["parents"].values(), *of_rollout) if one in self._old_nodes
            ]
            if unmade := [one for one in referred if one not in self._made]:
                waiting += unmade
                continue
            waiting.pop()
            self._made[current] = self._made.get(current) or self._new_node(content)
        return self._made[old]

    def _new_node(self, content: dict[str, Any]) -> Node:
        stage = Stage(content["stage"])
        for role, parent in content["parents"].items():
            if parent not in self._old_nodes and plans.plan_path(parent) not in self._source.known:
                where = f"nodes/{stage}/{content['digest']}.json"
                raise ObjectCorrupt(
                    "a node was made from a node that is not there",
                    where=where,
                    found=f"{role} {parent}",
                )
        moved: dict[str, Any] = self._renamed(
            {**content, "config": settings(stage, content["config"])}
        )
        inputs = {"parents": moved["parents"], "config": moved["config"], "hooks": moved["hooks"]}
        node = Node.model_validate({**moved, "contract": 1, "digest": ""})
        named = input_digest(stage, **inputs, contract=1)
        own = [
            record.model_copy(update={"path": self._moved(record.path, content["digest"], named)})
            for record in node.files
        ]
        return node.model_copy(update={"digest": named, "files": tuple(own)})

    def _renamed(self, value: Any) -> Any:
        """Every digest of an old node is that of its new one, wherever it stands."""
        if isinstance(value, str):
            return self._made[value].digest if value in self._made else value
        if isinstance(value, dict):
            return {key: self._renamed(item) for key, item in value.items()}
        return [self._renamed(item) for item in value] if isinstance(value, list) else value

    def _moved(self, path: str, old: str = "", named: str = "") -> str:
        """Where a data file goes: the folder of a node has the node's new name."""
        match = DATA_FOLDER.match(path)
        if match is None:
            return path
        if match[2] == old:
            return path.replace(old, named)
        return (
            path.replace(match[2], self._made[match[2]].digest) if match[2] in self._made else path
        )

    def _copy_files(self) -> None:
        """Data files, checkpoints, plans with their shards, and draws."""
        root = (
            Path(self._new.root.removeprefix("file://"))
            if self._new.root.startswith("file://")
            else None
        )
        with tempfile.TemporaryDirectory(
            prefix=".migrate-", dir=root.parent if root else None
        ) as folder:
            for path in (
                name for name in self._source.names if any(form.match(name) for form in FILES)
            ):
                self._copy(path, Path(folder) / "file")

    def _copy(self, path: str, local: Path) -> None:
        record = self._source.files.get_file(path, local, self._sha256.get(path))
        copied = self._new.put_file(local, self._moved(path))
        local.unlink()
        if copied.sha256 != record.sha256:
            raise ObjectCorrupt(
                "a copy differs",
                where=self._new.url(copied.path),
                found=copied.sha256,
                expected=record.sha256,
            )
        self._written["files"] += 1

    def _write_nodes(self) -> None:
        """The nodes, with the receipts of checkpoints and evaluations."""
        nodes = Nodes(self._new)
        ours = {"attempt", "created"}
        for old, node in self._made.items():
            if nodes.commit(node).model_dump(exclude=ours) != node.model_dump(exclude=ours):
                where = f"nodes/{node.stage}/{old}.json"
                raise ObjectCorrupt(
                    "two nodes of the old store have one name now", where=where, found=node.digest
                )
            self._written["nodes"] += 1

    def _write_branches(self) -> None:
        """Configurations and commits; what a fork goes on from comes before it."""
        branches = Branches(self._new)
        seen = set[str]()
        records = {
            _branch(match): self._source.read(path)
            for path, match in self._source.matching(CONFIG_NAME)
        }

        def write(branch: str) -> None:
            if branch in seen:
                return
            seen.add(branch)
            said = records[branch]
            if said.get("parent") and (origin := parse_commit_name(said["parent"])[0]) in records:
                write(origin)
            path = config_path(branch)
            self._write_record(
                path, Branch, {**said, "contracts": dict.fromkeys(CONTRACTS, 1)}, path
            )
            for path, match in self._source.matching(COMMIT_NAME):
                if match[1] == branch:
                    commit = self._source.valid(
                        Commit, self._renamed(self._source.read(path)), path
                    )
                    branches.commit(commit)
                    self._written["commits"] += 1

        for branch in records:
            write(branch)

    def _write_beside(self) -> None:
        """Epochs, pointers to segments, notes, opened gates."""
        kinds = (
            (epochs.EPOCH_NAME, Lease),
            (segments.SEGMENT_NAME, segments.Segment),
            (notes.NOTE_NAME, notes.Note),
        )
        for form, kind in kinds:
            for path, _ in self._source.matching(form):
                said = self._source.read(path)
                self._write_record(self._named(path, said.get("weights")), kind, said, path)
        for path, match in self._source.matching(notes.GATE_NAME):
            weights = next((old for old in self._old_nodes if old.startswith(match[3])), None)
            if b'"sha256"' in (data := self._source.files.read(path)):
                self._write_record(
                    self._named(path, weights), notes.OpenedGate, self._source.read(path), path
                )
            else:  # as they were at first
                self._new.create(self._named(path, weights), data)
                self._written["records"] += 1

    def _named(self, path: str, weights: str | None) -> str:
        """The path of a record that has the first digits of its weights' digest in its name."""
        folder, _, name = path.rpartition("/")
        stem, dash, digits = name.removesuffix(".json").rpartition("-")
        if weights not in self._made or not weights.startswith(digits):
            return path
        return f"{folder}/{stem}{dash}{self._made[weights].digest[: len(digits)]}.json"

    def _write_record(
        self, path: str, kind: type[VersionedRecord], said: dict[str, Any], old: str
    ) -> None:
        record = self._source.valid(kind, self._renamed(said), old)
        self._new.create(path, seal(record, path))
        self._written["records"] += 1


if __name__ == "__main__":
    sys.exit(piped(main))
