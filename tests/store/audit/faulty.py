"""A store with all kinds of objects that rlpipe writes, and faults for it (test_planted.py).

Each fault changes files of a local store. Faults that also recompute a record's checksum are in
`forging`. One file because all faults share one store.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from rlpipe.lineage.stage_inputs import checkpoint_inputs
from rlpipe.store.branches import Branches
from rlpipe.store.epochs import Epochs
from rlpipe.store.nodes import Nodes
from rlpipe.store.notes import OpenedGate, write_note
from rlpipe.store.objects.files import Files
from rlpipe.store.parquet.shards import ShardWriter, write_data
from rlpipe.store.plans import Plans
from rlpipe.store.records import canonical, digest, seal
from rlpipe.store.segments import Segments
from rlpipe.store.tables import scalars
from rlpipe.types import Commit, Node, Plan, Stage
from tests.store.lineage import Run, group, make_node

TEMPORARY = "x.parquet.tmp-" + "0" * 32


class WholeRun(Run):
    """A run of a driver with an epoch, tables, checkpoints and evaluations. A function draws its
    plans."""

    epoch = 0

    def commit_of(self, *arguments) -> Commit:
        return super().commit_of(*arguments).model_copy(update={"epoch": self.epoch})

    def plan(self, *arguments) -> Plan:
        plan = super().plan(*arguments)
        Plans(self.files).draw(plan)
        return plan

    def drive(self, iterations: int) -> WholeRun:
        held = Epochs(self.files).acquire(self.branch)
        self.epoch = held.number
        for _ in range(iterations):
            held.renew()
            commit = self.iterate()
            assert commit is not None
            scalars.update(self.files, self.branch)
            if commit.iteration % 2:
                self.keep(commit.nodes[Stage.TRAIN], commit.iteration + 1)
        held.release()
        return self

    def keep(self, weights: str, version: int) -> None:
        """Write a checkpoint and an evaluation of these weights."""
        prefix = f"checkpoints/{self.branch}/iter_{version:07d}/0123456789ab"
        records = []
        for name in ("__0_0.distcp", "critic/__0_0.distcp", ".metadata"):
            path = f"{prefix}/{name}"
            content = f"{name} of {weights}".encode() * 9
            self.files.create(path, content)
            records.append(
                {"path": path, "size_bytes": len(content), "sha256": self.files.sha256(path)}
            )
        node = checkpoint_inputs(weights).node(outputs={"version": version})
        Nodes(self.files).commit(Node.model_validate({**node.model_dump(), "files": records}))
        measured = make_node(Stage.EVAL, {"weights": weights}, dataset="heldout")
        record = write_data(self.files, f"data/eval/{measured.digest}", "samples.json", b"[]")
        Nodes(self.files).commit(measured.model_copy(update={"files": (record,)}))


def build(files: Files) -> None:
    """Write a run of two drivers with a segment, a gate and an open iteration, a fork, a run that
    only sampled, and an epoch of the collector."""
    run = WholeRun(files).start().drive(3).drive(2)
    branches = Branches(files)
    nodes = Nodes(files)
    commits = [branches.read("run", k) for k in range(5)]
    write_note(files, "run", 4, commits[4].nodes)
    gate = OpenedGate(iteration=2, broken=("reward 0 below 1",), asked=1.0, resumed=2.0)
    path = f"gates/run/00000002-{commits[2].nodes[Stage.TRAIN][:16]}.json"
    files.create(path, seal(gate, path))
    files.create("weights/.fp8/run/weight_v000005-ab/version.json", b"weights that engines read")
    replaced = commits[1].nodes[Stage.TRAIN]
    base = checkpoint_inputs(replaced).digest
    segment = nodes.commit(make_node(Stage.SEGMENT, {"weights": replaced, "base": base}))
    files.create("checkpoints/run/iter_0000002/ba9876543210/.metadata", b"metadata of a segment")
    size = files.size(path := "checkpoints/run/iter_0000002/ba9876543210/.metadata")
    sha256 = files.sha256(path)
    of_segment = checkpoint_inputs(segment.digest).node(outputs={"version": 2})
    record = {"path": path, "size_bytes": size, "sha256": sha256}
    nodes.commit(Node.model_validate({**of_segment.model_dump(), "files": [record]}))
    Segments(files).record("run", 2, 1, weights=replaced, segment=segment.digest)
    WholeRun(files, "fork").start(parent="run/00000001").drive(2)
    WholeRun(files, "sampled").start().iterate(stop_after=Stage.REWARD)
    rollout = next(
        node for node in nodes_of(files, Stage.ROLLOUT) if plan_of(files, node).branch == "sampled"
    )
    reward = next(
        node for node in nodes_of(files, Stage.REWARD) if node.parents["rollout"] == rollout.digest
    )
    write_note(files, "sampled", 0, {Stage.ROLLOUT: rollout.digest, Stage.REWARD: reward.digest})
    plan = run.plan(5, commits[4].data)
    ShardWriter(files, Plans.groups_prefix(Plans(files).write(plan)), 5).write(
        [group(plan.groups[-1].group_id)]
    )
    with Epochs(files).exclusive():
        pass


def nodes_of(files: Files, stage: Stage) -> list[Node]:
    """Return all nodes of a stage."""
    names = files.list(f"nodes/{stage}")
    return [
        Nodes(files).get(stage, name.rpartition("/")[2].removesuffix(".json")) for name in names
    ]


def plan_of(files: Files, rollout: Node) -> Plan:
    """Return the plan of a rollout."""
    return Plans(files).read(rollout.parents["plan"])


class Fault(NamedTuple):
    """A fault: changes the store at a directory, and returns a part of the name that an audit must
    report."""

    name: str
    plant: Callable[[Path], str]
    noted: bool = False
    """True if a killed attempt can leave the same state. The audit then reports a note."""


def pick(root: Path, pattern: str, number: int = 0) -> Path:
    """Return one of the objects that match a pattern."""
    return sorted(path for path in root.glob(pattern) if path.is_file())[number]


def named(root: Path, path: Path) -> str:
    return path.relative_to(root).as_posix()


def rewrite(path: Path, data: bytes) -> None:
    """Replace a file by another one with other bytes. Objects may be read-only."""
    path.unlink()
    path.write_bytes(data)


def flip(pattern: str, place: float, number: int = 0) -> Callable[[Path], str]:
    def plant(root: Path) -> str:
        path = pick(root, pattern, number)
        data = bytearray(path.read_bytes())
        data[min(int(len(data) * place), len(data) - 1)] ^= 1
        rewrite(path, bytes(data))
        return path.stem

    return plant


def delete(pattern: str, number: int = 0) -> Callable[[Path], str]:
    def plant(root: Path) -> str:
        path = pick(root, pattern, number)
        path.unlink()
        return path.stem

    return plant


def delete_folder(pattern: str) -> Callable[[Path], str]:
    def plant(root: Path) -> str:
        path = sorted(root.glob(pattern))[0]
        shutil.rmtree(path)
        return named(root, path)

    return plant


def truncate(pattern: str, number: int = 0) -> Callable[[Path], str]:
    def plant(root: Path) -> str:
        path = pick(root, pattern, number)
        rewrite(path, path.read_bytes()[: path.stat().st_size // 2])
        return path.stem

    return plant


def empty(pattern: str, number: int = 0) -> Callable[[Path], str]:
    def plant(root: Path) -> str:
        path = pick(root, pattern, number)
        rewrite(path, b"")
        return path.stem

    return plant


def append(pattern: str, data: bytes, number: int = 0) -> Callable[[Path], str]:
    def plant(root: Path) -> str:
        path = pick(root, pattern, number)
        rewrite(path, path.read_bytes() + data)
        return path.stem

    return plant


def swap(pattern: str) -> Callable[[Path], str]:
    def plant(root: Path) -> str:
        first = pick(root, pattern)
        second = pick(root, pattern, 1)
        data = first.read_bytes(), second.read_bytes()
        rewrite(first, data[1])
        rewrite(second, data[0])
        return first.stem

    return plant


def copy(pattern: str, to: str, number: int = 0) -> Callable[[Path], str]:
    def plant(root: Path) -> str:
        path = pick(root, pattern, number)
        target = root / to.format(name=path.name, stem=path.stem, folder=named(root, path.parent))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        return named(root, target)

    return plant


def add(name: str, data: bytes = b"garbage") -> Callable[[Path], str]:
    def plant(root: Path) -> str:
        target = root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        return name

    return plant


def respelled(pattern: str, number: int = 0) -> Callable[[Path], str]:
    """Write the same content in a form that is not canonical. Its checksum still matches."""

    def plant(root: Path) -> str:
        path = pick(root, pattern, number)
        rewrite(path, json.dumps(json.loads(path.read_bytes()), indent=1).encode())
        return path.stem

    return plant


def in_place(
    pattern: str, make: Callable[[Path], object], number: int = 0
) -> Callable[[Path], str]:
    """Put something else under the name of an object."""

    def plant(root: Path) -> str:
        path = pick(root, pattern, number)
        path.unlink()
        make(path)
        return path.stem

    return plant


def at(name: str, make: Callable[[Path], object]) -> Callable[[Path], str]:
    """Put something else under a new name."""

    def plant(root: Path) -> str:
        target = root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        make(target)
        return name if name.isprintable() else ascii(name)[1:-1]

    return plant


def bind(path: Path) -> None:
    """Make a socket. The path may be too long for an address, so the call runs in its folder."""
    before = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(before)


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


def sealed_lease(pattern: str, number: int = 0, **changes: object) -> Callable[[Path], str]:
    """Write a lease with a matching checksum and impossible values."""

    def plant(root: Path) -> str:
        path = pick(root, pattern, number)
        content = json.loads(path.read_bytes())
        del content["sha256"]
        content |= changes
        rewrite(path, canonical({**content, "sha256": digest(content, "x")}, "x") + b"\n")
        return path.stem

    return plant


def no_commits(root: Path) -> str:
    """Remove all commits of the fork."""
    for path in root.glob("branches/fork/0000000?.json"):
        path.unlink()
    return "fork/00000002"


def foreign_configuration(root: Path) -> str:
    """Give the run the configuration of its fork."""
    rewrite(root / "branches/run/config.json", (root / "branches/fork/config.json").read_bytes())
    return "branches/run/config.json"


def table_gone(root: Path) -> str:
    """Remove one file of a table."""
    pick(root, "branches/run/scalars/samples/*.parquet", 1).unlink()
    return "run/scalars/samples"


def link_to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def garbage_node(stage: Stage, **parents: str) -> Callable[[Path], str]:
    def plant(root: Path) -> str:
        return Nodes(Files(root)).commit(make_node(stage, parents)).digest

    return plant


def node_beside(root: Path) -> str:
    """Add a node with parents of the run that no record names."""
    content = json.loads(pick(root, "nodes/reward/*.json").read_bytes())
    made = make_node(Stage.REWARD, content["parents"], (), another="configuration")
    return Nodes(Files(root)).commit(made).digest


def garbage_plan(**changes: object) -> Callable[[Path], str]:
    def plant(root: Path) -> str:
        files = Files(root)
        newest = Branches(files).newest("run")
        assert newest is not None
        return Plans(files).write(Run(files).plan(5, newest.data).model_copy(update=changes))

    return plant


def skipping_plan(root: Path) -> str:
    """Add a plan of the next iteration that starts where no iteration ended."""
    files = Files(root)
    newest = Branches(files).newest("run")
    assert newest is not None
    return Plans(files).write(Run(files).plan(5, newest.data.model_copy(update={"offset": 777})))


def draw_of_another(root: Path) -> str:
    """Make a draw name the plan of another state."""
    first = pick(root, "draws/*")
    second = pick(root, "draws/*", 1)
    rewrite(first, second.read_bytes())
    return first.name


def renumbered_epoch(root: Path) -> str:
    """Rename epoch 2 to epoch 3."""
    path = root / "branches/run/epochs/00000002.json"
    path.rename(path.with_name("00000003.json"))
    return "epochs/00000002.json"


def duplicated_rows(root: Path) -> str:
    """Write a table with the rows of an iteration twice, and a matching name."""
    files = Files(root)
    part = scalars.parts_of(files, "run", "samples")[0]
    rows = scalars.read_part(files, "samples", part)
    files.delete(part.path)
    return scalars._write(
        files, "run", "samples", part.first, part.end, pa.concat_tables([rows, rows])
    )


def rows_of_another_branch(root: Path) -> str:
    """Put a table of the fork among those of the run."""
    files = Files(root)
    part = scalars.parts_of(files, "fork", "samples")[0]
    theirs = files.read(part.path)
    path = part.path.replace("/fork/", "/run/")
    for own in scalars.parts_of(files, "run", "samples"):
        if own.first == part.first:
            files.delete(own.path)
    files.create(path, theirs)
    return path


def hard_link(pattern: str, to: str) -> Callable[[Path], str]:
    def plant(root: Path) -> str:
        path = pick(root, pattern)
        target = root / to.format(name=path.name, folder=named(root, path.parent))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.hardlink_to(path)
        return named(root, target)

    return plant


def upper_case(pattern: str) -> Callable[[Path], str]:
    """Rename an object to capital letters."""

    def plant(root: Path) -> str:
        path = pick(root, pattern)
        target = path.with_name(path.name.upper())
        path.rename(target)
        return named(root, target)

    return plant


LATER = (datetime.now(UTC) + timedelta(days=30)).isoformat(timespec="milliseconds")
COMMITS = "branches/run/0000000?.json"
FAULTS = [
    # flipped bits, at several positions of every kind of object
    *(
        Fault(f"flip {place} in {pattern}", flip(pattern, place))
        for pattern in (
            "branches/run/config.json",
            COMMITS,
            "branches/run/receipts/*.json",
            "branches/run/epochs/*.json",
            "branches/run/epochs/00000002/*.json",
            "branches/run/segments/*.json",
            "branches/run/scalars/samples/*.parquet",
            "branches/run/scalars/metrics/*.parquet",
            "branches/.gc/epochs/*.json",
            "rollouts/sampled/*.json",
            "gates/run/*.json",
            "draws/*",
            "plans/*/plan.json",
            "plans/*/groups/*.parquet",
            "nodes/init/*.json",
            "nodes/eval/*.json",
            "nodes/segment/*.json",
            "nodes/checkpoint/*.json",
            "data/eval/*/*.json",
            "checkpoints/run/*/*/*.distcp",
            "checkpoints/run/*/*/critic/*",
            "receipts/checkpoint/*.json",
        )
        for place in (0.0, 0.6)
    ),
    Fault("flip the last byte of a commit", flip(COMMITS, 1.0)),
    Fault("flip the last byte of a node", flip("nodes/train/*.json", 1.0)),
    # deletions
    Fault("delete a configuration", delete("branches/run/config.json")),
    Fault("delete the oldest commit", delete(COMMITS)),
    Fault("delete the newest commit", delete(COMMITS, -1)),
    Fault("delete a receipt", delete("branches/run/receipts/*.json", 1)),
    Fault("delete the newest receipt", delete("branches/run/receipts/*.json", -1)),
    Fault("delete the first epoch", delete("branches/run/epochs/00000001.json")),
    Fault("delete the newest epoch", delete("branches/run/epochs/00000002.json")),
    Fault("delete a segment's node", delete("nodes/segment/*.json")),
    Fault("delete a table's file", table_gone),
    Fault("delete a whole table", delete_folder("branches/run/scalars/metrics")),
    Fault("delete a checkpoint's node", delete("nodes/checkpoint/*.json")),
    Fault("delete an evaluation's node", delete("nodes/eval/*.json")),
    Fault("delete a checkpoint's file", delete("checkpoints/run/*/*/.metadata")),
    Fault("delete an evaluation's file", delete("data/eval/*/*.json")),
    Fault("delete a plan", delete("plans/*/plan.json", 2)),
    Fault("delete a node of first weights", delete("nodes/init/*.json")),
    Fault("delete every commit of a fork", no_commits),
    Fault("delete all nodes of a stage", delete_folder("nodes/reward")),
    # garbage
    Fault("a file in the root", add("notes.txt")),
    Fault("a hidden file in the root", add(".DS_Store")),
    Fault("a new folder", add("backup/x.json")),
    Fault("a node of nothing", garbage_node(Stage.REWARD, rollout="f" * 64)),
    Fault("a node of a stage without parents", garbage_node(Stage.TRAIN)),
    Fault("a segment of nothing", garbage_node(Stage.SEGMENT, weights="a" * 64, base="b" * 64)),
    Fault("a node that no record names", node_beside),
    Fault("a node of no stage", add(f"nodes/cooking/{'0' * 64}.json", b"{}")),
    Fault("a node without a digest", add("nodes/train/new.json", b"{}")),
    Fault("a plan of an unknown run", garbage_plan(branch="absent")),
    Fault("a plan that skips prompts", skipping_plan),
    Fault("a draw of nothing", add(f"draws/{'1' * 64}", b"2" * 64)),
    Fault("a draw under no name", add("draws/new", b"2" * 64)),
    Fault("a draw that names another plan", draw_of_another),
    Fault(
        "an epoch without the one before",
        copy("branches/run/epochs/00000002.json", "branches/run/epochs/00000009.json"),
    ),
    Fault("an epoch that was renumbered", renumbered_epoch),
    Fault(
        "a lease of another epoch",
        copy("branches/run/epochs/00000001/*.json", "branches/run/epochs/00000002/00000099.json"),
    ),
    Fault(
        "epochs of another run",
        copy("branches/run/epochs/00000001.json", "branches/other/epochs/00000001.json"),
    ),
    Fault("an object among the collector's epochs", add("branches/.gc/notes.json", b"{}")),
    Fault("a gate of an unknown run", copy("gates/run/*.json", "gates/absent/{name}")),
    Fault("a note of an unknown run", copy("rollouts/sampled/*.json", "rollouts/absent/{name}")),
    Fault(
        "a gate of another iteration",
        copy("gates/run/*.json", "gates/run/00000003-0123456789abcdef.json"),
    ),
    Fault(
        "rows without a plan", copy("plans/*/groups/*.parquet", f"plans/{'3' * 64}/groups/{{name}}")
    ),
    Fault("data under no checksum", add(f"data/reward/{'4' * 64}/rewards.parquet")),
    Fault(
        "a checkpoint of an unknown run",
        add("checkpoints/absent/iter_0000001/0123456789ab/.metadata"),
    ),
    Fault("a file loose among checkpoints", add("checkpoints/run/model.bin")),
    Fault("weights of an unknown run", add("weights/absent/weight_v000002-ab/version.json")),
    Fault("a file loose among weights", add("weights/run/model.safetensors")),
    Fault(
        "a receipt of an unknown checkpoint",
        copy("receipts/checkpoint/*.json", f"receipts/checkpoint/{'5' * 64}.json"),
    ),
    Fault(
        "a receipt of a stage without receipts",
        copy("receipts/checkpoint/*.json", "receipts/train/{name}"),
    ),
    Fault(
        "a receipt from before the fork",
        copy("branches/run/receipts/00000000.json", "branches/fork/receipts/{name}"),
    ),
    Fault("an unfinished file", add(f"data/reward/{TEMPORARY}"), noted=True),
    Fault(
        "a second attempt at an upload",
        add("checkpoints/run/iter_0000002/aaaaaaaaaaaa/.metadata"),
        noted=True,
    ),
    # copies, swaps, cuts
    Fault(
        "a run under another name", copy("branches/run/config.json", "branches/copy/config.json")
    ),
    Fault("the configuration of another run", foreign_configuration),
    Fault("a commit under a later number", copy(COMMITS, "branches/run/00000007.json")),
    Fault("a commit far ahead", copy(COMMITS, "branches/run/99999999.json")),
    Fault("two commits in each other's place", swap(COMMITS)),
    Fault("two nodes in each other's place", swap("nodes/train/*.json")),
    Fault("two shards in each other's place", swap("plans/*/groups/*.parquet")),
    Fault("two leases in each other's place", swap("branches/run/epochs/0000000?.json")),
    Fault("two plans in each other's place", swap("plans/*/plan.json")),
    Fault("two checkpoints in each other's place", swap("nodes/checkpoint/*.json")),
    Fault("half a commit", truncate(COMMITS, 1)),
    Fault("half a table", truncate("branches/run/scalars/samples/*.parquet")),
    Fault("half a lease", truncate("branches/run/epochs/*.json")),
    Fault("half a checkpoint", truncate("checkpoints/run/*/*/*.distcp")),
    Fault("an empty receipt", empty("branches/run/receipts/*.json")),
    Fault("an empty configuration", empty("branches/fork/config.json")),
    Fault("an empty node", empty("nodes/advantage/*.json")),
    Fault("an empty draw", empty("draws/*")),
    Fault("bytes after a node", append("nodes/rollout/*.json", b" ")),
    Fault("bytes after a shard", append("plans/*/groups/*.parquet", b"0")),
    Fault("a commit in another spelling", respelled(COMMITS)),
    Fault("a lease in another spelling", respelled("branches/run/epochs/*.json")),
    Fault("a node in capitals", upper_case("nodes/train/*.json")),
    Fault("a configuration in capitals", upper_case("branches/fork/config.json")),
    Fault("rows of a table twice", duplicated_rows),
    Fault("a table of another run", rows_of_another_branch),
    # leases that no driver writes
    Fault(
        "an epoch of the future",
        sealed_lease("branches/run/epochs/*.json", -1, since=LATER, renewed=LATER),
    ),
    Fault(
        "a renewal of the future",
        sealed_lease("branches/run/epochs/00000002/*.json", -1, renewed=LATER),
    ),
    Fault(
        "a renewal by another driver",
        sealed_lease("branches/run/epochs/00000002/*.json", -1, stand_in=True),
    ),
    # names that are not files
    Fault("a folder in place of a commit", in_place(COMMITS, Path.mkdir, 1)),
    Fault("a folder in place of a configuration", in_place("branches/run/config.json", Path.mkdir)),
    Fault("a folder in place of a shard", in_place("plans/*/groups/*.parquet", Path.mkdir)),
    Fault("a FIFO in place of a node", in_place("nodes/train/*.json", os.mkfifo)),
    Fault("a FIFO in place of a configuration", in_place("branches/run/config.json", os.mkfifo)),
    Fault("a FIFO among the draws", at(f"draws/{'6' * 64}", os.mkfifo)),
    Fault("a link to a device in place of a commit", in_place(COMMITS, link_to("/dev/zero"))),
    Fault(
        "a link to a device in place of a table",
        in_place("branches/run/scalars/*/*.parquet", link_to("/dev/zero")),
    ),
    Fault(
        "a link to a device in place of a checkpoint",
        in_place("checkpoints/run/*/*/*.distcp", link_to("/dev/urandom")),
    ),
    Fault(
        "a link to itself", in_place("nodes/reward/*.json", lambda path: path.symlink_to(path.name))
    ),
    Fault("a link to nothing", in_place("branches/run/receipts/*.json", link_to("nothing"))),
    Fault("a linked folder", at("data/more", link_to("/etc"))),
    Fault("a socket in place of an epoch", in_place("branches/run/epochs/*.json", bind)),
    Fault("a socket in the root", at("agent.sock", bind)),
    Fault("a huge sparse commit", in_place(COMMITS, sparse, 2)),
    Fault("a huge sparse configuration", in_place("branches/fork/config.json", sparse)),
    Fault(
        "a huge sparse shard",
        at(f"plans/{'7' * 64}/groups/0123456789ab-00000-{'8' * 16}.parquet", sparse),
    ),
    Fault("a huge sparse data file", in_place("data/reward/*/*.parquet", sparse)),
    Fault(
        "a name with a line end", at("nodes/train/a\nb.json", lambda path: path.write_bytes(b"{}"))
    ),
    Fault(
        "a name that is no UTF-8",
        at("nodes/train/\udcff.json", lambda path: path.write_bytes(b"{}")),
    ),
    Fault(
        "a run whose name has a line end",
        at("branches/ru\nn/config.json", lambda path: path.write_bytes(b"{}")),
    ),
    Fault("a name that runs backwards", at("plans/\u202egnp", lambda path: path.write_bytes(b"x"))),
    # one file under two names
    Fault(
        "a shard under two names",
        hard_link("plans/*/groups/*.parquet", "{folder}/0123456789ab-00001-01234567.parquet"),
    ),
    Fault(
        "a node under two names", hard_link("nodes/train/*.json", "{folder}/" + "9" * 64 + ".json")
    ),
    Fault(
        "a file of a checkpoint under two names",
        hard_link("checkpoints/run/*/*/*.distcp", "{folder}/copy.distcp"),
    ),
]
UNSEEN = [
    Fault(
        "the note of a run that only samples: as if it was killed before it",
        delete("rollouts/sampled/*.json"),
    ),
    Fault(
        "the renewals of a lease: as if its driver was killed at once",
        delete_folder("branches/run/epochs/00000001"),
    ),
    Fault(
        "a receipt that was never needed since", lambda root: delete("receipts/eval/*.json")(root)
    ),
]
"""What looks as a killed driver leaves it, so that no audit can see it."""
