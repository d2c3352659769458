"""`store`: MB/s and bytes a token of a rollout's shards, written and read as the stages do.

A shard is written like the generator's (`ShardWriter`: columns, encoding, checksum, one put) and
read like the advantage stage's (checksum, decoding, samples as objects). The baseline writes and
reads as many random bytes as one object of the same store. MB are of the encoded file, so the ratio
is the cost of the format over that of the store. It is measured on local disk, and on the run's
store if that is elsewhere (`store.root=s3://bucket/prefix`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import numpy as np

from rlpipe.store.objects.files import Files
from rlpipe.store.parquet.rows import table_to_samples
from rlpipe.store.parquet.shards import ShardWriter, read_rows
from rlpipe.types import FileRecord, Sample, Status
from tools.bench.bench import Bench
from tools.bench.measures import Row, alternate
from tools.bench.shapes import Shape, random_text

WORDS = 5000
ZIPF = 1.2


def measure(bench: Bench) -> list[Row]:
    """Return the rows of `store`."""
    roots = [str(bench.home / "store")]
    if bench.config.store.root is not None:
        roots.append(bench.config.store.root)
    return [row for root in roots for row in of_root(bench, root)]


def of_root(bench: Bench, root: str) -> list[Row]:
    """Measure one root, below a new folder that is removed afterwards."""
    say = bench.progress("store")
    files = Files(root)
    folder = f"bench/{uuid4().hex[:12]}"
    groups = made_groups(bench.shape)
    tokens = sum(
        len(sample.prompt_ids) + len(sample.response_ids) for group in groups for sample in group
    )
    written: list[FileRecord] = []
    plain: list[str] = []

    def write() -> float:
        writer = ShardWriter(files, f"{folder}/shards", 0)
        seconds, record = clocked(lambda: writer.write(groups))
        written.append(record)
        return seconds

    def write_plain() -> float:
        data = np.random.default_rng().bytes(written[-1].size_bytes)
        path = f"{folder}/plain/{len(plain)}"
        plain.append(path)
        return clocked(lambda: files.create(path, data))[0]

    def read() -> float:
        return clocked(lambda: table_to_samples(read_rows(files, [written[-1]])))[0]

    def read_plain() -> float:
        return clocked(lambda: files.read(plain[-1]))[0]

    try:
        say(f"first round, not counted: {write():.2f} s, plain bytes {write_plain():.2f} s")
        limits = {"repeats": bench.repeats, "say": say}
        writes = alternate(
            {"ours": write, "baseline": write_plain},
            until_s=time.monotonic() + bench.seconds / 2,
            **limits,
        )
        reads = alternate(
            {"ours": read, "baseline": read_plain},
            until_s=time.monotonic() + bench.seconds / 2,
            **limits,
        )
    finally:
        for path in [*(record.path for record in written), *plain]:
            files.delete(path)
    size = written[0].size_bytes
    kind = root.partition("://")[0] if "://" in root else "local disk"
    note = f"{kind}, {len(groups)} × {len(groups[0])} samples, {tokens:,} tokens"
    return [
        _rate("write", writes, size, note),
        _rate("read", reads, size, kind),
        Row(
            "store",
            "size",
            "bytes/token",
            (size / tokens,),
            note="prompt and response, with log-probs and text",
        ),
    ]


def _rate(what: str, seconds: dict[str, list[float]], size_bytes: int, note: str) -> Row:
    ours, baseline = (
        tuple(size_bytes / 1e6 / one for one in seconds[side]) for side in ("ours", "baseline")
    )
    return Row("store", what, "MB/s", ours, baseline, "plain bytes", note)


def clocked(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds and the result of `work`."""
    started_s = time.perf_counter()
    result = work()
    return time.perf_counter() - started_s, result


class _Language:
    """Token ids and text with the skew of words (Zipf), so they compress like text."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self._vocab_size = vocab_size
        self._words = [
            random_text(self.random, int(length)) for length in self.random.integers(1, 9, WORDS)
        ]

    def ids(self, tokens: int) -> list[int]:
        """Return a number of token ids."""
        return ((self.random.zipf(ZIPF, tokens) - 1) % self._vocab_size).tolist()

    def text(self, tokens: int) -> str:
        """Return a number of words; a word with its space is about as long as an English token."""
        return " ".join(self._words[rank % WORDS] for rank in self.random.zipf(ZIPF, tokens) - 1)


def made_groups(shape: Shape, seed: int = 0) -> list[list[Sample]]:
    """Return a rollout of the shape with log-probs of a random policy."""
    language = _Language(shape.vocab_size, seed)
    groups = []
    for number in range(shape.prompts):
        prompt = language.text(shape.prompt_tokens), language.ids(shape.prompt_tokens)
        groups.append(
            [
                _sample(shape, language, f"bench:{number}", index, *prompt)
                for index in range(shape.samples_per_prompt)
            ]
        )
    return groups


def _sample(
    shape: Shape, language: _Language, group: str, index: int, prompt: str, prompt_ids: list[int]
) -> Sample:
    length = shape.response_tokens
    return Sample(
        group_id=group,
        index=index,
        prompt=prompt,
        prompt_ids=prompt_ids,
        label="0",
        seed=int(language.random.integers(2**31)),
        response=language.text(length),
        response_ids=language.ids(length),
        rollout_log_probs=(-language.random.exponential(1.0, length)).astype(np.float32).tolist(),
        weight_versions=[(length, 0)],
        status=Status.TRUNCATED,
        finish_reason="length",
        engine="http://127.0.0.1:15000",
    )
