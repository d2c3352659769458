"""Contradictory arguments are found before a rank starts (rlpipe.engines.megatron.preflight)."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rlpipe.config.model import HuggingFaceModel, ModelConfig
from rlpipe.config.train import TrainConfig
from rlpipe.engines.megatron import preflight
from rlpipe.engines.megatron.preflight import check_trainer, refused
from rlpipe.errors import ConfigError


def given(directory: str, **train: Any) -> dict[str, Any]:
    """Return the request to the process of the check."""
    model = ModelConfig(
        source=HuggingFaceModel(type="huggingface", hf_checkpoint=directory), dtype="float32"
    )
    settings = TrainConfig.model_validate(train)
    return {
        "directory": directory,
        "model": model.model_dump(mode="json"),
        "train": settings.model_dump(mode="json"),
        "deterministic": False,
    }


PIPELINE = {"parallel": {"pipeline_model_parallel_size": 2}}
SELECTIVE = {"recompute_granularity": "selective"}


@pytest.mark.parametrize(
    ("family", "train", "words"),
    [
        (
            "qwen3",
            {"megatron": {**SELECTIVE, "recompute_num_layers": 1}},
            "recompute_num_layers must be None",
        ),
        (
            "qwen3",
            {"megatron": {**SELECTIVE, "recompute_modules": ["everything"]}},
            "Invalid choices",
        ),
        (
            "qwen3",
            {"megatron": {**SELECTIVE, "recompute_modules": ["layernorm"]}},
            "Transformer Engine",
        ),
        ("qwen3", {"megatron": {"gradient_accumulation_fusion": True}}, "not installed"),
        ("qwen3", {"megatron": {"apply_rope_fusion": True}}, "apply_rope_fusion is not available"),
        ("qwen3", {"megatron": {"use_precision_aware_optimizer": True}}, "distributed optimizer"),
        (
            "qwen3",
            {
                "use_distributed_optimizer": True,
                "megatron": {"use_precision_aware_optimizer": True},
            },
            "Transformer Engine",
        ),
        (
            "qwen3",
            {"megatron": {"pipeline_model_parallel_layout": "Et|tL"}},
            "several pipeline stages",
        ),
        ("qwen3", {"parallel": {"pipeline_model_parallel_size": 3}}, "do not divide"),
        (
            "qwen3",
            {"megatron": {"transformer_impl": "transformer_engine"}},
            "Transformer Engine cannot be imported",
        ),
        ("qwen3", {"megatron": {"virtual_pipeline_model_parallel_size": 2}}, "several chunks"),
        (
            "qwen3",
            PIPELINE | {"megatron": {"virtual_pipeline_model_parallel_size": 2}},
            "do not divide into chunks",
        ),
        (
            "qwen3_deep",
            PIPELINE | {"megatron": {"num_layers_per_virtual_pipeline_stage": 3}},
            "do not divide into chunks",
        ),
        (
            "qwen3_deep",
            PIPELINE
            | {
                "megatron": {
                    "num_layers_per_virtual_pipeline_stage": 1,
                    "num_layers_in_first_pipeline_stage": 1,
                }
            },
            "two arguments decide",
        ),
        (
            "qwen3_deep",
            PIPELINE
            | {
                "megatron": {
                    "virtual_pipeline_model_parallel_size": 2,
                    "microbatch_group_size_per_vp_stage": 1,
                }
            },
            "micro-batches in a row",
        ),
        ("qwen3", {"parallel": {"expert_model_parallel_size": 2}}, "expert"),
        ("qwen3", {"use_routing_replay": True}, "no experts"),
        ("qwen3_moe", {"megatron": {"moe_token_dispatcher_type": "allgather"}}, "alltoall"),
        ("qwen3_moe", {"megatron": {"moe_token_dispatcher_type": "flex"}}, "several ranks"),
        ("qwen3_moe", {"parallel": {"tensor_model_parallel_size": 2}}, "sequence parallelism"),
    ],
)
def test_preflight_refuses_arguments_that_the_ranks_refuse(models, family, train, words):
    error = refused(given(models[family], **train))
    assert error is not None
    assert words in str(ConfigError(**error))


@pytest.mark.parametrize(
    ("family", "train"),
    [
        ("qwen3", {"megatron": {"recompute_granularity": "full"}}),
        ("qwen3", {"parallel": {"pipeline_model_parallel_size": 2}}),
        (
            "qwen3",
            {
                "parallel": {"pipeline_model_parallel_size": 2},
                "megatron": {"pipeline_model_parallel_layout": "Et|tL"},
            },
        ),
        (
            "qwen3_deep",
            PIPELINE | {"megatron": {"pipeline_model_parallel_layout": "Et|t|t|tL"}},
        ),
        (
            "qwen3_deep",
            PIPELINE | {"megatron": {"num_layers_per_virtual_pipeline_stage": 1}},
        ),
        (
            "qwen3_deep",
            PIPELINE | {"megatron": {"virtual_pipeline_model_parallel_size": 1}},
        ),
        ("qwen3_moe", {"parallel": {"expert_model_parallel_size": 2}, "use_routing_replay": True}),
        (
            "qwen3_moe",
            {
                "megatron": {
                    "moe_grouped_gemm": True,
                    "attention_softmax_in_fp32": True,
                    "optimizer": "adam",
                }
            },
        ),
    ],
)
def test_preflight_accepts_arguments_that_the_ranks_accept(models, family, train):
    assert refused(given(models[family], **train)) is None


@pytest.mark.integration
def test_the_check_runs_in_a_separate_process(models):
    model = ModelConfig(
        source=HuggingFaceModel(type="huggingface", hf_checkpoint=models["qwen3"]), dtype="float32"
    )
    with pytest.raises(ConfigError, match=r"(?s)train\.megatron.*together.*recompute_num_layers"):
        check_trainer(
            Path(models["qwen3"]),
            model,
            TrainConfig(megatron={**SELECTIVE, "recompute_num_layers": 1}),
        )


def test_accepted_arguments_are_checked_once_until_the_model_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    runs: list[str] = []

    def run(_command: list[str], *, input: str, **_: Any) -> subprocess.CompletedProcess[str]:
        runs.append(input)
        return subprocess.CompletedProcess([], 0, "null\n", "")

    monkeypatch.setattr(preflight.subprocess, "run", run)
    monkeypatch.setattr(preflight, "_accepted", set())
    request = given(str(tmp_path))
    model = ModelConfig.model_validate(request["model"])
    train = TrainConfig.model_validate(request["train"])
    for config, count in (("{}", 1), ("{}", 1), ('{"a": 1}', 2)):
        (tmp_path / "config.json").write_text(config)
        check_trainer(tmp_path, model, train)
        assert len(runs) == count
    check_trainer(tmp_path, model, train, deterministic=True)
    assert len(runs) == 3


def test_refused_arguments_are_checked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "config.json").write_text("{}")
    answer = json.dumps({"problem": "no", "where": "train.megatron"})
    monkeypatch.setattr(
        preflight.subprocess,
        "run",
        lambda _command, **_: subprocess.CompletedProcess([], 0, answer, ""),
    )
    request = given(str(tmp_path))
    model = ModelConfig.model_validate(request["model"])
    train = TrainConfig.model_validate(request["train"])
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"train\.megatron: no"):
            check_trainer(tmp_path, model, train)
