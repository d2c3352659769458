"""The stores in the repository, each a folder `store` in `<name>.tar.xz`. `README.md` describes
their creation."""

from __future__ import annotations

import tarfile
from pathlib import Path

from rlpipe.config.load import validate_stored
from rlpipe.lineage.stage_inputs import (
    advantage_inputs,
    checkpoint_inputs,
    eval_inputs,
    init_inputs,
    reward_inputs,
    rollout_inputs,
    train_inputs,
)
from rlpipe.lineage.states import lineage_to
from rlpipe.store.branches import Branches, commit_name
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.types import Stage

HERE = Path(__file__).parent


def unpack(name: str, folder: Path) -> Path:
    """Unpack the store `name` into an empty folder."""
    with tarfile.open(HERE / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / "store"


def check_names(files: Files, run: str) -> None:
    """Check that every node of a run has the name that its stored configuration gives now, so that
    a continued run finds it."""
    branches = Branches(files)
    nodes = Nodes(files)
    record = branches.get(run)
    contracts = branches.contracts(run)
    config = validate_stored(record.config)
    model = nodes.get(Stage.INIT, record.init).config["model"]
    before = branches.before(run, branches.committed(run)[0])
    state = before.nodes[Stage.TRAIN] if before else record.init
    assert init_inputs(config, model, None, contracts).digest == record.init
    for k in branches.committed(run):
        commit = branches.read(run, k)
        rollout = rollout_inputs(config, model, commit.plans[0], contracts).digest
        reward = reward_inputs(config, rollout, contracts).digest
        advantage = advantage_inputs(config, rollout, reward, state, contracts).digest
        train = train_inputs(config, advantage, state, contracts).digest
        asked = {
            Stage.ROLLOUT: rollout,
            Stage.REWARD: reward,
            Stage.ADVANTAGE: advantage,
            Stage.TRAIN: train,
        }
        assert {stage: commit.nodes[stage] for stage in asked} == asked, commit_name(run, k)
        state = train
    [dataset] = config.evaluation.datasets
    assert nodes.find(Stage.EVAL, eval_inputs(config, dataset, state, contracts).digest)
    assert nodes.find(Stage.CHECKPOINT, checkpoint_inputs(state).digest)
    assert lineage_to(nodes, state, record.init).base_state == state
