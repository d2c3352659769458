"""Search a small corpus with BM25, as a tool of the policy.

Entry point: `Retrieval`. The whole corpus is in memory. For millions of documents, write a tool
that calls a search server. The corpus is a `.jsonl` file of `{"title": …, "text": …}`, or of
`{"contents": "title\\ntext"}` as Search-R1 has it.

Source: Okapi BM25, k1 = 1.5, b = 0.75, with Lucene's inverse document frequency
ln(1 + (N − n + 0.5) / (n + 0.5)).
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path

from rlpipe.errors import ConfigError, DataError
from rlpipe.system.project import in_project

_WORD = re.compile(r"\w+")
_K1 = 1.5
_B = 0.75


class Retrieval:
    """The tool: takes a query and returns the best documents, one per line, as `title: text`."""

    def __init__(self, corpus: str, topk: int = 3) -> None:
        """Read and index the corpus. Raises: ConfigError if the file cannot be read; DataError with
        the first invalid line."""
        self.topk = topk
        self.documents = _read(Path(in_project(corpus)))
        word_counts = [Counter(_words(f"{title} {text}")) for title, text in self.documents]
        self._lengths = [sum(counts.values()) for counts in word_counts]
        self._mean_length = sum(self._lengths) / len(word_counts)
        self._postings: dict[str, list[tuple[int, int]]] = {}
        for number, counts in enumerate(word_counts):
            for word, count in counts.items():
                self._postings.setdefault(word, []).append((number, count))

    def __call__(self, query: str) -> str:
        """Return `nothing found` if the corpus has no word of the query."""
        documents = [self.documents[number] for number, _ in self.search(query)]
        lines = [f"{title}: {text}" if title else text for title, text in documents]
        return "\n".join(lines) or "nothing found"

    def search(self, query: str, topk: int | None = None) -> list[tuple[int, float]]:
        """Return (document, score) of the best documents, best first. Documents of equal score keep
        the corpus's order. `topk`: largest number of documents; None: that of the tool."""
        scores: dict[int, float] = {}
        for word in set(_words(query)):
            postings = self._postings.get(word, [])
            num_without = len(self.documents) - len(postings)
            inverse_frequency = math.log(1 + (num_without + 0.5) / (len(postings) + 0.5))
            for number, count in postings:
                length = 1 - _B + _B * self._lengths[number] / self._mean_length
                weight = inverse_frequency * count * (_K1 + 1) / (count + _K1 * length)
                scores[number] = scores.get(number, 0.0) + weight
        return sorted(scores.items(), key=lambda item: (-item[1], item[0]))[: topk or self.topk]


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _read(path: Path) -> list[tuple[str, str]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "the corpus cannot be read",
            where="rollout.tools (corpus)",
            found=f"{path}: {error}",
            do="a relative path counts from the folder in which the run is started",
        ) from error
    documents = [
        _document(line, f"{path}:{number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not documents:
        raise DataError(
            "the corpus is empty", where=str(path), found="0 documents", expected="at least one"
        )
    return documents


def _document(line: str, where: str) -> tuple[str, str]:
    """Return (title, text) of a line."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError("the line is not JSON", where=where, found=error) from error
    if isinstance(content, dict) and isinstance(content.get("contents"), str):
        title, _, text = content["contents"].partition("\n")
        return title.strip('"'), text
    if not isinstance(content, dict) or not isinstance(content.get("text"), str):
        raise DataError(
            "not a document", where=where, found=line[:80], expected='{"title": ..., "text": ...}'
        )
    return str(content.get("title", "")), content["text"]
