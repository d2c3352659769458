"""Prepare samples for the sample viewer: the text, advantage and log-probs of every token.

`shown_rollout` and `shown_evaluation` turn stored rows into samples, `tokenizer_of` finds the run's
tokenizer. `sample_sets` chooses the rows; the page itself is `rlpipe.observe.viewer`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
from tokenizers import Tokenizer

from rlpipe.config.load import validate_stored
from rlpipe.config.model import HuggingFaceModel
from rlpipe.data.tokenizer import load_tokenizer
from rlpipe.errors import ConfigError, ObjectMissing
from rlpipe.lineage.rollouts import StoredRollout
from rlpipe.model_dir import model_fingerprint, present_directory
from rlpipe.observe.viewer import ShownSample
from rlpipe.store.branches import Branches
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.store.parquet.rows import EXPERTS, from_json
from rlpipe.store.parquet.schema import SAMPLES
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


def shown_rollout(
    files: Files, stored: StoredRollout, rows: pa.Table, decode: Decode | None
) -> list[ShownSample]:
    """Return samples of a rollout, in order of group and index. `rows`: rows of `sample_rows`.

    `decode` turns token ids into text; None shows the ids. Raises: ObjectMissing, ObjectCorrupt.
    """
    trained = _trained_rows(files, stored.advantage)
    shown = []
    for row in _in_order(rows):
        batch = trained.get((row["group_id"], row["index"]))
        outcome = row["drop_reason"] or ("accepted" if row["accepted"] else "not accepted")
        shown.append(_shown(row, batch or {}, "trained" if batch else outcome, decode))
    return shown


def evaluation_rows(files: Files, evaluation: Node) -> pa.Table:
    """Return all rows of an evaluation. Raises: ObjectMissing, ObjectCorrupt."""
    return read_rows(files, evaluation.files, [name for name in SAMPLES.names if name != EXPERTS])


def shown_evaluation(rows: pa.Table, decode: Decode | None) -> list[ShownSample]:
    """Return samples of an evaluation, in order of group and index."""
    return [_shown(row, {}, "evaluated", decode) for row in _in_order(rows)]


def tokenizer_of(files: Files, run: str, home: Path) -> Decode | None:
    """Return the decoder of a run's model directory; None if this machine does not have it.

    The directory of a model that a function makes is found by its contents, without calling the
    function.
    """
    try:
        record = Branches(files).get(run)
        source = validate_stored(record.config).model.source
        if isinstance(source, HuggingFaceModel):
            directory = present_directory(source.hf_checkpoint)
            return None if directory is None else decoder(directory)
        wanted = Nodes(files).get(Stage.INIT, record.init).config.get("model")
        cache = home / "models" / "fingerprints.json"
        for path in (home / "models").glob("*"):
            is_model = (path / "config.json").is_file()
            if is_model and model_fingerprint(str(path), cache) == wanted:
                return decoder(str(path))
    except (ConfigError, ObjectMissing):
        pass  # the viewer then shows token ids; a run that only sampled may have no branch
    return None


def decoder(directory: str) -> Decode:
    """Return the decoder of a model directory. Raises: ConfigError."""
    tokenizer = _fast_tokenizer(directory) or load_tokenizer(directory)

    @lru_cache(maxsize=1 << 16)
    def decode(ids: tuple[int, ...]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False))

    # Pages decode token by token, and the same tokens come again and again.
    return lambda ids: decode(tuple(ids))


def _fast_tokenizer(directory: str) -> Tokenizer | None:
    """Return the tokenizer of `tokenizer.json`; None if the model has another kind.

    The import of transformers would take seconds, at the end of every run.
    """
    path = Path(directory) / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(path)) if path.is_file() else None
    except Exception:  # noqa: BLE001
        # The package raises no narrower type. `load_tokenizer` then names the problem.
        return None


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


def _in_order(rows: pa.Table) -> list[dict[str, Any]]:
    return sorted(rows.to_pylist(), key=lambda row: (row["group_id"], row["index"]))


def _shown(
    row: dict[str, Any], batch: dict[str, Any], fate: str, decode: Decode | None
) -> ShownSample:
    return ShownSample(
        group=row["group_id"],
        index=row["index"],
        prompt=prompt_text(row["prompt"]),
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
        images=tuple(image["sha256"] for image in row.get("images") or ()),
    )


def prompt_text(stored: str) -> str:
    """Return the text of a stored prompt; messages are lines with their role."""
    prompt = from_json(stored, "prompt")
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
