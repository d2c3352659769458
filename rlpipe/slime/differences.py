"""Sentences on flags that act differently here than in slime.

    fixed_differences(values)     a sentence for each such flag of a command line

`flag_keys.differences` adds the sentences with figures. The table is the only list of them: the
notes at the start of a run and of `rlpipe from-slime` are made from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlpipe.slime.function_paths import has_rollout_function
from rlpipe.slime.model_flags import (
    continues_critic,
    continues_optimizer,
    trained_prediction_layers,
)
from rlpipe.slime.reward_flags import follows_teacher_only

Values = Mapping[str, Any]


def fixed_differences(values: Values) -> list[str]:
    """Return the sentences that apply to a command line."""
    return [sentence for applies, sentence in _DIFFERENCES if applies(values)]


def scores_at_two_temperatures(values: Values) -> bool:
    """True if a teacher's server scores at another temperature than the rollout samples at."""
    return bool(
        values.get("use_opd")
        and values.get("opd_type") == "sglang"
        and values.get("rollout_temperature", 1.0) != 1.0
    )


def _has_estimator(values: Values, name: str) -> bool:
    return values.get("advantage_estimator") == name


_DIFFERENCES: tuple[tuple[Callable[[Values], Any], str], ...] = (
    (
        lambda values: values.get("rollout_top_p", 1.0) != 1.0,
        "--rollout-top-p: log-probs are those of the full distribution; slime uses those of the "
        "nucleus",
    ),
    (
        lambda values: (
            values.get("use_rollout_logprobs") and (values.get("kl_coef") or values.get("use_opd"))
        ),
        "--use-rollout-logprobs: the KL in the reward and the distillation term use the trainer's "
        "log-probs; slime uses the engine's",
    ),
    (
        lambda values: values.get("keep_old_actor") and has_rollout_function(values),
        "--keep-old-actor: the ratio is to the weights before the update; slime's is to those that "
        "sampled, which are older in asynchronous training",
    ),
    (
        lambda values: values.get("keep_old_actor") and not has_rollout_function(values),
        "--keep-old-actor: log-probs of the weights that sampled are the engine's; slime computes "
        "them again in the trainer",
    ),
    (
        lambda values: _has_estimator(values, "ppo") and values.get("kl_coef"),
        "--kl-coef with ppo: the critic learns returns with the KL; slime's learns returns without "
        "it",
    ),
    (
        lambda values: (
            values.get("partial_rollout") and not values.get("mask_offpolicy_in_partial_rollout")
        ),
        "--partial-rollout: a group with tokens older than async_buffer_size is sampled again; "
        "slime trains on it. --mask-offpolicy-in-partial-rollout keeps these tokens with loss mask "
        "0, in both",
    ),
    (
        follows_teacher_only,
        "--rm-type without --label-key: every reward is 0, as in slime, and only the teacher "
        "decides the advantages",
    ),
    (
        scores_at_two_temperatures,
        "--opd-type sglang: the teacher's server scores at temperature 1, as in slime, and the "
        "policy at --rollout-temperature; --opd-type megatron scores both at the latter",
    ),
    (
        lambda values: values.get("enable_mtp_training") and not trained_prediction_layers(values),
        "--enable-mtp-training: layers for multi-token prediction keep their weights, because "
        "--hf-checkpoint is no directory of this machine, its model has another number of them "
        "than --mtp-num-layers, or ranks split its layers or samples. slime trains "
        "them on the policy's hidden states, without a gradient to the policy; drafts of "
        "speculative decoding are accepted less often as the policy moves away",
    ),
    (
        lambda values: values.get("ci_test"),
        "--ci-test: a difference of engine and trainer above the threshold fails an iteration; "
        "slime's bounds of the KL in the first step and of its own tests are not checked",
    ),
    (
        lambda values: (
            continues_optimizer(values)
            and _has_estimator(values, "ppo")
            and not continues_critic(values)
        ),
        "--load: the critic's optimizer starts fresh, because no checkpoint of a critic is in the "
        "critic's --load (--megatron-config-path)",
    ),
    (
        lambda values: _has_estimator(values, "cispo") and values.get("eps_clip", 0.2) < 1,
        "--eps-clip with cispo: the lower bound of the ratio is active, as in slime; the paper's "
        "is --eps-clip 1.0",
    ),
)
"""Condition on the flags, and the sentence."""
