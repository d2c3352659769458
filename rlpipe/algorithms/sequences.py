"""Sums and means over whole sequences of which a rank may hold only some tokens.

A micro-batch's n tokens belong to samples of a batch of N. With context parallelism a sample's
tokens lie on several ranks: `total` adds up what they hold, and its gradient adds up theirs.

Not here: the process group (`engines.megatron.train.step` gives `total`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


def alone(values: torch.Tensor) -> torch.Tensor:
    """`total` where every sample lies on one rank."""
    return values


@dataclass(frozen=True, eq=False)
class Sequences:
    """Which sample each token is of, and how many tokens that count each sample has (on all ranks
    together)."""

    sample: torch.Tensor
    """[n] int64, into N."""
    counts: torch.Tensor
    """[N] float: Σ of the loss mask."""
    total: Callable[[torch.Tensor], torch.Tensor] = alone
    """[N] → [N]: the sum over the ranks that share the samples, with gradient. Every one of them
    calls it equally often."""

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """[n] of tokens that count → [n]: Σ of the token's sample / max(count, 1), with
        gradient."""
        zeros = torch.zeros(len(self.counts), dtype=values.dtype, device=values.device)
        sums = self.total(zeros.index_add(0, self.sample, values))
        return (sums / self.counts.to(values.dtype).clamp(min=1))[self.sample]
