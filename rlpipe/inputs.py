"""What decides the result of each stage: its parents, the part of its configuration that matters, its hooks.

The digest over these is the stage's name in the store. Same inputs, same node, nothing to do.

    plan ─ rollout ─ reward ─ advantage ─ train ─ checkpoint
                                 │          │ └── sync, eval
               before ───────────┴──────────┘          (before: the node of the weights before: train, init or segment)

Not here: weight versions and engine answers, which are outputs; timeouts, ports, places, which change nothing.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from rlpipe.config.data import EvalDataset, PythonReward, RewardConfig
from rlpipe.config.hooks import hook_digest
from rlpipe.config.run import RunConfig
from rlpipe.config.train import OptimizerConfig
from rlpipe.data.prompts import file_digests
from rlpipe.store.nodes import input_digest
from rlpipe.types import Node, Stage


@dataclass(frozen=True)
class Inputs:
    """The inputs of one stage."""

    stage: Stage
    parents: dict[str, str]
    config: dict[str, Any] = field(default_factory=dict)
    hooks: dict[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """The name of the node these inputs make."""
        return input_digest(self.stage, self.parents, self.config, self.hooks)

    def node(self, **results: Any) -> Node:
        """The node of these inputs with its results (`files`, `outputs`)."""
        return Node(stage=self.stage, digest=self.digest, parents=self.parents, config=self.config, hooks=self.hooks, **results)


def init_inputs(config: RunConfig, fingerprint: str, start_from: str | None) -> Inputs:
    """First weights: the model, or another branch's checkpoint node."""
    parents = {"start_from": start_from} if start_from else {}
    settings = {"model": fingerprint, "dtype": config.model.dtype, "optimizer": config.train.optimizer.identity()}
    if config.uses_critic:
        own = config.critic.parallel
        settings["critic"] = {
            "hf_checkpoint": config.critic.hf_checkpoint,
            "optimizer": _critic_optimizer(config).identity(),
            "parallel": own.identity() if own else None,
        }
    settings |= {"parallel": config.train.parallel.identity(), "megatron": config.train.megatron}
    settings |= {"use_distributed_optimizer": config.train.use_distributed_optimizer, "seed": config.train.seed}
    return Inputs(Stage.INIT, parents, {**settings, "layout": layout(config)})


def rollout_inputs(config: RunConfig, fingerprint: str, plan: str) -> Inputs:
    """Samples of a plan (the digest of its part 0). Where a filter chooses among scored groups, the reward decides too."""
    settings = {**config.rollout.identity(), "model": fingerprint, **_engines(config)}
    if config.train.use_rollout_routing_replay:
        settings["use_rollout_routing_replay"] = True
    if not config.rollout.static:
        settings |= {"deterministic": config.deterministic, "async_buffer_size": config.async_buffer_size}
    hooks = {path: hook_digest(path) for path in config.rollout.hook_paths}
    if config.rollout.judged_by_reward:
        settings["reward"] = config.reward.identity()
        hooks |= _reward_hooks(config.reward)
    return Inputs(Stage.ROLLOUT, {"plan": plan}, settings, hooks)


def reward_inputs(config: RunConfig, rollout: str) -> Inputs:
    """Rewards of a rollout's rows. Functions of the user's see the settings that are made for them."""
    settings, hooks = config.reward.identity(), _reward_hooks(config.reward)
    if hooks and (own := getattr(config.rollout, "custom_config", None)):
        settings |= {"custom_config": own}
    return Inputs(Stage.REWARD, {"rollout": rollout}, settings, hooks)


def advantage_inputs(config: RunConfig, rollout: str, reward: str, before: str) -> Inputs:
    """The batch, scored with the weights before."""
    settings = {
        **config.advantage.identity(),
        "temperature": config.rollout.rollout_temperature,
        "async_buffer_size": config.async_buffer_size,
        "mask_offpolicy_in_partial_rollout": config.rollout.mask_offpolicy_in_partial_rollout,
    }
    for name in ("use_routing_replay", "use_rollout_routing_replay"):
        if getattr(config.train, name):
            settings[name] = True
    if config.advantage.use_opd:
        settings["teacher"] = config.teacher.identity()
    if interval := config.ref_update_interval:
        settings["ref_update_interval"] = interval
    if config.uses_critic:
        settings["num_critic_only_steps"] = config.critic.num_critic_only_steps
    own = [config.train.custom_megatron_init_path, config.train.custom_megatron_before_log_prob_hook_path]
    hooks = {path: hook_digest(path) for path in (*config.advantage.hooks, *own) if path}
    return Inputs(Stage.ADVANTAGE, {"rollout": rollout, "reward": reward, "before": before}, settings, hooks)


def train_inputs(config: RunConfig, advantage: str, before: str) -> Inputs:
    """The weights after."""
    own = config.train.identity()
    if not own["use_rollout_routing_replay"]:
        del own["use_rollout_routing_replay"]  # as it was before there was such a key
    settings = {
        **own,
        "temperature": config.rollout.rollout_temperature,
        "layout": layout(config),
        "total_optimizer_steps": schedule_length(config),
        "deterministic": config.deterministic,
    }
    if config.uses_critic:
        critic, later = config.critic.identity(), ("parallel", "lr", "lr_warmup_steps")
        critic = {name: value for name, value in critic.items() if value is not None or name not in later}
        settings |= {"critic": critic, "critic_optimizer_steps": critic_schedule_length(config)}
    paths = [config.train.custom_megatron_init_path, config.train.custom_megatron_before_train_step_hook_path]
    hooks = {path: hook_digest(path) for path in (*config.train.loss.hooks, *paths) if path}
    return Inputs(Stage.TRAIN, {"advantage": advantage, "before": before}, settings, hooks)


def segment_inputs(weights: str, base: str, attempt: str) -> Inputs:
    """The state that training from `base` (a checkpoint or init node) to the train node `weights` again came out as.

    It could not be told beforehand: `attempt` is a random name, and another attempt is another segment.
    """
    return Inputs(Stage.SEGMENT, {"weights": weights, "base": base}, {"attempt": attempt})


def sync_inputs(train: str) -> Inputs:
    """Engines that hold these weights."""
    return Inputs(Stage.SYNC, {"weights": train})


def checkpoint_inputs(train: str) -> Inputs:
    """These weights with optimizer state, as files."""
    return Inputs(Stage.CHECKPOINT, {"weights": train})


def eval_inputs(config: RunConfig, dataset: EvalDataset, weights: str) -> Inputs:
    """A held-out set under these weights."""
    reward = dataset.reward or config.reward
    settings = {
        "dataset": dataset.identity(),
        "files": file_digests(dataset.prompts),
        "rollout": config.rollout.identity(),
        "reward": reward.identity(),
        "data": config.data.model_copy(update={"prompts": dataset.prompts}).identity(),
    }
    settings |= _engines(config)
    own = [dataset.custom_generate_function_path] if dataset.custom_generate_function_path else []
    hooks = {path: hook_digest(path) for path in (*config.rollout.evaluation_hook_paths, *own)}
    return Inputs(Stage.EVAL, {"weights": weights}, settings, {**hooks, **_reward_hooks(reward)})


def layout(config: RunConfig) -> dict[str, int]:
    """Ranks and how they are used: the sums of a step are taken in this order."""
    critic_ranks = config.resources.critic_ranks
    return {"ranks": config.resources.trainer_ranks, **({"critic_ranks": critic_ranks} if critic_ranks else {})}


def schedule_length(config: RunConfig) -> int | None:
    """Optimizer steps the learning rate schedule spans; None for a constant one, which does not depend on the run's length."""
    optimizer = config.train.optimizer
    if optimizer.lr_decay_style == "constant":
        return None
    return optimizer.lr_decay_steps or config.total_optimizer_steps


def critic_schedule_length(config: RunConfig) -> int | None:
    """The same of the critic's; None without one."""
    optimizer = _critic_optimizer(config)
    if not config.uses_critic or optimizer.lr_decay_style == "constant":
        return None
    return optimizer.lr_decay_steps or config.critic_optimizer_steps


def _critic_optimizer(config: RunConfig) -> OptimizerConfig:
    return config.critic.optimizer_beside(config.train.optimizer)


def config_digest(config: RunConfig) -> str:
    """sha256 of the whole configuration."""
    return hashlib.sha256(json.dumps(config.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()


def _engines(config: RunConfig) -> dict[str, Any]:
    """What engines sample with, if it is not the weights as they are."""
    return {"quantization": config.engine.quantization} if config.engine.quantization else {}


def _reward_hooks(reward: RewardConfig) -> dict[str, str]:
    function = reward.function
    paths = [function.path] if isinstance(function, PythonReward) else []
    return {path: hook_digest(path) for path in (*paths, reward.custom_reward_post_process_path) if path}
