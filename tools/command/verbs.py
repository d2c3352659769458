"""The verbs of the command `rlpipe`: help, completion and dispatch are made from this table.

This module imports nothing, so that `rlpipe --help` and completion are quick.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verb:
    """One verb. `module` has `main()`, which reads `sys.argv` and returns the exit code."""

    name: str
    """One word, or two for a verb with kinds: `convert hf2dist`."""
    task: str
    module: str
    example: str
    """Words after the name, as in the help."""
    parser: str
    """Name of the function of `tools.command.parsers` that returns the verb's options."""
    words: tuple[str, ...] = ()
    """Words that come before those of the user."""
    recipe: bool = False
    """True if a word may be a recipe."""


SECTIONS: dict[str, tuple[Verb, ...]] = {
    "Begin": (
        Verb(
            "init",
            "make a folder with a recipe, a reward and data that trains at once",
            "tools.init",
            "my_run",
            "init",
        ),
        Verb(
            "doctor",
            "check this machine, its packages, ports and store",
            "tools.doctor",
            "my_run.yaml",
            "doctor",
            recipe=True,
        ),
        Verb(
            "config",
            "print the resolved configuration, and the source of each value",
            "tools.config",
            "my_run.yaml train.optimizer.lr=1e-6",
            "config",
            recipe=True,
        ),
        Verb(
            "from-slime",
            "convert a launch script or arguments of slime to a recipe",
            "tools.from_slime",
            "run-qwen3-4B.sh",
            "from_slime",
        ),
        Verb(
            "flags",
            "print the effect of each slime flag",
            "tools.flags",
            "temperature",
            "flags",
        ),
    ),
    "Train": (
        Verb(
            "train",
            "train on this machine; the same command continues",
            "tools.train",
            "my_run.yaml train.optimizer.lr=1e-6",
            "train",
            recipe=True,
        ),
        Verb(
            "fork",
            "continue from an iteration of a run with changed settings",
            "tools.fork",
            "my_run@99 --run hotter rollout.rollout_temperature=1.2",
            "fork",
        ),
        Verb(
            "engines",
            "change the number of engines while a run continues",
            "tools.engines",
            "my_run 4",
            "engines",
        ),
        Verb(
            "reprocess",
            "score stored rollouts again, without sampling",
            "tools.reprocess",
            "--of my_run 'reward.function={type: math}'",
            "reprocess",
        ),
        Verb(
            "evaluate",
            "evaluate weights on held-out sets",
            "tools.evaluate",
            "--of my_run@99",
            "evaluate",
        ),
    ),
    "Look at a run": (
        Verb("report", "write the report page again", "tools.report", "my_run", "report"),
        Verb("rollouts", "print or export samples", "tools.rollouts", "my_run", "rollouts"),
        Verb(
            "timeline",
            "write a timeline for Perfetto",
            "tools.timeline",
            "my_run",
            "timeline",
        ),
        Verb(
            "audit",
            "verify records; origin of weights; SQL over samples",
            "tools.audit",
            "verify --run my_run",
            "audit",
        ),
        Verb(
            "replay",
            "train the stored batches again and compare every state",
            "tools.replay",
            "my_run",
            "replay",
        ),
    ),
    "Models and storage": (
        Verb(
            "convert hf2dist",
            "Hugging Face directory to torch_dist checkpoint",
            "tools.convert_hf_to_torch_dist",
            "--input-dir MODEL --output-dir OUT",
            "hf2dist",
        ),
        Verb(
            "convert dist2hf",
            "checkpoint to Hugging Face directory",
            "tools.convert_torch_dist_to_hf",
            "--of my_run@99 --output-dir OUT",
            "dist2hf",
        ),
        Verb(
            "gc",
            "list or delete objects that no run needs",
            "tools.gc",
            "--keep-checkpoints 3",
            "gc",
        ),
        Verb(
            "migrate",
            "migrate a store of format 1",
            "tools.migrate",
            "--store OLD --to NEW",
            "migrate",
        ),
    ),
    "Servers and measurements": (
        Verb(
            "up",
            "start Prefect server, S3 store, Ray head and worker on this machine",
            "tools.up",
            "--site my_site.yaml",
            "up",
        ),
        Verb("down", "stop these servers", "tools.up", "", "down", words=("--down",)),
        Verb(
            "bench",
            "measure parts of rlpipe against the libraries below them",
            "tools.bench.__main__",
            "rollout train --shape 0.6b",
            "bench",
        ),
        Verb(
            "completion",
            "print the completion script of bash, zsh or fish",
            "tools.command.completion",
            "bash",
            "completion",
        ),
    ),
}
"""Heading of the help → its verbs."""
VERBS: dict[str, Verb] = {verb.name: verb for section in SECTIONS.values() for verb in section}
GROUPS = {"convert": "convert checkpoints"}
"""First word of verbs of two words → task."""
