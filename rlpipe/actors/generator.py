"""`Generator`: the actor that plans iterations, samples them through the router and writes finished
groups as shards.

It holds the prompts, the tokenizer and an HTTP client, and nothing that cannot be read again: a
generator that is killed is started again, reads the plan, adopts the groups whose shards are there
and asks for the rest.

Not here: how one group is sampled (`rollout.generate`), rewards of a training rollout (a stage of
their own).
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rlpipe.actors.drivers import Driver
from rlpipe.actors.specs import GeneratorSpec
from rlpipe.batch.files import write_evaluation
from rlpipe.config.data import EvalDataset, RewardConfig
from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.run import RunConfig
from rlpipe.data.user_source import BufferFilter, CustomSource
from rlpipe.data.prompts import load_prompts, with_metadata
from rlpipe.data.source import DataSource, evaluation_plan
from rlpipe.data.tokens import load_tokenizer
from rlpipe.errors import EngineError
from rlpipe.model_dir import prompt_context_len
from rlpipe.observe.evaluation import evaluation_metrics
from rlpipe.rewards.reward_rows import score
from rlpipe.rollout.client.generate_client import GenerateClient, HoldMode
from rlpipe.rollout.filters import load_filter
from rlpipe.rollout.generators import (
    RolloutContext,
    RolloutResources,
    open_generate_function,
    open_rollout_function,
)
from rlpipe.rollout.group_selection import GroupJudge
from rlpipe.rollout.hooks.finished_rollout import FinishedRolloutHooks
from rlpipe.rollout.planner import Planner
from rlpipe.rollout.rollout_result import RolloutProgress, RolloutResult
from rlpipe.rollout.rollout_rows import MemoryRows, PlanPart, StoredRows
from rlpipe.rollout.sampler import RolloutSettings, run_rollout
from rlpipe.slime.args import slime_args
from rlpipe.store.objects.files import Files
from rlpipe.types import DataState, Plan, Sample

SAMPLES_PER_REQUEST_ON_CPU = 64


class RolloutAbandoned(EngineError):
    """Another attempt at the rollout took over, or an engine could not be brought back."""


class Generator:
    """See the module. Methods are coroutines: `progress` answers while `rollout` runs. What is
    asked in the name of a driver raises Fenced unless it is the one of the last set-up."""

    def __init__(self, cwd: str) -> None:
        os.chdir(cwd)
        self._driver: Driver | None = None
        self._spec: GeneratorSpec | None = None
        self._client: GenerateClient | None = None
        self._on_gpus = False
        self._progress: dict[int, RolloutProgress] = {}
        self._running: dict[int, asyncio.Task[RolloutResult]] = {}
        self._evaluating: dict[str, asyncio.Task[dict[str, Any]]] = {}

    async def setup(self, driver: Driver, spec: GeneratorSpec) -> dict[str, Any]:
        """Work for this driver. Read and check all prompts. Answers `{"rows", "eval_rows"}`.

        Raises: DataError naming file and line; ConfigError.
        """
        if self._spec != spec:
            if self._client is not None:
                await self._client.aclose()
                self._client = None
            self._load(spec)
        self._driver = driver
        return {
            "rows": len(self._source),
            "eval_rows": {name: len(plan.groups) for name, plan in self._held_out.items()},
        }

    async def overlong(self, driver: Driver) -> dict[str, list[dict[str, Any]]]:
        """The rows that `data.overlong_prompts` drops or cuts, as fields of `Overlong`, by the key
        of their prompts."""
        self._require(driver)
        return {key: [asdict(row) for row in rows] for key, rows in self._overlong.items() if rows}

    async def connect(self, router_url: str, *, on_gpus: bool) -> None:
        """Send generation requests to this router from now on."""
        self._on_gpus = on_gpus
        if self._client is not None:
            self._client.move(router_url)
            return
        self._client = GenerateClient(
            router_url,
            vocab_size=self._model_config["vocab_size"],
            deadline_s=self._config.engine.request_timeout_s,
            samples_per_request=1 if on_gpus else SAMPLES_PER_REQUEST_ON_CPU,
            max_connections=self._config.engine.server_concurrency
            * self._config.resources.num_engines,
            end_ids=self._end_ids,
            routed_width=self._ground.routed_width,
        )

    async def hold(self, mode: HoldMode, *, deadline_s: float, expires_s: float) -> None:
        """Before a push of weights: see `GenerateClient.hold`. Cheap, and harmless if it is held
        already."""
        if self._client is not None:
            await self._client.hold(mode, deadline_s=deadline_s, expires_s=expires_s)

    async def release(self) -> None:
        """After a push of weights. Harmless if nothing is held."""
        if self._client is not None:
            self._client.release()

    async def plan(self, driver: Driver, iteration: int, state: DataState) -> dict[str, Any]:
        """Write part 0 of an iteration's plan: `{"plan": digest, "after": DataState, "static":
        bool}`.

        `after` is the state of the next iteration if the rollout is `static`; else its outputs say.
        """
        self._require(driver)
        part = await asyncio.to_thread(self._planner.part, iteration, state, 0)
        return {
            "plan": part.digest,
            "after": part.plan.after,
            "static": self._config.rollout.static,
        }

    async def rollout(self, driver: Driver, plan: str) -> dict[str, Any]:
        """Sample what a plan (its part 0) asks for, except the groups whose rows are there.
        `{"files", "outputs", "seconds"}`.

        Rollouts of several iterations run at once, first come, first served; an earlier attempt at
        this iteration is ended. Raises: EngineError if fewer than `rollout.min_completed_fraction`
        of the groups came back, or too few were accepted in `max_sampling_rounds`;
        DeadlineExceeded; RolloutAbandoned.
        """
        self._require(driver)
        start = time.perf_counter()
        parts = await asyncio.to_thread(self._planner.parts, plan)
        rows = StoredRows(self._files)
        iteration = parts[0].plan.iteration
        while iteration in self._running:
            await self.abandon(driver, iteration)
        self._require(driver)
        task = self._running[iteration] = asyncio.create_task(self._sample(parts, rows))
        try:
            result = await task
        except asyncio.CancelledError as error:
            raise RolloutAbandoned(
                "the rollout was abandoned", where=f"generator.rollout {iteration}"
            ) from error
        finally:
            if self._running.get(iteration) is task:
                del self._running[iteration]
                self._progress.pop(iteration, None)
        removed = await asyncio.to_thread(self._afterwards.removed, result.scored, result.accepted)
        outputs = {**rollout_outputs(result), **({"removed": removed} if removed else {})}
        return {"files": rows.files, "outputs": outputs, "seconds": time.perf_counter() - start}

    async def abandon(self, driver: Driver, iteration: int | None = None) -> None:
        """End the rollout of an iteration (None: all, and evaluations): finished groups are
        flushed, its caller hears of it."""
        self._require(driver)
        await _ended(
            [task for number, task in self._running.items() if iteration in (None, number)]
        )
        await _ended(self._evaluating.values() if iteration is None else ())

    async def evaluate(self, driver: Driver, name: str, key: str, version: int) -> dict[str, Any]:
        """Sample and score every prompt of a held-out set once, into files of node `key`.
        `{"files", "outputs", "seconds"}`.

        An earlier attempt at this node is ended. Raises: as `rollout`.
        """
        self._require(driver)
        while key in self._evaluating:
            await _ended([self._evaluating[key]])
        self._require(driver)
        task = self._evaluating[key] = asyncio.create_task(self._evaluated(name, key, version))
        try:
            return await task
        except asyncio.CancelledError as error:
            raise RolloutAbandoned(
                "the evaluation was abandoned", where=f"generator.evaluate {name}"
            ) from error
        finally:
            if self._evaluating.get(key) is task:
                del self._evaluating[key]

    async def _evaluated(self, name: str, key: str, version: int) -> dict[str, Any]:
        start = time.perf_counter()
        dataset = next(
            dataset for dataset in self._config.evaluation.datasets if dataset.name == name
        )
        sampling, reward = evaluation_settings(dataset, self._config.rollout, self._config.reward)
        occasion = RolloutContext(
            sampling,
            version,
            evaluation=True,
            temperature=dataset.temperature,
            on_gpus=self._on_gpus,
        )
        samples, outputs = await self._sampled_held_out(name, occasion)
        rows = await score(samples, reward, args=slime_args(self._config))
        record = write_evaluation(self._files, key, version, samples, rows)
        rewards = [row.reward for row in rows]
        parts = [row.parts for row in rows]
        metrics = evaluation_metrics(
            name, samples, rewards, parts, pass_threshold=dataset.pass_threshold
        )
        measured = {
            "accuracy": metrics[f"eval/{name}/accuracy"],
            "scored": len(rewards) - rewards.count(None),
            "metrics": metrics,
        }
        return {
            "files": [record],
            "outputs": {**outputs, **measured},
            "seconds": time.perf_counter() - start,
        }

    async def _sampled_held_out(
        self, name: str, occasion: RolloutContext
    ) -> tuple[list[Sample], dict[str, Any]]:
        """The samples of a held-out set, and how the sampling went."""
        part = PlanPart("", self._held_out[name])
        kept = MemoryRows()
        if self._ground.eval_function is not None:
            async with open_rollout_function(self._ground, occasion, self._client) as function:
                result = await function.evaluate(part, name, kept)
            return kept.samples, sampling_outputs(result)
        async with open_generate_function(self._ground, occasion, self._client) as generate:
            result = await run_rollout(
                [part],
                rollout_settings(occasion.rollout, groups=len(part.plan.groups)),
                generate,
                kept,
                judge=GroupJudge(),
                slots=asyncio.Semaphore(self._groups_at_once(occasion.rollout)),
            )
        return kept.samples, sampling_outputs(result)

    async def progress(self, iteration: int | None = None) -> dict[str, Any]:
        """How far the rollout of an iteration (None: the oldest that runs) is: `{"done", "total",
        "tokens"}`.

        In groups, accepted ones where the plan may grow, and response tokens; all 0 if it does not
        run.
        """
        oldest = min(self._progress, default=-1) if iteration is None else iteration
        now = self._progress.get(oldest, RolloutProgress())
        done, total = (
            (now.finished_groups, now.groups)
            if self._static
            else (now.accepted_groups, now.wanted_groups)
        )
        return {"done": done, "total": total, "tokens": now.response_tokens}

    def _require(self, driver: Driver) -> None:
        driver.require(self._driver, where="generator")

    @property
    def _static(self) -> bool:
        return self._spec is None or self._spec.config.rollout.static

    def _load(self, spec: GeneratorSpec) -> None:
        config = self._config = spec.config
        source = config.model.source
        self._model_config = json.loads((Path(spec.model_dir) / "config.json").read_text())
        self._tokenizer = load_tokenizer(
            spec.model_dir, trust_remote_code=getattr(source, "trust_remote_code", False)
        )
        data = config.data
        rows = (
            load_prompts(data.prompts, streaming=data.streaming_data, workers=data.num_data_workers)
            if data.prompts
            else ()
        )
        self._source = DataSource(
            rows,
            self._tokenizer,
            data,
            config.rollout,
            config.run,
            async_buffer_size=config.async_buffer_size,
            model_context_len=prompt_context_len(config.rollout, self._model_config),
        )
        self._source.check()
        self._overlong = {"data.prompts": self._source.overlong}
        self._held_out = {
            dataset.name: self._evaluation_plan(dataset) for dataset in config.evaluation.datasets
        }
        self._files = Files(spec.store_root)
        self._planner = self._made_planner(config)
        self._end_ids = end_ids(spec.model_dir, self._tokenizer.eos_token_id)
        self._ground = RolloutResources.load(
            config, self._tokenizer, self._model_config, spec.model_dir
        )
        self._slots = asyncio.Semaphore(self._groups_at_once(config.rollout))
        keep = config.rollout.dynamic_sampling_filter_path
        args = slime_args(config)
        reward = config.reward if config.rollout.scores_while_sampling else None
        self._judge = GroupJudge(load_filter(keep, args) if keep else None, reward, args)
        self._afterwards = FinishedRolloutHooks(config.rollout, args, self._planner.custom)
        self._spec = spec

    def _made_planner(self, config: RunConfig) -> Planner:
        rollout = config.rollout
        args = slime_args(config)
        return Planner(
            self._source,
            rollout,
            self._files,
            custom=CustomSource(rollout.data_source_path, args)
            if rollout.data_source_path
            else None,
            choose=BufferFilter(rollout.buffer_filter_path, args)
            if rollout.buffer_filter_path
            else None,
        )

    def _evaluation_plan(self, dataset: EvalDataset) -> Plan:
        config = self._config
        sampling, _ = evaluation_settings(dataset, config.rollout, config.reward)
        rows = with_metadata(load_prompts(dataset.prompts), dataset.metadata_overrides)
        plan, overlong = evaluation_plan(
            dataset,
            rows,
            self._tokenizer,
            dataset.limited(config.data),
            sampling,
            branch=config.run,
            iteration=0,
            model_context_len=prompt_context_len(sampling, self._model_config, evaluation=True),
        )
        self._overlong[f"evaluation.datasets: {dataset.name}"] = overlong
        return plan

    async def _sample(self, parts: Sequence[PlanPart], rows: StoredRows) -> RolloutResult:
        config = self._config.rollout
        stop = asyncio.Event()
        client = self._client
        occasion = RolloutContext(config, parts[0].plan.iteration, stop=stop, on_gpus=self._on_gpus)
        if self._ground.rollout_function is not None:
            settings = {"batch_size": config.rollout_batch_size, "partial": config.partial_rollout}
            async with open_rollout_function(self._ground, occasion, client) as function:
                return await function.train(
                    list(parts), rows, next_part=self._planner.following, **settings
                )
        async with open_generate_function(self._ground, occasion, client) as generate:
            return await run_rollout(
                parts,
                rollout_settings(config, in_order=self._config.deterministic),
                generate,
                rows,
                judge=self._judge,
                slots=self._slots,
                next_part=None if config.static else self._planner.following,
                cut_off=partial(client.cut_off, stop) if client else None,
                progress=partial(self._progress.__setitem__, parts[0].plan.iteration),
            )

    def _groups_at_once(self, sampling: RolloutConfig) -> int:
        requests = self._config.engine.server_concurrency * self._config.resources.num_engines
        return max(1, requests // sampling.n_samples_per_prompt)


async def _ended(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel these, and let who waits for them hear of it."""
    if ending := list(tasks):
        for task in ending:
            task.cancel()
        await asyncio.wait(ending)
        await asyncio.sleep(0)


def evaluation_settings(
    dataset: EvalDataset, rollout: RolloutConfig, reward: RewardConfig
) -> tuple[RolloutConfig, RewardConfig]:
    """How a held-out set is sampled and scored: its own settings, else the run's. Temperature goes
    its own way: it may be 0."""
    return rollout.model_copy(update=dataset.sampling()), dataset.reward or reward


def rollout_settings(
    config: RolloutConfig, *, groups: int | None = None, in_order: bool = False
) -> RolloutSettings:
    """`groups`: sample just so many, whatever becomes of them."""
    return RolloutSettings(
        batch_size=config.rollout_batch_size if groups is None else groups,
        static=config.static or groups is not None,
        in_order=in_order,
        partial=config.partial_rollout,
        max_rounds=config.max_sampling_rounds,
        timeout_s=config.timeout_s,
        flush_interval_s=config.flush_interval_s,
        min_completed_fraction=config.min_completed_fraction,
    )


def end_ids(model_dir: str, of_tokenizer: object) -> set[int]:
    """Tokens that end a response, as SGLang finds them: of the model's configuration, its
    generation settings, its tokenizer."""
    paths = [Path(model_dir) / name for name in ("config.json", "generation_config.json")]
    said = [
        of_tokenizer,
        *(json.loads(path.read_text()).get("eos_token_id") for path in paths if path.exists()),
    ]
    return {
        token
        for ids in said
        for token in (ids if isinstance(ids, list) else [ids])
        if isinstance(token, int)
    }


def rollout_outputs(result: RolloutResult) -> dict[str, Any]:
    """What a rollout's node says about itself: where the data source stands now, and what became of
    each group."""
    return {
        **sampling_outputs(result),
        "plans": [part.digest for part in result.parts],
        "after": result.after.model_dump(mode="json"),
        "accepted": list(result.accepted),
        "dropped": result.dropped,
        "buffered_groups": len(result.after.buffer),
        "cut_groups": result.cut_groups,
        "errors": result.errors,
        **({"fallbacks": result.fallbacks} if result.fallbacks else {}),
    }


def sampling_outputs(result: RolloutResult) -> dict[str, Any]:
    """How the sampling went. Samples and tokens are those of this attempt."""
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
