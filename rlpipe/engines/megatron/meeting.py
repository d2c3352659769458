"""`Meeting`: where the policy's ranks and a critic that has ranks of its own tell each other what
both need.

They are two worlds of torch.distributed, each with its own parallel layout, that join in one more
group of gloo: the policy's ranks first, then the critic's. Through it go the critic's values, which
the policy's ranks make advantages of, and at the end of every call that makes a state what each of
the two has: so all ranks of both answer the same, and neither can be a step ahead.

A rank that died is noticed by all others in the next exchange. Not here: weights and gradients,
which stay in their worlds.
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

from rlpipe.system.rendezvous import gloo_at, store

NAME = "policy and critic"


@dataclass(frozen=True, slots=True)
class MeetingPlace:
    """What every rank of both has to know."""

    master: tuple[str, int]
    """Host and port; the policy's rank 0 listens there."""
    policy_ranks: int
    critic_ranks: int
    timeout_s: float = 1800.0
    """Of one exchange: one side may have to wait for all that the other has to do first."""


class Meeting:
    """One rank's part. Collective over all ranks of both."""

    def __init__(self, where: MeetingPlace, *, place: int) -> None:
        """Wait for the others. `place`: the policy's rank, or that of the critic after all of
        those.

        Raises: DistNetworkError, RuntimeError if not all come within the place's `timeout_s`, also
        the deadline of an exchange.
        """
        timeout = timedelta(seconds=where.timeout_s)
        size = where.policy_ranks + where.critic_ranks
        self._place = place
        self._critic = where.policy_ranks
        self._store = store(*where.master, listens=place == 0, timeout=timeout, world_size=size)
        with gloo_at(where.master[0]):
            self._group = cast(
                ProcessGroup, ProcessGroupGloo(PrefixStore(NAME, self._store), place, size, timeout)
            )

    def exchange(self, said: Any) -> tuple[Any, Any]:
        """What the policy's ranks said, and what the critic's did (the first of each speaks): plain
        values, the same on all."""
        payload = np.frombuffer(json.dumps(said, default=float).encode(), np.uint8)
        found = [bytes(self._sent(payload, root, None)) for root in (0, self._critic)]
        return json.loads(found[0]), json.loads(found[1])

    def values(self, column: np.ndarray | None, number: int) -> np.ndarray:
        """[`number`] float32: the critic's `column`, on all ranks. The policy's give None."""
        return self._sent(
            np.zeros(0, np.float32) if column is None else column, self._critic, number
        )

    def _sent(self, array: np.ndarray, root: int, number: int | None) -> np.ndarray:
        """The root's array; `number`: its length, where all know it."""
        if number is None:
            length = torch.tensor([len(array)])
            self._group.broadcast(length, root).wait()
            number = int(length)
        mine = self._place == root
        tensor = torch.from_numpy(array.copy() if mine else np.empty(number, array.dtype))
        self._group.broadcast(tensor, root).wait()
        return tensor.numpy()
