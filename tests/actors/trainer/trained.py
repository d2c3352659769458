"""Branches of a real trainer without engines, for tests.

Seeded batches replace rollouts. The store has all records of real iterations, with nodes and rows
of rollouts and rewards, so that an audit is complete.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rlpipe.actors.trainer.group import TrainerGroup
from rlpipe.actors.trainer.standalone import standalone_trainer
from rlpipe.actors.trainer.states import TrainerStates
from rlpipe.actors.trainer.trainer_spec import TrainerSpec
from rlpipe.batch.build import Batch
from rlpipe.batch.files import write_batch, write_packing, write_rewards
from rlpipe.batch.packing import PackingPlan
from rlpipe.config.load import validate
from rlpipe.config.run import RunConfig
from rlpipe.lineage.stage_inputs import Inputs, checkpoint_inputs, init_inputs, train_inputs
from rlpipe.model_dir import model_fingerprint
from rlpipe.rewards.reward_rows import RewardRow
from rlpipe.store.branches import Branches, commit_name
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.store.parquet.rows import samples_to_table
from rlpipe.store.parquet.shards import data_folder, write_table
from rlpipe.store.segments import Segments, current_state
from rlpipe.types import Commit, DataState, Node, Sample, Stage, Status
from tests.engines.megatron.ranks import make_batch
from tests.engines.megatron.sizes import SIZES

SAMPLES = 8


def configuration(model_dir: str, run: str, **sections: Any) -> RunConfig:
    """Return the configuration of a run with 8 samples and two optimizer steps per iteration."""
    base: dict[str, Any] = {
        "run": run,
        "num_rollout": 100,
        "model": {
            "source": {"type": "huggingface", "hf_checkpoint": model_dir},
            "dtype": "float32",
        },
        "data": {"prompts": {"type": "file", "paths": ["a.jsonl"]}},
        "rollout": {"rollout_batch_size": 4, "n_samples_per_prompt": 2},
        "reward": {"function": {"type": "none"}},
        "train": {
            "global_batch_size": 4,
            "max_tokens_per_gpu": 64,
            "optimizer": {"lr": 1e-3, "lr_decay_style": "cosine"},
        },
        "resources": {"start_timeout_s": 120.0},
    }
    for section, values in sections.items():
        base[section] = {**base.get(section, {}), **values} if isinstance(values, dict) else values
    return validate(base)


@dataclass
class Trained:
    """A branch, and the trainer that holds its states."""

    config: RunConfig
    files: Files
    trainer: TrainerGroup
    home: Path
    epoch: int = 1
    states: list[str] = field(default_factory=list)
    """State digests of the nodes made by this object."""

    async def set_up_for(self, config: RunConfig) -> Trained:
        """Set up the same ranks for another run."""
        source: Any = config.model.source
        spec = TrainerSpec.of(
            config,
            model_dir=source.hf_checkpoint,
            store_root=self.files.root,
            work_dir=self.home / config.run,
        )
        await self.trainer.setup(spec)
        return Trained(config, self.files, self.trainer, self.home)

    @property
    def nodes(self) -> Nodes:
        return Nodes(self.files)

    @property
    def branches(self) -> Branches:
        return Branches(self.files)

    @property
    def trainer_states(self) -> TrainerStates:
        config = self.config
        init = self.branches.get(config.run).init
        interval = config.ref_update_interval
        return TrainerStates(
            self.trainer,
            self.files,
            config.run,
            init,
            config.deterministic,
            60.0,
            60.0,
            {},
            interval,
            self.config.ref_update_offset,
        )

    async def begin(self, start_from: str | None = None) -> str:
        """Load first weights and create the branch; return the init node's digest."""
        source: Any = self.config.model.source
        fingerprint = model_fingerprint(
            source.hf_checkpoint, self.home / "models" / "fingerprints.json"
        )
        inputs = init_inputs(self.config, fingerprint, start_from)
        outputs = await self.trainer.initialise(inputs.digest, start_from, deadline_s=60)
        self.nodes.commit(inputs.node(outputs={"version": 0, **outputs}))
        self.branches.create(self.config.run, self.config.model_dump(mode="json"), inputs.digest)
        return inputs.digest

    async def iterate(
        self, number: int = 1, scored: Callable[[str, int], Awaitable[Node]] | None = None
    ) -> None:
        """Run iterations: restore, make a batch, train, commit.

        `scored(before, iteration)` makes the batch, if given.
        """
        for _ in range(number):
            newest = self.branches.newest(self.config.run)
            k = newest.iteration + 1 if newest else 0
            recorded = (
                newest.nodes[Stage.TRAIN] if newest else self.branches.get(self.config.run).init
            )
            before = current_state(Segments(self.files), self.config.run, k, recorded)
            before = await self.trainer_states.restore(before, version=k, epoch=self.epoch)
            batch = await scored(before, k) if scored else self.batch(before, k)
            train = await self.train(batch, before, k)
            self.commit(newest, k, {Stage.ADVANTAGE: batch.digest, Stage.TRAIN: train.digest})

    def batch(self, before: str, k: int) -> Node:
        """Write the advantage node of an iteration, with the same rows in every branch."""
        columns = make_batch(SAMPLES, seed=k)
        columns = columns.with_columns(proximal_log_probs=columns.rollout_log_probs)
        groups = tuple(f"{self.config.run}:{4 * k + i // 2:08d}" for i in range(SAMPLES))
        batch = Batch(
            columns, groups, tuple(i % 2 for i in range(SAMPLES)), np.zeros(SAMPLES), {}, None
        )
        inputs = Inputs(
            Stage.ADVANTAGE, {"rollout": f"rollout {k}", "reward": f"reward {k}", "before": before}
        )
        written = write_batch(self.files, inputs.digest, batch, columns)
        return self.nodes.commit(
            inputs.node(files=written.files, outputs={"groups": list(batch.groups), "dropped": {}})
        )

    async def train(self, batch: Node, before: str, k: int) -> Node:
        inputs = train_inputs(self.config, batch.digest, before)
        answers = await self.trainer.call(
            "train", key=inputs.digest, before=before, advantage=batch.digest, deadline_s=60
        )
        assert len({answer["state_digest"] for answer in answers}) == 1
        self.states.append(answers[0]["state_digest"])
        record = write_packing(
            self.files, inputs.digest, PackingPlan.model_validate(answers[0]["packing"])
        )
        outputs = {
            "state_digest": answers[0]["state_digest"],
            "version": k + 1,
            "steps": answers[0]["steps"],
        }
        return self.nodes.commit(inputs.node(files=(record,), outputs=outputs))

    def commit(self, newest: Commit | None, k: int, nodes: dict[Stage, str]) -> Commit:
        commit = Commit(
            branch=self.config.run,
            iteration=k,
            parent=commit_name(newest.branch, newest.iteration) if newest else None,
            plans=(f"plan {k}",),
            nodes=nodes,
            data=DataState(draws=4 * (k + 1)),
            config_digest="0" * 64,
            epoch=self.epoch,
        )
        return self.branches.commit(commit)

    async def checkpoint(self) -> str:
        """Save a checkpoint of the newest committed weights; return its node's digest."""
        newest = self.branches.newest(self.config.run)
        assert newest is not None
        train = newest.nodes[Stage.TRAIN]
        return (
            await self.trainer_states.save(checkpoint_inputs(train), train, newest.iteration + 1)
        ).digest


def sampled_rows(files: Files, k: int) -> tuple[str, str]:
    """Write rollout and reward nodes of samples of weight version k; return their digests."""
    columns = make_batch(SAMPLES, seed=k)
    random = np.random.default_rng(k)
    nodes = Nodes(files)
    assert columns.rollout_log_probs is not None
    texts = zip(
        np.split(columns.tokens, columns.offsets[1:-1]), columns.prompt_lengths, strict=True
    )
    samples = [
        Sample(
            group_id=f"group:{4 * k + i // 2:08d}",
            index=i % 2,
            prompt="",
            prompt_ids=tokens[:prompt].tolist(),
            response_ids=tokens[prompt:].tolist(),
            rollout_log_probs=log_probs.tolist(),
            weight_versions=[(len(log_probs), k)],
            status=Status.COMPLETED,
        )
        for i, ((tokens, prompt), log_probs) in enumerate(
            zip(texts, columns.split(columns.rollout_log_probs), strict=True)
        )
    ]
    rows = [RewardRow(s.group_id, s.index, float(random.integers(0, 2))) for s in samples]
    rollout = Inputs(Stage.ROLLOUT, {"plan": f"plan {k}"})
    reward = Inputs(Stage.REWARD, {"rollout": rollout.digest})
    shard = write_table(
        files, data_folder(Stage.ROLLOUT, rollout.digest), "samples", samples_to_table(samples, k)
    )
    accepted = sorted({sample.group_id for sample in samples})
    nodes.commit(rollout.node(files=(shard,), outputs={"accepted": accepted}))
    nodes.commit(reward.node(files=(write_rewards(files, reward.digest, rows),)))
    return rollout.digest, reward.digest


@asynccontextmanager
async def trained(config: RunConfig, files: Files, home: Path, **options: Any):
    """Yield the branch of a configuration, with a standalone trainer."""
    async with standalone_trainer(
        config, files, home=home, name=config.run, options=options
    ) as trainer:
        yield Trained(config, files, trainer, home)


def tiny_model(directory: Path, seed: int = 0) -> str:
    """Write a random Qwen3 with 0.1 million parameters; return its directory."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.12, generator=generator)
    model.save_pretrained(directory)
    return str(directory)


OTHER_CPU = {
    "env_vars": {
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
    },
}
"""Ray's runtime environment for a process without the newer vector instructions.

Its results differ in the last bits, as on an older machine.
"""
