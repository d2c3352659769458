"""Convert a checkpoint to a Hugging Face directory with the ranks that train it, under torchrun.

    torchrun --nproc_per_node TP×PP tools/convert_to_hf.py --input-dir CKPT --output-dir OUT
        [--check-same] ...other arguments of training

The ranks load the checkpoint in the layout of the arguments, and write the tensors that a push
would send to the engines, under the same names. This reads the older `torch` format too, and needs
GPUs for the weights. `--check-same` compares every tensor with `--hf-checkpoint`, bit for bit.
`--recipe` replaces the arguments of training.
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
from tools.command.run_words import option_names, read_words
from tools.conversion import exit_code

if TYPE_CHECKING:
    from rlpipe.engines.megatron.model.build import ScoringModel

START_S = 600.0


def main() -> int:
    """Run the command.

    Exit codes: 0 done, 1 different from the original (--check-same), 2 wrong input, 130
    interrupted.
    """
    arguments, rest = read_words(options(), sys.argv[1:])
    return exit_code(lambda: convert(arguments, configuration(arguments.recipe, rest)))


def configuration(recipe: str | None, words: list[str]) -> RunConfig:
    """Return the configuration that arguments of training describe. Raises: ConfigError."""
    flags = read_flags(words, also=option_names(options()))
    if recipe is None and not flags:
        raise ConfigError(
            "no model given",
            where="tools/convert_to_hf.py",
            do="give the arguments of training, or --recipe",
        )
    # Training refuses --ref-load. Here --input-dir names the weights, so it has no meaning.
    flags.own.pop("ref_load", None)
    return load_run(recipe or str(BASE), overrides_of(flags), "convert")


def convert(arguments: argparse.Namespace, config: RunConfig) -> int:
    """Convert as one of the ranks. Raises: ConfigError, DataError, TrainerError, StoreFull."""
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
    output = Path(arguments.output_dir)
    unfinished = Path(f"{arguments.output_dir}.unfinished")
    check_destination(output, world, parallel.model_ranks, force=arguments.force)
    model_dir = model_directory(config.model, home(), seed=config.seed)
    platform.claim_device(
        int(os.environ.get("LOCAL_RANK", "0")), config.resources.threads_per_process
    )
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
        load_checkpoint_weights(scorer, Path(arguments.input_dir), arguments.ckpt_step)
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
    if not arguments.check_same:
        return 0
    differences = list(different(model_dir, output))
    print("\n".join(differences) if differences else f"every bit is the same as in {model_dir}")
    return 1 if differences else 0


def check_destination(output: Path, world: int, model_ranks: int, *, force: bool) -> None:
    """Refuse ranks that do not fit the layout, and a non-empty output. Raises: ConfigError."""
    if world % model_ranks:
        raise ConfigError(
            "the number of ranks does not fit the parallel layout",
            where="torchrun --nproc_per_node",
            found=world,
            expected=f"a multiple of TP × PP × CP = {model_ranks}",
        )
    if output.exists() and any(output.iterdir()) and not force:
        raise ConfigError(
            "the output folder is not empty",
            where=str(output),
            do="give another folder, or --force to replace it",
        )


def options() -> argparse.ArgumentParser:
    """Return the options of this command."""
    parser = argparse.ArgumentParser(
        prog="convert_to_hf.py",
        description="Megatron checkpoint → Hugging Face directory, by training's own ranks.",
        epilog="All other arguments are those of training: rlpipe flags.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--input-dir",
        "--load",
        required=True,
        metavar="DIR",
        help="a folder such as iter_0000100, or its parent",
    )
    # Without `--save`, which is an argument of training.
    parser.add_argument(
        "--output-dir", required=True, metavar="DIR", help="the written Hugging Face directory"
    )
    parser.add_argument(
        "--ckpt-step",
        type=int,
        metavar="K",
        help="number of the iter_... folder below --input-dir (default: the latest)",
    )
    parser.add_argument("--recipe", help="a recipe, instead of flags or in addition")
    parser.add_argument(
        "--check-same", action="store_true", help="compare with the model directory, bit for bit"
    )
    parser.add_argument("-f", "--force", action="store_true", help="replace the output")
    return parser


if __name__ == "__main__":
    sys.exit(main())
