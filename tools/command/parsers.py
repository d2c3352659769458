"""The options of each verb of the command `rlpipe`, as argparse parsers.

The modules of the verbs import torch, Ray or DuckDB. Help and completion do not need them, so the
options are here. `VERBS` of `tools.command.verbs` names the function of each verb.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rlpipe.system.project import PRESETS
from tools.command.bench_options import add_bench
from tools.command.shared_options import (
    COMMAND,
    add_home,
    add_input,
    add_iterations,
    add_output,
    add_overrides,
    add_run,
    add_sizes,
    add_store,
    add_takeover,
    names_in,
    new_parser,
    recipe_help,
)


def train() -> argparse.ArgumentParser:
    """Return the options of `train`; flags of slime and overrides are read elsewhere."""
    parser = new_parser(
        "train",
        "Train on this machine, from a recipe or from flags in slime's style.",
        usage="%(prog)s (RECIPE | --hf-checkpoint ... flags of slime) [options] "
        "[dotted.key=value ...]",
        epilog=f"Flags of slime, Megatron and SGLang (--sglang-*): {COMMAND} flags. "
        "Overrides: train.optimizer.lr=1e-5. Defaults of a model family: preset=NAME, "
        f"a YAML file or one of: {names_in(PRESETS)}. "
        f"Example: {COMMAND} train my_run.yaml train.optimizer.lr=1e-6",
    )
    _add_recipe_options(parser)
    add_takeover(parser, "drives this run on any machine")
    parser.add_argument("--quiet", action="store_true", help="show notices and errors, no progress")
    parser.add_argument(
        "--dump-config", action="store_true", help="print the resolved configuration and stop"
    )
    return parser


def _add_recipe_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose a configuration: recipe, smoke, name, home, seed, fork."""
    parser.add_argument(
        "--recipe", help=f"the recipe, if it is not the first word: {recipe_help()}"
    )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="try the recipe in minutes: its section `smoke` has a small stand-in of the model",
    )
    parser.add_argument(
        "--run", help="name of the run (default: the recipe's, or the folder of --save)"
    )
    add_home(parser)
    parser.add_argument(
        "--seed",
        type=int,
        help="other seed, for a separate run: <recipe>-seed<N> unless --run gives a name",
    )
    parser.add_argument(
        "--fork",
        metavar="RUN[@K]",
        help="start a new run from iteration K of that run (default: its newest)",
    )


def fork() -> argparse.ArgumentParser:
    """Return the options of `fork`."""
    parser = new_parser("fork", "Continue from an iteration of a run with changed settings.")
    parser.add_argument(
        "of", metavar="RUN[@K]", help="the parent, and its iteration (default: the newest)"
    )
    parser.add_argument("--run", help="name of the fork (default: RUN-from-K)")
    add_home(parser)
    add_store(parser, "the parent's")
    add_takeover(parser, "drives the fork on any machine")
    parser.add_argument(
        "--dump-config", action="store_true", help="print the resolved configuration and stop"
    )
    add_overrides(parser)
    return parser


def evaluate() -> argparse.ArgumentParser:
    """Return the options of `evaluate`; flags of slime and overrides are read elsewhere."""
    parser = new_parser(
        "evaluate",
        "Evaluate weights on held-out sets.",
        usage="%(prog)s (--of RUN[@K] | --recipe FILE) [options] [dotted.key=value ...]",
        epilog="Other sets: --eval-prompt-data NAME FILE.jsonl --eval-input-key prompt "
        "--eval-label-key answer. "
        f"Example: {COMMAND} evaluate --of my_run rollout.rollout_temperature=0.6",
    )
    parser.add_argument(
        "--of",
        metavar="RUN[@K]",
        help="weights of that run, after iteration K (default: its newest saved)",
    )
    parser.add_argument("--recipe", help="a recipe: its held-out sets, and without --of its model")
    parser.add_argument("--name", help="name of the evaluation as a run (default: RUN.eval-K)")
    add_home(parser)
    add_takeover(parser, "evaluates under this name")
    return parser


def reprocess() -> argparse.ArgumentParser:
    """Return the options of `reprocess`."""
    parser = new_parser("reprocess", "Score stored rollouts again.")
    parser.add_argument(
        "--of", required=True, metavar="RUN", help="the run with the stored rollouts"
    )
    add_iterations(parser, "all stored ones; K: one")
    parser.add_argument("--run", help="name of the new run (default: RUN.reprocessed)")
    parser.add_argument(
        "--train", metavar="NAME", help="train a run of this name from the result, without engines"
    )
    parser.add_argument(
        "--train-set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an override of that run only; may be repeated",
    )
    parser.add_argument("--jobs", type=int, default=2, help="concurrent iterations (default: 2)")
    add_home(parser)
    add_store(parser)
    add_overrides(parser)
    return parser


def report() -> argparse.ArgumentParser:
    """Return the options of `report`."""
    parser = new_parser("report", "Write a run's report again from its records.")
    add_run(parser)
    add_home(parser)
    return parser


def rollouts() -> argparse.ArgumentParser:
    """Return the options of `rollouts`."""
    parser = new_parser("rollouts", "Show or export a run's stored rollouts.")
    add_run(parser)
    add_iterations(parser, "the newest; K: one; ':': all")
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="write whole rows to this .jsonl or .parquet file, or the page of samples to .html",
    )
    parser.add_argument("--limit", type=int, default=64, help="lines (default: 64; 0: all)")
    add_home(parser)
    add_store(parser, "the store of the run's start")
    return parser


def timeline() -> argparse.ArgumentParser:
    """Return the options of `timeline`."""
    parser = new_parser("timeline", "Write a run's timeline for Perfetto.")
    add_run(parser)
    add_iterations(parser, "all", value=":")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="default: timeline.json.gz in the run's folder"
    )
    add_home(parser)
    return parser


AUDITS = {
    "forward": "list the optimizer steps that trained on a prompt",
    "head": "print the digest of the newest commit; keep it outside the store",
    "lineage": "print prompts, rewards, code and packages behind the weights",
    "sql": "answer a query over samples, metrics, commits, texts or batch",
    "unusual": "list reward errors, truncated responses, staleness and jumps",
    "verify": "check every record, file and row of all runs, or of one",
    "view": "write the page of samples",
}


def audit() -> argparse.ArgumentParser:
    """Return the options of `audit`."""
    commands = "\n".join(f"  {name:<9} {task}" for name, task in AUDITS.items())
    parser = new_parser(
        "audit",
        "Audit a run and its records.",
        epilog=f"commands:\n{commands}\n\nexample: {COMMAND} audit verify my_run",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=AUDITS, metavar="COMMAND", help="one of those below")
    parser.add_argument(
        "words", nargs="*", metavar="RUN", help='as --run; sql: RUN "QUERY", in any order'
    )
    parser.add_argument(
        "--run",
        metavar="RUN[@K]",
        help="name of the run, and an iteration (default: the newest; verify: all runs)",
    )
    parser.add_argument(
        "--head",
        metavar="SHA256",
        help="verify: digest of a commit of the run, at least its first 16 digits",
    )
    parser.add_argument(
        "--public-key",
        metavar="FILE",
        help="verify: use the newest commit signed with this key as --head",
    )
    parser.add_argument("--prompt", help="forward: part of the prompt's text")
    parser.add_argument("--out", help="lineage: a .parquet file; view: a page (samples.html)")
    parser.add_argument(
        "--samples",
        type=int,
        default=64,
        help="view: samples of an iteration, at most (default: 64)",
    )
    parser.add_argument(
        "--tokenizer",
        help="view: directory of a tokenizer (default: the model's, if it is on this machine)",
    )
    add_home(parser)
    add_store(parser, "the store of the run's start")
    return parser


def engines() -> argparse.ArgumentParser:
    """Return the options of `engines`."""
    parser = new_parser("engines", "Show or change the number of engines of a run.")
    parser.add_argument("run", metavar="RUN", help="name of the run")
    parser.add_argument(
        "engines", nargs="?", type=int, metavar="N", help="engines from now on (default: show)"
    )
    add_home(parser)
    add_store(parser, "the store of the run's start")
    return parser


def replay() -> argparse.ArgumentParser:
    """Return the options of `replay`."""
    parser = new_parser("replay", "Train a run's stored batches again and compare every state.")
    add_run(parser)
    add_home(parser)
    add_store(parser, "the store of the run's start")
    parser.add_argument(
        "--ray-address", metavar="ADDRESS", help="Ray to use (default: the run's); local: a new one"
    )
    parser.add_argument("--json", help="write all digests to this file")
    return parser


def hf2dist() -> argparse.ArgumentParser:
    """Return the options of `convert hf2dist`."""
    parser = new_parser("convert hf2dist", "Hugging Face directory → torch_dist checkpoint.")
    add_input(parser, "--hf-checkpoint", "config.json, *.safetensors, tokenizer", required=True)
    add_output(parser, "folder of the checkpoint")
    add_sizes(parser, "as config.json says")
    parser.add_argument("-f", "--force", action="store_true", help="replace the destination")
    return parser


def dist2hf() -> argparse.ArgumentParser:
    """Return the options of `convert dist2hf`."""
    parser = new_parser("convert dist2hf", "Megatron checkpoint → Hugging Face directory.")
    add_input(parser, "--load", "a folder such as iter_0000100, or its parent", required=False)
    parser.add_argument(
        "--of",
        metavar="RUN[@K]",
        help="a run's weights after iteration K (default: the newest saved)",
    )
    add_output(parser, "the written Hugging Face directory")
    parser.add_argument(
        "--origin-hf-dir",
        metavar="DIR",
        help="the model's directory (default: the files in the checkpoint)",
    )
    parser.add_argument(
        "--ckpt-step",
        type=int,
        metavar="K",
        help="number of the iter_... folder below --input-dir (default: the latest)",
    )
    add_sizes(parser, "as stored")
    adapters = parser.add_mutually_exclusive_group()
    without = "write the weights without these adapters"
    only = "write the adapters of train.lora for PEFT, instead of merged weights"
    for option, text in (("--adapter", only), ("--base", without)):
        adapters.add_argument(option, action="store_true", help=text)
    parser.add_argument(
        "--check-same", action="store_true", help="compare with --origin-hf-dir, bit for bit"
    )
    add_home(parser)
    parser.add_argument("-f", "--force", action="store_true", help="replace the output")
    return parser


def gc() -> argparse.ArgumentParser:
    """Return the options of `gc`."""
    parser = new_parser("gc", "List or delete objects of a store that no run needs.")
    parser.add_argument(
        "--keep-checkpoints",
        type=int,
        metavar="N",
        help="keep the newest N of each run (default: all)",
    )
    parser.add_argument(
        "--keep-every", type=int, metavar="M", help="keep every M-th weight version too"
    )
    parser.add_argument(
        "--remove",
        action="append",
        default=[],
        metavar="RUN",
        help="remove this run; may be repeated",
    )
    parser.add_argument(
        "--grace", default="1d", help="keep younger objects, such as 90m or 7d (default: 1d)"
    )
    parser.add_argument("--delete", action="store_true", help="delete instead of listing")
    parser.add_argument("--list", action="store_true", help="print every object")
    add_home(parser)
    add_store(parser, "the home's")
    return parser


def migrate() -> argparse.ArgumentParser:
    """Return the options of `migrate`."""
    parser = new_parser("migrate", "Migrate a store of format 1 to today's format.")
    parser.add_argument(
        "--store", required=True, help="URL or directory of the old store; it is only read"
    )
    parser.add_argument(
        "--to", required=True, help="URL or directory of the new store, which must be empty"
    )
    return parser


def up() -> argparse.ArgumentParser:
    """Return the options of `up`, which carries out `down` too."""
    parser = new_parser("up", "Prefect server, S3 store, Ray head and worker of this machine.")
    add_home(parser)
    parser.add_argument(
        "--site",
        type=Path,
        help="YAML file with sets of GPUs, schedules, settings (deployments/site.example.yaml)",
    )
    parser.add_argument(
        "--without",
        default="",
        metavar="NAMES",
        help="servers not to start: ray,s3 (runs then use their own)",
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--down", action="store_true", help="stop all servers")
    action.add_argument("--status", action="store_true", help="print the state of the servers")
    return parser


def down() -> argparse.ArgumentParser:
    """Return the options of `down`, for its help and completion."""
    parser = new_parser("down", "Stop the servers that `rlpipe up` has started for a home.")
    add_home(parser)
    return parser


def flags() -> argparse.ArgumentParser:
    """Return the options of `flags`."""
    parser = new_parser("flags", "Print the effect of each slime flag.")
    parser.add_argument(
        "--arguments",
        action="store_true",
        help="list the arguments of Megatron-core, SGLang and the router instead",
    )
    parser.add_argument("part", nargs="?", default="", help="only names that contain this text")
    return parser


def config() -> argparse.ArgumentParser:
    """Return the options of `config`; flags of slime and overrides are read elsewhere."""
    parser = new_parser(
        "config",
        "Print the resolved configuration, and the source of each value.",
        usage="%(prog)s (RECIPE | flags of slime) [options] [dotted.key=value ...]",
    )
    _add_recipe_options(parser)
    parser.add_argument("--changed", action="store_true", help="leave out values of defaults")
    parser.add_argument("--plain", action="store_true", help="the values only, as a recipe")
    return parser


def from_slime() -> argparse.ArgumentParser:
    """Return the options of `from-slime`; a script or flags of slime are read elsewhere."""
    parser = new_parser(
        "from-slime",
        "Convert a launch script of slime, or its arguments, to a recipe.",
        usage="%(prog)s [-o FILE] ([SCRIPT [NAME=VALUE ...]] [flags of slime])",
        epilog="NAME=VALUE sets a shell variable of the script, such as MODEL_SIZE=4B. Flags after "
        "the script replace its own, such as --num-rollout 9. No program of the script is started.",
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="write the recipe to this file (default: print it)"
    )
    return parser


def doctor() -> argparse.ArgumentParser:
    """Return the options of `doctor`."""
    parser = new_parser("doctor", "Check this machine. Each line is ok, or says what to do.")
    parser.add_argument("recipe", nargs="?", help=recipe_help())
    add_home(parser)
    add_store(parser, "the recipe's, or the home's")
    parser.add_argument("overrides", nargs="*", metavar="dotted.key=value")
    return parser


def init() -> argparse.ArgumentParser:
    """Return the options of `init`."""
    parser = new_parser("init", "Make a folder with a recipe, a reward with its test, and data.")
    parser.add_argument("name", metavar="NAME", help="the folder to make, and the name of the run")
    return parser


def completion() -> argparse.ArgumentParser:
    """Return the options of `completion`."""
    parser = new_parser(
        "completion",
        "Print the completion script of a shell.",
        epilog=f'bash, zsh: eval "$({COMMAND} completion bash)", with the name of the shell\n'
        f"fish: {COMMAND} completion fish | source",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
    return parser


def bench() -> argparse.ArgumentParser:
    """Return the options of `bench`."""
    parser = new_parser("bench", "Measure parts of rlpipe against the libraries below them.")
    add_bench(parser)
    return parser
