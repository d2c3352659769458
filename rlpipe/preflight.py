"""What can be known to be wrong before anything is started: asked first, so that a typo costs a
second and not a minute.

Not here: what needs a tokenizer or a server (the generator checks every row once it is up).
"""

from __future__ import annotations

import errno
import inspect
import json
import os
import shutil
import socket
import tempfile
from pathlib import Path

from rlpipe.algorithms.custom import check as check_functions
from rlpipe.config.data import FilePrompts, NoReward, PromptSource, RewardConfig
from rlpipe.config.hooks import load_hook
from rlpipe.config.import_check import check_imports
from rlpipe.config.load import find_recipe, load_run, warm_start_overrides
from rlpipe.config.megatron_hooks import MegatronHooks
from rlpipe.config.model import HuggingFaceModel, MadeModel
from rlpipe.config.problems import nearest
from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.run import RunConfig
from rlpipe.config.store_root import canonical_root
from rlpipe.config.train import ParallelConfig
from rlpipe.data.prompts import load_prompts
from rlpipe.engines.megatron.bridges.supported import check_supported
from rlpipe.engines.megatron.preflight import check_trainer
from rlpipe.errors import ConfigError, ResourceError, RlpipeError
from rlpipe.model_dir import (
    check_context_len,
    check_stop_ids,
    check_tokenizer,
    check_weights,
    given_directory,
    model_directory,
)
from rlpipe.observe.functions import LogFunctions
from rlpipe.rewards.scorer import Scorer
from rlpipe.rollout.hooks.generate_function import SampleHooks, load_generate
from rlpipe.rollout.hooks.rollout_function import load_rollout_function
from rlpipe.rollout.tools import load_tools
from rlpipe.slime.args import slime_args
from rlpipe.store.branches import Branches
from rlpipe.store.objects.files import Files
from rlpipe.store.routed_experts import routed_width

LEAST_FREE_BYTES = 512 * 1024**2
FULL_BYTES = 16 * 1024**2


def check(config: RunConfig, home: Path) -> None:
    """Folders and ports, prompt files and their rows, hooks, model directories, a store that
    answers, room on the disk.

    A warm start is checked as the run of its own that it is. The user's files are imported here
    only after a process of their own has imported them (`config.import_check`). Raises: DataError naming
    file and line; ConfigError naming the key; StoreError; ResourceError.
    """
    for one in (config, *_warm_starts(config)):
        _check_run(one, home)


def _check_run(config: RunConfig, home: Path) -> None:
    _check_places(config, home)
    with check_imports(config, config.resources.import_timeout_s) as importing:
        for source in (
            config.data.prompts,
            *(dataset.prompts for dataset in config.evaluation.datasets),
        ):
            if source is not None:
                _check_prompts(source)
        importing.wait()
    for reward in (config.reward, *(dataset.reward for dataset in config.evaluation.datasets)):
        _check_reward(reward, config)
    check_functions(config.advantage, config.train.loss)
    MegatronHooks(config.train)
    LogFunctions(config.observe)
    if isinstance(config.model.source, HuggingFaceModel):
        directory = Path(model_directory(config.model, home, seed=config.seed))
        _check_model(config, directory)
        _check_trainer(config, directory)
    elif isinstance(config.model.source, MadeModel):
        _check_maker(config.model.source)
    _check_other_models(config)
    _check_functions(config.rollout)
    for number, dataset in enumerate(config.evaluation.datasets):
        if path := dataset.custom_generate_function_path:
            load_generate(path, f"evaluation.datasets.{number}.custom_generate_function_path")
    _check_store(config, home)
    _check_room(home)


def _check_places(config: RunConfig, home: Path) -> None:
    """Can everything be written where it will be, and is the port free? Raises: ConfigError,
    ResourceError."""
    store = canonical_root(config.store.root or str(home / "store"))
    folders = {"--home": home, f"run={config.run}": home / config.run}
    if store.startswith("file://"):
        folders["store.root"] = Path(store.removeprefix("file://"))
    for key, folder in folders.items():
        _check_folder(key, folder)
    if other := _same_but_for_case(home / config.run):
        raise ConfigError(
            "a run has this name but for its capitals, and this file system does not tell them apart",
            where=f"run={config.run}",
            found=other,
            expected="a name that differs in more than capitals",
            do="choose another name: --run NAME",
        )
    # A run that was begun may hold the port itself, in a process that is about to be taken over.
    if (port := config.observe.prometheus_port) is not None and not (
        home / config.run / "run.json"
    ).exists():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((config.observe.prometheus_host, port))
            except OSError as error:
                found = f"{config.observe.prometheus_host}:{port}: {error.strerror or error}"
                do = "choose another port, or another address in observe.prometheus_host"
                raise ResourceError(
                    "nothing can listen there", where="observe.prometheus_port", found=found, do=do
                ) from error


def _check_folder(key: str, folder: Path) -> None:
    """Is it a folder that can be written to, or could it be made? Leaves nothing behind. Raises:
    ConfigError."""
    there = folder
    while not os.path.lexists(there) and there != there.parent:
        there = there.parent
    try:
        if not there.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "it is no folder")
        with tempfile.TemporaryDirectory(prefix=".rlpipe-", dir=there):
            pass
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return  # `_check_room` says so
        raise ConfigError(
            "nothing can be written there",
            where=key,
            found=f"{there}: {error.strerror or error}",
            expected="a folder that this user may write to, or the name of one that can be made",
        ) from error


def _same_but_for_case(folder: Path) -> str | None:
    """The name that an existing folder really has, on a file system that does not tell capitals
    apart."""
    if not folder.exists() or folder.is_symlink():
        return None
    names = [entry.name for entry in folder.parent.iterdir()]
    return (
        None
        if folder.name in names
        else next((name for name in names if name.casefold() == folder.name.casefold()), None)
    )


def _warm_starts(config: RunConfig) -> list[RunConfig]:
    """The configurations of the runs that come first, each the warm start of the one before it.
    Raises: ConfigError."""
    seen: list[Path] = []
    configs: list[RunConfig] = []
    while config.warm_start:
        try:
            path = find_recipe(config.warm_start).resolve()
            if path in seen:
                problem = "its warm starts begin with each other without end"
                raise ConfigError(
                    problem, where=str(path), found=" → ".join(map(str, (*seen, path)))
                )
            seen.append(path)
            config = load_run(
                config.warm_start, warm_start_overrides(config), f"{config.run}.warm_start"
            )
        except ConfigError as error:
            error.add_note(f"this is the recipe of warm_start={config.warm_start}")
            raise
        configs.append(config)
    return configs


def _check_other_models(config: RunConfig) -> None:
    """The critic's and the teacher's directories. Raises: ConfigError."""
    directories = {}
    if config.uses_critic:
        directories["critic.hf_checkpoint"] = config.critic.hf_checkpoint
    if config.advantage.use_opd and config.teacher.opd_type == "megatron":
        directories["teacher.opd_teacher_load"] = config.teacher.opd_teacher_load
    for key, directory in directories.items():
        if directory is not None:
            path = given_directory(directory, key)
            check_supported(path, key)
            check_weights(path, key)


def _check_model(config: RunConfig, directory: Path) -> None:
    key = "model.source.hf_checkpoint"
    check_supported(directory, key)
    check_weights(directory, key)
    check_tokenizer(directory, key)
    check_stop_ids(config.rollout, config.evaluation.datasets, str(directory))
    check_context_len(config.engine, config.rollout, config.evaluation.datasets, str(directory))
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


def _check_trainer(config: RunConfig, directory: Path) -> None:
    """The trainer's arguments and layout, where they are not the plain ones that any model takes.
    Raises: ConfigError."""
    train = config.train
    layouts = [
        train,
        *(
            [train.model_copy(update={"parallel": config.critic.parallel})]
            if config.critic.parallel
            else []
        ),
    ]
    for each in layouts:
        if each.megatron or each.replays_routing or each.parallel != ParallelConfig():
            check_trainer(directory, config.model, each, deterministic=config.deterministic)


def _check_functions(rollout: RolloutConfig) -> None:
    """Functions that sample, and tools, as they will be called. Raises: ConfigError with the
    signature one should have."""
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


def _check_store(config: RunConfig, home: Path) -> None:
    """One request to a store in S3: address, credentials and bucket; and the branches that the run
    begins with or loads.

    Raises: StoreError; ConfigError for a branch that is not there.
    """
    files = Files(config.store.root or home / "store")
    if files.root.startswith("s3://"):
        files.list(f"branches/{config.run}/config.json")
    branches = {
        "fork_from.branch": config.fork_from and config.fork_from.branch,
        "model.start_from.branch": config.model.start_from and config.model.start_from.branch,
        "debug.load_debug_rollout_data": config.debug.load_debug_rollout_data,
    }
    for key, branch in branches.items():
        if branch is not None and Branches(files).find(branch) is None:
            known = Branches(files).names()
            raise ConfigError(
                "the store has no such run",
                where=key,
                found=branch,
                expected=f"one of {', '.join((nearest(branch, known) or known)[:5])}"
                if known
                else "a run; the store has none",
                do=f"look for it in {files.root}, or set store.root",
            )


def say_if_full(error: RlpipeError, home: Path) -> None:
    """Note on an error that the disk is full: processes that end for want of room cannot say so."""
    folder, free = _room(home)
    if free < FULL_BYTES:
        error.add_note(
            f"the disk is full: {free / 1024**2:.0f} MiB free at {folder}; make room, and the same command goes on"
        )


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
