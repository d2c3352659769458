"""Advantages, losses, the optimizer, parallelism, weight sync and checkpoints."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from rlpipe.config.base import Config, Tuning


class AdvantageConfig(Config):
    """From rewards to token-level advantages, and what the trainer scores for them."""

    advantage_estimator: Literal["grpo", "ppo", "none"] = "grpo"
    """`ppo`: generalised advantage estimation over the values of a critic (see `critic`). `none` for supervised rows."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """PPO: discount of a reward one token later."""
    lambd: float = Field(default=1.0, ge=0, le=1)
    """PPO: λ of generalised advantage estimation; 1 trusts the rewards, 0 the critic."""
    rewards_normalization: bool = True
    """Subtract the group's mean reward."""
    grpo_std_normalization: bool = True
    """Divide by the group's (n-1) standard deviation; off is Dr.GRPO."""
    reference: bool = False
    """Score the reference model too (needed by a KL loss)."""
    log_probs_max_tokens_per_gpu: int | None = Tuning(default=None, ge=1)
    """Packed tokens of a scoring micro-batch; None: the training one's."""


class ParallelConfig(Config):
    """Megatron's parallel sizes, under its own names. Data parallelism is what is left of the ranks."""

    tensor_model_parallel_size: int = Field(default=1, ge=1)
    sequence_parallel: bool = False
    pipeline_model_parallel_size: int = Field(default=1, ge=1)
    context_parallel_size: int = Field(default=1, ge=1)
    expert_model_parallel_size: int = Field(default=1, ge=1)
    expert_tensor_parallel_size: int = Field(default=1, ge=1)

    @property
    def model_ranks(self) -> int:
        """Ranks that share one sample: TP × PP × CP."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size


class LossConfig(Config):
    """The loss of one optimizer step."""

    type: Literal["policy", "sft"] = "policy"
    eps_clip: float = Field(default=0.2, gt=0)
    """Lower clip of the probability ratio: 1 - eps_clip."""
    eps_clip_high: float | None = None
    """Upper clip: 1 + eps_clip_high; None: eps_clip."""
    eps_clip_c: float | None = Field(default=None, gt=1)
    """Dual clip for negative advantages; None is off."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus; entropy is logged in any case."""
    kl_loss_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL to the reference in the loss; needs advantage.reference."""
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = "low_var_kl"
    """Estimator of that KL."""
    calculate_per_token_loss: bool = False
    """Mean over all tokens of the step, instead of the mean over samples of each sample's token mean."""
    use_tis: bool = False
    """Truncated importance sampling: each token's policy loss times exp(proximal - behaviour log-prob), cut to the two bounds
    below. Corrects for tokens that older weights sampled, and for what engine and trainer compute differently."""
    tis_clip: float = Field(default=2.0, gt=0)
    """Upper bound of that weight."""
    tis_clip_low: float = Field(default=0.0, ge=0)
    """Lower bound of that weight."""

    @model_validator(mode="after")
    def _tis_fits(self):
        if self.use_tis and self.type != "policy":
            raise ValueError(f"use_tis corrects a policy loss; found type: {self.type}, whose tokens no engine sampled")
        if self.tis_clip_low > self.tis_clip:
            raise ValueError(f"tis_clip_low = {self.tis_clip_low} must be at most tis_clip = {self.tis_clip}")
        return self


class OptimizerConfig(Config):
    """Adam and its schedule, in optimizer steps."""

    lr: float = Field(default=1e-6, ge=0)
    min_lr: float = Field(default=0.0, ge=0)
    """Floor of a decaying schedule."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    lr_warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up from 0."""
    lr_decay_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps until min_lr; None: the run's total."""
    weight_decay: float = Field(default=0.0, ge=0)
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float = Field(default=0.95, ge=0, lt=1)
    adam_eps: float = Field(default=1e-8, gt=0)
    clip_grad: float = Field(default=1.0, ge=0)
    """Largest global gradient norm; 0 is no clipping."""


class TrainConfig(Config):
    """One iteration's optimizer steps."""

    global_batch_size: int | None = Field(default=None, ge=1)
    """Samples per optimizer step; None: all samples of the iteration in one step."""
    max_tokens_per_gpu: int = Field(default=8192, ge=1)
    """Packed tokens of a micro-batch per rank (× context parallel size). A longer sample gets a micro-batch of its own."""
    seed: int = 0
    """Seed of the trainer's random numbers; the run's `seed` unless given."""
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    parallel: ParallelConfig = ParallelConfig()
    use_distributed_optimizer: bool = False
    """Shard optimizer state over data parallel ranks."""
    megatron: dict[str, Any] = Field(default_factory=dict)
    """Megatron-core arguments by their own names (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)."""
    timeout_s: float = Tuning(default=3600.0, gt=0)
    """Deadline of the whole stage."""


class SyncConfig(Config):
    """Moving weights into the engines."""

    transport: Literal["tensor"] = Tuning("tensor")
    """`tensor`: over HTTP from the trainer to each engine (CUDA IPC where they share a GPU)."""
    update_weights_interval: int = Field(default=1, ge=1)
    """Push after every this many iterations; between two pushes engines sample with older weights (see async_buffer_size)."""
    in_flight: Literal["drain", "abort", "in_place"] = Tuning("abort")
    """Requests that run when a push is due. `drain`: they finish first. `abort`: they return, and go on from their tokens with
    the new weights. `in_place`: the same inside the engine, which keeps them meanwhile (SGLang 0.5.21)."""
    update_weight_buffer_size: int = Tuning(default=512 * 1024**2, ge=1)
    """Bytes sent at once."""
    probe_samples: int = Tuning(default=4, ge=0)
    """After a push, so many samples of the batch are scored by engine and trainer and compared; 0 is no check."""
    max_logprob_difference: float | None = Tuning(default=None, gt=0)
    """The stage fails if they differ by more; None: 1e-3 in float32, 0.3 in bfloat16."""
    timeout_s: float = Tuning(default=600.0, gt=0)
    """Deadline of the whole stage."""


class CheckpointConfig(Config):
    """When a torch_dist checkpoint is written, and how long one is kept."""

    save_interval: int = Tuning(default=100, ge=1)
    """Every this many iterations, and after the last."""
    keep_local: int = Tuning(default=2, ge=1)
    """Newest checkpoints kept on local disk once they are in the store."""
    timeout_s: float = Tuning(default=3600.0, gt=0)
    """Deadline of writing one."""
