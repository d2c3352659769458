"""Rules that every row of a table keeps.

`check` applies them when a table is written and again when it is read. A rule yields one flag per
row and the sentence of the error; `check` raises for the first row that a rule flags.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from rlpipe.errors import RlpipeError
from rlpipe.store import columns
from rlpipe.store.columns import KIND, STORED, Shape
from rlpipe.store.parquet.arrays import any_in_row, combined, lengths, nulls, ragged, to_numpy
from rlpipe.types import Status

STATUSES = [status.value for status in Status]
TOKEN_IDS = ("prompt_ids", "response_ids", "tokens")
RESPONSE_LISTS = tuple(
    dict.fromkeys(
        name
        for table in STORED
        for name in table.named(Shape.RESPONSE)
        if name != "response_ids"  # the ids define the length that the others must have
    )
)
EXPERT_LISTS = tuple(name for table in STORED for name in table.named(Shape.EXPERTS))
COUNTS = {"prompt_tokens": "prompt_ids", "response_tokens": "response_ids"}
"""Columns of samples that count the values of another column."""
REWARD_PARTS = ("reward_parts", "parts")

Rule = Iterator[tuple[np.ndarray, str]]
"""Pairs of one flag per row and the problem of the flagged rows."""


def check(table: pa.Table, where: str, error: type[RlpipeError]) -> None:
    """Check a table, or some columns of one.

    Raises: `error` naming the first row that breaks a rule.
    """
    for broken, problem in _broken_rules(table):
        if broken.any():
            row = int(np.argmax(broken))
            key = f"{table['group_id'][row]}/{table['index'][row]}"
            raise error(problem, where=f"{where} row {row} ({key})")


def repeated_keys(table: pa.Table) -> np.ndarray:
    """Return one flag per row: an earlier row has the same (group_id, index)."""
    keys = list(zip(table["group_id"].to_pylist(), table["index"].to_pylist(), strict=True))
    if len(set(keys)) == len(keys):
        return np.zeros(len(keys), dtype=bool)
    return np.array([keys.index(key) < row for row, key in enumerate(keys)])


def with_companions(schema: pa.Schema, names: set[str]) -> list[str]:
    """Return these columns, and those with which their rules compare them."""
    experts = names & set(EXPERT_LISTS)
    measured = experts | names & {*RESPONSE_LISTS, "weight_versions", "prompt_len"}
    companions = {"response_ids", "tokens", "prompt_len"} if measured else set()
    companions |= {"prompt_ids"} if experts else set()
    wanted = {"group_id", "index"} | names | companions
    return [name for name in schema.names if name in wanted]


def _broken_rules(table: pa.Table) -> Rule:
    yield from _broken_keys(table)
    yield from _broken_nulls(table)
    yield from _broken_lists(table)
    yield from _broken_rewards(table)
    names = set(table.column_names)
    if names >= {"prompt_len", "tokens"}:
        outside = (to_numpy(table["prompt_len"]) < 0) | (_response_lengths(table) < 0)
        yield outside, "prompt_len is not within tokens"
    if "response_len" in names:
        yield from _broken_sizes(table)
    for name in names.intersection(COUNTS):
        if COUNTS[name] in names:
            counted = to_numpy(table[name].fill_null(0))
            wrong = (counted != lengths(table[COUNTS[name]])) & ~nulls(table[name])
            yield wrong, f"{name} is not the number of {COUNTS[name]}"
    if "status" in names:
        unknown = np.isin(to_numpy(table["status"]), STATUSES, invert=True)
        yield unknown, "status is not one of ours"
    if "weight_versions" in names:
        yield _broken_version_runs(table), "weight_versions do not add up to the response"


def _broken_keys(table: pa.Table) -> Rule:
    yield to_numpy(table["index"]) < 0, "index is negative"
    yield repeated_keys(table), "two rows have the same group_id and index"


def _broken_nulls(table: pa.Table) -> Rule:
    """A column that may be null is null in all rows of a batch or in none."""
    batch = (table.schema.metadata or {}).get(KIND) == columns.BATCH.schema.metadata[KIND]
    for field in table.schema:
        null = nulls(table[field.name])
        if not field.nullable or (batch and not null.all()):
            yield null, f"{field.name} is null"


def _broken_lists(table: pa.Table) -> Rule:
    names = set(table.column_names)
    for name in names.intersection(TOKEN_IDS):
        yield any_in_row(table[name], lambda ids: ids < 0), f"{name} has a negative token id"
    for name in names.intersection(RESPONSE_LISTS):
        wrong = (lengths(table[name]) != _response_lengths(table)) & ~nulls(table[name])
        yield wrong, f"{name} has not one value per response token"
        if name == "loss_mask":
            above = any_in_row(table[name], lambda mask: mask > 1)
            yield above, "loss_mask has a value that is neither 0 nor 1"
        else:
            yield _infinite(table, name), f"{name} has a value that is not finite"
    for name in names.intersection(EXPERT_LISTS):
        yield _broken_experts(table, name), f"{name} are not equally many for every token"


def _broken_rewards(table: pa.Table) -> Rule:
    names = set(table.column_names)
    for name in names.intersection(REWARD_PARTS):
        yield _infinite(table, name), f"{name} has a value that is not finite"
    if "reward" in names:
        infinite = ~np.isfinite(to_numpy(table["reward"])) & ~nulls(table["reward"])
        yield infinite, "reward is not finite"
    if names >= {"reward", "parts", "error"}:
        yield nulls(table["reward"]) & nulls(table["error"]), "neither a reward nor an error"


def _infinite(table: pa.Table, name: str) -> np.ndarray:
    return any_in_row(table[name], lambda values: ~np.isfinite(values))


def _broken_experts(table: pa.Table, name: str) -> np.ndarray:
    experts = lengths(table[name])
    present = ~nulls(table[name])
    if name == "routed_experts":
        tokens = lengths(table["tokens"])
    else:
        tokens = lengths(table["prompt_ids"]) + _response_lengths(table)
    width = experts.sum() // max(int(tokens[present].sum()), 1)
    return (experts != tokens * width) & present


def _broken_sizes(table: pa.Table) -> Rule:
    """The sizes of a batch, where they and the columns that they count are read."""
    sizes = to_numpy(table["response_len"].fill_null(0))
    known = ~nulls(table["response_len"])
    yield sizes < 0, "response_len is negative"
    if {"tokens", "prompt_len"} <= set(table.column_names):
        wrong = (sizes != _response_lengths(table)) & known
        yield wrong, "response_len is not the number of response tokens"
    if {"loss_tokens", "loss_mask"} <= set(table.column_names):
        mask, offsets = ragged(table["loss_mask"])
        sums = np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])[offsets]
        counted = to_numpy(table["loss_tokens"].fill_null(0))
        wrong = (counted != np.diff(sums)) & ~nulls(table["loss_tokens"])
        yield wrong, "loss_tokens is not the sum of the loss mask"


def _broken_version_runs(table: pa.Table) -> np.ndarray:
    column = combined(table["weight_versions"])
    ends = np.cumsum(lengths(column))
    runs = to_numpy(column.flatten().field("tokens")).astype(np.int64)
    # A negative run counts as 2^31: a longer run must not make up for it.
    tokens = np.concatenate([[0], np.cumsum(np.where(runs < 0, 2**31, runs))])
    total = np.diff(tokens[ends], prepend=0)
    return (lengths(column) > 0) & (total != _response_lengths(table))


def _response_lengths(table: pa.Table) -> np.ndarray:
    if "response_ids" in table.column_names:
        return lengths(table["response_ids"])
    if "response_tokens" in table.column_names:
        return to_numpy(table["response_tokens"])
    return lengths(table["tokens"]) - to_numpy(table["prompt_len"])
