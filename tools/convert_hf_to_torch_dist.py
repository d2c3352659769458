"""Convert a Hugging Face directory to a torch_dist checkpoint for any parallel layout.

    python tools/convert_hf_to_torch_dist.py --hf-checkpoint /models/GLM-Z1-9B-0414
        --save /models/GLM-Z1-9B-0414_torch_dist

Writes SAVE/release and SAVE/latest_checkpointed_iteration.txt. Uses no GPU and the memory of one
file of weights. The same command continues after an interruption. Megatron's flags of the model
(`${MODEL_ARGS[@]}`) are compared with config.json. Runs need no such checkpoint: they read
`--hf-checkpoint` directly.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from rlpipe.slime.command_line import read_flags
from rlpipe.slime.flag_keys import check_model
from tools.conversion import bar, exit_code, hide_gpus, print_report, size_bytes
from tools.train import split

OPTIONS = {
    **dict.fromkeys(("--hf-checkpoint", "--save", "--dtype", "--max-shard-size"), True),
    **dict.fromkeys(("--force", "-f", "--help", "-h"), False),
}


def main() -> int:
    """Run the command. Exit codes: 0 done, 2 wrong input, 130 interrupted."""
    if int(os.environ.get("RANK", "0")):
        return 0  # Under torchrun, rank 0 does the work.
    own, rest = split(sys.argv[1:], OPTIONS)
    arguments = parse_arguments(own)
    return exit_code(lambda: convert(arguments, rest))


def convert(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Run the conversion. Raises: as `to_torch_dist`."""
    check_model(read_flags(rest, also=OPTIONS).own, arguments.hf_checkpoint)
    hide_gpus()
    from rlpipe.engines.megatron.checkpoint.conversion.convert import to_torch_dist

    with bar() as progress:
        report = to_torch_dist(
            Path(arguments.hf_checkpoint),
            Path(arguments.save),
            dtype=arguments.dtype,
            shard_bytes=size_bytes(arguments.max_shard_size),
            force=arguments.force,
            progress=progress,
        )
    print_report(report)
    return 0


def parse_arguments(words: list[str]) -> argparse.Namespace:
    """Parse the options of this command."""
    parser = argparse.ArgumentParser(
        prog="convert_hf_to_torch_dist.py",
        description="Hugging Face directory → torch_dist checkpoint.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--hf-checkpoint",
        required=True,
        metavar="DIR",
        help="config.json, *.safetensors, tokenizer",
    )
    parser.add_argument("--save", required=True, metavar="DIR", help="folder of the checkpoint")
    parser.add_argument(
        "--dtype",
        help="data type of the weights: float32, bfloat16, float16 (default: as config.json says)",
    )
    parser.add_argument(
        "--max-shard-size",
        default="5GB",
        help="size of a file, and memory of the conversion (default: 5GB)",
    )
    parser.add_argument("-f", "--force", action="store_true", help="replace the destination")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
