"""Reward and post-processing of slime's on-policy distillation with a teacher behind SGLang.

A run needs neither: `teacher.opd_type: sglang` asks the teacher itself, and `no_task_reward` is the
reward of a command line that names them. User functions call them.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from rlpipe.rewards.remote import post
from rlpipe.types import Sample

ATTEMPTS = 3


def no_task_reward(sample: Sample) -> float:
    """Return 0: only the teacher decides the advantages."""
    return 0.0


async def reward_func(args: Namespace, sample: Sample, **_: Any) -> dict[str, Any]:
    """Return the teacher's answer: the log-probs of the sample's tokens. Raises: RewardError."""
    payload = {
        "input_ids": list(sample.tokens),
        "sampling_params": {
            "temperature": args.rollout_temperature,
            "max_new_tokens": 0,
            "skip_special_tokens": False,
        },
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    return await post(args.rm_url, payload, tries=ATTEMPTS)


def post_process_rewards(
    args: Namespace, samples: Sequence[Sample], **_: Any
) -> tuple[list[float], list[float]]:
    """Set `sample.teacher_log_probs` from the teacher's answers, and return rewards of 0."""
    for sample in samples:
        pairs = sample.get_reward_value(args)["meta_info"]["input_token_logprobs"]
        log_probs = [pair[0] for pair in pairs[1:]]  # the first token has none
        sample.teacher_log_probs = log_probs[len(log_probs) - sample.response_length :]
    return [0.0] * len(samples), [0.0] * len(samples)
