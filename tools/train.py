"""Train on this machine, from a recipe or from a command line in slime's style.

    rlpipe train spell_backward [--run NAME] [dotted.key=value ...]
    rlpipe train ${MODEL_ARGS[@]} ${CKPT_ARGS[@]} ${ROLLOUT_ARGS[@]} ... [--run NAME]

Flags of slime, Megatron's under their own names and SGLang's as `--sglang-*` become configuration
keys (`rlpipe flags` lists them). Without a recipe they start from slime's defaults; with one they
change the recipe. The command uses the Prefect server of the current profile, or starts one that
stays for some minutes. Ctrl-C stops the run; the same command continues after the last finished
stage.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module
from typing import Any

from rlpipe.config.load import (
    home,
    load_run,
    require_files,
    unused_keys,
    use_home,
)
from rlpipe.config.model import ResourcesConfig
from rlpipe.config.peft_directory import other_base
from rlpipe.config.run import RunConfig
from rlpipe.data.hub_commits import pinned
from rlpipe.errors import RlpipeError
from rlpipe.model_dir import long_responses, model_directory_if_present
from rlpipe.observe.terminal import Screen, waiting_for
from rlpipe.preflight import check
from rlpipe.slime.command_line import read_flags
from rlpipe.system.imports import quick_imports
from tools.command import parsers
from tools.command.parsers import COMMAND
from tools.command.run_words import apply_flags, notes, option_names, read_words
from tools.local_servers import LocalServers
from tools.template import template_of_run


def main() -> int:
    """Run the command.

    Exit codes: 0 done, 1 failed, 2 wrong input, 130 interrupted, 143 stopped by SIGTERM.
    """
    arguments, rest = read_words(parsers.train(), sys.argv[1:])
    try:
        use_home(arguments.home)
        flags = read_flags(rest, also=option_names(parsers.train()))
        apply_flags(arguments, flags)
        os.environ.update(flags.secrets)
        config = load_run(arguments.recipe, arguments.overrides, arguments.run)
        warnings = unused_keys(arguments.recipe, arguments.overrides, arguments.run)
        remarks: list[str] = []
        # --dump-config must work on a machine without the model or GPUs.
        if not arguments.dump_config:
            require_files(arguments.recipe, arguments.overrides, arguments.run)
            with Screen(quiet=arguments.quiet), waiting_for("checks before the start"):
                check(pinned(config, home()), home())
            remarks = [
                *context_warnings(config),
                *unused_servers(config),
                *other_base(config),
            ]
    except RlpipeError as error:
        print(f"{error.kind}: {error}", file=sys.stderr)
        return 2
    for note in [*notes(flags), *(f"warning: {text}" for text in (*warnings, *remarks))]:
        print(note, file=sys.stderr)
    if arguments.dump_config:
        from rlpipe.config.load import dump

        print(dump(config), end="")
        return 0
    return drive(arguments, config)


def context_warnings(config: RunConfig) -> list[str]:
    """Return the warnings about limits of responses.

    None for a model that is not on this machine yet. The run gives them once the model is there.
    """
    directory = model_directory_if_present(config.model, home(), seed=config.seed)
    if directory is None or not config.needs_engines:
        return []
    return long_responses(config.rollout, config.evaluation.datasets, directory)


def unused_servers(config: RunConfig) -> Iterator[str]:
    """Yield a text if this shell uses the Prefect server of `rlpipe up`, but the run neither its
    store nor its Ray."""
    if not (home() / ".up").is_dir():
        return
    servers = LocalServers(home())
    prefect = servers.environment.get("PREFECT_API_URL")
    if prefect is None or prefect != os.environ.get("PREFECT_API_URL"):
        return
    own = {"store.root": config.store.root, "resources.ray_address": config.resources.ray_address}
    missing = [text for text in servers.overrides if not own[text.partition("=")[0]]]
    if missing:
        yield (
            f"this run does not use all servers of `{COMMAND} up`; runs that Prefect starts do. "
            f"To use them, add {' '.join(missing)}"
        )


def drive(arguments: argparse.Namespace, config: RunConfig) -> int:
    """Run the train flow to its end in this process."""

    def start() -> Awaitable[dict[str, Any]]:
        with waiting_for("import of the stages"), quick_imports():
            from flows.train import train

        return train(arguments.recipe, arguments.overrides, arguments.run, arguments.takeover)

    def begin() -> None:
        import_clients()
        from rlpipe.actors import client
        from rlpipe.actors.ray import local_ray, named

        # Once a Prefect server starts too: on two cores they start in the time of one of them.
        local_ray.begin_connecting(
            config.resources,
            home(),
            namespace=named.namespace(config.cluster),
            then=partial(client.begin_cluster, config, home()),
        )

    template = template_of_run(home(), wanted=starts_ray(config.resources))
    code, summary = finish(start, begin=begin, template=template, quiet=arguments.quiet)
    if summary is not None:
        print_result(summary)
    return code


def starts_ray(resources: ResourcesConfig) -> bool:
    """True if the run starts a Ray of its own, on this machine."""
    return not resources.ray_address and os.environ.get("RAY_ADDRESS", "local") == "local"


def print_result(summary: dict[str, Any]) -> None:
    """Print the held-out score before and after, the report, and how to get the weights."""
    run = summary["run"]
    if summary["accuracy_before"] is not None:
        print(
            f"{run}: {summary['held_out_measure']} {summary['accuracy_before']:.3f} "
            f"→ {summary['accuracy_after']:.3f}"
        )
    print(f"{run}: see {home() / run}/report.html")
    if summary["iterations"]:
        command = f"{COMMAND} convert dist2hf --of {run} --output-dir DIR"
        print(f"{run}: weights for transformers: {command}")


RAY_AND_PREFECT = ("pydantic.v1", "starlette.datastructures")
"""Packages that Ray imports at its first call, and Prefect too."""


def import_clients() -> None:
    """Import Ray and the clients of the actors, which every run needs."""
    with quick_imports():
        import_module("rlpipe.actors.client")
        # A thread starts Ray while this thread imports Prefect. Of a package with circular imports
        # two threads can see a half: "cannot import name 'Field' from partially initialized module
        # 'pydantic.v1.fields'".
        for package in RAY_AND_PREFECT:
            import_module(package)


def finish(
    start: Callable[[], Awaitable[dict[str, Any]]],
    *,
    begin: Callable[[], None] = import_clients,
    template: AbstractContextManager[None] = nullcontext(),  # noqa: B008 - it has no state
    quiet: bool = False,
) -> tuple[int, dict[str, Any] | None]:
    """Run a flow under a Prefect server; return the exit code and the result, if any.

    `begin` is called before Prefect is imported, and also while a server starts. `template` is
    entered first. `quiet`: the terminal shows notices and errors, no progress.
    """
    from tools.local_prefect import local_prefect

    if sys.__stderr__ is not None:
        # User code that crashes this process leaves a stack trace.
        faulthandler.enable(file=sys.__stderr__)
    try:
        with Screen(quiet=quiet), template, local_prefect(home(), begin):
            return run_flow(start, begin)
    except KeyboardInterrupt:
        print(
            "\nstopped; the same command continues after the last finished stage", file=sys.stderr
        )
        return 130, None
    except RlpipeError as error:
        print(f"{error.kind}: {error}", file=sys.stderr)
        return 1, None


def run_flow(
    start: Callable[[], Awaitable[dict[str, Any]]], begin: Callable[[], None]
) -> tuple[int, dict[str, Any] | None]:
    """Run a flow under the running server. Raises: KeyboardInterrupt, RlpipeError."""
    with waiting_for("import of Prefect and Ray"), quick_imports():
        begin()
        from flows.stopping import Preempted
        from rlpipe.actors.ray.local_ray import disconnect
        from tools.local_prefect import drain

    async def run() -> dict[str, Any]:
        try:
            return await start()
        finally:
            # Events and logs of the last seconds would be lost with the server.
            await drain()

    try:
        return 0, asyncio.run(run())
    except Preempted as error:
        print(error, file=sys.stderr)
        return 143, None
    finally:
        disconnect()


if __name__ == "__main__":
    sys.exit(main())
