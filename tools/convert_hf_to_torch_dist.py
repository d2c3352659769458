"""Convert a Hugging Face directory to a torch_dist checkpoint for any parallel layout.

    rlpipe convert hf2dist --input-dir /models/GLM-Z1-9B-0414
        --output-dir OUT

Writes OUT/release and OUT/latest_checkpointed_iteration.txt. Uses no GPU and the memory of one
file of weights. The same command continues after an interruption. Megatron's flags of the model
(`${MODEL_ARGS[@]}`) are compared with config.json. Runs need no such checkpoint: they read
`--hf-checkpoint` directly.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from rlpipe.model_dir import given_directory
from rlpipe.slime.command_line import read_flags
from rlpipe.slime.model_flags import check_model
from tools.command import parsers
from tools.command.run_words import option_names, read_words
from tools.conversion import bar, exit_code, hide_gpus, print_report, size_bytes


def main() -> int:
    """Run the command. Exit codes: 0 done, 2 wrong input, 130 interrupted."""
    if int(os.environ.get("RANK", "0")):
        return 0  # Under torchrun, rank 0 does the work.
    arguments, rest = read_words(parsers.hf2dist(), sys.argv[1:])
    return exit_code(lambda: convert(arguments, rest))


def convert(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Run the conversion. Raises: as `to_torch_dist`."""
    directory = given_directory(arguments.input_dir, "--input-dir")
    check_model(read_flags(rest, also=option_names(parsers.hf2dist())).own, str(directory))
    hide_gpus()
    from rlpipe.engines.megatron.checkpoint.conversion.convert import to_torch_dist

    with bar() as progress:
        report = to_torch_dist(
            directory,
            Path(arguments.output_dir),
            dtype=arguments.dtype,
            shard_bytes=size_bytes(arguments.max_shard_size),
            force=arguments.force,
            progress=progress,
        )
    print_report(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
