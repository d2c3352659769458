"""Hugging Face → torch_dist → Hugging Face, and checkpoints of other layouts and formats: the same
bits."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlpipe.config.train import TrainConfig
from rlpipe.engines.megatron.bridges.weight_files import from_mxfp4
from rlpipe.engines.megatron.checkpoint.conversion import checkpoint_paths, hf_files
from rlpipe.engines.megatron.checkpoint.conversion.convert import (
    _extra_names,
    _split,
    to_hf,
    to_torch_dist,
)
from rlpipe.engines.megatron.checkpoint.conversion.hf_files import HfWeights, different
from rlpipe.engines.megatron.checkpoint.conversion.torch_dist import Checkpoint
from rlpipe.errors import ConfigError, DataError, StoreFull
from rlpipe.system.megatron_weights import TRACKER
from rlpipe.system.ports import free_port
from tests.engines.megatron.conversion_jobs import in_old_format, save_and_tell
from tests.engines.megatron.families import make
from tests.engines.megatron.ranks import engine, make_batch, weights_of_checkpoint

SMALL = 60_000
"""Bytes of a file: ten or so for each model."""


@pytest.mark.parametrize(
    ("tokens", "pad"),
    [
        ({"pad_token_id": 7, "eos_token_id": 3}, 7),
        ({"pad_token_id": 0, "eos_token_id": [3, 4]}, 0),
        ({"pad_token_id": None, "eos_token_id": [3, 4]}, 3),
        ({"eos_token_id": 3}, 3),
        ({}, None),
    ],
)
def test_a_reward_model_has_the_token_by_which_transformers_finds_the_end(tmp_path, tokens, pad):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"], **tokens}))
    hf_files.classify_sequences(tmp_path)
    found = json.loads(config.read_text())
    assert found["pad_token_id"] == pad
    assert found["architectures"] == ["Qwen3ForSequenceClassification"]


@pytest.fixture
def model(models, tmp_path):
    """A copy of a family's directory, with the other files of a real model."""

    def made(family: str) -> Path:
        directory = tmp_path / family
        shutil.copytree(models[family], directory)
        for name, content in {
            "tokenizer.json": "{}",
            "chat_template.jinja": "{{ messages }}",
            "merges.txt": "a b",
        }.items():
            (directory / name).write_text(content)
        (directory / "generation_config.json").write_text('{"temperature": 0.6}')
        return directory

    return made


@pytest.mark.integration
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "qwen3_moe"])
def test_a_round_trip_gives_equal_bits_and_files(model, tmp_path, family):
    """qwen3 is tied, the others are not."""
    there = to_torch_dist(model(family), tmp_path / "dist", shard_bytes=SMALL)
    back = to_hf(tmp_path / "dist", tmp_path / "back", shard_bytes=SMALL)
    assert there.files > 2 and back.files > 2
    assert list(different(tmp_path / family, tmp_path / "back")) == []
    for path in hf_files.small_files(tmp_path / family):
        assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes()
    index = json.loads((tmp_path / "back" / hf_files.INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(
        tensor.nbytes for tensor in load_all(tmp_path / "back").values()
    )
    assert set(index["weight_map"]) == set(load_all(tmp_path / family))


@pytest.mark.integration
def test_experts_that_are_one_tensor_in_the_file_are_converted(tmp_path):
    directory = Path(make("gpt_oss", tmp_path / "model"))
    there = to_torch_dist(directory, tmp_path / "dist", shard_bytes=SMALL)
    back = to_hf(tmp_path / "dist", tmp_path / "back", shard_bytes=SMALL)
    assert there.files > 2 and back.files > 2
    assert list(different(directory, tmp_path / "back")) == []


@pytest.mark.integration
def test_mxfp4_weights_are_converted_dequantised(tmp_path):
    sizes = {"intermediate_size": 64, "num_hidden_layers": 1}
    directory = Path(make("gpt_oss", tmp_path / "model", changes=sizes, dtype=torch.bfloat16))
    stored = load_file(directory / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    experts, rows, columns = stored.pop(name).shape
    values = torch.Generator().manual_seed(0)
    shape = (experts, columns, rows // 32)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=values)
    scales = torch.randint(120, 126, shape, dtype=torch.uint8, generator=values)
    save_file(
        stored | {f"{name}_blocks": blocks, f"{name}_scales": scales},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    path = directory / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    path.write_text(json.dumps(config))
    to_torch_dist(directory, tmp_path / "dist")
    to_hf(tmp_path / "dist", tmp_path / "back")
    assert list(different(directory, tmp_path / "back")) == []
    written = load_all(tmp_path / "back")
    expected = stored | {name: from_mxfp4(blocks, scales)}
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], weight) for name, weight in expected.items())
    assert "quantization_config" not in json.loads((tmp_path / "back/config.json").read_text())


def load_all(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for path in sorted(directory.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


@pytest.mark.integration
def test_a_converted_checkpoint_loads_like_the_directory(model, two_ranks, tmp_path):
    directory = model("qwen3_moe")
    to_torch_dist(directory, tmp_path / "dist", shard_bytes=SMALL)
    expected = load_all(directory)
    for parallel in ({"pipeline_model_parallel_size": 2}, {"expert_model_parallel_size": 2}):
        found = two_ranks.run(
            weights_of_checkpoint, str(directory), {"parallel": parallel}, str(tmp_path / "dist")
        )[0]
        assert found["iteration"] == 0
        assert {
            name: torch.equal(torch.tensor(found["weights"][name]), tensor)
            for name, tensor in expected.items()
        } == dict.fromkeys(expected, True)


@pytest.mark.integration
@pytest.mark.parametrize(
    "parallel",
    [
        {
            "tensor_model_parallel_size": 2,
            "expert_tensor_parallel_size": 2,
            "sequence_parallel": True,
        },
        {"pipeline_model_parallel_size": 2},
        {"expert_model_parallel_size": 2},
    ],
    ids=lambda parallel: next(iter(parallel)),
)
def test_a_trained_checkpoint_of_any_layout_converts_without_its_model_directory(
    model, two_ranks, tmp_path, parallel
):
    directory = model("qwen3_moe")
    train = {"max_tokens_per_gpu": 64, "optimizer": {"lr": 1e-2}, "parallel": parallel}
    trained = two_ranks.run(save_and_tell, str(directory), train, str(tmp_path / "run"))[0]
    shutil.rmtree(directory)
    to_hf(tmp_path / "run", tmp_path / "out", shard_bytes=SMALL)
    found = load_all(tmp_path / "out")
    assert found.keys() == trained.keys()
    assert all(torch.equal(found[name], torch.tensor(trained[name])) for name in found)
    assert (tmp_path / "out" / "tokenizer.json").is_file()


@pytest.mark.integration
@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 2)], ids=str)
def test_the_older_format_is_read_in_every_layout(model, tmp_path, sizes):
    directory = model("qwen3_moe")
    to_torch_dist(directory, tmp_path / "dist")
    in_old_format(directory, tmp_path / "old" / "iter_0000007", *sizes, padded_rows=32)
    (tmp_path / "old" / TRACKER).write_text("7")
    report = to_hf(tmp_path / "old", tmp_path / "back", origin=directory)
    assert report.dtype == "float32"
    assert list(different(directory, tmp_path / "back")) == []


@pytest.mark.integration
def test_an_interrupted_conversion_continues_and_a_finished_one_is_kept(model, tmp_path):
    class Stopped(Exception):
        pass

    def stop_later(done: int, total: int, _what: str) -> None:
        if done > total / 2:
            raise Stopped

    directory = model("qwen2")
    for convert, source, target in (
        (to_torch_dist, directory, tmp_path / "dist"),
        (to_hf, tmp_path / "dist", tmp_path / "back"),
    ):
        with pytest.raises(Stopped):
            convert(source, target, shard_bytes=SMALL, progress=stop_later)
        report = convert(source, target, shard_bytes=SMALL)
        assert 0 < report.reused_files < report.files
        again = convert(source, target, shard_bytes=SMALL)
        assert "the target already has this conversion" in again.notes
        with pytest.raises(ConfigError, match="target directory is not empty"):
            convert(source, target, shard_bytes=2 * SMALL)
    assert list(different(directory, tmp_path / "back")) == []
    assert not [
        path
        for path in tmp_path.rglob("*")
        if path.name.endswith((".partial", ".done", ".unfinished", ".lock"))
    ]


@pytest.mark.integration
def test_a_conversion_of_another_source_starts_over(model, tmp_path):
    def stop(done: int, _total: int, _what: str) -> None:
        if done:
            raise InterruptedError

    first = model("qwen2")
    second = model("llama")
    with pytest.raises(InterruptedError):
        to_torch_dist(first, tmp_path / "dist", shard_bytes=SMALL, progress=stop)
    assert to_torch_dist(second, tmp_path / "dist", shard_bytes=SMALL).reused_files == 0
    to_hf(tmp_path / "dist", tmp_path / "back")
    assert list(different(second, tmp_path / "back")) == []


@pytest.mark.integration
def test_tensors_that_megatron_does_not_have_are_kept(model, tmp_path):
    directory = model("llama")
    extra = {
        "model.layers.2.eh_proj.weight": torch.randn(64, 128),
        "model.layers.2.embed_tokens.weight": load_all(directory)["model.embed_tokens.weight"],
    }
    save_file(
        load_all(directory) | extra, directory / "model.safetensors", metadata={"format": "pt"}
    )
    report = to_torch_dist(directory, tmp_path / "dist")
    assert report.notes == ["2 tensors that Megatron's model does not have are stored unchanged"]
    to_hf(tmp_path / "dist", tmp_path / "back")
    assert list(different(directory, tmp_path / "back")) == []


@pytest.mark.integration
def test_untrained_tensors_come_from_the_original_and_copies_from_the_checkpoint(model, tmp_path):
    directory = model("llama")
    extra = {
        "model.layers.2.eh_proj.weight": torch.randn(64, 128),
        "model.layers.2.embed_tokens.weight": load_all(directory)["model.embed_tokens.weight"],
    }
    save_file(
        load_all(directory) | extra, directory / "model.safetensors", metadata={"format": "pt"}
    )
    save_and_tell(
        0,
        1,
        free_port(),
        str(directory),
        {"max_tokens_per_gpu": 64, "optimizer": {"lr": 1e-2}},
        str(tmp_path / "run"),
    )
    report = to_hf(tmp_path / "run", tmp_path / "out", origin=directory)
    found = load_all(tmp_path / "out")
    assert torch.equal(
        found["model.layers.2.eh_proj.weight"], extra["model.layers.2.eh_proj.weight"]
    )
    assert torch.equal(
        found["model.layers.2.embed_tokens.weight"], found["model.embed_tokens.weight"]
    )
    assert not torch.equal(
        found["model.embed_tokens.weight"], extra["model.layers.2.embed_tokens.weight"]
    )
    assert "2 tensors that are not trained come from the original directory" in report.notes[0]


@pytest.mark.integration
def test_fp8_weights_are_converted_dequantised(model, tmp_path):
    directory = model("llama")
    weights = load_all(directory)
    name = "model.layers.0.mlp.up_proj.weight"
    scale = torch.full((1, 1), 0.5)
    weights |= {name: weights[name].to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    to_torch_dist(directory, tmp_path / "dist")
    to_hf(tmp_path / "dist", tmp_path / "back")
    assert torch.equal(
        load_all(tmp_path / "back")[name], (weights[name].float() * 0.5).to(torch.bfloat16)
    )
    assert f"{name}_scale_inv" not in load_all(tmp_path / "back")


@pytest.mark.integration
def test_arguments_are_stored_under_megatrons_names(model, tmp_path):
    to_torch_dist(model("qwen3_moe"), tmp_path / "dist")
    args = Checkpoint(tmp_path / "dist" / "release").args
    assert isinstance(args, Namespace)
    found: dict[str, Any] = vars(args)
    assert (
        found["num_layers"],
        found["hidden_size"],
        found["num_query_groups"],
        found["kv_channels"],
    ) == (2, 64, 2, 16)
    assert (found["num_experts"], found["moe_router_topk"], found["padded_vocab_size"]) == (
        4,
        2,
        96,
    )
    assert found["untie_embeddings_and_output_weights"] is True
    assert found["hf_config"]["model_type"] == "qwen3_moe"


@pytest.mark.integration
def test_a_damaged_checkpoint_is_a_named_error(model, tmp_path):
    directory = model("llama")
    to_torch_dist(directory, tmp_path / "dist")
    folder = tmp_path / "dist" / "release"
    piece = next(folder.glob("*.distcp"))
    content = piece.read_bytes()
    piece.write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match="cannot be read"):
        to_hf(tmp_path / "dist", tmp_path / "back")
    (folder / ".metadata").write_bytes(b"no metadata")
    with pytest.raises(DataError, match="not a readable"):
        to_hf(tmp_path / "dist", tmp_path / "back")


@pytest.mark.integration
def test_weights_of_another_model_are_refused(model, tmp_path):
    to_torch_dist(model("qwen2"), tmp_path / "dist")
    with pytest.raises(DataError, match="does not hold this model"):
        to_hf(tmp_path / "dist", tmp_path / "back", origin=model("qwen3_moe"))


def test_a_missing_checkpoint_and_a_full_disk_are_named_errors(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="no checkpoint in this directory"):
        to_hf(tmp_path, tmp_path / "out")
    with pytest.raises(ConfigError, match="not a Hugging Face directory"):
        to_torch_dist(tmp_path, tmp_path / "out")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / TRACKER).write_text("12")
    with pytest.raises(ConfigError, match="of a training"):
        checkpoint_paths.refuse_training_checkpoints(tmp_path / "run", force=False)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Namespace(free=10))
    with (
        pytest.raises(StoreFull, match="no room"),
        checkpoint_paths.staging_folder(tmp_path / "out", "name", needed_bytes=1000, force=False),
    ):
        pass


def test_truncated_and_missing_weight_files_are_named_errors(tmp_path):
    save_file({"a": torch.ones(8)}, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-4])
    with pytest.raises(DataError, match="cut off"):
        HfWeights(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(DataError, match="not a safetensors file"):
        HfWeights(tmp_path)
    for wrong in (
        b"{}",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        b"[" * 9000,
    ):
        (tmp_path / "model.safetensors").write_bytes(
            len(wrong).to_bytes(8, "little") + wrong + b"more"
        )
        with pytest.raises(DataError, match=r"not a safetensors file|cut off"):
            HfWeights(tmp_path)
    (tmp_path / hf_files.INDEX).write_text('["a"]')
    with pytest.raises(DataError, match="not an index"):
        HfWeights(tmp_path)
    (tmp_path / hf_files.INDEX).write_text('{"weight_map": {"a": "other.safetensors"}}')
    with pytest.raises(ConfigError, match="does not exist"):
        HfWeights(tmp_path)


@pytest.mark.integration
def test_training_continues_from_a_converted_checkpoint(model, tmp_path):
    directory = model("qwen3")
    to_torch_dist(directory, tmp_path / "dist")
    batch = make_batch()
    scores = []
    for load in (
        lambda ours: ours.load_hf(),
        lambda ours: ours.load_checkpoint(tmp_path / "dist", weights_only=True),
    ):
        ours = engine(str(directory), TrainConfig(), 0, 1, free_port())
        load(ours)
        scores.append(ours.state_digest())
        ours.score(batch)
        ours.close()
    assert scores[0] == scores[1]


def test_staged_files_are_kept_for_the_same_conversion_only(tmp_path):
    def begun(name: str) -> bool:
        """Was there a file already? Leaves one, and is interrupted."""
        with (
            suppress(KeyboardInterrupt),
            checkpoint_paths.staging_folder(
                tmp_path / "out", name, needed_bytes=0, force=False
            ) as folder,
        ):
            found.append((folder / "a.safetensors").exists())
            (folder / "a.safetensors").write_text("x")
            raise KeyboardInterrupt
        return found[-1]

    found: list[bool] = []
    assert [begun("one"), begun("one"), begun("other"), begun("other")] == [
        False,
        True,
        False,
        True,
    ]


def test_a_tensor_above_the_size_limit_gets_its_own_file():
    assert _split([7, 1, 2, 3, 9], 5, int) == [[7], [1, 2], [3], [9]]


@pytest.mark.parametrize(
    ("tied", "others"), [(True, ["extra"]), (False, ["lm_head.weight", "extra"])]
)
def test_the_copy_of_a_tied_embedding_is_not_an_extra_tensor(tied: bool, others: list[str]):
    names: Any = Namespace(names=["model.embed_tokens.weight", "lm_head.weight", "extra"])
    meta_model: Any = Namespace(tied=tied)
    assert _extra_names(names, {"embedding": ["model.embed_tokens.weight"]}, meta_model) == others
