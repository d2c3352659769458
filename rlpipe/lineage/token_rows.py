"""Samples with all that is known of each of their tokens, for people to look at: text, advantage,
both sides' log-probs.

Not here: the page (`observe.viewer`), or tables for analysis (`run_rollouts`,
`store.tables.query`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlpipe.config.load import validate_stored
from rlpipe.config.model import HuggingFaceModel
from rlpipe.data.tokens import load_tokenizer
from rlpipe.errors import ConfigError, ObjectMissing
from rlpipe.lineage.rollouts import find, sample_rows
from rlpipe.model_dir import model_fingerprint
from rlpipe.observe.viewer import ShownSample
from rlpipe.store.branches import Branches
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.store.parquet.rows import from_json
from rlpipe.store.parquet.shards import read_rows
from rlpipe.types import Node, Stage

BATCH = ("group_id", "index", "loss_mask", "advantages", "rollout_log_probs", "proximal_log_probs")
LONGEST_PIECE = 8
"""Tokens that may make one character together."""

Decode = Callable[[Sequence[int]], str]


def shown_samples(
    files: Files, run: str, k: int, decode: Decode | None, *, most: int, groups: Sequence[str] = ()
) -> list[ShownSample]:
    """Samples of iteration k of a run, whole groups as long as they are `most` samples or fewer; of
    these `groups`, if given.

    `decode`: token ids to text; None shows the ids. Raises: ObjectMissing if there is no such
    rollout; ObjectCorrupt.
    """
    stored = find(files, run, k)
    if stored is None:
        raise ObjectMissing("no rollout of this iteration is stored", where=f"{run}@{k}")
    trained = _trained(files, stored.advantage)
    rows = [
        row
        for row in sample_rows(files, stored).to_pylist()
        if not groups or row["group_id"] in groups
    ]
    rows.sort(key=lambda row: (row["group_id"], row["index"]))
    if len(rows) > most:
        edge = rows[most]["group_id"]
        whole = [row for row in rows[:most] if row["group_id"] != edge]
        rows = whole or rows[:most]
    return [_shown(row, trained.get((row["group_id"], row["index"])), decode) for row in rows]


def tokenizer_of(files: Files, run: str, home: Path) -> Decode | None:
    """What decodes a run's tokens: the tokenizer of its model directory, if that is on this
    machine; None if it is not.

    A model that a function makes is looked for by its contents; the function is not called.
    """
    record = Branches(files).get(run)
    try:
        source = validate_stored(record.config).model.source
        if isinstance(source, HuggingFaceModel):
            return decoder(source.hf_checkpoint)
        wanted = Nodes(files).get(Stage.INIT, record.init).config.get("model")
        remembered = home / "models" / "fingerprints.json"
        made = (path for path in (home / "models").glob("*") if (path / "config.json").is_file())
        return next(
            (
                decoder(str(path))
                for path in made
                if model_fingerprint(str(path), remembered) == wanted
            ),
            None,
        )
    except ConfigError:
        return None


def decoder(directory: str) -> Decode:
    """The decoder of a model directory. Raises: ConfigError."""
    tokenizer = load_tokenizer(directory)
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))


def pieces(ids: Sequence[int], decode: Decode | None) -> list[str]:
    """The text of each token; what only several make together stands at the last of them."""
    if decode is None:
        return [f" {token}" for token in ids]
    texts: list[str] = []
    open_ids: list[int] = []
    for token in ids:
        open_ids.append(token)
        text = decode(open_ids)
        if text.endswith("\ufffd") and len(open_ids) < LONGEST_PIECE:
            texts.append("")
        else:
            texts.append(text)
            open_ids = []
    return [*texts[:-1], decode(open_ids)] if open_ids else texts


def _trained(files: Files, advantage: Node | None) -> dict[tuple[str, int], dict[str, Any]]:
    if advantage is None or not advantage.files:
        return {}
    return {
        (row["group_id"], row["index"]): row
        for row in read_rows(files, advantage.files, BATCH).to_pylist()
    }


def _said(message: Any) -> str:
    return (
        f"{message.get('role')}: {message.get('content')}"
        if isinstance(message, dict)
        else str(message)
    )


def _shown(
    row: dict[str, Any], trained: dict[str, Any] | None, decode: Decode | None
) -> ShownSample:
    prompt = from_json(row["prompt"], "prompt")
    batch = trained or {}
    apart = None
    if batch.get("rollout_log_probs") is not None and batch.get("proximal_log_probs") is not None:
        apart = [
            a - b
            for a, b in zip(batch["rollout_log_probs"], batch["proximal_log_probs"], strict=True)
        ]
    return ShownSample(
        group=row["group_id"],
        index=row["index"],
        prompt="\n".join(map(_said, prompt)) if isinstance(prompt, list) else str(prompt),
        label=row["label"],
        texts=pieces(row["response_ids"], decode),
        ids=row["response_ids"],
        mask=batch.get("loss_mask") or row["loss_mask"],
        log_probs=row["rollout_log_probs"],
        advantages=batch.get("advantages"),
        differences=apart,
        versions=[run["version"] for run in row["weight_versions"] for _ in range(run["tokens"])],
        reward=row["reward"],
        parts=dict(row["reward_parts"] or ()),
        error=row["error"],
        status=row["status"],
        fate="trained"
        if trained
        else row["drop_reason"] or ("accepted" if row["accepted"] else "not accepted"),
    )
