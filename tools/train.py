"""Train on this machine, a recipe or a command line in slime's style:

    python -m tools.train --recipe spell_backward [--run NAME] [dotted.key=value ...] python -m
    tools.train ${MODEL_ARGS[@]} ${CKPT_ARGS[@]} ${ROLLOUT_ARGS[@]} ... [--run NAME]
    [dotted.key=value ...]

slime's own flags, Megatron's bare and SGLang's as `--sglang-*` become keys of the configuration
(`python -m tools.flags` lists them); without a recipe they start from slime's defaults, with one
they change it. Uses the Prefect server of the current profile if there is one, else one of its own
for as long as the run takes. Ctrl-C stops it; the same command goes on from the last committed
stage.
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
"""Options of this command itself, and whether a value follows; every other flag is one of the
table."""


def main() -> int:
    """Parse, check, run. Exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted, 143 asked to
    stop (SIGTERM)."""
    mine, rest = split(sys.argv[1:])
    arguments = parse_arguments(mine)
    try:
        use_home(arguments.home)
        given = read_flags(rest, also=OPTIONS)
        settle(arguments, given)
        config = load_run(arguments.recipe, arguments.overrides, arguments.run)
        warnings = unused_keys(arguments.recipe, arguments.overrides, arguments.run)
        if not arguments.dump_config:
            check(config, home())
    except RlpipeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    for note in [*notes(given), *(f"warning: {warning}" for warning in warnings)]:
        print(note, file=sys.stderr)
    if arguments.dump_config:
        from rlpipe.config.load import dump

        print(dump(config), end="")
        return 0
    return drive(arguments)


def split(
    words: Sequence[str], options: Mapping[str, bool] = OPTIONS
) -> tuple[list[str], list[str]]:
    """A command line as (a command's own options with their values, everything else), both in
    order."""
    mine: list[str] = []
    rest: list[str] = []
    left = iter(words)
    for word in left:
        option = word.partition("=")[0]
        (mine if option in options else rest).append(word)
        if options.get(option) and option == word and (value := next(left, None)) is not None:
            mine.append(value)
    return mine, rest


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """The options of this command itself."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.train",
        description="Train a recipe, or what flags in slime's style describe, on this machine.",
        usage="%(prog)s (--recipe RECIPE | --hf-checkpoint ... flags of slime) [options] [dotted.key=value ...]",
        epilog="Flags of slime, Megatron and SGLang (--sglang-*): python -m tools.flags. Overrides: train.optimizer.lr=1e-5. "
        f"A model's preset under the recipe: preset=NAME, a YAML file or one of: {', '.join(presets())}",
        allow_abbrev=False,
    )
    parser.add_argument("--recipe", help=f"a YAML file, or one of: {', '.join(recipes())}")
    parser.add_argument(
        "--run", help="name of the run (default: the recipe's, or the folder of --save)"
    )
    parser.add_argument(
        "--home", help=f"where everything is kept (default: ${HOME_VARIABLE} or ./runs)"
    )
    parser.add_argument(
        "--seed",
        type=int,
        help="another seed, as a run of its own: <recipe>-seed<N> unless --run names it",
    )
    parser.add_argument(
        "--fork",
        metavar="RUN[@K]",
        help="go on from iteration K of that run (default: its newest), as a new run",
    )
    parser.add_argument(
        "--takeover",
        action="store_true",
        help="replace the process that drives this run now, wherever it is",
    )
    parser.add_argument(
        "--dump-config", action="store_true", help="print the resolved configuration and stop"
    )
    return parser.parse_args(words)


def settle(arguments: argparse.Namespace, given: ParsedFlags) -> None:
    """Set `recipe`, `overrides` and `run` of the arguments, as the flow takes them. Raises:
    ConfigError."""
    arguments.overrides = overrides_of(given)
    if arguments.recipe is None:
        if not given:
            raise ConfigError(
                "what shall be trained?",
                where="tools.train",
                do="give --recipe, or flags such as --hf-checkpoint",
            )
        arguments.recipe = str(BASE)
        arguments.run = (
            arguments.run
            or given.own.get("wandb_group")
            or Path(given.own.get("save", "slime")).name
        )
    arguments.overrides, arguments.run = apply_seed_and_fork(
        arguments.recipe,
        arguments.overrides,
        arguments.run,
        seed=arguments.seed,
        fork=arguments.fork,
    )
    if given.own.get("num_epoch") is not None and given.own.get("num_rollout") is None:
        arguments.overrides.append(
            f"num_rollout={iterations_of(arguments, given.own['num_epoch'])}"
        )


def iterations_of(arguments: argparse.Namespace, epochs: int) -> int:
    """Iterations that draw every prompt that is kept so many times.

    Of an epoch's last prompts, those that fill no batch wait for the next.
    """
    from rlpipe.data.prompts import load_prompts

    config = load_run(arguments.recipe, [*arguments.overrides, "num_rollout=0"], arguments.run)
    if config.data.prompts is None:
        raise ConfigError(
            "a data source of your own has no epochs",
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
    """Prompts of an epoch. Where over-long ones are dropped, every row is tokenized to count the
    others.

    Raises: ConfigError without a model directory or a tokenizer, or if every row is dropped;
    DataError for a row that is wrong.
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


def notes(given: ParsedFlags) -> list[str]:
    """What is to be said of flags that were taken, but do not do what they do in slime."""
    said = []
    if given.neutral:
        names = " ".join(flag.option for flag in given.neutral)
        said.append(f"note: these change nothing here (python -m tools.flags says why): {names}")
    if given.own.get("colocate") and (engines := given.own.get("rollout_num_gpus")) is not None:
        said.append(
            f"note: --colocate with --rollout-num-gpus {engines}: so many for the engines, the trainer's first"
        )
    return [*said, *(f"note: {difference}" for difference in differences(given))]


def drive(arguments: argparse.Namespace) -> int:
    """Run the flow to its end in this process."""

    def start() -> Awaitable[dict[str, Any]]:
        from flows.train import train

        return train(arguments.recipe, arguments.overrides, arguments.run, arguments.takeover)

    code, summary = finish(start)
    if summary is None:
        return code
    folder = home() / summary["run"]
    if summary["accuracy_before"] is not None:
        print(
            f"{summary['run']}: accuracy {summary['accuracy_before']:.3f} → {summary['accuracy_after']:.3f}"
        )
    print(f"{summary['run']}: see {folder}/report.html")
    return code


def finish(start: Callable[[], Awaitable[dict[str, Any]]]) -> tuple[int, dict[str, Any] | None]:
    """Run a flow in this process, under a Prefect server: (exit code, its answer if it came to its
    end)."""
    from tools.local_prefect import local_prefect

    if sys.__stderr__ is not None:
        faulthandler.enable(
            file=sys.__stderr__
        )  # user code that crashes in this process leaves a stack
    try:
        with local_prefect(home()):
            return run_flow(start)
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from the last committed stage", file=sys.stderr)
        return 130, None
    except RlpipeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1, None


def run_flow(start: Callable[[], Awaitable[dict[str, Any]]]) -> tuple[int, dict[str, Any] | None]:
    """As `finish`, under the server that there is. Raises: KeyboardInterrupt, RlpipeError."""
    from flows.stopping import Preempted
    from rlpipe.actors.ray.local_ray import disconnect
    from tools.local_prefect import drain

    async def run() -> dict[str, Any]:
        try:
            return await start()
        finally:
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
