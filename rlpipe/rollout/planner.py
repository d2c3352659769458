"""Plans of a run, part by part, written before anything is sampled: by the data source, or by
functions of the user.

A plan of ours is made again from the same state whenever it is needed. What a user's function draws
or chooses may come out differently the second time, so the first plan from a state is written down
as such, and is the one that counts.

Not here: which rows come when (`rlpipe.data`), what becomes of the groups (`sampler`).
"""

from __future__ import annotations

from collections.abc import Callable

from rlpipe.config.rollout import RolloutConfig
from rlpipe.data.custom import BufferFilter, Choice, CustomSource
from rlpipe.data.source import DataSource
from rlpipe.rollout.generate import planned_sample
from rlpipe.rollout.rows import Part, StoredRows
from rlpipe.store.objects.files import Files
from rlpipe.store.plans import Plans
from rlpipe.types import DataState, Plan, PlannedGroup, Sample


class Planner:
    """Called on threads, by one generator."""

    def __init__(
        self,
        source: DataSource,
        rollout: RolloutConfig,
        files: Files,
        *,
        custom: CustomSource | None = None,
        choose: BufferFilter | None = None,
    ) -> None:
        self._source, self._rollout, self._files, self._plans = source, rollout, files, Plans(files)
        self.custom = custom
        self._choose = choose

    def part(self, iteration: int, state: DataState, number: int, *, write: bool = True) -> Part:
        """A part of a plan. Without `write`, the digest is empty if there is no such plan yet.

        Raises: DataError; HookError of a user's source or filter.
        """
        if self.custom is None and self._choose is None:
            plan = self._made(iteration, state, number, None)
            return Part(self._plans.write(plan) if write else self._plans.find(plan) or "", plan)
        found = self._plans.drawn(self._source.branch, iteration, number, state)
        if found is None and not write:
            nothing = Plan(
                branch=self._source.branch,
                iteration=iteration,
                part=number,
                groups=(),
                before=state,
                after=state,
            )
            return Part("", nothing)
        if found is None:
            found = self._plans.draw(
                self._made(iteration, state, number, self._choice(iteration, state))
            )
        return Part(found, self._plans.read(found))

    def parts(self, first: str) -> list[Part]:
        """Part 0 and those that an earlier attempt went on to."""
        parts = [Part(first, self._plans.read(first))]
        while not self._rollout.static:
            following = self.following(parts[-1], write=False)
            if not following.digest:
                break
            parts.append(following)
        return parts

    def following(self, part: Part, *, write: bool = True) -> Part:
        """The part after this one."""
        return self.part(part.plan.iteration, part.plan.after, part.plan.part + 1, write=write)

    def _made(self, iteration: int, state: DataState, number: int, choice: Choice | None) -> Plan:
        taken = (
            choice[0] if choice is not None else [one.group_id for one in self._source.takes(state)]
        )
        draw = self._drawing(iteration) if self.custom is not None else None
        return self._source.plan(
            iteration,
            state,
            part=number,
            buffered=self._planned(state, taken),
            choice=choice,
            draw=draw,
        )

    def _drawing(self, iteration: int) -> Callable:
        custom = self.custom
        assert custom is not None
        return lambda count, drawn: custom.draw(count, drawn=drawn, iteration=iteration)

    def _planned(self, state: DataState, wanted: list[str]) -> list[PlannedGroup]:
        """Groups of the buffer as earlier plans wrote them."""
        digests = dict.fromkeys(one.plan for one in state.buffer if one.group_id in wanted)
        plans = [self._plans.read(digest) for digest in digests]
        return [group for plan in plans for group in plan.groups if group.group_id in wanted]

    def _choice(self, iteration: int, state: DataState) -> Choice | None:
        if self._choose is None:
            return None
        return self._choose.choose(iteration, self._buffer(state), self._rollout.groups_per_round)

    def _buffer(self, state: DataState) -> list[list[Sample]]:
        """The buffer's groups, with what was sampled of them."""
        planned = {
            group.group_id: group
            for group in self._planned(state, [one.group_id for one in state.buffer])
        }
        rows = StoredRows(self._files)
        sampled = {}
        for digest in dict.fromkeys(one.rows for one in state.buffer if one.rows):
            sampled |= rows.earlier(
                digest, [one.group_id for one in state.buffer if one.rows == digest]
            )
        return [
            sampled.get(one.group_id) or _unsampled(planned[one.group_id]) for one in state.buffer
        ]


def _unsampled(group: PlannedGroup) -> list[Sample]:
    return [planned_sample(group, index) for index in range(len(group.seeds))]


def discarded(plan: Plan) -> list[str]:
    """Groups that waited before a plan and neither are in it nor wait after it: the buffer filter
    took them out."""
    kept = {group.group_id for group in plan.groups} | {one.group_id for one in plan.after.buffer}
    return [one.group_id for one in plan.before.buffer if one.group_id not in kept]
