"""Rows of the arguments of SGLang and its router that are not simply passed on."""

from __future__ import annotations

from rlpipe.config.arguments.rows import Rule, fixed, owned

_PLACED = "leave it out: rlpipe places the processes; see resources.*"
_SECRET = "leave it out: it would be stored with the run; keep the servers on engine.host"
_PLAIN_HTTP = "the run speaks HTTP with its servers on engine.host"
_QUANTISED = "use engine.quantization: weights are quantised in every push"
_WHOLE_ENGINES = "every engine does both prefill and decoding"

SGLANG: dict[str, Rule] = {
    **owned("use model.source", "model_path"),
    **owned("leave it out: it is the tokenizer of model.source", "tokenizer_path"),
    **owned("use model.source.trust_remote_code", "trust_remote_code"),
    **owned("use model.dtype", "dtype"),
    **owned("use resources.rollout_num_gpus_per_engine", "tp_size"),
    **owned("use engine.host", "host"),
    **owned("leave it out: rlpipe takes a free one", "port"),
    **owned("leave it out: CUDA is used where there is any", "device"),
    **owned("use data.rollout_seed", "random_seed"),
    **owned("leave it out: it counts the trained iterations", "weight_version"),
    **owned("use deterministic", "enable_deterministic_inference"),
    **owned("use resources.colocate and resources.offload_rollout", "enable_memory_saver"),
    **owned("use train.use_rollout_routing_replay", "enable_return_routed_experts"),
    **owned(
        "leave it out: engines get token ids, and have the tokenizer where stop texts need it",
        "skip_tokenizer_init",
    ),
    **owned(_QUANTISED, "quantization modelopt_quant quantize_and_serve"),
    **owned(
        "use rollout.rollout_temperature and the keys beside it: log-probs are recorded for those",
        "preferred_sampling_params",
    ),
    **owned(_SECRET, "api_key admin_api_key ssl_keyfile_password"),
    **owned("leave it out: write its keys under engine.sglang", "config"),
    **owned(_PLACED, "base_gpu_id gpu_id_step nnodes node_rank dist_init_addr nccl_port use_ray"),
    **fixed(1, "an engine has no pipeline stages: its GPUs are all tensor parallel", "pp_size"),
    **fixed("null", _WHOLE_ENGINES, "disaggregation_mode"),
    **fixed(False, _WHOLE_ENGINES, "encoder_only language_only"),
    **fixed("null", "drafts come from the engine itself", "decoupled_spec_role"),
    **fixed(False, "engines generate text", "is_embedding"),
    **fixed(False, _PLAIN_HTTP, "grpc_mode smg_grpc_mode enable_ssl_refresh"),
    **fixed(None, _PLAIN_HTTP, "ssl_keyfile ssl_certfile ssl_ca_certs"),
    **fixed(
        False,
        "a prompt that was cut would not be the one that is recorded and trained",
        "allow_auto_truncate",
    ),
    **fixed(
        False,
        "the model directory is the trainer's and other engines' too",
        "delete_ckpt_after_loading",
    ),
    **fixed(
        False,
        "weights come by the transport of sync.transport, and an engine must answer first",
        "checkpoint_engine_wait_weights_before_ready",
    ),
}

ROUTER: dict[str, Rule] = {
    **owned("use engine.host", "host"),
    **owned("leave it out: rlpipe takes a free one", "port"),
    **owned("leave it out: engines join by themselves", "worker_urls"),
    **owned("use engine.request_timeout_s", "request_timeout_secs"),
    **owned(_SECRET, "api_key control_plane_api_keys"),
    **owned(
        "leave it out: it would be stored with the run; keep the router's history elsewhere (history_backend)",
        "oracle_password",
    ),
    **fixed(False, _WHOLE_ENGINES, "pd_disaggregation mini_lb"),
    **fixed(None, _WHOLE_ENGINES, "prefill decode prefill_policy decode_policy"),
    **fixed(False, "engines join by themselves", "service_discovery"),
    **fixed("sglang", "engines are SGLang's", "backend"),
    **fixed(None, _PLAIN_HTTP, "tls_cert_path tls_key_path"),
}
