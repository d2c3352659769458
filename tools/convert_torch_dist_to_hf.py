"""Convert a checkpoint to a Hugging Face directory.

    rlpipe convert dist2hf --input-dir CKPT/iter_xxx/ --output-dir OUT
        [--origin-hf-dir MODEL]
    rlpipe convert dist2hf --of RUN@K --output-dir OUT

The second command reads a run's checkpoint from its store, after iteration K. Reads torch_dist of
any parallel layout, and the older `torch` format (`mp_rank_...`). Uses no GPU and the memory of one
file of weights. Checkpoints of rlpipe contain configuration and tokenizer of their model; others
need `--origin-hf-dir`. The same command continues after an interruption. Adapters (`train.lora`)
are merged; `--adapter` writes them for PEFT instead, and `--base` the weights without them.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rlpipe.config.load import home, use_home
from rlpipe.errors import ConfigError
from tools.command import parsers
from tools.conversion import bar, exit_code, hide_gpus, print_report, size_bytes


def main() -> int:
    """Run the command.

    Exit codes: 0 done, 1 different from the original (--check-same), 2 wrong input, 130
    interrupted.
    """
    if int(os.environ.get("RANK", "0")):
        return 0  # Under torchrun, rank 0 does the work.
    arguments = parsers.dist2hf().parse_args()
    return exit_code(lambda: convert(arguments))


def check_options(arguments: argparse.Namespace) -> None:
    """Refuse options that exclude or need each other. Raises: ConfigError."""
    if (arguments.input_dir is None) == (arguments.of is None):
        raise ConfigError(
            "one checkpoint is needed", where="--input-dir, --of", expected="one of the two"
        )
    if arguments.check_same and arguments.adapter:
        raise ConfigError(
            "adapters have no original to compare with", where="--check-same", do="leave one out"
        )
    if arguments.check_same and arguments.origin_hf_dir is None:
        raise ConfigError(
            "no directory to compare with", where="--check-same", do="give --origin-hf-dir"
        )


def convert(arguments: argparse.Namespace) -> int:
    """Run the conversion. Raises: ConfigError; as `to_hf`."""
    check_options(arguments)
    with ExitStack() as stack:
        folder = Path(arguments.input_dir or "")
        origin = arguments.origin_hf_dir and Path(arguments.origin_hf_dir)
        known_as = None
        base = None
        if arguments.of:
            from flows.conversion_job import stored_checkpoint

            use_home(arguments.home)
            stored = stack.enter_context(
                stored_checkpoint(home(), arguments.of, adapters=arguments.adapter)
            )
            base = stored.base
            folder = stored.folder
            origin = origin or stored.model_dir
            known_as = stored.node
            kind = "checkpoint" if folder.is_dir() else "adapters"
            print(f"{stored.name}: converting its {kind}", file=sys.stderr)
        hide_gpus()
        from rlpipe.engines.megatron.checkpoint.conversion.convert import to_hf
        from rlpipe.engines.megatron.checkpoint.conversion.peft import to_peft

        given: dict[str, Any] = {
            "origin": origin,
            "step": arguments.ckpt_step,
            "dtype": arguments.dtype,
            "force": arguments.force,
            "known_as": known_as,
        }
        if arguments.adapter:
            report = to_peft(folder, Path(arguments.output_dir), **given, base=base)
        else:
            report = to_hf(
                folder,
                Path(arguments.output_dir),
                **given,
                with_adapters=not arguments.base,
                shard_bytes=size_bytes(arguments.max_shard_size),
                progress=stack.enter_context(bar()),
            )
    print_report(report)
    if not arguments.check_same:
        return 0
    from rlpipe.engines.megatron.checkpoint.conversion.hf_files import different

    differences = list(different(arguments.origin_hf_dir, arguments.output_dir))
    same = f"every bit is the same as in {arguments.origin_hf_dir}"
    print("\n".join(differences) if differences else same)
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
