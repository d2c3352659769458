"""Draw rows by source and difficulty (`data.curriculum`).

    draw n ── source, by the weights of the iteration ── difficulty ── row of this pool

Draw n chooses source and difficulty by two random numbers of (rollout_seed, n). A pool has the rows
of one source and difficulty. A pool without rows is not chosen, and the others keep the proportions
of their weights. A part of a plan draws a row twice only after all rows of its source: a small pool
is left out once all its rows are drawn. A pool is drawn in rounds: each row once a round, in the
order of a permutation of (rollout_seed, round). A row that enters a pool waits for the pool's next
round. With one pool, rounds are epochs.

Draws and pass rates are the states of the rows (`rlpipe.store.row_states`). So a plan is a function
of rows, configuration and stored state, however often and wherever it is computed.

Shapes: R rows, dropped ones included. Entry point: `Curriculum`.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any

import numpy as np

from rlpipe.config.data import DataConfig, FilePrompts
from rlpipe.config.draws import CurriculumConfig, source_of_path
from rlpipe.data.prompts import PromptRow
from rlpipe.errors import ConfigError, DataError
from rlpipe.store.labels import label_text
from rlpipe.store.row_states import RowStates, StoredRowStates
from rlpipe.types import DataState, RowDraw

DIFFICULTIES = ("easy", "normal", "hard")
EASY, NORMAL, HARD = range(3)
WITHOUT = -1
"""Pool of rows that are never drawn."""

Visits = Mapping[int, tuple[int, int]]
"""Number of a row → (passed samples, scored samples) of its latest visit in one commit."""


class Curriculum:
    """Draws rows of `data.prompts`. States of rows are only cached between calls."""

    def __init__(
        self,
        rows: Sequence[PromptRow],
        data: DataConfig,
        order: Callable[[int], Sequence[int]],
        stored: StoredRowStates,
    ) -> None:
        """`order(epoch)`: numbers of the rows that are drawn, in the order of the epoch."""
        assert data.curriculum is not None
        self._config: CurriculumConfig = data.curriculum
        self._data = data
        self._rows = rows
        self._order = order
        self.stored = stored
        # Rows of a file have one source, and a path takes long to parse.
        self._source_of_path = lru_cache(source_of_path)

    def check(self) -> None:
        """Find the source of every row. Raises: DataError for a row without a source; ConfigError
        if the weights have other sources than the rows."""
        _ = self._source_of

    @cached_property
    def _source_of(self) -> np.ndarray:
        """[R] int64: number of the source of each row, WITHOUT for dropped rows."""
        drawn = self._order(0)
        source_of = np.full(len(self._rows), WITHOUT, np.int64)
        if not self._config.sources:
            source_of[np.asarray(drawn)] = 0
            return source_of
        names = {number: self._source(self._rows[number]) for number in drawn}
        if (found := sorted(set(names.values()))) != list(self._config.sources):
            raise ConfigError(
                "the weights need exactly the sources of the rows",
                where="data.curriculum.weights",
                found=", ".join(self._config.sources),
                expected=", ".join(found),
                do="weight 0 leaves out a source",
            )
        number_of = {name: number for number, name in enumerate(self._config.sources)}
        for number, name in names.items():
            source_of[number] = number_of[name]
        return source_of

    @cached_property
    def _prompts(self) -> str:
        """Digest of the prompts and labels of all rows, because states name rows by number."""
        digest = hashlib.sha256()
        for row in self._rows:
            digest.update(json.dumps([row.prompt, label_text(row.label)]).encode())
        return digest.hexdigest()

    def _source(self, row: PromptRow) -> str:
        key = self._config.source_key
        if key is None:
            assert isinstance(self._data.prompts, FilePrompts)
            return self._source_of_path(row.where.rpartition(":")[0])
        value: Any = row.metadata
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if not isinstance(value, str | int):
            raise DataError(
                "the row has no source",
                where=row.where,
                found=f"metadata {', '.join(sorted(row.metadata)) or 'without entries'}",
                expected=f"a text in metadata.{key} (data.curriculum.source_key)",
            )
        return str(value)

    def draw(
        self,
        state: DataState,
        iteration: int,
        count: int,
        *,
        newest: int = -1,
        visits: Callable[[int], Visits] | None = None,
    ) -> tuple[list[RowDraw], str]:
        """Return `count` draws, and the digest of the states of rows after them.

        The states are kept in memory until `stored.write`. `newest`: last iteration whose visits
        count; `visits(k)` returns those of iteration k. None: count no further visits.

        Raises: DataError if the state belongs to other rows, or no pool with a weight has rows;
        StoreError; the errors of `visits`.
        """
        states = self._states(state, newest)
        if self._config.difficulty is not None and visits is not None:
            # One commit an iteration, and several after a change of async_buffer_size.
            for k in range(states.counted, newest + 1):
                states = replace(self._with_visits(states, visits(k)), counted=k + 1)
        pools = self._pools(states)
        rounds = states.rounds.copy()
        chosen = self._chosen_pools(pools, iteration, range(state.draws, state.draws + count))
        rows_of = {
            pool: iter(self._take(np.flatnonzero(pools == pool), rounds, number))
            for pool, number in Counter(chosen).items()
        }
        draws = [self._described(next(rows_of[pool]), pool) for pool in chosen]
        return draws, self.stored.keep(replace(states, rounds=rounds))

    def _states(self, state: DataState, newest: int) -> RowStates:
        """Return the states of rows of a data state.

        A branch without a curriculum has none: its position in the epochs gives the rounds.
        """
        if state.rows is None:
            rounds = np.full(len(self._rows), state.epoch, np.uint32)
            rounds[np.asarray(self._order(state.epoch)[: state.offset], np.int64)] += 1
            nothing = np.zeros(len(self._rows), np.uint32)
            # Its plans do not name rows, so its visits cannot be counted.
            return RowStates(rounds, nothing, nothing, max(0, newest + 1), self._prompts)
        states = self.stored.read(state.rows)
        if states.prompts != self._prompts:
            raise DataError(
                "the states of rows belong to other prompts",
                where="data.prompts",
                found=f"{len(self._rows)} rows with digest {self._prompts[:12]}",
                expected=f"{len(states)} rows with digest {states.prompts[:12]}, as in the run so "
                "far",
                do="continue with the prompts of the run, or begin another run with its weights: "
                "model.start_from",
            )
        return states

    def _pools(self, states: RowStates) -> np.ndarray:
        """Return the pool of each row: [R] int64, 3 × source + difficulty, or WITHOUT."""
        difficulty = np.full(len(states), NORMAL)
        if (limits := self._config.difficulty) is not None:
            rates = np.full(len(states), np.nan)
            np.divide(states.passes, states.samples, out=rates, where=states.samples > 0)
            difficulty[rates > limits.easy_above] = EASY
            difficulty[rates < limits.hard_below] = HARD
        pools = len(DIFFICULTIES) * self._source_of + difficulty
        return np.where(self._source_of == WITHOUT, WITHOUT, pools)

    def _with_visits(self, states: RowStates, visits: Visits) -> RowStates:
        """Return the states after the visits of one commit."""
        numbers = np.array(sorted(visits), np.int64)
        passes = states.passes.copy()
        samples = states.samples.copy()
        rounds = states.rounds.copy()
        passes[numbers] = [visits[number][0] for number in numbers.tolist()]
        samples[numbers] = [visits[number][1] for number in numbers.tolist()]
        before = self._pools(states)
        after = self._pools(replace(states, passes=passes, samples=samples))
        moved = np.flatnonzero(before != after)
        for pool in np.unique(after[moved]):
            # A row with few draws in its old pool would else be drawn several times in a row, and
            # one with many draws would wait for as many rounds.
            there = rounds[before == pool]
            rounds[moved[after[moved] == pool]] = there.max() if len(there) else 0
        return replace(states, rounds=rounds, passes=passes, samples=samples)

    def _chosen_pools(self, pools: np.ndarray, iteration: int, draws: range) -> list[int]:
        """Return the pool of each draw. Raises: DataError if no pool with a weight has rows."""
        config = self._config
        weights_of = config.weights_at(iteration)
        source_weights = [weights_of[name] for name in config.sources] or [1.0]
        difficulty = config.difficulty
        of_difficulty = [getattr(difficulty, name) if difficulty else 1.0 for name in DIFFICULTIES]
        sizes = np.bincount(
            pools[pools != WITHOUT], minlength=len(DIFFICULTIES) * len(source_weights)
        ).reshape(-1, len(DIFFICULTIES))
        pool_weights = np.where(sizes > 0, of_difficulty, 0.0)
        weights = np.where(pool_weights.any(axis=1), source_weights, 0.0)
        if not weights.any():
            raise DataError(
                "every row that is left has weight 0",
                where="data.curriculum",
                found=f"{sizes[:, EASY].sum()} easy, {sizes[:, NORMAL].sum()} normal and "
                f"{sizes[:, HARD].sum()} hard rows",
                expected="a source with a weight that has rows of a difficulty with a weight",
                do="fork this run with another weight, or with more prompts a new run that starts "
                "from its weights: model.start_from",
            )
        chosen = []
        left = sizes.copy()
        for number in draws:
            # A string seed is hashed by sha512: the numbers are equal in every process.
            numbers = random.Random(f"{self._data.rollout_seed}/pool/{number}")
            source = _choice(weights, numbers.random())
            if not (pool_weights[source] * left[source]).any():
                left[source] = sizes[source]
            of_kinds = np.where(left[source] > 0, pool_weights[source], 0.0)
            kind = _choice(of_kinds, numbers.random())
            left[source, kind] -= 1
            chosen.append(len(DIFFICULTIES) * source + kind)
        return chosen

    def _take(self, members: np.ndarray, rounds: np.ndarray, count: int) -> list[int]:
        """Return the next rows of a pool, and write the rounds of its rows into `rounds`.

        `members`: numbers of the pool's rows.
        """
        due = rounds[members].astype(np.int64)
        # All rows are in the newest round or one before, unless the limit of prompts has changed.
        due = np.maximum(due, due.max() - 1)
        taken: list[int] = []
        unused = np.ones(len(members), bool)
        while len(taken) < count:
            if not unused.any():
                unused[:] = True
            current = due[unused].min()
            waiting = np.flatnonzero(unused & (due == current))
            ranks = self._ranks(int(current), members[waiting])
            missing = count - len(taken)
            if missing < len(waiting):
                first = np.argpartition(ranks, missing)[:missing]
                waiting, ranks = waiting[first], ranks[first]
            waiting = waiting[np.argsort(ranks)]
            taken += members[waiting].tolist()
            due[waiting] = current + 1
            unused[waiting] = False
        rounds[members] = due
        return taken

    def _ranks(self, number: int, rows: np.ndarray) -> np.ndarray:
        """Return numbers that order rows within a round; no two rows have the same.

        A shuffle of all rows takes a second for a million, and a small pool has many rounds.
        """
        if not self._data.rollout_shuffle:
            return rows
        seed = f"{self._data.rollout_seed}/round/{number}".encode()
        start = np.frombuffer(hashlib.sha256(seed).digest()[:8], "<u8")
        # The mixing of splitmix64, which maps different numbers to different numbers.
        mixed = rows.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + start
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        return mixed ^ (mixed >> np.uint64(31))

    def _described(self, row: int, pool: int) -> RowDraw:
        source, difficulty = divmod(pool, len(DIFFICULTIES))
        return (
            row,
            self._config.sources[source] if self._config.sources else None,
            DIFFICULTIES[difficulty] if self._config.difficulty is not None else None,
        )


def _choice(weights: np.ndarray, number: float) -> int:
    """Return the index that a number from 0 to 1 chooses among weights."""
    bounds = list(accumulate(weights.tolist()))
    position = number * bounds[-1]
    chosen = next((index for index, bound in enumerate(bounds) if position < bound), None)
    # Rounding can give the sum itself.
    return int(np.flatnonzero(weights)[-1]) if chosen is None else chosen
