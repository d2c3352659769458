"""Write the data of the recipes' smoke tests: ten rows each, with the columns of the real data set.

    python -m deployments.recipes.smoke_files      # writes smoke/*, always with equal rows

Questions, documents and names are invented. The answers are tokens of the recipes' scripts
(`scripted_model`), so that responses are right now and then.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

FOLDER = Path(__file__).parent / "smoke"
VOCABULARY = 128
"""Tokens of the scripted student in the recipe `distill`."""
NAMES = ("Bado", "Fike", "Gasu", "Kelu", "Lumo", "Mona", "Naro", "Pita", "Suve", "Tazo")
TREES = ("oak", "palm")
SEARCH_PROMPT = (
    "Answer the question. Think inside <think> and </think>. If you lack knowledge, write a query "
    "inside <search> and </search>; the results follow between <information> and </information>. "
    "Give the answer inside <answer> and </answer>. Question: {question}\n"
)
MATH_PROMPT = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: \\boxed{{$Answer}} where $Answer is the answer to the problem.\n\n{question}"
    '\n\nRemember to put your answer on its own line after "Answer:".'
)


def main() -> None:
    """Write all files."""
    FOLDER.mkdir(exist_ok=True)
    for name, rows in tables().items():
        path = FOLDER / name
        if path.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(list(rows)), path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    write_teacher(FOLDER / "teacher")


def tables() -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each file."""
    pens = [(name, 3 + number % 8) for number, name in enumerate(NAMES)]
    return {
        "gsm8k.parquet": [
            {
                "question": f"{name} has {n} pens and gives {n // 2} away. How many are left?",
                "answer": f"{name} gives {n // 2} of {n}.\n{n} - {n // 2} = {n - n // 2}\n"
                f"#### {n - n // 2}",
            }
            for name, n in pens
        ],
        "dapo_math.jsonl": [
            {
                "prompt": _user(
                    MATH_PROMPT.format(
                        question=f"{name} has {n % 4 + 1} pens and gets 2. How many?"
                    )
                ),
                "label": str(n % 4 + 3),
            }
            for name, n in pens
        ],
        "nq_hotpotqa.parquet": list(_search_rows()),
        "wiki.jsonl": [
            {
                "id": str(number),
                "contents": f'"{island}"\n{island} is an island. Its tree is the {_tree(number)}.',
            }
            for number, island in enumerate(NAMES)
        ],
    }


def write_teacher(directory: Path) -> None:
    """Write a random Qwen3 with other sizes than the student's and the student's tokens."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
    disable_progress_bar()
    model.save_pretrained(directory)


def _search_rows() -> Iterable[dict[str, Any]]:
    for number, island in enumerate(NAMES):
        question = f"what is the tree of {island}?"
        answers = [_tree(number)]
        yield {
            "id": f"train_{number}",
            "question": question,
            "golden_answers": answers,
            "data_source": "nq",
            "prompt": _user(SEARCH_PROMPT.format(question=question)),
            "ability": "fact-reasoning",
            "reward_model": {"style": "rule", "ground_truth": {"target": answers}},
            "extra_info": {"index": number, "split": "train"},
        }


def _tree(number: int) -> str:
    return TREES[number % len(TREES)]


def _user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


if __name__ == "__main__":
    main()
