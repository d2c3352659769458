"""Names that pass through to Megatron-core, SGLang and its router (rlpipe.config.passthrough)."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext

import pytest
from packaging.version import Version

from rlpipe.config import passthrough
from rlpipe.config.passthrough import TABLES, accepts, check_megatron, check_router, check_sglang, load, receivers, stored
from rlpipe.config.passthrough.owned import OWNED
from rlpipe.config.train import TrainConfig
from rlpipe.errors import ConfigError


def test_known_names_with_values_of_their_types_pass():
    check_megatron(
        {"recompute_granularity": "full", "recompute_num_layers": 1, "overlap_grad_reduce": True, "init_method_std": 1}
    )
    check_sglang(
        {"mem_fraction_static": 0.8, "context_length": 4096, "elastic_ep_join_mode": None, "disable_overlap_schedule": True}
    )
    check_router({"policy": "round_robin", "health_check_interval_secs": 5})


@pytest.mark.parametrize(
    ("given", "more"),
    [
        ({}, {"recompute_method": "uniform", "recompute_num_layers": 1}),
        ({"recompute_method": "block", "recompute_num_layers": 3}, {}),
    ],
)
def test_megatron_is_told_all_that_it_asks_for_with_full_recomputation(given, more):
    said = {"recompute_granularity": "full", **given}
    assert TrainConfig.model_validate({"megatron": said}).megatron == said | more
    assert TrainConfig.model_validate({"megatron": {"recompute_granularity": "selective"}}).megatron.keys() == {
        "recompute_granularity"
    }


@pytest.mark.parametrize(
    ("check", "name", "nearest"),
    [
        (check_megatron, "recompute_granularityy", "recompute_granularity"),
        (check_sglang, "mem-fraction-static", "mem_fraction_static"),
        (check_sglang, "--context-length", "context_length"),
        (check_router, "policyy", "policy"),
    ],
)
def test_an_unknown_name_is_told_the_nearest(check, name, nearest):
    with pytest.raises(ConfigError, match="no argument of this name") as caught:
        check({name: 1})
    assert nearest in str(caught.value.expected)


@pytest.mark.parametrize(
    ("check", "name", "key"),
    [
        (check_megatron, "tensor_model_parallel_size", "train.parallel.tensor_model_parallel_size"),
        (check_megatron, "hidden_size", "model.source"),
        (check_megatron, "lr", "train.optimizer.lr"),
        (check_sglang, "tp_size", "resources.rollout_num_gpus_per_engine"),
        (check_sglang, "tensor_parallel_size", "resources.rollout_num_gpus_per_engine"),
        (check_sglang, "model", "model.source"),
        (check_router, "host", "engine.host"),
    ],
)
def test_an_owned_name_is_refused_with_the_key_to_use(check, name, key):
    with pytest.raises(ConfigError, match="sets this itself") as caught:
        check({name: 1})
    assert key in str(caught.value.do)


@pytest.mark.parametrize(
    ("check", "name", "value"),
    [
        (check_sglang, "mem_fraction_static", "0.8"),
        (check_sglang, "context_length", True),
        (check_sglang, "disable_overlap_schedule", 1),
        (check_megatron, "recompute_granularity", "some"),
        (check_megatron, "activation_func", "gelu"),
        (check_megatron, "grad_scale_func", 2.0),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(check, name, value):
    with pytest.raises(ConfigError) as caught:
        check({name: value})
    assert caught.value.found == repr(value)


@pytest.mark.parametrize(
    ("spelled", "value", "answer"),
    [
        ("int", 1, True),
        ("int", 1.0, False),
        ("int", True, False),
        ("float", 1, True),
        ("bool", False, True),
        ("bool", 0, False),
        ("str | None", None, True),
        ("str", None, False),
        ("'full' | 'selective'", "full", True),
        ("'full' | 'selective'", "half", False),
        ("1 | 2", 2, True),
        ("list", (1,), True),
        ("dict", {}, True),
        ("object", "x", False),
        ("object | None", None, True),
    ],
)
def test_types_are_checked_as_far_as_json_goes(spelled, value, answer):
    assert accepts(spelled, value) is answer


def test_a_megatron_name_knows_the_classes_that_take_it():
    assert receivers("megatron", "recompute_granularity") == ["TransformerConfig"]
    assert receivers("megatron", "overlap_grad_reduce") == ["DistributedDataParallelConfig"]
    assert receivers("megatron", "nothing") == []


@pytest.mark.parametrize("table", TABLES)
def test_every_owned_name_is_in_its_table(table):
    fields = {entry.get("field", name) for kind in load(table)["receivers"].values() for name, entry in kind.items()}
    assert set(OWNED[table]) <= fields


@pytest.mark.parametrize(
    ("version", "older", "newer"), [("0.5.15", True, False), ("0.5.18", True, True), ("0.5.21", False, True), (None, False, True)]
)
def test_names_are_those_of_the_version_that_is_installed(monkeypatch, version, older, newer):
    monkeypatch.setattr(passthrough, "installed", lambda package: Version(version) if version else None)
    monkeypatch.setattr(passthrough, "load", load.__wrapped__)
    for name, there in (("cuda_graph_max_bs", older), ("prefill_decode_interval", newer), ("chunked_prefill_size", True)):
        with nullcontext() if there else pytest.raises(ConfigError, match="no argument of this name"):
            check_sglang({name: None})


@pytest.mark.parametrize("table", TABLES)
def test_no_secret_passes_for_it_would_be_stored_with_the_run(table):
    kinds = [kind for content in stored(table).values() for kind in content["receivers"].values()]
    fields = {entry.get("field", name) for kind in kinds for name, entry in kind.items()}
    secrets = {name for name in fields if "api_key" in name or "password" in name}
    assert secrets <= OWNED[table].keys()
    assert all("stored with the run" in OWNED[table][name] for name in secrets)
    assert bool(secrets) == (table != "megatron")


@pytest.mark.integration
def test_the_tables_are_those_of_the_installed_packages(repository):
    result = subprocess.run(
        [sys.executable, "-m", "tools.passthrough_tables", "--check"], cwd=repository, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_configuration_imports_without_the_heavy_packages(repository):
    heavy = {"torch", "ray", "prefect", "megatron", "sglang", "transformers"}
    code = "import sys, rlpipe.config.load; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, timeout=60, check=True)
    assert heavy.isdisjoint(result.stdout.split())
