"""Tensors are checked and cut into buckets (rlpipe.sync.tensors)."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from rlpipe.errors import ConfigError, SyncError
from rlpipe.sync.tensors import check_tensors, expected_shapes, into_buckets
from tests.live_engine import VOCAB_SIZE, make_model


def test_tensors_that_engines_do_not_hold_are_refused(tmp_path):
    make_model(tmp_path / "model", seed=0)
    expected = expected_shapes(tmp_path / "model")
    assert "lm_head.weight" not in expected and expected["model.embed_tokens.weight"] == (
        VOCAB_SIZE,
        64,
    )
    good = torch.zeros(64)
    for name, tensor, message in [
        ("model.norm.wait", good, "no such tensor"),
        ("model.norm.weight", torch.zeros(63), "differs from what the engines hold"),
        ("model.norm.weight", good.int(), "differs from what the engines hold"),
    ]:
        with pytest.raises(SyncError, match=message):
            list(check_tensors([(name, tensor)], expected, set()))
    assert list(check_tensors([("lm_head.weight", good)], expected, set())) == []


@pytest.mark.parametrize("layer", ["model.layers.2", "model.mtp_layers.0", "mtp.layers.0"])
def test_layers_of_multi_token_prediction_are_not_expected(tmp_path, layer: str):
    make_model(tmp_path / "model", seed=0)
    before = expected_shapes(tmp_path / "model")
    save_file(
        {f"{layer}.eh_proj.weight": torch.zeros(3, 2)},
        tmp_path / "model" / "draft.safetensors",
    )
    assert expected_shapes(tmp_path / "model") == before
    trained = [(f"{layer}.eh_proj.weight", torch.zeros(3, 2))]
    assert list(check_tensors(trained, before, set())) == []


def test_a_view_is_sent_without_the_rest_of_its_storage(tmp_path):
    ((_, tensor),) = check_tensors([("a", torch.zeros(1000)[:3])], {"a": (3,)}, set(), compact=True)
    assert tensor.untyped_storage().nbytes() == 12


def test_buckets_keep_their_size_and_lose_no_tensor():
    tensors = [(str(size), torch.zeros(size)) for size in (1, 2, 30, 1, 1, 1)]
    cut = list(into_buckets(tensors, 16))
    assert [[name for name, _ in bucket] for bucket in cut] == [["1", "2"], ["30"], ["1", "1", "1"]]


def test_a_directory_without_weights_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no weights"):
        expected_shapes(tmp_path)
