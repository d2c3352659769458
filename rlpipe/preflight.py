"""Check a configuration before anything starts: `check`. A typo costs a second, not a minute.

The longest prompts are counted here. All rows are encoded later, in the generator.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

from rlpipe.config.data import (
    FilePrompts,
    MathReward,
    NoReward,
    PromptSource,
    PythonReward,
    RewardConfig,
    RuleReward,
)
from rlpipe.config.hooks import load_hook
from rlpipe.config.import_check import check_imports
from rlpipe.config.load import find_recipe, load_run, require_files, warm_start_overrides
from rlpipe.config.megatron_hooks import MegatronHooks
from rlpipe.config.model import HuggingFaceModel, MadeModel
from rlpipe.config.peft_directory import adapter_path, check_adapter
from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.run import RunConfig
from rlpipe.config.store_root import canonical_root
from rlpipe.config.train import ParallelConfig
from rlpipe.config.weight_file_hooks import check_weight_file_hooks
from rlpipe.data.chat_templates import check_template
from rlpipe.data.hub_commits import as_recorded
from rlpipe.data.prompt_lengths import check_prompt_lengths, source_keys
from rlpipe.data.prompts import PromptRow, check_columns, load_prompts
from rlpipe.data.tokens import require_text
from rlpipe.engines.megatron.bridges.supported import check_supported
from rlpipe.engines.megatron.preflight import check_trainer
from rlpipe.engines.sglang.served_models import check_served
from rlpipe.errors import ConfigError, DataError, ResourceError, RlpipeError
from rlpipe.lineage.continuation import check_same_run
from rlpipe.lineage.named_runs import require_run
from rlpipe.lineage.source_weights import (
    adam_directory,
    check_shapes,
    local_directory,
    weight_sources,
)
from rlpipe.model_dir import (
    check_context_len,
    check_maker,
    check_stop_ids,
    model_directory,
)
from rlpipe.observe.log_functions import LogFunctions
from rlpipe.rewards.answers import require_text_label
from rlpipe.rewards.scorer import Scorer
from rlpipe.rewards.user_rewards import needed_columns
from rlpipe.rollout.environments.loaded import check_environment
from rlpipe.rollout.hooks.generate_function import SampleHooks, load_generate
from rlpipe.rollout.hooks.rollout_function import load_rollout_function
from rlpipe.rollout.image_checks import checked_image_reader
from rlpipe.rollout.tools import load_tools
from rlpipe.slime.args import slime_args
from rlpipe.store.branches import Branches
from rlpipe.store.objects.files import Files
from rlpipe.store.routed_experts import routed_width
from rlpipe.store.run_file import find_run
from rlpipe.system.model_files import check_tokenizer, check_weights

MIN_FREE_BYTES = 512 * 1024**2
FULL_BYTES = 16 * 1024**2


def check(config: RunConfig, home: Path, *, planned: Collection[str] = ()) -> None:
    """Check folders, ports, prompt rows, hooks, model directories, the store and free disk space.

    The runs of warm starts are checked too. User files are imported here only after a separate
    process has imported them (`rlpipe.config.import_check`). `planned`: runs that will be in the
    store before this one starts.
    Raises: DataError with file and line; ConfigError with the key; StoreError; ResourceError.
    """
    for run in (config, *_warm_starts(config)):
        _check_run(run, home, planned)


def _check_run(config: RunConfig, home: Path, planned: Collection[str]) -> None:
    _check_writable(config, home)
    # User files are imported in another process while this one reads the prompts.
    with check_imports(config, config.resources.import_timeout_s) as importing:
        datasets = config.evaluation.datasets
        rewards = [config.reward, *(dataset.reward or config.reward for dataset in datasets)]
        sources = [config.data.prompts, *(dataset.prompts for dataset in datasets)]
        names = ["", *(f"evaluation.datasets of name {dataset.name}" for dataset in datasets)]
        rows = [
            _checked_rows(source, name, key, config.data.image_key) if source else []
            for source, name, key in zip(sources, names, source_keys(config), strict=True)
        ]
        importing.wait()
    sampled = [config.rollout.model_copy(update=dataset.sampling()) for dataset in datasets]
    for reward, rollout, checked in zip(rewards, [config.rollout, *sampled], rows, strict=True):
        _check_reward(reward, checked, config)
        renders = config.data.apply_chat_template or rollout.samples_by_user_function
        if checked and not renders:
            require_text(checked[0].prompt, checked[0].where)
    _check_algorithm_functions(config)
    MegatronHooks(config.train)
    check_weight_file_hooks(config.sync)
    LogFunctions(config.observe)
    directory = None
    if isinstance(config.model.source, HuggingFaceModel):
        directory = Path(model_directory(config.model, home, seed=config.seed))
        _check_model(config, directory)
        check_template(config, directory, rows)
        check_prompt_lengths(config, rows, directory)
        _check_trainer(config, directory)
    elif isinstance(config.model.source, MadeModel):
        check_maker(config.model, home, seed=config.seed)
        if config.data.apply_chat_template:
            # Only the made tokenizer shows its template. The run needs the model in any case.
            check_template(
                config, Path(model_directory(config.model, home, seed=config.seed)), rows
            )
    _check_other_models(config, directory, home)
    _check_functions(config.rollout)
    for number, dataset in enumerate(datasets):
        if path := dataset.custom_generate_function_path:
            load_generate(path, f"evaluation.datasets.{number}.custom_generate_function_path")
    _check_store(config, home, planned)
    _check_free_space(config, home)


def _check_writable(config: RunConfig, home: Path) -> None:
    """Check that all folders are writable and the Prometheus port is free.

    Raises: ConfigError, ResourceError.
    """
    folders = {"--home": home, f"run={config.run}": home / config.run}
    if store := _local_store(config, home):
        folders["store.root"] = store
    folders |= _weight_folders(config)
    for key, folder in folders.items():
        _check_folder(key, folder)
    if other := _same_except_case(home / config.run):
        raise ConfigError(
            "another run has this name in other capitals, and this file system ignores capitals",
            where=f"run={config.run}",
            found=other,
            expected="a name that differs in more than capitals",
            do="choose another name: --run NAME",
        )
    # A run that exists may hold the port itself, in a process that is about to be taken over.
    if not (home / config.run / "run.json").exists():
        _check_port(config)


def _weight_folders(config: RunConfig) -> dict[str, Path]:
    """Return the folders of weight files that this machine uses, by key."""
    sync = config.sync
    other_machines = config.resources.ray_address or config.resources.external_engines
    if not (config.needs_engines and sync.through_files) or other_machines:
        return {}
    folders = {
        "sync.update_weight_disk_dir": sync.update_weight_disk_dir,
        "sync.update_weight_local_checkpoint_dir": sync.update_weight_local_checkpoint_dir,
    }
    return {
        key: Path(folder.removeprefix("file://"))
        for key, folder in folders.items()
        if folder is not None and not folder.startswith("s3://")
    }


def _check_port(config: RunConfig) -> None:
    """Raises: ResourceError if the Prometheus port is taken."""
    host = config.observe.prometheus_host
    port = config.observe.prometheus_port
    if port is None:
        return
    with socket.socket() as probe:
        # A port of a run that has just ended can be used at once.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ResourceError(
                "cannot listen on this port",
                where="observe.prometheus_port",
                found=f"{host}:{port}: {error.strerror or error}",
                do="choose another port, or another address in observe.prometheus_host",
            ) from error


def _check_folder(key: str, folder: Path) -> None:
    """Check that a folder is writable or can be made. Raises: ConfigError."""
    existing = folder
    while not os.path.lexists(existing) and existing != existing.parent:
        existing = existing.parent
    try:
        if not existing.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "not a folder")
        with tempfile.TemporaryDirectory(prefix=".rlpipe-", dir=existing):
            pass
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return  # `_check_free_space` raises
        raise ConfigError(
            "this folder is not writable",
            where=key,
            found=f"{existing}: {error.strerror or error}",
            expected="a folder that this user can write to, or the name of a new one",
            do=f"choose another folder in {key}"
            if key.startswith("sync.")
            else "choose another folder: --home FOLDER for everything, store.root for the store",
        ) from error


def _same_except_case(folder: Path) -> str | None:
    """Return the stored name of an existing folder if it differs from `folder` in capitals.

    That happens on file systems that ignore capitals, as on macOS.
    """
    if not folder.exists() or folder.is_symlink():
        return None
    names = [entry.name for entry in folder.parent.iterdir()]
    if folder.name in names:
        return None
    return next((name for name in names if name.casefold() == folder.name.casefold()), None)


def _warm_starts(config: RunConfig) -> list[RunConfig]:
    """Return the configurations of the warm start, of its own warm start, and so on.

    Raises: ConfigError.
    """
    seen: list[Path] = []
    configs: list[RunConfig] = []
    while config.warm_start:
        try:
            path = find_recipe(config.warm_start).resolve()
            if path in seen:
                raise ConfigError(
                    "the warm starts form a cycle",
                    where=str(path),
                    found=" → ".join(map(str, (*seen, path))),
                    do="remove warm_start from one of these recipes",
                )
            seen.append(path)
            overrides = warm_start_overrides(config)
            require_files(config.warm_start, overrides)
            config = load_run(config.warm_start, overrides, f"{config.run}.warm_start")
        except ConfigError as error:
            error.add_note(f"in the recipe of warm_start={config.warm_start}")
            raise
        configs.append(config)
    return configs


def _check_other_models(config: RunConfig, model_dir: Path | None, home: Path) -> None:
    """Check the weights of reference, critic and teacher, and the optimizer state to continue.

    Megatron checkpoints are converted here. `model_dir`: None for a model that is not made yet;
    then Megatron checkpoints wait for the start. Raises: ConfigError; errors of the conversion.
    """
    sources = weight_sources(config)
    if model_dir is not None:
        for source in sources.values():
            adam_directory(source, str(model_dir), home)
    sources.pop("policy", None)
    if sources.pop("adapter", None) and config.model.adapter and config.train.lora:
        check_adapter(adapter_path(config.model.adapter), config.train.lora)
    for role, source in sources.items():
        if source.checkpoint is not None and model_dir is None:
            continue
        path = Path(local_directory(source, str(model_dir), home))
        check_supported(path, source.key)
        check_weights(path, source.key)
        if role == "reference" and model_dir is not None:
            check_shapes(path, model_dir, source.key)


def _check_model(config: RunConfig, directory: Path) -> None:
    key = "model.source.hf_checkpoint"
    check_supported(directory, key)
    check_weights(directory, key)
    check_tokenizer(directory, key)
    check_stop_ids(config.rollout, config.evaluation.datasets, str(directory))
    check_context_len(config.engine, config.rollout, config.evaluation.datasets, str(directory))
    model = json.loads((directory / "config.json").read_text())
    checked_image_reader(config, directory)
    if config.train.use_rollout_routing_replay:
        routed_width(model)
    resources = config.resources
    # Engines of a Ray cluster or of the user may run on machines with GPUs.
    if config.needs_engines and not (resources.ray_address or resources.external_engines):
        check_served(
            model["model_type"],
            f"{key}: {directory}/config.json",
            trusts_code=getattr(config.model.source, "trust_remote_code", False),
        )
    quantization = model.get("quantization_config")
    if config.needs_engines and quantization and not config.engine.quantization:
        is_dict = isinstance(quantization, dict)
        method = quantization.get("quant_method") if is_dict else quantization
        raise ConfigError(
            "engines would start with quantized weights, and get bf16 weights from the trainer",
            where="engine.quantization",
            found=f"none, and {method} in the model's config.json",
            do="write a bf16 directory with `rlpipe convert hf2dist` and `rlpipe convert dist2hf`"
            if method == "mxfp4"
            else "set engine.quantization=fp8, or use the model's bf16 directory",
        )


def _check_trainer(config: RunConfig, directory: Path) -> None:
    """Check arguments and layout of trainer and critic. Raises: ConfigError."""
    layouts = [config.train]
    if config.critic.parallel:
        layouts.append(config.train.model_copy(update={"parallel": config.critic.parallel}))
    for train in layouts:
        # Without these the trainer takes every model, and the check imports Megatron.
        if (
            train.megatron
            or train.replays_routing
            or train.lora
            or (train.parallel != ParallelConfig())
        ):
            check_trainer(directory, config.model, train, deterministic=config.deterministic)


def _check_algorithm_functions(config: RunConfig) -> None:
    """Load the user functions of advantages and losses, if any. Raises: ConfigError."""
    parts = (config.advantage, config.train.loss)
    if any(part.hooks for part in parts):
        # Imports torch, for more than a second. Most runs have no such function.
        from rlpipe.algorithms.custom import check

        check(*parts)


def _check_functions(rollout: RolloutConfig) -> None:
    """Check sampling functions and tools. Raises: ConfigError with the expected signature."""
    if path := rollout.custom_generate_function_path:
        load_generate(path)
    for key in ("rollout_function_path", "eval_function_path"):
        if path := getattr(rollout, key):
            load_rollout_function(path, f"rollout.{key}")
    SampleHooks(rollout.rollout_sample_hook_path)
    load_tools(rollout.tools, timeout_s=rollout.tool_timeout_s)
    if rollout.environment is not None:
        check_environment(rollout.environment)


def _checked_rows(
    source: PromptSource, held_out: str, key: str, image_key: str | None
) -> Sequence[PromptRow]:
    """Check the rows of a source and return them; of generated ones only the first.

    `held_out` names a held-out set in errors; "" for the prompts of training.
    `key`: of the source. `image_key`: as `load_prompts`.
    """
    if isinstance(source, FilePrompts):
        try:
            return load_prompts(source, key=key, image_key=image_key)
        except DataError as error:
            if held_out:
                error.add_note(f"in {held_out}; flags: --eval-prompt-data, --eval-input-key, ...")
            raise
    return load_prompts(source.model_copy(update={"size": 1, "exclude": ()}), key=key)


def _check_reward(reward: RewardConfig, rows: Sequence[PromptRow], config: RunConfig) -> None:
    """Check that the reward can be called for these rows. Raises: ConfigError; DataError."""
    if not isinstance(reward.function, NoReward):
        Scorer(reward.function, slime_args(config))
    if isinstance(reward.function, PythonReward) and rows:
        path = reward.function.path
        check_columns(needed_columns(reward.function), path, rows[0], config.data.prompts)
    if isinstance(reward.function, RuleReward | MathReward) and reward.function.type != "random":
        for row in rows:
            require_text_label(row.label, row.where)
    if reward.custom_reward_post_process_path is not None:
        load_hook(reward.custom_reward_post_process_path)


def _check_store(config: RunConfig, home: Path, planned: Collection[str]) -> None:
    """Check that the store answers, and has the branches that the run starts from or loads.

    A run of this name in the store must have an equal configuration: it would be continued.
    Raises: StoreError; ConfigError.
    """
    files = Files(config.store.root or home / "store")
    # One request checks address, credentials and bucket.
    if files.root.startswith("s3://"):
        files.list(f"branches/{config.run}/config.json")
    branches = {
        "fork_from.branch": config.fork_from and config.fork_from.branch,
        "model.start_from.branch": config.model.start_from and config.model.start_from.branch,
        "debug.load_debug_rollout_data": config.debug.load_debug_rollout_data,
    }
    for key, branch in branches.items():
        if branch is not None and branch not in planned:
            require_run(files, branch, where=key)
    if Branches(files).find(config.run) is not None:
        check_same_run(Branches(files), as_recorded(config, home))
    else:
        _check_folder_is_not_of_another_store(config.run, home, files)


def _check_folder_is_not_of_another_store(run: str, home: Path, files: Files) -> None:
    """A run of this name in another store has its report and logs in the same folder.

    Raises: ConfigError.
    """
    recorded = find_run(home, run)
    if recorded is None or (store := Files(recorded.store)).root == files.root:
        return
    is_s3 = store.root.startswith("s3://")
    server = f" (of `rlpipe up`: start it, then `. {home}/.up/env`)" if is_s3 else ""
    raise ConfigError(
        "the folder of the run belongs to a run of another store",
        where=f"run={run}",
        found=f"{home / run} is of {store.root}, and this start uses {files.root}",
        expected="one store for the runs of one name",
        do=f"continue that run: store.root={recorded.store}{server}; "
        "or start another run: --run NEW",
    )


def note_full_disk(error: RlpipeError, home: Path) -> None:
    """Add a note to an error if the disk is full.

    A process that dies of a full disk often reports another error.
    """
    folder, free_bytes = _free_space(home)
    if free_bytes < FULL_BYTES:
        error.add_note(
            f"the disk is full: {free_bytes / 1024**2:.0f} MiB free at {folder}; "
            "free disk space and run the same command again"
        )


def _free_space(home: Path) -> tuple[Path, int]:
    """Return the nearest existing folder, and the free bytes on its disk."""
    folder = home
    while not folder.exists():
        folder = folder.parent
    return folder, shutil.disk_usage(folder).free


def _check_free_space(config: RunConfig, home: Path) -> None:
    """Check the disks of the home and of a local store. Raises: ResourceError."""
    disks = {"--home": home}
    if store := _local_store(config, home):
        disks["store.root"] = store
    for key, place in disks.items():
        folder, free_bytes = _free_space(place)
        if free_bytes < MIN_FREE_BYTES:
            raise ResourceError(
                f"too little free disk space ({key})",
                where=str(folder),
                found=f"{free_bytes / 1024**2:.0f} MiB free",
                expected=f"at least {MIN_FREE_BYTES / 1024**2:.0f} MiB",
                do="free disk space, or use another disk: RLPIPE_HOME or --home for everything, "
                "store.root for the store",
            )


def _local_store(config: RunConfig, home: Path) -> Path | None:
    """Return the folder of the store; None for a store in S3."""
    root = canonical_root(config.store.root or str(home / "store"))
    return Path(root.removeprefix("file://")) if root.startswith("file://") else None
