"""Re-score stored rollouts and re-estimate their advantages, as new nodes.

    rollout ─────────────────────── reward     accepted groups, by the new function
    rollout ── judged ── rollout ── reward     with a filter: all finished groups are scored, and
                                               the filter chooses among them
    batch, reward ───────────────── advantage  stored log-probs and values, the new estimator

`Reprocessor.iteration` does one iteration; `reestimated` computes its advantages. The configuration
is that of a whole run with some settings changed. A node with equal inputs is reused, so nothing is
scored twice. `rollouts/<branch>/<k>.json` names the nodes of iteration k of the new branch, which
has no commits: nothing is trained on it. A run that trains from the new branch names it in
`debug.load_debug_rollout_data` and finds its rewards in the store.

The reward that a generate function gave its sample stays, as in every run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from rlpipe.batch.build import Batch, fix_batch
from rlpipe.batch.columns import BatchColumns
from rlpipe.batch.estimate import with_advantages
from rlpipe.batch.files import (
    StoredBatch,
    read_rewards,
    read_samples,
    write_batch,
    write_rewards,
)
from rlpipe.batch.metrics import batch_metrics
from rlpipe.batch.rows import RolloutRows
from rlpipe.config.data import NoReward
from rlpipe.config.hooks import hook_digest, load_hook
from rlpipe.config.import_check import check_imports
from rlpipe.config.run import RunConfig
from rlpipe.errors import ConfigError, DataError, RewardError
from rlpipe.lineage.rollouts import StoredRollout
from rlpipe.lineage.stage_inputs import Inputs, advantage_inputs, reward_inputs
from rlpipe.rewards.post_process import post_process
from rlpipe.rewards.reward_rows import SCORED, RewardRow, open_workers, reward_outputs, score
from rlpipe.rewards.scorer import Scorer
from rlpipe.rewards.workers import Worker
from rlpipe.rollout.filters import Rejection, load_filter
from rlpipe.rollout.group_selection import Selection
from rlpipe.rollout.hooks.finished_rollout import FinishedRolloutHooks
from rlpipe.slime.args import slime_args
from rlpipe.store.branches import Branches
from rlpipe.store.nodes import Nodes
from rlpipe.store.notes import write_note
from rlpipe.store.objects.files import Files
from rlpipe.store.records import canonical
from rlpipe.types import Node, Sample, Stage

FILTERS = ("dynamic_sampling_filter_path", "rollout_sample_filter_path")
"""Keys of `rollout` whose functions choose among scored groups, and among their samples."""
BATCH_FULL = "surplus"
"""Drop reason of an accepted group after the batch is full. (A rollout buffers such groups.)"""
UNSCORED = "unscored"
"""Drop reason of a group without log-probs, because the stored batch does not have it."""
MODEL_COLUMNS = ("proximal_log_probs", "reference_log_probs", "teacher_log_probs", "values")

Progress = Callable[[int, int], None]


class Reprocessed(NamedTuple):
    """One iteration of the new branch."""

    iteration: int
    rollout: Node
    reward: Node
    advantage: Node | None
    reused: bool
    """True if every node existed before."""
    without: str
    """Reason why there are no advantages; empty if there are."""


class Reprocessor:
    """Load the functions of a configuration once, and reprocess iterations with them.

    An async context manager that owns the reward workers; one event loop enters and leaves it.
    """

    def __init__(
        self, files: Files, config: RunConfig, fence: Callable[[], object] | None = None
    ) -> None:
        """Load and check the functions.

        `fence` is called before an iteration is recorded and raises if this process may not write
        any more (`Epoch.check`).

        Raises: ConfigError if a function does not exist or has the wrong signature, or if the run
        has nothing to score.
        """
        if isinstance(config.reward.function, NoReward) or config.rollout.type == "dataset":
            raise ConfigError(
                "there is nothing to score",
                where="reprocess",
                found=f"reward.function.type={config.reward.function.type}, "
                f"rollout.type={config.rollout.type}",
                expected="a run that samples",
            )
        self._files = files
        self._config = config
        self._nodes = Nodes(files)
        self._fence = fence
        self._args = slime_args(config)
        with check_imports(config, config.resources.import_timeout_s) as importing:
            importing.wait()
        Scorer(config.reward.function, self._args)
        if config.reward.custom_reward_post_process_path is not None:
            load_hook(config.reward.custom_reward_post_process_path)
        path = config.rollout.dynamic_sampling_filter_path
        self._keep = load_filter(path, self._args) if path else None
        alone = config.rollout.model_copy(update={"rollout_all_samples_process_path": None})
        self._afterwards = FinishedRolloutHooks(alone, self._args)
        self._resources = AsyncExitStack()
        self._scoring = asyncio.Lock()
        self._workers: list[Worker] | None = None
        self._choice()  # reads the sources of the hooks

    async def __aenter__(self) -> Reprocessor:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._resources.aclose()

    @cached_property
    def _contracts(self) -> dict[Stage, int]:
        """Contract versions of the new branch."""
        return Branches(self._files).contracts(self._config.run)

    async def iteration(
        self, stored: StoredRollout, progress: Progress | None = None
    ) -> Reprocessed:
        """Reprocess one iteration and record its nodes under the run's name.

        `progress(done, total)` counts scored rows. Several iterations may run at once; their
        samples are scored one iteration after another.

        Raises: RewardError, DeadlineExceeded; the errors of the fence; ConfigError if the branch
        has another result for this iteration; ObjectMissing, ObjectCorrupt.
        """
        work = _Work(self._files, self._nodes)
        rollout = stored.rollout
        if not self._same_choice(rollout):
            rollout = await self._chosen(work, rollout, progress)
        reward = await self._rewarded(work, rollout, progress)
        advantage, without = await asyncio.to_thread(self._estimated, work, stored, rollout, reward)
        nodes = {Stage.ROLLOUT: rollout.digest, Stage.REWARD: reward.digest}
        if advantage is not None:
            nodes[Stage.ADVANTAGE] = advantage.digest
        if self._fence is not None:
            await asyncio.to_thread(self._fence)
        noted = await asyncio.to_thread(
            write_note, self._files, self._config.run, stored.iteration, nodes
        )
        if noted != nodes:
            differing = [f"another {stage}" for stage in nodes if noted.get(stage) != nodes[stage]]
            raise ConfigError(
                "this iteration was reprocessed under this name with another result",
                where=f"run={self._config.run}, iteration {stored.iteration}",
                found=", ".join(differing) or "advantages too",
                expected="the same functions, and the same rollout",
                do="take another name: --run NEW",
            )
        return Reprocessed(stored.iteration, rollout, reward, advantage, not work.done, without)

    def _same_choice(self, rollout: Node) -> bool:
        """True if the configuration's filters already made this rollout's choice."""
        ours = self._choice()
        paths = [rollout.config.get(key) for key in FILTERS]
        theirs = {"paths": paths, "reward": rollout.config.get("reward") if any(paths) else None}
        theirs["hooks"] = {path: rollout.hooks.get(path) for path in ours["hooks"]}
        return canonical(ours, "filters") == canonical(theirs, "filters")

    def _choice(self) -> dict[str, Any]:
        """Return the inputs that decide which groups and samples count."""
        paths = [getattr(self._config.rollout, key) for key in FILTERS]
        if not any(paths):
            return {"paths": paths, "reward": None, "hooks": {}}
        hooks = {path: hook_digest(path) for path in paths if path}
        scored = reward_inputs(self._config, "", self._contracts)
        return {
            "paths": paths,
            "reward": self._config.reward.identity(),
            "hooks": {**hooks, **scored.hooks},
        }

    async def _chosen(self, work: _Work, rollout: Node, progress: Progress | None) -> Node:
        """Return the rollout with the filters' choice of groups and samples, over the same rows."""
        judging = self._judging(rollout.digest)
        choice = self._choice()
        settings = {
            key: path
            for key, path in zip(FILTERS, choice["paths"], strict=True)
            if path is not None
        }
        settings |= {"rollout_batch_size": self._config.rollout.rollout_batch_size}
        if choice["reward"] is not None:
            settings["reward"] = choice["reward"]
        settings |= {"of": rollout.digest, "judged_by": judging.digest}
        plan = {role: digest for role, digest in rollout.parents.items() if role == "plan"}

        async def choose() -> dict[str, Any]:
            judged = await self._judged(work, judging, rollout, progress)
            return await asyncio.to_thread(self._choose, rollout, judged)

        inputs = Inputs(
            Stage.ROLLOUT, plan, settings, choice["hooks"], self._contracts[Stage.ROLLOUT]
        )
        return await work.once(inputs, choose)

    def _judging(self, rollout: str) -> Inputs:
        """Return the inputs of the rewards that a filter sees.

        These are the rewards of every finished group, before `custom_reward_post_process_path`.
        """
        plain = self._config.reward.model_copy(update={"custom_reward_post_process_path": None})
        inputs = reward_inputs(
            self._config.model_copy(update={"reward": plain}), rollout, self._contracts
        )
        return replace(inputs, config={**inputs.config, "of": "finished groups"})

    async def _judged(
        self, work: _Work, judging: Inputs, rollout: Node, progress: Progress | None
    ) -> Node:
        async def judge() -> dict[str, Any]:
            groups = await asyncio.to_thread(finished_groups, self._files, rollout)
            samples = [sample for group in groups.values() for sample in group]
            rows = await self._score(samples, progress)
            return {
                "outputs": reward_outputs(rows, samples, self._config.evaluation.datasets),
                "files": [write_rewards(self._files, judging.digest, rows)],
            }

        return await work.once(judging, judge)

    def _choose(self, rollout: Node, judged: Node) -> dict[str, Any]:
        groups = with_rewards(
            finished_groups(self._files, rollout), read_rewards(self._files, judged)
        )
        dropped = dict.fromkeys(rollout.outputs["accepted"], "failed") | rollout.outputs["dropped"]
        dropped = {
            group_id: reason for group_id, reason in dropped.items() if group_id not in groups
        }
        selection = Selection(self._config.rollout.rollout_batch_size, in_order=True)
        selection.add(groups)
        for group_id, samples in groups.items():
            rejection = self._rejection(samples)
            if rejection is None:
                selection.decide(group_id, None)
            else:
                selection.decide(group_id, rejection.reason, fallback=rejection.fallback)
        accepted = list(selection.accepted)
        decided = {*selection.rejected, *accepted}
        left = [group_id for group_id in groups if group_id not in decided]
        dropped |= selection.rejected | dict.fromkeys(left, BATCH_FULL)
        removed = self._afterwards.removed(groups, accepted)
        outputs = {**rollout.outputs, "accepted": accepted, "dropped": dropped}
        for name, value in {"removed": removed, "fallbacks": selection.fallbacks}.items():
            outputs.pop(name, None)
            if value:
                outputs[name] = value
        return {"outputs": outputs, "files": rollout.files}

    def _rejection(self, samples: Sequence[Sample]) -> Rejection | None:
        if any(sample.reward is None for sample in samples):
            return Rejection("reward_error")
        if self._keep is None:
            return None
        try:
            return self._keep(samples)
        except RewardError:
            return Rejection("filter_error")

    async def _rewarded(self, work: _Work, rollout: Node, progress: Progress | None) -> Node:
        """Return the reward node of a rollout; rows that a filter needed are not scored again."""
        inputs = reward_inputs(self._config, rollout.digest, self._contracts)

        async def judge() -> dict[str, Any]:
            accepted = set(rollout.outputs["accepted"])
            samples = [
                row
                for row in await asyncio.to_thread(read_samples, self._files, rollout)
                if row.group_id in accepted
            ]
            known = await asyncio.to_thread(self._known, rollout)
            rows = (
                [known[s.group_id, s.index] for s in samples]
                if known
                else await self._score(samples, progress)
            )
            if path := self._config.reward.custom_reward_post_process_path:
                rows = await asyncio.to_thread(post_process, path, self._args, samples, rows)
            return {
                "outputs": reward_outputs(rows, samples, self._config.evaluation.datasets),
                "files": [write_rewards(self._files, inputs.digest, rows)],
            }

        return await work.once(inputs, judge)

    def _known(self, rollout: Node) -> dict[tuple[str, int], RewardRow]:
        """Return the scores by which this branch chose the rollout's groups; empty if none."""
        judging = rollout.config.get("judged_by")
        if judging is None or self._judging(rollout.config["of"]).digest != judging:
            return {}
        judged = self._nodes.find(Stage.REWARD, judging)
        rows = read_rewards(self._files, judged) if judged else []
        return {(row.group_id, row.index): row for row in rows}

    async def _score(self, samples: Sequence[Sample], progress: Progress | None) -> list[RewardRow]:
        async with self._scoring:  # iterations share the workers
            if self._workers is None:
                self._workers = await self._resources.enter_async_context(
                    open_workers(self._config.reward, self._args)
                )
            return await score(
                samples,
                self._config.reward,
                args=self._args,
                progress=progress,
                workers=self._workers,
            )

    def _estimated(
        self, work: _Work, stored: StoredRollout, rollout: Node, reward: Node
    ) -> tuple[Node | None, str]:
        """Return the advantage node, or None with the reason."""
        scored = stored.advantage
        own = self._config.advantage
        if scored is None or not scored.files:
            return None, "no model has scored this rollout"
        if own.advantage_estimator == "none" and own.custom_advantage_function_path is None:
            return None, "advantage.advantage_estimator: none"
        inputs = advantage_inputs(
            self._config, rollout.digest, reward.digest, scored.parents["before"], self._contracts
        )
        if inputs.digest == scored.digest:
            return scored, ""
        inputs = replace(inputs, parents={**inputs.parents, "scored": scored.digest})
        if (found := self._nodes.find(inputs.stage, inputs.digest)) is not None:
            return found, ""
        started_s = time.perf_counter()
        own_version = {"rollout": rollout, "reward": reward, "version": stored.iteration}
        made = reestimated(self._files, self._config, scored=scored, **own_version)
        if isinstance(made, str):
            return None, made
        batch, columns = made
        outputs = {"groups": list(batch.groups), "dropped": batch.dropped, "samples": len(columns)}
        written = write_batch(self._files, inputs.digest, batch, columns)
        outputs |= {"metrics": batch_metrics(batch, columns), **written.outputs}
        return work.commit(
            inputs, {"outputs": outputs, "files": written.files}, time.perf_counter() - started_s
        ), ""


class _Work:
    """Find nodes by their inputs, and record those that have to be computed."""

    def __init__(self, files: Files, nodes: Nodes) -> None:
        self._files = files
        self._nodes = nodes
        self.done = False
        """True once a node was computed."""

    async def once(self, inputs: Inputs, make: Callable[[], Any]) -> Node:
        """Return the node of these inputs; await `make` for its results if it does not exist."""
        found = await asyncio.to_thread(self._nodes.find, inputs.stage, inputs.digest)
        if found is not None:
            return found
        started_s = time.perf_counter()
        made = await make()
        return await asyncio.to_thread(self.commit, inputs, made, time.perf_counter() - started_s)

    def commit(self, inputs: Inputs, made: dict[str, Any], seconds: float) -> Node:
        """Record a computed node. A rollout keeps the seconds of its sampling."""
        self.done = True
        outputs = {"seconds": seconds, **made["outputs"]}
        return self._nodes.commit(inputs.node(files=tuple(made["files"]), outputs=outputs))


def finished_groups(files: Files, rollout: Node) -> dict[str, list[Sample]]:
    """Return the groups of a rollout whose samples were all generated, in the order of the draws.

    Groups in the buffer are not among them: they belong to a later iteration. Removed samples are
    included. Raises: ObjectMissing, ObjectCorrupt.
    """
    outputs = {name: value for name, value in rollout.outputs.items() if name != "removed"}
    decided = {*outputs["accepted"], *outputs["dropped"]}
    groups: dict[str, list[Sample]] = {}
    for sample in read_samples(files, rollout.model_copy(update={"outputs": outputs})):
        if sample.group_id in decided:
            groups.setdefault(sample.group_id, []).append(sample)
    return {
        group_id: sorted(samples, key=lambda sample: sample.index)
        for group_id, samples in sorted(groups.items())
        if all(sample.status in SCORED for sample in samples)
    }


def with_rewards(
    groups: Mapping[str, Sequence[Sample]], rows: Sequence[RewardRow]
) -> dict[str, list[Sample]]:
    """Return the groups with the reward of each sample; None if it could not be scored."""
    reward_of = {(row.group_id, row.index): row for row in rows}
    rewarded: dict[str, list[Sample]] = {}
    for group_id, samples in groups.items():
        own = [reward_of.get((sample.group_id, sample.index)) for sample in samples]
        rewarded[group_id] = [
            replace(
                sample,
                reward=row.reward if row else None,
                reward_parts=dict(row.parts) if row else {},
            )
            for sample, row in zip(samples, own, strict=True)
        ]
    return rewarded


def reestimated(
    files: Files, config: RunConfig, *, scored: Node, rollout: Node, reward: Node, version: int
) -> tuple[Batch, BatchColumns] | str:
    """Return the batch of a rollout's accepted groups with new advantages, or why there is none.

    The models' log-probs and values are those of the node `scored`, computed with the weights of
    that time. A group that `scored` does not have is dropped as `unscored`. `version`: the weight
    version that was trained.

    Raises: DataError if a user function returns a wrong value; ObjectMissing, ObjectCorrupt.
    """
    batch_file = StoredBatch(files, scored)
    stored = batch_file.columns()
    if names := lacking(config, stored):
        return f"the stored batch has no {', '.join(names)}: training from the result scores it"
    keys = batch_file.keys()
    known = {group_id for group_id, _ in keys}
    accepted = rollout.outputs["accepted"]
    try:
        batch = fix_batch(
            RolloutRows.of_node(files, rollout),
            read_rewards(files, reward),
            accepted=[group_id for group_id in accepted if group_id in known],
            scored=True,
            version=version,
            max_staleness=config.async_buffer_size,
            mask_stale=config.rollout.mask_offpolicy_in_partial_rollout,
        ).batch(with_samples=bool(config.advantage.hooks))
    except DataError as error:
        return f"{error.problem}: {error.found}"
    unscored = {group_id: UNSCORED for group_id in accepted if group_id not in known}
    batch = replace(batch, dropped={**batch.dropped, **unscored})
    scores = _with_stored(batch, stored, keys)
    args = slime_args(config)
    return batch, with_advantages(batch, scores, config.advantage, args, iteration=version)


def lacking(config: RunConfig, stored: BatchColumns) -> list[str]:
    """Return the model columns that the estimator reads and the stored batch does not have."""
    needed: set[str] = set()
    if config.uses_critic:
        needed.add("values")
    if config.advantage.kl_coef:
        needed |= {"proximal_log_probs", "reference_log_probs"}
    if config.advantage.use_opd:
        needed |= {"proximal_log_probs", "teacher_log_probs"}
    return [name for name in MODEL_COLUMNS if name in needed and getattr(stored, name) is None]


def _with_stored(batch: Batch, stored: BatchColumns, keys: list[tuple[str, int]]) -> BatchColumns:
    """Return the batch's columns with the stored model columns of the same samples.

    Raises: DataError if the stored samples differ.
    """
    row_of = {key: row for row, key in enumerate(keys)}
    rows = list(zip(batch.group_ids, batch.indices, strict=True))
    if missing := [key for key in rows if key not in row_of]:
        raise DataError(
            "a sample of a scored group is not in its batch",
            where="/".join(map(str, missing[0])),
            found="no row",
        )
    same = stored.select([row_of[key] for key in rows])
    equal_tokens = np.array_equal(same.tokens, batch.columns.tokens)
    if not equal_tokens or not np.array_equal(same.offsets, batch.columns.offsets):
        raise DataError(
            "a stored batch has other tokens than its samples", where=f"advantage of {rows[0][0]}"
        )
    stored_columns = {name: getattr(same, name) for name in (*MODEL_COLUMNS, "routed_experts")}
    return batch.columns.with_columns(**stored_columns)
