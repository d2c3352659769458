"""Expert routing of mixture-of-experts models: the experts that an engine used for each token.

A row belongs to one token that an engine read: `layers × k` uint16, for all hidden layers of
config.json in order (zeros for a dense layer), with k experts in the router's order. Rows begin at
the first token of a sample and have no gaps. An engine reads a token when it samples the next one.
So the last token of a sample has no row, and neither has the output of a tool after the last turn.
Such tokens have no part in any trained log-prob. Where every token needs a row, they are marked
`NOT_ROUTED`.

    prompt │ turn ┊ tool │ turn      first answer: rows up to the last token but one
    r r r r│r r r ┊r r r │r r .      next answer: only the missing rows, which are appended

So a token keeps the experts with which the log-prob after it was sampled, even if it was read again
later, under other weights or in another turn (slime takes the last answer for all tokens). No row
is sent twice.

Size for a model with 48 layers and 8 of 128 experts for each token: a token takes 768 bytes in
memory (2 × layers × k), about 340 in a shard, and 2048 on the wire (base64 of int32, as SGLang
sends it).

`engines.megatron.train.routing` replays the routing.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlpipe.errors import ConfigError

NOT_ROUTED = 0xFFFF
"""Value instead of an expert where no engine read the token."""


def routed_width(model: Mapping[str, Any]) -> int:
    """Return the length of a row, from a Hugging Face config.json.

    Raises: ConfigError for a model without experts.
    """
    # Models with vision have the sizes of the language model in `text_config`.
    text = model.get("text_config") or model
    if not isinstance(text, Mapping) or not text.get("num_experts_per_tok"):
        raise ConfigError(
            "the model has no experts, so no routing can be replayed",
            where="train.use_rollout_routing_replay",
            found="no num_experts_per_tok in config.json",
            do="leave it out",
        )
    try:
        return int(text["num_hidden_layers"]) * int(text["num_experts_per_tok"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            "the sizes of the model are not numbers",
            where="config.json",
            found=repr(error),
            expected="whole numbers",
        ) from error


def read_rows(encoded: str, rows: int, width: int) -> np.ndarray:
    """Return [rows, width] uint16 from an engine's base64 of int32.

    Raises: ValueError for another number of rows, or numbers that are not experts.
    """
    experts = np.frombuffer(base64.b64decode(encoded), np.int32)
    if experts.size != rows * width:
        raise ValueError(f"routed_experts are {experts.size} numbers, not {rows} tokens × {width}")
    if experts.size and (experts.min() < 0 or experts.max() >= NOT_ROUTED):
        raise ValueError(f"routed_experts are from {experts.min()} to {experts.max()}")
    return experts.astype(np.uint16).reshape(rows, width)


def write_rows(rows: np.ndarray) -> str:
    """Encode rows as an engine does. The inverse of `read_rows`."""
    return base64.b64encode(rows.astype(np.int32).tobytes()).decode()


def num_rows(rows: np.ndarray | None) -> int:
    """Return the number of tokens with known experts."""
    return 0 if rows is None else len(rows)


def appended(held: np.ndarray | None, more: np.ndarray | None) -> np.ndarray | None:
    """Return the rows of a sample so far with those of the next answer; None if both are None."""
    if held is None or more is None:
        return more if held is None else held
    return np.concatenate([held, more])


def within(rows: np.ndarray | None, tokens: int) -> np.ndarray | None:
    """Return at most the rows that a sample with this number of tokens has."""
    # The end of the sample may have been cut off, and its last token has no row.
    return None if rows is None else rows[: max(tokens - 1, 0)]


def one_per_token(rows: np.ndarray, tokens: int) -> np.ndarray:
    """Pad rows to [tokens, width] with `NOT_ROUTED`. Longer arrays are returned unchanged."""
    missing = np.full((max(tokens - len(rows), 0), rows.shape[1]), NOT_ROUTED, np.uint16)
    return np.concatenate([rows, missing])


def rows_of(every: np.ndarray) -> np.ndarray:
    """Remove the padding of `one_per_token`."""
    return every[: int(np.count_nonzero(every[:, 0] != NOT_ROUTED))] if every.size else every
