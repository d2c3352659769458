"""Jobs and batches of preference pairs."""

from __future__ import annotations

import numpy as np

from rlpipe.batch.columns import BatchColumns
from rlpipe.batch.packing import plan
from rlpipe.config.train import TrainConfig
from rlpipe.engines.megatron.model.value_model import ValueHead
from rlpipe.system.ports import free_port
from tests.engines.megatron.ranks import engine, held, near

MAX_TOKENS = 40


def make_pairs(num_pairs: int = 12, vocabulary: int = 95, seed: int = 0) -> BatchColumns:
    """Return pairs of responses of different lengths to one prompt each."""
    random = np.random.default_rng(seed)
    prompts, responses = [], []
    for _ in range(num_pairs):
        prompts += [random.integers(0, vocabulary, random.integers(1, 10)).tolist()] * 2
        responses += [
            random.integers(0, vocabulary, random.integers(1, 13)).tolist() for _ in range(2)
        ]
    batch = BatchColumns.from_lists(prompts, responses)
    return batch.with_columns(rollout=np.repeat(np.arange(num_pairs), 2))


def pair_plan(ours, batch: BatchColumns, global_batch_size: int | None = None):
    """Return the packing of pairs; `global_batch_size` counts pairs."""
    return plan(
        batch.lengths,
        global_batch_size=global_batch_size,
        max_tokens=ours.max_tokens,
        data_parallel=ours.data_parallel,
        rollout=batch.rollouts,
        whole_rollouts=True,
    )


def train_pairs(rank: int, world_size: int, port: int, model_dir: str, train: dict) -> dict:
    """Take two optimizer steps on pairs with the samples that a rank holds; return the results."""
    config = TrainConfig.model_validate({"max_tokens_per_gpu": MAX_TOKENS} | train)
    ours = engine(model_dir, config, rank, world_size, port, rollout_temperature=1.0)
    try:
        ours.load_hf()
        batch = make_pairs()
        if config.loss.reads_reference:
            batch = batch.with_columns(reference_log_probs=near(ours.score(batch), 0.3, 2))
        packing = pair_plan(ours, batch, 6)
        result = ours.train(held(batch, ours.trained_samples(packing)), packing)
        return {"steps": result.steps, "digest": result.state_digest, "after": exported(ours)}
    finally:
        ours.close()


def exported(ours) -> dict[str, np.ndarray]:
    """Return the weights by their Hugging Face names, a value head included."""
    tensors = {name: tensor.numpy().copy() for name, tensor in ours.named_hf_tensors()}
    head = getattr(ours.trained.last_model, "output_layer", None)
    if isinstance(head, ValueHead):
        tensors["score.weight"] = head.weight.detach().float().numpy().copy()
    return tensors


def one_step_and_save(model_dir: str, train: dict, directory: str) -> dict[str, np.ndarray]:
    """Take an optimizer step on one rank and save; return the weights."""
    config = TrainConfig.model_validate({"max_tokens_per_gpu": MAX_TOKENS} | train)
    ours = engine(model_dir, config, 0, 1, free_port())
    try:
        ours.load_hf()
        batch = make_pairs()
        advantages = np.ones(batch.num_response_tokens, np.float32)
        ours.train(
            batch.with_columns(advantages=advantages, proximal_log_probs=advantages),
            pair_plan(ours, batch),
        )
        ours.save_checkpoint(directory, 1)
        return exported(ours)
    finally:
        ours.close()


def start_from(model_dir: str, train: dict, directory: str) -> dict[str, np.ndarray]:
    """Return the weights of an engine that loads only the weights of a checkpoint."""
    config = TrainConfig.model_validate({"max_tokens_per_gpu": MAX_TOKENS} | train)
    ours = engine(model_dir, config, 0, 1, free_port())
    try:
        ours.load_checkpoint(directory, weights_only=True)
        return exported(ours)
    finally:
        ours.close()
