"""What can be known to be wrong before anything is started: asked first, so that a typo costs a second and not a minute.

Not here: what needs a tokenizer or a server (the generator checks every row once it is up).
"""

from __future__ import annotations

import inspect
import json
import shutil
from pathlib import Path

from rlpipe.algorithms.custom import check as check_functions
from rlpipe.config.data import FilePrompts, NoReward, PromptSource, RewardConfig
from rlpipe.config.hooks import load_hook
from rlpipe.config.megatron_hooks import MegatronHooks
from rlpipe.config.model import HuggingFaceModel, MadeModel
from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.run import RunConfig
from rlpipe.config.slime import slime_args
from rlpipe.data.prompts import load_prompts
from rlpipe.errors import ConfigError, ResourceError, RlpipeError
from rlpipe.model_dir import model_directory
from rlpipe.observe.functions import LogFunctions
from rlpipe.rewards.python import Scorer
from rlpipe.rollout.custom import SampleHooks, load_generate
from rlpipe.rollout.function import load_rollout_function
from rlpipe.rollout.tools import load_tools
from rlpipe.routed import routed_width
from rlpipe.store.files import Files

LEAST_FREE_BYTES = 512 * 1024**2
FULL_BYTES = 16 * 1024**2


def check(config: RunConfig, home: Path) -> None:
    """Prompt files and their rows, hooks, the model directory, a store that answers, room on the disk.

    Raises: DataError naming file and line; ConfigError naming the key; StoreError; ResourceError.
    """
    for source in (config.data.prompts, *(dataset.prompts for dataset in config.evaluation.datasets)):
        if source is not None:
            _check_prompts(source)
    for reward in (config.reward, *(dataset.reward for dataset in config.evaluation.datasets)):
        _check_reward(reward, config)
    check_functions(config.advantage, config.train.loss)
    MegatronHooks(config.train)
    LogFunctions(config.observe)
    if isinstance(config.model.source, HuggingFaceModel):
        _check_model(config, Path(model_directory(config.model, home, seed=config.seed)))
    elif isinstance(config.model.source, MadeModel):
        _check_maker(config.model.source)
    _check_functions(config.rollout)
    _check_store(config)
    _check_room(home)


def _check_model(config: RunConfig, directory: Path) -> None:
    model = json.loads((directory / "config.json").read_text())
    if config.train.use_rollout_routing_replay:
        routed_width(model)
    found = model.get("quantization_config")
    if config.needs_engines and found and not config.engine.quantization:
        method = found.get("quant_method") if isinstance(found, dict) else found
        raise ConfigError(
            "engines would sample with quantised weights, and get whole ones from the trainer",
            where="engine.quantization",
            found=f"none, and {method} in the model's config.json",
            do="set engine.quantization=fp8, or take the model's bf16 directory",
        )


def _check_functions(rollout: RolloutConfig) -> None:
    """Functions that sample, and tools, as they will be called. Raises: ConfigError with the signature one should have."""
    if path := rollout.custom_generate_function_path:
        load_generate(path)
    for key in ("rollout_function_path", "eval_function_path"):
        if path := getattr(rollout, key):
            load_rollout_function(path, f"rollout.{key}")
    SampleHooks(rollout.rollout_sample_hook_path)
    load_tools(rollout.tools, timeout_s=rollout.tool_timeout_s)


def _check_prompts(source: PromptSource) -> None:
    if isinstance(source, FilePrompts):
        load_prompts(source)
    else:
        load_prompts(source.model_copy(update={"size": 1, "exclude": ()}))


def _check_reward(reward: RewardConfig | None, config: RunConfig) -> None:
    if reward is None:
        return
    if not isinstance(reward.function, NoReward):
        Scorer(reward.function, slime_args(config))
    if reward.custom_reward_post_process_path is not None:
        load_hook(reward.custom_reward_post_process_path)


def _check_maker(source: MadeModel) -> None:
    maker = load_hook(source.maker)
    try:
        inspect.signature(maker).bind("directory", **source.arguments)
    except TypeError as error:
        raise ConfigError(
            "the maker does not take these arguments",
            where="model.source.arguments",
            found=f"{source.arguments}: {error}",
            expected=f"those of {source.maker}{inspect.signature(maker)}",
        ) from error


def _check_store(config: RunConfig) -> None:
    """One request to a store in S3: address, credentials and bucket. Raises: StoreError."""
    if config.store.root is not None and config.store.root.startswith("s3://"):
        Files(config.store.root).list(f"branches/{config.run}/config.json")


def say_if_full(error: RlpipeError, home: Path) -> None:
    """Note on an error that the disk is full: processes that end for want of room cannot say so."""
    folder, free = _room(home)
    if free < FULL_BYTES:
        error.add_note(f"the disk is full: {free / 1024**2:.0f} MiB free at {folder}; make room, and the same command goes on")


def _room(home: Path) -> tuple[Path, int]:
    """The nearest folder that is there, and the bytes free on its disk."""
    folder = home
    while not folder.exists():
        folder = folder.parent
    return folder, shutil.disk_usage(folder).free


def _check_room(home: Path) -> None:
    folder, free = _room(home)
    if free < LEAST_FREE_BYTES:
        raise ResourceError(
            "too little room on the disk",
            where=str(folder),
            found=f"{free / 1024**2:.0f} MiB free",
            expected=f"at least {LEAST_FREE_BYTES / 1024**2:.0f} MiB",
            do="make room, or keep runs elsewhere with RLPIPE_HOME or --home",
        )
