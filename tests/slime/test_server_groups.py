"""slime's file of engine groups, `--sglang-config` (rlpipe.slime.server_groups)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rlpipe.errors import ConfigError
from rlpipe.slime.server_groups import engine_layout, layout_difference


@pytest.fixture
def flags(tmp_path: Path):
    """Return flags with a file of these groups of one model, or of these models."""

    def write(*groups: dict[str, Any], models: list[dict[str, Any]] | None = None, **values: Any):
        content = {"sglang": models or [{"name": "default", "server_groups": list(groups)}]}
        (tmp_path / "groups.yaml").write_text(yaml.safe_dump(content))
        return {"sglang_config": str(tmp_path / "groups.yaml"), **values}

    return write


def group(num_gpus: int, size: int | None = None, kind: str = "regular", **overrides: Any):
    sizes = {} if size is None else {"num_gpus_per_engine": size}
    return {"worker_type": kind, "num_gpus": num_gpus, "overrides": overrides, **sizes}


def layout(flags: dict[str, Any]) -> tuple[int, int]:
    keys = engine_layout(flags)
    return keys["resources.rollout_num_gpus"], keys["resources.rollout_num_gpus_per_engine"]


def test_without_the_flag_nothing_changes():
    assert engine_layout({}) == {} and layout_difference({}) is None


def test_engines_have_the_largest_size_that_divides_the_gpus(flags):
    assert layout(flags(group(4, 2), group(2, 1))) == (6, 2)
    assert layout(flags(group(2, 2), group(1, 1))) == (3, 1)


def test_placeholders_reserve_gpus(flags):
    given = flags(
        group(4, 2), group(2, 1), group(2, kind="placeholder"), colocate=True, actor_num_nodes=1
    )
    assert layout(given) == (6, 2)


def test_groups_without_a_size_have_the_model_s_then_the_flag_s(flags):
    model = {"name": "m", "num_gpus_per_engine": 4, "engine_groups": [group(8)]}
    assert layout(flags(models=[model])) == (8, 4)
    assert layout(flags(group(8), rollout_num_gpus_per_engine=2)) == (8, 2)
    assert layout(flags(group(8))) == (8, 1)


def test_prefill_and_decode_become_equal_engines_and_a_note_tells_it(flags):
    transfer = {"disaggregation_transfer_backend": "mooncake"}
    given = flags(
        group(4, 4, "prefill", **transfer, context_length=64),
        group(4, 4, "decode", **transfer, context_length=64),
    )
    assert engine_layout(given) == {
        "resources.rollout_num_gpus": 8,
        "resources.rollout_num_gpus_per_engine": 4,
        "engine.sglang.context_length": 64,
    }
    assert "2 equal engines of 4 GPUs" in (layout_difference(given) or "")


def test_arguments_that_differ_are_left_out_and_named(flags):
    given = flags(
        group(2, page_size=64, deepep_mode="auto"), group(2, page_size=64, deepep_mode="normal")
    )
    keys = engine_layout(given)
    assert keys["engine.sglang.page_size"] == 64 and "engine.sglang.deepep_mode" not in keys
    assert (layout_difference(given) or "").endswith("because they differ: deepep_mode")


@pytest.mark.parametrize(
    ("groups", "values", "said"),
    [
        ([group(4, 2)], {"rollout_num_gpus": 8}, "another number of GPUs"),
        ([group(2, 2), group(3, 3)], {}, "no engine size of the groups"),
        ([group(2, kind="placeholder")], {}, "not the engines of one trained model"),
        ([group(2, kind="encoder")], {}, "sglang.0.server_groups.0.worker_type"),
        ([{"worker_type": "regular"}], {}, "sglang.0.server_groups.0.num_gpus"),
    ],
)
def test_other_files_are_refused_by_name(flags, groups, values, said):
    with pytest.raises(ConfigError, match=said):
        engine_layout(flags(*groups, **values))


def test_a_frozen_model_is_refused_by_name(flags):
    policy = {"name": "actor", "update_weights": True, "server_groups": [group(4)]}
    for frozen in (
        {"name": "ref", "update_weights": False, "server_groups": [group(4)]},
        {"name": "ref", "model_path": "/models/other", "server_groups": [group(4)]},
    ):
        with pytest.raises(ConfigError, match=r"frozen model(.|\n)*ref"):
            engine_layout(flags(models=[policy, frozen], hf_checkpoint="/models/m"))
