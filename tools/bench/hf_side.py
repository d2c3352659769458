"""The baseline of `train`: a plain loop of transformers and torch.

Samples of similar length are padded on the right to micro-batches with at most as many tokens as
ours. The loop runs forward in the model's dtype, computes log-probs by cross entropy over float32
logits of the responses, takes the policy gradient, clips, and steps AdamW (fused on CUDA). It does
not pack, fuse or chunk.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from rlpipe.batch.columns import BatchColumns
from tools.bench.stopwatch import timed
from tools.bench.training import BASELINES, Measurement, Task


@dataclass(frozen=True)
class Padded:
    """n padded samples. Positions `first` … T − 2 predict tokens `first` + 1 … T − 1."""

    first: int
    ids: torch.Tensor
    """[n, T] int64."""
    attention: torch.Tensor
    """[n, T] int64."""
    weight: torch.Tensor
    """[n, T − 1 − first] float32: 1 / response length / N before a response token, else 0."""
    advantages: torch.Tensor
    """[n, T − 1 − first] float32."""


class PlainLoop:
    """Model and optimizer of the baseline; one per process."""

    def __init__(self, task: Task) -> None:
        disable_progress_bar()
        settings = BASELINES[str(task.baseline)]
        config = task.config
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.autocast = settings["master"] and self.device.type == "cuda"
        dtype = torch.float32 if settings["master"] else getattr(torch, config.model.dtype)
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            task.model_dir, dtype=dtype, attn_implementation="sdpa"
        )
        self.model.to(self.device)
        if settings["recompute"]:
            self.model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        self.model.train()
        ours = config.train.optimizer
        self.clip_grad = ours.clip_grad
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=ours.lr,
            betas=(ours.adam_beta1, ours.adam_beta2),
            eps=ours.adam_eps,
            weight_decay=ours.weight_decay,
            fused=self.device.type == "cuda",
        )
        self.batch = task.batch
        self.max_tokens = config.train.micro_batch_tokens

    def measure(self) -> Measurement:
        """Score, train."""
        score_s, score_gib, _ = timed(self.score)
        step_s, step_gib, norm = timed(self.step)
        return Measurement(score_s, step_s, 0.0, score_gib, step_gib, norm)

    @torch.no_grad()
    def score(self) -> list[torch.Tensor]:
        """Log-probs of all micro-batches, in CPU memory."""
        return [
            self.log_probs(micro).cpu()
            for micro in padded(self.batch, self.max_tokens, self.device)
        ]

    def step(self) -> float:
        """One optimizer step; the gradient's norm before clipping."""
        for micro in padded(self.batch, self.max_tokens, self.device):
            log_probs = self.log_probs(micro)
            ratio = (log_probs - log_probs.detach()).exp()
            loss = -(ratio * micro.advantages * micro.weight).sum()
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_grad or math.inf)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def log_probs(self, micro: Padded) -> torch.Tensor:
        """Of each predicted token: [n, T - 1 - first] float32."""
        kept = torch.arange(micro.first, micro.ids.shape[1] - 1, device=self.device)
        with torch.autocast("cuda", torch.bfloat16) if self.autocast else contextlib.nullcontext():
            answer = self.model(
                input_ids=micro.ids,
                attention_mask=micro.attention,
                logits_to_keep=kept,
                use_cache=False,
            )
        targets = micro.ids[:, micro.first + 1 :]
        return -cross_entropy(
            answer.logits.float().flatten(0, 1), targets.flatten(), reduction="none"
        ).view(targets.shape)


def padded(batch: BatchColumns, max_tokens: int, device: torch.device) -> Iterator[Padded]:
    """All samples, longest first, in rectangles of at most `max_tokens` tokens with padding."""
    order = np.argsort(-batch.lengths, kind="stable")
    while len(order):
        rows = max(1, max_tokens // int(batch.lengths[order[0]]))
        yield _rectangle(batch.select(order[:rows]), len(batch), device)
        order = order[rows:]


def _rectangle(samples: BatchColumns, batch_size: int, device: torch.device) -> Padded:
    longest = int(samples.lengths.max())
    first = int(samples.prompt_lengths.min()) - 1
    ids, attention = (np.zeros((len(samples), longest), np.int64) for _ in range(2))
    weight, advantages = (
        np.zeros((len(samples), longest - 1 - first), np.float32) for _ in range(2)
    )
    assert samples.advantages is not None
    of_sample = samples.split(samples.advantages)
    for row, (start, end) in enumerate(zip(samples.offsets, samples.offsets[1:], strict=False)):
        length = end - start
        prompt = samples.prompt_lengths[row]
        ids[row, :length], attention[row, :length] = samples.tokens[start:end], 1
        predicted = slice(prompt - 1 - first, length - 1 - first)
        weight[row, predicted] = 1 / (length - prompt) / batch_size
        advantages[row, predicted] = of_sample[row]
    known = (torch.from_numpy(values).to(device) for values in (ids, attention, weight, advantages))
    return Padded(first, *known)
