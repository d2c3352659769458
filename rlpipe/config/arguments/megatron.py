"""Rows of Megatron-core's arguments that are not simply passed on.

They are measured: `tests/engines/megatron/effects.py` sets each field of Megatron's three
configuration classes in small models on a CPU and compares what they compute bit for bit. What is
about GPUs, Transformer Engine or several ranks is reasoned from the source of Megatron-core 0.16.
What a Megatron-LM checkout adds has no rows, and is passed on.
"""

from __future__ import annotations

from rlpipe.config.arguments.rows import Rule, fixed, free, inert, owned, same

_MODEL_DIRECTORY = "leave it out: it follows from config.json in the model directory (model.source)"
_NO_TRANSFORMER_ENGINE = (
    "only Transformer Engine's layers read it, and the trainer has layers of its own"
)
_OWN_ATTENTION = (
    "the trainer's attention is rlpipe's own, over whole sequences, and does not read it"
)
_OWN_NORM = "the trainer's norms are rlpipe's own and do not read it"
_OWN_LOGITS = "log-probs are computed by rlpipe, not by Megatron's output layer"
_NO_FP8 = "the trainer computes in model.dtype; FP8 and FP4 need Transformer Engine's layers, which it does not use"
_NO_VIRTUAL_STAGES = "each rank holds one pipeline stage; there is no virtual pipelining"
_NO_FSDP = "the model is wrapped in Megatron's DistributedDataParallel, not in its FSDP"
_NO_GRAPHS = "packed micro-batches differ in length, and a CUDA graph is for one shape"
_NO_FURTHER_TOKENS = "layers that predict further tokens are not trained"
_NO_INFERENCE = "it is for Megatron's inference; SGLang samples here"
_NO_MIXED_FP16 = "it is for float16, which is not supported"
_NO_EXPERT_OVERLAP = "it needs a schedule of Megatron's that runs its own loss function"
_ADAM = "Adam is the one optimizer"
_NO_INITIALISATION = "weights are loaded, not drawn"
_LAYOUT = "moves layers between pipeline stages; needs train.parallel.pipeline_model_parallel_size above 1"
_MEMORY = "saves memory by computing activations again"
_OFFLOAD = "moves the optimizer to the CPU"
_DISPATCH = "how tokens travel between the ranks of expert parallelism"

MEGATRON: dict[str, Rule] = {
    # Decided by keys of our own.
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
    # The model. Engines read config.json too, and must compute the same.
    **owned(
        _MODEL_DIRECTORY,
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
        "the trainer's attention is rlpipe's own: it would divide scores by the number of the layer, and not multiply them back",
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
    **inert("queries and keys are normalised as config.json says", "qk_l2_norm"),
    **inert(
        "no layer of Megatron's reads it",
        """
        apply_residual_connection_post_layernorm moe_extended_tp moe_token_dropping
        moe_per_layer_logging async_tensor_model_parallel_allreduce
        """,
    ),
    # Initialisation.
    **fixed(True, _NO_INITIALISATION, "perform_initialization"),
    **owned(
        "leave it out: it follows from the device that the trainer runs on",
        "use_cpu_initialization",
    ),
    **owned(
        f"leave it out: {_NO_INITIALISATION}",
        "init_method output_layer_init_method embedding_init_method",
    ),
    **inert(
        _NO_INITIALISATION,
        "init_method_std embedding_init_method_std init_model_with_meta_device",
    ),
    # Losses that are not the run's.
    **fixed(
        "none",
        "experts have no auxiliary loss: Megatron multiplies it by a number of tokens that it does not divide by here",
        "moe_router_load_balancing_type",
    ),
    **fixed(0.0, "experts have no auxiliary loss", "moe_aux_loss_coeff"),
    **fixed(None, "experts have no auxiliary loss", "moe_z_loss_coeff"),
    **fixed(None, _NO_FURTHER_TOKENS, "mtp_num_layers"),
    **inert(_NO_FURTHER_TOKENS, "mtp_loss_scaling_factor mtp_standalone"),
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
        "makes sums of bfloat16 products more exact; on GPUs only",
        "disable_bf16_reduced_precision_matmul",
    ),
    **free(
        "a smaller state of Adam; needs Transformer Engine and train.use_distributed_optimizer",
        "use_precision_aware_optimizer store_param_remainders",
    ),
    **owned(
        "leave it out: gradients, main weights and moments are float32",
        "main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype",
    ),
    **owned(
        "leave it out: rlpipe gives Megatron its functions",
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
    **inert(
        "the trainer's layers are local ones in any case",
        "transformer_impl",
        values=("local",),
    ),
    **owned("leave it out: the fastest attention that is installed is taken", "attention_backend"),
    **inert(_OWN_NORM, "persist_layer_norm memory_efficient_layer_norm"),
    **inert(
        _OWN_LOGITS,
        """
        cross_entropy_loss_fusion cross_entropy_fusion_impl defer_embedding_wgrad_compute
        wgrad_deferral_limit
        """,
    ),
    **fixed(False, "it is for Megatron's own tests", "test_mode"),
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
        "lets memory of the whole embedding go; with sequence parallelism only",
        "clone_scatter_output_in_embedding",
    ),
    # Layout and communication.
    **fixed(None, _NO_VIRTUAL_STAGES, "virtual_pipeline_model_parallel_size"),
    **inert(
        _NO_VIRTUAL_STAGES,
        "microbatch_group_size_per_vp_stage overlap_p2p_comm_warmup_flush",
    ),
    **fixed(False, _NO_VIRTUAL_STAGES, "overlap_p2p_comm"),
    **fixed(
        False,
        "neighbouring stages send one tensor after another, which works on CPUs too",
        "batch_p2p_comm",
    ),
    **inert("it belongs to batch_p2p_comm, which is off", "batch_p2p_sync"),
    **fixed(False, "torch has no ring exchange", "use_ring_exchange_p2p"),
    **fixed(
        False,
        "the outputs of a stage are read after it has sent them",
        "deallocate_pipeline_outputs",
    ),
    **inert(
        "process groups are rlpipe's own: NCCL on GPUs, gloo on CPUs",
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
        "weights are read between optimizer steps, outside the modules that would gather them",
        "overlap_param_gather overlap_param_gather_with_optimizer_step",
    ),
    **inert("it belongs to overlap_param_gather, which is off", "align_param_gather"),
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
        "how gradients are summed over data parallel ranks",
        """
        overlap_grad_reduce bucket_size pad_buckets_for_high_nccl_busbw
        reduce_scatter_with_fp32_accumulation
        """,
    ),
    **fixed(
        False,
        "memory that NCCL has registered cannot be given up to engines and taken back",
        "nccl_ub",
    ),
    **inert("it belongs to nccl_ub, which is off", "disable_symmetric_registration"),
    **fixed(
        False,
        "losses are weighted by rlpipe and summed over ranks, never averaged",
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
        "ends training where gradients are not finite or large",
        "check_for_nan_in_grad check_for_large_grads",
    ),
    **free("writes Megatron's configuration to files", "config_logger_dir"),
    **inert("the number is not reported", "log_num_zeros_in_grad"),
    **inert("Megatron's timers are off; see observe.profile_target", "barrier_with_L1_time"),
}
