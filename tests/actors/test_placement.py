"""Which bundles trainer ranks and engines get (rlpipe.actors.placement)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray

from rlpipe.actors.placement import LOOPBACK, Placement, held, in_order, own_address
from rlpipe.config.model import ResourcesConfig


def test_bundles_are_in_the_order_of_machines_and_their_gpus():
    found = [("10.0.0.11", "1"), ("10.0.0.2", "10"), ("10.0.0.2", "9"), ("10.0.0.11", "0")]
    assert in_order(found) == [(2, "9"), (1, "10"), (3, "0"), (0, "1")]


def test_gpus_that_are_named_otherwise_are_in_the_order_of_their_names():
    assert in_order([("10.0.0.1", "GPU-b"), ("10.0.0.1", "GPU-a"), ("10.0.0.1", "3")]) == [(2, "3"), (1, "GPU-a"), (0, "GPU-b")]


class Process:
    """Says where it is."""

    def bundle(self) -> str | None:
        group = ray.util.get_current_placement_group()
        return str(group.id) if group else None


@pytest.fixture
def placed(local_ray: str) -> Iterator[Placement]:
    placement = Placement("shares", ResourcesConfig(colocate=True, start_timeout_s=60))
    yield placement
    placement.remove()


@pytest.mark.integration
def test_a_rank_and_an_engine_that_share_a_gpu_are_in_one_bundle(placed: Placement):
    make: Any = ray.remote
    remote = make(Process)
    options = [placed.trainer(0), placed.engine(0)]
    actors = [remote.options(**one).remote() for one in options]
    bundles = ray.get([actor.bundle.remote() for actor in actors], timeout=60)
    assert bundles[0] == bundles[1] is not None
    assert "rlpipe-shares-shared" in held()
    assert [one["scheduling_strategy"].placement_group_bundle_index for one in options] == [0, 0]
    for actor in actors:
        ray.kill(actor)
    assert placed.engine_devices() is None, "without GPUs an engine sees what its actor sees"


@pytest.mark.integration
def test_on_one_machine_everything_is_reached_at_the_loopback_interface(local_ray: str):
    assert own_address() == LOOPBACK
