"""Optimizer steps and how samples are packed for them, parallelism, weight sync and checkpoints."""

from __future__ import annotations

from hashlib import sha256
from typing import Any, Literal

from pydantic import Field, field_validator

from rlpipe.config.algorithms import LossConfig
from rlpipe.config.base import Config, Tuning


class ParallelConfig(Config):
    """Megatron's parallel sizes, under its own names. Data parallelism is what is left of the
    ranks."""

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
"""Adam moves a parameter by about the learning rate in each step, and few parameters of a model are
larger than this."""


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
    """Largest global gradient norm; 0 is no clipping."""


class TrainConfig(Config):
    """One iteration's optimizer steps."""

    global_batch_size: int | None = Field(default=None, ge=1)
    """Rollouts (samples, unless one gives several) per optimizer step; None: what
    num_steps_per_rollout leaves."""
    num_steps_per_rollout: int | None = Field(default=None, ge=1)
    """Optimizer steps of an iteration; None: what global_batch_size asks for, or 1. A batch that
    lost groups to errors keeps this number; nothing trails behind."""
    max_tokens_per_gpu: int = Field(default=8192, ge=1)
    """Packed tokens of a micro-batch per rank (× context parallel size). A longer sample gets a
    micro-batch of its own."""
    micro_batch_size: int | None = Field(default=None, ge=1)
    """Samples of a micro-batch, whatever their length; None: as many as fit into
    max_tokens_per_gpu."""
    balance_by_flops: bool = True
    """Share samples among ranks and micro-batches by their FLOPs, which grow with the square of
    long ones; False: by tokens."""
    seed: int = 0
    """Seed of the trainer's random numbers; the run's `seed` unless given."""
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    parallel: ParallelConfig = ParallelConfig()
    custom_megatron_init_path: str | None = None
    """Function of yours that every rank calls before it builds the models: `(args)`. See
    `rlpipe.config.megatron_hooks` for these three; `path/to/file.py:function` or
    `module.function`."""
    custom_megatron_before_log_prob_hook_path: str | None = None
    """Called before a model scores a batch: `(args, model, store_prefix)`."""
    custom_megatron_before_train_step_hook_path: str | None = None
    """Called in every optimizer step of the policy: `(args, rollout_id, step_id, model, optimizer,
    opt_param_scheduler)`."""
    use_routing_replay: bool = False
    """Optimizer steps route every token to the experts that it went to when the batch was scored,
    so that other routing does not change the probability ratio. Of a mixture of experts; needs
    advantage.score_proximal. They are stored with the batch."""
    use_rollout_routing_replay: bool = False
    """Score the batch and take optimizer steps with the experts that the engines routed every token
    to when it was sampled, so that trainer and engines differ by rounding only; instead of the
    scoring pass's own, if use_routing_replay is set too. Engines are started to say them. Samples
    and batch keep 2 bytes × layers × experts a token for each token (768 for 48 × 8) in memory,
    about half of that in the store; see `rlpipe.store.routed_experts`. Reference, critic and
    teacher route for themselves."""
    use_distributed_optimizer: bool = False
    """Shard optimizer state over data parallel ranks."""
    megatron: dict[str, Any] = Field(default_factory=dict)
    """Megatron-core arguments by their own names (TransformerConfig, OptimizerConfig,
    DistributedDataParallelConfig), and `make_vocab_size_divisible_by`: the vocabulary is padded to
    a multiple of it times the tensor parallel size (default 1). With `recompute_granularity: full`
    alone each layer is recomputed by itself, which keeps the least."""
    timeout_s: float = Tuning(default=3600.0, gt=0)
    """Deadline of the whole stage."""

    @field_validator("megatron")
    @classmethod
    def _says_what_is_recomputed(cls, given: dict[str, Any]) -> dict[str, Any]:
        full = given.get("recompute_granularity") == "full"
        return (
            {"recompute_method": "uniform", "recompute_num_layers": 1, **given} if full else given
        )

    @property
    def replays_routing(self) -> bool:
        """Of the scoring pass, or of the engines."""
        return self.use_routing_replay or self.use_rollout_routing_replay


class SyncConfig(Config):
    """Moving weights into the engines."""

    transport: Literal["tensor", "distributed", "disk", "delta"] = Tuning("tensor")
    """`tensor`: over HTTP from the trainer to each engine; through the GPU's memory (CUDA IPC)
    where they share one. `distributed`: by broadcast from the first rank of each pipeline stage to
    all engines (NCCL; gloo without CUDA), none of them on the trainer's GPUs. `disk`: all weights
    as files, which engines load. `delta`: what changed of them, put on top of what an engine's
    machine has; the trainer keeps a copy on the CPU. Through files a restarted engine gets its
    weights without the trainer."""
    update_weights_interval: int = Field(default=1, ge=1)
    """Push after every this many iterations; between two pushes engines sample with older weights
    (see async_buffer_size)."""
    in_flight: Literal["drain", "abort", "in_place"] = Tuning("abort")
    """Requests that run when a push is due. `drain`: they finish first. `abort`: they return, and
    go on from their tokens with the new weights. `in_place`: the same inside the engine, which
    keeps them meanwhile (SGLang 0.5.21)."""
    update_weight_buffer_size: int = Tuning(default=1024**3, ge=1)
    """Bytes gathered and sent at once, as a bucket. A push has two of them on a trainer's GPU, and
    what it gathers for a third; an engine has one. SGLang spends 5 ms or more on each whatever its
    size: 4B parameters took 0.14 s in buckets of 512 MiB,
    0.09 s in such of 1 GiB (one H200)."""
    update_weight_disk_dir: str | None = Tuning(None)
    """Where the files go with `disk` and `delta`: a directory that trainer and engines share, or
    `s3://bucket/prefix`; None is `weights` in the store. A folder for each store in it, in that one
    for each branch, then one for each version."""
    update_weight_disk_keep_files: bool = Tuning(False)
    """Keep all versions, as whole Hugging Face directories where they are full; without, those that
    lead to the newest one."""
    update_weight_local_checkpoint_dir: str | None = Tuning(None)
    """Folder on each engine's machine that files are copied to, before its engines are paused; one
    copy serves all of them. None: `disk` loads from a shared directory in place; `delta`, and
    `disk` from an object store, use `{home}/{cluster}/weights`."""
    update_weight_delta_encoding: Literal["xor", "overwrite"] = Tuning("xor")
    """How a change is written. `xor`: as difference to the old bytes, which is smaller.
    `overwrite`: as the new bytes."""
    update_weight_delta_checksum: Literal["xxh3-128", "adler32"] = Tuning("xxh3-128")
    """What engines' machines check each changed tensor with, before an engine loads it."""
    update_weight_full_interval: int = Tuning(default=50, ge=1)
    """`delta`: every so many pushes all weights are written, so that no chain of changes is longer;
    1 is always."""
    check_weight_update_equal: bool = Tuning(False)
    """In every push, overwrite what the engines hold with random numbers, send all weights again
    and compare: the stage fails by the names of tensors that did not come back as they were.
    Doubles the time of a push; the trainer keeps a copy on the CPU."""
    probe_samples: int = Tuning(default=8, ge=0)
    """Samples of the batch that engines and trainer both score after a push; 0 is no check. See
    `rlpipe.sync.probe` for the faults that this finds."""
    max_logprob_difference: float | None = Tuning(default=None, gt=0)
    """The stage fails if the mean absolute difference of their log-probs (nats, each token weighted
    by its probability) is larger. None: 1e-4 in float32, 0.1 in bfloat16, 0.3 with FP8 engines, and
    more where the trainer's own scores depend on how samples are packed."""
    timeout_s: float = Tuning(default=600.0, gt=0)
    """Deadline of the whole stage."""

    @property
    def through_files(self) -> bool:
        """Do weights go through files, which the trainer writes and engines read?"""
        return self.transport in ("disk", "delta")

    def disk_dir(self, store_root: str, quantization: str | None) -> str:
        """Where the files go: a directory or a URL, of this store alone; another one for engines of
        this quantization."""
        shared = self.update_weight_disk_dir
        root = (
            f"{shared}/{sha256(store_root.encode()).hexdigest()[:12]}"
            if shared
            else f"{store_root}/weights"
        )
        return f"{root}/.{quantization}" if quantization else root


class CheckpointConfig(Config):
    """When a torch_dist checkpoint is written, and how long one is kept."""

    save_interval: int = Tuning(default=100, ge=1)
    """Every this many iterations, and after the last."""
    keep_local: int = Tuning(default=2, ge=1)
    """Newest checkpoints kept on local disk once they are in the store."""
    timeout_s: float = Tuning(default=3600.0, gt=0)
    """Deadline of writing one."""
