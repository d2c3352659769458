"""Prepare samples for the sample viewer: the text, advantage and log-probs of every token.

`shown_samples` reads the samples of an iteration, `tokenizer_of` finds the run's tokenizer. The
page itself is `rlpipe.observe.viewer`.
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

BATCH_COLUMNS = (
    "group_id",
    "index",
    "loss_mask",
    "advantages",
    "rollout_log_probs",
    "proximal_log_probs",
)
MAX_TOKENS_PER_CHARACTER = 8
"""A character may need several tokens, for example the bytes of an emoji."""
REPLACEMENT = "\ufffd"
"""End of a text whose last character is not complete."""

Decode = Callable[[Sequence[int]], str]


def shown_samples(
    files: Files, run: str, k: int, decode: Decode | None, *, most: int, groups: Sequence[str] = ()
) -> list[ShownSample]:
    """Return samples of iteration k of a run, at most `most`, in whole groups where possible.

    `decode` turns token ids into text; None shows the ids. `groups` restricts the samples to these
    groups.

    Raises: ObjectMissing if the iteration has no stored rollout; ObjectCorrupt.
    """
    stored = find(files, run, k)
    if stored is None:
        raise ObjectMissing("no rollout of this iteration is stored", where=f"{run}@{k}")
    trained = _trained_rows(files, stored.advantage)
    rows = [
        row
        for row in sample_rows(files, stored).to_pylist()
        if not groups or row["group_id"] in groups
    ]
    rows.sort(key=lambda row: (row["group_id"], row["index"]))
    if len(rows) > most:
        cut_group = rows[most]["group_id"]
        whole = [row for row in rows[:most] if row["group_id"] != cut_group]
        rows = whole or rows[:most]
    return [_shown(row, trained.get((row["group_id"], row["index"])), decode) for row in rows]


def tokenizer_of(files: Files, run: str, home: Path) -> Decode | None:
    """Return the decoder of a run's model directory; None if this machine does not have it.

    The directory of a model that a function makes is found by its contents, without calling the
    function.
    """
    record = Branches(files).get(run)
    try:
        source = validate_stored(record.config).model.source
        if isinstance(source, HuggingFaceModel):
            return decoder(source.hf_checkpoint)
        wanted = Nodes(files).get(Stage.INIT, record.init).config.get("model")
        cache = home / "models" / "fingerprints.json"
        for path in (home / "models").glob("*"):
            is_model = (path / "config.json").is_file()
            if is_model and model_fingerprint(str(path), cache) == wanted:
                return decoder(str(path))
    except ConfigError:
        pass  # the viewer then shows token ids
    return None


def decoder(directory: str) -> Decode:
    """Return the decoder of a model directory. Raises: ConfigError."""
    tokenizer = load_tokenizer(directory)
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))


def pieces(ids: Sequence[int], decode: Decode | None) -> list[str]:
    """Return the text of each token.

    The text of tokens that form a character together is at the last of them.
    """
    if decode is None:
        return [f" {token}" for token in ids]
    texts: list[str] = []
    pending: list[int] = []
    for token in ids:
        pending.append(token)
        text = decode(pending)
        if text.endswith(REPLACEMENT) and len(pending) < MAX_TOKENS_PER_CHARACTER:
            texts.append("")
        else:
            texts.append(text)
            pending = []
    return [*texts[:-1], decode(pending)] if pending else texts


def _trained_rows(files: Files, advantage: Node | None) -> dict[tuple[str, int], dict[str, Any]]:
    if advantage is None or not advantage.files:
        return {}
    rows = read_rows(files, advantage.files, BATCH_COLUMNS).to_pylist()
    return {(row["group_id"], row["index"]): row for row in rows}


def _shown(
    row: dict[str, Any], trained: dict[str, Any] | None, decode: Decode | None
) -> ShownSample:
    batch = trained or {}
    if trained:
        fate = "trained"
    else:
        fate = row["drop_reason"] or ("accepted" if row["accepted"] else "not accepted")
    return ShownSample(
        group=row["group_id"],
        index=row["index"],
        prompt=_prompt_text(from_json(row["prompt"], "prompt")),
        label=row["label"],
        texts=pieces(row["response_ids"], decode),
        ids=row["response_ids"],
        mask=batch.get("loss_mask") or row["loss_mask"],
        log_probs=row["rollout_log_probs"],
        advantages=batch.get("advantages"),
        differences=_log_prob_differences(batch),
        versions=[run["version"] for run in row["weight_versions"] for _ in range(run["tokens"])],
        reward=row["reward"],
        parts=dict(row["reward_parts"] or ()),
        error=row["error"],
        status=row["status"],
        fate=fate,
    )


def _prompt_text(prompt: Any) -> str:
    if isinstance(prompt, list):
        return "\n".join(map(_message_text, prompt))
    return str(prompt)


def _message_text(message: Any) -> str:
    if isinstance(message, dict):
        return f"{message.get('role')}: {message.get('content')}"
    return str(message)


def _log_prob_differences(batch: dict[str, Any]) -> list[float] | None:
    behaviour = batch.get("rollout_log_probs")
    proximal = batch.get("proximal_log_probs")
    if behaviour is None or proximal is None:
        return None
    return [engine - trainer for engine, trainer in zip(behaviour, proximal, strict=True)]
