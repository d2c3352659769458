"""Model types that SGLang serves only under a condition.

check_served("minimax_m2", where, trusts_code=False)    raises ConfigError without a GPU
"""

from __future__ import annotations

from importlib import metadata

from rlpipe.engines.sglang.server import local_device
from rlpipe.errors import ConfigError

_LATENT = "with latent attention, log-probs differ from those of transformers by 0.3"
CPU_PROBLEMS = {
    "deepseek_v3": _LATENT,
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": "sparse attention asks for the capability of a CUDA device",
    "gpt_oss": "the model refuses the attention backends of CPUs, as torch_native",
    "minimax_m2": "the norm of queries and keys is a CUDA kernel, rms_sumsq_serial",
    "qwen3_5_moe_text": "the model needs the operator fused_sigmoid_mul_cpu of sgl_kernel",
    "qwen3_5_text": "the model needs the operator fused_sigmoid_mul_cpu of sgl_kernel",
    "qwen3_next": "linear attention needs the package sgl_kernel.mamba",
}
"""Model type → why SGLang's engine for CPUs fails or is wrong, seen with models of two layers."""
OWN_CODE = ("mimo",)
"""Model types that neither transformers nor SGLang has: Python files of the directory read
config.json."""


def check_served(model_type: str, where: str, *, trusts_code: bool) -> None:
    """Raises: ConfigError if SGLang cannot serve a model type on this machine."""
    if model_type in OWN_CODE and not trusts_code:
        raise ConfigError(
            "SGLang reads this config.json only with the Python code of its directory",
            where=where,
            found=f"model_type {model_type!r}, without trust in that code",
            do="read the code (configuration_*.py), then model.source.trust_remote_code=true",
        )
    problem = CPU_PROBLEMS.get(model_type)
    if problem is None or local_device() != "cpu":
        return
    raise ConfigError(
        f"SGLang {metadata.version('sglang')} cannot serve this model type on CPUs",
        where=where,
        found=f"model_type {model_type!r}: {problem}",
        expected="a machine with a GPU, or another model type",
        do="use engines on GPUs (resources.external_engines), or train on stored rollouts "
        "(debug.load_debug_rollout_data)",
    )
