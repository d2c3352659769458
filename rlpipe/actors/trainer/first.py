"""The first weights of a branch are not stored: they are what its model directory, or the
checkpoint it started from, gives.

Its init node says which contents that directory had, and the digests of what came out of it: of the
whole state (optimizer and critic included), and of the policy's weights alone, which are the first
reference. Whoever loads them again compares: made in the same way (`made_with`) in the same layout
these digests, else (a fork, another machine, other packages) the contents of the directory. Runs
with the same inputs share an init node, whichever made it.

Not here: loading (`rank`, `trainer`).
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from rlpipe.actors.trainer.spec import TrainerSpec
from rlpipe.config.arguments.checkout import checkout
from rlpipe.config.hooks import hook_digest
from rlpipe.config.train import TrainConfig
from rlpipe.engines.megatron.platform import CUDA_FOUND
from rlpipe.errors import Mismatch
from rlpipe.model_dir import model_fingerprint
from rlpipe.types import Node

DEVICE = "cuda" if CUDA_FOUND else "cpu"
"""Digests of the same tensors differ between the two."""
FINGERPRINTS = "models/fingerprints.json"
"""Below a home: digests of model files that were read before."""
PACKAGES = ("torch", "megatron-core", "mbridge", "rlpipe")


def made_with(train: TrainConfig) -> dict[str, Any]:
    """What the digests of first weights depend on beside what they are loaded from and over how
    many ranks."""
    hook = train.custom_megatron_init_path
    megatron = checkout()
    return {
        "device": DEVICE,
        "packages": {name: _version(name) for name in PACKAGES},
        "checkout": str(megatron) if megatron else None,
        "megatron": train.megatron,
        "use_distributed_optimizer": train.use_distributed_optimizer,
        "init_hook": hook_digest(hook) if hook else None,
    }


def check_first(
    init: Node, spec: TrainerSpec, name: Literal["state_digest", "weights_digest"], found: str
) -> None:
    """Are first weights that were loaded again those of the init node? `found`: their digest of
    this name.

    Raises: Mismatch, which says whether the model directory has changed.
    """
    ranks = init.config["layout"]["ranks"]
    parallel = init.config.get("parallel", {})
    here = (spec.world_size, spec.train.parallel.identity(), made_with(spec.train))
    comparable = (ranks, parallel, init.outputs.get("made_with")) == here
    recorded = init.outputs.get(name)
    if comparable and found == recorded:
        return
    contents = model_fingerprint(spec.model_dir, Path(spec.work_dir).parent / FINGERPRINTS)
    were = init.config["model"]
    if contents == were and not comparable:
        return
    others = "the directory is as it was: look for what else went in (a critic's own directory)"
    raise Mismatch(
        "the first weights of the run are not what they were",
        where=f"nodes/{init.stage}/{init.digest}.json",
        found=f"{name} {found} of {spec.model_dir}, contents {contents[:16]}",
        expected=f"{name} {recorded} of contents {were[:16]}",
        do=others
        if contents == were
        else "bring the model directory back as it was, or start a new run: --run NAME",
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # a checkout on PYTHONPATH
        return None
