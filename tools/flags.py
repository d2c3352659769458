"""Print the effect of each slime flag: its key, or the reason of its refusal.

    rlpipe flags [--arguments] [PART OF A NAME]

Names of Megatron-core, SGLang and the router pass through. The last lines count them; with
`--arguments`, each of them has a line.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from rlpipe.config.arguments import names
from rlpipe.config.arguments.check import KEYS, rule_of
from rlpipe.config.similar_keys import nearest
from rlpipe.slime.args import FLAGS, absent
from rlpipe.slime.flag import Flag
from tools.command import parsers
from tools.piped import piped

PREFIX = {"megatron": "--", "sglang": "--sglang-", "router": "--router-"}


def main() -> int:
    """Print the table. Exit code 1 if no name matches."""
    arguments = parsers.flags().parse_args()
    lines = argument_lines() if arguments.arguments else flag_lines()
    part = arguments.part.replace("_", "-").lower()
    matches = [line for line in lines if part in line.replace("_", "-").lower()]
    if not matches:
        print(f"no name contains {arguments.part!r}", file=sys.stderr)
        if near := nearest(part.lstrip("-").replace("-", "_"), FLAGS):
            print(f"nearest: {', '.join(FLAGS[name].option for name in near)}", file=sys.stderr)
        if not arguments.arguments:
            print(
                f"arguments of Megatron, SGLang and the router: {parsers.COMMAND} flags "
                f"--arguments {arguments.part}",
                file=sys.stderr,
            )
        return 1
    print("\n".join(matches))
    return 0


def flag_lines() -> Iterator[str]:
    """Yield a line for each flag of the table, then the number of names that pass through."""
    for flag in FLAGS.values():
        yield f"{flag.option:48} {effect(flag)}"
    for table, prefix in PREFIX.items():
        content = names.load(table)
        count = len({name for kind in content["receivers"].values() for name in kind})
        yield f"{prefix + '*':48} {count} names of {content['package']} {content['version']}"


def argument_lines() -> Iterator[str]:
    """Yield a line for each argument of another package: its key and its effect."""
    kinds = {
        "owned": "refused",
        "fixed": "fixed",
        "inert": "refused, it would have no effect",
        "free": "passed on",
    }
    for table, key in KEYS.items():
        for name in names.entries(table):
            rule = rule_of(table, name)
            text = "passed on" if rule is None else f"{kinds[rule.kind]}: {rule.text}"
            if rule is not None and rule.kind == "fixed":
                text = f"only {rule.values[0]!r}: {rule.text}"
            yield f"{f'{key}.{name}':64} {text}"


def effect(flag: Flag) -> str:
    """Return the effect of a flag as text."""
    if absent(flag):
        return f"refused: this version has no {flag.key}"
    if flag.effect in ("to", "built"):
        return flag.key
    if flag.effect == "only":
        return f"only {' or '.join(map(str, flag.allowed))}: {flag.reason}"
    return f"{'changes nothing' if flag.effect == 'neutral' else 'refused'}: {flag.reason}"


if __name__ == "__main__":
    sys.exit(piped(main))
