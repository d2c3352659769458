"""Plans are pure functions of the state; epochs and buffer neither lose nor repeat rows."""

import json
import random
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from rlpipe.config.data import DataConfig, EvalDataset, FilePrompts, SlimePosition
from rlpipe.config.rollout import RolloutConfig
from rlpipe.data.prompts import PromptRow, load_prompts
from rlpipe.data.source import DataSource, evaluation_plan, sample_seed
from rlpipe.errors import ConfigError, DataError
from rlpipe.types import BufferedGroup, DataState

FILE = FilePrompts(type="file", paths=("x.jsonl",))


class Letters:
    """A tokenizer for plain prompts: the code point of each character."""

    eos_token_id = 0
    name_or_path = "letters"

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        return [ord(letter) for letter in text]

    def decode(self, ids, skip_special_tokens):
        assert not skip_special_tokens
        return "".join(map(chr, ids))


LETTERS = cast(PreTrainedTokenizerBase, Letters())


def rollout(**keys):
    return RolloutConfig(**keys)


def rows(count):
    return [
        PromptRow(f"p{number}", f"a{number}", {"n": number}, f"x.jsonl:{number + 1}")
        for number in range(count)
    ]


def source(count=5, batch=2, n=3, branch="run", shuffle=True, seed=1, **keys):
    data = DataConfig(prompts=FILE, rollout_shuffle=shuffle, rollout_seed=seed)
    config = rollout(rollout_batch_size=batch, n_samples_per_prompt=n, **keys)
    return DataSource(rows(count), LETTERS, data, config, branch)


def buffer(*group_ids, **keys):
    return tuple(BufferedGroup(group_id=group_id, plan="p", **keys) for group_id in group_ids)


def drawn(source, num_plans):
    state = DataState()
    prompts = []
    for iteration in range(num_plans):
        plan = source.plan(iteration, state)
        prompts += [group.prompt for group in plan.groups]
        state = plan.after
    return prompts, state


def test_a_plan_is_a_pure_function_of_the_state():
    state = DataState(epoch=3, offset=4, draws=19)
    plan = source().plan(9, state)
    assert plan == source().plan(9, state)
    assert plan.before == state
    assert [group.group_id for group in plan.groups] == ["run:00000019", "run:00000020"]
    assert plan.after == DataState(epoch=4, offset=1, draws=21)
    group = plan.groups[0]
    prompt = str(group.prompt)
    assert group.prompt_ids == tuple(map(ord, prompt))
    assert group.label == "a" + prompt[1:]
    assert group.metadata == {"n": int(prompt[1:])}


@given(
    count=st.integers(1, 9),
    batch=st.integers(1, 20),
    plans=st.integers(1, 6),
    shuffle=st.booleans(),
)
def test_every_epoch_draws_every_row_once(count, batch, plans, shuffle):
    prompts, state = drawn(source(count, batch, shuffle=shuffle), plans)
    assert state.draws == len(prompts) == plans * batch == state.epoch * count + state.offset
    for start in range(0, len(prompts), count):
        epoch = prompts[start : start + count]
        assert len(set(epoch)) == len(epoch)
        if not shuffle:
            assert epoch == [f"p{number}" for number in range(len(epoch))]


def test_the_batch_size_does_not_change_the_order():
    assert drawn(source(7, 1), 21)[0] == drawn(source(7, 3), 7)[0] == drawn(source(7, 21), 1)[0]


def test_epochs_and_seeds_have_different_orders():
    prompts, _ = drawn(source(30, 30), 2)
    assert prompts[:30] != prompts[30:]
    assert prompts != drawn(source(30, 30, seed=2), 2)[0]
    assert prompts[:5] == ["p4", "p24", "p27", "p9", "p0"]


def continued_from_slime(position, lengths, batch, *, shuffle=True, longest=None, context=None):
    """Return a source that continues slime's run over rows with prompts of these lengths."""
    data = DataConfig(
        prompts=FILE,
        rollout_shuffle=shuffle,
        rollout_seed=3,
        rollout_max_prompt_len=longest,
        overlong_prompts="drop",
        slime_position=position,
    )
    config = rollout(
        rollout_batch_size=batch, n_samples_per_prompt=1, rollout_max_context_len=context
    )
    prompts = [
        PromptRow(chr(97 + number) * length, where=f"x.jsonl:{number + 1}")
        for number, length in enumerate(lengths)
    ]
    return DataSource(prompts, LETTERS, data, config, "run")


@given(
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=9),
    drawn_before=st.integers(0, 30),
    batch=st.integers(1, 5),
    shuffle=st.booleans(),
    longest=st.sampled_from((None, 2, 3)),
)
def test_after_slimes_position_no_prompt_is_left_out_or_repeated(
    lengths, drawn_before, batch, shuffle, longest
):
    kept = [
        chr(97 + number) * length
        for number, length in enumerate(lengths)
        if longest is None or length <= longest
    ]
    if not kept:
        return
    # As slime draws: `Dataset.shuffle` seeds the global generator with seed + epoch.
    order = []
    for epoch in range((drawn_before + 5 * batch) // len(kept) + 1):
        permutation = list(range(len(kept)))
        if shuffle:
            random.seed(3 + epoch)
            random.shuffle(permutation)
        order += [kept[number] for number in permutation]
    epoch, offset = divmod(drawn_before, len(kept))
    position = SlimePosition(epoch=epoch, offset=offset, draws=drawn_before)
    resumed = continued_from_slime(position, lengths, batch, shuffle=shuffle, longest=longest)
    resumed.check()
    prompts, _ = drawn(resumed, 5)
    assert prompts == order[drawn_before : drawn_before + 5 * batch]


def test_a_finished_epoch_of_slime_is_followed_by_the_next():
    end = SlimePosition(epoch=0, offset=4, draws=4)
    next_one = SlimePosition(epoch=1, offset=0, draws=4)
    first = drawn(continued_from_slime(end, [1] * 4, 2), 3)
    assert first == drawn(continued_from_slime(next_one, [1] * 4, 2), 3)


def test_rows_that_only_this_run_drops_keep_slimes_order():
    # slime's limit is that of prompts alone; here a response needs room in the context too.
    position = SlimePosition(epoch=0, offset=1, draws=1)
    lengths = [1, 3, 1, 3, 1]
    every, _ = drawn(continued_from_slime(position, lengths, 4, longest=3), 1)
    short, _ = drawn(continued_from_slime(position, lengths, 1, longest=3, context=3), 2)
    assert [prompt for prompt in every if len(prompt) < 3][:2] == short


@pytest.mark.parametrize("position", [{"offset": 5}, {"offset": 1, "draws": 6}])
def test_a_position_of_slime_in_other_prompts_is_refused(position):
    source = continued_from_slime(SlimePosition(epoch=1, **position), [1] * 4, 2)
    with pytest.raises(DataError, match="belongs to other prompts"):
        source.check()


def test_every_sample_has_its_own_seed():
    plan = source(5, 4).plan(0, DataState())
    seeds = [seed for group in plan.groups for seed in group.seeds]
    assert len(set(seeds)) == 12
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert plan.groups[2].seeds[1] == sample_seed(1, "run:00000002", 1)
    assert sample_seed(42, "run:00000000", 0) == 889526084


def test_a_plan_takes_the_oldest_groups_of_the_buffer_first():
    earlier = source().plan(0, DataState())
    waiting = buffer(*(group.group_id for group in earlier.groups), "run:00000007", "run:00000008")
    state = DataState(epoch=0, offset=2, draws=9, buffer=waiting)
    plan = source(batch=2).plan(4, state, buffered=earlier.groups)
    assert plan.groups == earlier.groups
    assert plan.after == state.model_copy(update={"buffer": buffer("run:00000007", "run:00000008")})
    state = state.model_copy(update={"buffer": waiting[:1]})
    plan = source(batch=2).plan(4, state, buffered=earlier.groups)
    assert [group.group_id for group in plan.groups] == ["run:00000000", "run:00000009"]
    assert plan.after == DataState(epoch=0, offset=3, draws=10)


def test_each_part_continues_from_the_state_after_the_previous_part():
    oversampling = source(batch=2, over_sampling_batch_size=3)
    first = oversampling.plan(0, DataState())
    second = oversampling.plan(0, first.after, part=1)
    assert [group.group_id for group in (*first.groups, *second.groups)] == [
        f"run:{draw:08d}" for draw in range(6)
    ]
    assert (first.part, second.part, second.before) == (0, 1, first.after)


@pytest.mark.parametrize(
    ("keys", "masking", "continues"),
    [
        ({"rows": None}, True, False),
        ({"rows": "r", "oldest": 7}, False, True),
        ({"rows": "r", "oldest": 6}, False, False),
        ({"rows": "r", "oldest": 6}, True, True),
        ({"rows": "r", "oldest": 5, "finished": 7}, True, True),
        ({"rows": "r", "oldest": 5, "finished": 6}, True, False),
        ({"rows": "r", "oldest": 7, "finished": 8}, False, True),
    ],
)
def test_a_buffered_group_continues_from_its_rows_unless_they_are_too_old(keys, masking, continues):
    data = DataConfig(prompts=FILE)
    config = rollout(rollout_batch_size=1, mask_offpolicy_in_partial_rollout=masking)
    bounded = DataSource(rows(5), LETTERS, data, config, "run", async_buffer_size=2)
    earlier = bounded.plan(0, DataState())
    plan = bounded.plan(
        9, DataState(buffer=buffer("run:00000000", **keys), draws=1), buffered=earlier.groups
    )
    assert plan.groups[0] == earlier.groups[0].model_copy(
        update={"earlier": "r" if continues else None}
    )


def test_a_missing_buffered_group_is_named():
    with pytest.raises(DataError, match=r"run/4[\s\S]*run:00000003"):
        source().plan(4, DataState(buffer=buffer("run:00000003")))


def test_a_state_of_other_rows_is_refused():
    with pytest.raises(DataError, match=r"offset 5 in epoch 0[\s\S]*less than the 5 rows"):
        source(5).plan(0, DataState(offset=5, draws=5))


def test_no_rows_are_refused():
    with pytest.raises(DataError, match="no rows"):
        source(0)


def test_check_finds_a_bad_row_before_the_run(characters):
    data = DataConfig(prompts=FILE, rollout_max_prompt_len=2)
    good = DataSource(rows(10), characters, data, rollout(rollout_batch_size=1), "run")
    good.check()
    with pytest.raises(DataError, match=r"x.jsonl:11: the prompt is too long"):
        DataSource(rows(11), characters, data, rollout(rollout_batch_size=1), "run").check()


def test_supervised_rows_have_their_answers_as_responses():
    group = source(n=1, type="dataset").plan(0, DataState()).groups[0]
    assert group.response_ids == (*map(ord, group.label or ""), 0)
    assert group.loss_mask == (1,) * len(group.response_ids)


def test_an_evaluation_plan_has_every_row_once_with_constant_seeds(characters):
    dataset = EvalDataset(name="heldout", prompts=FILE, n_samples_per_eval_prompt=2)
    data = DataConfig(prompts=FILE)
    supervised = rollout(type="dataset", rollout_batch_size=1)
    first, _ = evaluation_plan(
        dataset, rows(4), characters, data, supervised, branch="a", iteration=0
    )
    later, _ = evaluation_plan(
        dataset, rows(4), characters, data, supervised, branch="b", iteration=9
    )
    assert first.groups == later.groups
    assert [group.prompt for group in first.groups] == ["p0", "p1", "p2", "p3"]
    assert first.groups[1].group_id == "eval/heldout:00000001"
    assert first.groups[1].response_ids == ()
    assert len(first.groups[1].seeds) == 2


LONG = (3, 4, 17, 25, 31, 48, 49)
"""Rows of `fifty` whose prompt is over-long."""


@pytest.fixture
def fifty(tmp_path):
    """Write a file of 50 prompts: 7 have 30 characters or more, the others have 3."""
    path = tmp_path / "fifty.jsonl"
    prompts = [
        f"p{number:02}" + ("x" * (27 + number) if number in LONG else "") for number in range(50)
    ]
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return FilePrompts(type="file", paths=(str(path),))


def file_source(prompts, *, streaming=False, batch=6, shuffle=True, **keys):
    keys = {"rollout_max_prompt_len": 10, "overlong_prompts": "drop", **keys}
    data = DataConfig(prompts=prompts, rollout_shuffle=shuffle, **keys)
    return DataSource(
        load_prompts(prompts, streaming=streaming),
        LETTERS,
        data,
        rollout(rollout_batch_size=batch),
        "run",
    )


@pytest.mark.parametrize("streaming", [False, True])
def test_dropped_rows_are_named_and_the_others_drawn_once_an_epoch_after_a_resume(fifty, streaming):
    path = fifty.paths[0]
    first = file_source(fifty, streaming=streaming)
    first.check()
    assert [(row.where, row.tokens) for row in first.overlong] == [
        (f"{path}:{n + 1}", 30 + n) for n in LONG
    ]
    assert {(row.limit, row.setting) for row in first.overlong} == {
        (10, "data.rollout_max_prompt_len")
    }
    assert len(first) == 43
    state = DataState()
    prompts = []
    for iteration in range(15):
        # From iteration 4 on, a new source stands for a resumed process.
        source = first if iteration < 4 else file_source(fifty, streaming=streaming)
        plan = source.plan(iteration, DataState.model_validate_json(state.model_dump_json()))
        prompts += [group.prompt for group in plan.groups]
        state = plan.after
    assert (state.draws, state.epoch, state.offset) == (90, 2, 4)
    kept = {f"p{n:02}" for n in range(50) if n not in LONG}
    for epoch in (prompts[:43], prompts[43:86]):
        assert len(set(epoch)) == 43 and set(epoch) == kept
    assert prompts[:43] != prompts[43:86]


def test_over_long_prompts_are_refused_by_default(fifty):
    with pytest.raises(
        DataError, match=r"fifty\.jsonl:4: the prompt is too long[\s\S]*33 tokens[\s\S]*at most 10"
    ):
        file_source(fifty, overlong_prompts="error").check()


def test_cut_prompts_are_named_and_drawn_like_the_others(fifty):
    source = file_source(fifty, overlong_prompts="truncate_left", batch=50, shuffle=False)
    source.check()
    assert (len(source), len(source.overlong)) == (50, 7)
    groups = source.plan(0, DataState()).groups
    assert [len(group.prompt_ids) for group in groups] == [
        10 if n in LONG else 3 for n in range(50)
    ]
    assert groups[3].prompt == "x" * 10 and groups[5].prompt == "p05"


@given(limit=st.integers(1, 40), shuffle=st.booleans())
def test_kept_rows_have_the_same_order_as_without_a_limit(limit, shuffle):
    lengths = [1 + (7 * number) % 40 for number in range(40)]
    all_rows = [
        PromptRow(chr(65 + number) * length, where=f"x:{number}")
        for number, length in enumerate(lengths)
    ]

    def order(**keys):
        data = DataConfig(prompts=FILE, rollout_shuffle=shuffle, rollout_seed=1, **keys)
        source_of_rows = DataSource(all_rows, LETTERS, data, rollout(rollout_batch_size=1), "run")
        return drawn(source_of_rows, len(source_of_rows))[0], len(source_of_rows)

    everything, _ = order()
    kept, num_kept = order(rollout_max_prompt_len=limit, overlong_prompts="drop")
    assert kept == [prompt for prompt in everything if len(prompt) <= limit] and num_kept == len(
        kept
    )


def test_a_file_with_only_over_long_prompts_is_refused(fifty):
    with pytest.raises(
        ConfigError,
        match=r"data\.prompts: every prompt is over-long[\s\S]*50 rows[\s\S]*at most 2 ",
    ):
        file_source(fifty, rollout_max_prompt_len=2).check()
    with pytest.raises(ConfigError, match="every prompt is over-long"):
        file_source(fifty, rollout_max_prompt_len=2).plan(0, DataState())


def test_a_row_of_a_user_source_can_be_cut_and_not_dropped():
    def planned(policy):
        data = DataConfig(prompts=None, rollout_max_prompt_len=2, overlong_prompts=policy)
        config = rollout(rollout_batch_size=1, data_source_path="mine.py:Source")
        long_row = PromptRow("long", where="mine.py group 0")
        return DataSource((), LETTERS, data, config, "run").plan(
            0, DataState(), draw=lambda *_: [long_row]
        )

    assert planned("truncate_left").groups[0].prompt == "ng"
    for policy in ("error", "drop"):
        with pytest.raises(DataError, match=r"mine\.py group 0: the prompt is too long"):
            planned(policy)


def test_a_held_out_set_drops_and_cuts_rows_and_the_others_keep_their_ids(fifty):
    def planned(policy: Any, limit: int | None = 10):
        data = DataConfig(prompts=FILE, rollout_max_prompt_len=limit, overlong_prompts=policy)
        dataset = EvalDataset(name="held", prompts=fifty)
        config = rollout(rollout_batch_size=1)
        return evaluation_plan(
            dataset, load_prompts(fifty), LETTERS, data, config, branch="a", iteration=0
        )

    everything = {group.group_id: group for group in planned("error", None)[0].groups}
    plan, overlong = planned("drop")
    assert (len(plan.groups), [row.tokens for row in overlong]) == (43, [30 + n for n in LONG])
    assert all(group == everything[group.group_id] for group in plan.groups)
    plan, overlong = planned("truncate_left")
    assert (
        len(plan.groups),
        len(overlong),
        max(len(group.prompt_ids) for group in plan.groups),
    ) == (50, 7, 10)
    with pytest.raises(ConfigError, match=r"evaluation\.datasets: held: every prompt is over-long"):
        planned("drop", 2)
    with pytest.raises(DataError, match=r"fifty\.jsonl:4"):
        planned("error")
