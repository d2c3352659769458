"""`store`: MB/s and bytes a token of the shards of a rollout, written and read as the stages do it.

A shard is written as the generator does it (`ShardWriter`: columns, encoding, checksum, one put)
and read back as the advantage stage does it (checksum, decoding, samples as objects). The baseline
writes and reads the same number of random bytes as one object of the same store. MB are of the
encoded file, so the ratio says what the form costs beside the store itself. It is measured on local
disk, and where the run's store is elsewhere (`store.root=s3://bucket/prefix`), there too.
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
    """The rows of `store`."""
    roots = [str(bench.home / "store")]
    if bench.config.store.root is not None:
        roots.append(bench.config.store.root)
    return [row for root in roots for row in of_root(bench, root)]


def of_root(bench: Bench, root: str) -> list[Row]:
    """Write and read in turns, below a folder of our own that is removed afterwards."""
    say = bench.says("store")
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
        say(f"the first, not counted: {write():.2f} s, of plain bytes {write_plain():.2f} s")
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
    """Seconds, and the answer."""
    begun_s = time.perf_counter()
    answer = work()
    return time.perf_counter() - begun_s, answer


class _Language:
    """Token ids and text as skewed as words are (Zipf), so that they compress as such do."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self._vocab_size = vocab_size
        self._words = [
            random_text(self.random, int(length)) for length in self.random.integers(1, 9, WORDS)
        ]

    def ids(self, tokens: int) -> list[int]:
        """So many token ids."""
        return ((self.random.zipf(ZIPF, tokens) - 1) % self._vocab_size).tolist()

    def text(self, tokens: int) -> str:
        """So many words: a word with its space is about as long as a token of English."""
        return " ".join(self._words[rank % WORDS] for rank in self.random.zipf(ZIPF, tokens) - 1)


def made_groups(shape: Shape, seed: int = 0) -> list[list[Sample]]:
    """A rollout of the shape as the generator hands it on, with log-probs of a random policy."""
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
