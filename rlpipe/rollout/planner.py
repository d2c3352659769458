"""Write the plans of a run, part by part, before their groups are sampled.

Entry point: `Planner`. The data source computes a plan from a state; computing it again gives the
same plan. A user function may draw or choose other groups the second time, so the first plan from a
state is recorded as such and is the only valid one.
"""

from __future__ import annotations

from collections.abc import Callable

from rlpipe.config.rollout import RolloutConfig
from rlpipe.data.curriculum import Visits
from rlpipe.data.source import DataSource
from rlpipe.data.user_source import BufferFilter, Choice, CustomSource
from rlpipe.lineage.visits import row_visits
from rlpipe.rollout.generate import planned_sample
from rlpipe.rollout.rollout_rows import Groups, PlanPart, StoredRows
from rlpipe.store.objects.files import Files
from rlpipe.store.plans import Plans
from rlpipe.types import DataState, Plan, PlannedGroup, Sample


class Planner:
    """Plan the parts of all iterations. Called on threads, by one generator."""

    def __init__(
        self,
        source: DataSource,
        rollout: RolloutConfig,
        files: Files,
        *,
        custom: CustomSource | None = None,
        choose: BufferFilter | None = None,
    ) -> None:
        """`custom` draws the prompts in place of `source`; `choose` takes groups out of the
        buffer."""
        self.custom = custom
        self._source = source
        self._rollout = rollout
        self._files = files
        self._plans = Plans(files)
        self._choose = choose

    def part(
        self, iteration: int, state: DataState, number: int, *, write: bool = True
    ) -> PlanPart:
        """Return a part of a plan. Without `write`, the digest is empty if the plan does not exist.

        Raises: DataError; HookError of a user's source or filter.
        """
        if self.custom is None and self._choose is None:
            plan = self._plan(iteration, state, number, None)
            if write:
                self._source.store_row_states(plan)
            digest = self._plans.write(plan) if write else self._plans.find(plan) or ""
            return PlanPart(digest, plan)
        branch = self._source.branch
        digest = self._plans.drawn(branch, iteration, number, state)
        if digest is None and not write:
            empty = Plan(
                branch=branch,
                iteration=iteration,
                part=number,
                groups=(),
                before=state,
                after=state,
            )
            return PlanPart("", empty)
        if digest is None:
            choice = self._choice(iteration, state, number)
            plan = self._plan(iteration, state, number, choice)
            self._source.store_row_states(plan)
            digest = self._plans.draw(plan)
        return PlanPart(digest, self._plans.read(digest))

    def parts(self, first: str) -> list[PlanPart]:
        """Return part 0 and the later parts that an earlier attempt wrote."""
        parts = [PlanPart(first, self._plans.read(first))]
        while not self._rollout.static:
            following = self.following(parts[-1], write=False)
            if not following.digest:
                break
            parts.append(following)
        return parts

    def following(self, part: PlanPart, *, write: bool = True) -> PlanPart:
        """Return the part after this one."""
        return self.part(part.plan.iteration, part.plan.after, part.plan.part + 1, write=write)

    def _plan(self, iteration: int, state: DataState, number: int, choice: Choice | None) -> Plan:
        if choice is not None:
            taken = choice[0]
        else:
            taken = [waiting.group_id for waiting in self._source.takes(state)]
        return self._source.plan(
            iteration,
            state,
            part=number,
            buffered=self._planned(state, taken),
            choice=choice,
            draw=self._draw(iteration),
            # Later parts of a plan count the same visits, so that they do not depend on the time.
            visits=self._visits if number == 0 else None,
        )

    def _visits(self, iteration: int) -> Visits:
        source = self._source
        return row_visits(self._files, source.branch, iteration, source.pass_threshold)

    def _draw(self, iteration: int) -> Callable | None:
        custom = self.custom
        if custom is None:
            return None
        return lambda count, drawn: custom.draw(count, drawn=drawn, iteration=iteration)

    def _planned(self, state: DataState, group_ids: list[str]) -> list[PlannedGroup]:
        """Return groups of the buffer as earlier plans wrote them."""
        digests = dict.fromkeys(
            waiting.plan for waiting in state.buffer if waiting.group_id in group_ids
        )
        plans = [self._plans.read(digest) for digest in digests]
        return [group for plan in plans for group in plan.groups if group.group_id in group_ids]

    def _choice(self, iteration: int, state: DataState, number: int) -> Choice | None:
        if self._choose is None:
            return None
        most = self._source.groups_of_part(number)
        return self._choose.choose(iteration, self._buffer(state), most)

    def _buffer(self, state: DataState) -> list[list[Sample]]:
        """Return the groups of the buffer with their sampled tokens."""
        buffer_ids = [waiting.group_id for waiting in state.buffer]
        planned = {group.group_id: group for group in self._planned(state, buffer_ids)}
        rows = StoredRows(self._files)
        sampled: Groups = {}
        for digest in dict.fromkeys(waiting.rows for waiting in state.buffer if waiting.rows):
            group_ids = [waiting.group_id for waiting in state.buffer if waiting.rows == digest]
            sampled |= rows.earlier(digest, group_ids)
        return [
            sampled.get(group_id) or unsampled_group(planned[group_id]) for group_id in buffer_ids
        ]


def unsampled_group(group: PlannedGroup) -> list[Sample]:
    """Return the samples of a group without responses."""
    return [planned_sample(group, index) for index in range(len(group.seeds))]


def discarded(plan: Plan) -> list[str]:
    """Return the groups that the buffer filter removed: in the buffer before a plan, and neither in
    the plan nor in the buffer after it."""
    kept = {group.group_id for group in plan.groups}
    kept |= {waiting.group_id for waiting in plan.after.buffer}
    return [waiting.group_id for waiting in plan.before.buffer if waiting.group_id not in kept]
