"""A run's history in a store, as sampling and training leave it, for what reads stored rollouts; no
engine, no trainer.

Every iteration draws prompts `What is a + b?`; the responses are numbers, right or wrong by seed.
Rewards are 1 for a right one. With a filter, groups that are all right or all wrong are dropped.
Batches have log-probs of seeded noise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rlpipe.batch.build import fix_batch
from rlpipe.batch.estimate import with_advantages
from rlpipe.batch.files import write_batch, write_rewards
from rlpipe.config.load import validate
from rlpipe.config.run import RunConfig
from rlpipe.lineage.stage_inputs import (
    advantage_inputs,
    reward_inputs,
    rollout_inputs,
    train_inputs,
)
from rlpipe.rewards.reward_rows import RewardRow
from rlpipe.slime.args import slime_args
from rlpipe.store.branches import Branches, commit_name
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.store.parquet.shards import ShardWriter
from rlpipe.store.plans import Plans
from rlpipe.types import Commit, DataState, Node, Plan, PlannedGroup, Sample, Stage, Status
from tests.rows import rows_of
from tests.store.lineage import make_node

FILTER = "rlpipe.rollout.filters.reward_nonzero_std"
REWARD = "def score(sample):\n    return float(sample.response == sample.label)\n"


def configuration(
    folder: Path, run: str = "run", *, groups: int = 4, size: int = 4, **sections: Any
) -> RunConfig:
    """The run's configuration; its reward function is in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "right.py").write_text(REWARD)
    base: dict[str, Any] = {
        "run": run,
        "num_rollout": 100,
        "model": {
            "source": {"type": "huggingface", "hf_checkpoint": "/models/m"},
            "dtype": "float32",
        },
        "data": {"prompts": {"type": "file", "paths": ["a.jsonl"]}},
        "rollout": {"rollout_batch_size": groups, "n_samples_per_prompt": size},
        "reward": {"function": {"type": "python", "path": f"{folder}/right.py:score"}},
        "train": {"global_batch_size": groups * size},
    }
    for section, values in sections.items():
        base[section] = {**base.get(section, {}), **values} if isinstance(values, dict) else values
    return validate(base)


class History:
    """Writes iterations of a branch."""

    def __init__(self, files: Files, config: RunConfig, *, words: int = 3) -> None:
        """`words`: tokens of a response."""
        self.files = files
        self.config = config
        self._words = words
        self._nodes, self._branches, self._plans = Nodes(files), Branches(files), Plans(files)
        self._state = self._nodes.commit(make_node(Stage.INIT, {}, model="m")).digest
        self._branches.create(config.run, config.model_dump(mode="json"), self._state)

    def iterate(self, number: int = 1) -> History:
        """Train this number of iterations; each is committed."""
        for _ in range(number):
            newest = self._branches.newest(self.config.run)
            k = newest.iteration + 1 if newest else 0
            before = newest.data if newest else DataState()
            self._commit(newest, k, self._plan(k, before))
        return self

    def _plan(self, k: int, before: DataState) -> Plan:
        drawn = self.config.rollout.groups_per_round
        size = self.config.rollout.n_samples_per_prompt
        groups = []
        for number in range(before.draws, before.draws + drawn):
            a = number % 7
            b = number % 5
            values = {
                "prompt": f"What is {a} + {b}?",
                "prompt_ids": (1, a, 2, b),
                "label": str(a + b),
            }
            groups.append(
                PlannedGroup(
                    group_id=f"{self.config.run}:{number:08d}", seeds=tuple(range(size)), **values
                )
            )
        after = DataState(offset=before.offset + drawn, draws=before.draws + drawn)
        return Plan(
            branch=self.config.run, iteration=k, groups=tuple(groups), before=before, after=after
        )

    def _samples(self, group: PlannedGroup, k: int) -> list[Sample]:
        random = np.random.default_rng([k, int(group.group_id[-8:])])
        right = random.random() < 0.8
        samples = []
        for index in group.seeds:
            answer = int(str(group.label)) + (0 if right and random.random() < 0.5 else 1)
            log_probs = (-random.random(self._words)).astype(np.float32).tolist()
            made = Sample(
                group_id=group.group_id,
                index=index,
                prompt=group.prompt,
                prompt_ids=list(group.prompt_ids),
            )
            made.label, made.response, made.response_ids = (
                group.label,
                str(answer),
                [answer] * self._words,
            )
            made.rollout_log_probs = log_probs
            made.weight_versions = [(self._words, k)]
            made.status = Status.COMPLETED
            made.finish_reason = "stop"
            samples.append(made)
        return samples

    def _commit(self, newest: Commit | None, k: int, plan: Plan) -> None:
        config = self.config
        digest = self._plans.write(plan)
        groups = [self._samples(group, k) for group in plan.groups]
        rewards = [
            RewardRow(s.group_id, s.index, float(s.response == s.label))
            for group in groups
            for s in group
        ]
        rollout, accepted = self._rollout(plan, digest, groups)
        inputs = reward_inputs(config, rollout.digest)
        rows = [row for row in rewards if row.group_id in accepted]
        values = {
            "scored": len(rows),
            "errors": 0,
            "mean": float(np.mean([row.reward or 0.0 for row in rows])),
            "seconds": 0.1,
        }
        reward = self._nodes.commit(
            inputs.node(files=(write_rewards(self.files, inputs.digest, rows),), outputs=values)
        )
        batch = self._batch(
            [s for group in groups for s in group], rows, accepted, rollout, reward, k
        )
        inputs = train_inputs(config, batch.digest, self._state)
        state = self._nodes.commit(
            inputs.node(
                outputs={"state_digest": "s", "version": k + 1, "steps": [], "seconds": 0.1}
            )
        )
        self._state = state.digest
        commit = Commit(
            branch=config.run,
            iteration=k,
            parent=commit_name(config.run, k - 1) if newest else None,
            plans=(digest,),
            nodes={
                Stage.ROLLOUT: rollout.digest,
                Stage.REWARD: reward.digest,
                Stage.ADVANTAGE: batch.digest,
                Stage.TRAIN: state.digest,
            },
            trained=tuple(batch.outputs["groups"]),
            dropped={**rollout.outputs["dropped"], **batch.outputs["dropped"]},
            data=plan.after,
            config_digest="0" * 64,
        )
        self._branches.commit(commit)

    def _rollout(
        self, plan: Plan, digest: str, groups: list[list[Sample]]
    ) -> tuple[Node, list[str]]:
        filtered = self.config.rollout.dynamic_sampling_filter_path == FILTER
        kept = [
            group
            for group in groups
            if not filtered or len({s.response == s.label for s in group}) > 1
        ]
        accepted = [group[0].group_id for group in kept]
        dropped = {group[0].group_id: "zero_std" for group in groups if group not in kept}
        shard = ShardWriter(
            self.files, Plans.groups_prefix(digest), plan.iteration, attempt="only"
        ).write(groups, dropped)
        outputs = {
            "accepted": accepted,
            "dropped": dropped,
            "plans": [digest],
            "after": plan.after.model_dump(mode="json"),
        }
        inputs = rollout_inputs(self.config, "m", digest)
        return self._nodes.commit(
            inputs.node(files=(shard,), outputs={**outputs, "seconds": 1.0})
        ), accepted

    def _batch(
        self,
        samples: list[Sample],
        rows: list[RewardRow],
        accepted: list[str],
        rollout: Node,
        reward: Node,
        k: int,
    ) -> Node:
        chosen = fix_batch(rows_of(samples), rows, accepted=accepted, scored=True, version=k)
        batch = chosen.batch(with_samples=bool(self.config.advantage.hooks))
        noise = np.random.default_rng(k).normal(0, 0.01, batch.columns.num_response_tokens)
        assert batch.columns.rollout_log_probs is not None
        columns = batch.columns.with_columns(
            proximal_log_probs=(batch.columns.rollout_log_probs + noise).astype(np.float32)
        )
        columns = with_advantages(batch, columns, self.config.advantage, slime_args(self.config))
        inputs = advantage_inputs(self.config, rollout.digest, reward.digest, self._state)
        written = write_batch(self.files, inputs.digest, batch, columns)
        outputs = {
            "groups": list(batch.groups),
            "dropped": batch.dropped,
            "samples": len(columns),
            "seconds": 0.1,
        }
        return self._nodes.commit(inputs.node(files=written.files, outputs=outputs))
