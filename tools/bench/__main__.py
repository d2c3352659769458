"""Measure rlpipe against the libraries that it uses, in one run:

    python -m tools.bench rollout train sync iteration store        on a CPU, with a tiny model
    python -m tools.bench scale --engines 2 8 32                    without a model
    python -m tools.bench train rollout --shape 0.6b                on a GPU
    python -m tools.bench node                                      on all GPUs of a node

| part      | measures                                               | baseline                  |
|-----------|--------------------------------------------------------|---------------------------|
| rollout   | tokens/s of a stage: plan, requests, shards            | the same requests, direct |
| train     | tokens/s, MFU, memory of scoring and an optimizer step | transformers and torch    |
| sync      | seconds and GB/s of a push of weights                  | copy of the same bytes    |
| iteration | seconds by stage, orchestration, idle share of a run   | `--against` keys, or none |
| store     | MB/s and bytes a token of shards                       | the same bytes as they are |
| scale     | costs by part with simulated engines and ranks, fitted | none                       |
| layouts   | an optimizer step on all GPUs, in each layout of ranks | one GPU                    |
| node      | layouts, and iterations on all GPUs; shapes of its own | one GPU                    |

Both sides of a ratio run alternately; the table shows the median with the smallest and largest. The
table goes to standard output, progress to standard error, all values and the machine's description
to `{home}/bench-{shape}.json`. `dotted.key=value` overrides change the measured configuration:
`engine.sglang.attention_backend=triton`, `rollout.rollout_batch_size=128`,
`train.megatron.recompute_granularity=selective`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from rlpipe.errors import RlpipeError
from tools.bench import iterations, layouts, node, sampling, scale, storing, syncing, training
from tools.bench.bench import Bench, about, open_bench
from tools.bench.measures import Row, table, write
from tools.command import parsers

Part = Callable[[Bench, argparse.Namespace], list[Row]]
PARTS: dict[str, Part] = {
    "rollout": lambda bench, _: sampling.measure(bench),
    "train": lambda bench, arguments: training.measure(
        bench, arguments.baselines, ragged=arguments.ragged
    ),
    "sync": lambda bench, arguments: syncing.measure(
        bench, separate=arguments.separate, only=arguments.transports
    ),
    "iteration": lambda bench, arguments: iterations.measure(
        bench, Path(arguments.run) if arguments.run else None, against=arguments.against
    ),
    "store": lambda bench, _: storing.measure(bench),
    "scale": lambda bench, arguments: scale.measure(
        bench.home / "scale",
        arguments.engines,
        arguments.iterations,
        say=bench.progress("scale"),
    ),
    "layouts": lambda bench, _: layouts.measure(bench),
    "node": lambda bench, _: node.measure(bench.home, bench.overrides, seconds=bench.seconds),
}
DEFAULT_PARTS = ["rollout", "train", "sync", "iteration", "store"]
"""The others take many minutes, or need several GPUs."""


def main() -> int:
    """Measure the parts. Exit codes: 0 done, 1 a part failed, 2 bad input.

    The other parts are still measured and shown if one fails.
    """
    arguments = parse_arguments()
    parts = [word for word in arguments.words if "=" not in word] or DEFAULT_PARTS
    home = Path(arguments.home).expanduser().absolute()
    try:
        overrides = [word for word in arguments.words if "=" in word]
        bench = open_bench(
            home, arguments.shape, overrides, seconds=arguments.seconds, repeats=arguments.repeats
        )
    except RlpipeError as error:
        print(f"{error.kind}: {error}", file=sys.stderr)
        return 2
    rows: list[Row] = []
    failed: list[str] = []
    for part in parts:
        try:
            rows += PARTS[part](bench, arguments)
        except RlpipeError as error:
            print(f"bench {part} failed: {type(error).__name__}: {error}", file=sys.stderr)
            failed.append(part)
        write(home / f"bench-{arguments.shape}.json", rows, {**about(bench), "failed": failed})
    print(table(rows))
    return 1 if failed else 0


def parse_arguments() -> argparse.Namespace:
    """Parse the command line: parts and overrides are words, the rest are options."""
    parser = parsers.bench()
    arguments = parser.parse_intermixed_args()
    for word in arguments.words:
        if "=" not in word and word not in PARTS:
            parser.error(f"no such part: {word} (of {', '.join(PARTS)})")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
