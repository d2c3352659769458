"""The actors that a run starts on a Ray of its own before it opens its cluster."""

from typing import Any

import pytest

from rlpipe.actors.ray import named
from rlpipe.actors.ray.named import begin_actors
from rlpipe.config.model import ResourcesConfig


class Actors:
    """Replaces `NamedActors`; records what is started."""

    def __init__(self, on_gpus: bool) -> None:
        self.started: list[Any] = []
        self.on_gpus = on_gpus

    def __call__(self, cluster: str, resources: ResourcesConfig, cwd: str) -> "Actors":
        self.cluster = cluster
        return self

    @property
    def placement(self) -> "Actors":
        return self

    def reserve(self, *, engines: int) -> None:
        self.started.append("engines fit" if engines else "fits")

    def engine(self, number: int, node: int) -> tuple[str, int, int]:
        engine = ("engine", number, node)
        self.started.append(engine)
        return engine

    def trainer(self, rank: int) -> None:
        self.started.append(("rank", rank))

    def conductor(self, cluster: str, cwd: str, resources: ResourcesConfig) -> None:
        assert (cluster, cwd) == (self.cluster, "here")
        self.started.append("conductor")


RESOURCES = ResourcesConfig(actor_num_gpus_per_node=2, rollout_num_gpus=2)
RANKS = [("rank", 0), ("rank", 1)]
ENGINES = [("engine", 0, 0), ("engine", 1, 0)]


@pytest.mark.parametrize(
    ("engines", "on_gpus", "started"),
    [
        (2, False, ["engines fit", *ENGINES, *RANKS, "conductor"]),
        (0, False, ["fits", *RANKS, "conductor"]),
        (2, True, []),
    ],
)
def test_all_actors_start_except_on_gpus_that_are_not_locked(
    engines: int, on_gpus: bool, started: list[Any], monkeypatch: pytest.MonkeyPatch
):
    actors = Actors(on_gpus)
    monkeypatch.setattr(named, "NamedActors", actors)
    monkeypatch.setattr(named, "conductor", actors.conductor)
    returned = begin_actors("mine", RESOURCES, "here", engines=engines)
    assert actors.started == started
    assert returned == [one for one in started if one in ENGINES]
