"""Compare a reprocessed branch with the run that it was made from, sample by sample.

`compare` reads the rewards and advantages of both from the store.
`rlpipe.observe.comparison` has the figures and the page.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from rlpipe.batch.files import read_rewards
from rlpipe.config.run import RunConfig
from rlpipe.errors import ObjectMissing
from rlpipe.lineage.continuation import changed_settings
from rlpipe.lineage.rollouts import StoredRollout, find
from rlpipe.observe.comparison import Comparison, Example, IterationRow
from rlpipe.store.objects.files import Files
from rlpipe.store.parquet.arrays import ragged
from rlpipe.store.parquet.rows import from_json
from rlpipe.store.parquet.shards import read_rows
from rlpipe.types import Node

MAX_EXAMPLES = 8
READERS = 4
Key = tuple[str, int]


class _BothBranches(NamedTuple):
    """One iteration of both branches: (before, after), samples in the order of `keys`."""

    row: IterationRow
    keys: list[Key]
    rewards: tuple[np.ndarray, np.ndarray]
    advantages: tuple[np.ndarray, np.ndarray]


def compare(
    files: Files,
    config: RunConfig,
    of: str,
    iterations: Sequence[int],
    *,
    notes: Mapping[int, str] | None = None,
    stored: Mapping[str, Any] | None = None,
) -> Comparison:
    """Compare iterations of a reprocessed branch with those of the run `of`.

    `notes`: iteration → reason why it has no advantages. `stored`: configuration of the run `of`,
    for the list of changed settings. Raises: ObjectMissing if an iteration does not exist;
    ObjectCorrupt.
    """
    with ThreadPoolExecutor(READERS) as pool:
        sides = list(
            pool.map(
                lambda k: _iteration(files, of, config.run, k, (notes or {}).get(k, "")), iterations
            )
        )
    keys = [key for side in sides for key in side.keys]
    names = {
        group_id: number
        for number, group_id in enumerate(dict.fromkeys(group_id for group_id, _ in keys))
    }
    both = [_joined(side.rewards for side in sides), _joined(side.advantages for side in sides)]
    found = Comparison(
        run=config.run,
        of=of,
        group=np.array([names[group_id] for group_id, _ in keys], np.int64),
        rewards=both[0],
        advantages=both[1],
        iterations=[side.row for side in sides],
        changed=changed_settings(stored, config.model_dump(mode="json")) if stored else {},
    )
    found.examples = _examples(files, of, sides)
    return found


def _iteration(files: Files, of: str, run: str, k: int, without: str) -> _BothBranches:
    stored = [_stored_rollout(files, name, k) for name in (of, run)]
    rewards = [_rewards(files, one.reward) for one in stored]
    advantages = [_advantages(files, one.advantage) for one in stored]
    keys = sorted({key for values in (*rewards, *advantages) for key in values})
    means = [float(np.mean(list(values.values()))) if values else None for values in rewards]
    row = IterationRow(
        iteration=k,
        reward=(means[0], means[1]),
        groups=(_groups(stored[0]), _groups(stored[1])),
        errors=(_errors(stored[0]), _errors(stored[1])),
        without=without,
    )
    columns = [
        np.array([values.get(key, np.nan) for key in keys], np.float64)
        for values in (*rewards, *advantages)
    ]
    return _BothBranches(row, keys, (columns[0], columns[1]), (columns[2], columns[3]))


def _stored_rollout(files: Files, run: str, k: int) -> StoredRollout:
    found = find(files, run, k)
    if found is None:
        raise ObjectMissing(
            "that run has no such rollout", where=f"{run}, iteration {k}", do="reprocess it first"
        )
    return found


def _rewards(files: Files, reward: Node | None) -> dict[Key, float]:
    rows = read_rewards(files, reward) if reward is not None else []
    return {(row.group_id, row.index): row.reward for row in rows if row.reward is not None}


def _advantages(files: Files, advantage: Node | None) -> dict[Key, float]:
    """Return the mean advantage of each sample; none for a sample without tokens."""
    if advantage is None or not advantage.files:
        return {}
    table = read_rows(files, advantage.files, ["group_id", "index", "advantages"])
    values, offsets = ragged(table["advantages"])
    keys = zip(table["group_id"].to_pylist(), table["index"].to_pylist(), strict=True)
    bounds = zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
    return {
        key: float(values[low:high].mean())
        for key, (low, high) in zip(keys, bounds, strict=True)
        if high > low
    }


def _groups(stored: StoredRollout) -> int:
    groups = stored.advantage.outputs.get("groups") if stored.advantage else None
    if groups is None:
        groups = stored.rollout.outputs.get("accepted", ())
    return len(groups)


def _errors(stored: StoredRollout) -> int:
    return int(stored.reward.outputs.get("errors", 0)) if stored.reward else 0


def _joined(pairs: Iterable[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    empty = np.zeros(0)
    before, after = zip((empty, empty), *pairs, strict=True)
    return np.concatenate(before), np.concatenate(after)


def _examples(files: Files, of: str, sides: Sequence[_BothBranches]) -> list[Example]:
    """Return the samples whose rewards differ most, with prompt and response."""
    changes = [
        (abs(after - before), side.row.iteration, key, before, after)
        for side in sides
        for key, before, after in zip(
            side.keys, *(column.tolist() for column in side.rewards), strict=True
        )
        if np.isfinite(before) and np.isfinite(after) and before != after
    ]
    most = sorted(changes, key=lambda change: (-change[0], change[1:3]))[:MAX_EXAMPLES]
    texts = {
        k: _texts(files, _stored_rollout(files, of, k).rollout)
        for k in {change[1] for change in most}
    }
    return [
        Example(key[0], *texts[k][key], before, after)
        for _, k, key, before, after in most
        if key in texts[k]
    ]


def _texts(files: Files, rollout: Node) -> dict[Key, tuple[str, str]]:
    table = read_rows(files, rollout.files, ["group_id", "index", "prompt", "response"]).to_pylist()
    return {
        (row["group_id"], row["index"]): (_prompt(row["prompt"]), row["response"]) for row in table
    }


def _prompt(text: str) -> str:
    prompt = from_json(text, "prompt")
    messages = prompt if isinstance(prompt, list) else [prompt]
    return "\n".join(
        str(message.get("content", "") if isinstance(message, dict) else message)
        for message in messages
    )
