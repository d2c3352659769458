"""Changes of a tensor's bytes are encoded and applied (rlpipe.sync.transports.delta)."""

from __future__ import annotations

from threading import Thread

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.errors import SyncError
from rlpipe.sync.transports.delta import CHECKSUMS, ENCODINGS, _Staging, apply_change, encode


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.reshape(-1).view(torch.uint8).numpy().copy()


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64]
)
@pytest.mark.parametrize("changed", [1, 70, 1000])
def test_a_change_applied_to_the_old_bytes_gives_the_new_bytes(encoding, dtype, changed):
    torch.manual_seed(changed)
    old = torch.randn(1000).to(dtype)
    new = old.clone()
    new.view(torch.uint8).view(1000, -1)[torch.randperm(1000)[:changed], 0] ^= 1
    change = encode(bytes_of(new), bytes_of(old), old.element_size(), encoding)
    memory = bytes_of(old)
    assert change is not None
    assert apply_change(change, memory, old.element_size(), encoding) == changed
    np.testing.assert_array_equal(memory, bytes_of(new))


@given(st.binary(min_size=0, max_size=200).map(lambda data: data[: len(data) // 8 * 8]), st.data())
def test_a_change_exists_between_any_two_states_of_one_size(data, more):
    old = np.frombuffer(data, np.uint8).copy()
    new = np.frombuffer(more.draw(st.binary(min_size=len(old), max_size=len(old))), np.uint8).copy()
    for encoding in ENCODINGS:
        for size in (1, 2, 4, 8):
            change = encode(new, old, size, encoding)
            memory = old.copy()
            if change is not None:
                apply_change(change, memory, size, encoding)
            np.testing.assert_array_equal(memory, new)
            assert (change is None) == np.array_equal(old, new)


def test_an_overwrite_change_can_be_applied_twice_and_a_xor_change_cannot():
    old = np.zeros(64, np.uint8)
    new = np.arange(64, dtype=np.uint8)
    for encoding, same in (("overwrite", True), ("xor", False)):
        change = encode(new, old, 2, encoding)
        memory = old.copy()
        assert change is not None
        apply_change(change, memory, 2, encoding)
        apply_change(change, memory, 2, encoding)
        assert np.array_equal(memory, new) is same


def test_a_step_at_a_small_learning_rate_gives_a_small_change():
    torch.manual_seed(0)
    weights = torch.randn(2**20) * 0.02
    old = bytes_of(weights.bfloat16())
    new = bytes_of((weights - 1e-6 * torch.randn(2**20).sign()).bfloat16())
    sizes = {}
    for encoding in ENCODINGS:
        change = encode(new, old, 2, encoding)
        assert change is not None
        sizes[encoding] = len(change) / len(old)
    assert sizes["xor"] < 0.04
    assert sizes["xor"] < sizes["overwrite"] < 0.08


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_change_that_does_not_fit_is_refused(encoding):
    change = encode(np.arange(1, 65, dtype=np.uint8), np.zeros(64, np.uint8), 2, encoding)
    assert change is not None
    for wrong, size, message in [
        (change[:-9], 2, "cannot be read"),
        (change, 4, "incomplete"),
    ]:
        with pytest.raises(SyncError, match=message):
            apply_change(wrong, np.zeros(64, np.uint8), size, encoding)
    with pytest.raises(SyncError, match="a larger tensor"):
        apply_change(change, np.zeros(62, np.uint8), 2, encoding)


def test_a_tensor_that_changed_its_size_is_refused():
    with pytest.raises(SyncError, match="changed its size"):
        encode(np.zeros(4, np.uint8), np.zeros(8, np.uint8), 2, "xor")


def test_a_checksum_detects_one_changed_bit():
    data = np.zeros(1000, np.uint8)
    other = data.copy()
    other[500] = 1
    assert all(make(data) != make(other) for make in CHECKSUMS.values())


def test_a_copy_that_fails_keeps_no_slot():
    staging = _Staging(1, pinned=False)
    with pytest.raises(NotImplementedError):
        staging.copy(torch.ones(4, device="meta"))
    later = Thread(target=staging.copy, args=(torch.ones(4),), daemon=True)
    later.start()
    later.join(5)
    assert not later.is_alive()
