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
from rlpipe.engines.megatron.checkpoint.conversion import adam_state
from rlpipe.engines.megatron.checkpoint.conversion.adam_state import AdamState, _fused_norms
from rlpipe.engines.megatron.checkpoint.conversion.convert import (
    to_adam_state,
    to_hf,
    to_torch_dist,
)
from rlpipe.engines.megatron.checkpoint.conversion.meta_model import (
    MetaModel,
    single_process_groups,
)
from rlpipe.engines.megatron.checkpoint.conversion.torch_dist import Checkpoint
from rlpipe.engines.megatron.checkpoint.state import inner_optimizers
from rlpipe.errors import ConfigError, DataError
from rlpipe.system.ports import free_port
from tests.engines.megatron.ranks import _train, engine
from tests.engines.megatron.slime_checkpoint import Job, write

TE_NAMES = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


@pytest.fixture(scope="module")
def released(models, tmp_path_factory) -> Path:
    """The qwen3 model in torch_dist format."""
    folder = tmp_path_factory.mktemp("released")
    to_torch_dist(Path(models["qwen3"]), folder)
    return folder


def written(models, released: Path, save: Path, **settings: Any) -> Path:
    """Return the folder of a new checkpoint after two steps of Adam."""
    write(Job(str(Path(models["qwen3"])), str(released), str(save), **settings))
    return save


def expected_tensors(folder: Path, name: str) -> dict[str, torch.Tensor]:
    tensors = load_file(folder / "iter_0000001" / "expected.safetensors")
    for norm, fused in TE_NAMES.items():
        if f"exp_avg.{name}" not in tensors:
            name = name.replace(norm, fused)
    return {state: tensors[f"{state}.{name}"] for state in ("fp32_param", "exp_avg", "exp_avg_sq")}


def state_of(part: Any, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """Return Adam's tensors of a parameter in our optimizer."""
    if hasattr(part, "gbuf_ranges"):
        values = part._get_main_param_and_optimizer_states(parameter)
        return values | {"fp32_param": values["param"]}
    main = getattr(parameter, "main_param", parameter)
    return {"fp32_param": main, **part.optimizer.state[main]}


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
        (part,) = inner_optimizers(ours.trained.optimizer)
        for name, parameter in ours.trained.last_model.named_parameters():
            found = state_of(part, parameter)
            for state, expected in expected_tensors(saved, name).items():
                assert torch.equal(found[state].detach().flatten(), expected.flatten()), name
        assert {float(values["step"]) for values in part.optimizer.state.values()} == {2.0}
        assert ours.trained.scheduler.num_steps == 2
    finally:
        ours.close()


@pytest.mark.integration
def test_weights_of_a_checkpoint_that_megatron_wrote_convert_back_to_equal_bits(
    models, released, tmp_path
):
    saved = written(models, released, tmp_path / "saved", trains=False, iterations=(0,))
    to_hf(saved, tmp_path / "back", origin=Path(models["qwen3"]))
    back = load_file(tmp_path / "back" / "model.safetensors")
    original = load_file(Path(models["qwen3"]) / "model.safetensors")
    assert back.keys() == original.keys()
    assert all(torch.equal(back[name], original[name]) for name in original)


@pytest.mark.integration
def test_a_critic_keeps_its_value_head_and_its_adam(models, released, tmp_path):
    saved = written(models, released, tmp_path / "saved", critic=True)
    to_adam_state(saved, tmp_path / "adam", origin=Path(models["qwen3"]))
    to_hf(saved, tmp_path / "critic", origin=Path(models["qwen3"]))
    tensors = load_file(tmp_path / "critic" / "model.safetensors")
    expected = load_file(saved / "iter_0000001" / "expected.safetensors")
    for name in ("weight", "bias"):
        assert torch.equal(tensors[f"score.{name}"], expected[f"fp32_param.output_layer.{name}"])
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
        (part,) = inner_optimizers(critic.optimizer)
        for name, parameter in critic.last_model.named_parameters():
            found = state_of(part, parameter)
            for state, values in expected_tensors(saved, name).items():
                assert torch.equal(found[state].detach().flatten(), values.flatten()), name
        assert (critic.scheduler.num_steps, ours.trained.scheduler.num_steps) == (2, 0)
    finally:
        ours.close()


@pytest.mark.integration
@pytest.mark.long
@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"pipeline": 2}, {"data": 2}])
def test_buckets_of_several_ranks_are_joined(models, released, tmp_path, sizes):
    """Every master is compared with its weight when it is read."""
    saved = written(models, released, tmp_path / "saved", **sizes)
    with single_process_groups():
        stored = Checkpoint(saved / "iter_0000001")
        meta_model = MetaModel(Path(models["qwen3"]), stored.dtype, metadata=stored.layout)
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
    monkeypatch.setattr(adam_state, "_fused_norms", list)
    with pytest.raises(ConfigError) as unknown:
        to_adam_state(saved, tmp_path / "adam", origin=Path(models["qwen3"]))
    assert "order of parameters" in str(unknown.value)
    with pytest.raises(DataError) as missing:
        to_adam_state(released / "release", tmp_path / "adam", origin=Path(models["qwen3"]))
    assert "no optimizer state" in str(missing.value)


@pytest.mark.integration
def test_a_flat_state_of_an_older_megatron_is_read_by_name(models, tmp_path):
    """[L, X, Y] on two tensor parallel ranks is stored as [L, x, y, XY / xy]."""
    with single_process_groups():
        meta_model = MetaModel(Path(models["qwen3"]), torch.float32)
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
        adam = {f"optimizer.state.{s}.{k}": t for k, t in flat.items() for s in adam_state.MOMENTS}
        masters = {f"optimizer.state.fp32_param.{key}": tensor for key, tensor in flat.items()}
        folder = tmp_path / "iter_0000001"
        save(weights | adam | masters, checkpoint_id=folder, no_dist=True)
        common = {"optimizer": {"param_groups": [{"step": 3}]}}
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
