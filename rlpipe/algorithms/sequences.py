"""Sums and means over whole samples when a rank has only a part of their tokens.

A micro-batch has n tokens of a batch of N samples. With context parallelism the tokens of a sample
are distributed over several ranks. `Sequences.total` sums over these ranks, with gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


def local_total(values: torch.Tensor) -> torch.Tensor:
    """Return the values unchanged: `Sequences.total` without context parallelism."""
    return values


@dataclass(frozen=True, eq=False)
class Sequences:
    """The sample of each token, and the number of counted tokens of each sample."""

    sample: torch.Tensor
    """[n] int64: index into the N samples."""
    counts: torch.Tensor
    """[N] float: sum of the loss mask over all ranks."""
    total: Callable[[torch.Tensor], torch.Tensor] = local_total
    """[N] → [N]: sum over the ranks that share the samples, with gradient. A collective: each of
    these ranks must call it the same number of times."""

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of the values over each sample, with gradient; [n] → [N]."""
        zeros = torch.zeros(len(self.counts), dtype=values.dtype, device=values.device)
        return self.total(zeros.index_add(0, self.sample, values))

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Return for each token the mean of the values over its sample, with gradient.

        mean_t = Σ_{s in sample of t} v_s / max(count, 1).

        Shapes: values [n], of tokens with mask 1; returns [n].
        """
        sums = self.sums(values)
        return (sums / self.counts.to(values.dtype).clamp(min=1))[self.sample]
