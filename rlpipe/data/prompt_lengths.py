"""Refuse prompts that are too long before any process starts.

The generator encodes every row with the tokenizer of `transformers`, whose import takes seconds.
Here the package `tokenizers` counts the tokens of the longest rows by characters. Only a row above
its limit is encoded as in the generator, which gives the same error.

Entry points: `check_prompt_lengths`, `file_rows`, `source_keys`.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from rlpipe.config.data import DataConfig, FilePrompts
from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.run import RunConfig
from rlpipe.data.prompts import PROMPTS_KEY, PromptRow, held_out_key, load_prompts
from rlpipe.data.tokenizer import load_tokenizer
from rlpipe.data.tokens import encode_prompt, prompt_limit
from rlpipe.model_dir import prompt_context_len
from rlpipe.system.model_files import read_object

LONGEST_ROWS = 8
"""Rows of a source that are counted, the longest by characters first."""


def file_rows(config: RunConfig) -> list[Sequence[PromptRow]]:
    """Return the rows of the run's prompt files and of each held-out set.

    A generated source has no rows here. Raises: as `load_prompts`.
    """
    sources = [config.data.prompts, *(dataset.prompts for dataset in config.evaluation.datasets)]
    keys = source_keys(config)
    return [
        load_prompts(source, key=key, image_key=config.data.image_key)
        if isinstance(source, FilePrompts)
        else ()
        for source, key in zip(sources, keys, strict=True)
    ]


def source_keys(config: RunConfig) -> list[str]:
    """Return the keys of the run's prompts and of each held-out set, for errors."""
    return [PROMPTS_KEY, *map(held_out_key, range(len(config.evaluation.datasets)))]


def check_prompt_lengths(
    config: RunConfig, rows: Sequence[Sequence[PromptRow]], directory: Path
) -> None:
    """Refuse a row that is too long with `data.overlong_prompts: error`.

    `rows`: those of the run, then of each held-out set. `directory`: of the model.
    Raises: DataError naming the row.
    """
    if config.data.overlong_prompts != "error" or not config.needs_engines:
        return
    model = read_object(directory / "config.json", "model.source")
    training, *held_out = rows
    # The generator checks supervised rows: their answers need room too.
    if config.rollout.type == "sample":
        context_len = prompt_context_len(config.rollout, model)
        _check(config, training, config.data, config.rollout, context_len, directory)
    for dataset, checked in zip(config.evaluation.datasets, held_out, strict=True):
        sampling = config.rollout.model_copy(update=dataset.sampling())
        context_len = prompt_context_len(sampling, model, evaluation=True)
        data = dataset.limited(config.data)
        _check(config, checked, data, sampling, context_len, directory)


def _check(
    config: RunConfig,
    rows: Sequence[PromptRow],
    data: DataConfig,
    rollout: RolloutConfig,
    context_len: int | None,
    directory: Path,
) -> None:
    limit, _ = prompt_limit(data, rollout, 1, context_len)
    # The generator counts the tokens of images.
    rows = [row for row in rows if not row.images]
    longest = heapq.nlargest(LONGEST_ROWS, rows, key=lambda row: len(_text(row)))
    suspects = _longer_than(longest, limit, directory / "tokenizer.json")
    if not suspects:
        return
    trusts_code = getattr(config.model.source, "trust_remote_code", False)
    tokenizer = load_tokenizer(str(directory), trust_remote_code=trusts_code)
    for row in suspects:
        encode_prompt(tokenizer, row, data, rollout, model_context_len=context_len)


def _longer_than(rows: Sequence[PromptRow], limit: int, file: Path) -> list[PromptRow]:
    """Return the rows with more tokens than the limit. Tokens of a chat template do not count."""
    # A token has at least one byte of the text.
    rows = [row for row in rows if len(_text(row).encode()) > limit]
    if not rows or not file.is_file():
        return []
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception:  # noqa: BLE001 - the package raises no other class
        # `load_tokenizer` reads the file or explains the error.
        return rows
    tokenizer.no_truncation()
    return [
        row
        for row in rows
        if len(tokenizer.encode(_text(row), add_special_tokens=False).ids) > limit
    ]


def _text(row: PromptRow) -> str:
    if isinstance(row.prompt, str):
        return row.prompt
    contents = (message.get("content") for message in row.prompt)
    return "\n".join(content for content in contents if isinstance(content, str))
