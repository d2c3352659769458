"""Functions of slime's reward modules, under slime's names (rlpipe.rewards.slime_verifiers)."""

from __future__ import annotations

import importlib
from argparse import Namespace
from pathlib import Path

import pytest

from rlpipe.errors import DataError
from rlpipe.slime.modules import provide
from rlpipe.types import Sample


@pytest.fixture(scope="module")
def hub():
    provide()
    return importlib.import_module("slime.rollout.rm_hub")


def arguments(**values: object) -> Namespace:
    return Namespace(**{"custom_rm_path": None, "rm_type": "math", "rm_url": None, **values})


def test_functions_are_importable_from_slimes_modules(hub):
    math = importlib.import_module("slime.rollout.rm_hub.math_utils")
    dapo = importlib.import_module("slime.rollout.rm_hub.math_dapo_utils")
    assert math.extract_answer is hub.extract_boxed_answer
    assert dapo.compute_score("so\nAnswer: 42", "42")["acc"] is True
    with pytest.raises(ImportError):
        exec("from slime.rollout.rm_hub import unknown_function", {})


@pytest.mark.parametrize(
    ("solution", "label", "expected"),
    [
        (r"first \boxed{1}, so \boxed{\frac{1}{2}}", "0.5", True),
        (r"\boxed{3}", "4", False),
        ("no box: 4", "4", False),
        ("", "4", False),
    ],
)
def test_an_answer_in_a_box_is_graded(hub, solution: str, label: str, expected: bool):
    assert hub.grade_answer_verl(solution, label) is expected


def test_boxes_are_extracted_with_nested_braces(hub):
    text = r"\boxed{1} and \boxed{\frac{1}{2}}"
    assert hub.last_boxed_only_string(text) == r"\boxed{\frac{1}{2}}"
    assert hub.remove_boxed(r"\boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert hub.last_boxed_only_string(r"\boxed{1") is None


def test_scores_of_dapo_name_the_prediction(hub):
    assert hub.compute_score("Answer: 42", "42") == {"score": 1.0, "acc": True, "pred": "42"}
    assert hub.compute_score("Answer: 41", "42") == {"score": -1.0, "acc": False, "pred": "41"}
    assert hub.compute_score("41", "42")["pred"] == "[INVALID]"
    assert hub.compute_score(r"\boxed{42}", "42", strict_box_verify=True)["acc"]


def test_other_rules_return_slimes_values(hub):
    assert hub.f1_score("the red house", "a red car") == (0.5, 0.5, 0.5)
    assert hub.compute_gpqa_reward("The answer is (B).", 1) == 1.0
    assert hub.get_deepscaler_rule_based_reward(r"</think>\boxed{2}", 2) == 1
    assert hub.get_deepscaler_rule_based_reward(r"\boxed{2}", "2") == 0


async def test_a_sample_is_graded_by_its_row_its_function_or_the_run(hub, tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "async def one(args, sample):\n    return 7\n\n"
        "async def many(args, samples):\n    return [len(samples)] * len(samples)\n"
    )
    sample = Sample(response=r"\boxed{2}", label="2")
    assert await hub.async_rm(arguments(), sample) == 1.0
    assert await hub.async_rm(arguments(custom_rm_path=f"{tmp_path}/mine.py:one"), sample) == 7
    sample.metadata["rm_type"] = "boxed_f1"
    assert await hub.batched_async_rm(arguments(), [sample, sample]) == [1.0, 1.0]
    many = arguments(custom_rm_path=f"{tmp_path}/mine.py:many")
    assert await hub.batched_async_rm(many, [sample, sample]) == [2, 2]
    with pytest.raises(DataError):
        await hub.async_rm(arguments(rm_type="unknown"), Sample())
    with pytest.raises(NotImplementedError):
        await hub.async_rm(arguments(rm_type=""), Sample())
