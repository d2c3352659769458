"""BM25 search against the formula written as loops, and errors of a corpus."""

from __future__ import annotations

import json
import math

import pytest

from rlpipe.errors import ConfigError, DataError
from rlpipe.rollout.retrieval import Retrieval

DOCUMENTS = [
    ("Ada", "first programmer of the engine"),
    ("Babbage", "the engine, the engine"),
    ("Curie", "radium"),
]


def _corpus(tmp_path, lines) -> str:
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(lines))
    return str(path)


def _bm25(query: list[str], number: int) -> float:
    words = [f"{title} {text}".lower().replace(",", "").split() for title, text in DOCUMENTS]
    mean = sum(map(len, words)) / len(words)
    total = 0.0
    for word in query:
        having = sum(word in document for document in words)
        count = words[number].count(word)
        rarity = math.log(1 + (len(words) - having + 0.5) / (having + 0.5))
        total += rarity * count * 2.5 / (count + 1.5 * (0.25 + 0.75 * len(words[number]) / mean))
    return total


def test_the_best_documents_come_first(tmp_path):
    lines = [json.dumps({"title": title, "text": text}) for title, text in DOCUMENTS]
    search = Retrieval(_corpus(tmp_path, lines), topk=2)
    found = search.search("The ENGINE of Ada?")
    assert [number for number, _ in found] == [0, 1]
    for number, score in found:
        assert score == pytest.approx(_bm25(["the", "engine", "of", "ada"], number))
    assert search("radium") == "Curie: radium" and search("gold") == "nothing found"


def test_documents_of_search_r1_are_read(tmp_path):
    assert (
        Retrieval(_corpus(tmp_path, ['{"id": "0", "contents": "\\"Ada\\"\\nwrote notes"}']))(
            "notes"
        )
        == "Ada: wrote notes"
    )


def test_an_invalid_corpus_is_an_error_with_the_line(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        Retrieval(str(tmp_path / "none.jsonl"))
    with pytest.raises(
        DataError, match=r"corpus.jsonl:2.*\n.*not JSON|corpus.jsonl:2: the line is not JSON"
    ):
        Retrieval(_corpus(tmp_path, ['{"text": "a"}', "{"]))
    with pytest.raises(DataError, match="not a document"):
        Retrieval(_corpus(tmp_path, ["[]"]))
    with pytest.raises(DataError, match="empty"):
        Retrieval(_corpus(tmp_path, [""]))
