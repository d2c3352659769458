"""Stored rollouts made anew without sampling: other rewards, filters, advantages, as new nodes
beside the old ones.

    rollout ────────────────────── reward      its accepted groups, by the new function
    rollout ── judged ── rollout ── reward      with a filter: every finished group is scored, the filter chooses, by these scores
    batch, reward ──────────────── advantage   stored log-probs and values, the new estimator (`reprocess_batch`)

The configuration is that of a whole run, with what shall be different. A node that the same inputs
made already is taken as it is, so nothing is scored twice, and what is not different stays the old
node. Which nodes make iteration k of the new branch stands in `rollouts/<branch>/<k>.json`; it has
no commits, for nothing is trained on it. A run that is to be trained from it names it
(`debug.load_debug_rollout_data`), and finds its rewards in the store.

A reward that a generate function gave its sample stands, as it does in every run.

Not here: the branch's configuration (`flows.derived_runs`), what old and new look like side by side
(`reprocess_report`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

from rlpipe.batch.files import read_rewards, read_samples, write_batch, write_rewards
from rlpipe.batch.metrics import batch_metrics
from rlpipe.config.data import NoReward
from rlpipe.config.hooks import hook_digest, load_hook
from rlpipe.config.run import RunConfig
from rlpipe.config.trial import trial
from rlpipe.errors import ConfigError, RewardError
from rlpipe.lineage.rollouts import StoredRollout
from rlpipe.lineage.stage_inputs import Inputs, advantage_inputs, reward_inputs
from rlpipe.reprocess.batch import reestimated
from rlpipe.rewards.base import SCORED, RewardRow, open_workers, reward_outputs, score
from rlpipe.rewards.post_process import post_process
from rlpipe.rewards.python import Scorer
from rlpipe.rewards.workers import Worker
from rlpipe.rollout.filters import Rejection, load_filter
from rlpipe.rollout.hooks.afterwards import Afterwards
from rlpipe.rollout.selection import Selection
from rlpipe.slime.args import slime_args
from rlpipe.store.branches import Branches
from rlpipe.store.nodes import Nodes
from rlpipe.store.notes import write_note
from rlpipe.store.objects.files import Files
from rlpipe.store.records import canonical
from rlpipe.types import Node, Sample, Stage

FILTERS = ("dynamic_sampling_filter_path", "rollout_sample_filter_path")
"""Keys of `rollout` that choose among scored groups, and among their samples."""
SURPLUS = "surplus"
"""Why a group is left out that a filter accepts when `rollout.rollout_batch_size` groups are there
already."""

Progress = Callable[[int, int], None]


class Reprocessed(NamedTuple):
    """One iteration of the new branch."""

    iteration: int
    rollout: Node
    reward: Node
    advantage: Node | None
    reused: bool
    """Was everything in the store already?"""
    without: str
    """Why there are no advantages; empty if there are."""


class Reprocessor:
    """The functions that a configuration names, loaded once, and its reward's workers. Entered and
    left by one event loop."""

    def __init__(
        self, files: Files, config: RunConfig, fence: Callable[[], object] | None = None
    ) -> None:
        """`fence` is called before an iteration is noted, and raises if this process may not do so
        any more (`Epoch.check`).

        Raises: ConfigError if a function is not there or cannot be called as it will be, or if
        nothing is scored.
        """
        if isinstance(config.reward.function, NoReward) or config.rollout.type == "dataset":
            found = f"reward.function.type={config.reward.function.type}, rollout.type={config.rollout.type}"
            raise ConfigError(
                "there is nothing to score",
                where="reprocess",
                found=found,
                expected="a run that samples",
            )
        self._files, self._config, self._nodes, self._fence = files, config, Nodes(files), fence
        self._args = slime_args(config)
        with trial(config, config.resources.import_timeout_s) as importing:
            importing.wait()
        Scorer(config.reward.function, self._args)
        if config.reward.custom_reward_post_process_path is not None:
            load_hook(config.reward.custom_reward_post_process_path)
        path = config.rollout.dynamic_sampling_filter_path
        self._keep = load_filter(path, self._args) if path else None
        alone = config.rollout.model_copy(update={"rollout_all_samples_process_path": None})
        self._afterwards = Afterwards(alone, self._args)
        self._open, self._turn = AsyncExitStack(), asyncio.Lock()
        self._workers: list[Worker] | None = None
        self._choice()

    async def __aenter__(self) -> Reprocessor:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()

    @cached_property
    def _contracts(self) -> dict[Stage, int]:
        """Version of each stage's contract on the new branch."""
        return Branches(self._files).contracts(self._config.run)

    async def iteration(
        self, stored: StoredRollout, progress: Progress | None = None
    ) -> Reprocessed:
        """The iteration under the configuration, noted under its run's name. `progress(done,
        total)` counts scored rows.

        Several may be under way at once; they are scored one after another. Raises: RewardError,
        DeadlineExceeded; what the fence says; ConfigError if this iteration of the branch is known
        with another result; ObjectMissing, ObjectCorrupt.
        """
        work = _Work(self._files, self._nodes)
        rollout = stored.rollout
        if not self._chooses_alike(rollout):
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
            raise ConfigError(
                "this iteration was reprocessed under this name with another result",
                where=f"run={self._config.run}, iteration {stored.iteration}",
                found=", ".join(
                    f"another {stage}" for stage in nodes if noted.get(stage) != nodes[stage]
                )
                or "advantages too",
                expected="the same functions, and the same rollout",
                do="take another name: --run NEW",
            )
        return Reprocessed(stored.iteration, rollout, reward, advantage, not work.done, without)

    def _chooses_alike(self, rollout: Node) -> bool:
        """Would the filters of the configuration choose from this rollout what was chosen from
        it?"""
        ours = self._choice()
        paths = [rollout.config.get(key) for key in FILTERS]
        theirs = {"paths": paths, "reward": rollout.config.get("reward") if any(paths) else None}
        theirs["hooks"] = {path: rollout.hooks.get(path) for path in ours["hooks"]}
        return canonical(ours, "filters") == canonical(theirs, "filters")

    def _choice(self) -> dict[str, Any]:
        """What decides which groups and samples count."""
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
        """The rollout with the groups and samples that the filters choose by the rewards; its rows
        are the old one's."""
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
        """Inputs of the rewards that a filter sees: of every finished group, before
        `custom_reward_post_process_path`."""
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
            rows = await self._score(
                [sample for group in groups.values() for sample in group], progress
            )
            return {
                "outputs": reward_outputs(rows),
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
        chosen_against = selection.rejected
        surplus = [
            group_id
            for group_id in groups
            if group_id not in chosen_against and group_id not in accepted
        ]
        dropped |= chosen_against | dict.fromkeys(surplus, SURPLUS)
        removed = self._afterwards.removed(groups, accepted)
        said = {
            name: value
            for name, value in rollout.outputs.items()
            if name not in ("removed", "fallbacks")
        }
        outputs = {
            **said,
            "accepted": accepted,
            "dropped": dropped,
            **({"removed": removed} if removed else {}),
        }
        outputs |= {"fallbacks": selection.fallbacks} if selection.fallbacks else {}
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
        """What the reward stage says of a rollout; by the scores that its groups were chosen by, if
        they are there."""
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
                "outputs": reward_outputs(rows),
                "files": [write_rewards(self._files, inputs.digest, rows)],
            }

        return await work.once(inputs, judge)

    def _known(self, rollout: Node) -> dict[tuple[str, int], RewardRow]:
        """The scores that a rollout's groups were chosen by here; empty if none were, or they are
        not there any more."""
        judging = rollout.config.get("judged_by")
        if judging is None or self._judging(rollout.config["of"]).digest != judging:
            return {}
        judged = self._nodes.find(Stage.REWARD, judging)
        return (
            {(row.group_id, row.index): row for row in read_rewards(self._files, judged)}
            if judged
            else {}
        )

    async def _score(self, samples: Sequence[Sample], progress: Progress | None) -> list[RewardRow]:
        """One iteration at a time: workers are shared."""
        async with self._turn:
            if self._workers is None:
                self._workers = await self._open.enter_async_context(
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
        """The advantage node, or why there is none."""
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
        outputs["metrics"] = batch_metrics(batch, columns)
        record = write_batch(self._files, inputs.digest, batch, columns)
        return work.commit(
            inputs, {"outputs": outputs, "files": [record]}, time.perf_counter() - started_s
        ), ""


class _Work:
    """Looks nodes up, and records what has to be made."""

    def __init__(self, files: Files, nodes: Nodes) -> None:
        self._files = files
        self._nodes = nodes
        self.done = False
        """Was anything made?"""

    async def once(self, inputs: Inputs, make: Callable[[], Any]) -> Node:
        """The node of these inputs; made by awaiting `make` if it is not there."""
        found = await asyncio.to_thread(self._nodes.find, inputs.stage, inputs.digest)
        if found is not None:
            return found
        started_s = time.perf_counter()
        made = await make()
        return await asyncio.to_thread(self.commit, inputs, made, time.perf_counter() - started_s)

    def commit(self, inputs: Inputs, made: dict[str, Any], seconds: float) -> Node:
        """Record what was made in so many seconds; a rollout keeps those of its sampling."""
        self.done = True
        outputs = {"seconds": seconds, **made["outputs"]}
        return self._nodes.commit(inputs.node(files=tuple(made["files"]), outputs=outputs))


def finished_groups(files: Files, rollout: Node) -> dict[str, list[Sample]]:
    """The groups that a rollout accepted or rejected, in the order they were drawn, if every sample
    of theirs was generated.

    Not those that wait in the buffer: they belong to a later iteration. No sample is removed.
    Raises: ObjectMissing, ObjectCorrupt.
    """
    said = {name: value for name, value in rollout.outputs.items() if name != "removed"}
    ours = {*said["accepted"], *said["dropped"]}
    groups: dict[str, list[Sample]] = {}
    for sample in read_samples(files, rollout.model_copy(update={"outputs": said})):
        if sample.group_id in ours:
            groups.setdefault(sample.group_id, []).append(sample)
    whole = (
        group_id
        for group_id in sorted(groups)
        if all(sample.status in SCORED for sample in groups[group_id])
    )
    return {
        group_id: sorted(groups[group_id], key=lambda sample: sample.index) for group_id in whole
    }


def with_rewards(
    groups: Mapping[str, Sequence[Sample]], rows: Sequence[RewardRow]
) -> dict[str, list[Sample]]:
    """The groups, each sample with its reward; None where it could not be scored."""
    said = {(row.group_id, row.index): row for row in rows}
    rewarded: dict[str, list[Sample]] = {}
    for group_id, samples in groups.items():
        own = [said.get((sample.group_id, sample.index)) for sample in samples]
        rewarded[group_id] = [
            replace(
                sample,
                reward=row.reward if row else None,
                reward_parts=dict(row.parts) if row else {},
            )
            for sample, row in zip(samples, own, strict=True)
        ]
    return rewarded
