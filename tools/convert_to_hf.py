"""A checkpoint as a Hugging Face directory, by the ranks that train it: the training command, under
torchrun.

    torchrun --nproc_per_node TP×PP tools/convert_to_hf.py --load CKPT --output-dir OUT
    [--check-same] …training's other arguments

The ranks load the checkpoint in the layout that the arguments say, and write what a weight push
would send to the engines, under the same names. So it reads whatever these arguments train, the
older `torch` format in its own layout too, and needs the GPUs that the weights need. `--check-same`
compares every tensor with `--hf-checkpoint`, bit for bit. A recipe does as well: --recipe.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rlpipe.config.load import home, load_run
from rlpipe.config.run import RunConfig
from rlpipe.errors import ConfigError
from rlpipe.model_dir import model_directory
from rlpipe.slime.command_line import read_flags
from rlpipe.slime.flag_keys import BASE, overrides_of
from rlpipe.system.ports import free_port
from tools.conversion import ended
from tools.train import split

if TYPE_CHECKING:
    from rlpipe.engines.megatron.model.build import ScoringModel

OPTIONS = {
    **dict.fromkeys(("--load", "--output-dir", "--ckpt-step", "--recipe"), True),
    **dict.fromkeys(("--check-same", "--force", "-f", "--help", "-h"), False),
}
START_S = 600.0


def main() -> int:
    """Exit codes: 0 done, 1 not the same as the original (--check-same), 2 bad input, 130
    interrupted."""
    mine, rest = split(sys.argv[1:], OPTIONS)
    arguments = parse_arguments(mine)
    return ended(lambda: convert(arguments, configuration(arguments.recipe, rest)))


def configuration(recipe: str | None, words: list[str]) -> RunConfig:
    """The run that these arguments of training describe. Raises: ConfigError."""
    given = read_flags(words, also=OPTIONS)
    if recipe is None and not given:
        raise ConfigError(
            "which model?",
            where="tools/convert_to_hf.py",
            do="give training's arguments, or --recipe",
        )
    given.own.pop("ref_load", None)  # training would refuse it; here --load alone names the weights
    return load_run(recipe or str(BASE), overrides_of(given), "convert")


def convert(arguments: argparse.Namespace, config: RunConfig) -> int:
    """Do it, as one of the ranks. Raises: ConfigError, DataError, TrainerError, StoreFull."""
    from rlpipe.engines.megatron import platform
    from rlpipe.engines.megatron.checkpoint.conversion.hf_files import different
    from rlpipe.engines.megatron.checkpoint.conversion.parallel_loading import (
        load_checkpoint_weights,
    )
    from rlpipe.engines.megatron.checkpoint.export import save_hf
    from rlpipe.engines.megatron.model.build import build_scoring_model
    from rlpipe.engines.megatron.process_groups import close_groups, open_groups

    rank = int(os.environ.get("RANK", "0"))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    parallel = config.train.parallel
    if world % parallel.model_ranks:
        raise ConfigError(
            "not the ranks that these arguments need",
            where="torchrun --nproc_per_node",
            found=world,
            expected=f"TP × PP × CP = {parallel.model_ranks}",
        )
    output = Path(arguments.output_dir)
    unfinished = Path(f"{arguments.output_dir}.unfinished")
    if output.exists() and any(output.iterdir()) and not arguments.force:
        raise ConfigError(
            "there is something already",
            where=str(output),
            do="give another place, or --force to replace it",
        )
    model_dir = model_directory(config.model, home(), seed=config.seed)
    platform.claim(int(os.environ.get("LOCAL_RANK", "0")), config.resources.threads_per_process)
    master = (
        os.environ.get("MASTER_ADDR", "127.0.0.1"),
        int(os.environ.get("MASTER_PORT", "0")) or free_port(),
    )
    open_groups(
        parallel,
        rank=rank,
        world_size=world,
        master=master,
        timeout_s=START_S,
        seed=config.train.seed,
    )
    try:
        scorer: ScoringModel = build_scoring_model(model_dir, config.model, config.train)
        load_checkpoint_weights(scorer, Path(arguments.load), arguments.ckpt_step)
        if rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
        save_hf(scorer, model_dir, unfinished)
    finally:
        close_groups()
    if rank:
        return 0
    shutil.rmtree(output, ignore_errors=True)
    unfinished.rename(output)
    print(f"written: {output}")
    others = list(different(model_dir, output)) if arguments.check_same else []
    if arguments.check_same:
        print("\n".join(others) if others else f"every bit is the same as in {model_dir}")
    return 1 if others else 0


def parse_arguments(words: list[str]) -> argparse.Namespace:
    """The options of this command itself."""
    parser = argparse.ArgumentParser(
        prog="convert_to_hf.py",
        description="Megatron checkpoint → Hugging Face directory, by training's own ranks.",
        epilog="All other arguments are those of training: python -m tools.flags.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--load",
        required=True,
        metavar="DIR",
        help="a folder like iter_0000100, or the one above it",
    )
    parser.add_argument(
        "--output-dir", required=True, metavar="DIR", help="where the model's directory goes"
    )
    parser.add_argument(
        "--ckpt-step", type=int, metavar="K", help="which iter_… below --load (default: the latest)"
    )
    parser.add_argument("--recipe", help="a recipe, in place of flags or beside them")
    parser.add_argument(
        "--check-same", action="store_true", help="compare with the model's directory, bit for bit"
    )
    parser.add_argument("-f", "--force", action="store_true", help="replace what is there")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
