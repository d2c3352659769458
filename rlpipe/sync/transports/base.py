"""The interface of weight transports: `Transport`, its `TransportSetup` and a `Push`.

`rlpipe/sync/README.md`, "Add a transport", lists the files that a new transport touches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

import torch

from rlpipe.config.train import LoraConfig, SyncConfig
from rlpipe.engines.sglang.admin import PauseMode
from rlpipe.sync.tensors import NamedTensors, expected_shapes

Report = TypeVar("Report")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportSetup:
    """The trainer rank that a transport belongs to, and the settings of the run."""

    model_dir: str | Path
    """Directory that engines are started with. Its files give names and shapes of all tensors."""
    sync: SyncConfig
    rank: int = 0
    world_size: int = 1
    lora: LoraConfig | None = None
    """The adapters of the policy."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Device of the trainer's tensors."""
    engine_tensor_parallel_size: int = 1
    """Ranks of one engine."""
    stage: int = 0
    """Pipeline stage of this rank."""
    num_stages: int = 1
    sends_stage: bool = True
    """True for the one rank that sends the tensors of its pipeline stage."""
    address: str = "127.0.0.1"
    """Address of this machine for the other ranks."""
    files_root: str = ""
    """Directory or URL of weight files (`WeightStore`)."""
    scratch: Path | None = None
    """Folder for files that are being uploaded; None is the system's."""


@dataclass(frozen=True, slots=True)
class Push:
    """One push. Every rank gets an equal one."""

    stamp: str
    """Name of the weights that engines report afterwards: `branch@version@digest`."""
    engines: Sequence[str] = ()
    """URLs. Only rank 0 calls them."""
    engine_ranks: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Engine URL → trainer ranks on that engine's GPUs, in the order of the engine's ranks."""
    pause: PauseMode = "abort"
    """See `Session.open`."""
    resume: bool = True
    """False leaves the engines paused after the push."""
    check: bool = False
    """Send everything twice and compare (`sync.check_weight_update_equal`)."""
    base: str | None = None
    """Stamp of the weights that the written files change; None writes all weights."""


class Transport(ABC, Generic[Report]):
    """One trainer rank's part in sending weights.

    Constructed by `Pusher` (`rlpipe.actors.trainer.pushing`) on every trainer rank at the first
    push that needs it; construction is collective. `Pusher` calls `send` on every rank at the same
    time. A transport lives from push to push, until the sync settings change or the rank closes.

    `Report` is `PushReport` if ranks load the weights into engines themselves, and `Share` if ranks
    write files that `FilesSync` (`rlpipe.actors.engines.files_sync`) has engines load.
    """

    per_stage: ClassVar[bool] = False
    """True: each rank's `send` takes the tensors of its pipeline stage. False: all tensors."""

    def __init__(self, setup: TransportSetup) -> None:
        """Raises: ConfigError if the model directory has no weights."""
        self.setup = setup
        self.expected = expected_shapes(setup.model_dir)

    @abstractmethod
    def send(self, tensors: NamedTensors, push: Push) -> Report:
        """Send or write the tensors.

        `tensors` is read to its end, also after an error, because the other ranks take part in
        gathering each tensor. Raises: SyncError (on rank 0) if no engine got the weights; on any
        rank for tensors that engines do not hold.
        """

    def close(self) -> None:
        """Release what stays open between pushes. Calling it twice is allowed."""
