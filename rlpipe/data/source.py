"""The data source: choose the groups of an iteration as a pure function of rows, config and state.

`DataSource.plan` draws the groups of a plan; `evaluation_plan` takes every row of a held-out set.
No state is kept between calls (permutations are only cached). The same state therefore gives the
same plan in any process, and the state after a plan is all that a commit needs.

With `data.curriculum`, `rlpipe.data.curriculum` chooses the rows, and epoch and offset only count
the draws.

With `data.slime_position`, the order is slime's, and epoch 0 is the rest of slime's epoch.

With `data.overlong_prompts: drop`, an epoch consists of the rows that are short enough, in their
order among all rows. The state counts only these rows, so a resumed run draws each of them once an
epoch.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from rlpipe.config.data import DataConfig, EvalDataset
from rlpipe.config.rollout import RolloutConfig
from rlpipe.data.curriculum import Curriculum, Visits
from rlpipe.data.prompts import PromptRow
from rlpipe.data.tokens import (
    Encoded,
    Overlong,
    as_messages,
    encode_preference,
    encode_prompt,
    encode_supervised,
    kept_rows,
    overlong_rows,
)
from rlpipe.errors import DataError
from rlpipe.store.images import Images
from rlpipe.store.labels import label_text
from rlpipe.store.row_states import StoredRowStates
from rlpipe.types import BufferedGroup, DataState, Plan, PlannedGroup, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlpipe.data.image_reader import ImageReader


class DataSource:
    """Draws prompts in epochs without gaps.

    An epoch is a permutation of the kept rows, determined by (rollout_seed, epoch).
    """

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
        keep_messages: bool = False,
        images: ImageReader | None = None,
        stored: Images | None = None,
        row_states: StoredRowStates | None = None,
    ):
        """Create the source of a branch.

        `async_buffer_size`: largest staleness of a trained token. `model_context_len`: longest
        prompt + response of the model; None: no limit of prompts. `keep_messages`: keep the
        messages of rendered prompts as `metadata.messages`. `images`: how the model reads images;
        None: a model of text. `stored`: where the images of drawn rows are stored. `row_states`:
        where `data.curriculum` keeps the states of rows.

        Raises: DataError without rows, unless a user's source provides them (`draw` of `plan`).
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
        self._images = images
        self._stored = stored
        self._keep_messages = keep_messages or rollout.samples_by_user_function
        # A plan can span two epochs.
        self._order = lru_cache(maxsize=2)(self._shuffled)
        self._curriculum: Curriculum | None = None
        if data.curriculum is not None:
            assert row_states is not None
            self._curriculum = Curriculum(rows, data, self._order, row_states)

    def __len__(self) -> int:
        """Return the number of rows of one epoch."""
        return len(self._kept)

    def check(self) -> None:
        """Encode every row once, to find a bad row before the run starts.

        Raises: DataError naming the row; ConfigError if every row is dropped, or if the weights of
        `data.curriculum` have other sources than the rows.
        """
        _ = self._overlong
        _ = self._kept
        if self._data.slime_position is not None:
            _ = self._slime_start
        if self._curriculum is not None:
            self._curriculum.check()

    @property
    def overlong(self) -> tuple[Overlong, ...]:
        """Return the rows that `data.overlong_prompts` drops or cuts. Raises: as `check`."""
        return tuple(self._overlong.values())

    @cached_property
    def _overlong(self) -> dict[int, Overlong]:
        return overlong_rows(self._rows, self._encode)

    @cached_property
    def _kept(self) -> Sequence[int]:
        """Numbers of the rows that an epoch draws."""
        if self._data.overlong_prompts != "drop":
            return range(len(self._rows))
        return kept_rows(len(self._rows), self._overlong, "data.prompts")

    @property
    def branch(self) -> str:
        """Return the branch of the plans."""
        return self._branch

    @property
    def pass_threshold(self) -> float:
        """Least reward of a sample that passed a visit of its row."""
        return self._data.curriculum.pass_threshold if self._data.curriculum else 1.0

    def store_row_states(self, plan: Plan) -> None:
        """Store the states of rows after a plan of this source, if it has any. Raises: StoreError.

        They are stored before the plan, which names them.
        """
        if self._curriculum is not None and plan.after.rows is not None:
            self._curriculum.stored.write(plan.after.rows)

    def plan(
        self,
        iteration: int,
        state: DataState,
        *,
        part: int = 0,
        buffered: Iterable[PlannedGroup] = (),
        choice: tuple[list[str], list[str]] | None = None,
        draw: Callable[[int, int], Sequence[PromptRow]] | None = None,
        visits: Callable[[int], Visits] | None = None,
    ) -> Plan:
        """Return one part of an iteration's plan, of `groups_per_round` groups.

        The oldest groups of the buffer come first, then new draws. Part r + 1 starts from the state
        after part r. With `selection: first_finished` part 0 has the groups of the pool, and each
        later part is a block of draws.

        `buffered`: the planned groups of `state.buffer` from earlier plans, at least those that are
        taken. `choice`: (ids of the groups to take, ids of the groups that stay) from a user's
        filter; None: the oldest. `draw(count, drawn)`: returns the rows of new draws from a user's
        source; None: `data.prompts`. `visits`: as `Curriculum.draw`, for part 0.

        Raises: DataError if a buffered group is missing, the state does not match the rows, or a
        drawn row is bad; the errors of `draw` and `visits`.
        """
        planned = {group.group_id: group for group in buffered}
        if choice is None:
            taken = self.takes(state)
            kept = state.buffer[len(taken) :]
        else:
            by_id = {group.group_id: group for group in state.buffer}
            taken = tuple(by_id[group_id] for group_id in choice[0])
            kept = tuple(by_id[group_id] for group_id in choice[1])
        if missing := [group.group_id for group in taken if group.group_id not in planned]:
            raise DataError(
                "planned groups of the buffer are missing",
                where=f"{self._branch}/{iteration}",
                found=f"no {missing}",
            )
        count = max(0, self.groups_of_part(part) - len(taken))
        if draw is not None:
            drawn, after = self._planned_rows(state, draw(count, state.draws))
        elif self._curriculum is not None:
            drawn, after = self._chosen(self._curriculum, state, iteration, count, visits)
        else:
            drawn, after = self._draw(state, count)
        continued = (
            planned[group.group_id].model_copy(
                update={"earlier": self._continued_rows(group, iteration)}
            )
            for group in taken
        )
        return Plan(
            branch=self._branch,
            iteration=iteration,
            part=part,
            groups=(*continued, *drawn),
            before=state,
            after=after.model_copy(update={"buffer": kept}),
        )

    def takes(self, state: DataState) -> tuple[BufferedGroup, ...]:
        """Return the groups of the buffer that a plan from this state takes without a filter."""
        # Groups of the pool are all in flight, or wait for their start.
        return state.buffer if self._rollout.pooled else state.buffer[: self.groups_of_part(0)]

    def groups_of_part(self, part: int) -> int:
        """Return the number of groups of a part, if the buffer does not have more."""
        if self._rollout.pooled and part == 0:
            return self._rollout.groups_in_pool(self._async_buffer_size)
        return self._rollout.groups_per_round

    def _continued_rows(self, group: BufferedGroup, iteration: int) -> str | None:
        """Return the object with the group's rows to continue from.

        None if its tokens are too old to be trained: the group is sampled from the start.
        """
        oldest_allowed = iteration - self._async_buffer_size
        if group.oldest is None or group.oldest >= oldest_allowed:
            return group.rows
        all_stale = group.finished is not None and group.finished < oldest_allowed
        # Old tokens can stay if they get loss mask 0 and other tokens are recent enough.
        masked = self._rollout.mask_offpolicy_in_partial_rollout and not all_stale
        return group.rows if masked else None

    def _planned_rows(
        self, state: DataState, rows: Sequence[PromptRow]
    ) -> tuple[list[PlannedGroup], DataState]:
        numbered = enumerate(rows, start=state.draws)
        groups = [self._group(row, f"{self._branch}:{draw:08d}") for draw, row in numbered]
        return groups, state.model_copy(update={"draws": state.draws + len(groups), "rows": None})

    def _chosen(
        self,
        curriculum: Curriculum,
        state: DataState,
        iteration: int,
        count: int,
        visits: Callable[[int], Visits] | None,
    ) -> tuple[list[PlannedGroup], DataState]:
        newest = iteration - 1 - self._async_buffer_size
        draws, states = curriculum.draw(state, iteration, count, newest=newest, visits=visits)
        groups = [
            self._group(self._rows[draw[0]], f"{self._branch}:{number:08d}").model_copy(
                update={"row": draw}
            )
            for number, draw in enumerate(draws, start=state.draws)
        ]
        # A fork without a curriculum continues at this position.
        epoch, offset = divmod(state.epoch * len(self) + state.offset + count, len(self))
        return groups, DataState(epoch=epoch, offset=offset, draws=state.draws + count, rows=states)

    def _draw(self, state: DataState, count: int) -> tuple[list[PlannedGroup], DataState]:
        epoch = state.epoch
        offset = state.offset
        draws = state.draws
        if not 0 <= offset < len(self._order(epoch)):
            raise DataError(
                "the data state does not match the rows",
                where=self._branch,
                found=f"offset {offset} in epoch {epoch}",
                expected=f"less than the {len(self._order(epoch))} rows of data.prompts that are "
                "drawn in the epoch",
                do="continue with the prompts of the state, "
                "or start a branch with a fresh data state",
            )
        groups = []
        for draw in range(draws, draws + count):
            row = self._rows[self._order(epoch)[offset]]
            groups.append(self._group(row, f"{self._branch}:{draw:08d}"))
            offset += 1
            if offset == len(self._order(epoch)):
                epoch += 1
                offset = 0
        return groups, DataState(epoch=epoch, offset=offset, draws=draws + count)

    def _group(self, row: PromptRow, group_id: str) -> PlannedGroup:
        if self._stored is not None:
            store_images(self._stored, [row])
        return _planned_group(
            row,
            self._encode(row),
            group_id,
            self._rollout.n_samples_per_prompt,
            self._data,
            keep_messages=self._keep_messages,
        )

    def _encode(self, row: PromptRow) -> Encoded:
        if row.rejected is not None:
            return encode_preference(self._tokenizer, row, self._data, self._rollout)
        if self._rollout.type == "dataset":
            return encode_supervised(
                self._tokenizer, row, self._data, self._rollout, images=self._images
            )
        return encode_prompt(
            self._tokenizer,
            row,
            self._data,
            self._rollout,
            model_context_len=self._model_context_len,
            images=self._images,
        )

    def _shuffled(self, epoch: int) -> Sequence[int]:
        if self._data.slime_position is not None:
            first, offset = self._slime_start
            return self._slime_order(first + epoch, offset if epoch == 0 else 0)
        order = list(range(len(self._rows)))
        if self._data.rollout_shuffle:
            # A string seed is hashed by sha512: the order is equal in every process.
            random.Random(f"{self._data.rollout_seed}/{epoch}").shuffle(order)
        # Dropped rows leave gaps: the order of the other rows does not depend on the limit.
        if len(self) == len(order):
            return order
        return [number for number in order if number not in self._overlong]

    @cached_property
    def _slime_start(self) -> tuple[int, int]:
        """slime's epoch in which this run begins, and how many of its prompts slime has drawn.

        Raises: DataError if the position does not fit the rows of data.prompts.
        """
        position = self._data.slime_position
        assert position is not None
        rows = len(self._slime_rows)
        drawn = position.epoch * rows + position.offset
        if position.offset > rows or position.draws not in (None, drawn):
            raise DataError(
                "slime's position belongs to other prompts",
                where="data.slime_position",
                found=f"{position.draws or position.offset} prompts drawn, {position.offset} of "
                f"them in epoch {position.epoch}; {rows} rows in data.prompts",
                do="give the prompts of slime's run, with the same longest prompt; or begin with "
                "all prompts: data.slime_position=null",
            )
        if self._slime_order(position.epoch, position.offset):
            return position.epoch, position.offset
        return position.epoch + 1, 0

    @cached_property
    def _slime_rows(self) -> Sequence[int]:
        """Numbers of the rows that slime draws. slime limits the length of prompts only."""
        context = self._rollout.rollout_max_context_len
        limit = self._data.rollout_max_prompt_len or (context - 1 if context else None)
        if limit is None or self._data.overlong_prompts != "drop":
            return range(len(self._rows))
        too_long = {number for number, row in self._overlong.items() if row.tokens > limit}
        return [number for number in range(len(self._rows)) if number not in too_long]

    def _slime_order(self, epoch: int, offset: int) -> Sequence[int]:
        """Return the rows of slime's epoch after `offset`, without those that are dropped here.

        Source: `Dataset.shuffle` in slime/utils/data.py at 624b824a.
        """
        order = list(self._slime_rows)
        if self._data.rollout_shuffle:
            random.Random(self._data.rollout_seed + epoch).shuffle(order)
        if self._data.overlong_prompts != "drop":
            return order[offset:]
        return [number for number in order[offset:] if number not in self._overlong]


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
    keep_messages: bool = False,
    images: ImageReader | None = None,
) -> tuple[Plan, tuple[Overlong, ...]]:
    """Return the plan of a held-out set, and the rows that `data.overlong_prompts` drops or cuts.

    The plan has every row once and in order, with the same ids and seeds in every iteration and
    branch. The id of a row counts the dropped rows before it, so it does not depend on the limit.
    The groups are sampled even in a supervised run.

    Raises: DataError naming a bad row; ConfigError if every row is dropped.
    """
    # `type: dataset` would give the groups their labels as responses.
    sampled = rollout.model_copy(update={"type": "sample"})
    encoded = [
        encode_prompt(
            tokenizer, row, data, sampled, model_context_len=model_context_len, images=images
        )
        for row in rows
    ]
    overlong = {
        number: row.overlong for number, row in enumerate(encoded) if row.overlong is not None
    }
    kept: Sequence[int] = range(len(rows))
    if data.overlong_prompts == "drop":
        kept = kept_rows(len(rows), overlong, f"evaluation.datasets: {dataset.name}")
    num_samples = dataset.n_samples_per_eval_prompt
    ids = {number: f"eval/{dataset.name}:{number:08d}" for number in kept}
    groups = tuple(
        _planned_group(
            rows[number],
            encoded[number],
            ids[number],
            num_samples,
            data,
            keep_messages=keep_messages or rollout.samples_by_user_function,
        )
        for number in kept
    )
    plan = Plan(
        branch=branch, iteration=iteration, groups=groups, before=DataState(), after=DataState()
    )
    return plan, tuple(overlong.values())


def store_images(stored: Images, rows: Iterable[PromptRow]) -> None:
    """Store the images of rows. Raises: DataError if a file has changed since the rows were read;
    StoreError."""
    for row in rows:
        for image in row.images:
            stored.add(image.sha256, image.read)


def sample_seed(rollout_seed: int, group_id: str, index: int) -> int:
    """Return the seed of a sample: 31 bits of sha256 over `rollout_seed/group_id/index`."""
    digest = hashlib.sha256(f"{rollout_seed}/{group_id}/{index}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def _planned_group(
    row: PromptRow,
    encoded: Encoded,
    group_id: str,
    num_samples: int,
    data: DataConfig,
    *,
    keep_messages: bool,
) -> PlannedGroup:
    """Return the planned group of a row.

    Raises: DataError for a row that should be dropped.
    """
    # Rows of `data.prompts` are dropped before. A row of a user's source cannot be dropped.
    if encoded.overlong is not None and data.overlong_prompts == "drop":
        raise encoded.overlong.error
    return PlannedGroup(
        group_id=group_id,
        prompt=encoded.prompt,
        prompt_ids=encoded.prompt_ids,
        images=encoded.images,
        label=label_text(row.label),
        metadata=_with_messages(row, encoded.prompt, data) if keep_messages else row.metadata,
        seeds=tuple(
            sample_seed(data.rollout_seed, group_id, index) for index in range(num_samples)
        ),
        response_ids=encoded.response_ids,
        loss_mask=encoded.loss_mask,
        rejected_ids=encoded.rejected_ids,
    )


def _with_messages(row: PromptRow, rendered: Prompt, data: DataConfig) -> dict[str, Any]:
    """Return the row's metadata, with `messages` if the prompt was rendered.

    The messages are complete even if the prompt was cut.
    """
    if not data.apply_chat_template or rendered == row.prompt:
        return row.metadata
    if "messages" in row.metadata:
        return row.metadata
    return {**row.metadata, "messages": as_messages(row.prompt)}
