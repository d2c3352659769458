"""Table of all arguments of Megatron-core, SGLang and its router that rlpipe restricts.

| kind    | meaning                                                 | accepted value          |
|---------|---------------------------------------------------------|-------------------------|
| `owned` | another key of the configuration sets the argument      | none                    |
| `fixed` | rlpipe needs one value                                  | that value              |
| `inert` | no code that rlpipe runs reads the argument             | the value that means no |
| `free`  | changes only speed, memory or messages                  | any value               |

An argument without a row is passed on and changes results. Names are fields of the receiving class;
other spellings (`tp`, `tensor_parallel_size`) map to the field that they set. `check` applies the
table to a configuration, to the trainer and to the engines. `rlpipe flags --arguments`
prints the table.

Megatron's rows are measured: `tests/engines/megatron/effects.py` sets each field of Megatron's
three configuration classes in small models on a CPU and compares the results bit for bit. Rows
about GPUs, Transformer Engine or several ranks follow from the source of Megatron-core 0.16.
Additional arguments of a Megatron-LM checkout have no rows and are passed on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Rule:
    """One row. `text` is the alternative for `owned`, and the reason for all other kinds."""

    kind: Literal["owned", "fixed", "inert", "free"]
    text: str
    values: tuple[Any, ...] = ()
    """Accepted values: the value of `fixed`; for `inert`, values in addition to the default."""


def owned(alternative: str, names: str) -> dict[str, Rule]:
    """Return rows of arguments that another key sets."""
    return dict.fromkeys(names.split(), Rule("owned", alternative))


def same(section: str, names: str) -> dict[str, Rule]:
    """Return rows of arguments that are keys of a section with the same name and meaning."""
    return {name: Rule("owned", f"use {section}.{name}") for name in names.split()}


def fixed(value: Any, reason: str, names: str) -> dict[str, Rule]:
    """Return rows of arguments with one accepted value."""
    return dict.fromkeys(names.split(), Rule("fixed", reason, (value,)))


def inert(reason: str, names: str, values: Iterable[Any] = ()) -> dict[str, Rule]:
    """Return rows of arguments without effect; `values` are accepted in addition to the default."""
    return dict.fromkeys(names.split(), Rule("inert", reason, tuple(values)))


def free(reason: str, names: str) -> dict[str, Rule]:
    """Return rows of arguments that accept any value and do not change results."""
    return dict.fromkeys(names.split(), Rule("free", reason))


MODEL_DIRECTORY = "remove it: it follows from config.json in the model directory (model.source)"
_NO_TRANSFORMER_ENGINE = "only Transformer Engine's layers read it, and rlpipe does not set it up"
_OWN_ATTENTION = (
    "rlpipe's attention, over whole sequences, replaces Megatron's and does not read it"
)
_OWN_NORM = "rlpipe's norms replace Megatron's and do not read it"
_OWN_LOGITS = "rlpipe computes log-probs, not Megatron's output layer"
_NO_FP8 = "training in FP8 or FP4 is not supported"
_CHUNKS = (
    "gives a rank several chunks of the model; needs train.parallel.pipeline_model_parallel_size "
    "above 1"
)
_NO_FSDP = "the trainer uses Megatron's DistributedDataParallel, not its FSDP"
_NO_GRAPHS = "packed micro-batches differ in length, but a CUDA graph needs one shape"
_FURTHER_TOKENS = "trains the layers for multi-token prediction of a model that has them (MiMo)"
_NO_INFERENCE = "only Megatron's inference reads it, and SGLang samples"
_NO_MIXED_FP16 = "only float16 training reads it, which is not supported"
_NO_EXPERT_OVERLAP = "it needs a schedule of Megatron that calls Megatron's loss function"
_ADAM = "Adam is the only optimizer"
_NO_INITIALISATION = "weights are loaded, not initialized"
_LAYOUT = (
    "moves layers between pipeline stages; needs train.parallel.pipeline_model_parallel_size above "
    "1"
)
_MEMORY = "saves memory by recomputation of activations"
_OFFLOAD = "moves the optimizer to the CPU"
_DISPATCH = "transfer of tokens between the ranks of expert parallelism"

MEGATRON: dict[str, Rule] = {
    # Keys of the configuration.
    **same(
        "train.parallel",
        """
        tensor_model_parallel_size sequence_parallel pipeline_model_parallel_size
        context_parallel_size expert_model_parallel_size expert_tensor_parallel_size
        """,
    ),
    **same("train.optimizer", "lr min_lr weight_decay adam_beta1 adam_beta2 adam_eps clip_grad"),
    **same("train", "use_distributed_optimizer"),
    **same("train.loss", "calculate_per_token_loss"),
    **owned(
        "use model.dtype",
        "bf16 fp16 params_dtype pipeline_dtype autocast_dtype enable_autocast",
    ),
    **owned("use deterministic", "deterministic_mode"),
    **owned(
        "use train.use_routing_replay or train.use_rollout_routing_replay",
        "moe_enable_routing_replay",
    ),
    **owned("use train.max_tokens_per_gpu: batches are packed", "variable_seq_lengths"),
    # The model: engines read config.json too and must compute the same results.
    **owned(
        MODEL_DIRECTORY,
        """
        num_layers hidden_size num_attention_heads num_query_groups ffn_hidden_size kv_channels
        add_bias_linear add_qkv_bias gated_linear_unit activation_func
        activation_func_clamp_value glu_linear_offset normalization layernorm_epsilon
        layernorm_zero_centered_gamma qk_layernorm rotary_interleaved no_rope_freq softmax_scale
        attention_output_gate multi_latent_attention num_moe_experts moe_ffn_hidden_size
        moe_layer_freq moe_latent_size moe_apply_probs_on_input moe_router_topk
        moe_router_num_groups moe_router_group_topk moe_router_topk_limited_devices
        moe_router_pre_softmax moe_router_topk_scaling_factor moe_router_score_function
        moe_router_enable_expert_bias moe_shared_expert_intermediate_size moe_shared_expert_gate
        """,
    ),
    **inert(
        _OWN_ATTENTION,
        """
        window_size window_attn_skip_freq softmax_type qk_clip qk_clip_alpha qk_clip_threshold
        log_max_attention_logit attention_softmax_in_fp32 masked_softmax_fusion cp_comm_type
        """,
    ),
    **fixed(
        False,
        "it divides attention scores by the layer number; rlpipe's attention does not multiply "
        "them by it again",
        "apply_query_key_layer_scaling",
    ),
    **inert(
        "the trainer has no layers of this kind (gated delta net, sparse attention)",
        """
        experimental_attention_variant dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk
        dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss linear_attention_freq
        linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads
        linear_num_value_heads
        """,
    ),
    **inert(
        "the trainer has no layers of this kind (Mamba, or another kind in each layer)",
        """
        is_hybrid_model mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads
        use_mamba_mem_eff_path heterogeneous_block_specs hetereogenous_dist_checkpoint
        """,
    ),
    **inert("the trainer reads text only", "mrope_section"),
    **inert("config.json decides the normalization of queries and keys", "qk_l2_norm"),
    **inert(
        "no layer of Megatron reads it",
        """
        apply_residual_connection_post_layernorm moe_extended_tp moe_token_dropping
        moe_per_layer_logging async_tensor_model_parallel_allreduce
        """,
    ),
    # Initialisation.
    **fixed(True, _NO_INITIALISATION, "perform_initialization"),
    **owned(
        "remove it: it follows from the device that the trainer runs on",
        "use_cpu_initialization",
    ),
    **owned(
        f"remove it: {_NO_INITIALISATION}",
        "init_method output_layer_init_method embedding_init_method",
    ),
    **inert(
        _NO_INITIALISATION,
        "init_method_std embedding_init_method_std init_model_with_meta_device",
    ),
    # Additional losses.
    **fixed(
        "none",
        "experts have no auxiliary loss: Megatron multiplies it by a number of tokens and would "
        "not divide by the number again",
        "moe_router_load_balancing_type",
    ),
    **fixed(0.0, "experts have no auxiliary loss", "moe_aux_loss_coeff"),
    **fixed(None, "experts have no auxiliary loss", "moe_z_loss_coeff"),
    **free(_FURTHER_TOKENS, "mtp_num_layers mtp_loss_scaling_factor"),
    **inert("all layers of a model are on its pipeline stages", "mtp_standalone"),
    # Precision.
    **inert(
        _NO_FP8,
        """
        fp8 fp8_recipe fp8_param fp8_quantizer_factory fp8_margin fp8_interval
        fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad fp8_dot_product_attention
        fp8_multi_head_attention fp8_param_gather keep_fp8_transpose_cache tp_only_amax_red
        first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16
        reuse_grad_buf_for_mxfp8_param_ag activation_func_fp8_input_store
        moe_router_padding_for_quantization moe_router_padding_for_fp8 fp4 fp4_recipe fp4_param
        fp4_quantizer_factory quant_recipe
        """,
    ),
    **inert(
        _NO_MIXED_FP16, "loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis"
    ),
    **free(
        "more exact sums of bfloat16 products; on GPUs only",
        "disable_bf16_reduced_precision_matmul",
    ),
    **free(
        "a smaller state of Adam; needs Transformer Engine and train.use_distributed_optimizer",
        "use_precision_aware_optimizer store_param_remainders",
    ),
    **owned(
        "remove it: gradients, main weights and moments are float32",
        "main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype",
    ),
    **owned(
        "remove it: rlpipe sets Megatron's functions",
        """
        timers finalize_model_grads_func grad_scale_func no_sync_func grad_sync_func
        param_sync_func
        """,
    ),
    # Layers and kernels.
    **inert(
        _NO_TRANSFORMER_ENGINE,
        """
        use_te_rng_tracker tp_comm_overlap tp_comm_bulk_wgrad tp_comm_bulk_dgrad
        tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag
        tp_comm_atomic_ag tp_comm_split_rs tp_comm_atomic_rs tp_comm_overlap_disable_qkv
        tp_comm_overlap_disable_fc1 tp_comm_bootstrap_backend cpu_offloading
        cpu_offloading_num_layers cpu_offloading_activations cpu_offloading_weights
        cpu_offloading_double_buffering use_kitchen use_kitchen_attention
        kitchen_attention_backend use_te_activation_func disable_parameter_transpose_cache
        symmetric_ar_type fused_single_qkv_rope batch_invariant_mode moe_use_legacy_grouped_gemm
        use_fused_weighted_squared_relu
        """,
    ),
    **free("local (the default) or Transformer Engine's layers", "transformer_impl"),
    **owned("remove it: the trainer uses the fastest installed attention", "attention_backend"),
    **inert(_OWN_NORM, "persist_layer_norm memory_efficient_layer_norm"),
    **inert(
        _OWN_LOGITS,
        """
        cross_entropy_loss_fusion cross_entropy_fusion_impl defer_embedding_wgrad_compute
        wgrad_deferral_limit
        """,
    ),
    **fixed(False, "only Megatron's tests read it", "test_mode"),
    **fixed(
        False,
        "the trainer's layers take activations in model.dtype",
        "fp32_residual_connection",
    ),
    **inert(
        _NO_INFERENCE,
        """
        flash_decode inference_rng_tracker inference_sampling_seed
        use_inference_optimized_layers inference_fuse_tp_communication mlp_chunks_for_prefill
        """,
    ),
    **inert(
        _NO_GRAPHS,
        """
        enable_cuda_graph external_cuda_graph cuda_graph_impl cuda_graph_scope
        cuda_graph_use_single_mempool cuda_graph_retain_backward_graph cuda_graph_warmup_steps
        """,
    ),
    **free(
        "sums weight gradients inside the matrix product; needs apex or Transformer Engine",
        "gradient_accumulation_fusion",
    ),
    **free(
        "a faster kernel of the same formula",
        """
        bias_activation_fusion bias_dropout_fusion apply_rope_fusion moe_permute_fusion
        moe_router_fusion
        """,
    ),
    **free(
        _MEMORY,
        """
        recompute_granularity recompute_method recompute_num_layers recompute_modules
        moe_layer_recompute distribute_saved_activations
        num_microbatches_with_partial_activation_checkpoints
        """,
    ),
    **free(
        "keeps activations in CPU memory; on GPUs only",
        "fine_grained_activation_offloading offload_modules min_offloaded_tensor_size",
    ),
    **free(
        "frees memory of the whole embedding; with sequence parallelism only",
        "clone_scatter_output_in_embedding",
    ),
    # Layout and communication.
    **free(
        _CHUNKS,
        "virtual_pipeline_model_parallel_size microbatch_group_size_per_vp_stage",
    ),
    **owned("remove it: virtual pipelining overlaps transfers", "overlap_p2p_comm"),
    **fixed(
        False,
        "the first and last transfers of virtual pipelining wait for each other, as gloo needs",
        "overlap_p2p_comm_warmup_flush",
    ),
    **fixed(
        False,
        "adjacent stages send tensors one after another, which works on CPUs too",
        "batch_p2p_comm",
    ),
    **inert("batch_p2p_comm, which reads it, is off", "batch_p2p_sync"),
    **fixed(False, "torch has no ring exchange", "use_ring_exchange_p2p"),
    **fixed(
        False,
        "the trainer reads outputs of a stage after the stage sent them",
        "deallocate_pipeline_outputs",
    ),
    **inert(
        "rlpipe creates the process groups: NCCL on GPUs, gloo on CPUs",
        """
        pipeline_model_parallel_comm_backend hierarchical_context_parallel_sizes
        hybrid_context_parallel max_seqlen_per_dp_cp_rank num_distributed_optimizer_instances
        """,
    ),
    **free(
        _LAYOUT,
        """
        num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage
        pipeline_model_parallel_layout account_for_embedding_in_pipeline_split
        account_for_loss_in_pipeline_split
        """,
    ),
    **fixed(
        False,
        "the trainer reads weights between optimizer steps, outside modules that would gather them",
        "overlap_param_gather overlap_param_gather_with_optimizer_step",
    ),
    **inert("overlap_param_gather, which reads it, is off", "align_param_gather"),
    **inert(
        _NO_EXPERT_OVERLAP,
        """
        overlap_moe_expert_parallel_comm delay_wgrad_compute
        ep_overlap_early_attn_memory_release
        """,
    ),
    **free(
        _DISPATCH,
        """
        moe_token_dispatcher_type moe_enable_deepep moe_flex_dispatcher_backend
        moe_deepep_num_sms moe_hybridep_num_sms moe_shared_expert_overlap
        """,
    ),
    **free(
        "method of summing gradients over data parallel ranks",
        """
        overlap_grad_reduce bucket_size pad_buckets_for_high_nccl_busbw
        reduce_scatter_with_fp32_accumulation
        """,
    ),
    **fixed(
        False,
        "memory registered with NCCL cannot be released to engines and restored",
        "nccl_ub",
    ),
    **inert("nccl_ub, which reads it, is off", "disable_symmetric_registration"),
    **fixed(
        False,
        "rlpipe weighs losses and sums them over ranks, without an average",
        "average_in_collective",
    ),
    **inert(
        _NO_FSDP,
        """
        use_megatron_fsdp use_custom_fsdp data_parallel_sharding_strategy
        outer_dp_sharding_strategy gradient_reduce_div_fusion suggested_communication_unit_size
        preserve_fp32_weights fsdp_double_buffer fsdp_manual_registration
        """,
    ),
    # The optimizer.
    **fixed("adam", _ADAM, "optimizer"),
    **inert(
        _ADAM,
        """
        sgd_momentum muon_momentum muon_split_qkv muon_use_nesterov muon_scale_mode
        muon_fp32_matmul_prec muon_num_ns_steps muon_tp_mode muon_extra_scale_factor
        """,
    ),
    **free(
        _OFFLOAD,
        """
        optimizer_cpu_offload optimizer_offload_fraction use_torch_optimizer_for_cpu_offload
        overlap_cpu_optimizer_d2h_h2d pin_cpu_grads pin_cpu_params
        """,
    ),
    # Messages.
    **free(
        "ends training if gradients are not finite or large",
        "check_for_nan_in_grad check_for_large_grads",
    ),
    **free("writes Megatron's configuration to files", "config_logger_dir"),
    **inert("the number is not reported", "log_num_zeros_in_grad"),
    **inert("Megatron's timers are off; see observe.profile_target", "barrier_with_L1_time"),
}

_PLACEMENT = "remove it: rlpipe assigns processes to GPUs; see resources.*"
_SECRET = "remove it: it would be stored with the run; keep the servers on engine.host"
_PLAIN_HTTP = "the run uses plain HTTP with its servers on engine.host"
_QUANTIZED = "use engine.quantization: every push quantizes the weights"
_WHOLE_ENGINES = "every engine does both prefill and decoding"

SGLANG: dict[str, Rule] = {
    **owned("use model.source", "model_path"),
    **owned("remove it: it is the tokenizer of model.source", "tokenizer_path"),
    **owned("use model.source.trust_remote_code", "trust_remote_code"),
    **owned("use model.dtype", "dtype"),
    **owned("use resources.rollout_num_gpus_per_engine", "tp_size"),
    **owned("use engine.host", "host"),
    **owned("remove it: rlpipe uses a free port", "port"),
    **owned("remove it: engines use CUDA if available", "device"),
    **owned("use data.rollout_seed", "random_seed"),
    **owned("remove it: the weight version is the number of trained iterations", "weight_version"),
    **owned("use deterministic", "enable_deterministic_inference"),
    **owned("use resources.colocate and resources.offload_rollout", "enable_memory_saver"),
    **owned("use train.use_rollout_routing_replay", "enable_return_routed_experts"),
    **owned(
        "remove it: engines get token ids, and a tokenizer if stop texts need it",
        "skip_tokenizer_init",
    ),
    **owned(_QUANTIZED, "quantization modelopt_quant quantize_and_serve"),
    **owned(
        "use rollout.rollout_temperature and similar keys: recorded log-probs depend on them",
        "preferred_sampling_params",
    ),
    **owned(_SECRET, "api_key admin_api_key ssl_keyfile_password"),
    **owned("remove it: write its keys under engine.sglang", "config"),
    **owned(
        _PLACEMENT, "base_gpu_id gpu_id_step nnodes node_rank dist_init_addr nccl_port use_ray"
    ),
    **fixed(1, "an engine has no pipeline stages: its GPUs are all tensor parallel", "pp_size"),
    **fixed("null", _WHOLE_ENGINES, "disaggregation_mode"),
    **fixed(False, _WHOLE_ENGINES, "encoder_only language_only"),
    **fixed("null", "each engine makes its own drafts", "decoupled_spec_role"),
    **fixed(False, "engines generate text", "is_embedding"),
    **fixed(False, _PLAIN_HTTP, "grpc_mode smg_grpc_mode enable_ssl_refresh"),
    **fixed(None, _PLAIN_HTTP, "ssl_keyfile ssl_certfile ssl_ca_certs"),
    **fixed(
        False,
        "a truncated prompt would differ from the recorded and trained prompt",
        "allow_auto_truncate",
    ),
    **fixed(
        False,
        "the trainer and other engines use the model directory too",
        "delete_ckpt_after_loading",
    ),
    **fixed(
        False,
        "sync.transport transfers the weights, and an engine must answer before that",
        "checkpoint_engine_wait_weights_before_ready",
    ),
}

ROUTER: dict[str, Rule] = {
    **owned("use engine.host", "host"),
    **owned("remove it: rlpipe uses a free port", "port"),
    **owned("remove it: rlpipe registers the engines", "worker_urls"),
    **owned("use engine.request_timeout_s", "request_timeout_secs"),
    **owned(_SECRET, "api_key control_plane_api_keys"),
    **owned(
        "remove it: it would be stored with the run; use another history_backend of the router",
        "oracle_password",
    ),
    **fixed(False, _WHOLE_ENGINES, "pd_disaggregation mini_lb"),
    **fixed(None, _WHOLE_ENGINES, "prefill decode prefill_policy decode_policy"),
    **fixed(False, "rlpipe registers the engines", "service_discovery"),
    **fixed("sglang", "all engines are SGLang servers", "backend"),
    **fixed(None, _PLAIN_HTTP, "tls_cert_path tls_key_path"),
}

TABLE: dict[str, dict[str, Rule]] = {"megatron": MEGATRON, "sglang": SGLANG, "router": ROUTER}
"""Package → field → row."""
