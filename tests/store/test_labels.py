"""Labels that are objects, in plans and rows of text (rlpipe.store.labels)."""

from __future__ import annotations

import pytest

from rlpipe.data.prompts import PromptRow, _label
from rlpipe.errors import DataError
from rlpipe.rewards.rules import named_rule
from rlpipe.rollout.generate import planned_sample
from rlpipe.store.labels import label_text, label_value
from rlpipe.store.parquet.rows import samples_to_table, table_to_samples
from rlpipe.types import PlannedGroup, Sample, Status

OBJECT = {"ground_truth": {"target": ["é", "2"]}, "style": "rule"}


@pytest.mark.parametrize(
    "label", [OBJECT, ["a", 1], {}, [], None, "", "text", '{"a": 1}', "json:x"]
)
def test_a_label_is_the_same_after_it_was_stored(label):
    assert label_value(label_text(label)) == label
    row = Sample(group_id="g", prompt="p", prompt_ids=[1], label=label, status=Status.FAILED)
    row.rollout_log_probs = []
    assert table_to_samples(samples_to_table([row], 0))[0].label == label


def test_text_labels_are_stored_unchanged():
    assert label_text('{"a": 1}') == '{"a": 1}' and label_text("7") == "7"
    with pytest.raises(ValueError, match="begins with 'json:'"):
        label_text('json:{"a":1}')
    with pytest.raises(DataError, match="the label cannot be written"):
        _label('json:{"a":1}', "row 1")
    with pytest.raises(DataError, match="the label cannot be written"):
        _label({"a": float("nan")}, "row 1")


def test_functions_get_the_object_of_the_plan():
    group = PlannedGroup(
        group_id="g", prompt="p", prompt_ids=(1,), label=label_text(OBJECT), seeds=(0,)
    )
    assert planned_sample(group, 0).label == OBJECT
    assert PromptRow("p", OBJECT).label == OBJECT


@pytest.mark.parametrize("rule", ["dapo", "gpqa", "f1", "math", "boxed_f1"])
def test_named_rewards_refuse_an_object(rule):
    with pytest.raises(DataError, match="the label is not text"):
        named_rule(rule)(Sample(response="\\boxed{1}", label=OBJECT))
