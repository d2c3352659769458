"""Migrate a store of record format 1 to today's format.

    rlpipe migrate --store OLD --to NEW

Format 1 is the format from before stages had contracts. Its node digests cover every setting; now a
setting at the default that it was introduced with is left out. So every node gets another digest,
and every reference to a node changes too.

The old store is only read. NEW must be empty. Data files are copied and compared with the recorded
sha256. Damaged records or files, unknown objects, and findings in the audit of the new store end
the migration; NEW is then emptied. Exported weights (`weights/`) are not copied: the next push
makes them again.

Exit codes: 0 done, 1 the old store is damaged, 2 wrong usage.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlpipe.errors import ConfigError, ObjectCorrupt, ObjectMissing, RlpipeError
from rlpipe.store import epochs, notes, plans, receipts, segments
from rlpipe.store.audit.reachability import (
    DATA_FOLDER,
    NODE_NAME,
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
from rlpipe.store.epochs import Lease
from rlpipe.store.nodes import Nodes, input_digest
from rlpipe.store.objects.files import Files
from rlpipe.store.records import digest, seal
from rlpipe.types import CONTRACTS, Commit, Node, Stage, VersionedRecord
from tools.command import parsers
from tools.format_one import FILES, Source, branch_of, settings
from tools.piped import piped

Say = Callable[[str], object]


def main() -> int:
    """Run the command."""
    arguments = parsers.migrate().parse_args()
    try:
        findings = migrate(Files(arguments.store), Files(arguments.to), say=print)
    except (ObjectCorrupt, ObjectMissing) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except RlpipeError as error:
        print(f"{error.kind}: {error}", file=sys.stderr)
        return 2
    for finding in findings:
        print(finding, file=sys.stderr)
    return 1 if findings else 0


def migrate(old: Files, new: Files, say: Say) -> list[str]:
    """Write the new store; return the findings of its audit.

    After findings, the new store is empty.

    Raises: ConfigError if the new root is not empty, the old store is empty or of another format,
    or a run of it is driven; ObjectCorrupt, ObjectMissing, StoreError if the old store is damaged.
    """
    if new.root == old.root or new.list():
        raise ConfigError(
            "the root of the new store is not empty",
            where="--to",
            found=new.root,
            do="name another directory",
        )
    names = old.list()
    if not any(CONFIG_NAME.fullmatch(name) for name in names):
        raise ConfigError("the store has no run", where="--store", found=old.root)
    source = Source(old, names)
    source.refuse_driven()
    try:
        written = Migration(source, new).run(say)
        # A run that was started meanwhile would be migrated in part.
        if old.list() != names:
            raise ConfigError(
                "the store was changed during the migration",
                where=old.root,
                do="stop its runs, then repeat the command",
            )
        say(f"{new.root}: auditing")
        report = check_store(new)
        findings = [
            f"{finding.rule}: {finding.where}: {finding.problem}" for finding in report.findings
        ]
    except BaseException:
        remove(new)
        raise
    if findings:
        remove(new)
        return [
            *findings,
            f"{old.root} is not whole, {new.root} was emptied: "
            "audit the old store with the version of rlpipe that wrote it",
        ]
    say(f"{new.root}: " + ", ".join(f"{number} {kind}" for kind, number in sorted(written.items())))
    say(f"{new.root}: audited, nothing is wrong; {len(report.notes)} notes (rlpipe audit verify)")
    return []


def remove(files: Files) -> None:
    """Remove every object of the new store."""
    for path in files.list():
        files.delete(path)


class Migration:
    """Writes the new store from the old one."""

    def __init__(self, source: Source, new: Files) -> None:
        self._source = source
        self._new = new
        self._old_nodes: dict[str, dict[str, Any]] = {}
        self._new_nodes: dict[str, Node] = {}
        """Old digest → new node."""
        self._sha256: dict[str, str] = {}
        """Old path of a data file → sha256 that a node recorded."""
        self._written: Counter[str] = Counter()

    def run(self, say: Say) -> Counter[str]:
        """Check the old records, then write the new store; return the number of objects by kind."""
        say(f"{self._source.files.root}: reading {len(self._source.names)} objects")
        self._read_nodes()
        self._check_old_receipts()
        for old in self._old_nodes:
            self._convert(old)
        say(f"{self._new.root}: copying data files")
        self._copy_files()
        self._write_nodes()
        self._write_branches()
        self._write_other_records()
        return self._written

    def _read_nodes(self) -> None:
        for path, match in self._source.matching(NODE_NAME):
            content = self._source.read(path)
            self._source.valid(Node, content, path)
            parts = {key: content.get(key, {}) for key in ("parents", "config", "hooks")}
            found = digest({"stage": content["stage"], **parts}, path)
            if (content["stage"], content["digest"]) != (match[1], match[2]) or found != match[2]:
                raise ObjectCorrupt(
                    "the digest of a node does not match its content",
                    where=self._source.files.url(path),
                    found=found,
                    expected=match[2],
                )
            self._old_nodes[match[2]] = content
            for record in content.get("files", ()):
                self._sha256[record["path"]] = record["sha256"]

    def _check_old_receipts(self) -> None:
        """Check that only the newest commit of a branch lacks a receipt.

        In stores older than receipts, all commits lack them.
        """
        source = self._source
        source.check_receipts(
            "node", receipts.NODE_RECEIPT_NAME, lambda match: f"nodes/{match[1]}/{match[2]}.json"
        )
        received = source.check_receipts(
            "commit",
            receipts.RECEIPT_NAME,
            lambda match: f"branches/{branch_of(match)}/{match[1]}.json",
        )
        committed: dict[str, list[str]] = {}
        for path, match in source.matching(COMMIT_NAME):
            committed.setdefault(match[1], []).append(path)
        for paths in committed.values():
            missing = sorted(set(paths[:-1]) - received)
            if missing and set(paths) & received:
                raise ObjectCorrupt(
                    "the receipt of a commit is missing", where=source.files.url(missing[0])
                )

    def _convert(self, old: str) -> Node:
        """Return the new node of an old digest. Referenced nodes are converted first."""
        waiting = [old]
        while waiting:
            current = waiting[-1]
            content = self._old_nodes[current]
            of_rollout = [content["config"].get(key) for key in ("of", "judged_by")]
            referred = [
                one for one in (*content["parents"].values(), *of_rollout) if one in self._old_nodes
            ]
            # Depth first: a node's digest contains the new digests of its parents.
            if unmade := [one for one in referred if one not in self._new_nodes]:
                waiting += unmade
                continue
            waiting.pop()
            self._new_nodes[current] = self._new_nodes.get(current) or self._new_node(content)
        return self._new_nodes[old]

    def _new_node(self, content: dict[str, Any]) -> Node:
        stage = Stage(content["stage"])
        for role, parent in content["parents"].items():
            if parent not in self._old_nodes and plans.plan_path(parent) not in self._source.known:
                where = f"nodes/{stage}/{content['digest']}.json"
                raise ObjectCorrupt(
                    "the parent of a node is missing",
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
        """Replace every digest of an old node by the new digest, at any depth."""
        if isinstance(value, str):
            return self._new_nodes[value].digest if value in self._new_nodes else value
        if isinstance(value, dict):
            return {key: self._renamed(item) for key, item in value.items()}
        return [self._renamed(item) for item in value] if isinstance(value, list) else value

    def _moved(self, path: str, old: str = "", named: str = "") -> str:
        """Return the new path of a data file: a node's folder has the new digest."""
        match = DATA_FOLDER.match(path)
        if match is None:
            return path
        if match[2] == old:
            return path.replace(old, named)
        return (
            path.replace(match[2], self._new_nodes[match[2]].digest)
            if match[2] in self._new_nodes
            else path
        )

    def _copy_files(self) -> None:
        """Copy data files, checkpoints, plans with their shards, and draws."""
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
                "a copied file differs from its source",
                where=self._new.url(copied.path),
                found=copied.sha256,
                expected=record.sha256,
            )
        self._written["files"] += 1

    def _write_nodes(self) -> None:
        """Write nodes, and the receipts of checkpoints and evaluations."""
        nodes = Nodes(self._new)
        ours = {"attempt", "created"}
        for old, node in self._new_nodes.items():
            if nodes.commit(node).model_dump(exclude=ours) != node.model_dump(exclude=ours):
                where = f"nodes/{node.stage}/{old}.json"
                raise ObjectCorrupt(
                    "two old nodes have the same new digest", where=where, found=node.digest
                )
            self._written["nodes"] += 1

    def _write_branches(self) -> None:
        """Write configurations and commits; the parent of a fork first."""
        branches = Branches(self._new)
        seen = set[str]()
        records = {
            branch_of(match): self._source.read(path)
            for path, match in self._source.matching(CONFIG_NAME)
        }

        def write(branch: str) -> None:
            if branch in seen:
                return
            seen.add(branch)
            content = records[branch]
            parent = content.get("parent")
            if parent and (origin := parse_commit_name(parent)[0]) in records:
                write(origin)
            path = config_path(branch)
            self._write_record(
                path, Branch, {**content, "contracts": dict.fromkeys(CONTRACTS, 1)}, path
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

    def _write_other_records(self) -> None:
        """Write epochs, segments, notes and opened gates."""
        kinds = (
            (epochs.EPOCH_NAME, Lease),
            (segments.SEGMENT_NAME, segments.Segment),
            (notes.NOTE_NAME, notes.Note),
        )
        for form, kind in kinds:
            for path, _ in self._source.matching(form):
                content = self._source.read(path)
                new_path = self._named(path, content.get("weights"))
                self._write_record(new_path, kind, content, path)
        for path, match in self._source.matching(notes.GATE_NAME):
            weights = next((old for old in self._old_nodes if old.startswith(match[3])), None)
            if b'"sha256"' in (data := self._source.files.read(path)):
                self._write_record(
                    self._named(path, weights), notes.OpenedGate, self._source.read(path), path
                )
            else:  # The first gates were not sealed.
                self._new.create(self._named(path, weights), data)
                self._written["records"] += 1

    def _named(self, path: str, weights: str | None) -> str:
        """Return the path of a record whose name contains the first digits of a weights digest."""
        folder, _, name = path.rpartition("/")
        stem, dash, digits = name.removesuffix(".json").rpartition("-")
        if weights not in self._new_nodes or not weights.startswith(digits):
            return path
        return f"{folder}/{stem}{dash}{self._new_nodes[weights].digest[: len(digits)]}.json"

    def _write_record(
        self, path: str, kind: type[VersionedRecord], content: dict[str, Any], old: str
    ) -> None:
        record = self._source.valid(kind, self._renamed(content), old)
        self._new.create(path, seal(record, path))
        self._written["records"] += 1


if __name__ == "__main__":
    sys.exit(piped(main))
