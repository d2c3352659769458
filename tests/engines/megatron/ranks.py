"""Training ranks in separate processes, kept for the whole test session, and their jobs.

A rank receives (function, arguments), calls function(rank, world_size, port, *arguments) and sends
the result back.
"""

from __future__ import annotations

import multiprocessing
import traceback
from dataclasses import replace
from pathlib import Path

import numpy as np

from rlpipe.batch.columns import BatchColumns, BatchPart
from rlpipe.batch.packing import plan
from rlpipe.config.model import HuggingFaceModel, ModelConfig
from rlpipe.config.train import CriticConfig, TrainConfig
from rlpipe.system.ports import free_port
from tests.garbage import exempt_imports
from tests.gpus import visible_gpus
from tests.processes import fork_server

PRELOADED = ["rlpipe.engines.megatron.engine"]
"""Imported once, in the process that all ranks are forked from: it takes seven CPU seconds."""


class Ranks:
    """A number of processes; `run` calls a job on all of them and returns the results by rank.

    A failed job gets replaced processes, because a rank may still wait for a failed one.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._start()

    def _start(self) -> None:
        # Imports of Megatron initialize CUDA, after which a fork cannot use it.
        gpus = visible_gpus()
        context = multiprocessing.get_context("spawn") if gpus else fork_server(*PRELOADED)
        self._pipes = []
        self._processes = []
        for _ in range(self._number):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, job, *arguments, timeout_s: float = 120.0) -> list:
        port = free_port()
        for rank, pipe in enumerate(self._pipes):
            pipe.send((job, (rank, self._number, port, *arguments)))
        try:
            return [self._answer(rank, timeout_s) for rank in range(self._number)]
        except BaseException:
            self._kill()
            self._start()
            raise

    def _answer(self, rank: int, timeout_s: float):
        assert self._pipes[rank].poll(timeout_s), f"rank {rank} did not answer"
        result, error = self._pipes[rank].recv()
        assert error is None, f"rank {rank}: {error}"
        return result

    def stop(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(10)
        self._kill()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _serve(pipe) -> None:
    while (order := pipe.recv()) is not None:
        job, arguments = order
        exempt_imports()
        try:
            pipe.send((job(*arguments), None))
        except Exception:  # noqa: BLE001 - the test that started the job shows it
            pipe.send((None, traceback.format_exc()))


def make_batch(num_samples: int = 24, vocabulary: int = 96, seed: int = 0) -> BatchColumns:
    """Return samples of different lengths, one of them fully masked, with all columns."""
    random = np.random.default_rng(seed)
    prompts = [
        random.integers(0, vocabulary, random.integers(1, 10)).tolist() for _ in range(num_samples)
    ]
    responses = [
        random.integers(0, vocabulary, random.integers(1, 13)).tolist() for _ in range(num_samples)
    ]
    mask = [
        [int(i != 3 and random.random() < 0.8) for _ in response]
        for i, response in enumerate(responses)
    ]
    batch = BatchColumns.from_lists(prompts, responses, loss_mask=mask)
    size = batch.num_response_tokens
    return batch.with_columns(
        rollout_log_probs=random.normal(-4, 1, size).astype(np.float32),
        advantages=np.repeat(random.normal(0, 1, num_samples), batch.response_lengths).astype(
            np.float32
        ),
    )


def engine(model_dir: str, train: TrainConfig, rank: int, world_size: int, port: int, **overrides):
    from rlpipe.engines.megatron.engine import MegatronEngine

    source = HuggingFaceModel(type="huggingface", hf_checkpoint=model_dir)
    settings = {
        "rollout_temperature": 0.8,
        "total_optimizer_steps": 100,
        "threads": 1,
        "dtype": "float32",
        **overrides,
    }
    adapter = settings.pop("adapter", None)
    model = ModelConfig(source=source, dtype=settings.pop("dtype"), adapter=adapter)
    return MegatronEngine(
        model_dir,
        model,
        train,
        rank=rank,
        world_size=world_size,
        master=("127.0.0.1", port),
        timeout_s=60.0,
        **settings,
    )


def held(batch: BatchColumns, samples: np.ndarray) -> BatchColumns:
    """Return these samples as a rank holds them that has read no other ones."""
    return replace(batch.select(samples), part=BatchPart(batch.sizes, samples))


def scored(ours, batch: BatchColumns) -> BatchColumns:
    """Return the samples that this rank scores."""
    return held(batch, ours.scored_samples(batch.sizes))


def near(columns: np.ndarray, scale: float, seed: int) -> np.ndarray:
    """Return log-probs that differ a little from these."""
    return columns + np.random.default_rng(seed).normal(0, scale, len(columns)).astype(np.float32)


def columns_and_plan(ours, scores, iteration):
    """Return the batch of an iteration with log-probs near `scores`, and its packing plan."""
    batch = make_batch()
    columns = batch.with_columns(
        proximal_log_probs=near(scores, 0.2, 2 * iteration),
        reference_log_probs=near(scores, 0.3, 2 * iteration + 1),
    )
    packing = plan(
        batch.lengths,
        global_batch_size=12,
        max_tokens=ours.max_tokens,
        data_parallel=ours.data_parallel,
    )
    return columns, packing


def score_and_train(
    rank: int,
    world_size: int,
    port: int,
    model_dir: str,
    train: dict,
    iterations: int = 2,
    dtype: str = "float32",
) -> dict:
    """Score, then train with two optimizer steps an iteration; return everything to compare."""
    config = TrainConfig.model_validate(train)
    ours = engine(model_dir, config, rank, world_size, port, dtype=dtype)
    try:
        ours.load_hf()
        ours.keep_reference()
        batch = make_batch()
        results = []
        scores = ours.score(batch)
        assert np.array_equal(ours.score(scored(ours, batch)), scores)
        for iteration in range(iterations):
            columns, packing = columns_and_plan(ours, scores, iteration)
            results.append(ours.train(columns, packing))
        after = {name: tensor.clone() for name, tensor in ours.named_hf_tensors()}
        return {
            "scores": scores,
            "steps": [step for result in results for step in result.steps],
            "digest": results[-1].state_digest,
            "reference": ours.score(batch, model="reference"),
            "after": {name: tensor.float().cpu().numpy() for name, tensor in after.items()}
            if rank == 0
            else None,
        }
    finally:
        ours.close()


def save_and_resume(
    rank: int,
    world_size: int,
    port: int,
    model_dir: str,
    train: dict,
    directory: str,
    second_port: int,
    dtype: str = "float32",
) -> dict:
    """Return digests of uninterrupted and of resumed training.

    Three iterations without a break; one iteration, a save and two more; the checkpoint in a fresh
    engine and two more.
    """
    config = TrainConfig.model_validate(train)
    digests = {}
    ours = engine(model_dir, config, rank, world_size, port, dtype=dtype)
    ours.load_hf()
    digests["saved"] = _train(ours, [0])
    ours.save_checkpoint(directory, 1)
    digests["straight"] = _train(ours, [1, 2])
    other = plan(
        make_batch(seed=7).lengths,
        global_batch_size=None,
        max_tokens=64,
        data_parallel=ours.data_parallel,
    )
    ours.train(make_batch(seed=7).with_columns(proximal_log_probs=None), other)
    digests["iteration in place"] = ours.load_checkpoint(directory)
    digests["loaded in place"] = ours.state_digest()
    digests["resumed in place"] = _train(ours, [1, 2])
    ours.close()
    fresh = engine(model_dir, config, rank, world_size, second_port, dtype=dtype)
    digests["iteration"] = fresh.load_checkpoint(directory)
    digests["loaded"] = fresh.state_digest()
    digests["resumed"] = _train(fresh, [1, 2])
    fresh.close()
    return digests


def room_and_size(
    rank: int,
    world_size: int,
    port: int,
    model_dir: str,
    train: dict,
    directory: str,
    dtype: str = "bfloat16",
) -> tuple[int, int]:
    """Return the predicted size of a checkpoint without reserve, and the size of its tensors."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from rlpipe.engines.megatron.checkpoint import disk_space

    ours = engine(model_dir, TrainConfig.model_validate(train), rank, world_size, port, dtype=dtype)
    ours.load_hf()
    room = disk_space._disk_space([ours.trained], Path(directory) / "iter_0000001")
    folder = ours.save_checkpoint(directory, 1)
    ours.close()
    needed = (room.needed_bytes - disk_space.SPARE_BYTES) / disk_space.SPARE
    found = FileSystemReader(folder).read_metadata().state_dict_metadata.values()
    tensors = [one for one in found if isinstance(one, TensorStorageMetadata)]
    return round(needed), sum(one.size.numel() * one.properties.dtype.itemsize for one in tensors)


def train_on_any_number(rank: int, world_size: int, port: int, model_dir: str, train: dict) -> dict:
    """Take three optimizer steps with different numbers of micro-batches."""
    ours = engine(model_dir, TrainConfig.model_validate(train), rank, world_size, port)
    try:
        ours.load_hf()
        steps = []
        numbers = []
        for seed, samples in enumerate((12, 30, 4)):
            batch = make_batch(samples, seed=seed)
            packing = plan(
                batch.lengths,
                global_batch_size=None,
                max_tokens=ours.max_tokens,
                data_parallel=ours.data_parallel,
            )
            ours.score(batch)
            steps += ours.train(batch, packing).steps
            numbers.append(len(packing.steps[0][0]))
        after = {name: tensor.clone().numpy() for name, tensor in ours.named_hf_tensors()}
        return {"steps": steps, "micro-batches": numbers, "after": after}
    finally:
        ours.close()


def score_beside_a_teacher(
    rank: int, world_size: int, port: int, model_dir: str, teacher_dir: str, train: dict
) -> dict:
    """Score with the policy before and after a teacher of another size."""
    config = TrainConfig.model_validate(train)
    ours = engine(model_dir, config, rank, world_size, port, teacher_dir=teacher_dir)
    try:
        ours.load_hf()
        batch = make_batch()
        models = ("policy", "teacher", "policy")
        return dict(enumerate(ours.score(batch, model=model) for model in models))
    finally:
        ours.close()


def gloo_threads_left(
    rank: int, world_size: int, port: int, model_dir: str, train: dict
) -> tuple[int, int]:
    """Return the number of gloo threads of a trained engine, and after it is closed."""
    before = _gloo_threads()
    ours = engine(model_dir, TrainConfig.model_validate(train), rank, world_size, port)
    ours.load_hf()
    _train(ours, [0])
    during = _gloo_threads()
    ours.close()
    return during - before, _gloo_threads() - before


def _gloo_threads() -> int:
    return sum("gloo" in name.read_text() for name in Path("/proc/self/task").glob("*/comm"))


def _train(ours, seeds: list[int]) -> str:
    for seed in seeds:
        batch = make_batch(seed=seed)
        packing = plan(
            batch.lengths, global_batch_size=None, max_tokens=64, data_parallel=ours.data_parallel
        )
        digest = ours.train(batch, packing).state_digest
    return digest


def weights_of_checkpoint(
    rank: int, world_size: int, port: int, model_dir: str, train: dict, directory: str
) -> dict:
    """Load only the weights of a checkpoint; return its iteration and the exported tensors."""
    ours = engine(model_dir, TrainConfig.model_validate(train), rank, world_size, port)
    iteration = ours.load_checkpoint(directory, weights_only=True)
    weights = {name: tensor.clone().numpy() for name, tensor in ours.named_hf_tensors()}
    ours.close()
    return {"iteration": iteration, "weights": weights if rank == 0 else None}


def copy_of_checkpoint(
    rank: int,
    world_size: int,
    port: int,
    model_dir: str,
    train: dict,
    source: str,
    target: str,
    trained: str | None = None,
    dtype: str = "float32",
) -> dict:
    """Load a whole checkpoint, save it again and train once; return digests and the weights.

    `trained`: directory for a checkpoint after the training.
    """
    ours = engine(model_dir, TrainConfig.model_validate(train), rank, world_size, port, dtype=dtype)
    try:
        iteration = ours.load_checkpoint(source)
        digest = ours.state_digest()
        weights = {name: tensor.float().clone().numpy() for name, tensor in ours.named_hf_tensors()}
        ours.save_checkpoint(target, iteration)
        after = _train(ours, [1])
        if trained is not None:
            ours.save_checkpoint(trained, iteration + 1)
        return {"digest": digest, "trained": after, "weights": weights}
    finally:
        ours.close()


def offload_and_train(
    rank: int, world_size: int, port: int, model_dir: str, train: dict, dtype: str = "float32"
) -> dict:
    """Offload everything, restore it and train; return kept bytes and digests."""
    config = TrainConfig.model_validate(train)
    ours = engine(model_dir, config, rank, world_size, port, dtype=dtype)
    try:
        ours.load_hf()
        before = ours.state_digest()
        kept = ours.occupy(())["kept_bytes"]
        ours.occupy()
        return {
            "kept": kept,
            "before": before,
            "after": ours.state_digest(),
            "end": _train(ours, [0]),
        }
    finally:
        ours.close()


def with_returns(batch: BatchColumns, values: np.ndarray, seed: int) -> BatchColumns:
    """Add the critic's columns: values with small differences, and returns."""
    returns = near(np.zeros_like(values), 1.0, seed)
    return batch.with_columns(values=near(values, 0.3, seed + 1), returns=returns)


def value_and_train(
    rank: int, world_size: int, port: int, model_dir: str, train: dict, critic: dict
) -> dict:
    """Return a critic's values and the results of training policy and critic."""
    config = TrainConfig.model_validate(train)
    ours = engine(
        model_dir,
        config,
        rank,
        world_size,
        port,
        critic=CriticConfig.model_validate(critic),
        critic_optimizer_steps=100,
    )
    try:
        ours.load_hf()
        batch = make_batch()
        results = []
        values = ours.values(batch)
        assert np.array_equal(ours.values(scored(ours, batch)), values)
        batch = with_returns(
            batch.with_columns(proximal_log_probs=near(ours.score(batch), 0.2, 1)), values, 2
        )
        batch = batch.with_columns(reference_log_probs=batch.proximal_log_probs)
        packing = plan(
            batch.lengths,
            global_batch_size=12,
            max_tokens=ours.max_tokens,
            data_parallel=ours.data_parallel,
        )
        results += ours.train(batch, packing).steps
        return {
            "values": values,
            "steps": results,
            "after": ours.values(batch),
            "digest": ours.state_digest(),
        }
    finally:
        ours.close()


def save_and_resume_with_critic(
    rank: int,
    world_size: int,
    port: int,
    model_dir: str,
    train: dict,
    directory: str,
    second_port: int,
) -> dict:
    """Run `save_and_resume` with a critic."""
    config = TrainConfig.model_validate(train)
    digests = {}
    settings = {"critic": CriticConfig(), "critic_optimizer_steps": 100}
    ours = engine(model_dir, config, rank, world_size, port, **settings)
    ours.load_hf()
    digests["saved"] = _train_with_critic(ours, 0)
    ours.save_checkpoint(directory, 1)
    digests["straight"] = _train_with_critic(ours, 1)
    ours.close()
    fresh = engine(model_dir, config, rank, world_size, second_port, **settings)
    digests["iteration"] = fresh.load_checkpoint(directory)
    digests["loaded"] = fresh.state_digest()
    digests["resumed"] = _train_with_critic(fresh, 1)
    fresh.close()
    return digests


def _train_with_critic(ours, seed: int) -> str:
    batch = make_batch(seed=seed)
    packing = plan(
        batch.lengths, global_batch_size=None, max_tokens=64, data_parallel=ours.data_parallel
    )
    return ours.train(with_returns(batch, ours.values(batch), seed), packing).state_digest
