"""Arguments of Megatron-core, SGLang and its router that rlpipe sets itself, and what to do instead of passing them.

Per table: name of the field → advice. Other spellings of a field (`tp`, `tensor_parallel_size`) are found through it.
"""

from __future__ import annotations


def _same(prefix: str, *names: str) -> dict[str, str]:
    return {name: f"use {prefix}.{name}" for name in names}


_ARCHITECTURE = "it follows from the config.json of the model directory (model.source)"
_PLACED = "rlpipe places the processes; see resources.*"
_SECRET = "it would be stored with the run; keep the servers on engine.host"

MEGATRON = {
    **_same(
        "train.parallel",
        "tensor_model_parallel_size",
        "sequence_parallel",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
    ),
    **_same("train.optimizer", "lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad"),
    **_same("train", "use_distributed_optimizer"),
    **_same("train.loss", "calculate_per_token_loss"),
    **dict.fromkeys(("bf16", "fp16", "params_dtype", "pipeline_dtype", "autocast_dtype", "enable_autocast"), "use model.dtype"),
    **dict.fromkeys(
        (
            "num_layers",
            "hidden_size",
            "num_attention_heads",
            "num_query_groups",
            "ffn_hidden_size",
            "kv_channels",
            "add_bias_linear",
            "add_qkv_bias",
            "gated_linear_unit",
            "normalization",
            "layernorm_epsilon",
            "qk_layernorm",
            "multi_latent_attention",
            "num_moe_experts",
            "moe_ffn_hidden_size",
            "moe_router_topk",
            "moe_shared_expert_intermediate_size",
        ),
        _ARCHITECTURE,
    ),
    "deterministic_mode": "use deterministic",
    "moe_enable_routing_replay": "use train.use_routing_replay or train.use_rollout_routing_replay",
    **dict.fromkeys(
        ("overlap_param_gather", "overlap_param_gather_with_optimizer_step"), "weights are read outside their modules"
    ),
    "variable_seq_lengths": "batches are packed; see train.max_tokens_per_gpu",
}

SGLANG = {
    "model_path": "use model.source",
    "tokenizer_path": "it is the tokenizer of model.source",
    "trust_remote_code": "use model.source.trust_remote_code",
    "dtype": "use model.dtype",
    "tp_size": "use resources.rollout_num_gpus_per_engine",
    "host": "use engine.host",
    "port": "rlpipe takes a free one",
    "random_seed": "use data.rollout_seed",
    "weight_version": "it counts the trained iterations",
    "enable_deterministic_inference": "use deterministic",
    "enable_memory_saver": "use resources.colocate and resources.offload_rollout",
    "enable_return_routed_experts": "use train.use_rollout_routing_replay",
    **dict.fromkeys(("api_key", "admin_api_key", "ssl_keyfile_password"), _SECRET),
    "config": "write its keys here",
    **dict.fromkeys(("base_gpu_id", "gpu_id_step", "nnodes", "node_rank", "dist_init_addr", "nccl_port"), _PLACED),
}

ROUTER = {
    "host": "use engine.host",
    "port": "rlpipe takes a free one",
    "worker_urls": "engines join by themselves",
    **dict.fromkeys(("api_key", "control_plane_api_keys"), _SECRET),
    "oracle_password": "it would be stored with the run; keep the router's history elsewhere (history_backend)",
    "request_timeout_secs": "use engine.request_timeout_s",
}

OWNED = {"megatron": MEGATRON, "sglang": SGLANG, "router": ROUTER}
