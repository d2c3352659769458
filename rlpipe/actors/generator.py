"""`Generator`: the actor that plans iterations, samples them through the router and writes finished groups as shards.

It holds the prompts, the tokenizer and an HTTP client, and nothing that cannot be read again: a generator that is killed
is started again, reads the plan, adopts the groups whose shards are there and asks for the rest.

Not here: how one group is sampled (`rollout.generate`), rewards of a training rollout (a stage of their own).
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rlpipe.config.data import EvalDataset, RewardConfig, RolloutConfig
from rlpipe.config.run import RunConfig
from rlpipe.data.prompts import load_prompts
from rlpipe.data.source import DataSource, evaluation_plan
from rlpipe.data.tokens import load_tokenizer
from rlpipe.errors import EngineError, RlpipeError
from rlpipe.rewards.base import score
from rlpipe.rollout.client import GenerateClient
from rlpipe.rollout.dataset import Given
from rlpipe.rollout.generate import Generate, SingleTurn, sampling_params
from rlpipe.rollout.sampler import Flush, RolloutProgress, RolloutResult, run_rollout
from rlpipe.stage_files import write_evaluation
from rlpipe.store.files import Files
from rlpipe.store.plans import Plans
from rlpipe.store.shards import ShardWriter, adopt
from rlpipe.types import DataState, Plan, Sample

SAMPLES_PER_REQUEST_ON_CPU = 64


@dataclass(frozen=True)
class GeneratorSpec:
    """What a generator is set up with. An equal spec needs no second set-up."""

    config: RunConfig
    model_dir: str
    store_root: str


class RolloutAbandoned(EngineError):
    """Another attempt at the rollout took over, or an engine could not be brought back."""


class Generator:
    """See the module. Methods are coroutines: `progress` answers while `rollout` runs."""

    def __init__(self, cwd: str) -> None:
        os.chdir(cwd)
        self._spec: GeneratorSpec | None = None
        self._client: GenerateClient | None = None
        self._progress = RolloutProgress(groups=0)
        self._running: asyncio.Task[RolloutResult] | None = None

    async def setup(self, spec: GeneratorSpec) -> dict[str, Any]:
        """Read and check all prompts. Answers `{"rows", "eval_rows"}`. Raises: DataError naming file and line; ConfigError."""
        if self._spec != spec:
            if self._client is not None:
                await self._client.aclose()
                self._client = None
            self._load(spec)
        return {"rows": len(self._source), "eval_rows": {name: len(plan.groups) for name, plan in self._held_out.items()}}

    async def connect(self, router_url: str, *, on_gpus: bool) -> None:
        """Send generation requests to this router from now on."""
        if self._client is not None and self._client.router_url == router_url.rstrip("/"):
            return
        if self._client is not None:
            await self._client.aclose()
        self._client = GenerateClient(
            router_url,
            vocab_size=self._model_config["vocab_size"],
            deadline_s=self._config.engine.request_timeout_s,
            samples_per_request=1 if on_gpus else SAMPLES_PER_REQUEST_ON_CPU,
        )

    async def plan(self, iteration: int, state: DataState) -> dict[str, Any]:
        """Write the plan of an iteration: `{"plan": digest, "after": DataState}`."""
        planned = self._source.plan(iteration, state)
        return {"plan": self._plans.write(planned), "after": planned.after}

    async def rollout(self, plan: str) -> dict[str, Any]:
        """Sample what a plan asks for, except the groups whose shards are there. `{"files", "outputs", "seconds"}`.

        Raises: EngineError if fewer than `rollout.min_completed_fraction` of the groups came back; DeadlineExceeded.
        """
        start = time.perf_counter()
        await self.abandon()
        planned, prefix = self._plans.read(plan), self._plans.groups_prefix(plan)
        adopted = adopt(self._files, prefix)
        records = [record for record, _ in adopted]
        writer = ShardWriter(self._files, prefix, planned.iteration)

        def flush(groups: list[list[Sample]]) -> None:
            records.append(writer.write(groups))

        done = {group_id for _, group_ids in adopted for group_id in group_ids}
        result = await self._alone(self._sample(planned, done, flush, self._config.rollout))
        return {"files": records, "outputs": rollout_outputs(result), "seconds": time.perf_counter() - start}

    async def abandon(self) -> None:
        """End the rollout that runs, if one does: finished groups are flushed, its call fails."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})

    async def _alone(self, sampling: Coroutine[Any, Any, RolloutResult]) -> RolloutResult:
        self._running = asyncio.create_task(sampling)
        try:
            return await self._running
        except asyncio.CancelledError as error:
            raise RolloutAbandoned("the rollout was abandoned", where="generator.rollout") from error
        finally:
            self._running = None

    async def evaluate(self, name: str, key: str, version: int) -> dict[str, Any]:
        """Sample and score every prompt of a held-out set once, into files of node `key`. `{"files", "outputs", "seconds"}`."""
        start = time.perf_counter()
        dataset = next(dataset for dataset in self._config.evaluation.datasets if dataset.name == name)
        sampling, reward = evaluation_settings(dataset, self._config.rollout, self._config.reward)
        samples: list[Sample] = []

        def keep(groups: list[list[Sample]]) -> None:
            samples.extend(sample for group in groups for sample in group)

        result = await self._sample(self._held_out[name], set(), keep, sampling, temperature=dataset.temperature)
        rows = await score(samples, reward)
        record = write_evaluation(self._files, key, version, samples, rows)
        rewards = [row.reward for row in rows if row.reward is not None]
        outputs = {**rollout_outputs(result), "accuracy": sum(rewards) / max(1, len(rewards)), "scored": len(rewards)}
        return {"files": [record], "outputs": outputs, "seconds": time.perf_counter() - start}

    async def progress(self) -> dict[str, Any]:
        """How far the rollout is: `{"done", "total", "tokens"}`, in groups and response tokens."""
        now = self._progress
        return {"done": now.finished_groups, "total": now.groups, "tokens": now.response_tokens}

    def _load(self, spec: GeneratorSpec) -> None:
        config = self._config = spec.config
        source = config.model.source
        self._model_config = json.loads((Path(spec.model_dir) / "config.json").read_text())
        self._tokenizer = load_tokenizer(spec.model_dir, trust_remote_code=getattr(source, "trust_remote_code", False))
        rows = load_prompts(config.data.prompts)
        self._source = DataSource(rows, self._tokenizer, config.data, config.rollout, config.run)
        self._source.check()
        self._held_out = {dataset.name: self._evaluation_plan(dataset) for dataset in config.evaluation.datasets}
        self._files = Files(spec.store_root)
        self._plans = Plans(self._files)
        self._spec = spec

    def _evaluation_plan(self, dataset: EvalDataset) -> Plan:
        config = self._config
        sampling, _ = evaluation_settings(dataset, config.rollout, config.reward)
        rows = load_prompts(dataset.prompts)
        return evaluation_plan(dataset, rows, self._tokenizer, config.data, sampling, branch=config.run, iteration=0)

    async def _sample(
        self, plan: Plan, done: set[str], flush: Flush, sampling: RolloutConfig, *, temperature: float | None = None
    ) -> RolloutResult:
        engine = self._config.engine
        return await run_rollout(
            plan,
            done,
            self._generate(sampling, temperature),
            flush,
            concurrency=max(1, engine.server_concurrency * self._config.resources.num_engines // sampling.n_samples_per_prompt),
            timeout_s=sampling.timeout_s,
            flush_interval_s=sampling.flush_interval_s,
            min_completed_fraction=sampling.min_completed_fraction,
            progress=partial(setattr, self, "_progress"),
        )

    def _generate(self, sampling: RolloutConfig, temperature: float | None) -> Generate:
        def decode(ids: Sequence[int]) -> str:
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

        if sampling.type == "dataset":
            return Given(decode=decode)
        if self._client is None:
            raise RlpipeError("this run has no engines to sample from", where="generator", do="call connect first")
        longest = self._model_config.get("max_position_embeddings") or 2**31
        return SingleTurn(
            self._client,
            sampling_params(sampling, temperature=temperature),
            decode=decode,
            context_len=min(longest, sampling.rollout_max_context_len or longest),
            seeded=bool(self._config.engine.sglang.get("enable_deterministic_inference")),
        )


def evaluation_settings(dataset: EvalDataset, rollout: RolloutConfig, reward: RewardConfig) -> tuple[RolloutConfig, RewardConfig]:
    """How a held-out set is sampled and scored: its own settings, else the run's. Temperature goes its own way: it may be 0."""
    length = dataset.max_response_len or rollout.rollout_max_response_len
    changes = {
        "type": "sample",
        "n_samples_per_prompt": dataset.n_samples_per_eval_prompt,
        "rollout_max_response_len": length,
    }
    return rollout.model_copy(update=changes), dataset.reward or reward


def rollout_outputs(result: RolloutResult) -> dict[str, Any]:
    """What a rollout's node says about itself. Samples and tokens are those of this attempt."""
    now = result.progress
    return {
        "groups": now.groups,
        "adopted_groups": result.adopted_groups,
        "failed_groups": now.failed_groups,
        "samples": now.samples,
        "tokens": now.response_tokens,
        "tokens_per_s": now.tokens_per_s,
        "truncated_ratio": now.statuses["truncated"] / max(1, now.samples),
        "statuses": dict(now.statuses),
    }
