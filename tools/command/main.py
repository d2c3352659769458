"""Dispatch the command `rlpipe`: help, completion, and one verb after the other.

click reads the verb and completes words. The module of a verb reads the rest itself, and is
imported when its verb runs: `rlpipe --help` imports neither torch nor Ray.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import signal
import sys
from importlib.metadata import version

import click
from click.shell_completion import CompletionItem

from rlpipe.system.project import RECIPES
from tools.command import parsers
from tools.command.shared_options import COMMAND
from tools.command.verbs import GROUPS, SECTIONS, VERBS, Verb
from tools.piped import piped

OF_THE_PATH = {
    errno.ENOENT,
    errno.EACCES,
    errno.EPERM,
    errno.EEXIST,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EROFS,
    errno.ENOSPC,
    errno.ENAMETOOLONG,
}
"""Error numbers of a path that cannot be read or written."""
COMPLETION_VARIABLE = "_RLPIPE_COMPLETE"
"""Environment variable with which a shell asks for completions."""
HEADLINE = """RL post-training of language models as a workflow.

    rlpipe init my_run                 make a recipe, a reward and data
    rlpipe train my_run/recipe.yaml    train it; the same command continues
    rlpipe report my_run               look at the result
"""


class _VerbCommand(click.Command):
    """A verb: all words after its name are passed to its module."""

    def __init__(self, verb: Verb) -> None:
        super().__init__(
            verb.name.rpartition(" ")[2],
            params=[
                click.Argument(
                    ["words"],
                    nargs=-1,
                    type=click.UNPROCESSED,
                    shell_complete=lambda _ctx, _param, word: self._words(word),
                )
            ],
            callback=lambda words: run(verb, words),
            short_help=verb.task,
            add_help_option=False,
            context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
        )
        self._verb = verb

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete an option of the verb."""
        return [
            CompletionItem(option, help=text)
            for option, text in options(self._verb).items()
            if option.startswith(incomplete)
        ]

    def _words(self, incomplete: str) -> list[CompletionItem]:
        """Complete the name of a recipe, or a file."""
        recipes = sorted(path.stem for path in RECIPES.glob("*.yaml")) if self._verb.recipe else []
        matches = [CompletionItem(name) for name in recipes if name.startswith(incomplete)]
        return matches or [CompletionItem(incomplete, type="file")]


class _Group(click.Group):
    """The verbs, listed by section."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a line for each verb."""
        width = max(map(len, VERBS))
        for heading, verbs in SECTIONS.items():
            with formatter.section(heading):
                formatter.write_dl([(verb.name.ljust(width), verb.task) for verb in verbs])

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the tasks first."""
        formatter.write(f"{HEADLINE}\n")
        self.format_commands(ctx, formatter)
        formatter.write(
            f"\n{COMMAND} VERB --help has options and an example. {COMMAND} --version.\n"
        )


class _Kinds(click.Group):
    """The verbs of two words, such as `convert hf2dist`; the task comes first, as in a verb."""

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the task, then the verbs."""
        formatter.write(f"{self.help}\n")
        self.format_usage(ctx, formatter)
        self.format_options(ctx, formatter)


def application() -> click.Group:
    """Return the command with all verbs."""
    root = _Group(COMMAND, no_args_is_help=False, invoke_without_command=True, callback=_list_verbs)
    root = click.version_option(version(COMMAND), "--version", prog_name=COMMAND)(root)
    for word, task in GROUPS.items():
        root.add_command(_Kinds(word, short_help=task, help=task.capitalize() + "."))
    for verb in VERBS.values():
        first, _, second = verb.name.partition(" ")
        group = root.commands[first] if second else root
        assert isinstance(group, click.Group)
        group.add_command(_VerbCommand(verb))
    return root


def run(verb: Verb, words: tuple[str, ...]) -> None:
    """Run a verb in this process and end it with the verb's exit code."""
    if verb.parser and not {"-h", "--help"}.isdisjoint(words):
        # Without the module, which may import torch.
        parser_of(verb).print_help()
        sys.exit(0)
    sys.argv = [f"{COMMAND} {verb.name}", *verb.words, *words]
    try:
        module = importlib.import_module(verb.module)
        sys.exit(piped(module.main))
    except OSError as error:
        if error.errno not in OF_THE_PATH or error.filename is None:
            raise
        print(
            f"{COMMAND} {verb.name}: {error.filename}: {error.strerror}\n"
            f"  {'do:':<10}check the path, its folder and the permissions",
            file=sys.stderr,
        )
        sys.exit(2)
    except KeyboardInterrupt:  # click would end with code 1
        print("\nstopped", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


def options(verb: Verb) -> dict[str, str]:
    """Return option → help of a verb."""
    if not verb.parser:
        return {}
    return {
        option: action.help or ""
        for action in parser_of(verb)._actions
        for option in action.option_strings
    }


def parser_of(verb: Verb) -> argparse.ArgumentParser:
    """Return the parser of a verb's options."""
    return getattr(parsers, verb.parser)()


def main() -> int:
    """Run the command line; end the process with the exit code of the verb."""
    application().main(prog_name=COMMAND, complete_var=COMPLETION_VARIABLE)
    return 0


def _list_verbs() -> None:
    context = click.get_current_context()
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
