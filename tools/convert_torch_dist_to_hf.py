"""A checkpoint as a Hugging Face directory:

    python tools/convert_torch_dist_to_hf.py --input-dir CKPT/iter_xxx/ --output-dir OUT [--origin-hf-dir MODEL]
    python tools/convert_torch_dist_to_hf.py --of RUN@K --output-dir OUT        a run's, from its store, after iteration K

Reads Megatron's torch_dist format of any parallel layout, and the older `torch` format
(`mp_rank_…`). A file's worth of weights is in memory at a time; no GPU is used. Checkpoints that
rlpipe wrote carry their model's configuration and tokenizer; for others name its directory. The
same command goes on where an interrupted one stopped.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import ExitStack
from pathlib import Path

from rlpipe.config.load import HOME_VARIABLE, home, use_home
from rlpipe.errors import ConfigError
from tools.conversion import bar, ended, say, size_bytes, without_gpus


def main() -> int:
    """Exit codes: 0 done, 1 not the same as the original (--check-same), 2 bad input, 130
    interrupted."""
    if int(os.environ.get("RANK", "0")):
        return 0  # under torchrun: one process does it
    arguments = parse_arguments()
    return ended(lambda: convert(arguments))


def convert(arguments: argparse.Namespace) -> int:
    """Do it. Raises: as `to_hf`."""
    if (arguments.input_dir is None) == (arguments.of is None):
        raise ConfigError("which checkpoint?", where="--input-dir, --of", expected="one of the two")
    if arguments.check_same and arguments.origin_hf_dir is None:
        raise ConfigError("the same as what?", where="--check-same", do="give --origin-hf-dir")
    with ExitStack() as stack:
        folder = Path(arguments.input_dir or "")
        origin = arguments.origin_hf_dir and Path(arguments.origin_hf_dir)
        known_as = None
        if arguments.of:
            from flows.conversion_job import stored_checkpoint

            use_home(arguments.home)
            stored = stack.enter_context(stored_checkpoint(home(), arguments.of))
            folder = stored.folder
            origin = origin or stored.model_dir
            known_as = stored.node
        without_gpus()
        from rlpipe.engines.megatron.checkpoint.conversion.convert import to_hf

        report = to_hf(
            folder,
            Path(arguments.output_dir),
            origin=origin,
            step=arguments.ckpt_step,
            dtype=arguments.dtype,
            shard_bytes=size_bytes(arguments.max_shard_size),
            force=arguments.force,
            known_as=known_as,
            progress=stack.enter_context(bar()),
        )
    say(report)
    if not arguments.check_same:
        return 0
    from rlpipe.engines.megatron.checkpoint.conversion.hf_files import different

    others = list(different(arguments.origin_hf_dir, arguments.output_dir))
    print("\n".join(others) if others else f"every bit is the same as in {arguments.origin_hf_dir}")
    return 1 if others else 0


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="convert_torch_dist_to_hf.py",
        description="Megatron checkpoint → Hugging Face directory.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--input-dir", metavar="DIR", help="a folder like iter_0000100, or the one above it"
    )
    parser.add_argument(
        "--of",
        metavar="RUN[@K]",
        help="a run's weights after iteration K (default: the newest saved)",
    )
    parser.add_argument(
        "--output-dir", required=True, metavar="DIR", help="where the model's directory goes"
    )
    parser.add_argument(
        "--origin-hf-dir",
        metavar="DIR",
        help="the model's directory (default: what the checkpoint carries)",
    )
    parser.add_argument(
        "--ckpt-step",
        type=int,
        metavar="K",
        help="which iter_… below --input-dir (default: the latest)",
    )
    parser.add_argument(
        "--dtype", help="of the weights: float32, bfloat16, float16 (default: as stored)"
    )
    parser.add_argument(
        "--max-shard-size", default="5GB", help="of a file, and of what is in memory (default: 5GB)"
    )
    parser.add_argument(
        "--check-same", action="store_true", help="compare with --origin-hf-dir, bit for bit"
    )
    parser.add_argument("--home", help=f"where runs are kept (default: ${HOME_VARIABLE} or ./runs)")
    parser.add_argument("-f", "--force", action="store_true", help="replace what is there")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
