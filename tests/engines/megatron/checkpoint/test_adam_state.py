"""The optimizer state of a checkpoint that Megatron wrote (conversion.adam_state)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_saver import save

from rlpipe.config.train import CriticConfig, TrainConfig
from rlpipe.engines.megatron.checkpoint.conversion import adam_state, gradient_buckets
from rlpipe.engines.megatron.checkpoint.conversion.adam_state import AdamState
from rlpipe.engines.megatron.checkpoint.conversion.convert import (
    to_adam_state,
    to_hf,
    to_torch_dist,
)
from rlpipe.engines.megatron.checkpoint.conversion.gradient_buckets import (
    _fused_norms,
    _grouped_experts,
)
from rlpipe.engines.megatron.checkpoint.conversion.meta_model import (
    MetaModel,
    single_process_groups,
)
from rlpipe.engines.megatron.checkpoint.conversion.parallel_loading import load_checkpoint_weights
from rlpipe.engines.megatron.checkpoint.conversion.stored_names import StoredNames
from rlpipe.engines.megatron.checkpoint.conversion.torch_dist import Checkpoint
from rlpipe.engines.megatron.checkpoint.state import inner_optimizers
from rlpipe.errors import ConfigError, DataError
from rlpipe.system.ports import free_port
from tests.engines.megatron.adam_jobs import (
    continue_adam,
    different_tensors,
    expected_tensors,
)
from tests.engines.megatron.families import make
from tests.engines.megatron.ranks import _train, engine
from tests.engines.megatron.slime_checkpoint import Job, write


@pytest.fixture(scope="module")
def released(models, tmp_path_factory) -> Path:
    """The qwen3 model in torch_dist format."""
    folder = tmp_path_factory.mktemp("released")
    to_torch_dist(Path(models["qwen3"]), folder)
    return folder


@pytest.fixture(scope="module")
def released_experts(models, tmp_path_factory) -> Path:
    """The qwen3_moe model in torch_dist format."""
    folder = tmp_path_factory.mktemp("released")
    to_torch_dist(Path(models["qwen3_moe"]), folder)
    return folder


def written(models, released: Path, save: Path, *, model: str = "qwen3", **settings: Any) -> Path:
    """Return the folder of a new checkpoint after two steps of Adam."""
    write(Job(str(Path(models[model])), str(released), str(save), **settings))
    return save


@pytest.mark.integration
@pytest.mark.parametrize(
    ("settings", "distributed"),
    [
        ({"sharding": "dp_reshardable"}, True),
        ({"sharding": "dp_reshardable", "dtype": "bfloat16"}, False),
        ({"sharding": "fully_reshardable", "dtype": "bfloat16"}, True),
        ({"sharding": None, "fused_norms": False}, False),
    ],
    ids=["buckets", "buckets_bfloat16", "fully_reshardable", "not_sharded"],
)
def test_adam_continues_with_the_bits_that_megatron_saved(
    models, released, tmp_path, settings, distributed
):
    saved = written(models, released, tmp_path / "saved", **settings)
    to_hf(saved, tmp_path / "weights", origin=Path(models["qwen3"]))
    to_adam_state(saved, tmp_path / "adam", origin=Path(models["qwen3"]))
    train = TrainConfig(use_distributed_optimizer=distributed)
    dtype = settings.get("dtype", "float32")
    ours = engine(str(tmp_path / "weights"), train, 0, 1, free_port(), dtype=dtype)
    try:
        ours.load_hf()
        ours.load_adam_state(tmp_path / "adam")
        assert different_tensors(ours.trained, saved) == []
        (part,) = inner_optimizers(ours.trained.optimizer)
        assert {float(values["step"]) for values in part.optimizer.state.values()} == {2.0}
        assert ours.trained.scheduler.num_steps == 2
    finally:
        ours.close()


EXPERTS = [
    ({"sharding": "dp_reshardable"}, True),
    ({"sharding": "dp_reshardable", "dtype": "bfloat16", "grouped_experts": False}, False),
    ({"sharding": "dp_reshardable", "dtype": "bfloat16", "fused_norms": False}, True),
    ({"sharding": "fully_reshardable", "dtype": "bfloat16"}, True),
    ({"sharding": "fully_reshardable", "chained_prefix": True}, True),
    ({"sharding": None}, False),
    ({"sharding": None, "dtype": "bfloat16", "chained_prefix": True}, True),
]
EXPERTS_NAMES = [
    "buckets",
    "buckets_bfloat16",
    "buckets_local_layers",
    "fully_reshardable",
    "fully_reshardable_prefix",
    "not_sharded",
    "not_sharded_prefix",
]


@pytest.mark.integration
@pytest.mark.parametrize(("settings", "distributed"), EXPERTS, ids=EXPERTS_NAMES)
@pytest.mark.parametrize("expert", [pytest.param(1, marks=pytest.mark.long), 2])
def test_adam_of_experts_that_megatron_saved_takes_an_equal_step(
    models, released_experts, tmp_path, settings, distributed, expert
):
    """With expert parallelism, Megatron saves the state of two optimizers."""
    saved = written(
        models,
        released_experts,
        tmp_path / "saved",
        model="qwen3_moe",
        expert=expert,
        data=expert,
        **settings,
    )
    keys = Checkpoint(saved / "iter_0000001").tensor_sizes
    is_numbered = settings["sharding"] == "dp_reshardable" or settings.get("chained_prefix", False)
    assert any(key.startswith("chained_1.") for key in keys) == (is_numbered and expert == 2)
    to_hf(saved, tmp_path / "weights", origin=Path(models["qwen3_moe"]))
    to_adam_state(saved, tmp_path / "adam", origin=Path(models["qwen3_moe"]))
    result = continue_adam(
        0,
        1,
        free_port(),
        str(tmp_path / "weights"),
        {"use_distributed_optimizer": distributed},
        str(tmp_path / "adam"),
        str(saved),
        settings.get("dtype", "float32"),
    )
    assert result == {"loaded": [], "stepped": [], "steps": {2.0}, "scheduler": 2}


@pytest.mark.integration
@pytest.mark.parametrize("expert", [1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("family", "changes"),
    [("glm4.5", {"num_hidden_layers": 3}), ("deepseek_v3", {}), ("qwen2_moe", {})],
)
def test_adam_of_other_families_with_experts_takes_an_equal_step(tmp_path, family, changes, expert):
    """Dense first layers, shared experts, biases of routers and latent attention."""
    origin = Path(make(family, tmp_path / "model", changes=changes, dtype=torch.bfloat16))
    to_torch_dist(origin, tmp_path / "released")
    job = Job(
        str(origin),
        str(tmp_path / "released"),
        str(tmp_path / "saved"),
        dtype="bfloat16",
        bridged=True,
        expert=expert,
        data=expert,
    )
    write(job)
    to_hf(tmp_path / "saved", tmp_path / "weights", origin=origin)
    to_adam_state(tmp_path / "saved", tmp_path / "adam", origin=origin)
    result = continue_adam(
        0,
        1,
        free_port(),
        str(tmp_path / "weights"),
        {},
        str(tmp_path / "adam"),
        job.save,
        job.dtype,
    )
    assert result == {"loaded": [], "stepped": [], "steps": {2.0}, "scheduler": 2}


@pytest.mark.integration
@pytest.mark.parametrize("distributed", [True, False])
def test_adam_of_experts_continues_on_expert_parallel_ranks(
    models, released_experts, tmp_path, two_ranks, distributed
):
    saved = written(
        models, released_experts, tmp_path / "saved", model="qwen3_moe", expert=2, data=2
    )
    to_hf(saved, tmp_path / "weights", origin=Path(models["qwen3_moe"]))
    to_adam_state(saved, tmp_path / "adam", origin=Path(models["qwen3_moe"]))
    train = {
        "use_distributed_optimizer": distributed,
        "parallel": {"expert_model_parallel_size": 2},
    }
    results = two_ranks.run(
        continue_adam,
        str(tmp_path / "weights"),
        train,
        str(tmp_path / "adam"),
        str(saved),
        "float32",
    )
    expected = {"loaded": [], "stepped": [], "steps": {2.0}, "scheduler": 2}
    assert results == [expected, expected]


@pytest.mark.integration
@pytest.mark.parametrize("model", ["qwen3", "qwen3_moe"])
def test_weights_of_a_checkpoint_that_megatron_wrote_convert_back_to_equal_bits(
    models, request, tmp_path, model
):
    """The norm before experts has another name in Transformer Engine's layers."""
    origin = Path(models[model])
    released = request.getfixturevalue("released" if model == "qwen3" else "released_experts")
    saved = written(
        models, released, tmp_path / "saved", model=model, trains=False, iterations=(0,)
    )
    to_hf(saved, tmp_path / "back", origin=origin)
    back = load_file(tmp_path / "back" / "model.safetensors")
    original = load_file(origin / "model.safetensors")
    assert back.keys() == original.keys()
    assert all(torch.equal(back[name], original[name]) for name in original)
    ours = engine(str(origin), TrainConfig(), 0, 1, free_port())
    try:
        load_checkpoint_weights(ours.trained, saved)
        for name, tensor in ours.named_hf_tensors():
            assert torch.equal(tensor, original[name]), name
    finally:
        ours.close()


@pytest.mark.integration
def test_a_critic_keeps_its_value_head_and_its_adam(models, released, tmp_path):
    saved = written(models, released, tmp_path / "saved", critic=True)
    to_adam_state(saved, tmp_path / "adam", origin=Path(models["qwen3"]))
    to_hf(saved, tmp_path / "critic", origin=Path(models["qwen3"]))
    tensors = load_file(tmp_path / "critic" / "model.safetensors")
    expected = expected_tensors(saved)
    for name in ("weight", "bias"):
        master = expected[f"fp32_param.output_layer.{name}"]
        assert torch.equal(tensors[f"score.{name}"].flatten(), master)
    assert "lm_head.weight" not in tensors
    settings = CriticConfig(hf_checkpoint=str(tmp_path / "critic"))
    keys = {"critic": settings, "critic_optimizer_steps": 100}
    ours = engine(models["qwen3"], TrainConfig(), 0, 1, free_port(), **keys)
    try:
        ours.load_hf()
        before = ours.state_digest()
        ours.load_critic_adam_state(tmp_path / "adam")
        assert ours.state_digest() != before
        critic = ours.critic.trained
        assert different_tensors(critic, saved) == []
        assert (critic.scheduler.num_steps, ours.trained.scheduler.num_steps) == (2, 0)
    finally:
        ours.close()


@pytest.mark.integration
@pytest.mark.long
@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"pipeline": 2}, {"data": 2}])
def test_buckets_of_several_ranks_are_joined(models, released, tmp_path, sizes):
    """Every master is compared with its weight when it is read."""
    saved = written(models, released, tmp_path / "saved", **sizes)
    assert_masters_are_weights(saved, Path(models["qwen3"]))


@pytest.mark.integration
@pytest.mark.long
@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor": 2, "expert_tensor": 1},
        {"tensor": 2, "data": 2},
        {"pipeline": 2, "data": 2},
        {"data": 4},
    ],
)
def test_buckets_of_expert_parallel_ranks_are_joined(models, released_experts, tmp_path, sizes):
    saved = written(
        models, released_experts, tmp_path / "saved", model="qwen3_moe", expert=2, **sizes
    )
    assert_masters_are_weights(saved, Path(models["qwen3_moe"]))


def assert_masters_are_weights(saved: Path, origin: Path) -> None:
    with single_process_groups():
        stored = Checkpoint(saved / "iter_0000001")
        meta_model = MetaModel(origin, stored.dtype, metadata=stored.layout)
        adam = AdamState(stored, meta_model)
        weights = stored.read(meta_model, list(meta_model.tensors))
        for name, weight in weights.items():
            assert torch.equal(adam.read(name)["fp32_param"], weight)
        assert (adam.step, adam.schedule_steps) == (2, 2)


@pytest.mark.integration
def test_buckets_in_another_order_and_missing_states_are_refused(
    models, released, tmp_path, monkeypatch
):
    saved = written(models, released, tmp_path / "saved")
    monkeypatch.setattr(gradient_buckets, "_ORDERS", (list,))
    with pytest.raises(ConfigError) as unknown:
        to_adam_state(saved, tmp_path / "adam", origin=Path(models["qwen3"]))
    assert "order of parameters" in str(unknown.value)
    with pytest.raises(DataError) as missing:
        to_adam_state(released / "release", tmp_path / "adam", origin=Path(models["qwen3"]))
    assert "no optimizer state" in str(missing.value)


@pytest.mark.integration
@pytest.mark.parametrize("model", ["qwen3", "qwen3_moe"])
def test_a_flat_state_of_an_older_megatron_is_read_by_name(models, tmp_path, model):
    """[L, X, Y] on two tensor parallel ranks is stored as [L, x, y, XY / xy].

    The older Megatron numbers the optimizers of experts and of other parameters.
    """
    with single_process_groups():
        meta_model = MetaModel(Path(models[model]), torch.float32)
        weights, expected, flat = {}, {}, {}
        for name in meta_model.tensors:
            full = torch.randn(meta_model.tensors[name].shape)
            expected[name] = full
            for shard in meta_model.shards(name, full):
                size = (1,) * shard.prepend_axis_num + tuple(shard.local_shape)
                place = tuple(
                    slice(start, start + length)
                    for start, length in zip(shard.global_offset, size, strict=True)
                )
                data = shard.data
                assert data is not None
                weight = weights.setdefault(shard.key, torch.empty(shard.global_shape))
                weight[place] = data.view(size)
        for key, weight in weights.items():
            parts = [1] * weight.dim()
            is_layer = key.startswith("decoder.layers.")
            parts[0] = weight.shape[0] if is_layer else 2
            if is_layer and weight.dim() == 3:
                parts[2 if key.endswith(("proj.weight", "fc2.weight")) else 1] = 4
            flat[key] = _flat(weight, parts)
        adam = {}
        for key, tensor in flat.items():
            number = f"chained_{int('.experts.' in key)}." if model == "qwen3_moe" else ""
            for state in ("fp32_param", *adam_state.MOMENTS):
                adam[f"{number}optimizer.state.{state}.{key}"] = tensor
        folder = tmp_path / "iter_0000001"
        save(weights | adam, checkpoint_id=folder, no_dist=True)
        common = {"optimizer": {0: {"param_groups": [{"step": 3}]}, 1: {"param_groups": []}}}
        torch.save(common, folder / "common.pt")
        (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
        found = AdamState(Checkpoint(folder), meta_model)
        assert found.step == 3
        for name, full in expected.items():
            for tensor in found.read(name).values():
                assert torch.equal(tensor, full), name


def _flat(weight: torch.Tensor, parts: list[int]) -> torch.Tensor:
    """Return the tensor as equal parts, each of them flat."""
    local = [total // count for total, count in zip(weight.shape, parts, strict=True)]
    stored = torch.empty(*parts, math.prod(local))
    for index in torch.cartesian_prod(*(torch.arange(count) for count in parts)).view(
        -1, len(parts)
    ):
        place = tuple(
            slice(number * size, (number + 1) * size)
            for number, size in zip(index.tolist(), local, strict=True)
        )
        stored[tuple(index.tolist())] = weight[place].flatten()
    return stored


def test_fused_norms_precede_the_weight_of_their_linear_layer():
    layer = "decoder.layers.0."
    local = [
        "embedding.word_embeddings.weight",
        f"{layer}input_layernorm.weight",
        f"{layer}self_attention.linear_proj.weight",
        f"{layer}self_attention.linear_qkv.weight",
        f"{layer}pre_mlp_layernorm.weight",
        f"{layer}mlp.linear_fc1.weight",
        f"{layer}mlp.linear_fc2.weight",
    ]
    expected = [*local[:1], local[2], local[1], *local[3:]]
    assert _fused_norms(local) == expected
    experts = [f"{layer}pre_mlp_layernorm.weight", f"{layer}mlp.router.weight"]
    assert _fused_norms(experts) == experts
    latent = f"{layer}self_attention."
    after = [f"{latent}linear_q_up_proj.weight", f"{latent}q_layernorm.weight"]
    assert _fused_norms(after) == after[::-1]


def test_norms_are_found_under_the_names_of_both_kinds_of_layers():
    layers = "decoder.layers.3"
    fused = StoredNames(
        [
            f"{layers}.self_attention.linear_q_up_proj.layer_norm_weight",
            f"chained_0.optimizer.state.exp_avg.{layers}.pre_mlp_layernorm.weight",
        ]
    )
    norm = fused.key(f"{layers}.self_attention.q_layernorm.weight")
    assert norm == f"{layers}.self_attention.linear_q_up_proj.layer_norm_weight"
    moment = fused.key(f"optimizer.state.exp_avg.{layers}.mlp.linear_fc1.layer_norm_weight")
    assert moment == f"chained_0.optimizer.state.exp_avg.{layers}.pre_mlp_layernorm.weight"
    assert fused.key("output_layer.weight") == "output_layer.weight"


def test_grouped_experts_have_the_first_linear_layers_of_all_experts_first():
    experts = "decoder.layers.1.mlp.experts.local_experts"
    local = [
        "decoder.layers.1.mlp.router.weight",
        *(f"{experts}.{n}.linear_fc{i}.weight" for n in (0, 1) for i in (1, 2)),
        "decoder.layers.1.mlp.shared_experts.linear_fc1.weight",
    ]
    order = _grouped_experts(local)
    assert order == [local[0], local[1], local[3], local[2], local[4], local[5]]


@pytest.mark.integration
@pytest.mark.parametrize("distributed", [True, False])
def test_adam_of_experts_continues_with_equal_bits(models, tmp_path, distributed):
    """From a checkpoint of our own trainer, which is fully_reshardable or not sharded."""
    train = TrainConfig(use_distributed_optimizer=distributed)
    digests = []
    for source in ("trained", "continued"):
        model_dir = models["qwen3_moe"] if source == "trained" else str(tmp_path / "weights")
        ours = engine(model_dir, train, 0, 1, free_port(), dtype="bfloat16")
        try:
            ours.load_hf()
            if source == "trained":
                _train(ours, [0, 1])
                ours.save_checkpoint(tmp_path / "saved", 1)
            else:
                ours.load_adam_state(tmp_path / "adam")
            digests.append((ours.state_digest(), _train(ours, [2])))
        finally:
            ours.close()
        if source == "trained":
            to_hf(tmp_path / "saved", tmp_path / "weights")
            to_adam_state(tmp_path / "saved", tmp_path / "adam", origin=Path(models["qwen3_moe"]))
    assert digests[0] == digests[1]


@pytest.mark.integration
def test_the_optimizer_state_of_another_dtype_is_refused(models, released, tmp_path):
    saved = written(models, released, tmp_path / "saved")
    to_adam_state(saved, tmp_path / "adam", origin=Path(models["qwen3"]))
    ours = engine(models["qwen3"], TrainConfig(), 0, 1, free_port(), dtype="bfloat16")
    try:
        ours.load_hf()
        with pytest.raises(ConfigError) as caught:
            ours.load_adam_state(tmp_path / "adam")
        assert caught.value.where == "model.dtype"
    finally:
        ours.close()
