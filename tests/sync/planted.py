"""A nearly deterministic policy, and faults planted into a push of its weights."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3ForCausalLM

from deployments.recipes.tiny_models import make_spell_backward_model
from rlpipe.batch.columns import BatchColumns
from rlpipe.sync.probe import Probe, mean_difference

Weights = dict[str, torch.Tensor]
PREFIX = 3
EOS = 1
FIRST_LETTER = 68
BATCH = 64
NUM_SAMPLES = 8


@dataclass
class Update:
    """One optimizer step of policy gradient."""

    before: Weights
    after: Weights
    samples: BatchColumns
    """Sampled with `before`."""


@dataclass
class Policy:
    """Versions of one policy that learns to spell words backward, in float32."""

    model_dir: Path
    """Holds the weights `initial`."""
    initial: Weights
    older: Weights
    """Some updates before the first of `updates`."""
    updates: list[Update]
    """Consecutive updates. Faults are planted into the last one."""

    @property
    def before(self) -> Weights:
        """Weights before the last update."""
        return self.updates[-1].before

    @property
    def after(self) -> Weights:
        """Weights after the last update."""
        return self.updates[-1].after

    def model(self, weights: Weights, device: str, dtype: torch.dtype) -> Qwen3ForCausalLM:
        """Return a transformers model with these weights."""
        model: Any = Qwen3ForCausalLM.from_pretrained(self.model_dir)
        model.load_state_dict(weights)
        return model.to(device, dtype).eval()


def train_policy(model_dir: Path, device: str, steps: int, *, num_updates: int = 8) -> Policy:
    """Train from random weights until the policy is nearly deterministic, then with policy
    gradient.

    The updates of policy gradient have the learning rate of the demo, and 8 samples each.
    """
    make_spell_backward_model(str(model_dir))
    model: Any = Qwen3ForCausalLM.from_pretrained(model_dir)
    model.to(device)
    generator = random.Random(0)
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    initial = older = _weights(model)
    for step in range(steps):
        if step == max(0, steps - 50):
            older = _weights(model)
        _update(model, optimizer, [_row(generator) for _ in range(BATCH)], [1.0] * BATCH)
    optimizer.param_groups[0]["lr"] = 2.5e-4
    updates = [_policy_gradient(model, optimizer, device, generator) for _ in range(num_updates)]
    return Policy(model_dir, initial, older, updates)


def _policy_gradient(
    model: Any, optimizer: torch.optim.Optimizer, device: str, generator: random.Random
) -> Update:
    """Sample, and take one step with alternating advantages of 1 and -1."""
    before = _weights(model)
    samples = _sample(model, device, generator, NUM_SAMPLES)
    prompts = samples.prompt_lengths
    sequences = np.split(samples.tokens, samples.offsets[1:-1])
    pairs = zip(sequences, prompts, strict=True)
    rows = [(row[:prompt].tolist(), row[prompt:].tolist()) for row, prompt in pairs]
    _update(model, optimizer, rows, [(-1.0) ** number for number in range(len(rows))])
    return Update(before, _weights(model), samples)


def _update(
    model: Qwen3ForCausalLM,
    optimizer: torch.optim.Optimizer,
    rows: list[tuple[list[int], list[int]]],
    advantages: list[float],
) -> None:
    """Take one optimizer step of policy gradient; with advantages of 1 it is supervised
    learning."""
    length = max(len(prompt) + len(response) for prompt, response in rows)
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    weights = torch.zeros(len(rows), length - 1)
    for number, (prompt, response) in enumerate(rows):
        ids[number, : len(prompt) + len(response)] = torch.tensor(prompt + response)
        weights[number, len(prompt) - 1 : len(prompt) + len(response) - 1] = advantages[number]
    ids = ids.to(model.device)
    weights = weights.to(model.device)
    log_probs = torch.log_softmax(model(ids).logits[:, :-1], -1).gather(-1, ids[:, 1:, None])[
        ..., 0
    ]
    loss = -(weights * log_probs).sum() / weights.abs().sum()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def score(model: Qwen3ForCausalLM, samples: BatchColumns, *, together: bool) -> np.ndarray:
    """Log-probs of the response tokens [R], samples padded to one batch or each alone."""
    rows = [
        torch.from_numpy(row.astype(np.int64))
        for row in np.split(samples.tokens, samples.offsets[1:-1])
    ]
    parts = [rows] if together else [[row] for row in rows]
    found = []
    for part in parts:
        ids = torch.nn.utils.rnn.pad_sequence(part, batch_first=True).to(model.device)
        with torch.no_grad():
            log_probs = torch.log_softmax(model(ids).logits.float(), -1)
        for row, row_log_probs in zip(part, log_probs, strict=True):
            scores = row_log_probs[: len(row) - 1].cpu().gather(-1, row[1:, None])[:, 0]
            found.append(scores.numpy())
    pairs = zip(found, samples.prompt_lengths, strict=True)
    return np.concatenate([scores[prompt - 1 :] for scores, prompt in pairs]).astype(np.float32)


def probe_of(update: Update, score_weights: Callable[[Weights, bool], np.ndarray]) -> Probe:
    """Return the trainer's side of an update. `score_weights(weights, together)` scores its
    samples."""
    log_probs = score_weights(update.after, True)
    again = score_weights(update.after, False)
    moved = score_weights(update.before, True) - again
    return Probe(update.samples, log_probs, mean_difference(log_probs, again), moved)


def _layer(number: int, name: str) -> str:
    return f"model.layers.{number}.{name}.weight"


def _one_tensor_never_sent(policy: Policy) -> Weights:
    name = _layer(1, "mlp.down_proj")
    return policy.after | {name: policy.initial[name]}


def _two_tensors_swapped(policy: Policy) -> Weights:
    one = _layer(0, "self_attn.o_proj")
    other = _layer(2, "self_attn.o_proj")
    return policy.after | {one: policy.after[other], other: policy.after[one]}


def _keys_and_values_swapped(policy: Policy) -> Weights:
    one = _layer(1, "self_attn.k_proj")
    other = _layer(1, "self_attn.v_proj")
    return policy.after | {one: policy.after[other], other: policy.after[one]}


def _layer_never_sent(policy: Policy) -> Weights:
    return policy.after | {
        name: policy.initial[name] for name in policy.after if name.startswith("model.layers.2.")
    }


def _matrix_transposed(policy: Policy) -> Weights:
    name = _layer(1, "self_attn.o_proj")
    return policy.after | {name: policy.after[name].T.contiguous()}


def _half_of_a_matrix(policy: Policy) -> Weights:
    name = _layer(0, "mlp.gate_proj")
    half = policy.after[name].clone()
    half[: len(half) // 2] = policy.initial[name][: len(half) // 2]
    return policy.after | {name: half}


def _older_version(policy: Policy) -> Weights:
    return policy.older


FAULTS: dict[str, Callable[[Policy], Weights]] = {
    "one tensor was never sent": _one_tensor_never_sent,
    "two tensors are swapped": _two_tensors_swapped,
    "keys and values are swapped": _keys_and_values_swapped,
    "a layer was never sent": _layer_never_sent,
    "a matrix is transposed": _matrix_transposed,
    "half of a matrix was never sent": _half_of_a_matrix,
    "the weights are of an older version": _older_version,
}


def _weights(model: Qwen3ForCausalLM) -> Weights:
    return copy.deepcopy(
        {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    )


def _row(generator: random.Random) -> tuple[list[int], list[int]]:
    letters = [FIRST_LETTER + generator.randrange(26) for _ in range(generator.randint(3, 7))]
    return [PREFIX, *letters], [*letters[::-1], EOS]


def _sample(model: Any, device: str, generator: random.Random, number: int) -> BatchColumns:
    prompts = [_row(generator)[0] for _ in range(number)]
    responses = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=device)
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            max_new_tokens=10,
            eos_token_id=EOS,
            pad_token_id=0,
        )
        responses.append(found[0, len(prompt) :].tolist())
    return BatchColumns.from_lists(prompts, responses)
