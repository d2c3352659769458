"""Evaluate a run's weights, or a recipe's model, on held-out sets.

    rlpipe evaluate --of my_run[@K]                                # the run's own sets
    rlpipe evaluate --of my_run --eval-prompt-data aime aime.jsonl
    rlpipe evaluate --recipe my_run.yaml [dotted.key=value ...]    # the recipe's model

Prints every metric of every set, and how the set was sampled. The run stays as it is. Flags are
those of `rlpipe train`, such as `--n-samples-per-eval-prompt 16`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Awaitable, Mapping
from typing import Any, cast

from flows.derived_runs import evaluation_config
from rlpipe.config.data import EvalDataset
from rlpipe.config.load import home, recipes, use_home, validate_stored
from rlpipe.config.run import RunConfig
from rlpipe.errors import ConfigError, RlpipeError
from rlpipe.observe.pages import SAMPLES_PAGE
from rlpipe.preflight import check
from rlpipe.slime.command_line import read_flags
from rlpipe.slime.flag_keys import BASE, overrides_of
from rlpipe.store.run_file import find_run
from tools.command import parsers
from tools.command.run_words import option_names, read_words
from tools.template import template_of_run
from tools.train import finish, starts_ray


def main() -> int:
    """Run the command. Exit codes: as `rlpipe train`."""
    arguments, rest = read_words(parsers.evaluate(), sys.argv[1:])
    try:
        use_home(arguments.home)
        parameters, config = flow_parameters(arguments, rest)
    except RlpipeError as error:
        print(f"{error.kind}: {error}", file=sys.stderr)
        return 2

    def start() -> Awaitable[dict[str, Any]]:
        from flows.evaluate import evaluate

        return cast("Awaitable[dict[str, Any]]", evaluate(**parameters))

    template = template_of_run(home(), wanted=starts_ray(config.resources))
    code, summary = finish(start, template=template)
    if summary is not None:
        for line in sampling_notes(config, parameters["run"]):
            print(line, file=sys.stderr)
    for name, value in sorted((summary or {}).get("evaluation", {}).items()):
        print(f"{name:48} {value:.4f}")
    if summary is not None:
        print(f"answers: {home() / summary['run']}/{SAMPLES_PAGE}", file=sys.stderr)
    return code


def sampling_notes(config: RunConfig, run: str | None) -> list[str]:
    """Return a line for each held-out set: how it was sampled, and how `run` itself samples it."""
    record = find_run(home(), run) if run else None
    of_run = validate_stored(record.config) if record else None
    lines = []
    for dataset in config.evaluation.datasets:
        used = sampling_of(config, dataset)
        line = f"{dataset.name}: sampled with {_text(used)}"
        for own in _own_sampling(of_run, dataset.name):
            if changed := {label: value for label, value in own.items() if value != used[label]}:
                line += f"; the evaluations of {run} itself have {_text(changed)}"
            elif used["temperature"]:
                line += f", as {run} itself; other draws, so figures differ by chance"
        lines.append(line)
    return lines


def _own_sampling(of_run: RunConfig | None, name: str) -> list[dict[str, Any]]:
    """Return the sampling of the run's held-out set of this name, if it has one."""
    if of_run is None:
        return []
    own = of_run.evaluation.datasets
    return [sampling_of(of_run, dataset) for dataset in own if dataset.name == name]


def sampling_of(config: RunConfig, dataset: EvalDataset) -> dict[str, Any]:
    """Return label → value of the sampling parameters of a held-out set."""
    rollout = config.rollout.model_copy(update=dataset.sampling())
    temperature = dataset.temperature
    return {
        "temperature": rollout.rollout_temperature if temperature is None else temperature,
        "top_p": rollout.rollout_top_p,
        "top_k": rollout.rollout_top_k,
        "responses per prompt": rollout.n_samples_per_prompt,
        "longest response": rollout.rollout_max_response_len,
    }


def _text(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{label} {value}" for label, value in values.items())


def flow_parameters(
    arguments: argparse.Namespace, words: list[str]
) -> tuple[dict[str, Any], RunConfig]:
    """Return the parameters of the flow and the checked configuration of the evaluation.

    Wrong input is refused before a server starts. Raises: as `check`.
    """
    if arguments.recipe and not arguments.of:
        refuse_run(arguments.recipe)
    flags = read_flags(words, also=option_names(parsers.evaluate()))
    run, _, iteration = (arguments.of or "").partition("@")
    if iteration and not iteration.isdigit():
        raise ConfigError(
            "not the name of a commit",
            where="--of",
            found=arguments.of,
            expected="RUN or RUN@K",
        )
    parameters = {
        "run": run or None,
        "iteration": int(iteration) if iteration else None,
        "recipe": arguments.recipe or (str(BASE) if flags and not run else None),
        "overrides": overrides_of(flags),
        "name": arguments.name,
    }
    config = evaluation_config(home(), **parameters)
    check(config, home())
    return {**parameters, "takeover": arguments.takeover}, config


def refuse_run(recipe: str) -> None:
    """Refuse a run in the place of a recipe. Raises: ConfigError."""
    run = recipe.partition("@")[0]
    if run not in recipes() and find_run(home(), run):
        raise ConfigError(
            "this is a run, not a recipe",
            where=repr(recipe),
            expected="a YAML file, or --of RUN[@K]",
            do=f"write {parsers.COMMAND} evaluate --of {recipe}",
        )


if __name__ == "__main__":
    sys.exit(main())
