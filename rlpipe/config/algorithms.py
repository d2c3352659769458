"""From rewards to advantages, and from advantages to one number: estimators, losses, corrections,
aggregation.

The mathematics of every choice stands in `rlpipe.algorithms`. Not here: the optimizer and batch
sizes (`train`), the models that are scored (`model`).
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from rlpipe.config.base import Config, Tuning

Divergence = Literal["k1", "k2", "k3", "low_var_kl"]
Level = Literal["token", "sequence", "geometric"]

PAPER_CLIPS = {
    "gspo": {"eps_clip": 3e-4, "eps_clip_high": 4e-4},
    "cispo": {"eps_clip": 1.0, "eps_clip_high": 4.0},
}
"""Clip ranges that a surrogate has unless one is given: GSPO's own (arXiv 2507.18071 §5.1; slime
leaves 0.2, which clips nothing), and CISPO without a lower bound (arXiv 2506.13585; slime's lower
bound is 0.8) and weights up to 5."""

CENTERED = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")
"""Estimators whose reward is the distance to the group's mean, while `rewards_normalization` is on.
(rloo's always is.)"""

SLIMES_CORRECTIONS = {
    "slime.backends.megatron_utils.loss.icepop_function": "icepop",
    "slime.backends.megatron_utils.loss.vanilla_tis_function": "clip",
}
"""slime's own corrections by their dotted paths → the tis_mode that computes the same. slime need
not be installed."""


class AdvantageConfig(Config):
    """From rewards to token-level advantages, and what the trainer scores for them."""

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
    """`gspo` and `cispo` are grpo's advantages and set train.loss.surrogate too; `ppo` needs a
    critic; `none` for supervised rows."""
    rewards_normalization: bool = True
    """Subtract the group's mean reward (grpo, gspo, cispo, reinforce_plus_plus_baseline)."""
    grpo_std_normalization: bool = True
    """Divide by the group's (n-1) standard deviation (grpo, gspo, cispo); off is Dr.GRPO."""
    fan_out_baseline: Literal["rollout", "sample"] = "rollout"
    """Where a rollout gave several samples, a group's mean and deviation count each rollout once,
    or each sample (slime)."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per token (reinforce_plus_plus, ppo)."""
    lambd: float = Field(default=1.0, ge=0, le=1)
    """GAE's λ (ppo)."""
    discount_masked_tokens: bool = False
    """Tokens with loss mask 0 (tools, observations) count as steps of gamma, as in slime; False:
    only the policy's own."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL to the reference in the reward (rloo, reinforce_plus_plus,
    reinforce_plus_plus_baseline, ppo); needs reference, excludes train.loss.kl_loss_coef."""
    kl_type: Divergence = "k1"
    """Estimator of that KL."""
    normalize_advantages: bool = False
    """Whiten over all tokens of the batch that count; always on for reinforce_plus_plus and its
    baseline form."""
    use_opd: bool = False
    """On-policy distillation: subtract opd_kl_coef × (policy - teacher log-prob) from every token's
    advantage."""
    opd_kl_coef: float = Field(default=1.0, ge=0)
    """Weight of that term."""
    custom_advantage_function_path: str | None = None
    """Function of yours in the estimator's place: `(args, rollout_data) -> None`, sets
    `rollout_data["advantages"]` and `["returns"]`. `path/to/file.py:function` or
    `module.function`."""
    reference: bool = False
    """Score the reference model too (needed by a KL)."""
    score_proximal: bool = True
    """Score the batch with the weights before training. False saves that pass: the ratio is then to
    the engine's log-probs (train.loss.use_rollout_logprobs), or with a single optimizer step to the
    policy itself."""
    log_probs_max_tokens_per_gpu: int | None = Tuning(default=None, ge=1)
    """Packed tokens of a scoring micro-batch; None: the training one's."""

    @property
    def compares_within_group(self) -> bool:
        """True if every advantage is relative to other samples of the same prompt, so that one
        sample alone gets 0."""
        centred = self.advantage_estimator in CENTERED and self.rewards_normalization
        replaced = self.custom_advantage_function_path is not None
        return (centred or self.advantage_estimator == "rloo") and not replaced

    @property
    def hooks(self) -> tuple[str, ...]:
        """Paths of the user's functions."""
        return (self.custom_advantage_function_path,) if self.custom_advantage_function_path else ()

    @model_validator(mode="before")
    @classmethod
    def _whitened_by_definition(cls, values: Any) -> Any:
        if isinstance(values, dict) and str(values.get("advantage_estimator")).startswith(
            "reinforce_plus_plus"
        ):
            return {"normalize_advantages": True, **values}
        return values

    @model_validator(mode="after")
    def _parts_fit(self):
        name = self.advantage_estimator
        if name.startswith("reinforce_plus_plus") and not self.normalize_advantages:
            raise ValueError(f"{name} is whitened over the batch; leave normalize_advantages out")
        if self.kl_coef and name in ("grpo", "gspo", "cispo", "none"):
            raise ValueError(
                f"kl_coef has no part in {name} (slime ignores it there); use train.loss.kl_loss_coef"
            )
        if self.kl_coef and not self.reference:
            raise ValueError("kl_coef needs reference: true")
        if not self.score_proximal and (self.kl_coef or self.use_opd):
            raise ValueError(
                "score_proximal: false leaves nothing to compare with the reference or the teacher"
            )
        return self


class LossConfig(Config):
    """The loss of one optimizer step."""

    type: Literal["policy", "sft", "custom"] = "policy"
    """`policy`: reinforcement learning. `sft`: cross-entropy of supervised rows. `custom`:
    custom_loss_function_path."""
    surrogate: Literal["clip", "gspo", "cispo"] = "clip"
    """What is made of the probability ratio. `clip`: PPO's, per token. `gspo`: the same with one
    ratio per sequence. `cispo`: a clipped ratio without gradient as the weight of the log-prob. The
    estimators gspo and cispo set it unless it is given."""
    eps_clip: float = Field(default=0.2, gt=0)
    """Lower clip of the probability ratio: 1 - eps_clip. Unless given 3e-4 for gspo and 1 (no
    bound) for cispo."""
    eps_clip_high: float | None = Field(default=None, gt=0)
    """Upper clip: 1 + eps_clip_high; None: eps_clip. If neither is given 4e-4 for gspo and 4 for
    cispo."""
    eps_clip_c: float | None = Field(default=None, gt=1)
    """Dual clip for negative advantages; None is off."""
    use_opsm: bool = False
    """Off-policy sequence masking: no policy loss for tokens with a negative advantage in sequences
    whose mean of (old - new log-prob) is above opsm_delta."""
    opsm_delta: float = Field(default=1e-4, ge=0)
    """That bound, nats per token."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus; entropy is logged in any case."""
    kl_loss_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL to the reference in the loss; needs advantage.reference, which with 0 only
    logs it."""
    kl_loss_type: Divergence = "low_var_kl"
    """Estimator of that KL."""
    use_unbiased_kl: bool = False
    """Multiply that estimate by new / old probability, with gradient (DeepSeek-V3.2)."""
    calculate_per_token_loss: bool = False
    """Mean over all tokens of the step, instead of the mean over rollouts of each one's token
    mean."""
    constant_length: int | None = Field(default=None, ge=1)
    """Divide each rollout's sum by this number of tokens instead of by its own (Dr.GRPO); None: its
    own."""
    use_rollout_logprobs: bool = False
    """The ratio is to the engine's log-probs, not to the trainer's before the iteration (bypass);
    excludes use_tis, use_rs."""
    use_tis: bool = False
    """Importance sampling: each token's policy loss times w = exp(proximal - behaviour log-prob),
    bounded as below. Corrects for tokens that older weights sampled, and for what engine and
    trainer compute differently."""
    tis_clip: float = Field(default=2.0, gt=0)
    """Upper bound of that weight."""
    tis_clip_low: float = Field(default=0.0, ge=0)
    """Lower bound of that weight."""
    tis_level: Level = "token"
    """One weight per token, or per sequence: the product of its tokens' or their geometric mean."""
    tis_mode: Literal["clip", "truncate", "icepop", "mask"] = "clip"
    """A weight out of bounds: `clip` to the bound; `truncate` only from above; `icepop`: no policy
    loss for it; `mask`: its tokens leave the whole loss, KL and entropy too."""
    tis_batch_normalize: bool = False
    """Divide the weights by their mean over the optimizer step."""
    use_rs: bool = False
    """Rejection: tokens (or by rs_level sequences) whose weight is outside the rs bounds leave the
    loss."""
    rs_level: Level = "token"
    """As tis_level."""
    rs_lower_bound: float | None = Field(default=None, ge=0)
    """None: tis_clip_low, and if that is 0 too, 1 / rs_upper_bound."""
    rs_upper_bound: float | None = Field(default=None, gt=0)
    """None: tis_clip."""
    rs_veto_threshold: float | None = Field(default=None, gt=0)
    """A sequence with any token of w below it leaves the loss whole; None is off. Works without
    use_rs too."""
    renormalize_rejected: bool = False
    """Rejected tokens leave the denominators too, so the others weigh more (verl); False: the
    gradient shrinks (slime)."""
    custom_loss_function_path: str | None = None
    """Type custom: slime's `(args, batch, logits, sum_of_sample_mean) -> (loss, metrics)`, which
    costs memory, or `(args, batch, log_probs, entropy) -> (loss per token, metrics)`; see
    `rlpipe.algorithms.custom`."""
    custom_tis_function_path: str | None = None
    """With use_tis: `(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks,
    total_lengths, response_lengths,
    **others) -> (pg_loss, masks, metrics)` in place of the built-in weights. slime's own
    `icepop_function` and `vanilla_tis_function` are named by their paths in slime, and become
    tis_mode icepop and clip."""
    custom_pg_loss_reducer_function_path: str | None = None
    """`(total_lengths, response_lengths, loss_masks, calculate_per_token_loss) -> reducer`, for the
    policy loss only."""

    @model_validator(mode="before")
    @classmethod
    def _slimes_correction_is_a_mode(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not values.get("use_tis"):
            return values
        path = values.get("custom_tis_function_path")
        mode = SLIMES_CORRECTIONS.get(path) if isinstance(path, str) else None
        if mode is None:
            return values
        if values.get("tis_mode", mode) != mode:
            raise ValueError(
                f"custom_tis_function_path: {path} is tis_mode: {mode}; found tis_mode: {values['tis_mode']}"
            )
        return {**values, "tis_mode": mode, "custom_tis_function_path": None}

    @model_validator(mode="before")
    @classmethod
    def _clips_of_the_paper(cls, values: Any) -> Any:
        if isinstance(values, dict) and (clips := PAPER_CLIPS.get(str(values.get("surrogate")))):
            given = {"eps_clip", "eps_clip_high"} & set(values)
            return values if given else {**clips, **values}
        return values

    @model_validator(mode="after")
    def _parts_fit(self):
        corrected = self.corrects
        if corrected and self.type != "policy":
            raise ValueError(
                f"{corrected} corrects a policy loss; found type: {self.type}, whose tokens no engine sampled"
            )
        if self.tis_clip_low > self.tis_clip:
            raise ValueError(
                f"tis_clip_low = {self.tis_clip_low} must be at most tis_clip = {self.tis_clip}"
            )
        low, high = self.rs_bounds
        if self.use_rs and low > high:
            raise ValueError(f"rs_lower_bound = {low} must be at most rs_upper_bound = {high}")
        if corrected and self.use_rollout_logprobs:
            raise ValueError(
                f"use_rollout_logprobs takes the ratio to the engine already; leave out {corrected}"
            )
        if self.calculate_per_token_loss and self.constant_length:
            raise ValueError(
                "calculate_per_token_loss and constant_length are two aggregations; leave one of them out"
            )
        if (self.type == "custom") != (self.custom_loss_function_path is not None):
            raise ValueError("type: custom and custom_loss_function_path belong together")
        if self.custom_tis_function_path and not self.use_tis:
            raise ValueError("custom_tis_function_path needs use_tis: true")
        return self

    @property
    def corrects(self) -> str:
        """Name of the first key that corrects for tokens of other weights; empty if there is
        none."""
        keys = {
            "use_tis": self.use_tis,
            "use_rs": self.use_rs,
            "rs_veto_threshold": self.rs_veto_threshold is not None,
        }
        return next((key for key, given in keys.items() if given), "")

    @property
    def rs_bounds(self) -> tuple[float, float]:
        """Lower and upper bound of what is not rejected."""
        upper = self.tis_clip if self.rs_upper_bound is None else self.rs_upper_bound
        return (
            self.tis_clip_low or 1 / upper if self.rs_lower_bound is None else self.rs_lower_bound
        ), upper

    @property
    def hooks(self) -> tuple[str, ...]:
        """Paths of the user's functions."""
        paths = (
            self.custom_loss_function_path,
            self.custom_tis_function_path,
            self.custom_pg_loss_reducer_function_path,
        )
        return tuple(path for path in paths if path)


def set_surrogate(values: dict[str, Any]) -> dict[str, Any]:
    """A run's raw values with `train.loss.surrogate` of its estimator, unless one is given: gspo
    and cispo have their own."""
    advantage = values.get("advantage")
    train = values.get("train", {})
    loss = train.get("loss", {}) if isinstance(train, dict) else None
    if not isinstance(advantage, dict) or not isinstance(loss, dict):
        return values
    if (estimator := str(advantage.get("advantage_estimator"))) not in PAPER_CLIPS or loss.get(
        "type", "policy"
    ) != "policy":
        return values
    return {**values, "train": {**train, "loss": {"surrogate": estimator, **loss}}}


def without_comparison(
    advantage: AdvantageConfig, loss: LossConfig, *, fans_out: bool
) -> str | None:
    """Why training with one rollout for each prompt would learn nothing from rewards, in words;
    None if it would.

    `fans_out`: a function of the user samples, which may give several samples for one rollout. A
    distillation term, a custom advantage function and a custom loss do not need the comparison.
    """
    if not advantage.compares_within_group or advantage.use_opd or loss.type != "policy":
        return None
    name = advantage.advantage_estimator
    if name == "rloo" and fans_out and advantage.fan_out_baseline == "rollout":
        return (
            "rollout.n_samples_per_prompt = 1: rloo's baseline is the mean of the prompt's other rollouts, and there are none, "
            "so every advantage is 0; give 2 or more, or advantage.fan_out_baseline: sample"
        )
    if fans_out:
        return None
    other = "" if name == "rloo" else ", advantage.rewards_normalization: false"
    return (
        f"rollout.n_samples_per_prompt = 1: {name} compares the samples of one prompt with each other, so every advantage of a "
        f"single one is 0; give 2 or more (8 is common){other}, or an estimator that needs no group (reinforce_plus_plus, ppo)"
    )


def contradiction(
    advantage: AdvantageConfig, loss: LossConfig, num_steps_per_rollout: int
) -> str | None:
    """What of the two does not fit together, in words; None if they do."""
    if loss.kl_loss_coef and not advantage.reference:
        return "train.loss.kl_loss_coef needs advantage.reference: true"
    if loss.kl_loss_coef and advantage.kl_coef:
        return "advantage.kl_coef puts the KL into the reward and train.loss.kl_loss_coef into the loss; leave one of them out"
    if advantage.score_proximal or loss.type == "sft":
        return None
    if loss.corrects:
        return f"train.loss.{loss.corrects} compares with the proximal log-probs; it needs advantage.score_proximal: true"
    if num_steps_per_rollout > 1 and not loss.use_rollout_logprobs:
        return (
            f"{num_steps_per_rollout} optimizer steps an iteration need advantage.score_proximal: true "
            "or train.loss.use_rollout_logprobs: true"
        )
    return None
