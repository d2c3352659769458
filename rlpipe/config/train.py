"""Optimizer steps, parallelism, other models than the policy, weight sync and checkpoints.

The other models are the reference, the critic of PPO and the teacher of on-policy distillation.
"""

from __future__ import annotations

import re
from hashlib import sha256
from math import gcd
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from rlpipe.config.algorithms import LossConfig
from rlpipe.config.base import Config, Tuning


class ParallelConfig(Config):
    """Megatron's parallel sizes, under its own names. Data parallelism uses the remaining ranks."""

    tensor_model_parallel_size: int = Field(default=1, ge=1)
    """TP: ranks that share each layer's matrices."""
    sequence_parallel: bool = False
    """Tensor parallel ranks also share the activations between those matrices, by tokens."""
    pipeline_model_parallel_size: int = Field(default=1, ge=1)
    """PP: stages of consecutive layers."""
    context_parallel_size: int = Field(default=1, ge=1)
    """CP: ranks that share the tokens of each sample."""
    expert_model_parallel_size: int = Field(default=1, ge=1)
    """EP: ranks that share the experts of each layer."""
    expert_tensor_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share each expert's matrices."""

    @property
    def model_ranks(self) -> int:
        """Ranks that share one sample: TP × PP × CP."""
        return (
            self.tensor_model_parallel_size
            * self.pipeline_model_parallel_size
            * self.context_parallel_size
        )


LARGEST_LR = 10.0
"""Adam moves a parameter by about the learning rate per step; most parameters are below 10."""


class OptimizerConfig(Config):
    """Adam and its schedule, in optimizer steps."""

    lr: float = Field(default=1e-6, ge=0, le=LARGEST_LR)
    """Learning rate after the warm-up."""
    min_lr: float = Field(default=0.0, ge=0, le=LARGEST_LR)
    """Floor of a decaying schedule."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """Form of the schedule from lr to min_lr."""
    lr_warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up from 0."""
    lr_decay_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps until min_lr; None: the run's total."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay (AdamW)."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the mean of gradients."""
    adam_beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the mean of squared gradients."""
    adam_eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the mean of squared gradients."""
    clip_grad: float = Field(default=1.0, ge=0)
    """Largest global gradient norm; 0: no clipping."""


LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA_TARGETS: tuple[LoraTarget, ...] = get_args(LoraTarget)


class LoraConfig(Config):
    """Low-rank adapters: W x + alpha / rank · B (A x), with PEFT's names. Only A and B are trained;
    the other weights are frozen and have no gradients and no optimizer state.

    A reference is the policy with its first adapters, so it needs no second model. Engines get
    merged weights. `model.adapter` gives the first adapters. See
    `rlpipe.engines.megatron.model.lora`."""

    rank: int = Field(default=16, ge=1)
    """Rows of A and columns of B."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale of the adapters, times rank."""
    target_modules: tuple[LoraTarget, ...] = Field(default=LORA_TARGETS, min_length=1)
    """Linear layers with adapters. Those of experts are not supported."""
    dropout: float = Field(default=0.0, ge=0, le=0)
    """Dropout before A. Only 0: optimizer steps and scoring passes must compute the same
    log-probs."""

    @field_validator("target_modules")
    @classmethod
    def _once_each(cls, names: tuple[LoraTarget, ...]) -> tuple[LoraTarget, ...]:
        if len(set(names)) < len(names):
            raise ValueError("a name is given twice")
        # One order: it decides nothing, and so must not change the run's records.
        return tuple(name for name in LORA_TARGETS if name in names)

    @property
    def scale(self) -> float:
        """Factor of B (A x)."""
        return self.alpha / self.rank


DEFAULT_MICRO_BATCH_TOKENS = 8192
"""Packed tokens of a micro-batch where neither the configuration nor memory decides."""


class TrainConfig(Config):
    """Optimizer steps of one iteration."""

    global_batch_size: int | None = Field(default=None, ge=1)
    """Rollouts per optimizer step (samples, unless one rollout gives several). None: all rollouts
    of an iteration divided by num_steps_per_rollout."""
    num_steps_per_rollout: int | None = Field(default=None, ge=1)
    """Optimizer steps of an iteration. None: derived from global_batch_size, else 1. A batch that
    lost groups to errors keeps the number of steps; no partial step is added."""
    max_tokens_per_gpu: int | None = Field(default=None, ge=1)
    """Packed tokens of a micro-batch per rank (× context parallel size). A longer sample is a
    micro-batch by itself. None: 8192; on GPUs from 2048 to 32768, as many as fit, as the start of
    a run says (`rlpipe.actors.gpu_memory`)."""
    micro_batch_size: int | None = Field(default=None, ge=1)
    """Samples of a micro-batch, regardless of length. None: as many as fit into
    max_tokens_per_gpu."""
    balance_by_flops: bool = True
    """Distribute samples over ranks and micro-batches by FLOPs, which grow with the square of the
    length. False: by tokens."""
    seed: int = 0
    """Seed of the trainer's random numbers. If the key is not set: the run's `seed`."""
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    parallel: ParallelConfig = ParallelConfig()
    lora: LoraConfig | None = None
    """Train adapters only. None: train all weights."""
    freeze_params_name_list: tuple[str, ...] = ()
    """Freeze parameters by name: Python regular expressions, for `re.search`. Names are Megatron's,
    such as `decoder.layers.0.mlp.linear_fc1.weight`. PPO's critic freezes the same parameters, but
    not its value head. See `rlpipe.engines.megatron.model.freezing`."""
    only_train_params_name_list: tuple[str, ...] = ()
    """Freeze all other parameters than those with one of these regular expressions in their
    names. Not together with freeze_params_name_list."""
    custom_megatron_init_path: str | None = None
    """User function `(args)` that every rank calls before it builds the models;
    `path/to/file.py:function` or `module.function`. None: no function. See
    `rlpipe.config.megatron_hooks` for this key and the two below."""
    custom_megatron_before_log_prob_hook_path: str | None = None
    """User function `(args, model, store_prefix)`, called before a model scores a batch. None: no
    function."""
    custom_megatron_before_train_step_hook_path: str | None = None
    """User function `(args, rollout_id, step_id, model, optimizer, opt_param_scheduler)`, called in
    every optimizer step of the policy. None: no function."""
    custom_model_provider_path: str | None = None
    """User function `(pre_process, post_process[, vp_stage][, config])` that returns the policy as
    Megatron's GPTModel. None: the layers of the model's family. See
    `rlpipe.engines.megatron.model.provided`."""
    use_routing_replay: bool = False
    """For a mixture of experts: optimizer steps route every token to the experts that the scoring
    pass used. A change of routing then does not change the probability ratio. Needs
    advantage.score_proximal. The routing is stored with the batch."""
    use_rollout_routing_replay: bool = False
    """For a mixture of experts: score the batch and take optimizer steps with the experts that the
    engines used in sampling. Trainer and engines then differ only by rounding. If
    use_routing_replay is set too, the engines' routing is used. Engines are started so that they
    return the routing. Samples and batch need 2 bytes × layers × experts per token for each token
    (768 for 48 × 8) in memory, and about half of that in the store; see
    `rlpipe.store.routed_experts`. Reference, critic and teacher use their own routing."""
    use_distributed_optimizer: bool = False
    """Shard optimizer state over data parallel ranks."""
    megatron: dict[str, Any] = Field(default_factory=dict)
    """Megatron-core arguments by their own names (TransformerConfig, OptimizerConfig,
    DistributedDataParallelConfig), and two of Megatron-LM's. `make_vocab_size_divisible_by`,
    default 1: the vocabulary is padded to a multiple of its product with the tensor parallel size.
    `num_layers_per_virtual_pipeline_stage`: layers of each chunk, for virtual pipelining.
    `recompute_granularity: full` alone recomputes each layer separately, which uses the least
    memory."""
    timeout_s: float = Tuning(default=3600.0, gt=0)
    """Deadline of the whole stage."""

    @property
    def micro_batch_tokens(self) -> int:
        """Packed tokens of a micro-batch per rank."""
        return self.max_tokens_per_gpu or DEFAULT_MICRO_BATCH_TOKENS

    @field_validator("megatron")
    @classmethod
    def _full_recomputation_by_layer(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        if arguments.get("recompute_granularity") != "full":
            return arguments
        return {"recompute_method": "uniform", "recompute_num_layers": 1, **arguments}

    @field_validator("freeze_params_name_list", "only_train_params_name_list")
    @classmethod
    def _regular_expressions(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
        # One order, each once: neither changes what is frozen, so no record may depend on them.
        return tuple(sorted(set(patterns)))

    @model_validator(mode="after")
    def _one_list_decides(self):
        if self.freeze_params_name_list and self.only_train_params_name_list:
            raise ValueError(
                "freeze_params_name_list and only_train_params_name_list exclude each other"
            )
        if self.lora is not None and self.frozen_names:
            raise ValueError(
                f"{next(iter(self.frozen_names))} cannot be used with lora, which freezes all "
                "weights; lora.target_modules chooses the layers with adapters"
            )
        return self

    @property
    def frozen_names(self) -> dict[str, tuple[str, ...]]:
        """The key that freezes parameters and its patterns; {} if all parameters are trained."""
        keys = ("freeze_params_name_list", "only_train_params_name_list")
        return {key: patterns for key in keys if (patterns := getattr(self, key))}

    @property
    def replays_routing(self) -> bool:
        """True if optimizer steps replay the routing of the scoring pass or of the engines."""
        return self.use_routing_replay or self.use_rollout_routing_replay


class ReferenceConfig(Config):
    """The reference policy of `advantage.reference`, until a refresh."""

    ref_load: str | None = None
    """Weights of the reference, of the policy's architecture: a Hugging Face directory,
    `org/name[@revision]` on the Hub, or a Megatron checkpoint (as `megatron_checkpoint`). The run's
    records depend on the content too. None: the run's first weights."""
    ref_ckpt_step: int | None = None
    """Iteration to take if `ref_load` is the parent folder of several; None: the newest."""
    ref_update_interval: int | None = Field(default=None, ge=1)
    """Iterations between two refreshes. A refresh copies the policy into the reference and writes a
    checkpoint. Iterations are counted by weight version, so a fork continues with the reference of
    its parent. None: no refresh."""


class CriticConfig(Config):
    """The value model of `advantage.advantage_estimator: ppo`: a decoder with a value head and a
    separate optimizer.

    The policy's ranks hold the critic, or separate ranks with
    `resources.critic_num_gpus_per_node`. Its state is part of the run's state in both cases: it is
    saved and replayed together with the policy's."""

    hf_checkpoint: str | None = None
    """Hugging Face directory of the critic's first weights, or `org/name[@revision]` on the Hub.
    Any architecture with the policy's tokens. If the directory has `score.weight` [1, hidden], as
    reward models do, that is the value head; else values begin at 0. None: a copy of the policy's
    first weights."""
    megatron_checkpoint: str | None = None
    """Megatron checkpoint with the critic's first weights, of the architecture of `hf_checkpoint`
    or else of the policy (as `model.source.megatron_checkpoint`). The checkpoint of a critic has a
    value head, which is taken; that of a policy has none. None: as `hf_checkpoint` says."""
    megatron_checkpoint_step: int | None = None
    """Iteration to take if `megatron_checkpoint` is a parent of several; None: the newest."""
    megatron_optimizer: bool = False
    """Continue with the optimizer state of `megatron_checkpoint` and its position in the learning
    rate schedule, as `model.source.megatron_optimizer` does for the policy."""
    optimizer: OptimizerConfig | None = None
    """Adam and its schedule; None: the policy's `train.optimizer`."""
    lr: float | None = Field(default=None, ge=0, le=LARGEST_LR)
    """Learning rate; None: the optimizer's lr."""
    lr_warmup_steps: int | None = Field(default=None, ge=0)
    """Optimizer steps of linear warm-up from 0; None: the optimizer's lr_warmup_steps."""
    parallel: ParallelConfig | None = None
    """Parallel sizes in the critic's separate ranks; None: the policy's `train.parallel`."""
    value_clip: float | None = Field(default=0.2, gt=0)
    """Largest change of a value in one iteration that the value loss counts; None: no clipping."""
    value_loss_coef: float = Field(default=0.5, gt=0)
    """Factor of the value loss; slime's is 1. With Adam it matters only to clip_grad and
    adam_eps."""
    num_critic_only_steps: int = Field(default=0, ge=0)
    """Iterations at the start of the run that train only the critic, counted by weight version. The
    policy's learning rate schedule starts after them."""

    @model_validator(mode="after")
    def _optimizer_has_a_checkpoint(self):
        if self.megatron_optimizer and self.megatron_checkpoint is None:
            raise ValueError("megatron_optimizer needs megatron_checkpoint, which has its state")
        return self

    def resolved_optimizer(self, policy: OptimizerConfig) -> OptimizerConfig:
        """Return the critic's Adam and schedule; `policy` is the policy's optimizer."""
        own = {"lr": self.lr, "lr_warmup_steps": self.lr_warmup_steps}
        changes = {name: value for name, value in own.items() if value is not None}
        return (self.optimizer or policy).model_copy(update=changes)


class TeacherConfig(Config):
    """The teacher of `advantage.use_opd`. It must use the policy's token ids."""

    opd_type: Literal["sglang", "megatron", "samples"] | None = None
    """`megatron`: a model in the trainer's ranks. `sglang`: a server of yours, which scores at
    temperature 1 only. `samples`: your generate function or sample hook sets
    `sample.teacher_log_probs`, at the rollout's temperature. None: no teacher."""
    opd_teacher_load: str | None = None
    """`megatron`: Hugging Face directory of the teacher, or `org/name[@revision]` on the Hub, of
    any architecture and size; or, as in slime, a Megatron checkpoint of the policy's architecture.
    Records contain this path, so do not change the directory during a run."""
    opd_teacher_ckpt_step: int | None = None
    """Iteration of a Megatron checkpoint in `opd_teacher_load`; None: the newest."""
    url: str | None = None
    """`sglang`: address of the server or router, such as `http://10.0.0.5:30000` (slime:
    `--rm-url`)."""
    other_temperature: bool = False
    """`sglang`: accept a rollout.rollout_temperature other than 1. The distillation term then
    compares log-probs at two temperatures, as in slime."""
    timeout_s: float = Tuning(default=600.0, gt=0)
    """`sglang`: deadline of scoring one batch."""

    @model_validator(mode="after")
    def _teacher_has_a_source(self):
        if self.opd_type == "megatron" and not self.opd_teacher_load:
            raise ValueError(
                "opd_type: megatron needs opd_teacher_load, the teacher's Hugging Face directory"
            )
        if self.opd_type == "sglang" and not self.url:
            raise ValueError("opd_type: sglang needs url, the address of the teacher's server")
        return self


class SyncConfig(Config):
    """Pushes of weights into the engines."""

    transport: Literal["tensor", "distributed", "disk", "delta", "adapter"] = Tuning("tensor")
    """`tensor`: over HTTP from the trainer to each engine; through GPU memory (CUDA IPC) on a
    shared GPU. `distributed`: a broadcast from the first rank of each pipeline stage to all engines
    (NCCL; gloo without CUDA); engines must not use the trainer's GPUs. `disk`: files with all
    weights, which engines load. `delta`: files with the changes, applied to the weights on each
    engine's machine; the trainer keeps a copy on the CPU. With `disk` and `delta` a restarted
    engine gets its weights without the trainer. `adapter`: the adapters of train.lora alone, over
    HTTP; engines compute with these adapters on the frozen weights of the model directory."""
    update_weights_interval: int = Field(default=1, ge=1)
    """Iterations from one push to the next. Between two pushes engines sample with older weights
    (see async_buffer_size)."""
    in_flight: Literal["drain", "abort", "in_place"] = Tuning("abort")
    """Handling of running requests at a push. `drain`: they finish first. `abort`: they return, and
    continue from their tokens with the new weights. `in_place`: the engine keeps them and continues
    them with the new weights (SGLang 0.5.21)."""
    update_weight_buffer_size: int = Tuning(default=1024**3, ge=1)
    """Bytes of a bucket, which is gathered and sent at once. A push holds two buckets and the
    parameters of a third on a trainer's GPU; an engine holds one. SGLang spends 5 ms or more on
    each bucket of any size: 4B parameters took 0.14 s in buckets of 512 MiB and 0.09 s in buckets
    of 1 GiB (one H200)."""
    update_weight_disk_dir: str | None = Tuning(None)
    """Directory of the files of `disk` and `delta`: shared by trainer and engines, or
    `s3://bucket/prefix`. None: `weights` in the store. It contains one folder per store, branch and
    version, nested in this order."""
    update_weight_disk_keep_files: bool = Tuning(False)
    """Keep all versions; a full version is a complete Hugging Face directory. False: keep the
    versions that the newest one needs."""
    update_weight_local_checkpoint_dir: str | None = Tuning(None)
    """Folder on each engine's machine. Files are copied there before engines pause, and all engines
    of the machine use the copy. None: `disk` loads directly from a shared directory; `delta`, and
    `disk` from an object store, use `{home}/{cluster}/weights`."""
    update_weight_delta_encoding: Literal["xor", "overwrite"] = Tuning("xor")
    """Encoding of a change. `xor`: difference to the old bytes, which is smaller. `overwrite`: the
    new bytes."""
    update_weight_delta_checksum: Literal["xxh3-128", "adler32"] = Tuning("xxh3-128")
    """Checksum of each changed tensor. Engines' machines verify it before an engine loads the
    tensor."""
    update_weight_full_interval: int = Tuning(default=50, ge=1)
    """`delta`: pushes from one with all weights to the next, which bounds the chain of changes.
    1: in every push."""
    custom_update_weight_post_write_path: str | None = Tuning(None)
    """`disk` and `delta`: user function `(args, version_dir, rollout_engines)`, called in every
    process that has written files of a version, before engines read them;
    `path/to/file.py:function` or `module.function`. None: no function. See
    `rlpipe.config.weight_file_hooks` for this key and the one below."""
    custom_pull_weights_pre_read_path: str | None = Tuning(None)
    """User function `(source_dir, target_version)`, called on each engine's machine before files
    are copied to it. None: no function."""
    check_weight_update_equal: bool = Tuning(False)
    """In every push, overwrite the engines' weights with random numbers, send all weights again and
    compare. The stage fails with the names of tensors that differ. Doubles the time of a push; the
    trainer keeps a copy on the CPU."""
    probe_samples: int = Tuning(default=8, ge=0)
    """Samples of the batch that engines and trainer both score after a push; 0: no check.
    `rlpipe.sync.probe` lists the faults that the check detects."""
    max_logprob_difference: float | None = Tuning(default=None, gt=0)
    """The stage fails if the mean absolute difference of the probe's log-probs is larger (nats,
    each token weighted by its probability). None: 1e-4 in float32, 0.1 in bfloat16, 0.3 with FP8
    engines, and more if the trainer's scores depend on the packing of samples."""
    timeout_s: float = Tuning(default=600.0, gt=0)
    """Deadline of the whole stage."""

    @property
    def through_files(self) -> bool:
        """True if the trainer writes weights to files, which engines read."""
        return self.transport in ("disk", "delta")

    def disk_dir(self, store_root: str, quantization: str | None) -> str:
        """Return the directory or URL of a store's weight files, one for each quantization."""
        shared = self.update_weight_disk_dir
        root = (
            f"{shared}/{sha256(store_root.encode()).hexdigest()[:12]}"
            if shared
            else f"{store_root}/weights"
        )
        return f"{root}/.{quantization}" if quantization else root


class CheckpointConfig(Config):
    """Interval of torch_dist checkpoints, and the number that is kept."""

    save_interval: int = Tuning(default=100, ge=1)
    """Iterations from one checkpoint to the next. The last iteration has one, too."""
    keep_local: int = Tuning(default=2, ge=1)
    """Newest checkpoints that stay on local disk after they are in the store."""
    save_hf: str | None = Tuning(None)
    """Write the weights of each checkpoint as a Hugging Face directory too: a local path with
    `{rollout_id}` for the iteration, counted from `start_rollout_id`. A directory that exists
    already is kept. None: no directory; `rlpipe convert dist2hf --of RUN@K` converts any saved
    iteration later."""
    timeout_s: float = Tuning(default=3600.0, gt=0)
    """Deadline of writing one checkpoint."""

    @field_validator("save_hf")
    @classmethod
    def _path_names_the_iteration(cls, path: str | None) -> str | None:
        if path is not None and "{rollout_id}" not in path:
            raise ValueError("a path for every checkpoint needs {rollout_id}: /models/{rollout_id}")
        return path

    def hf_directory(self, iteration: int) -> Path | None:
        """Return the Hugging Face directory of the weights after an iteration, if one is due."""
        if self.save_hf is None:
            return None
        return Path(self.save_hf.replace("{rollout_id}", str(iteration))).expanduser().absolute()


def nearest_divisor(samples: int, number: int) -> int:
    """Return the largest divisor of `samples` up to this number, or a smaller one."""
    # Bounded: both numbers may be of any size.
    near = range(min(number, samples), max(number - 1000, 0), -1)
    return next((n for n in near if samples % n == 0), gcd(number, samples))
