"""What decides the result of each stage: its parents, the part of its configuration that matters,
its hooks.

The digest over these and the version of the stage's contract is the node's name in the store. Same
inputs, same node, nothing to do. Settings are made as the contract of the run's branch says
(`SETTINGS`).

    plan ─ rollout ─ reward ─ advantage ─ train ─ checkpoint
                                 │          │ └── sync, eval
               before ───────────┴──────────┘          (before: the node of the weights before: train, init or segment)

Not here: weight versions and engine answers, which are outputs; timeouts, ports, places, which
change nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlpipe.config.base import Config
from rlpipe.config.data import EvalDataset, PythonReward, RewardConfig
from rlpipe.config.hooks import hook_digest
from rlpipe.config.run import RunConfig
from rlpipe.config.train import OptimizerConfig
from rlpipe.data.prompts import file_digests
from rlpipe.store.nodes import input_digest
from rlpipe.types import CONTRACTS, Node, Stage

Contracts = Mapping[Stage, int]
"""Version of each stage's contract, as a branch has them (`Branches.contracts`)."""


@dataclass(frozen=True)
class Inputs:
    """The inputs of one stage."""

    stage: Stage
    parents: dict[str, str]
    config: dict[str, Any] = field(default_factory=dict)
    hooks: dict[str, str] = field(default_factory=dict)
    contract: int = 1

    @property
    def digest(self) -> str:
        """The name of the node these inputs make."""
        return input_digest(self.stage, self.parents, self.config, self.hooks, self.contract)

    def node(self, **results: Any) -> Node:
        """The node of these inputs with its results (`files`, `outputs`)."""
        made_of = {
            "parents": self.parents,
            "config": self.config,
            "hooks": self.hooks,
            "contract": self.contract,
        }
        return Node(stage=self.stage, digest=self.digest, **made_of, **results)


def init_inputs(
    config: RunConfig, fingerprint: str, start_from: str | None, contracts: Contracts = CONTRACTS
) -> Inputs:
    """First weights: the model, or another branch's checkpoint node."""
    version = contracts[Stage.INIT]
    parents = {"start_from": start_from} if start_from else {}
    return Inputs(
        Stage.INIT, parents, SETTINGS[Stage.INIT][version](config, fingerprint), contract=version
    )


def rollout_inputs(
    config: RunConfig, fingerprint: str, plan: str, contracts: Contracts = CONTRACTS
) -> Inputs:
    """Samples of a plan (the digest of its part 0). Where a filter chooses among scored groups, the
    reward decides too."""
    version = contracts[Stage.ROLLOUT]
    settings = SETTINGS[Stage.ROLLOUT][version](config, fingerprint)
    hooks = {path: hook_digest(path) for path in config.rollout.hook_paths}
    if config.rollout.judged_by_reward:
        hooks |= _reward_hooks(config.reward)
    return Inputs(Stage.ROLLOUT, {"plan": plan}, settings, hooks, version)


def reward_inputs(config: RunConfig, rollout: str, contracts: Contracts = CONTRACTS) -> Inputs:
    """Rewards of a rollout's rows."""
    version = contracts[Stage.REWARD]
    settings = SETTINGS[Stage.REWARD][version](config)
    return Inputs(
        Stage.REWARD, {"rollout": rollout}, settings, _reward_hooks(config.reward), version
    )


def advantage_inputs(
    config: RunConfig, rollout: str, reward: str, before: str, contracts: Contracts = CONTRACTS
) -> Inputs:
    """The batch, scored with the weights before."""
    version = contracts[Stage.ADVANTAGE]
    own = [
        config.train.custom_megatron_init_path,
        config.train.custom_megatron_before_log_prob_hook_path,
    ]
    hooks = {path: hook_digest(path) for path in (*config.advantage.hooks, *own) if path}
    parents = {"rollout": rollout, "reward": reward, "before": before}
    return Inputs(
        Stage.ADVANTAGE, parents, SETTINGS[Stage.ADVANTAGE][version](config), hooks, version
    )


def train_inputs(
    config: RunConfig, advantage: str, before: str, contracts: Contracts = CONTRACTS
) -> Inputs:
    """The weights after."""
    version = contracts[Stage.TRAIN]
    paths = [
        config.train.custom_megatron_init_path,
        config.train.custom_megatron_before_train_step_hook_path,
    ]
    hooks = {path: hook_digest(path) for path in (*config.train.loss.hooks, *paths) if path}
    parents = {"advantage": advantage, "before": before}
    return Inputs(Stage.TRAIN, parents, SETTINGS[Stage.TRAIN][version](config), hooks, version)


def segment_inputs(weights: str, base: str, attempt: str) -> Inputs:
    """The state that training from `base` (a checkpoint or init node) to the train node `weights`
    again came out as.

    It could not be told beforehand: `attempt` is a random name, and another attempt is another
    segment.
    """
    return Inputs(Stage.SEGMENT, {"weights": weights, "base": base}, {"attempt": attempt})


def sync_inputs(train: str) -> Inputs:
    """Engines that hold these weights."""
    return Inputs(Stage.SYNC, {"weights": train})


def checkpoint_inputs(train: str) -> Inputs:
    """These weights with optimizer state, as files."""
    return Inputs(Stage.CHECKPOINT, {"weights": train})


def eval_inputs(
    config: RunConfig, dataset: EvalDataset, weights: str, contracts: Contracts = CONTRACTS
) -> Inputs:
    """A held-out set under these weights."""
    version = contracts[Stage.EVAL]
    reward = dataset.reward or config.reward
    settings = SETTINGS[Stage.EVAL][version](config, dataset)
    own = [dataset.custom_generate_function_path] if dataset.custom_generate_function_path else []
    hooks = {path: hook_digest(path) for path in (*config.rollout.evaluation_hook_paths, *own)}
    return Inputs(
        Stage.EVAL, {"weights": weights}, settings, {**hooks, **_reward_hooks(reward)}, version
    )


def _init_settings(config: RunConfig, fingerprint: str) -> dict[str, Any]:
    of_train = _chosen(
        config.train, "optimizer", "parallel", "megatron", "use_distributed_optimizer", "seed"
    )
    settings = {
        "model": fingerprint,
        **_chosen(config.model, "dtype"),
        **of_train,
        "layout": layout(config),
    }
    if config.uses_critic:
        own = _chosen(config.critic, "hf_checkpoint", "parallel")
        settings["critic"] = {**own, "optimizer": _critic_optimizer(config).identity()}
    return settings


def _rollout_settings(config: RunConfig, fingerprint: str) -> dict[str, Any]:
    settings = {**config.rollout.identity(), "model": fingerprint, **_engines(config)}
    settings |= _chosen(config.train, "use_rollout_routing_replay")
    if not config.rollout.static:
        settings |= _chosen(config, "deterministic", "async_buffer_size")
    if config.rollout.judged_by_reward:
        settings["reward"] = config.reward.identity()
    return settings


def _reward_settings(config: RunConfig) -> dict[str, Any]:
    """Functions of the user see the settings that are made for them."""
    given = _chosen(config.rollout, "custom_config") if _reward_hooks(config.reward) else {}
    return {**config.reward.identity(), **given}


def _advantage_settings(config: RunConfig) -> dict[str, Any]:
    settings = {
        **config.advantage.identity(),
        **_chosen(config, "async_buffer_size"),
        **_chosen(config.rollout, "rollout_temperature", "mask_offpolicy_in_partial_rollout"),
        **_chosen(config.train, "use_routing_replay", "use_rollout_routing_replay"),
    }
    if config.advantage.use_opd:
        settings["teacher"] = config.teacher.identity()
    if config.advantage.reference:
        settings |= _chosen(config.reference, "ref_update_interval")
    if config.uses_critic:
        settings |= _chosen(config.critic, "num_critic_only_steps")
    return settings


def _train_settings(config: RunConfig) -> dict[str, Any]:
    settings = {
        **config.train.identity(),
        **_chosen(config, "deterministic"),
        **_chosen(config.rollout, "rollout_temperature"),
        "layout": layout(config),
    }
    lengths = {"total_optimizer_steps": schedule_length(config)}
    if config.uses_critic:
        settings["critic"] = config.critic.identity()
        lengths["critic_optimizer_steps"] = critic_schedule_length(config)
    return settings | {name: steps for name, steps in lengths.items() if steps is not None}


def _eval_settings(config: RunConfig, dataset: EvalDataset) -> dict[str, Any]:
    return {
        "dataset": dataset.identity(),
        "files": file_digests(dataset.prompts),
        "rollout": config.rollout.identity(),
        "reward": (dataset.reward or config.reward).identity(),
        "data": config.data.model_copy(update={"prompts": dataset.prompts}).identity(),
        **_engines(config),
    }


SETTINGS: dict[Stage, dict[int, Callable[..., dict[str, Any]]]] = {
    Stage.INIT: {1: _init_settings},
    Stage.ROLLOUT: {1: _rollout_settings},
    Stage.REWARD: {1: _reward_settings},
    Stage.ADVANTAGE: {1: _advantage_settings},
    Stage.TRAIN: {1: _train_settings},
    Stage.EVAL: {1: _eval_settings},
}
"""Stage → version of its contract → how the settings of a configuration are made.

Every version in `rlpipe.types.CONTRACTS` and before stays here, for the runs that were begun with
it. A version that changes what a stage computes and not its settings has the function of the
version before. The other stages (segment, sync, checkpoint) have no settings: their nodes must be
found by the weights alone, so their contracts have one version.
"""


def _chosen(model: Config, *keys: str) -> dict[str, Any]:
    """These keys of a model's identity: those of them that are not at the default they were
    introduced with."""
    identity = model.identity()
    return {key: identity[key] for key in keys if key in identity}


def layout(config: RunConfig) -> dict[str, int]:
    """Ranks and how they are used: the sums of a step are taken in this order."""
    critic_ranks = config.resources.critic_ranks
    return {
        "ranks": config.resources.trainer_ranks,
        **({"critic_ranks": critic_ranks} if critic_ranks else {}),
    }


def schedule_length(config: RunConfig) -> int | None:
    """Optimizer steps the learning rate schedule spans; None for a constant one, which does not
    depend on the run's length."""
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
    return hashlib.sha256(
        json.dumps(config.model_dump(mode="json"), sort_keys=True).encode()
    ).hexdigest()


def _engines(config: RunConfig) -> dict[str, Any]:
    """What engines sample with, if it is not the weights as they are."""
    return _chosen(config.engine, "quantization")


def _reward_hooks(reward: RewardConfig) -> dict[str, str]:
    function = reward.function
    paths = [function.path] if isinstance(function, PythonReward) else []
    return {
        path: hook_digest(path) for path in (*paths, reward.custom_reward_post_process_path) if path
    }
