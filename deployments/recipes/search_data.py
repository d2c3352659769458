"""Corpus, questions and reward of the recipe `search`: invented islands and facts about them.

    python -m deployments.recipes.search_data      # writes search/*.jsonl, always with equal bytes

Held-out questions are about islands that no other question names, so answers cannot be memorised.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rlpipe.types import Sample

FOLDER = Path(__file__).parent / "search"
SYLLABLES = ("ba", "do", "fi", "ga", "ke", "lu", "mo", "na", "pi", "ro", "su", "ta", "ve", "zo")
FACTS = {
    "tree": ("oak", "palm", "pine", "fig", "elm", "ash"),
    "bird": ("owl", "crow", "swan", "tern", "kite", "rail"),
    "fish": ("cod", "eel", "bass", "carp", "hake", "ling"),
}
NUM_ISLANDS = 240
NUM_HELD_OUT = 40


def main() -> None:
    """Write corpus, questions, held-out questions and examples of a search."""
    rng = random.Random(7)
    names = sorted(
        {"".join(rng.choices(SYLLABLES, k=rng.choice((2, 3)))) for _ in range(4 * NUM_ISLANDS)}
    )
    islands = {
        name: {fact: rng.choice(values) for fact, values in FACTS.items()}
        for name in rng.sample(names, NUM_ISLANDS)
    }
    texts = {
        name: ", ".join(f"{fact} {value}" for fact, value in facts.items())
        for name, facts in islands.items()
    }
    _write("corpus", ({"title": name, "text": text} for name, text in texts.items()))
    questions = [
        (name, fact, value) for name, facts in islands.items() for fact, value in facts.items()
    ]
    held_out = questions[: 3 * NUM_HELD_OUT]
    rest = questions[3 * NUM_HELD_OUT :]
    rng.shuffle(rest)
    _write(
        "heldout",
        ({"prompt": f"{fact} of {name}? ", "label": value} for name, fact, value in held_out),
    )
    _write(
        "train", ({"prompt": f"{fact} of {name}? ", "label": value} for name, fact, value in rest)
    )
    examples = (
        (name, fact, f"<search>{name}</search><result>{name}: {texts[name]}</result>{value}")
        for name, fact, value in rest
    )
    _write(
        "examples",
        ({"prompt": f"{fact} of {name}? ", "label": text} for name, fact, text in examples),
    )


def reward(sample: Sample) -> dict[str, float]:
    """Return 1 if the text after the last result is the label. `searched`: 1 if a result exists."""
    _, result, answer = sample.response.rpartition("</result>")
    return {
        "reward": float(bool(result) and answer.strip() == sample.label),
        "searched": float(bool(result)),
    }


def _write(name: str, rows: Iterable[dict[str, Any]]) -> None:
    (FOLDER / f"{name}.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
