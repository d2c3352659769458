"""The data source: which groups an iteration samples, as a pure function of rows, configuration and
state.

Nothing is remembered between calls (permutations are only cached), so a plan made twice from the
same state is the same plan, in whatever process, and the state after it is all that a commit has to
keep.

With `data.overlong_prompts: drop` the rows of an epoch are those that are short enough. They have
the order that they have among all rows, and the state counts only them, so that a run which goes on
draws each of them once an epoch.

Not here: sampling (`rollout`), writing plans (`store`), filling the buffer (a rollout says what
waits in it).
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from rlpipe.config.data import DataConfig, EvalDataset
from rlpipe.config.rollout import RolloutConfig
from rlpipe.data.prompts import PromptRow
from rlpipe.data.tokens import Encoded, Overlong, encode_prompt, encode_supervised
from rlpipe.errors import ConfigError, DataError
from rlpipe.types import BufferedGroup, DataState, Plan, PlannedGroup, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class DataSource:
    """Draws prompts in epochs: each a permutation of all rows that are kept, by (rollout_seed,
    epoch), one after the other without gaps."""

    def __init__(
        self,
        rows: Sequence[PromptRow],
        tokenizer: PreTrainedTokenizerBase,
        data: DataConfig,
        rollout: RolloutConfig,
        branch: str,
        *,
        async_buffer_size: int = 0,
        model_context_len: int | None = None,
    ):
        """`async_buffer_size`: how many weight versions old a token may be when it is trained.
        `model_context_len`: longest prompt + response of the model, where that is a limit of
        prompts.

        Raises: DataError without rows, unless a source of the user gives them (`plan`'s `draw`).
        """
        if not rows and rollout.data_source_path is None:
            raise DataError(
                "the data source has no rows",
                where="data.prompts",
                found="0 rows",
                expected="at least one",
            )
        self._rows = rows
        self._tokenizer = tokenizer
        self._data = data
        self._rollout = rollout
        self._branch = branch
        self._async_buffer_size = async_buffer_size
        self._model_context_len = model_context_len
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def __len__(self) -> int:
        """Rows of one epoch."""
        return len(self._kept)

    def check(self) -> None:
        """Encode every row once, so that a bad one is found before the run rather than in it.

        Raises: DataError naming it; ConfigError if every row is dropped.
        """
        _ = self.overlong, self._kept

    @property
    def overlong(self) -> tuple[Overlong, ...]:
        """The rows that `data.overlong_prompts` drops or cuts. Raises: as `check`."""
        return tuple(self._overlong.values())

    @cached_property
    def _overlong(self) -> dict[int, Overlong]:
        return overlong_rows(self._rows, self._encoded)

    @cached_property
    def _kept(self) -> Sequence[int]:
        """Numbers of the rows that are drawn."""
        if self._data.overlong_prompts != "drop":
            return range(len(self._rows))
        return kept_rows(len(self._rows), self._overlong, "data.prompts")

    @property
    def branch(self) -> str:
        """Whose plans it makes."""
        return self._branch

    def plan(
        self,
        iteration: int,
        state: DataState,
        *,
        part: int = 0,
        buffered: Iterable[PlannedGroup] = (),
        choice: tuple[list[str], list[str]] | None = None,
        draw: Callable[[int, int], Sequence[PromptRow]] | None = None,
    ) -> Plan:
        """One part of an iteration's plan: the oldest of the buffer first, then new draws,
        `groups_per_round` together.

        Part r + 1 starts from the state after part r. `buffered` holds at least the groups that are
        taken from `state.buffer`, as earlier plans wrote them; which of their rows go on is decided
        here. `choice`: ids of those that are taken instead, and of those that stay. `draw(count,
        drawn)` gives the rows of new draws instead of the prompts.

        Raises: DataError if a buffered group is not given, the state does not fit the rows, or a
        drawn row is wrong.
        """
        given = {group.group_id: group for group in buffered}
        waiting_of = {one.group_id: one for one in state.buffer}
        taken = (
            self.takes(state)
            if choice is None
            else [waiting_of[group_id] for group_id in choice[0]]
        )
        left = (
            state.buffer[len(taken) :]
            if choice is None
            else tuple(waiting_of[group_id] for group_id in choice[1])
        )
        missing = [waiting.group_id for waiting in taken if waiting.group_id not in given]
        if missing:
            raise DataError(
                "groups of the buffer were not given",
                where=f"{self._branch}/{iteration}",
                found=f"no {missing}",
            )
        count = self._rollout.groups_per_round - len(taken)
        drawn, after = (
            self._draw(state, count)
            if draw is None
            else self._drawn(state, draw(count, state.draws))
        )
        after = after.model_copy(update={"buffer": left})
        again = (
            given[one.group_id].model_copy(update={"earlier": self._earlier(one, iteration)})
            for one in taken
        )
        return Plan(
            branch=self._branch,
            iteration=iteration,
            part=part,
            groups=(*again, *drawn),
            before=state,
            after=after,
        )

    def takes(self, state: DataState) -> tuple[BufferedGroup, ...]:
        """The groups of the buffer that a plan from this state begins with."""
        return state.buffer[: self._rollout.groups_per_round]

    def _earlier(self, waiting: BufferedGroup, iteration: int) -> str | None:
        """Where the rows lie from which the group goes on. None: its tokens would be too old, it is
        sampled from the start."""
        bound = iteration - self._async_buffer_size
        if waiting.oldest is None or waiting.oldest >= bound:
            return waiting.rows
        all_stale = waiting.finished is not None and waiting.finished < bound
        return (
            waiting.rows
            if self._rollout.mask_offpolicy_in_partial_rollout and not all_stale
            else None
        )

    def _drawn(
        self, state: DataState, rows: Sequence[PromptRow]
    ) -> tuple[list[PlannedGroup], DataState]:
        numbered = enumerate(rows, start=state.draws)
        groups = [self._group(row, f"{self._branch}:{draw:08d}") for draw, row in numbered]
        return groups, state.model_copy(update={"draws": state.draws + len(groups)})

    def _draw(self, state: DataState, count: int) -> tuple[list[PlannedGroup], DataState]:
        epoch = state.epoch
        offset = state.offset
        draws = state.draws
        if not 0 <= offset < len(self):
            raise DataError(
                "the data state does not fit the rows",
                where=self._branch,
                found=f"offset {offset} in epoch {epoch}",
                expected=f"less than the {len(self)} rows of data.prompts that are drawn",
                do="continue with the prompts the state was made with, or start a branch with a fresh data state",
            )
        groups = []
        for draw in range(draws, draws + count):
            row = self._rows[self._order(epoch)[offset]]
            groups.append(self._group(row, f"{self._branch}:{draw:08d}"))
            epoch, offset = (epoch, offset + 1) if offset + 1 < len(self) else (epoch + 1, 0)
        return groups, DataState(epoch=epoch, offset=offset, draws=draws + count)

    def _group(self, row: PromptRow, group_id: str) -> PlannedGroup:
        return _planned(
            row,
            self._encoded(row),
            group_id,
            self._rollout.n_samples_per_prompt,
            self._data,
            self._rollout,
        )

    def _encoded(self, row: PromptRow) -> Encoded:
        if self._rollout.type == "dataset":
            return encode_supervised(self._tokenizer, row, self._data, self._rollout)
        return encode_prompt(
            self._tokenizer,
            row,
            self._data,
            self._rollout,
            model_context_len=self._model_context_len,
        )

    def _shuffled(self, epoch: int) -> Sequence[int]:
        order = list(range(len(self._rows)))
        if self._data.rollout_shuffle:
            random.Random(f"{self._data.rollout_seed}/{epoch}").shuffle(order)
        return (
            order
            if len(self) == len(order)
            else [number for number in order if number not in self._overlong]
        )


def overlong_rows(
    rows: Iterable[PromptRow], encode: Callable[[PromptRow], Encoded]
) -> dict[int, Overlong]:
    """Number of each row whose prompt is over-long → its length and limit. Raises: DataError naming
    a row that is wrong."""
    encoded = (encode(row).overlong for row in rows)
    return {number: overlong for number, overlong in enumerate(encoded) if overlong is not None}


def kept_rows(num_rows: int, overlong: Mapping[int, Overlong], where: str) -> Sequence[int]:
    """Numbers of the rows that are not dropped. Raises: ConfigError if all of them are."""
    kept = [number for number in range(num_rows) if number not in overlong]
    if num_rows and not kept:
        first = overlong[0]
        raise ConfigError(
            "every prompt is over-long, and data.overlong_prompts: drop leaves none",
            where=where,
            found=f"{num_rows} rows; the first has {first.tokens} tokens ({first.where})",
            expected=f"a row with at most {first.limit} ({first.setting})",
            do="raise the limit, or set data.overlong_prompts: truncate_left",
        )
    return kept


def evaluation_plan(
    dataset: EvalDataset,
    rows: Sequence[PromptRow],
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    rollout: RolloutConfig,
    *,
    branch: str,
    iteration: int,
    model_context_len: int | None = None,
) -> tuple[Plan, tuple[Overlong, ...]]:
    """Every row of a held-out set once, in order, with the same ids and seeds in every iteration
    and branch; and the rows that `data.overlong_prompts` drops or cuts.

    A row's id counts the dropped rows before it, so that it is the same whatever the limit is. The
    groups are always sampled, also in a supervised run. Raises: DataError naming a row that is
    wrong; ConfigError if every row is dropped.
    """
    sampled = rollout.model_copy(update={"type": "sample"})
    encoded = [
        encode_prompt(tokenizer, row, data, sampled, model_context_len=model_context_len)
        for row in rows
    ]
    overlong = {
        number: one.overlong for number, one in enumerate(encoded) if one.overlong is not None
    }
    where = f"evaluation.datasets: {dataset.name}"
    kept = (
        kept_rows(len(rows), overlong, where)
        if data.overlong_prompts == "drop"
        else range(len(rows))
    )
    n = dataset.n_samples_per_eval_prompt
    ids = {number: f"eval/{dataset.name}:{number:08d}" for number in kept}
    groups = tuple(
        _planned(rows[number], encoded[number], ids[number], n, data, sampled) for number in kept
    )
    plan = Plan(
        branch=branch, iteration=iteration, groups=groups, before=DataState(), after=DataState()
    )
    return plan, tuple(overlong.values())


def sample_seed(rollout_seed: int, group_id: str, index: int) -> int:
    """The seed of one sample: 31 bits of sha256 over `rollout_seed/group_id/index`."""
    digest = hashlib.sha256(f"{rollout_seed}/{group_id}/{index}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def _planned(
    row: PromptRow,
    encoded: Encoded,
    group_id: str,
    num_samples: int,
    data: DataConfig,
    rollout: RolloutConfig,
) -> PlannedGroup:
    """The group of a row. Raises: DataError for a row to drop: only a source of the user gives one,
    which cannot be dropped."""
    if encoded.overlong is not None and data.overlong_prompts == "drop":
        raise encoded.overlong.error
    return PlannedGroup(
        group_id=group_id,
        prompt=encoded.prompt,
        prompt_ids=encoded.prompt_ids,
        label=row.label,
        metadata=_with_messages(row, encoded.prompt, data, rollout),
        seeds=tuple(
            sample_seed(data.rollout_seed, group_id, index) for index in range(num_samples)
        ),
        response_ids=encoded.response_ids,
        loss_mask=encoded.loss_mask,
    )


def _with_messages(
    row: PromptRow, shown: Prompt, data: DataConfig, rollout: RolloutConfig
) -> dict[str, Any]:
    """The row's metadata; for a function of the user also `messages`, if the prompt's text has
    hidden them.

    They are whole, also where the prompt was cut.
    """
    hooked = rollout.custom_generate_function_path or rollout.rollout_function_path
    if (
        not hooked
        or not data.apply_chat_template
        or shown == row.prompt
        or "messages" in row.metadata
    ):
        return row.metadata
    messages = (
        [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
    )
    return {**row.metadata, "messages": messages}
