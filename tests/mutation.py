"""Measure how many random mutations of the core the unit tests find.

    python -m tests.mutation --number 30 --seed 1

Each mutation changes one place of one file: a comparison, a number, a boolean, an operator or a
removed statement. It is applied in a copy of the working tree, where the unit tests of that file
run: first the test files that import the module, then the rest of its room. A failed test means
"found", if it passes without the mutation.

The mutations depend on the seed and on the source of the core only, so the same command before
and after a change of the tests compares like with like. Exit code 1 if a test fails without a
mutation.
"""

from __future__ import annotations

import argparse
import ast
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CORE = ("rlpipe/store", "rlpipe/algorithms", "rlpipe/batch", "rlpipe/rollout", "tasks")
UNIT_TESTS = "not integration and not long"
TIMEOUT_S = 600
PRELOADED = ["aiohttp", "hypothesis", "prefect", "pyarrow.dataset", "ray", "s3fs", "torch"]
"""Imported once, in the process that all runs of pytest are forked from."""
COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
}
OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "/",
    ast.Div: "*",
    ast.FloorDiv: "*",
}
REMOVABLE = (ast.Expr, ast.AugAssign, ast.Raise, ast.Delete)
"""Not assignments: a name that is missing fails in every test."""
UNSEEN = ("annotation", "returns", "decorator_list")
"""Fields of a node without effect at run time, or whose change is an import error."""


@dataclass(frozen=True)
class Mutation:
    """Replace the bytes [begin, end) of a file by `after`."""

    file: str
    line: int
    begin: int
    end: int
    before: str
    after: str

    def apply(self, root: Path) -> None:
        path = root / self.file
        source = path.read_bytes()
        path.write_bytes(source[: self.begin] + self.after.encode() + source[self.end :])

    def __str__(self) -> str:
        before, after = (" ".join(text.split()) for text in (self.before, self.after))
        return f"{self.file}:{self.line}: {before[:60]} -> {after[:60]}"


def mutations(file: str, source: str) -> list[Mutation]:
    """Return every mutation of a file, in the order of its lines."""
    encoded = source.encode()
    starts = [0]
    for line in encoded.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node in _effective(ast.parse(source)):
        after = _mutated(node)
        if after is None:
            continue
        assert isinstance(node, ast.stmt | ast.expr)
        assert node.end_lineno is not None and node.end_col_offset is not None
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        before = encoded[begin:end].decode()  # `ast.get_source_segment` splits the file each time
        if after != before:
            found.append(Mutation(file, node.lineno, begin, end, before, after))
    return sorted(found, key=lambda one: (one.begin, one.end))


def _effective(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run: no docstrings, no annotations, no imports for the type checker."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    for name, value in ast.iter_fields(node):
        if name in UNSEEN:
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or _is_text(child):
                continue
            yield child
            yield from _effective(child)


def _is_text(node: ast.AST) -> bool:
    """True if the node is a docstring, or a literal of an f-string."""
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    )


def _mutated(node: ast.AST) -> str | None:
    """Return the changed source of a node; None if no mutation applies to it."""
    match node:
        case ast.Constant(value=bool(value)):
            return str(not value)
        case ast.Constant(value=int(value)):
            return str(value + 1)
        case ast.Compare(left=left, ops=[operator], comparators=[right]):
            return f"({ast.unparse(left)} {COMPARISONS[type(operator)]} {ast.unparse(right)})"
        case ast.BoolOp(op=operator, values=values):
            word = " or " if isinstance(operator, ast.And) else " and "
            return "(" + word.join(f"({ast.unparse(value)})" for value in values) + ")"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return f"({ast.unparse(operand)})"
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in OPERATORS:
            if any(
                isinstance(side, ast.Constant | ast.JoinedStr) and _is_string(side)
                for side in (left, right)
            ):
                return None
            return f"(({ast.unparse(left)}) {OPERATORS[type(operator)]} ({ast.unparse(right)}))"
        case ast.stmt() if isinstance(node, REMOVABLE):
            return "pass"
    return None


def _is_string(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def draw(root: Path, packages: Sequence[str], number: int, seed: int) -> list[Mutation]:
    """Return `number` mutations of the packages: each line is as likely as any other."""
    lines: dict[tuple[str, int], list[Mutation]] = {}
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            file = path.relative_to(root).as_posix()
            for mutation in mutations(file, path.read_text(encoding="utf-8")):
                lines.setdefault((file, mutation.line), []).append(mutation)
    chance = random.Random(seed)
    chosen = chance.sample(sorted(lines), min(number, len(lines)))
    return [chance.choice(lines[place]) for place in chosen]


def files_covering(root: Path, file: str) -> list[list[str]]:
    """Return the test files that import a module, and then the rest of its room."""
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    package, _, name = module.rpartition(".")
    forms = (f"{module} import", f"import {module}", f"from {package} import {name}")
    files = sorted((root / "tests").rglob("test_*.py"))
    direct = [path for path in files if any(form in path.read_text() for form in forms)]
    room = root / "tests" / Path(file).parent.as_posix().removeprefix("rlpipe/")
    rest = [path for path in files if path.is_relative_to(room) and path not in direct]
    direct.sort(key=lambda path: path.name != f"test_{name}.py")  # the likeliest to find it
    return [
        [path.relative_to(root).as_posix() for path in paths] for paths in (direct, rest) if paths
    ]


def failed_test(root: Path, stages: Sequence[Sequence[str]]) -> str:
    """Run the unit tests until one fails, and return its line of the summary; "" if all pass."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    for files in stages:
        with tempfile.NamedTemporaryFile("r", encoding="utf-8") as output:
            run = context.Process(target=_run_tests, args=(root, list(files), output.name))
            run.start()
            run.join(TIMEOUT_S)
            if run.exitcode is None:
                run.kill()
                run.join()
                return f"no end in {TIMEOUT_S} s"
            lines = output.read().splitlines()
        if run.exitcode not in (0, 5):  # 5: only integration tests in these files
            failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
            return "".join((failures or lines)[-1:]) or f"exit code {run.exitcode}"
    return ""


def _run_tests(root: Path, files: list[str], output: str) -> None:
    """Run pytest in this process with the modules of `root`; exit with its code."""
    descriptor = os.open(output, os.O_WRONLY)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(root)
    os.environ["PYTHONPATH"] = str(root)
    sys.path.insert(0, str(root))
    sys.dont_write_bytecode = True  # two mutations of one file may have the same time and size
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    options = ["-x", "-q", "-m", UNIT_TESTS, "-p", "no:cacheprovider", "--no-header", "-rfE"]
    code = pytest.main([*options, *files])
    sys.stdout.flush()
    os._exit(code)


def copy_tree(target: Path) -> Path:
    """Copy the files of the working tree that git knows."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--number", type=int, default=30, help="mutations (30)")
    parser.add_argument("--seed", type=int, default=1, help="of the choice (1)")
    parser.add_argument("--packages", nargs="+", default=CORE, help="folders to mutate")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="rlpipe-mutation-") as folder:
        root = copy_tree(Path(folder))
        drawn = draw(root, chosen.packages, chosen.number, chosen.seed)
        found = 0
        for mutation in drawn:
            original = (root / mutation.file).read_bytes()
            started = time.monotonic()
            mutation.apply(root)
            failure = failed_test(root, files_covering(root, mutation.file))
            (root / mutation.file).write_bytes(original)
            failed = failure.removeprefix("FAILED ").removeprefix("ERROR ").partition(" - ")[0]
            if failed.startswith("tests/") and failed_test(root, [[failed]]):
                print(f"it fails without a mutation: {failed}", file=sys.stderr)
                return 1
            found += bool(failure)
            result = f"found: {failure[:160]}" if failure else "SURVIVED"
            print(f"{mutation}\n    {result} ({time.monotonic() - started:.0f} s)", flush=True)
        print(f"{found} of {len(drawn)} mutations found (seed {chosen.seed})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
