"""Start a run from another run's commit (tasks.fork), with real trainers and no engines."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from rlpipe.actors.ray.local_ray import connect, disconnect
from rlpipe.actors.trainer.replay import replay
from rlpipe.config.algorithms import LossConfig
from rlpipe.config.model import ResourcesConfig
from rlpipe.config.run import RunConfig
from rlpipe.errors import ConfigError
from rlpipe.lineage.stage_inputs import checkpoint_inputs
from rlpipe.lineage.states import lineage_to
from rlpipe.model_dir import model_fingerprint
from rlpipe.observe.progress import Progress
from rlpipe.store.branches import Branches
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.store.segments import Segments
from rlpipe.types import Commit, DataState, Stage
from tasks.fork import begin_fork, check_reference, check_state_format, fork_commit, fork_point
from tests.actors.trainer.trained import Trained, configuration, tiny_model, trained

pytestmark = [pytest.mark.integration, pytest.mark.long]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home with the run `parent`: four iterations, and a checkpoint of the first weights only."""
    home = tmp_path_factory.mktemp("fork")
    connect(ResourcesConfig(), home, namespace="rlpipe-tests")

    async def history() -> None:
        async with trained(
            configuration(tiny_model(home / "model"), "parent"), Files(home / "store"), home
        ) as parent:
            await parent.begin()
            await parent.iterate(4)

    asyncio.run(history())
    yield home
    disconnect()


def forked(home: Path, run: str, iteration: int | None = 1, **sections: Any):
    return configuration(
        str(home / "model"), run, fork_from={"branch": "parent", "iteration": iteration}, **sections
    )


async def begun(home: Path, config) -> None:
    """Begin a fork as `tasks.begin` does."""
    files = Files(home / "store")
    origin = await fork_point(files, config, home, Progress(config.run, config.num_rollout))
    assert origin is not None
    begin_fork(
        files,
        config,
        origin,
        model_fingerprint(str(home / "model"), home / "models" / "fingerprints.json"),
    )


def contents(files: Files, prefix: str) -> dict[str, bytes]:
    return {name: files.read(name) for name in files.list(prefix)}


def train_outputs(run: Trained, branch: str, iteration: int) -> tuple[str, list[float]]:
    """State digest and learning rates of an iteration."""
    node = run.nodes.get(Stage.TRAIN, run.branches.read(branch, iteration).nodes[Stage.TRAIN])
    return node.outputs["state_digest"], [step["lr"] for step in node.outputs["steps"]]


async def test_a_fork_continues_its_parent_and_leaves_it_unchanged(home: Path):
    files = Files(home / "store")
    nodes = Nodes(files)
    branches = Branches(files)
    parent = contents(files, "branches/parent")
    state = branches.read("parent", 1).nodes[Stage.TRAIN]
    init = branches.get("parent").init
    assert lineage_to(nodes, state, init).base == init, "its weights have to be rebuilt"
    same = forked(home, "same")
    await begun(home, same)
    assert branches.get("same").parent == "parent/00000001"
    assert nodes.find(Stage.CHECKPOINT, checkpoint_inputs(state).digest)
    assert not Segments(files).of("same")
    lr = 3e-4
    other = forked(home, "other", train={"optimizer": {"lr": lr, "lr_decay_style": "cosine"}})
    await begun(home, other)
    async with trained(same, files, home) as run:
        await run.iterate(2)
        for iteration in (2, 3):
            assert train_outputs(run, "same", iteration) == train_outputs(
                run, "parent", iteration
            ), "bit for bit: the fork has the optimizer state"
        changed = await run.set_up_for(other)
        await changed.iterate(1)
        digest, rates = train_outputs(run, "other", 2)
        before, rates_before = train_outputs(run, "parent", 2)
        assert digest != before
        assert rates == pytest.approx([rate * lr / 1e-3 for rate in rates_before])
    assert contents(files, "branches/parent") == parent
    assert [(commit.branch, commit.iteration) for commit in branches.walk("other")] == [
        ("other", 2),
        ("parent", 1),
        ("parent", 0),
    ]
    result = await replay(files, "other", home=home, on_state=lambda _: None)
    assert result.equal
    assert [(compared.branch, compared.stage, compared.version) for compared in result.states] == [
        ("parent", "init", 0),
        ("parent", "train", 1),
        ("parent", "train", 2),
        ("parent", "checkpoint", 2),
        ("other", "train", 3),
    ]


async def test_no_fork_point_without_fork_from_or_after_the_branch_exists(home: Path):
    files = Files(home / "store")
    plain = configuration(str(home / "model"), "plain")
    assert await fork_point(files, plain, home, Progress("plain", 1)) is None
    begun_already = configuration(str(home / "model"), "parent", fork_from={"branch": "parent"})
    assert await fork_point(files, begun_already, home, Progress("parent", 1)) is None


def test_without_a_number_the_newest_commit_is_forked(home: Path):
    branches = Branches(Files(home / "store"))
    assert fork_commit(branches, forked(home, "new", None)).iteration == 3
    assert fork_commit(branches, forked(home, "new", 0)).iteration == 0


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"branch": "absent"}, r"fork_from\.branch: the parent of the fork does not exist"),
        (
            {"branch": "parent", "iteration": 4},
            r"(?s)fork_from\.iteration.*found: *4.*expected: *0 to 3",
        ),
    ],
)
def test_a_missing_commit_cannot_be_forked(home: Path, source: dict[str, Any], words: str):
    config = configuration(str(home / "model"), "new", fork_from=source)
    with pytest.raises(ConfigError, match=words):
        fork_commit(Branches(Files(home / "store")), config)


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"model": {"dtype": "bfloat16"}}, "model.dtype"),
        ({"train": {"use_distributed_optimizer": True}}, "use_distributed"),
    ],
)
def test_a_fork_with_another_state_format_is_refused_before_actors_start(
    home: Path, sections: dict, key: str
):
    files = Files(home / "store")
    config = forked(home, "new", **sections)
    with pytest.raises(ConfigError, match=key):
        check_state_format(files, config, fork_commit(Branches(files), config))


@pytest.mark.parametrize("stored", ["policy", "reward_model"])
def test_a_fork_between_a_policy_and_a_reward_model_is_refused(
    home: Path, monkeypatch: pytest.MonkeyPatch, stored: str
):
    files = Files(home / "store")
    config = forked(home, "new")
    origin = fork_commit(Branches(files), config)
    reward = LossConfig.model_construct(type="reward_model")
    other = config.model_copy(update={"train": config.train.model_copy(update={"loss": reward})})
    config, parent = (config, other) if stored == "reward_model" else (other, config)
    monkeypatch.setattr("tasks.fork.validate_stored", lambda _: parent)
    with pytest.raises(ConfigError, match="a fork of a policy cannot train a reward model"):
        check_state_format(files, config, origin)


def test_a_fork_with_another_model_is_refused(home: Path):
    files = Files(home / "store")
    config = forked(home, "new")
    with pytest.raises(ConfigError, match=r"model\.source"):
        begin_fork(files, config, fork_commit(Branches(files), config), "another fingerprint")
    assert Branches(files).find("new") is None


@pytest.mark.parametrize(
    "other", [{"warm_start": "spell_backward_sft"}, {"model": {"start_from": {"branch": "parent"}}}]
)
def test_a_fork_has_no_other_source_of_weights(home: Path, other: dict[str, Any]):
    with pytest.raises(ConfigError, match="fork_from and"):
        forked(home, "new", **other)


@pytest.mark.parametrize(
    ("ours", "theirs", "version", "done", "fits"),
    [
        (3, 3, 4, 0, True),
        (None, 3, 4, 0, True),
        (2, 3, 4, 0, True),
        (8, None, 4, 0, True),
        (3, None, 4, 0, False),
        (3, 2, 4, 0, False),
        (3, None, 4, 2, True),
        (2, None, 4, 3, False),
        (7, None, 4, 2, True),
    ],
)
def test_the_reference_of_a_fork_is_one_that_its_parent_saved(
    ours: int | None, theirs: int | None, version: int, done: int, fits: bool
):
    """`done`: iterations of slime, which the intervals count."""

    def refreshing(interval: int | None) -> RunConfig:
        return configuration(
            "/models/m",
            "run",
            start_rollout_id=done,
            advantage={"reference": True},
            reference={"ref_update_interval": interval},
        )

    commit = Commit(
        branch="old", iteration=version - 1, plans=(), nodes={}, data=DataState(), config_digest=""
    )
    with (
        nullcontext()
        if fits
        else pytest.raises(ConfigError, match="the parent did not save the weights")
    ):
        check_reference(refreshing(ours), refreshing(theirs), commit)
