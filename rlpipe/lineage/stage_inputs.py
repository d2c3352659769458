"""The identity of each stage: the inputs that decide its result, and their digest.

Inputs are the parent nodes, the settings that can change the result, the source of the user's
hooks, and the version of the stage's contract. Their digest names the node in the store: equal
inputs find the same node, and the stage has nothing to do. One function per stage
(`rollout_inputs`, `train_inputs`, ...) makes the `Inputs`; `SETTINGS` has the settings of every
contract version.

    plan ─ rollout ─ reward ─ advantage ─ train ─ checkpoint
                                 │          │ └── sync, eval
               before ───────────┴──────────┘    (before: node of the weights before the iteration)

Weight versions and engine answers are outputs, never inputs. Timeouts and ports change no result.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
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

RANDOM_IN_TRAINING = ("hidden_dropout", "attention_dropout", "moe_input_jitter_eps")
"""Megatron's arguments with which an optimizer step's log-probs differ from a scoring pass."""

Contracts = Mapping[Stage, int]
"""Stage → version of its contract. A branch keeps the versions with which it was created."""


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
        """sha256 of the inputs: the name of the node."""
        return input_digest(self.stage, self.parents, self.config, self.hooks, self.contract)

    def node(self, **results: Any) -> Node:
        """Return the node of these inputs with its results (`files`, `outputs`)."""
        return Node(
            stage=self.stage,
            digest=self.digest,
            parents=self.parents,
            config=self.config,
            hooks=self.hooks,
            contract=self.contract,
            **results,
        )


def init_inputs(
    config: RunConfig,
    fingerprint: str,
    start_from: str | None,
    contracts: Contracts = CONTRACTS,
    *,
    sources: Mapping[str, str] | None = None,
    adapter: str | None = None,
) -> Inputs:
    """Inputs of the first weights: a model, or the checkpoint node of another branch.

    `sources`: digests of other files that decide them (`source_weights.decisive_digests`).
    `adapter`: train node of another branch with the adapters on these weights.
    """
    version = contracts[Stage.INIT]
    given = {"start_from": start_from, "adapter": adapter}
    parents = {role: digest for role, digest in given.items() if digest}
    settings = SETTINGS[Stage.INIT][version](config, fingerprint)
    if sources:
        settings["sources"] = dict(sources)
    hooks = _hook_digests([config.train.custom_model_provider_path])
    return Inputs(Stage.INIT, parents, settings, hooks, contract=version)


def rollout_inputs(
    config: RunConfig, fingerprint: str, plan: str, contracts: Contracts = CONTRACTS
) -> Inputs:
    """Inputs of a rollout.

    `plan`: digest of part 0 of the plan. If a filter chooses among scored groups, the reward is an
    input too.
    """
    version = contracts[Stage.ROLLOUT]
    settings = SETTINGS[Stage.ROLLOUT][version](config, fingerprint)
    hooks = _hook_digests(config.rollout.hook_paths)
    if config.rollout.scores_while_sampling:
        hooks |= _reward_hooks(config.reward)
    return Inputs(Stage.ROLLOUT, {"plan": plan}, settings, hooks, version)


def reward_inputs(config: RunConfig, rollout: str, contracts: Contracts = CONTRACTS) -> Inputs:
    """Inputs of the rewards of a rollout's samples."""
    version = contracts[Stage.REWARD]
    settings = SETTINGS[Stage.REWARD][version](config)
    return Inputs(
        Stage.REWARD, {"rollout": rollout}, settings, _reward_hooks(config.reward), version
    )


def advantage_inputs(
    config: RunConfig, rollout: str, reward: str, before: str, contracts: Contracts = CONTRACTS
) -> Inputs:
    """Inputs of the batch, which the weights `before` the iteration score."""
    version = contracts[Stage.ADVANTAGE]
    paths = [
        *config.advantage.hooks,
        config.train.custom_megatron_init_path,
        config.train.custom_megatron_before_log_prob_hook_path,
        config.train.custom_model_provider_path,
    ]
    hooks = _hook_digests(paths)
    parents = {"rollout": rollout, "reward": reward, "before": before}
    return Inputs(
        Stage.ADVANTAGE, parents, SETTINGS[Stage.ADVANTAGE][version](config), hooks, version
    )


def train_inputs(
    config: RunConfig, advantage: str, before: str, contracts: Contracts = CONTRACTS
) -> Inputs:
    """Inputs of the weights after the iteration."""
    version = contracts[Stage.TRAIN]
    paths = [
        *config.train.loss.hooks,
        config.train.custom_megatron_init_path,
        config.train.custom_megatron_before_train_step_hook_path,
        config.train.custom_model_provider_path,
    ]
    hooks = _hook_digests(paths)
    parents = {"advantage": advantage, "before": before}
    return Inputs(Stage.TRAIN, parents, SETTINGS[Stage.TRAIN][version](config), hooks, version)


def segment_inputs(weights: str, base: str, attempt: str) -> Inputs:
    """Inputs of a state that a replay made.

    `base`: the checkpoint or init node from which the batches up to the train node `weights` were
    trained again. The result is not predictable, so `attempt` is a random name and every attempt is
    its own segment.
    """
    return Inputs(Stage.SEGMENT, {"weights": weights, "base": base}, {"attempt": attempt})


def sync_inputs(train: str) -> Inputs:
    """Inputs of a push of these weights to the engines."""
    return Inputs(Stage.SYNC, {"weights": train})


def checkpoint_inputs(train: str) -> Inputs:
    """Inputs of the checkpoint of these weights and their optimizer state."""
    return Inputs(Stage.CHECKPOINT, {"weights": train})


def eval_inputs(
    config: RunConfig, dataset: EvalDataset, weights: str, contracts: Contracts = CONTRACTS
) -> Inputs:
    """Inputs of the evaluation of these weights on a held-out set."""
    version = contracts[Stage.EVAL]
    reward = dataset.reward or config.reward
    settings = SETTINGS[Stage.EVAL][version](config, dataset)
    hooks = _hook_digests(
        [*config.rollout.evaluation_hook_paths, dataset.custom_generate_function_path]
    )
    hooks |= _reward_hooks(reward)
    return Inputs(Stage.EVAL, {"weights": weights}, settings, hooks, version)


def _init_settings(config: RunConfig, fingerprint: str) -> dict[str, Any]:
    settings = {
        "model": fingerprint,
        **_chosen(config.model, "dtype"),
        **_chosen(
            config.train,
            "optimizer",
            "parallel",
            "megatron",
            "use_distributed_optimizer",
            "seed",
            "lora",
            "freeze_params_name_list",
            "only_train_params_name_list",
            "custom_model_provider_path",
        ),
        "layout": layout(config),
    }
    if config.uses_critic:
        settings["critic"] = {
            **_chosen(
                config.critic,
                "hf_checkpoint",
                "megatron_checkpoint",
                "megatron_checkpoint_step",
                "megatron_optimizer",
                "parallel",
            ),
            "optimizer": _critic_optimizer(config).identity(),
        }
    if config.train.loss.type == "reward_model":
        settings["output_layer"] = "reward"
    return settings


def _rollout_settings(config: RunConfig, fingerprint: str) -> dict[str, Any]:
    settings = {
        **config.rollout.identity(),
        "model": fingerprint,
        **_chosen(config.engine, "quantization"),
    }
    settings |= _chosen(config.train, "use_rollout_routing_replay")
    if not config.rollout.static:
        settings |= _chosen(config, "deterministic", "async_buffer_size")
    if config.rollout.scores_while_sampling:
        settings["reward"] = config.reward.identity()
    return settings


def _reward_settings(config: RunConfig) -> dict[str, Any]:
    settings = config.reward.identity()
    if _reward_hooks(config.reward):  # a user function reads its settings in custom_config
        settings |= _chosen(config.rollout, "custom_config")
    return settings


def _advantage_settings(config: RunConfig) -> dict[str, Any]:
    settings = {
        **config.advantage.identity(),
        **_chosen(config, "async_buffer_size"),
        **_chosen(config.rollout, "rollout_temperature", "mask_offpolicy_in_partial_rollout"),
        **_chosen(config.train, "use_routing_replay", "use_rollout_routing_replay"),
    }
    # Whether a batch has proximal log-probs depends on the loss and the number of steps.
    if config.advantage.score_proximal is None and (
        scores_proximal(config) or config.num_steps_per_rollout > 1
    ):
        settings["proximal_log_probs"] = True
    if config.train.loss.reads_reference:
        settings["reference_log_probs"] = True
    if config.advantage.use_opd:
        settings["teacher"] = config.teacher.identity()
    if config.advantage.reference:
        settings |= _chosen(config.reference, "ref_load", "ref_ckpt_step", "ref_update_interval")
        if config.ref_update_offset:
            settings["ref_update_offset"] = config.ref_update_offset
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
        # Every row of a held-out set is drawn once.
        "data": config.data.model_copy(
            update={"prompts": dataset.prompts, "curriculum": None}
        ).identity(),
        **_chosen(config.engine, "quantization"),
    }


SETTINGS: dict[Stage, dict[int, Callable[..., dict[str, Any]]]] = {
    Stage.INIT: {1: _init_settings},
    Stage.ROLLOUT: {1: _rollout_settings},
    Stage.REWARD: {1: _reward_settings},
    Stage.ADVANTAGE: {1: _advantage_settings},
    Stage.TRAIN: {1: _train_settings},
    Stage.EVAL: {1: _eval_settings},
}
"""Stage → contract version → function that makes the settings from a configuration.

Versions before the newest one (`rlpipe.types.CONTRACTS`) stay here for the runs that were created
with them. A version that changes a stage's result but not its settings maps to the function of the
version before. Segment, sync and checkpoint nodes have no settings: their weights alone name them,
so their contracts have one version.
"""


def _chosen(model: Config, *keys: str) -> dict[str, Any]:
    """Return these keys of a model's identity.

    A key at the default with which it was introduced is not part of the identity.
    """
    identity = model.identity()
    return {key: identity[key] for key in keys if key in identity}


def scores_proximal(config: RunConfig) -> bool | None:
    """Return True if the policy scores batches before they are trained, False if it scores none.

    None: only batches of more than one optimizer step. The configuration's value has precedence.

    A pass before the first step is needed by terms of the advantages, by user functions that get
    these log-probs or change the model, by recorded routing, by corrections that depend on tokens
    of other micro-batches or ranks, and by iterations that train only the critic.
    """
    advantage = config.advantage
    train = config.train
    loss = train.loss
    if advantage.score_proximal is not None:
        return advantage.score_proximal
    parallel = train.parallel.context_parallel_size
    needed = (
        advantage.kl_coef > 0
        or advantage.use_opd
        or bool(advantage.hooks)
        or loss.type == "custom"
        or train.custom_megatron_before_log_prob_hook_path is not None
        or train.custom_megatron_before_train_step_hook_path is not None
        or (train.use_routing_replay and not train.use_rollout_routing_replay)
        or loss.corrects_whole_steps
        or (loss.corrects_sequences and parallel > 1)
        or (config.uses_critic and config.critic.num_critic_only_steps > 0)
        or any(name in train.megatron and train.megatron[name] for name in RANDOM_IN_TRAINING)
    )
    return True if needed else None


def layout(config: RunConfig) -> dict[str, int]:
    """Return the numbers of ranks, which fix the order of the sums in an optimizer step."""
    critic_ranks = config.resources.critic_ranks
    return {
        "ranks": config.resources.trainer_ranks,
        **({"critic_ranks": critic_ranks} if critic_ranks else {}),
    }


def schedule_length(config: RunConfig) -> int | None:
    """Return the optimizer steps of the policy's learning rate schedule.

    None for a constant rate, which does not depend on the length of the run.
    """
    optimizer = config.train.optimizer
    if optimizer.lr_decay_style == "constant":
        return None
    return optimizer.lr_decay_steps or config.total_optimizer_steps


def critic_schedule_length(config: RunConfig) -> int | None:
    """Return the optimizer steps of the critic's schedule; None without a critic or if constant."""
    optimizer = _critic_optimizer(config)
    if not config.uses_critic or optimizer.lr_decay_style == "constant":
        return None
    return optimizer.lr_decay_steps or config.critic_optimizer_steps


def _critic_optimizer(config: RunConfig) -> OptimizerConfig:
    return config.critic.resolved_optimizer(config.train.optimizer)


def config_digest(config: RunConfig) -> str:
    """Return the sha256 of the whole configuration."""
    text = json.dumps(config.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _hook_digests(paths: Iterable[str | None]) -> dict[str, str]:
    return {path: hook_digest(path) for path in paths if path}


def _reward_hooks(reward: RewardConfig) -> dict[str, str]:
    function = reward.function
    path = function.path if isinstance(function, PythonReward) else None
    return _hook_digests([path, reward.custom_reward_post_process_path])
