"""Every point of what slime's users are told they can do, and where it is here: a key or a tool, a
test, or why not.

The numbers are those of the project's checklist, sections 3 to 17. `keys` are of the configuration;
`tests` are files or folders below tests/ that fail if the point does not hold. A point without keys
says in words how it is kept, or why it is not.

Not here: single flags (`rlpipe.slime.args`; `python -m tools.flags` prints both).
"""

from __future__ import annotations

from typing import NamedTuple


class Point(NamedTuple):
    """One point: what users know, our keys (space-separated), the test, and a word where keys do
    not say it all."""

    known: str
    keys: str
    test: str
    note: str = ""


FLAGS_TEST = "config/test_flags.py"
CONVERSION_TEST = "engines/megatron/test_conversion.py"
PASSED = "config/test_arguments.py"

POINTS: dict[str, Point] = {
    # launch and cluster start
    "S-040": Point(
        "ray start --head",
        "resources.ray_address",
        "actors/test_conductor.py",
        "a local Ray is started unless given",
    ),
    "S-041": Point(
        "ray start --address",
        "resources.ray_address",
        "actors/test_conductor.py",
        "join nodes as always",
    ),
    "S-042": Point(
        "ray job submit",
        "",
        "deployments/test_apply.py",
        "a Prefect deployment: python -m deployments.apply",
    ),
    "S-043": Point("train.py", "", "tools/test_train.py", "python -m tools.train"),
    "S-044": Point(
        "train_async.py", "async_buffer_size", "flows/test_in_flight.py", "the same command"
    ),
    "S-045": Point("${MODEL_ARGS[@]} ${CKPT_ARGS[@]}", "", FLAGS_TEST, "taken as they are"),
    "S-046": Point("three argument categories", "train.megatron engine.sglang", FLAGS_TEST),
    "S-047": Point(
        "extra_args_provider",
        "train.megatron",
        "engines/megatron/test_arguments.py",
        "of pretrain_gpt.py in a checkout on PYTHONPATH; settings of your own functions are rollout.custom_config",
    ),
    "S-048": Point(
        "PYTHONPATH=Megatron-LM",
        "",
        "engines/megatron/test_arguments.py",
        "not needed; goes before the wheel",
    ),
    # resources
    "S-050": Point("--actor-num-nodes", "resources.actor_num_nodes", FLAGS_TEST),
    "S-051": Point("--actor-num-gpus-per-node", "resources.actor_num_gpus_per_node", FLAGS_TEST),
    "S-052": Point("--rollout-num-gpus", "resources.rollout_num_gpus", FLAGS_TEST),
    "S-053": Point(
        "--rollout-num-gpus-per-engine",
        "resources.rollout_num_gpus_per_engine resources.num_gpus_per_node",
        FLAGS_TEST,
    ),
    "S-054": Point(
        "--sglang-tp-size is refused",
        "engine.sglang",
        FLAGS_TEST,
        "dp_size, enable_dp_attention pass through",
    ),
    "S-055": Point(
        "training and inference GPUs apart",
        "resources.rollout_num_gpus",
        "actors/test_conductor.py",
    ),
    "S-056": Point(
        "--colocate",
        "resources.colocate",
        "flows/test_train.py",
        "equal counts, unless --rollout-num-gpus says another",
    ),
    "S-057": Point(
        "offload in turn",
        "engine.sglang resources.offload_train resources.offload_rollout",
        "actors/test_sharing.py",
    ),
    "S-058": Point(
        "--colocate against slow sync",
        "sync.transport",
        "sync/test_tensor.py",
        "CUDA IPC where a GPU is shared",
    ),
    "S-059": Point(
        "8 + 8, 4 + 4 GPUs",
        "resources.actor_num_gpus_per_node resources.rollout_num_gpus",
        FLAGS_TEST,
    ),
    # model parameters
    "S-060": Point(
        "--num-layers 36 ...",
        "model.source",
        FLAGS_TEST,
        "config.json decides; flags are checked against it",
    ),
    "S-061": Point(
        "scripts/models/*.sh",
        "model.source",
        FLAGS_TEST,
        "not needed: config.json; the flags in them are taken",
    ),
    "S-062": Point("reuse a model configuration", "model.source", "test_model_dir.py"),
    "S-063": Point(
        "all of Megatron's parameters", "train.megatron", PASSED, "those of Megatron-core"
    ),
    "S-064": Point(
        "--seq-length means nothing",
        "rollout.rollout_max_context_len",
        FLAGS_TEST,
        "batches are packed",
    ),
    "S-065": Point(
        "--tensor-model-parallel-size 2 ...",
        "train.parallel.tensor_model_parallel_size",
        FLAGS_TEST,
    ),
    # parallelism and recomputation
    "S-070": Point(
        "--tensor-model-parallel-size",
        "train.parallel.tensor_model_parallel_size",
        "engines/megatron/test_parallel.py",
    ),
    "S-071": Point(
        "--sequence-parallel",
        "train.parallel.sequence_parallel",
        "engines/megatron/test_parallel.py",
    ),
    "S-072": Point(
        "--pipeline-model-parallel-size",
        "train.parallel.pipeline_model_parallel_size",
        "engines/megatron/test_parallel.py",
    ),
    "S-073": Point(
        "--context-parallel-size",
        "train.parallel.context_parallel_size",
        "engines/megatron/test_parallel.py",
    ),
    "S-074": Point(
        "--expert-model-parallel-size",
        "train.parallel.expert_model_parallel_size",
        "engines/megatron/test_parallel.py",
    ),
    "S-075": Point(
        "--expert-tensor-parallel-size",
        "train.parallel.expert_tensor_parallel_size",
        "engines/megatron/test_parallel.py",
    ),
    "S-076": Point("--recompute-granularity", "train.megatron", FLAGS_TEST),
    "S-077": Point("--recompute-method", "train.megatron", FLAGS_TEST),
    "S-078": Point("--recompute-num-layers", "train.megatron", FLAGS_TEST),
    "S-079": Point(
        "--recompute-activations", "train.megatron", FLAGS_TEST, "recompute_granularity: selective"
    ),
    "S-080": Point(
        "--micro-batch-size", "train.micro_batch_size train.max_tokens_per_gpu", "test_packing.py"
    ),
    # checkpoints
    "S-090": Point("--ckpt-format", "", FLAGS_TEST, "torch_dist only; it loads into any layout"),
    "S-091": Point(
        "either format loads",
        "",
        CONVERSION_TEST,
        "into a run through convert_torch_dist_to_hf, which reads both",
    ),
    "S-092": Point(
        "iter_0000100/",
        "checkpoint.save_interval",
        "engines/megatron/test_checkpoint.py",
        "named by weight version",
    ),
    "S-093": Point("--ckpt-step", "fork_from", "tasks/test_fork.py", "--fork RUN@K"),
    "S-094": Point(
        "--ref-load",
        "advantage.reference",
        FLAGS_TEST,
        "the reference is --hf-checkpoint's weights; anything else is refused",
    ),
    "S-095": Point(
        "--load",
        "model.start_from",
        FLAGS_TEST,
        "the folder of --save: a run continues by itself; a Megatron checkpoint is refused, to be converted first",
    ),
    "S-096": Point("--save", "store.root", FLAGS_TEST),
    "S-097": Point("--save-interval", "checkpoint.save_interval", FLAGS_TEST),
    "S-098": Point(
        "convert_hf_to_torch_dist",
        "model.source",
        CONVERSION_TEST,
        "runs read the directory directly",
    ),
    "S-099": Point("convert_torch_dist_to_hf", "", CONVERSION_TEST, "a run's by --of RUN@K"),
    "S-100": Point(
        "converted checkpoints lack arguments",
        "",
        CONVERSION_TEST,
        "ours carry them, with the tokenizer",
    ),
    "S-101": Point(
        "convert_to_hf under torchrun",
        "",
        "tools/test_conversion.py",
        "the arguments of training, or --recipe",
    ),
    "S-102": Point("--hf-checkpoint stays on resume", "model.source", "tasks/test_begin.py"),
    # SGLang
    "S-110": Point("--hf-checkpoint", "model.source", FLAGS_TEST),
    "S-111": Point(
        "weights are pushed before the first step",
        "",
        "flows/test_train.py",
        "version 0 is pushed like any other",
    ),
    "S-112": Point(
        "--sglang-context-length", "engine.sglang rollout.rollout_max_context_len", FLAGS_TEST
    ),
    "S-113": Point(
        "HttpServerEngineAdapter",
        "",
        "engines/sglang/test_process.py",
        "an engine is an HTTP server of its own",
    ),
    "S-114": Point("--sglang-*", "engine.sglang", PASSED),
    "S-115": Point("--sglang-mem-fraction-static", "engine.sglang", FLAGS_TEST),
    "S-116": Point("--sglang-log-level", "engine.sglang", FLAGS_TEST),
    "S-117": Point(
        "--sglang-enable-deepep-moe",
        "engine.sglang",
        FLAGS_TEST,
        "becomes moe_a2a_backend; ep_size passes through",
    ),
    "S-118": Point(
        "tp_size and model_path are set",
        "resources.rollout_num_gpus_per_engine model.source",
        PASSED,
    ),
    # router
    "S-120": Point(
        "--sglang-router-ip",
        "engine.router_url",
        FLAGS_TEST,
        "without an address the run starts one",
    ),
    "S-121": Point("servers register", "", "engines/sglang/test_router.py", "POST /workers"),
    "S-122": Point("POST /generate at the router", "", "engines/sglang/test_router.py"),
    "S-123": Point(
        "external router", "engine.router_url", "actors/test_external.py", "of this run alone"
    ),
    "S-124": Point(
        "OpenAI-compatible API",
        "",
        "rollout/test_custom.py",
        "the engines' own, and one for each rollout session",
    ),
    # data
    "S-130": Point(
        "--prompt-data",
        "data.prompts.paths",
        "data/test_files.py",
        ".jsonl and .parquet, path@[a:b]",
    ),
    "S-131": Point("--input-key", "data.prompts.input_key", "data/test_prompts.py"),
    "S-132": Point("--label-key", "data.prompts.label_key", "data/test_prompts.py"),
    "S-133": Point("plain prompts", "data.prompts.input_key", "data/test_prompts.py"),
    "S-134": Point("--apply-chat-template", "data.apply_chat_template", "data/test_tokens.py"),
    "S-135": Point("step_loss_mask", "rollout.loss_mask_type", "data/test_tokens.py"),
    "S-136": Point("--metadata-key", "data.prompts.metadata_key", "data/test_prompts.py"),
    "S-137": Point("--num-data-workers", "data.num_data_workers", "data/test_files.py"),
    "S-138": Point("--streaming-data", "data.streaming_data", "data/test_files.py"),
    # sizes
    "S-140": Point("--num-rollout", "num_rollout", FLAGS_TEST, "or --num-epoch"),
    "S-141": Point("--rollout-batch-size", "rollout.rollout_batch_size", FLAGS_TEST),
    "S-142": Point("--n-samples-per-prompt", "rollout.n_samples_per_prompt", FLAGS_TEST),
    "S-143": Point("--global-batch-size", "train.global_batch_size", FLAGS_TEST),
    "S-144": Point("--num-steps-per-rollout", "train.num_steps_per_rollout", "config/test_load.py"),
    "S-145": Point("the batch equation", "train.global_batch_size", "config/test_load.py"),
    # algorithms
    "S-150": Point(
        "--advantage-estimator", "advantage.advantage_estimator", "config/test_algorithms.py"
    ),
    "S-151": Point("grpo", "advantage.advantage_estimator", "algorithms/test_advantages.py"),
    "S-152": Point("gspo", "advantage.advantage_estimator", "algorithms/test_losses.py"),
    "S-153": Point(
        "reinforce_plus_plus", "advantage.advantage_estimator", "algorithms/test_advantages.py"
    ),
    "S-154": Point(
        "reinforce_plus_plus_baseline",
        "advantage.advantage_estimator",
        "algorithms/test_advantages.py",
    ),
    "S-155": Point(
        "ppo",
        "advantage.advantage_estimator critic.value_clip resources.critic_num_gpus_per_node",
        "actors/test_critic.py",
    ),
    "S-156": Point(
        "--use-kl-loss",
        "advantage.reference train.loss.kl_loss_coef",
        "algorithms/test_divergence.py",
    ),
    "S-157": Point(
        "--calculate-per-token-loss",
        "train.loss.calculate_per_token_loss",
        "algorithms/test_reduction.py",
    ),
    "S-158": Point("--use-tis", "train.loss.use_tis", "algorithms/test_importance.py"),
    "S-159": Point(
        "relative advantages and KL",
        "advantage.rewards_normalization train.loss.kl_loss_coef",
        "algorithms/test_advantages.py",
    ),
    "S-160": Point(
        "GPPO variants",
        "train.loss.eps_clip_c",
        "algorithms/test_losses.py",
        "not a method of that name: dual clip and cispo keep the gradient of clipped tokens",
    ),
    # hooks
    "S-170": Point(
        "--rollout-function-path", "rollout.rollout_function_path", "rollout/test_function.py"
    ),
    "S-171": Point(
        "dynamic sampling, partial rollout",
        "rollout.dynamic_sampling_filter_path rollout.partial_rollout",
        "rollout/test_sampler.py",
    ),
    "S-172": Point(
        "rollout_id", "", "rollout/test_conservation.py", "the iteration; its plan is written first"
    ),
    "S-173": Point("data_buffer", "", "data/test_source.py", "in the commit of each iteration"),
    "S-174": Point(
        "--eval-function-path", "rollout.eval_function_path", "rollout/test_function.py"
    ),
    "S-175": Point("Sample", "", "test_types.py", "tokens, response_length, reward, truncated"),
    "S-176": Point("loss_mask", "", "store/test_rows.py"),
    "S-177": Point("response, aborted, prompt", "", "test_types.py"),
    "S-178": Point(
        "--custom-generate-function-path",
        "rollout.custom_generate_function_path",
        "rollout/test_custom.py",
    ),
    "S-179": Point(
        "custom_generate(args, samples)",
        "rollout.custom_generate_function_path",
        "rollout/test_custom.py",
    ),
    "S-180": Point("--max-turns", "rollout.max_turns", "rollout/test_multi_turn.py"),
    "S-181": Point("--custom-rm-path function", "reward.function.path", "rewards/test_custom.py"),
    "S-182": Point(
        "--custom-rm-path class",
        "reward.function.path reward.function.arguments",
        "rewards/test_custom.py",
    ),
    "S-183": Point(
        "POST to the router from a function",
        "",
        "config/test_slime.py",
        "args.sglang_router_ip, _port",
    ),
    "S-184": Point(
        "--custom-megatron-init-path",
        "train.custom_megatron_init_path",
        "config/test_megatron_hooks.py",
    ),
    "S-185": Point(
        "--custom-megatron-before-log-prob-hook-path",
        "train.custom_megatron_before_log_prob_hook_path",
        "config/test_megatron_hooks.py",
    ),
    "S-186": Point(
        "--custom-megatron-before-train-step-hook-path",
        "train.custom_megatron_before_train_step_hook_path",
        "config/test_megatron_hooks.py",
    ),
    "S-187": Point(
        "modified Megatrons",
        "train.megatron",
        PASSED,
        "not applicable: there is no megatron.training in between",
    ),
    # data buffer
    "S-190": Point(
        "get_samples, add_samples", "rollout.data_source_path", "rollout/test_function.py"
    ),
    "S-191": Point(
        "RolloutDataSourceWithBuffer",
        "rollout.partial_rollout",
        "data/test_source.py",
        "the buffer is in the commit",
    ),
    "S-192": Point("buffer_filter", "rollout.buffer_filter_path", "rollout/test_function.py"),
    "S-193": Point(
        "replay experiments",
        "rollout.buffer_filter_path fork_from",
        "rollout/test_function.py",
        "and stored rollouts are trained on again by debug.load_debug_rollout_data",
    ),
    "S-194": Point(
        "custom generation, filtering, storage",
        "rollout.rollout_function_path",
        "rollout/test_function.py",
    ),
    # asynchronous
    "S-200": Point("rollout overlaps training", "async_buffer_size", "flows/test_in_flight.py"),
    "S-201": Point("--async-buffer-size", "async_buffer_size", "tasks/test_turn.py"),
    "S-202": Point(
        "--update-weights-interval", "sync.update_weights_interval", "tasks/test_turn.py"
    ),
    "S-203": Point(
        "when to use it",
        "async_buffer_size deterministic",
        "flows/test_in_flight.py",
        "rlpipe/rollout/README.md",
    ),
    "S-204": Point(
        "staleness against throughput",
        "async_buffer_size sync.update_weights_interval",
        "test_batch.py",
    ),
    # agents
    "S-210": Point("tools in a multi-turn loop", "rollout.tools", "rollout/test_multi_turn.py"),
    "S-211": Point("tool tokens are masked", "rollout.tools", "rollout/test_multi_turn.py"),
    "S-212": Point(
        "search-r1",
        "rollout.tools",
        "deployments/test_agents.py",
        "a recipe under deployments/recipes",
    ),
    # evaluation
    "S-220": Point("--eval-interval", "evaluation.eval_interval", "tasks/test_turn.py"),
    "S-221": Point(
        "--eval-prompt-data repeated",
        "evaluation.datasets",
        FLAGS_TEST,
        "or flat, or --eval-config",
    ),
    "S-222": Point(
        "--n-samples-per-eval-prompt",
        "evaluation.datasets.n_samples_per_eval_prompt",
        "observe/test_evaluation.py",
    ),
}
