"""Megatron's flags that do not go to Megatron-core under their own names: renamed, owned by a key of ours, or of the model.

All other names of Megatron's configuration classes pass through to `train.megatron` as they are. Flags that describe the model
set nothing, because the model is that of `--hf-checkpoint`; `MODEL` says what its config.json must hold where they are given.

Not here: slime's own flags (`slime_table`).
"""

from __future__ import annotations

from rlpipe.config.flag import Flag, built, neutral, only, refused, to

MEGATRON: tuple[Flag, ...] = (
    # parallelism
    to("tensor_model_parallel_size", "int", 1, "train.parallel.tensor_model_parallel_size"),
    to("sequence_parallel", "on", False, "train.parallel.sequence_parallel"),
    to("pipeline_model_parallel_size", "int", 1, "train.parallel.pipeline_model_parallel_size"),
    to("context_parallel_size", "int", 1, "train.parallel.context_parallel_size"),
    to("expert_model_parallel_size", "int", 1, "train.parallel.expert_model_parallel_size"),
    to("expert_tensor_parallel_size", "int", 1, "train.parallel.expert_tensor_parallel_size"),
    # optimizer
    only("optimizer", "str", "adam", ("adam",), "Adam is the one optimizer"),
    to("min_lr", "float", 0.0, "train.optimizer.min_lr"),
    to("lr_decay_style", "str", "linear", "train.optimizer.lr_decay_style"),
    to("lr_warmup_iters", "int", 0, "train.optimizer.lr_warmup_steps"),
    to("lr_decay_iters", "int", None, "train.optimizer.lr_decay_steps"),
    refused("lr_warmup_fraction", "float", None, "use --lr-warmup-iters, in optimizer steps"),
    to("weight_decay", "float", 0.01, "train.optimizer.weight_decay"),
    to("adam_beta1", "float", 0.9, "train.optimizer.adam_beta1"),
    to("adam_beta2", "float", 0.999, "train.optimizer.adam_beta2"),
    to("adam_eps", "float", 1e-8, "train.optimizer.adam_eps"),
    to("use_distributed_optimizer", "on", False, "train.use_distributed_optimizer"),
    refused("train_iters", "int", None, "use --num-rollout"),
    # numbers
    built("bf16", "on", False, "model.dtype"),
    refused("fp16", "on", False, "use bfloat16 (--bf16) or float32 (model.dtype=float32)"),
    to("deterministic_mode", "on", False, "deterministic"),
    to("accumulate_allreduce_grads_in_fp32", "on", False, "train.megatron.grad_reduce_in_fp32"),
    built("recompute_activations", "on", False, "train.megatron.recompute_granularity"),
    neutral("attention_backend", "str", "auto", "the fastest that is installed is taken"),
    neutral("transformer_impl", "str", "transformer_engine", "the fastest that is installed is taken"),
    neutral("use_flash_attn", "on", False, "the fastest that is installed is taken"),
    neutral("use_mcore_models", "on", False, "there are no others"),
    neutral("no_gradient_accumulation_fusion", "on", False, "it is off"),
    neutral("no_rope_fusion", "on", False, "it is off"),
    neutral("distributed_timeout", "int", None, "each stage has a deadline of its own"),
    neutral("num_workers", "int", 2, "Megatron reads no data here; see --num-data-workers"),
    neutral("no_load_optim", "on", False, "first weights have no optimizer state; a resumed run needs it"),
    neutral("no_load_rng", "on", False, "random numbers follow from seed and iteration"),
    neutral("finetune", "on", False, "first weights come from --hf-checkpoint"),
    neutral("log_throughput", "on", False, "tokens/s are always logged"),
    neutral("log_interval", "int", 100, "every iteration is logged"),
    neutral("tokenizer_type", "str", None, "it is the tokenizer of --hf-checkpoint"),
    neutral("tokenizer_model", "str", None, "it is the tokenizer of --hf-checkpoint"),
    # checkpoints
    only("ckpt_format", "str", "torch_dist", ("torch_dist",), "checkpoints are torch_dist, which loads into any layout"),
    refused("ckpt_step", "int", None, "a run goes on from its last commit; from iteration K with --fork RUN@K"),
    # the model
    neutral("swiglu", "on", False, "config.json says it (hidden_act)"),
    neutral("disable_bias_linear", "on", False, "config.json says it"),
    neutral("add_qkv_bias", "on", False, "config.json says it"),
    neutral("group_query_attention", "on", False, "config.json says it (num_key_value_heads)"),
    neutral("qk_layernorm", "on", False, "config.json says it (model_type)"),
    neutral("use_rotary_position_embeddings", "on", False, "config.json says it"),
    neutral("no_position_embedding", "on", False, "config.json says it"),
    neutral("position_embedding_type", "str", "rope", "config.json says it"),
    neutral("rotary_percent", "float", 1.0, "config.json says it"),
    neutral("make_vocab_size_divisible_by", "int", 128, "the vocabulary is padded as tensor parallelism needs it"),
    neutral("seq_length", "int", 4096, "batches are packed; see rollout.rollout_max_context_len"),
    neutral("max_position_embeddings", "int", None, "config.json says it"),
    neutral("max_positional_embedding", "int", None, "config.json says it"),
    neutral("moe_layer_freq", "str", 1, "config.json says it"),
    neutral("num_layers", "int", None, "config.json says it"),
    neutral("hidden_size", "int", None, "config.json says it"),
    neutral("ffn_hidden_size", "int", None, "config.json says it"),
    neutral("num_attention_heads", "int", None, "config.json says it"),
    neutral("num_query_groups", "int", None, "config.json says it"),
    neutral("kv_channels", "int", None, "config.json says it"),
    neutral("vocab_size", "int", None, "config.json says it"),
    neutral("normalization", "str", "LayerNorm", "config.json says it"),
    neutral("norm_epsilon", "float", 1e-5, "config.json says it"),
    neutral("rotary_base", "float", 10000, "config.json says it"),
    neutral("untie_embeddings_and_output_weights", "on", False, "config.json says it"),
    neutral("num_experts", "int", None, "config.json says it"),
    neutral("moe_router_topk", "int", 2, "config.json says it"),
    neutral("moe_ffn_hidden_size", "int", None, "config.json says it"),
    neutral("moe_shared_expert_intermediate_size", "int", None, "config.json says it"),
    neutral("multi_latent_attention", "on", False, "config.json says it"),
    neutral("q_lora_rank", "int", None, "config.json says it"),
    neutral("kv_lora_rank", "int", 32, "config.json says it"),
    neutral("qk_head_dim", "int", 128, "config.json says it"),
    neutral("qk_pos_emb_head_dim", "int", 64, "config.json says it"),
    neutral("v_head_dim", "int", 128, "config.json says it"),
)

MODEL: dict[str, tuple[str, ...]] = {
    "num_layers": ("num_hidden_layers",),
    "hidden_size": ("hidden_size",),
    "ffn_hidden_size": ("intermediate_size",),
    "num_attention_heads": ("num_attention_heads",),
    "num_query_groups": ("num_key_value_heads",),
    "kv_channels": ("head_dim",),
    "vocab_size": ("vocab_size",),
    "norm_epsilon": ("rms_norm_eps", "layer_norm_eps"),
    "rotary_base": ("rope_theta", "rope_parameters.rope_theta"),
    "num_experts": ("num_experts", "n_routed_experts", "num_local_experts"),
    "moe_router_topk": ("num_experts_per_tok",),
    "moe_ffn_hidden_size": ("moe_intermediate_size",),
    "q_lora_rank": ("q_lora_rank",),
    "kv_lora_rank": ("kv_lora_rank",),
    "qk_head_dim": ("qk_nope_head_dim",),
    "qk_pos_emb_head_dim": ("qk_rope_head_dim",),
    "v_head_dim": ("v_head_dim",),
}
"""Flag → keys of config.json, of which the first that is there must be equal to it."""
