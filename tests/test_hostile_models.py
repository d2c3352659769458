"""Damaged model directories and hook paths are refused with file and value."""

from __future__ import annotations

import copy
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from rlpipe.config.hooks import hook_digest, load_hook
from rlpipe.config.model import HuggingFaceModel, ModelConfig
from rlpipe.engines.megatron.checkpoint.conversion.hf_files import HfWeights
from rlpipe.errors import ConfigError, DataError, RlpipeError
from rlpipe.model_dir import model_directory, model_fingerprint
from rlpipe.store.routed_experts import routed_width
from rlpipe.system.model_files import check_files

DEEP = "[" * 100_000
HEADER: dict[str, Any] = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "F32", "shape": [4], "data_offsets": [24, 40]},
}
JSON = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.lists(st.integers(-9, 99), max_size=3)
)


def _model(folder: Path, config: str = '{"hidden_size": 8}', index: str | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config)
    save_file({"a": torch.zeros(2, 3), "b": torch.ones(4)}, folder / "model.safetensors")
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(index)
    return folder


@pytest.mark.parametrize(
    "config",
    [
        "",
        "{",
        "[]",
        "1",
        DEEP,
        '{"hidden_size": "8"}',
        '{"hidden_size": -8}',
        '{"num_hidden_layers": 1e400}',
        '{"vocab_size": true}',
    ],
)
def test_a_damaged_config_is_refused(config: str, tmp_path: Path):
    source = HuggingFaceModel(type="huggingface", hf_checkpoint=str(_model(tmp_path / "m", config)))
    with pytest.raises(ConfigError, match=r"config\.json"):
        model_directory(ModelConfig(source=source), tmp_path, seed=0)


@pytest.mark.parametrize(
    "name",
    [
        "../other/model.safetensors",
        "/etc/passwd",
        "..",
        "",
        "sub/a.safetensors",
        "a\\u0000.safetensors",
    ],
)
def test_an_index_cannot_name_files_outside_the_directory(name: str, tmp_path: Path):
    _model(tmp_path / "other")
    folder = _model(tmp_path / "m", index=f'{{"weight_map": {{"a": "{name}"}}}}')
    with pytest.raises(ConfigError, match="not an index"):
        check_files(folder, "model")
    with pytest.raises((ConfigError, DataError)):
        HfWeights(folder)


@pytest.mark.parametrize(
    "index",
    ["", "[]", DEEP, "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 5}}'],
)
def test_a_damaged_index_is_refused(index: str, tmp_path: Path):
    with pytest.raises(ConfigError):
        check_files(_model(tmp_path / "m", index=index), "model")


def _tampered(folder: Path, header: Any, data: bytes = bytes(40)) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return folder


@given(
    name=st.sampled_from(["dtype", "shape", "data_offsets"]),
    value=JSON
    | st.sampled_from(["F64", "BF16", [2, 4], [2**62, 2**62], [24, 0], [0, 8], [16, 40], [-4, 24]]),
)
def test_a_wrong_header_is_detected_when_it_is_read(
    name: str, value: Any, tmp_path_factory: pytest.TempPathFactory
):
    header = copy.deepcopy(HEADER)
    header["a"][name] = value
    folder = _tampered(_model(tmp_path_factory.getbasetemp() / "tampered"), header)
    with suppress(DataError):
        weights = HfWeights(folder)
        read = weights.read("a")
        assert tuple(read.shape) == tuple(weights.meta("a").shape)
        # Nothing in the file tells 2 × 3 values from 6.
        assert header == HEADER or (name == "shape" and read.numel() == 6)


@pytest.mark.parametrize(
    "header", [b"", b"[]", DEEP.encode(), {"a": 5}, {"a": {"dtype": "F32", "shape": [1]}}]
)
def test_the_error_of_a_damaged_header_names_the_file(header: Any, tmp_path: Path):
    with pytest.raises(DataError, match=r"model\.safetensors"):
        HfWeights(_tampered(_model(tmp_path / "m"), header))


@pytest.mark.parametrize("data", [bytes(10), bytes(50)])
def test_a_file_of_another_length_than_its_header_gives_is_refused(data: bytes, tmp_path: Path):
    with pytest.raises(DataError, match="cut off"):
        HfWeights(_tampered(_model(tmp_path / "m"), HEADER, data))


@pytest.mark.parametrize("content", ["{", "[]", '{"a": 1}', DEEP])
def test_a_damaged_cache_of_digests_is_written_again(content: str, tmp_path: Path):
    folder = _model(tmp_path / "m")
    cache = tmp_path / "cache.json"
    first = model_fingerprint(str(folder), cache)
    cache.write_text(content)
    assert model_fingerprint(str(folder), cache) == first
    assert json.loads(cache.read_text())


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"text_config": [1]},
        {"num_experts_per_tok": 2},
        {"num_experts_per_tok": [], "num_hidden_layers": 1},
    ],
)
def test_a_model_whose_experts_cannot_be_counted_is_refused(model: dict[str, Any]):
    with pytest.raises(ConfigError):
        routed_width(model)


@pytest.mark.parametrize(
    "path", ["\0.py:f", "\ud800.py:f", "a" * 5000 + ".py:f", "a." * 3000 + "b", "s3://a/b.py:f"]
)
def test_an_impossible_hook_path_is_refused(path: str):
    for function in (load_hook, hook_digest):
        with pytest.raises(ConfigError):
            function(path)


@given(st.text("ab.:/\\ _\0é", max_size=12))
def test_the_error_of_any_wrong_hook_path_names_the_path(path: str):
    with pytest.raises(RlpipeError) as caught:
        hook_digest(path)
    assert caught.value.where == path
