"""An example run for the tests of summary, overview and report."""

from __future__ import annotations

import math

from rlpipe.observe.run_history import REWARD, Evaluation, IterationRecord, RunHistory, SampleChange


def example_history(iterations: int = 300) -> RunHistory:
    """Return a run that learns to spell backward, with data for every section of the report."""
    history = RunHistory(
        run="spell_backward",
        description="A Qwen3-shaped model of 0.6M parameters learns to spell backward, with GRPO.",
        config_yaml="run: spell_backward\nnum_rollout: 300\ntrain: {optimizer: {lr: 0.00025}}\n",
        totals={
            "samples": 76_800,
            "response_tokens": 521_344,
            "seconds": 612.4,
            "rollout_tokens_per_s": 1844.7,
            "by_stage": {},
        },
        other_seconds={"start": 31.2, "eval": 17.9, "checkpoint": 11.5},
        packages={"torch": "2.13.0", "sglang": "0.5.21", "megatron-core": "0.16.1"},
    )
    for iteration in range(iterations):
        noise = math.sin(iteration * 12.9898) * 43758.5453 % 1 - 0.5
        learned = 0.36 + 0.38 * (1 - math.exp(-iteration / 60))
        history.iterations.append(
            IterationRecord(
                iteration,
                {
                    REWARD: learned + 0.12 * noise,
                    "rollout/logprob_abs_diff/mean": 3e-6 * (1.4 + noise),
                    "train/entropy": 0.5 * math.exp(-iteration / 90) + 0.1 + 0.03 * noise,
                    "train/grad_norm": 0.8 + 0.4 * noise,
                    "rollout/response_len/mean": 5.9 + 0.2 * noise,
                    "train/loss": 0.01 * noise,
                },
                {"rollout": 0.95, "reward": 0.03, "advantage": 0.21, "train": 0.52, "sync": 0.13},
            )
        )
    curve = [0.36, 0.47, 0.55, 0.6, 0.64, 0.67, 0.7, 0.69, 0.71, 0.72, 0.71, 0.73, 0.74]
    history.evaluations = [
        Evaluation(25 * index, "heldout", accuracy, 256) for index, accuracy in enumerate(curve)
    ]
    words = [
        ("planet", "tenlap", "tenalp"),
        ("stone", "enots", "enots"),
        ("market", "tkram", "tekram"),
        ("window", "wodnw", "wodniw"),
    ]
    for word, before, after in words:
        answer = word[::-1]
        prompt = f"Spell this word backward: {word} ->"
        history.samples.append(
            SampleChange(
                prompt, before, after, answer, float(before == answer), float(after == answer)
            )
        )
    return history
