"""Which experts of a mixture an engine sent each token to: rows of numbers, from the engine's
answer to the trainer's batch.

A row is of one token that an engine read: `layers × k` uint16, all hidden layers of config.json in
order (a dense one has zeros), k experts in the router's order. Rows begin with a sample's first
token and leave none out. An engine reads a token when it samples the next one, so the last token of
a sample has no row, nor has what a tool said after the last turn. What is not read has no part in
any log-prob that is trained, and is marked `NOT_ROUTED` wherever every token needs a row.

    prompt │ turn ┊ tool │ turn          one answer: rows from `routed_from` up to its last token but one
    r r r r│r r r ┊r r r │r r .          held rows stay, the next answer's are appended: it is asked for those that are missing

So a token keeps the experts with which the log-prob after it was sampled, also where it was read
again later, under other weights or by another turn (slime takes the last answer for all tokens),
and no row is sent twice.

Of a model with 48 layers and 8 of 128 experts a token, a token takes 768 bytes in memory (2 ×
layers × k), about 340 in a shard and 2048 on the wire (base64 of int32, as SGLang sends it).

Not here: asking (`rollout.client.generate_client`; past the router, see `rollout.client.request_pool`), replaying
(`engines.megatron.train.routing`).
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlpipe.errors import ConfigError

NOT_ROUTED = 0xFFFF
"""In place of an expert: no engine read this token."""


def routed_width(model: Mapping[str, Any]) -> int:
    """Numbers in a row, from a Hugging Face config.json. Raises: ConfigError for a model without
    experts."""
    text = model.get("text_config") or model
    if not isinstance(text, Mapping) or not text.get("num_experts_per_tok"):
        raise ConfigError(
            "the model has no experts whose routing could be replayed",
            where="train.use_rollout_routing_replay",
            found="no num_experts_per_tok in config.json",
            do="leave it out",
        )
    try:
        return int(text["num_hidden_layers"]) * int(text["num_experts_per_tok"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            "not the sizes of a model",
            where="config.json",
            found=repr(error),
            expected="whole numbers",
        ) from error


def read_rows(encoded: str, rows: int, width: int) -> np.ndarray:
    """[rows, width] uint16 of an engine's base64 of int32. Raises: ValueError for another number of
    rows, or none of experts."""
    found = np.frombuffer(base64.b64decode(encoded), np.int32)
    if found.size != rows * width:
        raise ValueError(f"routed_experts are {found.size} numbers, not {rows} tokens × {width}")
    if found.size and (found.min() < 0 or found.max() >= NOT_ROUTED):
        raise ValueError(f"routed_experts are from {found.min()} to {found.max()}")
    return found.astype(np.uint16).reshape(rows, width)


def write_rows(rows: np.ndarray) -> str:
    """The inverse of `read_rows`."""
    return base64.b64encode(rows.astype(np.int32).tobytes()).decode()


def num_rows(rows: np.ndarray | None) -> int:
    """Tokens whose experts are known."""
    return 0 if rows is None else len(rows)


def appended(held: np.ndarray | None, more: np.ndarray | None) -> np.ndarray | None:
    """What is held, then what an answer to the rest said. None: nothing is known."""
    if held is None or more is None:
        return more if held is None else held
    return np.concatenate([held, more])


def within(rows: np.ndarray | None, tokens: int) -> np.ndarray | None:
    """Not more rows than a sample of so many tokens has: its end may have been cut off."""
    return None if rows is None else rows[: max(tokens - 1, 0)]


def one_per_token(rows: np.ndarray, tokens: int) -> np.ndarray:
    """[tokens, width]: with `NOT_ROUTED` for the last ones. More rows than tokens stay what they
    are."""
    missing = np.full((max(tokens - len(rows), 0), rows.shape[1]), NOT_ROUTED, np.uint16)
    return np.concatenate([rows, missing])


def rows_of(every: np.ndarray) -> np.ndarray:
    """The inverse of `one_per_token`."""
    return every[: int(np.count_nonzero(every[:, 0] != NOT_ROUTED))] if every.size else every
