"""What becomes of slime's flags, and where every point of its usage is here:

    python -m tools.flags [--points | --arguments] [PART OF A NAME]

One line a flag: its key, or that it changes nothing or is refused, and why. Megatron-core's,
SGLang's and the router's own names pass through and are counted at the end; with `--arguments`,
each of them has a line too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from rlpipe.config.arguments import names
from rlpipe.config.arguments.check import KEYS, rule_of
from rlpipe.slime.args import FLAGS, absent
from rlpipe.slime.flag import Flag
from tools.piped import piped
from tools.points import POINTS

PREFIX = {"megatron": "--", "sglang": "--sglang-", "router": "--router-"}


def main() -> int:
    """Print the table. Exit code 1 if nothing has such a name."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.flags", description="What becomes of slime's flags."
    )
    parser.add_argument(
        "--points", action="store_true", help="the points of slime's usage instead, S-040 to S-222"
    )
    parser.add_argument(
        "--arguments",
        action="store_true",
        help="the arguments of Megatron-core, SGLang and the router instead",
    )
    parser.add_argument("part", nargs="?", default="", help="only names that hold this")
    arguments = parser.parse_args()
    chosen = passed if arguments.arguments else points if arguments.points else flags
    lines = list(chosen())
    found = [
        line
        for line in lines
        if arguments.part.replace("_", "-").lower() in line.replace("_", "-").lower()
    ]
    print("\n".join(found))
    return 0 if found else 1


def flags() -> Iterator[str]:
    """A line for each flag of the table, then how many names pass through."""
    for flag in FLAGS.values():
        yield f"{flag.spelled:48} {becomes(flag)}"
    for table, prefix in PREFIX.items():
        content = names.load(table)
        count = len({name for kind in content["receivers"].values() for name in kind})
        yield f"{prefix + '*':48} {count} names of {content['package']} {content['version']}"


def passed() -> Iterator[str]:
    """A line for each argument that goes to another package: the key it is given under, and what
    becomes of it."""
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


def becomes(flag: Flag) -> str:
    """What a flag does, in words."""
    if absent(flag):
        return f"refused: this version has no {flag.key}"
    if flag.verdict in ("to", "built"):
        return flag.key
    if flag.verdict == "only":
        return f"only {' or '.join(map(str, flag.allowed))}: {flag.why}"
    return f"{'changes nothing' if flag.verdict == 'neutral' else 'refused'}: {flag.why}"


def points() -> Iterator[str]:
    """A line for each point: what is known, keys, test, note."""
    for number, point in POINTS.items():
        where = point.keys.replace(" ", ", ") or "-"
        yield f"{number}  {point.known:44} {where:58} tests/{point.test}" + (
            f"  ({point.note})" if point.note else ""
        )


if __name__ == "__main__":
    sys.exit(piped(main))
