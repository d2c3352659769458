"""External engines and an external router in a configuration (rlpipe.config.run)."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rlpipe.config.model import EngineConfig, ResourcesConfig
from rlpipe.config.run import external_conflict
from rlpipe.config.train import SyncConfig

HERE = "127.0.0.1:30000"
THERE = "http://10.0.0.7:30000"


def problem(*engines: str, engine: Any = None, store: str | None = None, **sync: Any) -> str | None:
    resources = ResourcesConfig.model_validate({"external_engines": engines})
    return external_conflict(
        resources, EngineConfig.model_validate(engine or {}), SyncConfig(**sync), store
    )


def test_an_address_has_a_host_and_a_port_and_may_leave_http_out():
    resources = ResourcesConfig.model_validate(
        {"external_engines": [HERE, "https://a.b:1/"], "rollout_num_gpus_per_engine": 4}
    )
    assert resources.external_engines == ("http://127.0.0.1:30000", "https://a.b:1")
    assert resources.num_engines == 2
    for wrong in ("10.0.0.7", "ftp://a:1", "a:1/v1", ""):
        with pytest.raises(ValidationError, match="expected http://host:port"):
            EngineConfig.model_validate({"router_url": wrong})


@pytest.mark.parametrize(
    "values", [{"external_engines": [HERE, HERE]}, {"external_engines": [HERE], "colocate": True}]
)
def test_engines_are_named_once_and_lie_on_no_gpus_of_the_run(values: dict[str, Any]):
    with pytest.raises(ValidationError, match="external"):
        ResourcesConfig.model_validate(values)


@pytest.mark.parametrize(
    "fine",
    [
        problem(),
        problem(HERE),
        problem(HERE, transport="delta"),
        problem(THERE, transport="distributed"),
        problem(THERE, transport="disk", update_weight_disk_dir="/shared"),
        problem(THERE, transport="disk", store="file:///shared"),
        problem(THERE, transport="delta", update_weight_local_checkpoint_dir="/shared"),
        problem(HERE, engine={"router_url": "a:1"}),
    ],
)
def test_what_can_be_reached_is_fine(fine: str | None):
    assert fine is None


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (problem(THERE), "goes through this machine's memory"),
        (problem(HERE, THERE, transport="delta"), "update_weight_local_checkpoint_dir"),
        (problem(THERE, transport="disk", store="s3://b/p"), "update_weight_local_checkpoint_dir"),
        (
            problem(HERE, engine={"sglang": {"mem_fraction_static": 0.5}}),
            "leave one of the two out",
        ),
        (
            problem(engine={"router_url": "a:1", "router": {"policy": "random"}}),
            "leave one of the two out",
        ),
    ],
)
def test_what_cannot_be_reached_or_would_have_no_effect_is_refused_in_words(
    wrong: str | None, said: str
):
    assert wrong is not None and said in wrong
