"""A curriculum draws rows by source and difficulty, as a function of the stored state."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpipe.config.data import DataConfig, FilePrompts
from rlpipe.config.rollout import RolloutConfig
from rlpipe.data.prompts import PromptRow
from rlpipe.data.source import DataSource
from rlpipe.errors import ConfigError, DataError
from rlpipe.store.objects.files import Files
from rlpipe.store.records import seal
from rlpipe.store.row_states import StoredRowStates
from rlpipe.types import DataState, Plan
from tests.data.test_source import LETTERS, source

FILES = FilePrompts(type="file", paths=("sets/a.jsonl", "sets/b.jsonl"))
EVEN = [{"from_iteration": 0, "weights": {"a": 1, "b": 1}}]


@pytest.fixture
def stored(tmp_path: Path) -> StoredRowStates:
    return StoredRowStates(Files(tmp_path))


def rows_of(**counts: int) -> list[PromptRow]:
    return [
        PromptRow(f"{name}{number}", metadata={"set": {"name": name}}, where=f"sets/{name}.jsonl:1")
        for name, count in counts.items()
        for number in range(count)
    ]


def curriculum(
    stored: StoredRowStates,
    rows: list[PromptRow],
    batch: int = 4,
    lag: int = 0,
    shuffle: bool = True,
    longest: int | None = None,
    **keys: object,
) -> DataSource:
    data = DataConfig.model_validate(
        {
            "prompts": FILES,
            "rollout_seed": 1,
            "rollout_shuffle": shuffle,
            "rollout_max_prompt_len": longest,
            "overlong_prompts": "drop",
            "curriculum": keys,
        }
    )
    rollout = RolloutConfig(rollout_batch_size=batch, n_samples_per_prompt=4)
    return DataSource(rows, LETTERS, data, rollout, "run", async_buffer_size=lag, row_states=stored)


def plans(source: DataSource, count: int, visits=None, state: DataState | None = None, first=0):
    """Return plans of successive iterations, each from the state after the one before."""
    made: list[Plan] = []
    state = state or DataState()
    for iteration in range(first, first + count):
        made.append(source.plan(iteration, state, visits=visits))
        source.store_row_states(made[-1])
        state = made[-1].after
    return made


def drawn_rows(made: list[Plan]) -> list[int]:
    return [group.row[0] for plan in made for group in plan.groups if group.row]


def counts(made: list[Plan], entry: int) -> Counter:
    return Counter(group.row[entry] for plan in made for group in plan.groups if group.row)


def none_visited(_: int) -> dict[int, tuple[int, int]]:
    return {}


def test_a_plan_without_a_curriculum_has_the_bytes_of_earlier_plans():
    plan = source().plan(9, DataState(epoch=3, offset=4, draws=19))
    digest = hashlib.sha256(seal(plan, "plan")).hexdigest()
    assert digest == "bdc4df0a92d47b5901fb79d71db0099d336e4ef72b56b4274afc70b6ac50ee87"


def test_rounds_of_one_pool_are_epochs_with_an_order_of_their_own(stored):
    weights = [{"from_iteration": 0, "weights": {"a": 2}}]
    made = plans(curriculum(stored, rows_of(a=30), 3, weights=weights), 30)
    drawn = drawn_rows(made)
    epochs = [drawn[start : start + 30] for start in range(0, 90, 30)]
    assert all(sorted(epoch) == list(range(30)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in [*epochs, list(range(30))]}) == 4
    in_order = plans(curriculum(stored, rows_of(a=30), 3, shuffle=False, weights=weights), 20)
    assert drawn_rows(in_order) == [*range(30), *range(30)]
    assert in_order[-1].after.model_copy(update={"rows": None}) == DataState(epoch=2, draws=60)


def test_draws_follow_the_weights_of_the_sources(stored):
    weights = [{"from_iteration": 0, "weights": {"a": 3, "b": 1}}]
    made = plans(curriculum(stored, rows_of(a=5, b=50), 50, weights=weights), 40)
    assert counts(made, 1)["a"] / 2000 == pytest.approx(0.75, abs=0.03)
    of_row = Counter(drawn_rows(made))
    for rows in (range(5), range(5, 55)):
        numbers = [of_row[row] for row in rows]
        assert max(numbers) - min(numbers) <= 1


def test_weights_change_over_time_in_steps_or_linearly(stored):
    entries = [
        {"from_iteration": 0, "weights": {"a": 1, "b": 0}},
        {"from_iteration": 10, "weights": {"a": 0, "b": 1}},
    ]
    step = plans(curriculum(stored, rows_of(a=9, b=9), 40, weights=entries), 20)
    assert counts(step[:10], 1) == {"a": 400}
    assert counts(step[10:], 1) == {"b": 400}
    source = curriculum(stored, rows_of(a=9, b=9), 400, weights=entries, between="linear")
    linear = plans(source, 12)
    shares = [counts([plan], 1)["b"] / 400 for plan in linear]
    assert shares == pytest.approx([*(k / 10 for k in range(10)), 1, 1], abs=0.08)


def test_the_source_can_be_an_entry_of_the_metadata(stored):
    source = curriculum(stored, rows_of(a=3, b=3), 60, source_key="set.name", weights=EVEN)
    source.check()
    assert counts(plans(source, 2), 1).keys() == {"a", "b"}
    with pytest.raises(DataError, match="the row has no source"):
        curriculum(stored, rows_of(a=3, b=3), source_key="set.size", weights=EVEN).check()


def test_weights_need_exactly_the_sources_of_the_rows(stored):
    with pytest.raises(ConfigError, match="exactly the sources") as refused:
        curriculum(stored, rows_of(a=3, c=3), weights=EVEN).check()
    assert refused.value.expected == "a, c"
    weights = [{"from_iteration": 0, "weights": {"a": 1}}]
    curriculum(stored, rows_of(a=3, b=0), weights=weights).check()


DIFFICULTY = {"easy_above": 0.7, "hard_below": 0.3, "easy": 1, "normal": 2, "hard": 5}


def measured(source: DataSource, passes: dict[int, int], first: int = 0) -> list[Plan]:
    """Return two plans, the second after a visit of these rows: row → passed samples of 4."""
    seen = {row: (passed, 4) for row, passed in passes.items()}
    return plans(source, 2, visits=lambda k: seen if k == first else {}, first=first)


def test_difficulties_follow_the_latest_visit_and_draws_their_weights(stored):
    source = curriculum(stored, rows_of(a=400), 40, difficulty=DIFFICULTY)
    passes = {row: row % 5 for row in range(300)}
    seen = {row: (passed, 4) for row, passed in passes.items()}
    first, *later = plans(source, 41, visits=lambda k: {} if k else seen)
    assert counts([first], 2) == {"normal": 40}
    kinds = counts(later, 2)
    for kind, weight in (("easy", 1), ("normal", 2), ("hard", 5)):
        assert kinds[kind] / 1600 == pytest.approx(weight / 8, abs=0.03)
    for group in (group for plan in later for group in plan.groups):
        row, source_name, kind = group.row or (0, "", "")
        rate = passes[row] / 4 if row in passes else None
        expected = "normal"
        if rate is not None and (rate > 0.7 or rate < 0.3):
            expected = "easy" if rate > 0.7 else "hard"
        assert (kind, source_name) == (expected, None)


def test_a_plan_draws_no_row_twice_as_long_as_its_source_has_others(stored):
    source = curriculum(stored, rows_of(a=40), 32, difficulty=DIFFICULTY)
    # Two easy rows and three hard ones: a plan has each of them once at most.
    seen = {0: (4, 4), 1: (4, 4), 2: (0, 4), 3: (1, 4), 4: (0, 4)}
    for plan in plans(source, 9, visits=lambda k: {} if k else seen)[1:]:
        assert len(set(drawn_rows([plan]))) == 32
        assert counts([plan], 2)["hard"] == 3
    larger = curriculum(stored, rows_of(a=40), 100, difficulty=DIFFICULTY)
    drawn = Counter(drawn_rows([measured(larger, {0: 4})[1]]))
    assert set(drawn.values()) == {2, 3}


def test_a_pool_of_weight_0_is_not_drawn_and_empty_pools_do_not_count(stored):
    weights = {**DIFFICULTY, "easy": 0}
    source = curriculum(stored, rows_of(a=8), 16, difficulty=weights)
    _, second = measured(source, dict.fromkeys(range(6), 4))
    assert set(drawn_rows([second])) == {6, 7}
    with pytest.raises(DataError, match="every row that is left has weight 0") as refused:
        measured(source, dict.fromkeys(range(8), 4))
    assert refused.value.found == "8 easy, 0 normal and 0 hard rows"


def test_each_source_has_its_own_pools(stored):
    source = curriculum(
        stored, rows_of(a=4, b=4), 400, weights=EVEN, difficulty={**DIFFICULTY, "easy": 0}
    )
    # Every row of `a` is easy: all draws are from `b`.
    _, second = measured(source, dict.fromkeys(range(4), 4))
    assert counts([second], 1) == {"b": 400}


def test_a_row_that_enters_a_pool_is_drawn_once_in_its_next_round(stored):
    source = curriculum(stored, rows_of(a=6), 30, difficulty={**DIFFICULTY, "easy": 0, "hard": 0})
    easy_for_long = {0: (4, 4)}
    visits = {0: easy_for_long, 5: {0: (2, 4)}}
    made = plans(source, 8, visits=lambda k: visits.get(k, {}))
    # Row 0 has no draws in iterations 1 to 5, and then as many as the others.
    assert 0 not in drawn_rows(made[1:6])
    assert Counter(drawn_rows(made[6:])) == dict.fromkeys(range(6), 10)


@pytest.mark.parametrize("enters", range(1, 9))
def test_a_row_that_enters_a_pool_waits_for_the_end_of_its_round(stored, enters):
    others = {**DIFFICULTY, "easy": 0, "hard": 0}
    source = curriculum(stored, rows_of(a=4), 1, difficulty=others)
    visits = {0: {3: (0, 4)}, enters: {3: (2, 4)}}
    drawn = drawn_rows(plans(source, 20, visits=lambda k: visits.get(k, {})))
    assert 3 not in drawn[1 : enters + 1]
    left_of_round = -sum(row != 3 for row in drawn[: enters + 1]) % 3
    first = drawn.index(3, enters + 1) - (enters + 1)
    assert left_of_round <= first < left_of_round + 4


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    batch=st.integers(1, 9),
    passes=st.lists(st.lists(st.integers(0, 4), min_size=12, max_size=12), max_size=6),
)
def test_rows_of_a_pool_are_in_the_same_round_or_the_next(tmp_path_factory, sizes, batch, passes):
    stored = StoredRowStates(Files(tmp_path_factory.mktemp("store")))
    rows = rows_of(a=sizes[0], b=sizes[1])
    source = curriculum(stored, rows, batch, weights=EVEN, difficulty=DIFFICULTY)

    def visits(k: int) -> dict[int, tuple[int, int]]:
        return {row: (number, 4) for row, number in enumerate(passes[k][: len(rows)])}

    state = DataState()
    for iteration in range(len(passes) + 1):
        plan = source.plan(iteration, state, visits=visits)
        # A computation from stored states in another process gives the same plan.
        source.store_row_states(plan)
        other = StoredRowStates(Files(stored._files.root))
        again = curriculum(other, rows, batch, weights=EVEN, difficulty=DIFFICULTY)
        assert again.plan(iteration, state, visits=visits) == plan
        # No row has two draws more than another of its pool.
        for pool in {group.row[1:] for group in plan.groups if group.row}:
            of_pool = Counter(g.row[0] for g in plan.groups if g.row and g.row[1:] == pool)
            assert max(of_pool.values()) - min(of_pool.values()) <= 1
        state = plan.after


@pytest.mark.parametrize("lag", [0, 2])
def test_plan_k_counts_the_visits_up_to_k_minus_1_minus_the_staleness(stored, lag):
    source = curriculum(stored, rows_of(a=9), 3, lag=lag, difficulty=DIFFICULTY)
    asked: list[int] = []

    def visits(k: int) -> dict[int, tuple[int, int]]:
        asked.append(k)
        return {k: (4, 4)}

    made = plans(source, 6, visits=visits)
    assert asked == list(range(6 - 1 - lag))
    states = stored.read(made[-1].after.rows or "")
    assert states.counted == 5 - lag
    assert states.samples.tolist() == [4] * (5 - lag) + [0] * (9 - (5 - lag))


def test_a_smaller_staleness_counts_all_visits_that_were_waiting(stored):
    rows = rows_of(a=9)
    before = plans(curriculum(stored, rows, 3, lag=2, difficulty=DIFFICULTY), 4, none_visited)
    asked: list[int] = []
    source = curriculum(stored, rows, 3, difficulty=DIFFICULTY)
    source.plan(4, before[-1].after, visits=lambda k: asked.append(k) or {})
    assert asked == [1, 2, 3]
    wider = curriculum(stored, rows, 3, lag=4, difficulty=DIFFICULTY)
    wider.plan(4, before[-1].after, visits=lambda k: pytest.fail(f"{k} is counted"))


def test_later_parts_of_a_plan_count_no_further_visits(stored):
    source = curriculum(stored, rows_of(a=9), 3, difficulty=DIFFICULTY)
    first = source.plan(1, DataState(), visits=lambda _: {0: (4, 4)})
    later = source.plan(1, first.after, part=1)
    states = [stored.read(plan.after.rows or "") for plan in (first, later)]
    assert states[0].passes.tolist() == states[1].passes.tolist()
    assert not set(drawn_rows([first])) & set(drawn_rows([later]))


def test_a_fork_takes_a_curriculum_up_or_drops_it(stored):
    data = DataConfig(prompts=FILES, rollout_seed=1)
    rollout = RolloutConfig(rollout_batch_size=4, n_samples_per_prompt=4)
    plain = DataSource(rows_of(a=7), LETTERS, data, rollout, "run")
    before = plans(plain, 3)
    chosen = curriculum(stored, rows_of(a=7), difficulty=DIFFICULTY)
    taken = plans(chosen, 4, none_visited, state=before[-1].after, first=3)
    prompts = [group.prompt for plan in [*before, *taken] for group in plan.groups]
    for start in range(0, 28, 7):
        assert len(set(prompts[start : start + 7])) == 7
    assert plain.plan(7, taken[-1].after).after == DataState(epoch=4, offset=4, draws=32)
    relabelled = [replace(row, label="1") for row in rows_of(a=7)]
    for others in (rows_of(a=8), rows_of(a=6, b=1), relabelled):
        with pytest.raises(DataError, match="belong to other prompts"):
            curriculum(stored, others, difficulty=DIFFICULTY).plan(6, taken[-1].after)


def test_dropped_rows_are_never_drawn_and_need_no_source(stored):
    rows = [*rows_of(a=3, b=3), PromptRow("too long", where="sets/c.jsonl:1")]
    source = curriculum(stored, rows, 60, longest=2, weights=EVEN)
    source.check()
    assert set(drawn_rows(plans(source, 2))) == set(range(6))


def test_pools_and_rows_depend_on_the_seed_and_the_number_of_the_draw_only(stored):
    source = curriculum(stored, rows_of(a=30, b=30), 8, weights=EVEN)
    wide = curriculum(stored, rows_of(a=30, b=30), 24, weights=EVEN)
    assert drawn_rows(plans(source, 6)) == drawn_rows(plans(wide, 2))
