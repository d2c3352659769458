"""Options of `rlpipe bench`, and the names that they accept.

Entry points: `add_bench`, `add_scale`.
"""

from __future__ import annotations

import argparse
import os

from rlpipe.system.project import HOME_VARIABLE

PARTS = ("rollout", "train", "sync", "iteration", "store", "scale", "layouts", "node")
SHAPES = ("tiny", "0.6b", "4b", "8b", "tiny-moe", "moe")
BASELINES = ("hf", "hf-no-recompute", "hf-fp32-weights")
TRANSPORTS = ("ipc", "distributed", "tensor", "disk", "delta")


def add_bench(parser: argparse.ArgumentParser) -> None:
    """Add the options of all benchmarks."""
    parser.add_argument(
        "words",
        nargs="*",
        metavar="part | key=value",
        help=f"parts to measure: {', '.join(PARTS)} (default: the first five); overrides",
    )
    parser.add_argument(
        "--shape", choices=SHAPES, default="tiny", help="size of the model (default: tiny)"
    )
    default = f"{os.environ.get(HOME_VARIABLE, 'runs')}/bench"
    parser.add_argument("--home", default=default, help="folder for all files")
    parser.add_argument(
        "--seconds",
        type=float,
        default=120.0,
        help="measuring time of a part at most, without starting its processes",
    )
    parser.add_argument("--repeats", type=int, default=5, help="rounds of a part at most")
    parser.add_argument(
        "--baselines",
        nargs="+",
        choices=BASELINES,
        default=["hf"],
        help="train: loops of transformers to compare with (default: hf)",
    )
    parser.add_argument("--ragged", action="store_true", help="train: samples of different lengths")
    parser.add_argument(
        "--separate", action="store_true", help="sync: engines on own GPUs, from the second on"
    )
    parser.add_argument(
        "--transports",
        nargs="+",
        choices=TRANSPORTS,
        default=(),
        help="sync: the transports (default: all that fit)",
    )
    parser.add_argument(
        "--run",
        metavar="FOLDER",
        help="iteration: `{home}/{run}` of an existing run; else a new one",
    )
    parser.add_argument(
        "--against",
        nargs="+",
        metavar="key=value",
        default=(),
        help="iteration: a second run with these keys too, as the baseline",
    )
    add_scale(parser)


def add_scale(parser: argparse.ArgumentParser) -> None:
    """Add the options of simulated runs (`tools.bench.scale`)."""
    engines = (2, 4, 8, 32, 128)
    parser.add_argument(
        "--engines",
        nargs="+",
        type=int,
        default=engines,
        help="scale: numbers of simulated engines, and as many ranks (default: "
        f"{' '.join(map(str, engines))})",
    )
    parser.add_argument(
        "--iterations", type=int, default=10, help="scale: iterations of each run (default: 10)"
    )
