"""A Hugging Face directory as a checkpoint in Megatron's torch_dist format, which any parallel
layout loads:

    python tools/convert_hf_to_torch_dist.py --hf-checkpoint /models/GLM-Z1-9B-0414 --save
    /models/GLM-Z1-9B-0414_torch_dist

Writes SAVE/release and SAVE/latest_checkpointed_iteration.txt. A file's worth of weights is in
memory at a time; no GPU is used. The same command goes on where an interrupted one stopped.
Megatron's flags of the model (`${MODEL_ARGS[@]}`) may be given, and are compared with config.json.
Runs themselves need no such checkpoint: `--hf-checkpoint` is read directly.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from rlpipe.slime.command_line import read_flags
from rlpipe.slime.flag_keys import check_model
from tools.conversion import bar, ended, say, size_bytes, without_gpus
from tools.train import split

OPTIONS = {
    **dict.fromkeys(("--hf-checkpoint", "--save", "--dtype", "--max-shard-size"), True),
    **dict.fromkeys(("--force", "-f", "--help", "-h"), False),
}


def main() -> int:
    """Exit codes: 0 done, 2 bad input, 130 interrupted."""
    if int(os.environ.get("RANK", "0")):
        return 0  # under torchrun: one process does it
    mine, rest = split(sys.argv[1:], OPTIONS)
    arguments = parse_arguments(mine)
    return ended(lambda: convert(arguments, rest))


def convert(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Do it. Raises: as `to_torch_dist`."""
    check_model(read_flags(rest, also=OPTIONS).own, arguments.hf_checkpoint)
    without_gpus()
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
    say(report)
    return 0


def parse_arguments(words: list[str]) -> argparse.Namespace:
    """The options of this command itself."""
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
    parser.add_argument("--save", required=True, metavar="DIR", help="where the checkpoint goes")
    parser.add_argument(
        "--dtype", help="of the weights: float32, bfloat16, float16 (default: as config.json says)"
    )
    parser.add_argument(
        "--max-shard-size", default="5GB", help="of a file, and of what is in memory (default: 5GB)"
    )
    parser.add_argument("-f", "--force", action="store_true", help="replace what is there")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
