"""Search as a tool: the documents of a small corpus that fit a query best, by BM25. All of it is in
memory.

The corpus is a `.jsonl` file of `{"title": …, "text": …}` (or `{"contents": "title\\ntext"}`, as
Search-R1's). Not here: an index of millions of documents; a tool of yours can ask a server for
that.

Source: Okapi BM25, k1 = 1.5, b = 0.75, with Lucene's inverse document frequency ln(1 + (N − n +
0.5) / (n + 0.5)).
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path

from rlpipe.errors import ConfigError, DataError

_WORD = re.compile(r"\w+")
_K1 = 1.5
_B = 0.75


class Retrieval:
    """The tool: called with a query, it answers the best documents, one a line, as `title:
    text`."""

    def __init__(self, corpus: str, topk: int = 3) -> None:
        """Raises: ConfigError if the file cannot be read; DataError naming a line that is no
        document."""
        self.topk = topk
        self.documents = _read(Path(corpus))
        words = [Counter(_words(f"{title} {text}")) for title, text in self.documents]
        self._lengths = [sum(counts.values()) for counts in words]
        self._mean = sum(self._lengths) / len(words)
        self._postings: dict[str, list[tuple[int, int]]] = {}
        for number, counts in enumerate(words):
            for word, count in counts.items():
                self._postings.setdefault(word, []).append((number, count))

    def __call__(self, query: str) -> str:
        """`nothing found` if no word of the query is in the corpus."""
        found = [self.documents[number] for number, _ in self.search(query)]
        return (
            "\n".join(f"{title}: {text}" if title else text for title, text in found)
            or "nothing found"
        )

    def search(self, query: str) -> list[tuple[int, float]]:
        """(document, score) of the best `topk`, best first; equal scores in the corpus's order."""
        scores: dict[int, float] = {}
        for word in set(_words(query)):
            postings = self._postings.get(word, [])
            rarity = math.log(
                1 + (len(self.documents) - len(postings) + 0.5) / (len(postings) + 0.5)
            )
            for number, count in postings:
                length = 1 - _B + _B * self._lengths[number] / self._mean
                scores[number] = scores.get(number, 0.0) + rarity * count * (_K1 + 1) / (
                    count + _K1 * length
                )
        return sorted(scores.items(), key=lambda item: (-item[1], item[0]))[: self.topk]


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _read(path: Path) -> list[tuple[str, str]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        do = "a relative path counts from the folder the run is started in"
        raise ConfigError(
            "the corpus cannot be read",
            where="rollout.tools (corpus)",
            found=f"{path}: {error}",
            do=do,
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
