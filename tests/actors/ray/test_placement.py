"""Bundles of trainer ranks and engines, and the removal of those of another layout
(rlpipe.actors.ray.placement, layout, named)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group

from rlpipe.actors.ray.calls import kill_actors
from rlpipe.actors.ray.layout import engine_names, group_shapes, rank_names, server_devices
from rlpipe.actors.ray.named import NamedActors, find_or_start, namespace
from rlpipe.actors.ray.placement import (
    LOOPBACK,
    Placement,
    own_address,
    placed_groups,
    sort_bundles,
)
from rlpipe.config.model import ResourcesConfig
from rlpipe.errors import ResourceError

CLUSTER = "moves"


def test_bundles_are_sorted_by_machine_and_gpu():
    gpus = [("10.0.0.11", "1"), ("10.0.0.2", "10"), ("10.0.0.2", "9"), ("10.0.0.11", "0")]
    assert sort_bundles(gpus) == [
        (2, "10.0.0.2", "9"),
        (1, "10.0.0.2", "10"),
        (3, "10.0.0.11", "0"),
        (0, "10.0.0.11", "1"),
    ]


def test_gpus_with_other_names_follow_the_numbers_in_order_of_their_names():
    bundles = sort_bundles([("10.0.0.1", "GPU-b"), ("10.0.0.1", "GPU-a"), ("10.0.0.1", "3")])
    assert [(bundle.number, bundle.device) for bundle in bundles] == [
        (2, "3"),
        (1, "GPU-a"),
        (0, "GPU-b"),
    ]


def layout(**resources: Any) -> tuple[Any, ...]:
    config = ResourcesConfig.model_validate(resources)
    return group_shapes(config), rank_names(config), engine_names(config)


def test_actor_names_contain_the_layout_that_an_actor_keeps_for_life():
    groups, ranks, engines = layout(
        actor_num_gpus_per_node=2, rollout_num_gpus=4, rollout_num_gpus_per_engine=2
    )
    assert groups == {"trainer": (2, 1), "engines": (2, 2)}
    assert (ranks, engines) == (["trainer-0.2", "trainer-1.2"], ["engine-0.2", "engine-1.2"])
    with_critic = layout(actor_num_gpus_per_node=2, critic_num_gpus_per_node=1, rollout_num_gpus=4)
    assert with_critic[0] == {"trainer": (2, 1), "engines": (4, 1), "critic": (1, 1)}
    assert with_critic[1] == ["trainer-0.2+1", "trainer-1.2+1", "critic-0.2+1"]
    shared = layout(
        actor_num_gpus_per_node=2, rollout_num_gpus=4, rollout_num_gpus_per_engine=2, colocate=True
    )
    assert shared == (
        {"shared": (4, 1)},
        ["trainer-0.2@4", "trainer-1.2@4"],
        ["engine-0.2@4", "engine-1.2@4"],
    )
    over_nodes = layout(rollout_num_gpus=8, rollout_num_gpus_per_engine=4, num_gpus_per_node=2)
    assert over_nodes[0]["engines"] == (4, 2), "a bundle for each server, which is on one node"
    assert over_nodes[2] == [
        "engine-0.2x2",
        "engine-0-1.2x2",
        "engine-1.2x2",
        "engine-1-1.2x2",
    ]
    external = layout(external_engines=["a:1", "b:1"])
    assert external == ({"trainer": (1, 1)}, ["trainer-0.1"], ["external-0.1", "external-1.1"])


def test_actors_on_nodes_with_other_labels_have_other_names():
    plain = layout()
    labelled = layout(trainer_labels={"kind": "reserved"}, engine_labels={"kind": "spot"})
    assert labelled[0] == plain[0]
    assert labelled[1][0].startswith("trainer-0.1~") and labelled[2][0].startswith("engine-0.1~")
    assert labelled[1][0][-6:] != labelled[2][0][-6:]
    shared = layout(colocate=True, trainer_labels={"kind": "reserved"})
    assert shared[1][0][-6:] == shared[2][0][-6:] == labelled[1][0][-6:]


def four_gpus_on(*machines: str) -> list[tuple[str, str]]:
    """(machine, GPU) of four GPUs of each machine."""
    return [(machine, str(gpu)) for machine in machines for gpu in range(4)]


def test_each_server_of_colocated_engines_has_gpus_of_one_machine():
    wide = ResourcesConfig(
        colocate=True,
        actor_num_nodes=3,
        actor_num_gpus_per_node=4,
        rollout_num_gpus_per_engine=4,
        num_gpus_per_node=2,
    )
    pairs = (("0", "1"), ("2", "3"))
    assert server_devices(four_gpus_on("a", "b", "c"), wide) == pairs * 3, (
        "three engines, of two servers each"
    )
    shifted = [*four_gpus_on("a")[1:], *four_gpus_on("b", "c"), ("d", "0")]
    with pytest.raises(ResourceError, match=r"engine 0 would have.* two machines") as caught:
        server_devices(shifted, wide)
    assert caught.value.found == "GPU 3 of a, GPU 0 of b"
    assert server_devices(shifted, wide.model_copy(update={"rollout_num_gpus_per_engine": 1}))[
        2:4
    ] == (("3",), ("0",))


class Process:
    """An actor that reports its process and its placement group."""

    def pid(self) -> int:
        return os.getpid()

    def bundle(self) -> str | None:
        group = ray.util.get_current_placement_group()
        return str(group.id) if group else None


@pytest.fixture
def placed(local_ray: str) -> Iterator[Placement]:
    placement = Placement("shares", ResourcesConfig(colocate=True, start_timeout_s=60))
    placement.reserve(engines=1)
    yield placement
    placement.remove()


@pytest.mark.integration
def test_a_rank_and_an_engine_that_share_a_gpu_use_the_same_bundle(placed: Placement):
    make: Any = ray.remote
    remote = make(Process)
    options = [placed.trainer(0), placed.engine(0)]
    actors = [remote.options(**actor_options).remote() for actor_options in options]
    bundles = ray.get([actor.bundle.remote() for actor in actors], timeout=60)
    assert bundles[0] == bundles[1] is not None
    assert "rlpipe-shares-shared" in placed_groups()
    assert [
        actor_options["scheduling_strategy"].placement_group_bundle_index
        for actor_options in options
    ] == [0, 0]
    for actor in actors:
        ray.kill(actor)
    assert placed.engine_devices() is None, "without GPUs an engine sees the devices of its actor"


@pytest.mark.integration
@pytest.mark.parametrize("colocate", [True, False])
def test_servers_of_an_engine_that_spans_nodes_use_consecutive_bundles(
    local_ray: str, colocate: bool
):
    resources = ResourcesConfig(
        colocate=colocate,
        actor_num_gpus_per_node=4 if colocate else 1,
        rollout_num_gpus=4 if colocate else 2,
        rollout_num_gpus_per_engine=2,
        num_gpus_per_node=1,
        start_timeout_s=60,
    )
    placement = Placement("spanning", resources)
    placement.reserve(engines=resources.num_engines)
    servers = [(number, node) for number in range(resources.num_engines) for node in range(2)]
    strategies = [placement.engine(*server)["scheduling_strategy"] for server in servers]
    placement.remove()
    assert [strategy.placement_group_bundle_index for strategy in strategies] == list(
        range(len(servers)) if colocate else range(2)
    )


@pytest.mark.integration
def test_the_own_address_on_one_machine_is_the_loopback_address(local_ray: str):
    assert own_address() == LOOPBACK


class Actors(NamedActors):
    """Ranks of the small class `Process`, in a cluster of four CPUs."""

    def __init__(self, ranks: int, *, start_timeout_s: float = 60.0) -> None:
        resources = ResourcesConfig(actor_num_gpus_per_node=ranks, start_timeout_s=start_timeout_s)
        super().__init__(CLUSTER, resources, ".")
        self._number = ranks

    def trainer(self, rank: int) -> Any:
        return find_or_start(
            lambda: Process,
            self._rank_names[rank],
            namespace(CLUSTER),
            (),
            lambda: self.placement.trainer(rank),
        )

    def pids(self) -> list[int]:
        actors: list[Any] = [self.trainer(rank) for rank in range(self._number)]
        return ray.get([actor.pid.remote() for actor in actors], timeout=60)

    def groups(self) -> list[str]:
        return sorted(self.placement._existing_groups())


@pytest.fixture
def three(local_ray: str) -> Iterator[Actors]:
    """Three running ranks."""
    actors = Actors(3)
    actors.reserve(engines=0)
    yield actors
    kill_actors(actors.all_actors())
    actors.placement.remove()


@pytest.mark.integration
@pytest.mark.parametrize("number", [4, 1], ids=["after their removal", "next to them"])
def test_ranks_of_another_layout_end_if_the_new_layout_fits(three: Actors, number: int):
    before = three.pids()
    others = Actors(number)
    others.reserve(engines=0)
    assert others.groups() == [f"rlpipe-moves-trainer-{number}x1"]
    assert len(others.all_actors()) == 0
    assert len({*before, *others.pids()}) == 3 + number


@pytest.mark.integration
def test_a_group_whose_creator_was_killed_before_it_was_placed_is_used_by_the_next_process(
    three: Actors,
):
    Actors(4).placement._create_group("trainer")
    four = Actors(4)
    four.reserve(engines=0)
    assert four.groups() == ["rlpipe-moves-trainer-4x1"]
    assert len(four.pids()) == 4


@pytest.mark.integration
def test_ranks_stay_if_another_layout_does_not_fit(three: Actors):
    before = three.pids()
    with pytest.raises(ResourceError, match="not enough room"):
        Actors(9, start_timeout_s=0.5).reserve(engines=0)
    assert three.groups() == ["rlpipe-moves-trainer-3x1"]
    assert three.pids() == before


@pytest.mark.integration
def test_a_process_that_found_the_actors_by_name_can_remove_their_groups(three: Actors):
    before = three.pids()
    again = Actors(3)
    again.reserve(engines=0)
    assert again.pids() == before
    blank = Actors(2)
    kill_actors(blank.all_actors())
    blank.placement.remove()
    assert three.all_actors() == []
    assert three.groups() == []


@pytest.mark.integration
def test_an_engine_that_joins_waits_for_room_and_gives_it_back(local_ray: str):
    resources = ResourcesConfig(rollout_num_gpus=1, start_timeout_s=60)
    placement = Placement("grows", resources)
    placement.reserve(engines=1)
    try:
        taken = placement_group([{"CPU": ray.available_resources()["CPU"]}])
        assert taken.wait(60)
        assert not placement.reserve_engine(1)
        remove_placement_group(taken)
        wait_until(lambda: placement.reserve_engine(1))
        again = Placement("grows", resources)
        again.reserve(engines=1, kept_engines=2)
        assert sorted(again._existing_groups()) == [
            "rlpipe-grows-engine-0-1x1",
            "rlpipe-grows-engine-1-1x1",
            "rlpipe-grows-trainer-1x1",
        ]
        assert again.engine(1)["scheduling_strategy"].placement_group_bundle_index == 0
        placement.release_engine(1)
        wait_until(lambda: len(again._existing_groups()) == 2)
    finally:
        placement.remove()


@pytest.mark.integration
def test_without_nodes_of_the_labels_there_is_no_room(local_ray: str):
    resources = ResourcesConfig(engine_labels={"kind": "spot"}, start_timeout_s=4)
    placement = Placement("labelled", resources)
    with pytest.raises(ResourceError) as caught:
        placement.reserve(engines=1)
    assert str(caught.value.expected) == (
        "1 × 1 CPUs for the trainer; 1 × 1 CPUs for the engines on nodes with the labels kind: spot"
    )
    assert placement._existing_groups() == {}


@pytest.mark.integration
def test_groups_of_engines_that_left_do_not_outlive_the_next_start(local_ray: str):
    resources = ResourcesConfig(rollout_num_gpus=2, start_timeout_s=60)
    placement = Placement("shrinks", resources)
    placement.reserve(engines=2)
    placement.reserve(engines=1, kept_engines=1)
    wait_until(lambda: "rlpipe-shrinks-engine-1-1x1" not in placement._existing_groups())
    placement.remove()


def wait_until(reached: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 30
    while not reached():
        assert time.monotonic() < end_s
        time.sleep(0.05)
