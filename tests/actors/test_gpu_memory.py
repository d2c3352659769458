"""Residency of trainer and engines from the sizes of models and GPUs (rlpipe.actors.gpu_memory)."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from rlpipe.actors import gpu_memory
from rlpipe.actors.gpu_memory import (
    GIB,
    Parameters,
    Sizes,
    cache_bytes_per_token,
    count_parameters,
    decide,
    fitted,
    graph_sizes,
    requests_per_engine,
    sizes_of,
    trainer_state_bytes,
    with_micro_batches,
)
from rlpipe.config.load import PRESETS, presets, validate
from rlpipe.config.run import RunConfig
from rlpipe.config.text import parse

H100 = int(79.6 * GIB)
H200 = int(139.7 * GIB)
MILLION = 10**6


def qwen3(hidden: int, layers: int, heads: int, mlp: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 4 if more else 8,
        "head_dim": 128,
        "intermediate_size": mlp,
        "max_position_embeddings": 40960,
        **more,
    }


MODELS = {
    "0.6B": (qwen3(1024, 28, 16, 3072), Parameters(440 * MILLION, 0, 156 * MILLION)),
    "4B": (qwen3(2560, 36, 32, 9728), Parameters(3633 * MILLION, 0, 389 * MILLION)),
    "8B": (qwen3(4096, 36, 32, 12288), Parameters(6946 * MILLION, 0, 1245 * MILLION)),
    "30B-A3B": (
        qwen3(2048, 48, 32, 6144, num_experts_per_tok=8, moe_intermediate_size=768),
        Parameters(920 * MILLION, 28991 * MILLION, 622 * MILLION),
    ),
}
FULL = {"recompute_granularity": "full"}
STAY = (True, True)
TRAINER = (True, False)
SLEEP = (False, False)


def configuration(gpus: int = 1, per_engine: int = 1, **sections: Any) -> RunConfig:
    base: dict[str, Any] = {
        "run": "run",
        "num_rollout": 3,
        "model": {"source": {"type": "huggingface", "hf_checkpoint": "/m"}},
        "data": {
            "prompts": {"type": "reasoning_gym", "task": "chain_sum", "size": 64},
            "rollout_max_prompt_len": 128,
        },
        "rollout": {
            "rollout_batch_size": 32,
            "n_samples_per_prompt": 8,
            "rollout_max_response_len": 512,
        },
        "reward": {"function": {"type": "math"}},
        "resources": {
            "colocate": True,
            "actor_num_gpus_per_node": gpus,
            "rollout_num_gpus_per_engine": per_engine,
        },
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values} if isinstance(values, dict) else values
    return validate(base)


def decision(model: str, gpu_bytes: int, config: RunConfig) -> tuple[bool, bool] | None:
    sizes = sizes_of(config, *MODELS[model])
    assert sizes is not None
    found = decide(sizes, gpu_bytes, config)
    return found and found[:2]


@pytest.mark.parametrize(
    ("model", "gpu_bytes", "gpus", "per_engine", "sections", "expected"),
    [
        ("0.6B", H100, 1, 1, {}, STAY),
        ("0.6B", 24 * GIB, 1, 1, {}, SLEEP),
        ("0.6B", H100, 1, 1, {"rollout": {"rollout_max_response_len": 8192}}, TRAINER),
        ("0.6B", H200, 1, 1, {"rollout": {"rollout_max_response_len": 2048}}, STAY),
        ("0.6B", H100, 8, 1, {"rollout": {"rollout_batch_size": 128}}, STAY),
        ("4B", H100, 1, 1, {}, SLEEP),
        ("4B", H200, 1, 1, {"train": {"megatron": FULL}}, STAY),
        ("4B", H200, 1, 1, {}, STAY),
        ("4B", H200, 1, 1, {"train": {"max_tokens_per_gpu": 16384}}, TRAINER),
        (
            "4B",
            H100,
            2,
            2,
            {"train": {"use_distributed_optimizer": True, "megatron": FULL}},
            STAY,
        ),
        (
            "8B",
            H100,
            8,
            1,
            {"train": {"use_distributed_optimizer": True, "megatron": FULL}},
            SLEEP,
        ),
        (
            "8B",
            H100,
            8,
            1,
            {
                "train": {
                    "use_distributed_optimizer": True,
                    "megatron": FULL,
                    "parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
                }
            },
            STAY,
        ),
        (
            "30B-A3B",
            H200,
            8,
            8,
            {
                "train": {
                    "use_distributed_optimizer": True,
                    "megatron": FULL,
                    "parallel": {
                        "tensor_model_parallel_size": 4,
                        "sequence_parallel": True,
                        "expert_model_parallel_size": 8,
                    },
                }
            },
            STAY,
        ),
    ],
)
def test_the_idle_side_keeps_its_memory_where_both_fit(
    model: str,
    gpu_bytes: int,
    gpus: int,
    per_engine: int,
    sections: dict[str, Any],
    expected: tuple[bool, bool],
):
    assert decision(model, gpu_bytes, configuration(gpus, per_engine, **sections)) == expected


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        ({"offload_train": True}, SLEEP),
        ({"offload_rollout": True}, TRAINER),
        ({"offload_train": True, "offload_rollout": True}, SLEEP),
        ({"offload_train": False, "offload_rollout": False}, STAY),
    ],
)
def test_keys_of_the_configuration_have_precedence(resources: dict[str, bool], expected):
    assert decision("0.6B", H100, configuration(resources=resources)) == expected


def test_without_a_fitting_choice_the_keys_apply_as_they_are():
    both = {"offload_train": False, "offload_rollout": False}
    assert decision("8B", H100, configuration(resources=both)) is None


def test_no_phase_uses_more_than_the_gpu():
    """For all sizes: the sums of the module's table."""
    config = configuration()
    random = np.random.default_rng(0)
    found = set()
    for _ in range(2000):
        state, activations, weights, wanted = (int(size) for size in random.integers(1, 60, 4))
        sizes = Sizes(state * GIB, activations * GIB, weights * GIB, 2**17, wanted * 2**13)
        choice = decide(sizes, H100, config)
        found.add(choice and choice[:2])
        if not choice or not choice.trainer_stays:
            continue
        engine = sizes.engine_weights + choice.cache_tokens * sizes.cache_token
        engine += gpu_memory.ENGINE_WORK_BYTES
        training = sizes.state + sizes.activations + gpu_memory.TRAINER_WORK_BYTES
        most = H100 - gpu_memory.RESERVED_BYTES
        assert training + (engine if choice.engines_stay else 0) <= most
        assert engine + (sizes.state if choice.trainer_stays else 0) <= most
    assert found == {STAY, TRAINER, SLEEP}


def test_state_is_counted_per_rank():
    dense = Parameters(80, 0, 16)
    assert trainer_state_bytes(configuration(), dense) == 96 * 18
    sharded = {"use_distributed_optimizer": True}
    assert trainer_state_bytes(configuration(8, train=sharded), dense) == 96 * 6 + 96 * 12 // 8
    half = {**sharded, "parallel": {"tensor_model_parallel_size": 2}}
    assert trainer_state_bytes(configuration(8, train=half), dense) == 48 * 6 + 48 * 12 // 4
    experts = Parameters(80, 800, 16)
    layout = {**sharded, "parallel": {"expert_model_parallel_size": 8}}
    expected = 96 * 6 + 96 * 12 // 8 + 100 * 18
    assert trainer_state_bytes(configuration(8, train=layout), experts) == expected
    adapters = configuration(train={"lora": {"rank": 2}})
    assert trainer_state_bytes(adapters, Parameters(80, 0, 16, 9)) == 96 * 2 + 18 * 18
    critic = configuration(advantage={"advantage_estimator": "ppo"})
    assert trainer_state_bytes(critic, dense) == 2 * 96 * 18


def test_the_cache_of_a_token_follows_from_the_architecture():
    model = MODELS["0.6B"][0]
    assert cache_bytes_per_token(model, 1) == 2 * 2 * 28 * 8 * 128
    assert cache_bytes_per_token(model, 16) == 2 * 2 * 28 * 1 * 128
    assert cache_bytes_per_token({"text_config": model}, 2) == 2 * 2 * 28 * 4 * 128
    latent = {**model, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert cache_bytes_per_token(latent, 8) == 2 * 28 * 576
    assert cache_bytes_per_token({**model, "layer_types": ["sliding_attention"]}, 1) is None
    assert cache_bytes_per_token({**model, "layer_types": ["full_attention"]}, 1) is not None


def test_graphs_cover_the_requests_that_an_engine_gets():
    assert requests_per_engine(configuration()) == 256
    assert requests_per_engine(configuration(8, rollout={"rollout_batch_size": 128})) == 192
    assert requests_per_engine(configuration(engine={"server_concurrency": 100})) == 100
    agent = {"custom_generate_function_path": "mine.py:f"}
    assert requests_per_engine(configuration(rollout=agent)) == 512
    assert graph_sizes(256)[-3:] == [192, 224, 256]
    assert graph_sizes(5) == [1, 2, 4, 5]
    sizes = graph_sizes(512)
    assert len(sizes) == 21 and all(a < b <= 2 * a for a, b in pairwise(sizes))


@pytest.fixture
def model_dir(tmp_path: Path) -> str:
    """A directory with the sizes of a model of 0.6B, and the parameters of a tiny one."""
    (tmp_path / "config.json").write_text(json.dumps(MODELS["0.6B"][0]))
    zeros = np.zeros((4, 8), np.float16)
    save_file(
        {"model.embed_tokens.weight": zeros, "model.layers.0.mlp.experts.1.up.weight": zeros},
        tmp_path / "model-1.safetensors",
    )
    save_file({"model.norm.weight": np.zeros(3, np.float32)}, tmp_path / "model-2.safetensors")
    return str(tmp_path)


def test_parameters_are_counted_in_the_files_of_the_weights(model_dir: str, tmp_path: Path):
    assert count_parameters(model_dir) == Parameters(dense=3, experts=32, embeddings=32)
    assert count_parameters(str(tmp_path / "none")) is None


def test_actors_get_the_decision_and_the_run_keeps_its_configuration(model_dir: str):
    config = configuration()
    before = config.model_dump()
    actors, line = fitted(config, model_dir, H100)
    assert config.model_dump() == before
    assert not (actors.resources.trainer_sleeps or actors.resources.engines_sleep)
    sglang = actors.engine.sglang
    assert (sglang["mem_fraction_static"], sglang["max_total_tokens"]) == (
        0.9,
        (32 * 128 + 256 * 512) * 5 // 4,
    )
    assert sglang["cuda_graph_bs_decode"] == graph_sizes(256)
    assert line is not None and line.startswith("GPU memory 79.6 GiB: trainer 0.0 + ")
    assert line.endswith("the trainer stays, engines stay; micro-batches of 32768 tokens")
    assert fitted(config, model_dir, H100) == (actors, line), "a resume decides the same"


@pytest.mark.parametrize(
    ("sglang", "expected"),
    [
        ({"mem_fraction_static": 0.3}, {"mem_fraction_static": 0.3}),
        ({"max_total_tokens": 9}, {"mem_fraction_static": 0.9, "max_total_tokens": 9}),
        ({"cuda_graph_max_bs_decode": 8}, {"cuda_graph_max_bs_decode": 8}),
    ],
)
def test_given_arguments_of_engines_stay(model_dir: str, sglang, expected):
    found = fitted(configuration(engine={"sglang": sglang}), model_dir, H100).config.engine.sglang
    assert {key: found.get(key) for key in expected} == expected
    assert ("max_total_tokens" in found) == ("mem_fraction_static" not in sglang)
    assert ("cuda_graph_bs_decode" in found) == ("cuda_graph_max_bs_decode" not in sglang)


SEPARATE: dict[str, Any] = {"resources": {"colocate": False}}


@pytest.mark.parametrize(
    ("model", "gpu_bytes", "sections", "expected"),
    [
        ("0.6B", H200, {}, 32768),
        ("0.6B", H100, {}, 32768),
        ("0.6B", 60 * GIB, {}, 16384),
        ("0.6B", 24 * GIB, {}, 4096),
        ("0.6B", 12 * GIB, {}, 8192),
        # 16384 tokens would fit, but the engines would have to release their memory.
        ("4B", H200, {}, 8192),
        ("4B", H200, SEPARATE, 16384),
        ("4B", H200, {"train": {"megatron": FULL}}, 32768),
        ("0.6B", H200, {"train": {"max_tokens_per_gpu": 1024}}, 1024),
        ("0.6B", H200, {"train": {"micro_batch_size": 1}}, None),
        ("0.6B", H200, {"deterministic": True}, None),
        ("30B-A3B", H200, {}, None),
    ],
)
def test_micro_batches_are_as_large_as_fits_with_what_stays(
    model: str, gpu_bytes: int, sections: dict[str, Any], expected: int | None
):
    sized = with_micro_batches(configuration(**sections), *MODELS[model], gpu_bytes)
    assert sized.train.max_tokens_per_gpu == expected
    assert with_micro_batches(sized, *MODELS[model], gpu_bytes) == sized


@pytest.mark.parametrize(
    "train",
    [
        {"parallel": {"pipeline_model_parallel_size": 2}},
        {"loss": {"type": "custom", "custom_loss_function_path": "mine.py:loss"}},
        {"custom_model_provider_path": "mine.py:model"},
    ],
)
def test_pipelines_and_functions_of_users_keep_the_default_size_of_micro_batches(train):
    config = configuration(2, train=train)
    assert with_micro_batches(config, *MODELS["0.6B"], H200) == config


def test_models_with_images_keep_the_default_size_of_micro_batches():
    model, parameters = MODELS["0.6B"]
    images = {"text_config": model, "vision_config": {}}
    assert with_micro_batches(configuration(), images, parameters, H200) == configuration()


def test_without_gpus_nothing_is_decided_and_on_separate_gpus_only_micro_batches(model_dir: str):
    assert fitted(configuration(), model_dir, None) == (configuration(), None)
    separate = configuration(**SEPARATE)
    actors, line = fitted(separate, model_dir, H100)
    assert line == "micro-batches of 32768 tokens"
    assert actors.resources == separate.resources
    assert "max_total_tokens" not in actors.engine.sglang
    small = fitted(separate, model_dir, 24 * GIB).config
    assert small.engine == separate.engine, "SGLang chooses the graphs on a small GPU"


def test_a_teacher_on_the_ranks_leaves_the_defaults(model_dir: str):
    config = configuration(
        advantage={"use_opd": True},
        teacher={"opd_type": "megatron", "opd_teacher_load": "/t"},
    )
    actors, line = fitted(config, model_dir, H100)
    assert line == "micro-batches of 8192 tokens" and actors.resources == config.resources


@pytest.mark.parametrize(
    ("preset", "model", "expected"),
    [
        ("qwen3-0.6b", "0.6B", STAY),
        ("qwen3-4b", "4B", STAY),
        ("qwen3-8b", "8B", STAY),
        ("qwen3-30b-a3b", "30B-A3B", STAY),
    ],
)
def test_presets_leave_the_decision_to_the_sizes(preset: str, model: str, expected):
    path = PRESETS / f"{preset}.yaml"
    sections: Any = parse(path.read_text(), str(path))[0]
    gpu_bytes = H200 if model == "30B-A3B" else H100
    assert decision(model, gpu_bytes, configuration(**sections)) == expected


def test_a_preset_limits_the_cache_only_where_sizes_do_not_decide():
    """Models with layers of several kinds, and engines on GPUs of their own."""
    limited = {
        name
        for name in presets()
        if "mem_fraction_static" in (PRESETS / f"{name}.yaml").read_text()
    }
    assert {name for name in limited if not name.startswith(("qwen3.5", "qwen3-next"))} == {
        "glm4-9b",
        "gpt-oss-20b",
        "kimi-k2",
    }
