"""FLOPs of a model from its config.json, peaks of GPUs, and the metrics TFLOP/s and MFU.

The FLOPs are those that the mathematics needs: padding, recomputed activations, norms, softmax and
the optimizer do not count. Attention counts by the real lengths.

| metric | work |
|---|---|
| `perf/train_tflops`, `perf/train_mfu` | optimizer steps: forward and backward passes |
| `perf/scoring_tflops`, `perf/scoring_mfu` | passes of policy, reference, teacher and critic |
| `perf/rollout_tflops`, `perf/rollout_mfu` | sampled tokens, and the prompt of each group once |

All are per GPU, or per process on CPUs. MFU is the share of the peak of the GPU (`PEAKS`), and is
absent on CPUs and on GPUs without an entry. A model with layers that are not in `ModelFlops` has no
metric. Entry points: `ModelFlops`, `model_flops`, `speed_metrics`.

Legend: S tokens of prompt and response, R response tokens, H hidden size, h heads of size d.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

PEAKS: tuple[tuple[str, float, float | None], ...] = (
    ("GB300", 2500, 5000),
    ("B300", 2250, 4500),
    ("GB200", 2500, 5000),
    ("B200", 2250, 4500),
    ("GH200", 989, 1979),
    ("H200 NVL", 835, 1671),
    ("H200", 989, 1979),
    ("H100 NVL", 835, 1671),
    ("H100 PCIe", 756, 1513),
    ("H100", 989, 1979),
    ("H800", 989, 1979),
    ("H20", 148, 296),
    ("A100", 312, None),
    ("A800", 312, None),
    ("A30", 165, None),
    ("A40", 149.7, None),
    ("L40S", 362, 733),
    ("L40", 181, 362),
    ("L4", 121, 242),
    ("RTX 6000 Ada", 364, 728),
    ("RTX A6000", 154.8, None),
    ("RTX 5090", 209.5, 419),
    ("RTX 4090", 165.2, 330.3),
    ("RTX 3090", 71, None),
)
"""Part of a GPU's name, TFLOP/s in 16 bit, TFLOP/s in FP8 (None: no FP8). The first match counts.

Dense matrix products on tensor cores with sums in float32, without sparsity. Source: NVIDIA's data
sheets of each GPU (of HGX B200 and B300, per GPU); GeForce: the white papers of Ampere, Ada and
Blackwell. Data sheets with sparsity name twice these numbers."""


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of one forward pass of a decoder."""

    token: float
    """Of the matrices of all layers, per token: 2 FLOPs a parameter that the token passes."""
    logits: float
    """Of the output layer, per token whose logits are needed."""
    pairs: Mapping[int | None, float]
    """Of attention, per pair of a token and a token that it sees, by window; None: no window."""

    def forward(self, lengths: np.ndarray, responses: np.ndarray) -> float:
        """Return the FLOPs of a forward pass over samples.

        Only the logits before response tokens are needed.

        Shapes: lengths [N] S of each sample; responses [N] R of it.
        """
        return self.matrices(lengths, responses) + self.attention(lengths)

    def matrices(self, lengths: np.ndarray, responses: np.ndarray) -> float:
        """Return the FLOPs of `forward` without attention."""
        return self.token * float(lengths.sum()) + self.logits * float(responses.sum())

    def attention(self, lengths: np.ndarray) -> float:
        """Return the FLOPs of attention: token i sees i tokens and itself, or those in its window.

        Shapes: lengths [N].
        """
        s = lengths.astype(np.float64)
        total = 0.0
        for window, flops in self.pairs.items():
            near = s if window is None else np.minimum(s, window)
            total += flops * float((near * (near + 1) / 2 + (s - near) * near).sum())
        return total

    def train(
        self, lengths: np.ndarray, responses: np.ndarray, *, frozen_matrices: bool = False
    ) -> float:
        """Return the FLOPs of forward and backward pass. Shapes: as `forward`.

        A backward pass costs two forward passes, or one through frozen matrices, which need no
        gradient of their own.
        """
        passes = 2 if frozen_matrices else 3
        return passes * self.matrices(lengths, responses) + 3 * self.attention(lengths)

    def sampled(self, spans: Sequence[tuple[int, int]]) -> float:
        """Return the FLOPs of computing the tokens from `start` to `end` of each span's sample.

        The tokens before `start` are in the engine's cache.
        """
        starts, ends = np.array(spans, np.int64).reshape(-1, 2).T
        attention = self.attention(ends) - self.attention(starts)
        return self.matrices(ends - starts, ends - starts) + attention


@lru_cache(maxsize=8)
def model_flops(model_dir: str) -> ModelFlops | None:
    """Return the FLOPs of the model in a directory; None if its layers are unknown."""
    try:
        return flops_of(json.loads((Path(model_dir) / "config.json").read_text()))
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError):
        return None


def flops_of(config: Mapping[str, Any]) -> ModelFlops | None:
    """Return the FLOPs of a model by its config.json; None for other layers than these.

    Layers: full, windowed or latent attention; gated MLP or mixture of experts, with shared experts
    and dense first layers. Raises: LookupError, TypeError if sizes are missing.
    """
    text = config.get("text_config")
    model = text if isinstance(text, Mapping) else config
    kinds = _attention_kinds(model)
    if kinds is None or "index_topk" in model or "linear_num_value_heads" in model:
        return None
    layers = model["num_hidden_layers"]
    attention, pair = _attention(model)
    expert_layers = _expert_layers(model)
    parameters = layers * attention + (layers - expert_layers) * _gated(model, "intermediate_size")
    if expert_layers:
        parameters += expert_layers * _experts(model)
    pairs: dict[int | None, float] = {}
    for window in kinds:
        pairs[window] = pairs.get(window, 0.0) + pair
    return ModelFlops(2.0 * parameters, 2.0 * model["vocab_size"] * model["hidden_size"], pairs)


def peak_flops(gpu: str, *, fp8: bool = False) -> float | None:
    """Return the peak FLOP/s of a GPU by its name; None if it is not in `PEAKS`."""
    for part, in_16_bit, in_fp8 in PEAKS:
        if part.lower() in gpu.lower():
            tera = in_fp8 if fp8 else in_16_bit
            return None if tera is None else tera * 1e12
    return None


def speed_metrics(
    work: str, flops: float, seconds: float, *, devices: int, gpu: str | None, fp8: bool = False
) -> dict[str, float]:
    """Return `perf/<work>_tflops` per device, and `perf/<work>_mfu` if the GPU's peak is known.

    `gpu`: name of the GPU; None: a CPU.
    """
    if flops <= 0 or seconds <= 0:
        return {}
    rate = flops / seconds / devices
    peak = peak_flops(gpu, fp8=fp8) if gpu else None
    share = {} if peak is None else {f"perf/{work}_mfu": rate / peak}
    return {f"perf/{work}_tflops": rate / 1e12, **share}


def _attention_kinds(model: Mapping[str, Any]) -> list[int | None] | None:
    """Return the window of each layer; None if a layer has another kind of attention."""
    layers = model["num_hidden_layers"]
    window = model.get("sliding_window") if model.get("use_sliding_window", True) else None
    kinds = model.get("layer_types")
    if kinds is None:
        return [window] * layers
    windows = {"full_attention": None, "sliding_attention": model.get("sliding_window")}
    return [windows[kind] for kind in kinds] if set(kinds) <= set(windows) else None


def _attention(model: Mapping[str, Any]) -> tuple[float, float]:
    """Return (parameters of a layer's projections, FLOPs of a pair of tokens in a layer)."""
    hidden = model["hidden_size"]
    heads = model["num_attention_heads"]
    rank = model.get("kv_lora_rank")
    if rank:  # latent attention
        rotated = model["qk_rope_head_dim"]
        key = model["qk_nope_head_dim"] + rotated
        value = model["v_head_dim"]
        query_rank = model.get("q_lora_rank")
        query = query_rank * (hidden + heads * key) if query_rank else hidden * heads * key
        latent = hidden * (rank + rotated) + rank * heads * (key - rotated + value)
        return query + latent + heads * value * hidden, 2.0 * heads * (key + value)
    size = model.get("head_dim") or hidden // heads
    kv_heads = model.get("num_key_value_heads") or heads
    return 2 * hidden * size * (heads + kv_heads), 4.0 * heads * size


def _gated(model: Mapping[str, Any], width: str) -> int:
    return 3 * model["hidden_size"] * model[width]


def _num_experts(model: Mapping[str, Any]) -> int:
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    return next((model[name] for name in names if model.get(name)), 0)


def _expert_layers(model: Mapping[str, Any]) -> int:
    """Return the number of layers with experts, by the rules of Qwen and of DeepSeek."""
    if not _num_experts(model):
        return 0
    layers = range(model["num_hidden_layers"])
    dense = set(model.get("mlp_only_layers") or ())
    step = model.get("decoder_sparse_step") or 1
    first = model.get("first_k_dense_replace") or 0
    return sum(n >= first and n not in dense and (n + 1) % step == 0 for n in layers)


def _experts(model: Mapping[str, Any]) -> int:
    """Return the parameters of a layer's experts and router that a token passes."""
    width = "moe_intermediate_size" if model.get("moe_intermediate_size") else "intermediate_size"
    chosen = model.get("num_experts_per_tok") or model["experts_per_token"]
    shared = 3 * model["hidden_size"] * (model.get("shared_expert_intermediate_size") or 0)
    shared += (model.get("n_shared_experts") or 0) * _gated(model, width)
    return chosen * _gated(model, width) + shared + model["hidden_size"] * _num_experts(model)
