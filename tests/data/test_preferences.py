"""Preference rows: their forms, their tokens and their plan."""

from __future__ import annotations

import json

import pytest

from rlpipe.config.data import DataConfig, FilePrompts
from rlpipe.config.rollout import RolloutConfig
from rlpipe.data.preferences import preference
from rlpipe.data.prompts import load_prompts
from rlpipe.data.source import DataSource
from rlpipe.errors import DataError
from rlpipe.store.records import seal
from rlpipe.types import DataState

USER = {"role": "user", "content": "2 + 2?"}
RIGHT = {"role": "assistant", "content": "4"}
WRONG = {"role": "assistant", "content": "5"}


def source(tmp_path, tokenizer, row, *, data=None, **rollout):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    prompts = FilePrompts(
        type="file", paths=(str(path),), label_key="chosen", rejected_key="rejected"
    )
    config = RolloutConfig(type="dataset", rollout_batch_size=1, **rollout)
    return DataSource(
        load_prompts(prompts), tokenizer, DataConfig(prompts=prompts, **data or {}), config, "b"
    )


def only_group(*arguments, **settings):
    return source(*arguments, **settings).plan(0, DataState()).groups[0]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (("2 + 2 =", " 4", " 5"), ("2 + 2 =", " 4", " 5")),
        ((None, "Human: 2? Assistant: 4", "Human: 2? Assistant: 5"), None),
        (([USER], [RIGHT], [WRONG]), ([USER], "4", "5")),
        ((None, [USER, RIGHT], [USER, WRONG]), ([USER], "4", "5")),
        ((None, [USER, RIGHT], [USER, RIGHT]), ([USER], "4", "4")),
        (("2 + 2?", [USER, RIGHT], [USER, WRONG]), ("2 + 2?", "4", "5")),
        ((None, [USER, RIGHT, USER, RIGHT], [USER, RIGHT, USER, WRONG]), None),
    ],
)
def test_the_forms_of_trl_are_read(row, expected):
    implicit = {
        str: ("Human: 2? Assistant:", " 4", " 5"),
        list: ([USER, RIGHT, USER], "4", "5"),
    }
    assert preference(*row, where="x") == (expected or implicit[type(row[1])])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (("p", "a", [RIGHT]), "str and list"),
        ((None, "yes", "no"), "no common beginning"),
        ((None, [RIGHT], [WRONG]), "no common beginning"),
        (([USER], [RIGHT, USER], [WRONG]), "not one message of the assistant"),
        (([USER], [{"role": "assistant", "content": None}], [WRONG]), "not one message"),
        ((None, [], []), "no common beginning"),
    ],
)
def test_other_forms_are_refused_by_name(row, message):
    with pytest.raises(DataError, match=message) as caught:
        preference(*row, where="rows.jsonl:7")
    assert caught.value.where == "rows.jsonl:7"


def test_both_responses_of_a_text_row_follow_the_same_prompt(tmp_path, characters):
    row = {"prompt": "ab", "chosen": "cd", "rejected": "e"}
    group = only_group(tmp_path, characters, row)
    eos = characters.eos_token_id
    assert group.prompt_ids == tuple(characters.encode("ab"))
    assert group.response_ids == (*characters.encode("cd"), eos)
    assert group.rejected_ids == (*characters.encode("e"), eos)
    assert group.loss_mask == (1, 1, 1) and group.label == "cd"


def test_a_chat_row_is_rendered_once_and_keeps_the_messages_of_its_prompt(tmp_path, chat):
    row = {"chosen": [USER, RIGHT], "rejected": [USER, WRONG]}
    group = only_group(tmp_path, chat, row, data={"apply_chat_template": True})
    text = "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    assert chat.decode(group.prompt_ids) == text and group.prompt == [USER]
    ids = (group.response_ids, group.rejected_ids)
    assert [chat.decode(one) for one in ids] == ["4<|im_end|>", "5<|im_end|>"]


def test_a_limit_of_the_context_cuts_the_prompt_of_both_responses_alike(tmp_path, characters):
    row = {"prompt": "abcdefgh", "chosen": "x", "rejected": "uvwxyz"}
    data = {"overlong_prompts": "truncate_left"}
    group = only_group(tmp_path, characters, row, data=data, rollout_max_context_len=12)
    assert characters.decode(group.prompt_ids) == group.prompt == "defgh"
    error = {"overlong_prompts": "error"}
    with pytest.raises(DataError, match="the prompt is too long"):
        source(tmp_path, characters, row, data=error, rollout_max_context_len=12).check()


def test_a_missing_or_too_long_rejected_response_is_refused(tmp_path, characters):
    with pytest.raises(DataError, match="no 'rejected'"):
        source(tmp_path, characters, {"prompt": "ab", "chosen": "cd"})
    row = {"prompt": "ab", "chosen": "c", "rejected": "defgh"}
    with pytest.raises(DataError, match="the answer is too long"):
        source(tmp_path, characters, row, rollout_max_response_len=4).check()


def test_both_missing_columns_of_a_pair_are_one_error(tmp_path, characters):
    row = {"prompt": "ab", "good": "c", "bad": "d"}
    with pytest.raises(DataError) as caught:
        source(tmp_path, characters, row)
    text = str(caught.value)
    assert "no 'chosen' and no 'rejected'" in text and "columns 'bad', 'good', 'prompt'" in text
    assert "data.prompts.label_key and data.prompts.rejected_key" in text


def test_plans_without_preference_rows_have_the_bytes_of_before(tmp_path, characters):
    row = {"prompt": "ab", "chosen": "cd", "rejected": "e"}
    plan = source(tmp_path, characters, row).plan(0, DataState())
    (group,) = plan.groups
    plain = plan.model_copy(update={"groups": (group.model_copy(update={"rejected_ids": ()}),)})
    assert b"rejected_ids" in seal(plan, "x")
    assert b"rejected_ids" not in seal(plain, "x")
