"""With what a server computes, from what it says of itself. For the record; it decides nothing.

Not here: whether that is what a run needs (`external`).
"""

from __future__ import annotations

from typing import Any

_KEPT = (
    "device",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "tp_size",
    "nnodes",
    "mem_fraction_static",
    "max_total_num_tokens",
    "max_total_tokens",
    "chunked_prefill_size",
    "sampling_backend",
    "moe_runner_backend",
    "enable_deterministic_inference",
    "disable_cuda_graph",
)


def facts(info: dict[str, Any]) -> dict[str, Any]:
    """Name → value, of `/server_info`; a value that this release of SGLang does not name is left
    out."""
    attention = info.get("attention_backend")
    of_phases = {
        phase: info.get(f"{phase}_attention_backend") or attention
        for phase in ("prefill", "decode")
    }
    one = set(of_phases.values())
    return {
        "sglang": info.get("version"),
        "attention": one.pop()
        if len(one) == 1
        else ", ".join(f"{phase}: {name}" for phase, name in of_phases.items()),
        **{name: info[name] for name in _KEPT if info.get(name) is not None},
    }
