"""Train on this machine, from a recipe or from a command line in slime's style.

    python -m tools.train --recipe spell_backward [--run NAME] [dotted.key=value ...]
    python -m tools.train ${MODEL_ARGS[@]} ${CKPT_ARGS[@]} ${ROLLOUT_ARGS[@]} ... [--run NAME]

Flags of slime, Megatron's under their own names and SGLang's as `--sglang-*` become configuration
keys (`python -m tools.flags` lists them). Without a recipe they start from slime's defaults; with
one they change the recipe. The command uses the Prefect server of the current profile, or starts
one for the run. Ctrl-C stops the run; the same command continues after the last finished stage.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flows.parameters import apply_seed_and_fork
from rlpipe.config.load import (
    HOME_VARIABLE,
    home,
    load_run,
    presets,
    recipes,
    unused_keys,
    use_home,
)
from rlpipe.config.run import RunConfig
from rlpipe.data.prompts import PromptRow
from rlpipe.errors import ConfigError, RlpipeError
from rlpipe.model_dir import model_directory, prompt_context_len, read_object
from rlpipe.preflight import check
from rlpipe.slime.command_line import ParsedFlags, read_flags
from rlpipe.slime.flag_keys import BASE, differences, overrides_of

TAKES_A_VALUE = {"--recipe": True, "--run": True, "--home": True, "--seed": True, "--fork": True}
OPTIONS = {
    **TAKES_A_VALUE,
    "--takeover": False,
    "--dump-config": False,
    "--help": False,
    "-h": False,
}
"""Options of this command → True if a value follows. Every other flag is in slime's table."""


def main() -> int:
    """Run the command.

    Exit codes: 0 done, 1 failed, 2 wrong input, 130 interrupted, 143 stopped by SIGTERM.
    """
    own, rest = split(sys.argv[1:])
    arguments = parse_arguments(own)
    try:
        use_home(arguments.home)
        flags = read_flags(rest, also=OPTIONS)
        apply_flags(arguments, flags)
        config = load_run(arguments.recipe, arguments.overrides, arguments.run)
        warnings = unused_keys(arguments.recipe, arguments.overrides, arguments.run)
        # --dump-config must work on a machine without the model or GPUs.
        if not arguments.dump_config:
            check(config, home())
    except RlpipeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    for note in [*notes(flags), *(f"warning: {warning}" for warning in warnings)]:
        print(note, file=sys.stderr)
    if arguments.dump_config:
        from rlpipe.config.load import dump

        print(dump(config), end="")
        return 0
    return drive(arguments)


def split(
    words: Sequence[str], options: Mapping[str, bool] = OPTIONS
) -> tuple[list[str], list[str]]:
    """Split a command line into a command's own options with their values, and the rest."""
    own: list[str] = []
    rest: list[str] = []
    left = iter(words)
    for word in left:
        option = word.partition("=")[0]
        (own if option in options else rest).append(word)
        if options.get(option) and option == word and (value := next(left, None)) is not None:
            own.append(value)
    return own, rest


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Parse the options of this command."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.train",
        description="Train on this machine, from a recipe or from flags in slime's style.",
        usage="%(prog)s (--recipe RECIPE | --hf-checkpoint ... flags of slime) [options] "
        "[dotted.key=value ...]",
        epilog="Flags of slime, Megatron and SGLang (--sglang-*): python -m tools.flags. "
        "Overrides: train.optimizer.lr=1e-5. A model's preset below the recipe: preset=NAME, "
        f"a YAML file or one of: {', '.join(presets())}",
        allow_abbrev=False,
    )
    parser.add_argument("--recipe", help=f"a YAML file, or one of: {', '.join(recipes())}")
    parser.add_argument(
        "--run", help="name of the run (default: the recipe's, or the folder of --save)"
    )
    parser.add_argument(
        "--home", help=f"directory of all runs (default: ${HOME_VARIABLE} or ./runs)"
    )
    parser.add_argument(
        "--seed",
        type=int,
        help="other seed, for a separate run: <recipe>-seed<N> unless --run gives a name",
    )
    parser.add_argument(
        "--fork",
        metavar="RUN[@K]",
        help="start a new run from iteration K of that run (default: its newest)",
    )
    parser.add_argument(
        "--takeover",
        action="store_true",
        help="replace the process that drives this run now, on any machine",
    )
    parser.add_argument(
        "--dump-config", action="store_true", help="print the resolved configuration and stop"
    )
    return parser.parse_args(words)


def apply_flags(arguments: argparse.Namespace, flags: ParsedFlags) -> None:
    """Set `recipe`, `overrides` and `run` of the arguments from flags. Raises: ConfigError."""
    arguments.overrides = overrides_of(flags)
    if arguments.recipe is None:
        if not flags:
            raise ConfigError(
                "nothing to train",
                where="tools.train",
                do="give --recipe, or flags such as --hf-checkpoint",
            )
        arguments.recipe = str(BASE)
        arguments.run = (
            arguments.run
            or flags.own.get("wandb_group")
            or Path(flags.own.get("save", "slime")).name
        )
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
        * num_drawn(config, load_prompts(config.data.prompts))
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
    from rlpipe.data.source import DataSource
    from rlpipe.data.tokens import load_tokenizer

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
            rows, tokenizer, config.data, config.rollout, config.run, model_context_len=longest
        )
    )


def notes(flags: ParsedFlags) -> list[str]:
    """Return notes on flags that were accepted but act differently than in slime."""
    lines = []
    if flags.neutral:
        names = " ".join(flag.option for flag in flags.neutral)
        lines.append(f"note: flags without effect (python -m tools.flags gives reasons): {names}")
    if flags.own.get("colocate") and (engines := flags.own.get("rollout_num_gpus")) is not None:
        lines.append(
            f"note: --colocate with --rollout-num-gpus {engines}: "
            f"the engines use the first {engines} GPUs of the trainer"
        )
    return [*lines, *(f"note: {difference}" for difference in differences(flags))]


def drive(arguments: argparse.Namespace) -> int:
    """Run the train flow to its end in this process."""

    def start() -> Awaitable[dict[str, Any]]:
        from flows.train import train

        return train(arguments.recipe, arguments.overrides, arguments.run, arguments.takeover)

    code, summary = finish(start)
    if summary is None:
        return code
    folder = home() / summary["run"]
    if summary["accuracy_before"] is not None:
        print(
            f"{summary['run']}: accuracy {summary['accuracy_before']:.3f} "
            f"→ {summary['accuracy_after']:.3f}"
        )
    print(f"{summary['run']}: see {folder}/report.html")
    return code


def finish(start: Callable[[], Awaitable[dict[str, Any]]]) -> tuple[int, dict[str, Any] | None]:
    """Run a flow under a Prefect server; return the exit code and the result, if any."""
    from tools.local_prefect import local_prefect

    if sys.__stderr__ is not None:
        # User code that crashes this process leaves a stack trace.
        faulthandler.enable(file=sys.__stderr__)
    try:
        with local_prefect(home()):
            return run_flow(start)
    except KeyboardInterrupt:
        print(
            "\nstopped; the same command continues after the last finished stage", file=sys.stderr
        )
        return 130, None
    except RlpipeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1, None


def run_flow(start: Callable[[], Awaitable[dict[str, Any]]]) -> tuple[int, dict[str, Any] | None]:
    """Run a flow under the running server. Raises: KeyboardInterrupt, RlpipeError."""
    from flows.stopping import Preempted
    from rlpipe.actors.ray.local_ray import disconnect
    from tools.local_prefect import drain

    async def run() -> dict[str, Any]:
        try:
            return await start()
        finally:
            # Events and logs of the last seconds would be lost with the server.
            await drain()

    try:
        return 0, asyncio.run(run())
    except Preempted as error:
        print(error, file=sys.stderr)
        return 143, None
    finally:
        disconnect()


if __name__ == "__main__":
    sys.exit(main())
