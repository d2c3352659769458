"""Read the words of a command that chooses a configuration: recipe, slime's flags and overrides.

    arguments, rest = read_words(parsers.train(), sys.argv[1:])
    flags = read_flags(rest)
    apply_flags(arguments, flags)      # sets arguments.recipe, .overrides and .run

The first word may be the recipe. Imports neither torch nor Prefect: `rlpipe config` is quick.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flows.parameters import apply_seed_and_fork
from rlpipe.config.load import home, load_run
from rlpipe.config.smoke import SMOKE
from rlpipe.errors import ConfigError
from rlpipe.slime.command_line import OVERRIDE, ParsedFlags
from rlpipe.slime.flag_keys import BASE, differences, overrides_of
from rlpipe.slime.model_flags import iterations_done

if TYPE_CHECKING:
    from rlpipe.config.run import RunConfig
    from rlpipe.data.prompts import PromptRow


SAVED_ROLLOUTS = "save_debug_rollout_data"
"""Flag that the stored configuration of a run has, if its rollouts are to be loaded by path."""


def option_names(parser: argparse.ArgumentParser) -> list[str]:
    """Return the options of a parser."""
    return [option for action in parser._actions for option in action.option_strings]


def read_words(
    parser: argparse.ArgumentParser, words: Sequence[str]
) -> tuple[argparse.Namespace, list[str]]:
    """Return the parsed options of a command, and the other words: flags and overrides.

    A first other word that is neither a flag nor an override is the recipe.
    """
    own, rest = _split(parser, words)
    arguments = parser.parse_args(own)
    if rest and getattr(arguments, "recipe", "") is None and _is_recipe(rest[0]):
        arguments.recipe = rest.pop(0)
    return arguments, rest


def _split(parser: argparse.ArgumentParser, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split words into the parser's options with their values, and the rest."""
    has_value = {
        option: action.nargs != 0 for action in parser._actions for option in action.option_strings
    }
    own: list[str] = []
    rest: list[str] = []
    left = iter(words)
    for word in left:
        option = word.partition("=")[0]
        (own if option in has_value else rest).append(word)
        if has_value.get(option) and option == word and (value := next(left, None)) is not None:
            own.append(value)
    return own, rest


def _is_recipe(word: str) -> bool:
    return not word.startswith("-") and not OVERRIDE.match(word)


def apply_flags(arguments: argparse.Namespace, flags: ParsedFlags) -> None:
    """Set `recipe`, `overrides` and `run` of the arguments from flags. Raises: ConfigError."""
    arguments.overrides = [*([SMOKE] if arguments.smoke else []), *overrides_of(flags)]
    if arguments.recipe is None:
        if not flags:
            raise ConfigError(
                "nothing to train",
                where="rlpipe train",
                do="give a recipe, or flags such as --hf-checkpoint",
            )
        arguments.recipe = str(BASE)
        arguments.run = arguments.run or _name_of(flags)
    arguments.overrides, arguments.run = apply_seed_and_fork(
        arguments.recipe,
        arguments.overrides,
        arguments.run,
        seed=arguments.seed,
        fork=arguments.fork,
    )
    if flags.own.get("num_epoch") is not None and flags.own.get("num_rollout") is None:
        arguments.overrides.append(
            f"num_rollout={iterations_of(arguments, flags.own['num_epoch'])}"
        )
    if "num_rollout" in flags.own or "num_epoch" in flags.own:
        _leave_out(arguments, iterations_done(flags.own))
    if (path := flags.own.get("load_debug_rollout_data")) is not None:
        _use_saved_rollouts(arguments, path)
    if (fraction := flags.own.get("lr_warmup_fraction")) is not None:
        config = load_run(arguments.recipe, arguments.overrides, arguments.run)
        # As in Megatron: a fraction of the decay, which by default takes the whole training.
        steps = config.train.optimizer.lr_decay_steps or config.total_optimizer_steps
        arguments.overrides.append(f"train.optimizer.lr_warmup_steps={int(fraction * steps)}")


def _name_of(flags: ParsedFlags) -> str:
    """Return the name of the run: its group, its folder or its model."""
    own = flags.own
    folder = own.get("save") or own.get("hf_checkpoint") or "slime"
    return own.get("wandb_group") or Path(folder).name


def _leave_out(arguments: argparse.Namespace, done: int) -> None:
    """Leave out iterations that a run of slime has done. The schedule of all of them stays.

    Raises: ConfigError if no iteration is left.
    """
    if not done:
        return
    config = load_run(arguments.recipe, arguments.overrides, arguments.run)
    if config.num_rollout <= done:
        raise ConfigError(
            "no iteration is left to train",
            where="--num-rollout",
            found=f"{config.num_rollout}, of which {done} are done (--load, --start-rollout-id)",
            expected=f"more than {done}",
            do="give a larger --num-rollout, or --finetune to count from 0",
        )
    optimizer = config.train.optimizer
    if optimizer.lr_decay_style != "constant" and optimizer.lr_decay_steps is None:
        # As in slime: all iterations, also those that train only the critic.
        steps = config.num_rollout * config.num_steps_per_rollout
        arguments.overrides.append(f"train.optimizer.lr_decay_steps={steps}")
    if critic_only := config.critic.num_critic_only_steps:
        left = max(0, critic_only - done)
        arguments.overrides.append(f"critic.num_critic_only_steps={left}")
    arguments.overrides.append(f"num_rollout={config.num_rollout - done}")


def _use_saved_rollouts(arguments: argparse.Namespace, path: str) -> None:
    """Train on the newest run of the store with `--save-debug-rollout-data PATH`, if there is one.

    Raises: ConfigError; StoreError.
    """
    from rlpipe.store.branches import Branches
    from rlpipe.store.objects.files import Files

    config = load_run(arguments.recipe, arguments.overrides, arguments.run)
    branches = Branches(Files(config.store.root or home() / "store"))
    runs = [branches.get(name) for name in branches.names() if name != config.run]
    saved = [run for run in runs if run.config.get("flags", {}).get(SAVED_ROLLOUTS) == path]
    if saved:
        name = max(saved, key=lambda run: run.created).branch
        arguments.overrides.append(f"debug.load_debug_rollout_data={json.dumps(name)}")


def iterations_of(arguments: argparse.Namespace, epochs: int) -> int:
    """Return the number of iterations that draw every kept prompt `epochs` times.

    The last prompts of an epoch that fill no batch belong to the next epoch.
    """
    from rlpipe.data.prompts import load_prompts

    config = load_run(arguments.recipe, [*arguments.overrides, "num_rollout=0"], arguments.run)
    if config.data.prompts is None:
        raise ConfigError(
            "a user data source has no epochs",
            where="--num-epoch",
            found=epochs,
            do="give --num-rollout",
        )
    return (
        epochs
        * num_drawn(config, load_prompts(config.data.prompts, image_key=config.data.image_key))
        // config.rollout.rollout_batch_size
    )


def num_drawn(config: RunConfig, rows: Sequence[PromptRow]) -> int:
    """Return the number of prompts of an epoch.

    If over-long prompts are dropped, every row is tokenized to count the others.
    Raises: ConfigError without a model directory or a tokenizer, or if every row is dropped;
    DataError for a wrong row.
    """
    if config.data.overlong_prompts != "drop":
        return len(rows)
    from rlpipe.data.image_reader import load_image_reader
    from rlpipe.data.source import DataSource
    from rlpipe.data.tokenizer import load_tokenizer
    from rlpipe.model_dir import model_directory, prompt_context_len
    from rlpipe.system.model_files import read_object

    directory = model_directory(config.model, home(), seed=config.seed)
    longest = prompt_context_len(
        config.rollout, read_object(Path(directory) / "config.json", "model.source")
    )
    if not any(
        (longest, config.data.rollout_max_prompt_len, config.rollout.rollout_max_context_len)
    ):
        return len(rows)
    tokenizer = load_tokenizer(
        directory, trust_remote_code=getattr(config.model.source, "trust_remote_code", False)
    )
    return len(
        DataSource(
            rows,
            tokenizer,
            config.data,
            config.rollout,
            config.run,
            model_context_len=longest,
            images=load_image_reader(directory),
        )
    )


def notes(flags: ParsedFlags) -> list[str]:
    """Return notes on flags that were accepted but act differently than in slime."""
    lines = [
        f"note: a secret on the command line is not stored; the run gets it as {variable}"
        for variable in flags.secrets
    ]
    if flags.neutral:
        names = " ".join(flag.option for flag in flags.neutral)
        lines.append(f"note: flags without effect (rlpipe flags gives reasons): {names}")
    if flags.own.get("colocate") and (engines := flags.own.get("rollout_num_gpus")) is not None:
        lines.append(
            f"note: --colocate with --rollout-num-gpus {engines}: "
            f"the engines use the first {engines} GPUs of the trainer"
        )
    return [*lines, *(f"note: {difference}" for difference in differences(flags))]
