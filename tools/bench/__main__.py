"""Measure and compare, in one run:

    python -m tools.bench rollout train sync iteration store        on a CPU, with a tiny model
    python -m tools.bench train rollout --shape 0.6b                on a GPU

    rollout    tokens/s of a rollout stage (plan → generator → router → engine → shards), against the same requests to the engine
    train      tokens/s, MFU and memory of scoring and of an optimizer step, against a plain loop of transformers and torch
    sync       seconds and GB/s of a push of weights, against a copy of the same bytes on the device
    iteration  seconds by stage, orchestration and idle share of a run: a new one, or that of --run
    store      MB/s and bytes a token of shards, against the same bytes as they are

Both sides of a ratio run in turns, and what is shown is the median with the smallest and largest.
The table goes to standard output, all values with what they were measured on to
`{home}/bench-{shape}.json`, progress to standard error. `dotted.key=value` overrides change the
configuration of the run that is measured: `engine.sglang.attention_backend=triton`,
`rollout.rollout_batch_size=128`, `train.megatron.recompute_granularity=selective`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from rlpipe.errors import RlpipeError
from tools.bench import iterations, sampling, storing, syncing, training
from tools.bench.bench import Bench, about, open_bench
from tools.bench.measures import Row, table, write
from tools.bench.shapes import SHAPES

Part = Callable[[Bench, argparse.Namespace], list[Row]]
PARTS: dict[str, Part] = {
    "rollout": lambda bench, _: sampling.measure(bench),
    "train": lambda bench, given: training.measure(bench, given.baselines, ragged=given.ragged),
    "sync": lambda bench, given: syncing.measure(
        bench, separate=given.separate, only=given.transports
    ),
    "iteration": lambda bench, given: iterations.measure(
        bench, Path(given.run) if given.run else None
    ),
    "store": lambda bench, _: storing.measure(bench),
}


def main() -> int:
    """Exit codes: 0 done, 1 a part failed (the others are measured and shown), 2 bad input."""
    given = parse_arguments()
    parts = [word for word in given.words if "=" not in word] or list(PARTS)
    home = Path(given.home).expanduser().absolute()
    try:
        overrides = [word for word in given.words if "=" in word]
        bench = open_bench(
            home, given.shape, overrides, seconds=given.seconds, repeats=given.repeats
        )
    except RlpipeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    rows: list[Row] = []
    failed: list[str] = []
    for part in parts:
        try:
            rows += PARTS[part](bench, given)
        except RlpipeError as error:
            print(f"bench {part} failed: {type(error).__name__}: {error}", file=sys.stderr)
            failed.append(part)
        write(home / f"bench-{given.shape}.json", rows, {**about(bench), "failed": failed})
    print(table(rows))
    return 1 if failed else 0


def parse_arguments() -> argparse.Namespace:
    """Parts and overrides are words; everything else is an option."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench",
        description="Measure parts of rlpipe against what they stand on. See the head of tools/bench/__main__.py.",
        epilog="Also: python -m tools.bench.ahead",
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="part | key=value",
        help=f"of {', '.join(PARTS)} (default: all); overrides",
    )
    parser.add_argument("--shape", choices=SHAPES, default="tiny", help="the model")
    parser.add_argument("--home", default="runs/bench", help="where everything is kept")
    parser.add_argument(
        "--seconds",
        type=float,
        default=120.0,
        help="a part measures so long at most, processes started",
    )
    parser.add_argument("--repeats", type=int, default=5, help="rounds of a part at most")
    parser.add_argument(
        "--baselines", nargs="+", choices=training.BASELINES, default=["hf"], help="of train"
    )
    parser.add_argument("--ragged", action="store_true", help="train: samples of different lengths")
    parser.add_argument(
        "--separate",
        action="store_true",
        help="sync: the engines on GPUs of their own, from the second on",
    )
    parser.add_argument(
        "--transports",
        nargs="+",
        choices=syncing.TRANSPORTS,
        default=(),
        help="of sync (default: all that fit)",
    )
    parser.add_argument(
        "--run",
        metavar="FOLDER",
        help="iteration: of a run that is there, `{home}/{run}`; else a new one",
    )
    given = parser.parse_intermixed_args()
    for word in given.words:
        if "=" not in word and word not in PARTS:
            parser.error(f"no such part: {word} (of {', '.join(PARTS)})")
    return given


if __name__ == "__main__":
    sys.exit(main())
