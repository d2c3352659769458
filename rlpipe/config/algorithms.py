"""Advantage estimators, losses, corrections and aggregation.

`rlpipe.algorithms` documents the mathematics of every choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from rlpipe.config.base import Config, Tuning

if TYPE_CHECKING:
    from rlpipe.config.run import RunConfig

Divergence = Literal["k1", "k2", "k3", "low_var_kl"]
Level = Literal["token", "sequence", "geometric"]

PAPER_CLIPS = {
    "gspo": {"eps_clip": 3e-4, "eps_clip_high": 4e-4},
    "cispo": {"eps_clip": 1.0, "eps_clip_high": 4.0},
}
"""Default clip ranges of a surrogate.

GSPO: arXiv 2507.18071 §5.1 (slime leaves 0.2, which clips nothing). CISPO: no lower bound and
weights up to 5, arXiv 2506.13585 (slime's lower bound is 0.8).
"""

SCALED_BY_GROUP = ("grpo", "gspo", "cispo")
"""Estimators that divide by the group's standard deviation if `grpo_std_normalization` is on."""
CENTERED_BY_GROUP = (*SCALED_BY_GROUP, "reinforce_plus_plus_baseline")
"""Estimators that subtract the group's mean reward if `rewards_normalization` is on. (rloo always
subtracts it.)"""

SUPERVISED = ("sft", "dpo", "reward_model")
"""Losses of rows that no engine sampled."""
SLIME_CORRECTIONS = {
    "slime.backends.megatron_utils.loss.icepop_function": "icepop",
    "slime.backends.megatron_utils.loss.vanilla_tis_function": "clip",
}
"""Dotted path of a slime correction → tis_mode with the same result. slime need not be
installed."""


class AdvantageConfig(Config):
    """Token-level advantages from rewards, and the log-probs that the trainer scores for them."""

    advantage_estimator: Literal[
        "grpo",
        "gspo",
        "cispo",
        "rloo",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "ppo",
        "none",
    ] = "grpo"
    """Estimator of advantages. `gspo` and `cispo` use grpo's advantages and set
    train.loss.surrogate too; `ppo` needs a critic; `none` is for supervised rows."""
    rewards_normalization: bool = True
    """Subtract the group's mean reward (grpo, gspo, cispo, reinforce_plus_plus_baseline)."""
    grpo_std_normalization: bool = True
    """Divide by the group's (n-1) standard deviation (grpo, gspo, cispo). False: Dr.GRPO."""
    fan_out_baseline: Literal["rollout", "sample"] = "rollout"
    """Unit of a group's mean and deviation if a rollout gives several samples. `rollout`: each
    rollout counts once. `sample`: each sample counts once (slime)."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per token (reinforce_plus_plus, ppo)."""
    lambd: float = Field(default=1.0, ge=0, le=1)
    """GAE's λ (ppo)."""
    discount_masked_tokens: bool = False
    """Tokens with loss mask 0 (tools, observations) count as steps of gamma, as in slime. False:
    only tokens of the policy count."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL to the reference in the reward (rloo, reinforce_plus_plus,
    reinforce_plus_plus_baseline, ppo); needs reference, excludes train.loss.kl_loss_coef."""
    kl_type: Divergence = "k1"
    """Estimator of that KL."""
    normalize_advantages: bool = False
    """Whiten over all tokens of the batch with loss mask 1. Always on for reinforce_plus_plus and
    reinforce_plus_plus_baseline."""
    use_opd: bool = False
    """On-policy distillation: subtract opd_kl_coef × (policy - teacher log-prob) from every token's
    advantage."""
    opd_kl_coef: float = Field(default=1.0, ge=0)
    """Weight of the distillation term."""
    custom_advantage_function_path: str | None = None
    """User function that replaces the estimator: `(args, rollout_data) -> None` sets
    `rollout_data["advantages"]` and `["returns"]`. `path/to/file.py:function` or
    `module.function`. None: the estimator."""
    custom_convert_samples_to_train_data_path: str | None = None
    """User function `(args, samples) -> dict` that converts the samples of a batch, as in slime:
    the entries `rewards`, `loss_masks`, `rollout_log_probs` and `teacher_log_probs` replace those
    of the samples. Advantages are estimated from its rewards, which in slime are normalized
    already (rewards_normalization: false). None: no conversion."""
    rollout_data_postprocess_path: str | None = None
    """User function that changes the estimated batch: `(args, rollout_id, rollout_data) -> None`
    changes `rollout_data["advantages"]`, `["returns"]` or `["loss_masks"]`. None: no change."""
    reference: bool = False
    """Score the batch with the reference model too. KL terms need it."""
    score_proximal: bool | None = None
    """Score the batch with the weights before training (proximal log-probs). None: only where a
    result needs this pass. A single optimizer step computes the same log-probs itself; then ratio,
    corrections and metrics use these, and the batch has no column `proximal_log_probs`. True: in
    every iteration. False: never; the ratio uses the engine's log-probs
    (train.loss.use_rollout_logprobs), or with a single optimizer step the policy's own."""
    log_probs_max_tokens_per_gpu: int | None = Tuning(default=None, ge=1)
    """Packed tokens of a scoring micro-batch per rank; None: as many as in training."""

    @property
    def compares_within_group(self) -> bool:
        """True if advantages are relative to the other samples of the prompt.

        A single sample of a prompt then has advantage 0.
        """
        centered = self.advantage_estimator in CENTERED_BY_GROUP and self.rewards_normalization
        replaced = self.custom_advantage_function_path is not None
        return (centered or self.advantage_estimator == "rloo") and not replaced

    @property
    def hooks(self) -> tuple[str, ...]:
        """Paths of the user functions."""
        paths = (
            self.custom_convert_samples_to_train_data_path,
            self.custom_advantage_function_path,
            self.rollout_data_postprocess_path,
        )
        return tuple(path for path in paths if path)

    @model_validator(mode="before")
    @classmethod
    def _reinforce_plus_plus_whitens(cls, values: Any) -> Any:
        if isinstance(values, dict) and str(values.get("advantage_estimator")).startswith(
            "reinforce_plus_plus"
        ):
            return {"normalize_advantages": True, **values}
        return values

    @model_validator(mode="after")
    def _keys_fit(self):
        name = self.advantage_estimator
        if name.startswith("reinforce_plus_plus") and not self.normalize_advantages:
            raise ValueError(
                f"{name} always whitens over the batch; remove normalize_advantages: false"
            )
        if self.kl_coef and name in ("grpo", "gspo", "cispo", "none"):
            raise ValueError(
                f"{name} does not use kl_coef (slime ignores it); use train.loss.kl_loss_coef"
            )
        if self.kl_coef and not self.reference:
            raise ValueError("kl_coef needs reference: true")
        if self.score_proximal is False and (self.kl_coef or self.use_opd):
            raise ValueError(
                "score_proximal: false gives no log-probs to compare with the reference or the "
                "teacher"
            )
        return self


class DpoConfig(Config):
    """The loss of preference pairs, under TRL's names."""

    loss_type: Literal["sigmoid", "robust", "hinge", "ipo"] = "sigmoid"
    """`sigmoid`: DPO. `robust`: DPO if a share label_smoothing of the labels is wrong. `hinge`:
    SLiC. `ipo`: squared distance of the margin per token from 1 / (2 beta)."""
    beta: float = Field(default=0.1, gt=0)
    """Strength of the reference: rewards are beta × (log-prob - reference's log-prob)."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Assumed share of pairs in the wrong order, for sigmoid and robust."""
    reference_free: bool = False
    """True: the reference gives all responses the same probability. False: needs
    advantage.reference."""
    rpo_alpha: float = Field(default=0.0, ge=0)
    """Weight of the negative log-likelihood per token of the chosen response; 0: no such term."""

    @model_validator(mode="after")
    def _smoothing_has_an_effect(self):
        if self.label_smoothing and self.loss_type not in ("sigmoid", "robust"):
            raise ValueError(f"label_smoothing has no effect on loss_type: {self.loss_type}")
        return self


class LossConfig(Config):
    """The loss of one optimizer step."""

    type: Literal["policy", "sft", "dpo", "reward_model", "custom"] = "policy"
    """`policy`: reinforcement learning. `sft`: cross-entropy of supervised rows. `dpo`: preference
    pairs, of data.prompts.rejected_key. `reward_model`: the same pairs train a model with one
    output, the reward. `custom`: custom_loss_function_path."""
    dpo: DpoConfig = DpoConfig()
    """Settings of `type: dpo`."""
    center_rewards_coefficient: float = Field(default=0.0, ge=0)
    """Reward model: weight of the squared sum of a pair's rewards, which keeps them near 0."""
    surrogate: Literal["clip", "gspo", "cispo"] = "clip"
    """Use of the probability ratio. `clip`: PPO's clipped ratio per token. `gspo`: the same with
    one ratio per sequence. `cispo`: a clipped ratio without gradient weighs the log-prob. The
    estimators gspo and cispo set the key unless it is given."""
    eps_clip: float = Field(default=0.2, gt=0)
    """Lower clip of the probability ratio: 1 - eps_clip. Defaults to 3e-4 for gspo and to 1 (no
    bound) for cispo."""
    eps_clip_high: float | None = Field(default=None, gt=0)
    """Upper clip of the probability ratio: 1 + eps_clip_high; None: eps_clip. Defaults to 4e-4 for
    gspo and 4 for cispo if eps_clip is not given either."""
    eps_clip_c: float | None = Field(default=None, gt=1)
    """Dual clip for negative advantages; None: off."""
    use_opsm: bool = False
    """Off-policy sequence masking: no policy loss for tokens with a negative advantage in sequences
    with a mean of (proximal - new log-prob) above opsm_delta."""
    opsm_delta: float = Field(default=1e-4, ge=0)
    """Bound of use_opsm in nats per token."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus; 0: entropy is only logged."""
    kl_loss_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL to the reference in the loss; needs advantage.reference. 0: the KL is only
    logged."""
    kl_loss_type: Divergence = "low_var_kl"
    """Estimator of that KL."""
    use_unbiased_kl: bool = False
    """Multiply this estimate by the ratio new / proximal probability, with gradient
    (DeepSeek-V3.2)."""
    calculate_per_token_loss: bool = False
    """Mean over all tokens of the step. False: mean over rollouts of each rollout's token mean."""
    constant_length: int | None = Field(default=None, ge=1)
    """Divide each rollout's sum by this number of tokens (Dr.GRPO); None: by the rollout's own
    number."""
    use_rollout_logprobs: bool = False
    """Take the probability ratio to the engine's log-probs (bypass). False: to the proximal
    log-probs. Excludes use_tis and use_rs."""
    use_tis: bool = False
    """Importance sampling: multiply each token's policy loss by w = exp(proximal - behaviour
    log-prob) within the bounds below. Corrects for tokens of older weights, and for numerical
    differences of engine and trainer."""
    tis_clip: float = Field(default=2.0, gt=0)
    """Upper bound of the weight w."""
    tis_clip_low: float = Field(default=0.0, ge=0)
    """Lower bound of the weight w; 0: no bound."""
    tis_level: Level = "token"
    """Level of the weights. `token`: one per token. `sequence`: the product of a sequence's token
    weights. `geometric`: their geometric mean."""
    tis_mode: Literal["clip", "truncate", "icepop", "mask"] = "clip"
    """Treatment of a weight out of bounds. `clip`: clip it to the bound. `truncate`: clip only from
    above. `icepop`: no policy loss for its tokens. `mask`: its tokens leave the whole loss, KL and
    entropy included."""
    tis_batch_normalize: bool = False
    """Divide the weights by their mean over the optimizer step."""
    use_rs: bool = False
    """Rejection: tokens, or by rs_level sequences, with a weight outside the rs bounds leave the
    loss."""
    rs_level: Level = "token"
    """Level of the rejected weights, with tis_level's values."""
    rs_lower_bound: float | None = Field(default=None, ge=0)
    """Smallest accepted weight; None: tis_clip_low, or 1 / rs_upper_bound if that is 0."""
    rs_upper_bound: float | None = Field(default=None, gt=0)
    """Largest accepted weight; None: tis_clip."""
    rs_veto_threshold: float | None = Field(default=None, gt=0)
    """Remove a whole sequence from the loss if the weight w of any token is below this; None: off.
    Works without use_rs too."""
    renormalize_rejected: bool = False
    """Remove rejected tokens from the denominators too, so that the others weigh more (verl).
    False: the gradient shrinks (slime)."""
    custom_loss_function_path: str | None = None
    """For `type: custom`: slime's `(args, batch, logits, sum_of_sample_mean) -> (loss, metrics)`,
    which needs more memory, or `(args, batch, log_probs, entropy) -> (loss per token, metrics)`.
    None: no custom loss. See `rlpipe.algorithms.custom`."""
    custom_tis_function_path: str | None = None
    """With use_tis: `(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks,
    total_lengths, response_lengths, **others) -> (pg_loss, masks, metrics)` replaces the built-in
    weights. The paths of slime's `icepop_function` and `vanilla_tis_function` become tis_mode
    icepop and clip. None: the built-in weights."""
    custom_pg_loss_reducer_function_path: str | None = None
    """User function `(total_lengths, response_lengths, loss_masks, calculate_per_token_loss) ->
    reducer`, for the policy loss only. None: the built-in reduction."""

    @model_validator(mode="before")
    @classmethod
    def _replace_slime_correction(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not values.get("use_tis"):
            return values
        path = values.get("custom_tis_function_path")
        mode = SLIME_CORRECTIONS.get(path) if isinstance(path, str) else None
        if mode is None:
            return values
        if values.get("tis_mode", mode) != mode:
            raise ValueError(
                f"custom_tis_function_path: {path} is tis_mode: {mode}; found tis_mode: "
                f"{values['tis_mode']}"
            )
        return {**values, "tis_mode": mode, "custom_tis_function_path": None}

    @model_validator(mode="before")
    @classmethod
    def _default_clips_of_surrogate(cls, values: Any) -> Any:
        if isinstance(values, dict) and (clips := PAPER_CLIPS.get(str(values.get("surrogate")))):
            given = {"eps_clip", "eps_clip_high"} & set(values)
            return values if given else {**clips, **values}
        return values

    @model_validator(mode="after")
    def _keys_fit(self):
        correction = self.corrects
        if correction and self.type != "policy":
            raise ValueError(
                f"{correction} corrects a policy loss; found type: {self.type}, with tokens that "
                "no engine sampled"
            )
        if self.tis_clip_low > self.tis_clip:
            raise ValueError(
                f"tis_clip_low = {self.tis_clip_low} must be at most tis_clip = {self.tis_clip}"
            )
        low, high = self.rs_bounds
        if self.use_rs and low > high:
            raise ValueError(f"rs_lower_bound = {low} must be at most rs_upper_bound = {high}")
        if correction and self.use_rollout_logprobs:
            raise ValueError(
                "use_rollout_logprobs already takes the ratio to the engine's log-probs; remove "
                f"{correction}"
            )
        if self.calculate_per_token_loss and self.constant_length:
            raise ValueError(
                "calculate_per_token_loss and constant_length are two aggregations; remove one of "
                "them"
            )
        if (self.type == "custom") != (self.custom_loss_function_path is not None):
            raise ValueError("type: custom and custom_loss_function_path need each other")
        if self.custom_tis_function_path and not self.use_tis:
            raise ValueError("custom_tis_function_path needs use_tis: true")
        other_sums = ("calculate_per_token_loss", "constant_length", "entropy_coef")
        if self.compares_pairs and (wrong := [key for key in other_sums if getattr(self, key)]):
            raise ValueError(f"type: {self.type} is a mean over pairs; remove {', '.join(wrong)}")
        return self

    @property
    def compares_pairs(self) -> bool:
        """True if the loss compares the two responses of a preference row."""
        return self.type in ("dpo", "reward_model")

    @property
    def reads_reference(self) -> bool:
        """True if a loss without advantages reads the reference's log-probs."""
        return self.type == "dpo" and not self.dpo.reference_free

    @property
    def corrects(self) -> str:
        """Name of the first key that corrects for tokens of other weights; empty if none does."""
        keys = {
            "use_tis": self.use_tis,
            "use_rs": self.use_rs,
            "rs_veto_threshold": self.rs_veto_threshold is not None,
        }
        return next((key for key, given in keys.items() if given), "")

    @property
    def corrects_whole_steps(self) -> bool:
        """True if the correction of a token depends on all tokens of the optimizer step."""
        return bool(self.corrects) and (
            self.renormalize_rejected
            or (self.use_tis and self.tis_batch_normalize)
            or self.custom_tis_function_path is not None
        )

    @property
    def corrects_sequences(self) -> bool:
        """True if the correction of a token depends on its whole sequence."""
        return (
            (self.use_tis and self.tis_level != "token")
            or (self.use_rs and self.rs_level != "token")
            or self.rs_veto_threshold is not None
        )

    @property
    def rs_bounds(self) -> tuple[float, float]:
        """Smallest and largest accepted weight."""
        upper = self.tis_clip if self.rs_upper_bound is None else self.rs_upper_bound
        if self.rs_lower_bound is not None:
            return self.rs_lower_bound, upper
        return self.tis_clip_low or 1 / upper, upper

    @property
    def hooks(self) -> tuple[str, ...]:
        """Paths of the user functions."""
        paths = (
            self.custom_loss_function_path,
            self.custom_tis_function_path,
            self.custom_pg_loss_reducer_function_path,
        )
        return tuple(path for path in paths if path)


def set_surrogate(values: dict[str, Any]) -> dict[str, Any]:
    """Return a run's raw values with the `train.loss.surrogate` of its estimator.

    Only gspo and cispo have one. A surrogate that is given stays.
    """
    advantage = values.get("advantage")
    train = values.get("train", {})
    loss = train.get("loss", {}) if isinstance(train, dict) else None
    if not isinstance(advantage, dict) or not isinstance(loss, dict):
        return values
    estimator = str(advantage.get("advantage_estimator"))
    if estimator not in PAPER_CLIPS or loss.get("type", "policy") != "policy":
        return values
    return {**values, "train": {**train, "loss": {"surrogate": estimator, **loss}}}


def comparison_problem(
    advantage: AdvantageConfig, loss: LossConfig, *, fans_out: bool
) -> str | None:
    """Explain why one rollout per prompt gives advantages of 0 only; None if it does not.

    `fans_out`: a user function samples, which may give several samples for one rollout. A
    distillation term, a custom advantage function and a custom loss need no comparison.
    """
    if not advantage.compares_within_group or advantage.use_opd or loss.type != "policy":
        return None
    name = advantage.advantage_estimator
    if name == "rloo" and fans_out and advantage.fan_out_baseline == "rollout":
        return (
            "rollout.n_samples_per_prompt = 1: rloo's baseline is the mean of the prompt's other "
            "rollouts; without other rollouts every advantage is 0; use 2 or more, or "
            "advantage.fan_out_baseline: sample"
        )
    if fans_out:
        return None
    other = "" if name == "rloo" else ", advantage.rewards_normalization: false"
    return (
        f"rollout.n_samples_per_prompt = 1: {name} compares the samples of one prompt with each "
        f"other, so every advantage of a single sample is 0; use 2 or more (8 is common){other}, "
        "or an estimator that needs no group (reinforce_plus_plus, ppo)"
    )


def supervised_conflicts(config: RunConfig) -> Iterator[str]:
    """Describe each conflict of settings of supervised and preference rows."""
    rollout = config.rollout
    loss = config.train.loss
    estimator = config.advantage.advantage_estimator
    supervised = rollout.type == "dataset"
    wrong = ("policy",) if supervised else SUPERVISED
    if loss.type in wrong or supervised != (estimator == "none"):
        yield (
            "supervised runs set all of rollout.type: dataset, train.loss.type: sft (or dpo, "
            "reward_model, custom) and advantage.advantage_estimator: none; "
            f"found {rollout.type}, {loss.type}, {estimator}"
        )
    prompts = config.data.prompts
    missing = [key for key in ("label_key", "rejected_key") if not getattr(prompts, key, None)]
    compares = loss.compares_pairs or "rejected_key" not in missing
    if compares and (missing or not loss.compares_pairs):
        found = f"without data.prompts.{' and '.join(missing)}" if missing else "with both"
        yield (
            "train.loss.type: dpo or reward_model and preference rows (type: file, label_key: of "
            f"chosen responses, rejected_key) need each other; found type: {loss.type} {found}"
        )
    if loss.type == "reward_model":
        of_policies = {
            "evaluation.datasets": config.evaluation.datasets,
            "advantage.reference": config.advantage.reference,
            "train.lora": config.train.lora,
            "train.custom_model_provider_path": config.train.custom_model_provider_path,
            "checkpoint.save_hf": config.checkpoint.save_hf,
        }
        if given := [key for key, value in of_policies.items() if value]:
            yield f"type: reward_model generates no text; remove {', '.join(given)}"
    if compares and (rollout.n_samples_per_prompt > 1 or rollout.loss_mask_type != "last"):
        yield (
            "preference rows need rollout.n_samples_per_prompt: 1 and loss_mask_type: last; found "
            f"{rollout.n_samples_per_prompt} and {rollout.loss_mask_type}"
        )


def algorithm_conflict(
    advantage: AdvantageConfig, loss: LossConfig, num_steps_per_rollout: int
) -> str | None:
    """Describe the conflict of advantage and loss settings; None if they fit together."""
    if loss.kl_loss_coef and not advantage.reference:
        return "train.loss.kl_loss_coef needs advantage.reference: true"
    if loss.kl_loss_coef and advantage.kl_coef:
        return "advantage.kl_coef and train.loss.kl_loss_coef both add the KL; remove one of them"
    if loss.type == "dpo" and loss.reads_reference != advantage.reference:
        return (
            "train.loss.type: dpo compares with a reference: set advantage.reference: true, or "
            "false with train.loss.dpo.reference_free: true; found "
            f"{str(advantage.reference).lower()} and {str(loss.dpo.reference_free).lower()}"
        )
    if advantage.score_proximal is not False or loss.type in SUPERVISED:
        return None
    if loss.corrects:
        return (
            f"train.loss.{loss.corrects} compares with the proximal log-probs; it needs "
            "advantage.score_proximal: true"
        )
    if num_steps_per_rollout > 1 and not loss.use_rollout_logprobs:
        return (
            f"{num_steps_per_rollout} optimizer steps an iteration need "
            "advantage.score_proximal: true or train.loss.use_rollout_logprobs: true"
        )
    return None
