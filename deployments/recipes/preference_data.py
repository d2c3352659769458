"""Write the preference rows of the recipes `dpo` and `reward_model`.

    python -m deployments.recipes.preference_data     # writes deployments/recipes/preferences/

A row asks to sort letters. The chosen response has them in order, the rejected one shuffled.
Held-out rows have other letters than the rows for training.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

FOLDER = Path(__file__).with_name("preferences")
SIZES = {"train": 2048, "heldout": 128}
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def make_rows(num_rows: int, seed: int = 0) -> list[dict[str, str]]:
    """Return rows with different prompts; `seed` alone decides them."""
    source = random.Random(seed)
    rows: dict[str, dict[str, str]] = {}
    while len(rows) < num_rows:
        letters = source.sample(LETTERS, source.randint(4, 7))
        prompt, rejected = "".join(letters), "".join(source.sample(letters, len(letters)))
        chosen = "".join(sorted(letters))
        if chosen != rejected:
            row = {"prompt": f"sort {prompt}: ", "chosen": chosen, "rejected": rejected}
            rows.setdefault(chosen, row)
    return list(rows.values())


def main() -> None:
    """Write one file for training and one of held-out rows."""
    rows = make_rows(sum(SIZES.values()))
    FOLDER.mkdir(exist_ok=True)
    for name, size in SIZES.items():
        part, rows = rows[:size], rows[size:]
        lines = [json.dumps(row) + "\n" for row in part]
        (FOLDER / f"{name}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main()
