"""Forgeries: a store is rewritten so that its seals, checksums, names and receipts match again
(test_chain_check.py).

    forger.save(rechain=False)    rewrites records, files, seals and receipts, but not the digests
                                  of the chain
    forger.save(rechain=True)     rewrites every later commit too, so that the store alone shows
                                  no change

Branches with segments, gates, draws or tables are not supported.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from rlpipe.store.nodes import input_digest
from rlpipe.store.parquet.schema import decode, encode
from rlpipe.store.receipts import NodeReceipt, Receipt, node_receipt_path, receipt_path
from rlpipe.store.records import canonical, digest, seal
from rlpipe.types import Commit, Node, Stage

Content = dict[str, Any]
LAST = 3
"""The iteration of the newest commit of the stores that are forged."""


class Forger:
    """All records of a store without their seals, and its data files."""

    def __init__(self, root: Path) -> None:
        self._root = root
        found = {
            path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_file()
        }
        sealed = {
            name
            for name in found
            if name.endswith(".json") and not name.startswith(("data/", "checkpoints/"))
        }
        self._data = {name: found[name].read_bytes() for name in found if name not in sealed}
        self.records: dict[str, Content] = {
            name: json.loads(found[name].read_bytes()) for name in sealed
        }
        for content in self.records.values():
            del content["sha256"]

    def commit(self, iteration: int) -> Content:
        return self.records[f"branches/run/{iteration:08d}.json"]

    def node(self, iteration: int, stage: Stage) -> Content:
        return self.records[f"nodes/{stage}/{self.commit(iteration)['nodes'][stage]}.json"]

    def plan(self, iteration: int) -> Content:
        return self.records[f"plans/{self.commit(iteration)['plans'][0]}/plan.json"]

    def leaf(self, stage: Stage) -> Content:
        """Change the oldest checkpoint or evaluation, which later commits name."""
        oldest = self.node(0, Stage.TRAIN)["digest"]
        return next(
            content
            for path, content in sorted(self.records.items())
            if path.startswith(f"nodes/{stage}/") and content["parents"]["weights"] == oldest
        )

    def edit_table(
        self,
        iteration: int,
        stage: Stage,
        change: Callable[[list[Content]], object],
        number: int = -1,
    ) -> None:
        """Change the rows of one table of a stage."""
        record = self.node(iteration, stage)["files"][number]
        table = decode(self._data[record["path"]], "x")
        rows = table.to_pylist()
        change(rows)
        self.replace(record["path"], encode(pa.Table.from_pylist(rows, table.schema)), len(rows))

    def replace(self, path: str, data: bytes, rows: int | None = None) -> None:
        """Write other bytes under their right name, and change every record that names them."""
        before = hashlib.sha256(self._data.pop(path)).hexdigest()
        after = hashlib.sha256(data).hexdigest()
        renamed = path.replace(before[:16], after[:16])
        self._data[renamed] = data
        for content in self.records.values():
            for record in content.get("files", ()):
                if record["path"] == path:
                    record |= {
                        "path": renamed,
                        "sha256": after,
                        "size_bytes": len(data),
                        "rows": rows,
                    }

    def save(self, *, rechain: bool) -> None:
        """Write the store. Objects that are named by content get their new names everywhere."""
        while (renamed := self._misnamed()) is not None:
            self._rename(*renamed)
        if rechain:
            self._rechain()
        self._renew_receipts()
        for path in self._root.rglob("*"):
            if path.is_file():
                path.unlink()
        sealed = {name: _sealed(content) for name, content in self.records.items()}
        for name, data in {**self._data, **sealed}.items():
            (self._root / name).parent.mkdir(parents=True, exist_ok=True)
            (self._root / name).write_bytes(data)

    def _misnamed(self) -> tuple[str, str] | None:
        """Return (old, new) digest of a plan or node whose name does not match its content."""
        for path, content in self.records.items():
            if path.startswith("plans/"):
                old = path.split("/")[1]
                new = hashlib.sha256(_sealed(content)).hexdigest()
            elif path.startswith("nodes/"):
                old = content["digest"]
                new = input_digest(
                    content["stage"], content["parents"], content["config"], content["hooks"]
                )
            else:
                continue
            if old != new:
                return old, new
        return None

    def _rename(self, old: str, new: str) -> None:
        self.records = json.loads(json.dumps(self.records).replace(old, new))
        self._data = {name.replace(old, new): data for name, data in self._data.items()}

    def _rechain(self) -> None:
        for k in range(LAST + 1):
            commit = self.commit(k)
            parent = (
                f"branches/{commit['parent']}.json"
                if commit["parent"]
                else "branches/run/config.json"
            )
            commit["parent_sha256"] = self._sha256(parent)
            for key in ("records", "leaves"):
                commit[key] = {path: self._sha256(path) for path in commit[key]}

    def _sha256(self, path: str) -> str:
        return hashlib.sha256(_sealed(self.records[path])).hexdigest()

    def _renew_receipts(self) -> None:
        for k in range(LAST + 1):
            path = receipt_path("run", k)
            self.records[path] = _unsealed(
                seal(Receipt.of(Commit.model_validate(self.commit(k))), path)
            )
        for content in [
            content for path, content in self.records.items() if path.startswith("nodes/")
        ]:
            path = node_receipt_path(content["stage"], content["digest"])
            if path in self.records:
                self.records[path] = _unsealed(
                    seal(NodeReceipt.of(Node.model_validate(content)), path)
                )


def _sealed(content: Content) -> bytes:
    return canonical({**content, "sha256": digest(content, "x")}, "x") + b"\n"


def _unsealed(data: bytes) -> Content:
    content = json.loads(data)
    del content["sha256"]
    return content


class Forgery(NamedTuple):
    """A change that a forger may want. `edit` returns a part of the name of the changed object."""

    name: str
    edit: Callable[[Forger], str]


def in_table(
    iteration: int, stage: Stage, change: Callable[[list[Content]], object]
) -> Callable[[Forger], str]:
    """Return a forgery that changes rows of a table. The audit must name its node."""

    def edit(forger: Forger) -> str:
        forger.edit_table(iteration, stage, change)
        return forger.node(iteration, stage)["digest"]

    return edit


def in_outputs(
    iteration: int, stage: Stage, change: Callable[[Content], object]
) -> Callable[[Forger], str]:
    """Return a forgery that changes the outputs of a node. The audit must name it."""

    def edit(forger: Forger) -> str:
        change(forger.node(iteration, stage)["outputs"])
        return forger.node(iteration, stage)["digest"]

    return edit


def in_column(name: str, value: object) -> Callable[[list[Content]], object]:
    return lambda rows: rows[0].update({name: value})


def in_plan(change: Callable[[Content], object]) -> Callable[[Forger], str]:
    """Return a forgery that changes a plan. All descendants get other names, so the audit must name
    the commit."""

    def edit(forger: Forger) -> str:
        change(forger.plan(1))
        return "run/00000001"

    return edit


def in_commit(change: Callable[[Content], object]) -> Callable[[Forger], str]:
    def edit(forger: Forger) -> str:
        change(forger.commit(1))
        return "run/00000001"

    return edit


def learning_rate(forger: Forger) -> str:
    forger.records["branches/run/config.json"]["config"]["lr"] = 1e-3
    return "branches/run/config.json"


def first_weights(forger: Forger) -> str:
    path = next(path for path in forger.records if path.startswith("nodes/init/"))
    forger.records[path]["outputs"]["state_digest"] = "f" * 64
    return path


def checkpoint_files(forger: Forger) -> str:
    node = forger.leaf(Stage.CHECKPOINT)
    forger.replace(node["files"][0]["path"], b"other weights")
    return node["digest"]


def waiting_sample(forger: Forger) -> str:
    """Change a buffered sample, whose shard belongs to the rollout before."""
    forger.edit_table(1, Stage.ROLLOUT, in_column("response", "xyz"), number=0)
    return forger.node(1, Stage.ROLLOUT)["digest"]


def packing(forger: Forger) -> str:
    """Change the samples of an optimizer step."""
    forger.replace(forger.node(1, Stage.TRAIN)["files"][0]["path"], b"[1]")
    return forger.node(1, Stage.TRAIN)["digest"]


def evaluation(forger: Forger) -> str:
    node = forger.leaf(Stage.EVAL)
    node["outputs"] = {"metrics": {"eval/heldout/accuracy": 1.0}}
    return node["digest"]


def both_tokens(forger: Forger) -> str:
    """Change the tokens of a response in the rollout and in the batch."""
    batch = forger.node(1, Stage.ADVANTAGE)["files"][-1]
    wanted = decode(forger._data[batch["path"]], "x").to_pylist()[-1]
    key = (wanted["group_id"], wanted["index"])

    def in_rollout(rows: list[Content]) -> None:
        next(row for row in rows if (row["group_id"], row["index"]) == key)["response_ids"] = [
            3,
            4,
            9,
        ]

    forger.edit_table(1, Stage.ROLLOUT, in_rollout)
    forger.edit_table(1, Stage.ADVANTAGE, lambda rows: rows[-1].update(tokens=[1, 2, 3, 4, 9]))
    return forger.node(1, Stage.ROLLOUT)["digest"]


def moved_group(forger: Forger) -> str:
    """Turn a trained group into a dropped one in every record and row."""
    commit = forger.commit(LAST)
    group = commit["trained"].pop()
    commit["dropped"][group] = "filtered"
    outputs = forger.node(LAST, Stage.ROLLOUT)["outputs"]
    outputs["accepted"].remove(group)
    outputs["dropped"][group] = "filtered"
    for stage in (Stage.REWARD, Stage.ADVANTAGE):
        forger.edit_table(
            LAST,
            stage,
            lambda rows: rows.__setitem__(slice(None), [r for r in rows if r["group_id"] != group]),
        )
    return forger.node(LAST, Stage.ROLLOUT)["digest"]


def another_reason(forger: Forger) -> str:
    for dropped in (
        forger.commit(1)["dropped"],
        forger.node(1, Stage.ROLLOUT)["outputs"]["dropped"],
    ):
        dropped.update(dict.fromkeys(dropped, "aborted"))
    return "run/00000001"


def moved_cursor(forger: Forger) -> str:
    """Move the data cursor by one prompt in iteration 1 and every later record."""

    def move(content: object) -> None:
        if isinstance(content, dict):
            if content.get("offset", 0) > 3:
                content["offset"] += 1
            for value in content.values():
                move(value)

    for content in forger.records.values():
        move(content)
    return "run/00000001"


def doubled_row(rows: list[Content]) -> None:
    """Add a copy of a sample as another sample of its group."""
    rows.append({**rows[-1], "index": 2})


FORGERIES = [
    Forgery("the text of a response", in_table(1, Stage.ROLLOUT, in_column("response", "xyz"))),
    Forgery("the text of a prompt", in_table(1, Stage.ROLLOUT, in_column("prompt", "another"))),
    Forgery("the tokens of a response", both_tokens),
    Forgery("a label", in_table(1, Stage.ROLLOUT, in_column("label", "42"))),
    Forgery("a label in the plan", in_plan(lambda plan: plan["groups"][0].update(label="42"))),
    Forgery("a seed", in_table(1, Stage.ROLLOUT, in_column("seed", 12345))),
    Forgery("a seed in the plan", in_plan(lambda plan: plan["groups"][0].update(seeds=[7, 9]))),
    Forgery("a reward", in_table(1, Stage.REWARD, in_column("reward", 0.0))),
    Forgery(
        "a verifier's error",
        in_table(1, Stage.REWARD, lambda rows: rows[0].update(reward=None, error="timeout")),
    ),
    Forgery("an advantage", in_table(1, Stage.ADVANTAGE, in_column("advantages", [1.0, 1.0, 1.0]))),
    Forgery("a mask", in_table(1, Stage.ADVANTAGE, in_column("loss_mask", [0, 1, 1]))),
    Forgery(
        "a log-prob",
        in_table(1, Stage.ROLLOUT, in_column("rollout_log_probs", [-9.0, -0.25, -0.125])),
    ),
    Forgery(
        "a weight version",
        in_table(1, Stage.ROLLOUT, in_column("weight_versions", [{"tokens": 3, "version": 1}])),
    ),
    Forgery("when a sample was sampled", in_table(1, Stage.ROLLOUT, in_column("t_end_s", 5.0))),
    Forgery(
        "a metric",
        in_outputs(1, Stage.TRAIN, lambda outputs: outputs["metrics"].update({"train/loss": 0.0})),
    ),
    Forgery(
        "the digest of a state",
        in_outputs(1, Stage.TRAIN, lambda outputs: outputs.update(state_digest="f" * 64)),
    ),
    Forgery(
        "the digest of the newest state",
        in_outputs(LAST, Stage.TRAIN, lambda outputs: outputs.update(state_digest="f" * 64)),
    ),
    Forgery("the learning rate", learning_rate),
    Forgery("the first weights", first_weights),
    Forgery("a checkpoint", checkpoint_files),
    Forgery("an evaluation", evaluation),
    Forgery("a sample from the buffer", waiting_sample),
    Forgery("the packing", packing),
    Forgery("a row removed", in_table(1, Stage.REWARD, lambda rows: rows.pop())),
    Forgery("a row of the batch removed", in_table(1, Stage.ADVANTAGE, lambda rows: rows.pop())),
    Forgery("a row doubled", in_table(1, Stage.ROLLOUT, doubled_row)),
    Forgery("a group moved", moved_group),
    Forgery("a reason", another_reason),
    Forgery("the cursor", moved_cursor),
    Forgery("the packages", in_commit(lambda commit: commit.update(packages={"torch": "1.0"}))),
    Forgery(
        "when it was committed",
        in_commit(lambda commit: commit.update(created="2020-01-01T00:00:00.000+00:00")),
    ),
]
"""What an audit without a held digest cannot find, if all of it is rewritten."""
