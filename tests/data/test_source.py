"""Plans: the same state gives the same plan, and no row is lost or doubled over epochs and the buffer."""

from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from rlpipe.config.data import DataConfig, EvalDataset, FilePrompts
from rlpipe.config.rollout import RolloutConfig
from rlpipe.data.prompts import PromptRow
from rlpipe.data.source import DataSource, evaluation_plan, sample_seed
from rlpipe.errors import DataError
from rlpipe.types import BufferedGroup, DataState

FILE = FilePrompts(type="file", paths=("x.jsonl",))


class Letters:
    """A tokenizer that has what plain prompts need: a number for each character."""

    eos_token_id = 0
    name_or_path = "letters"

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        return [ord(letter) for letter in text]


LETTERS = cast(PreTrainedTokenizerBase, Letters())


def rollout(**keys):
    return RolloutConfig(**keys)


def rows(count):
    return [PromptRow(f"p{number}", f"a{number}", {"n": number}, f"x.jsonl:{number + 1}") for number in range(count)]


def source(count=5, batch=2, n=3, branch="run", shuffle=True, seed=1, **keys):
    data = DataConfig(prompts=FILE, rollout_shuffle=shuffle, rollout_seed=seed)
    config = rollout(rollout_batch_size=batch, n_samples_per_prompt=n, **keys)
    return DataSource(rows(count), LETTERS, data, config, branch)


def buffer(*group_ids, **keys):
    return tuple(BufferedGroup(group_id=group_id, plan="p", **keys) for group_id in group_ids)


def drawn(source, num_plans):
    state, prompts = DataState(), []
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


@given(count=st.integers(1, 9), batch=st.integers(1, 20), plans=st.integers(1, 6), shuffle=st.booleans())
def test_every_epoch_draws_every_row_once(count, batch, plans, shuffle):
    prompts, state = drawn(source(count, batch, shuffle=shuffle), plans)
    assert state.draws == len(prompts) == plans * batch == state.epoch * count + state.offset
    for start in range(0, len(prompts), count):
        epoch = prompts[start : start + count]
        assert len(set(epoch)) == len(epoch)
        if not shuffle:
            assert epoch == [f"p{number}" for number in range(len(epoch))]


def test_batches_of_other_sizes_draw_the_same_order():
    assert drawn(source(7, 1), 21)[0] == drawn(source(7, 3), 7)[0] == drawn(source(7, 21), 1)[0]


def test_epochs_and_seeds_shuffle_differently():
    prompts, _ = drawn(source(30, 30), 2)
    assert prompts[:30] != prompts[30:]
    assert prompts != drawn(source(30, 30, seed=2), 2)[0]
    assert prompts[:5] == ["p4", "p24", "p27", "p9", "p0"]


def test_seeds_are_of_the_sample_and_differ():
    plan = source(5, 4).plan(0, DataState())
    seeds = [seed for group in plan.groups for seed in group.seeds]
    assert len(set(seeds)) == 12
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert plan.groups[2].seeds[1] == sample_seed(1, "run:00000002", 1)
    assert sample_seed(42, "run:00000000", 0) == 889526084


def test_the_oldest_of_the_buffer_go_first():
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


def test_part_r_plus_one_follows_part_r_and_asks_for_as_many_groups_again():
    over = source(batch=2, over_sampling_batch_size=3)
    first = over.plan(0, DataState())
    second = over.plan(0, first.after, part=1)
    assert [group.group_id for group in (*first.groups, *second.groups)] == [f"run:{draw:08d}" for draw in range(6)]
    assert (first.part, second.part, second.before) == (0, 1, first.after)


@pytest.mark.parametrize(
    ("keys", "masking", "goes_on"),
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
def test_a_buffered_group_goes_on_from_its_rows_unless_they_are_too_old_to_be_trained(keys, masking, goes_on):
    data, config = DataConfig(prompts=FILE), rollout(rollout_batch_size=1, mask_offpolicy_in_partial_rollout=masking)
    bounded = DataSource(rows(5), LETTERS, data, config, "run", async_buffer_size=2)
    earlier = bounded.plan(0, DataState())
    plan = bounded.plan(9, DataState(buffer=buffer("run:00000000", **keys), draws=1), buffered=earlier.groups)
    assert plan.groups[0] == earlier.groups[0].model_copy(update={"earlier": "r" if goes_on else None})


def test_a_buffered_group_that_is_not_given_is_named():
    with pytest.raises(DataError, match=r"run/4[\s\S]*run:00000003"):
        source().plan(4, DataState(buffer=buffer("run:00000003")))


def test_a_state_of_other_rows_is_refused():
    with pytest.raises(DataError, match=r"offset 5 in epoch 0[\s\S]*less than the 5 rows"):
        source(5).plan(0, DataState(offset=5, draws=5))


def test_no_rows_are_refused():
    with pytest.raises(DataError, match="no rows"):
        source(0)


def test_check_finds_a_bad_row_before_it_is_drawn(characters):
    data = DataConfig(prompts=FILE, rollout_max_prompt_len=2)
    good = DataSource(rows(10), characters, data, rollout(rollout_batch_size=1), "run")
    good.check()
    with pytest.raises(DataError, match=r"x.jsonl:11: the prompt is too long"):
        DataSource(rows(11), characters, data, rollout(rollout_batch_size=1), "run").check()


def test_supervised_rows_bring_their_answers():
    group = source(n=1, type="dataset").plan(0, DataState()).groups[0]
    assert group.response_ids == (*map(ord, group.label or ""), 0)
    assert group.loss_mask == (1,) * len(group.response_ids)


def test_an_evaluation_plan_takes_every_row_once_with_the_same_seeds_each_time(characters):
    dataset = EvalDataset(name="heldout", prompts=FILE, n_samples_per_eval_prompt=2)
    data, supervised = DataConfig(prompts=FILE), rollout(type="dataset", rollout_batch_size=1)
    first = evaluation_plan(dataset, rows(4), characters, data, supervised, branch="a", iteration=0)
    later = evaluation_plan(dataset, rows(4), characters, data, supervised, branch="b", iteration=9)
    assert first.groups == later.groups
    assert [group.prompt for group in first.groups] == ["p0", "p1", "p2", "p3"]
    assert first.groups[1].group_id == "eval/heldout:00000001"
    assert first.groups[1].response_ids == ()
    assert len(first.groups[1].seeds) == 2
