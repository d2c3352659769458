"""Print the completion script of a shell: verbs, options, recipes and files.

eval "$(rlpipe completion bash)"            in ~/.bashrc; zsh is the same with `zsh`
rlpipe completion fish > ~/.config/fish/completions/rlpipe.fish
"""

from __future__ import annotations

import sys

from click.shell_completion import get_completion_class

from tools.command import parsers
from tools.command.main import COMPLETION_VARIABLE, application
from tools.command.shared_options import COMMAND


def main() -> int:
    """Run the command."""
    shell = parsers.completion().parse_args().shell
    kind = get_completion_class(shell)
    assert kind is not None
    print(kind(application(), {}, COMMAND, COMPLETION_VARIABLE).source())
    return 0


if __name__ == "__main__":
    sys.exit(main())
