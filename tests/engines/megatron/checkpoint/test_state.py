"""State and its digest; the device hash runs on CPU tensors here."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.engines.megatron.checkpoint import state


def as_tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def device_hash(flat: torch.Tensor, *chunk: int) -> list[int]:
    return state.device_hash(flat, *chunk).tolist()


@given(st.binary(min_size=1, max_size=80), st.data())
def test_a_changed_byte_changes_the_hash(content, data):
    place = data.draw(st.integers(0, len(content) - 1))
    other = bytearray(content)
    other[place] ^= data.draw(st.integers(1, 255))
    assert device_hash(as_tensor(content)) != device_hash(as_tensor(bytes(other)))


@given(st.binary(min_size=32, max_size=64).filter(lambda content: content[:8] != content[8:16]))
def test_the_position_of_a_word_changes_the_hash(content):
    swapped = content[8:16] + content[:8] + content[16:]
    assert device_hash(as_tensor(content)) != device_hash(as_tensor(swapped))


@given(st.binary(min_size=1, max_size=200), st.integers(1, 9))
def test_the_hash_does_not_depend_on_chunks(content, chunk):
    assert device_hash(as_tensor(content), chunk) == device_hash(as_tensor(content))


class Balanced(torch.nn.Module):
    """A persistent buffer that no optimizer holds, and a buffer that is not persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.register_buffer("bias", torch.zeros(2))
        self.register_buffer("count", torch.zeros(2), persistent=False)


def test_named_weights_are_parameters_and_persistent_buffers():
    model = torch.nn.Sequential(Balanced(), torch.nn.Linear(2, 2))
    assert sorted(name for name, _ in state.named_weights([model])) == sorted(model.state_dict())
    chunks = [name for name, _ in state.named_weights([model, model])]
    assert sorted(chunks) == sorted(f"{i}.{name}" for name in model.state_dict() for i in (0, 1))
