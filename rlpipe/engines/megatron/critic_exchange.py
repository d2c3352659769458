"""`CriticExchange`: communication between the policy's ranks and the critic's ranks.

Policy and critic are two worlds of torch.distributed, each with its own parallel layout. They join
one additional gloo group: the policy's ranks first, then the critic's. The group carries the
critic's values and, at the end of every call that makes a state, the digests and metrics of both.
So all ranks return the same result, and neither world can be a step ahead.

Weights and gradients stay in their own world. If a rank dies, the next exchange fails on all ranks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import numpy as np
import torch
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import ProcessGroup, ProcessGroupGloo

from rlpipe.system.rendezvous import gloo_at, tcp_store

GROUP_NAME = "policy and critic"


@dataclass(frozen=True, slots=True)
class ExchangeAddress:
    """Address and size of the exchange. Equal on all ranks of policy and critic."""

    master: tuple[str, int]
    """Host and port; the policy's rank 0 listens there."""
    policy_ranks: int
    critic_ranks: int
    timeout_s: float = 1800.0
    """Deadline of one exchange. One side may wait for all the work of the other side."""


class CriticExchange:
    """One rank's end of the exchange. Methods are collective over all ranks of both worlds."""

    def __init__(self, address: ExchangeAddress, *, exchange_rank: int) -> None:
        """Wait for all other ranks.

        `exchange_rank`: the policy's rank, or `policy_ranks` + the critic's rank. Raises:
        DistNetworkError, RuntimeError if a rank does not join within the address's `timeout_s`.
        """
        timeout = timedelta(seconds=address.timeout_s)
        size = address.policy_ranks + address.critic_ranks
        self._rank = exchange_rank
        self._critic_root = address.policy_ranks
        self._store = tcp_store(
            *address.master, listens=exchange_rank == 0, timeout=timeout, world_size=size
        )
        with gloo_at(address.master[0]):
            self._group = cast(
                ProcessGroup,
                ProcessGroupGloo(
                    PrefixStore(GROUP_NAME, self._store), exchange_rank, size, timeout
                ),
            )

    def exchange(self, message: Any) -> tuple[Any, Any]:
        """Return the messages of the policy's and of the critic's first rank, on all ranks.

        `message`: a JSON value. The messages of other ranks are ignored.
        """
        payload = np.frombuffer(json.dumps(message, default=float).encode(), np.uint8)
        policy, critic = (
            bytes(self._broadcast(payload, root, None)) for root in (0, self._critic_root)
        )
        return json.loads(policy), json.loads(critic)

    def values(self, column: np.ndarray | None, length: int) -> np.ndarray:
        """Return the critic's `column` on all ranks: [`length`] float32. The policy passes None."""
        array = np.zeros(0, np.float32) if column is None else column
        return self._broadcast(array, self._critic_root, length)

    def _broadcast(self, array: np.ndarray, root: int, length: int | None) -> np.ndarray:
        """Return the root's array. `length`: its length, if all ranks know it."""
        if length is None:
            sent_length = torch.tensor([len(array)])
            self._group.broadcast(sent_length, root).wait()
            length = int(sent_length)
        is_root = self._rank == root
        tensor = torch.from_numpy(array.copy() if is_root else np.empty(length, array.dtype))
        self._group.broadcast(tensor, root).wait()
        return tensor.numpy()
