"""Names of tensors in checkpoints that Megatron writes in more than one way.

`FUSED_NORMS`: linear layers that have a norm as a part in Transformer Engine. `StoredNames` finds a
tensor under the name of the other layers, or of an optimizer for the experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

FUSED_NORMS = {
    "self_attention.linear_qkv": "input_layernorm",
    "self_attention.linear_q_up_proj": "self_attention.q_layernorm",
    "self_attention.linear_kv_up_proj": "self_attention.kv_layernorm",
    "mlp.linear_fc1": "pre_mlp_layernorm",
}
"""Linear layer → the norm before it. Of latent attention: linear_q_up_proj, linear_kv_up_proj."""
_OPTIMIZER = re.compile(r"chained_\d+\.(?=optimizer\.state\.)")


def plain_key(key: str) -> str:
    """Return a tensor's key with separate norms, and without the number of its optimizer.

    Megatron's local layers store the norm before experts as mlp.linear_fc1.layer_norm_weight, and
    Transformer Engine's as pre_mlp_layernorm.weight. The parameters of experts on several expert
    parallel ranks have an optimizer of their own. Megatron-core before 0.15, and later ones with
    `chained_optim_avoid_prefix` false, write its number (`chained_1.`).
    """
    key = _OPTIMIZER.sub("", key, count=1)
    for linear, norm in FUSED_NORMS.items():
        key = key.replace(f".{linear}.layer_norm_", f".{norm}.")
    return key


class StoredNames:
    """The keys of a checkpoint's tensors."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._stored = {plain_key(key): key for key in keys}

    def key(self, name: str) -> str:
        """Return the key of a tensor, or the name if the checkpoint does not have the tensor."""
        return self._stored.get(plain_key(name), name)
