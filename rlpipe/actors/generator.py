"""`Generator`: the actor that plans iterations and samples them through the router.

It writes finished groups as shards. It holds the prompts, the tokenizer and an HTTP client, all of
which can be loaded again. After a kill another generator is started; it reads the plan, adopts the
groups with a written shard, and samples the rest. The reward stage scores training rollouts.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rlpipe.actors.drivers import Driver
from rlpipe.actors.reward_workers import process_workers
from rlpipe.actors.specs import GeneratorSpec
from rlpipe.batch.files import write_evaluation
from rlpipe.config.data import EvalDataset
from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.run import RunConfig
from rlpipe.data.prompts import held_out_key, load_prompts, with_metadata
from rlpipe.data.source import DataSource, evaluation_plan, store_images
from rlpipe.data.tokenizer import load_tokenizer
from rlpipe.data.user_source import BufferFilter, CustomSource
from rlpipe.engines.sglang.image_inputs import image_data
from rlpipe.engines.sglang.reply_format import SglangReplies
from rlpipe.errors import EngineError
from rlpipe.lineage.visits import rejected_visits
from rlpipe.model_dir import directory_here, end_ids, prompt_context_len
from rlpipe.observe.evaluation_metrics import evaluation_metrics
from rlpipe.observe.flops import model_flops
from rlpipe.rewards.reward_rows import score
from rlpipe.rewards.user_rewards import reads_messages
from rlpipe.rollout.client.generate_client import GenerateClient, HoldMode
from rlpipe.rollout.client.image_requests import image_requests
from rlpipe.rollout.filters import load_filter
from rlpipe.rollout.generators import (
    RolloutContext,
    RolloutResources,
    open_generate_function,
    open_rollout_function,
)
from rlpipe.rollout.group_selection import GroupJudge
from rlpipe.rollout.hooks.finished_rollout import FinishedRolloutHooks
from rlpipe.rollout.image_checks import checked_image_reader
from rlpipe.rollout.planner import Planner
from rlpipe.rollout.pool import Pool
from rlpipe.rollout.rollout_result import RolloutProgress, RolloutResult
from rlpipe.rollout.rollout_rows import MemoryRows, PlanPart, StoredRows
from rlpipe.rollout.rollout_settings import evaluation_settings, rollout_settings
from rlpipe.rollout.sampler import run_rollout
from rlpipe.slime.args import slime_args
from rlpipe.store.images import OUTPUT, Images
from rlpipe.store.objects.files import Files
from rlpipe.store.row_states import StoredRowStates
from rlpipe.types import DataState, Plan, Sample

SAMPLES_PER_REQUEST_ON_CPU = 64


class RolloutAbandoned(EngineError):
    """Another attempt at the rollout took over, or an engine could not be brought back."""


class Generator:
    """See the module.

    Methods are coroutines, so that `progress` answers while `rollout` runs. A method with a
    `driver` raises Fenced unless the driver is that of the last `setup`.
    """

    def __init__(self, cwd: str) -> None:
        os.chdir(cwd)
        self._driver: Driver | None = None
        self._spec: GeneratorSpec | None = None
        self._client: GenerateClient | None = None
        self._on_gpus = False
        self._progress: dict[int, RolloutProgress] = {}
        self._running: dict[int, asyncio.Task[RolloutResult]] = {}
        self._evaluating: dict[str, asyncio.Task[dict[str, Any]]] = {}
        self._pool: Pool | None = None

    async def setup(self, driver: Driver, spec: GeneratorSpec) -> dict[str, Any]:
        """Work for this driver; read and check all prompts. Return `{"rows", "eval_rows"}`.

        Raises: DataError with file and line; ConfigError.
        """
        if self._driver != driver or self._spec != spec:
            self._driver = None  # the driver before begins no rollout meanwhile
            # The engines of another driver may get weights of another replay.
            await self._close_pool()
        if self._spec != spec:
            if self._client is not None:
                await self._client.aclose()
                self._client = None
                await self._resources.close()
            self._load(spec)
        self._driver = driver
        return {
            "rows": len(self._source),
            "eval_rows": {name: len(plan.groups) for name, plan in self._held_out.items()},
        }

    async def overlong(self, driver: Driver) -> dict[str, list[dict[str, Any]]]:
        """Return the rows that `data.overlong_prompts` drops or cuts.

        By the configuration key of their prompts, each with the fields of `Overlong`.
        """
        self._require(driver)
        return {key: [asdict(row) for row in rows] for key, rows in self._overlong.items() if rows}

    async def connect(self, router_url: str, *, on_gpus: bool, engines: int) -> None:
        """Send generation requests to this router, as many as its engines serve at once."""
        self._on_gpus = on_gpus
        # More engines serve more groups at once. Fewer engines queue those that are too many.
        before = self._groups_at_once(self._config.rollout)
        self._engines = max(self._engines, engines)
        for _ in range(self._groups_at_once(self._config.rollout) - before):
            self._slots.release()
        if self._client is not None:
            self._client.move(router_url, max_connections=self._requests_at_once)
            return
        self._client = GenerateClient(
            router_url,
            vocab_size=self._resources.vocab_size,
            deadline_s=self._config.engine.request_timeout_s,
            samples_per_request=1 if on_gpus else SAMPLES_PER_REQUEST_ON_CPU,
            max_connections=self._requests_at_once,
            end_ids=self._end_ids,
            routed_width=self._resources.routed_width,
        )

    async def hold(self, mode: HoldMode, *, deadline_s: float, expires_s: float) -> None:
        """Hold requests before a push, as `GenerateClient.hold`. May be called repeatedly."""
        if self._client is not None:
            await self._client.hold(mode, deadline_s=deadline_s, expires_s=expires_s)

    async def release(self) -> None:
        """Send requests again after a push. Does nothing if none are held."""
        if self._client is not None:
            self._client.release()

    async def plan(self, driver: Driver, iteration: int, state: DataState) -> dict[str, Any]:
        """Write part 0 of an iteration's plan.

        Return `{"plan": digest, "after": DataState, "static": bool}`. `after` is the state of the
        next iteration if `static`; otherwise the outputs of the rollout have the state.
        """
        self._require(driver)
        # in a thread: it reads prompts and writes to the store
        part = await asyncio.to_thread(self._planner.part, iteration, state, 0)
        return {
            "plan": part.digest,
            "after": part.plan.after,
            "static": self._config.rollout.static,
        }

    async def rollout(self, driver: Driver, plan: str) -> dict[str, Any]:
        """Sample the groups of a plan, except those with written rows.

        `plan`: digest of its part 0. Return `{"files", "outputs", "seconds"}`. Rollouts of several
        iterations run at once and share the requests in order of arrival; an earlier attempt at
        this iteration is ended. Raises: EngineError if fewer than `rollout.min_completed_fraction`
        of the groups were completed, or too few were accepted in `max_sampling_rounds`;
        DeadlineExceeded; RolloutAbandoned.
        """
        self._require(driver)
        start = time.perf_counter()
        parts = await asyncio.to_thread(self._planner.parts, plan)
        rows = StoredRows(self._files)
        iteration = parts[0].plan.iteration
        # a loop: a third attempt may have started while the second one ended
        while True:
            if self._pool is not None:
                await self._pool.stop_writing()
            ending = [k for k in self._running if k == iteration or self._pool is not None]
            if not ending:
                break
            await self.abandon(driver, ending[0])
        self._require(driver)  # a newer driver may have come during the waits
        task = asyncio.create_task(self._sample(parts, rows))
        self._running[iteration] = task
        try:
            result = await task
        except asyncio.CancelledError as error:
            raise RolloutAbandoned(
                "the rollout was abandoned", where=f"generator.rollout {iteration}"
            ) from error
        finally:
            # a later attempt may have replaced the entry
            if self._running.get(iteration) is task:
                del self._running[iteration]
                self._progress.pop(iteration, None)
        removed = await asyncio.to_thread(
            self._finished_hooks.removed, result.scored, result.accepted
        )
        outputs = result.outputs()
        if removed:
            outputs["removed"] = removed
        if curriculum := self._config.data.curriculum:
            threshold = curriculum.pass_threshold
            outputs |= rejected_visits(result.scored, result.dropped, threshold)
        if self._flops is not None and result.progress.spans:
            outputs["flops"] = self._flops.sampled(result.progress.spans)
        outputs["metrics"] = self._client.take_metrics() if self._client is not None else {}
        return {"files": rows.files, "outputs": outputs, "seconds": time.perf_counter() - start}

    async def abandon(self, driver: Driver, iteration: int | None = None) -> None:
        """End the rollout of an iteration; None: all rollouts and evaluations.

        Finished groups are written. The caller of the rollout gets RolloutAbandoned. The pool ends
        with the rollout, and continues if the rollout of the iteration does not run.
        """
        self._require(driver)
        ended = [task for number, task in self._running.items() if iteration in (None, number)]
        await _cancel(ended)
        await _cancel(self._evaluating.values() if iteration is None else ())
        # The pool may belong to the rollout of a later iteration.
        if ended or iteration is None:
            await self._close_pool()

    async def evaluate(self, driver: Driver, name: str, key: str, version: int) -> dict[str, Any]:
        """Sample and score every prompt of a held-out set once, into files of node `key`.

        Return `{"files", "outputs", "seconds"}`. An earlier attempt at this node is ended. Raises:
        as `rollout`.
        """
        self._require(driver)
        while key in self._evaluating:
            await _cancel([self._evaluating[key]])
        self._require(driver)
        task = asyncio.create_task(self._evaluate(name, key, version))
        self._evaluating[key] = task
        try:
            return await task
        except asyncio.CancelledError as error:
            raise RolloutAbandoned(
                "the evaluation was abandoned", where=f"generator.evaluate {name}"
            ) from error
        finally:
            if self._evaluating.get(key) is task:
                del self._evaluating[key]

    async def _evaluate(self, name: str, key: str, version: int) -> dict[str, Any]:
        start = time.perf_counter()
        dataset = next(
            dataset for dataset in self._config.evaluation.datasets if dataset.name == name
        )
        sampling, reward = evaluation_settings(dataset, self._config.rollout, self._config.reward)
        context = RolloutContext(
            sampling,
            version,
            evaluation=True,
            temperature=dataset.temperature,
            on_gpus=self._on_gpus,
        )
        samples, outputs = await self._sample_held_out(name, context)
        rows = await score(
            samples, reward, args=slime_args(self._config), process=process_workers(reward)
        )
        record = write_evaluation(self._files, key, version, samples, rows)
        rewards = [row.reward for row in rows]
        reward_parts = [row.parts for row in rows]
        metrics = evaluation_metrics(
            name, samples, rewards, reward_parts, pass_threshold=dataset.pass_threshold
        )
        outputs["accuracy"] = metrics[f"eval/{name}/accuracy"]
        outputs["scored"] = len(rewards) - rewards.count(None)
        outputs["metrics"] = metrics
        if images := {image[0] for sample in samples for image in sample.images}:
            outputs[OUTPUT] = sorted(images)
        return {"files": [record], "outputs": outputs, "seconds": time.perf_counter() - start}

    async def _sample_held_out(
        self, name: str, context: RolloutContext
    ) -> tuple[list[Sample], dict[str, Any]]:
        """Return the samples of a held-out set, and the outputs of the sampling."""
        part = PlanPart("", self._held_out[name])
        rows = MemoryRows()
        if self._resources.eval_function is not None:
            async with open_rollout_function(self._resources, context, self._client) as function:
                result = await function.evaluate(part, name, rows)
            return rows.samples, result.sampling_outputs()
        async with open_generate_function(self._resources, context, self._client) as generate:
            result = await run_rollout(
                [part],
                rollout_settings(context.rollout, groups=len(part.plan.groups)),
                generate,
                rows,
                judge=GroupJudge(),
                # its own slots: an evaluation does not wait behind the groups of a rollout
                slots=asyncio.Semaphore(self._groups_at_once(context.rollout)),
            )
        return rows.samples, result.sampling_outputs()

    async def progress(self, iteration: int | None = None) -> dict[str, Any]:
        """Return the progress of an iteration's rollout; None: of the oldest running one.

        `{"done", "total", "tokens"}`: groups and response tokens. If the plan may grow, only
        accepted groups count. All 0 if the rollout does not run.
        """
        oldest = min(self._progress, default=-1) if iteration is None else iteration
        now = self._progress.get(oldest, RolloutProgress())
        static = self._spec is None or self._spec.config.rollout.static
        return {
            "done": now.finished_groups if static else now.accepted_groups,
            "total": now.groups if static else now.wanted_groups,
            "tokens": now.response_tokens,
        }

    def _require(self, driver: Driver) -> None:
        driver.require(self._driver, where="generator")

    def _load(self, spec: GeneratorSpec) -> None:
        """Load prompts, tokenizer, hooks and held-out sets of a spec."""
        config = spec.config
        self._config = config
        source = config.model.source
        model_dir = directory_here(spec.model_dir, source)
        self._model_config = json.loads((Path(model_dir) / "config.json").read_text())
        self._flops = model_flops(model_dir)
        self._tokenizer = load_tokenizer(
            model_dir, trust_remote_code=getattr(source, "trust_remote_code", False)
        )
        self._files = Files(spec.store_root)
        self._images = checked_image_reader(config, model_dir)
        self._source = self._create_source(config)
        # All prompts now, so that an error names file and line before the first rollout.
        self._source.check()
        self._overlong = {"data.prompts": self._source.overlong}
        self._held_out = {
            dataset.name: self._evaluation_plan(dataset, held_out_key(number))
            for number, dataset in enumerate(config.evaluation.datasets)
        }
        args = slime_args(config)
        self._planner = self._create_planner(config.rollout, args)
        self._end_ids = end_ids(model_dir, self._tokenizer.eos_token_id)
        self._resources = RolloutResources.load(
            config,
            self._tokenizer,
            self._model_config,
            model_dir,
            SglangReplies(self._tokenizer, config.engine.sglang),
            image_requests(self._files, self._images, image_data),
        )
        self._engines = config.resources.num_engines
        self._slots = asyncio.Semaphore(self._groups_at_once(config.rollout))
        in_flight = config.rollout.groups_in_pool(config.async_buffer_size)
        self._pool = Pool(in_flight) if config.rollout.pooled else None
        filter_path = config.rollout.dynamic_sampling_filter_path
        reward = config.reward if config.rollout.scores_while_sampling else None
        self._judge = GroupJudge(
            load_filter(filter_path, args) if filter_path else None,
            reward,
            args,
            process_workers(config.reward),
        )
        self._finished_hooks = FinishedRolloutHooks(config.rollout, args, self._planner.custom)
        self._spec = spec  # last: after an error the next set-up loads everything again

    def _create_source(self, config: RunConfig) -> DataSource:
        data = config.data
        reads = {"streaming": data.streaming_data, "workers": data.num_data_workers}
        return DataSource(
            load_prompts(data.prompts, **reads, image_key=data.image_key) if data.prompts else (),
            self._tokenizer,
            data,
            config.rollout,
            config.run,
            async_buffer_size=config.async_buffer_size,
            model_context_len=prompt_context_len(config.rollout, self._model_config),
            keep_messages=reads_messages(config.reward),
            images=self._images,
            stored=Images(self._files),
            row_states=StoredRowStates(self._files),
        )

    def _create_planner(self, rollout: RolloutConfig, args: Namespace) -> Planner:
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

    def _evaluation_plan(self, dataset: EvalDataset, key: str) -> Plan:
        config = self._config
        sampling, _ = evaluation_settings(dataset, config.rollout, config.reward)
        rows = with_metadata(
            load_prompts(dataset.prompts, key=key, image_key=config.data.image_key),
            dataset.metadata_overrides,
        )
        store_images(Images(self._files), rows)
        plan, overlong = evaluation_plan(
            dataset,
            rows,
            self._tokenizer,
            dataset.limited(config.data),
            sampling,
            branch=config.run,
            iteration=0,
            model_context_len=prompt_context_len(sampling, self._model_config, evaluation=True),
            keep_messages=reads_messages(dataset.reward or config.reward),
            images=self._images,
        )
        self._overlong[f"evaluation.datasets: {dataset.name}"] = overlong
        return plan

    async def _sample(self, parts: Sequence[PlanPart], rows: StoredRows) -> RolloutResult:
        if self._pool is not None:
            return await self._sample_in_pool(self._pool, parts, rows)
        config = self._config.rollout
        stop = asyncio.Event()
        client = self._client
        context = RolloutContext(config, parts[0].plan.iteration, stop=stop, on_gpus=self._on_gpus)
        if self._resources.rollout_function is not None:
            settings = {"batch_size": config.rollout_batch_size, "partial": config.partial_rollout}
            async with open_rollout_function(self._resources, context, client) as function:
                return await function.train(
                    list(parts), rows, next_part=self._planner.following, **settings
                )
        async with open_generate_function(self._resources, context, client) as generate:
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

    async def _sample_in_pool(
        self, pool: Pool, parts: Sequence[PlanPart], rows: StoredRows
    ) -> RolloutResult:
        """Take the first finished groups of the pool. The others stay in flight."""
        config = self._config.rollout
        iteration = parts[0].plan.iteration
        pool.retain({group.group_id for part in parts for group in part.plan.groups})
        context = RolloutContext(config, iteration, on_gpus=self._on_gpus)
        opened = open_generate_function(self._resources, context, self._client)
        oldest_version = iteration - self._config.async_buffer_size
        if self._config.debug.debug_rollout_only:  # the first weights sample every iteration
            oldest_version = 0
        async with pool.lease(opened) as generate:
            result = await run_rollout(
                parts,
                rollout_settings(config, oldest_version=oldest_version),
                generate,
                rows,
                judge=self._judge,
                slots=self._slots,
                pool=pool,
                next_part=self._planner.following,
                progress=partial(self._progress.__setitem__, iteration),
            )
        is_last = iteration + 1 == self._config.num_rollout
        pool.leave(result, StoredRows(self._files), config.flush_interval_s, is_last=is_last)
        return result

    async def _close_pool(self) -> None:
        if self._pool is not None:
            await self._pool.stop_writing()
            # A rollout would fill the pool again.
            await _cancel(self._running.values())
            await self._pool.close()

    def _groups_at_once(self, sampling: RolloutConfig) -> int:
        """Return the groups sampled at once, so that all engines have their full concurrency."""
        return max(1, self._requests_at_once // sampling.n_samples_per_prompt)

    @property
    def _requests_at_once(self) -> int:
        """Requests in flight at most."""
        return self._config.engine.server_concurrency * self._engines


async def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel these tasks, and wait until they have ended."""
    if cancelled := list(tasks):
        for task in cancelled:
            task.cancel()
        await asyncio.wait(cancelled)
        await asyncio.sleep(0)  # lets the callers of the tasks run and remove their entries
