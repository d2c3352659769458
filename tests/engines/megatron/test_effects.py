"""Rows of Megatron's arguments against the measurements (`effects`, `effects.json`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlpipe.config.arguments import names
from rlpipe.config.arguments.check import check_megatron
from rlpipe.config.arguments.table import MEGATRON, TABLE
from rlpipe.engines.megatron.model.build import split_arguments
from rlpipe.errors import ConfigError
from tests.engines.megatron.effects import CASES, off_default, train
from tests.engines.megatron.families import make

MEASURED: dict[str, dict[str, dict[str, str]]] = json.loads(
    Path(__file__).with_name("effects.json").read_text()
)


def changes(name: str) -> bool:
    """True if a value of the argument changed anything in any model."""
    outcomes = [outcome for case in MEASURED[name].values() for outcome in case.values()]
    return any(outcome != "nothing" and not outcome.startswith("error") for outcome in outcomes)


def test_every_accepted_argument_is_measured():
    never = {name for name, rule in MEGATRON.items() if rule.kind in ("owned", "fixed")}
    never |= names.OWN["megatron"].keys()  # rlpipe's own, which Megatron's classes do not have
    assert names.entries("megatron").keys() - never <= MEASURED.keys()


def test_an_argument_without_effect_has_a_row_with_the_reason():
    without = {name for name in names.entries("megatron") if name in MEASURED and not changes(name)}
    assert without - MEGATRON.keys() == set()


def test_a_row_without_effect_agrees_with_the_measurement():
    assert {
        name
        for name, rule in MEGATRON.items()
        if rule.kind == "inert" and name in MEASURED and changes(name)
    } == set()


def test_a_configuration_and_a_rank_refuse_the_same_arguments():
    """Each field of the three classes, off its default."""
    differ = []
    refused = 0
    for name, entry in names.entries("megatron").items():
        for value in off_default(entry["type"], entry["default"]):
            answers = []
            for check in (check_megatron, split_arguments):
                try:
                    check({name: value})
                    answers.append(True)
                except ConfigError:
                    answers.append(False)
            refused += not answers[0]
            if len(set(answers)) > 1:
                differ.append((name, value))
    assert differ == []
    assert refused > 150


@pytest.fixture(scope="module")
def measured_again(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A dense model, and its state without any argument."""
    model_dir = make(CASES["dense"].family, tmp_path_factory.mktemp("effects") / "dense")
    return {"model_dir": model_dir, "plain": train(model_dir, CASES["dense"], {})}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("window_size", [2, 0]),
        ("fp8", "e4m3"),
        ("muon_momentum", 0.475),
        ("tp_comm_overlap", True),
        ("cross_entropy_loss_fusion", True),
        ("recompute_granularity", "full"),
        ("attention_dropout", 0.25),
        ("apply_query_key_layer_scaling", True),
        ("decoupled_weight_decay", False),
        ("optimizer_cpu_offload", True),
    ],
)
def test_a_sample_of_the_measurements_is_reproduced(measured_again, monkeypatch, name, value):
    monkeypatch.setitem(TABLE, "megatron", {})
    found = train(measured_again["model_dir"], CASES["dense"], {name: value})
    plain = measured_again["plain"]
    changed = ", ".join(part for part in found if found[part] != plain[part]) or "nothing"
    assert changed == MEASURED[name]["dense"][json.dumps(value)]
