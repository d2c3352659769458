"""Check the first weights of a branch, which are not stored.

First weights come from the model directory or from the checkpoint that the branch started from. The
init node records a digest of the directory's contents, a digest of the whole state (with optimizer
and critic) and a digest of the policy's weights, which are the first reference. When the weights
are loaded again, the digests are compared. Digests are comparable only under equal conditions
(`made_with`) and an equal layout; otherwise (a fork, another machine, other packages) the contents
of the directory are compared. Runs with the same inputs share an init node.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from rlpipe.actors.trainer.trainer_spec import TrainerSpec
from rlpipe.config.arguments.checkout import checkout
from rlpipe.config.hooks import hook_digest
from rlpipe.config.train import TrainConfig
from rlpipe.engines.megatron.platform import CUDA_FOUND
from rlpipe.errors import Mismatch
from rlpipe.lineage.source_weights import FINGERPRINTS, source_record
from rlpipe.model_dir import model_fingerprint
from rlpipe.types import Node

# The same tensors have different digests on the two.
DEVICE = "cuda" if CUDA_FOUND else "cpu"
PACKAGES = ("torch", "megatron-core", "mbridge", "rlpipe")


def made_with(train: TrainConfig) -> dict[str, Any]:
    """Return the conditions that digests of first weights depend on.

    The source of the weights and the number of ranks are not included.
    """
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


def check_first_weights(
    init: Node,
    spec: TrainerSpec,
    name: Literal["state_digest", "weights_digest", "reference_digest"],
    digest: str,
) -> None:
    """Check that first weights loaded again equal those of the init node.

    `digest`: their digest of this name. Raises: Mismatch, which says whether the model directory
    has changed.
    """
    recorded_conditions = (
        init.config["layout"]["ranks"],
        init.config.get("parallel", {}),
        init.outputs.get("made_with"),
    )
    conditions = (spec.world_size, spec.train.parallel.identity(), made_with(spec.train))
    comparable = recorded_conditions == conditions
    recorded = init.outputs.get(name)
    if comparable and digest == recorded:
        return
    home = Path(spec.work_dir).parent
    contents = model_fingerprint(spec.model_dir, home / FINGERPRINTS)
    recorded_contents = init.config["model"]
    changed = _changed_sources(init, spec, home)
    if contents == recorded_contents and not comparable and not changed:
        return
    if changed:
        do = f"restore the earlier contents of {', '.join(changed)}, or start a new run: --run NAME"
    elif contents == recorded_contents:
        do = "the directory is unchanged: check other inputs, such as a critic's own directory"
    else:
        do = "restore the earlier contents of the model directory, or start a new run: --run NAME"
    raise Mismatch(
        "the first weights of the run have changed",
        where=f"nodes/{init.stage}/{init.digest}.json",
        found=f"{name} {digest} of {spec.model_dir}, contents {contents[:16]}",
        expected=f"{name} {recorded} of contents {recorded_contents[:16]}",
        do=do,
    )


def _changed_sources(init: Node, spec: TrainerSpec, home: Path) -> list[str]:
    """Return the keys of weights whose files have changed since the init node was recorded."""
    recorded = init.outputs.get("sources", {})
    return [
        source.key
        for role, source in spec.sources.items()
        if role in recorded and source_record(source, home)["sha256"] != recorded[role]["sha256"]
    ]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # a checkout on PYTHONPATH
        return None
