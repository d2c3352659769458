"""Count properties that make source code slow to read.

    python -m tools.source_counts [FOLDER ...]

Prints one figure a line: sizes, long lines, tuple-packed assignments, comments, small modules with
one importer, docstrings that ask, and words that STYLE.md excludes. Without folders: the whole
project except its tests. The figures before and after a clean-up are in CHANGELOG.md.
"""

from __future__ import annotations

import argparse
import ast
import re
import statistics
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("rlpipe", "flows", "tasks", "deployments", "tools")
WIDTH = 100
SMALL_MODULE_LINES = 120
DIALECT = re.compile(
    r"\b(whom|whoever|whose turn|anew|so many|goes on|go on with|lies|is said|are said|was said"
    r"|had from|asked for|nobody|somebody|beside|known by)\b",
    re.IGNORECASE,
)
"""Words that were read twice by readers of this code."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = ast.Module | ast.ClassDef | Function


def main() -> int:
    """Print the counts of the folders."""
    parser = argparse.ArgumentParser(prog="python -m tools.source_counts", description=__doc__)
    parser.add_argument("folders", nargs="*", default=FOLDERS, help="default: all but the tests")
    files = sorted(path for name in parser.parse_args().folders for path in python_files(name))
    for name, value in counts(files).items():
        print(f"{name:46} {value}")
    return 0


def python_files(name: str) -> Iterator[Path]:
    """Return the Python files of a folder, or the file itself."""
    path = Path(name)
    return iter([path]) if path.is_file() else path.rglob("*.py")


def counts(files: list[Path]) -> dict[str, str]:
    """Return the figures of these files, by name."""
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    lines = [line for text in texts.values() for line in text.splitlines()]
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    functions = [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for node in nodes
        if isinstance(node, Function)
    ]
    assigned = [node for node in nodes if isinstance(node, ast.Assign)]
    packed = [node for node in assigned if packs_a_tuple(node)]
    docs = [ast.get_docstring(node) or "" for node in nodes if isinstance(node, Documented)]
    comments = sum(number_of_comments(path) for path in files)
    names = Counter(path.name for path in files if path.name not in ("__init__.py", "__main__.py"))
    shared = [number for number in names.values() if number > 1]
    return {
        "files": str(len(files)),
        "lines": str(len(lines)),
        "lines of the longest file": str(max(len(text.splitlines()) for text in texts.values())),
        "lines of a function, median": str(statistics.median(functions)),
        "lines of the longest function": str(max(functions)),
        f"lines over {WIDTH} columns": percent(sum(len(line) > WIDTH for line in lines), lines),
        "assignments that pack a tuple": percent(len(packed), assigned),
        "comments in a thousand lines": f"{1000 * comments / len(lines):.1f}",
        f"modules < {SMALL_MODULE_LINES} lines with one importer": str(len(single(texts, trees))),
        "file names that several files have": f"{len(shared)} (of {sum(shared)} files)",
        'docstrings with "Not here:"': str(sum("Not here:" in doc for doc in docs)),
        "docstrings that ask a question": str(sum(asks(doc) for doc in docs)),
        "words of the old dialect": str(sum(len(DIALECT.findall(line)) for line in lines)),
    }


def packs_a_tuple(node: ast.Assign) -> bool:
    """True for `a, b = x, y`: several statements in one."""
    return isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)


def asks(docstring: str) -> bool:
    """True if the first line of a docstring is a question."""
    return docstring.strip().split("\n")[0].rstrip().endswith("?")


def number_of_comments(path: Path) -> int:
    """Return the number of comments that are not instructions to a tool."""
    with tokenize.open(path) as file:
        tokens = [one.string for one in tokenize.generate_tokens(file.readline)]
    comments = [text for text in tokens if text.startswith("#") and not text.startswith("#!")]
    return sum(not re.match(r"#\s*(noqa|pyright|type:|fmt:)", text) for text in comments)


def single(texts: dict[Path, str], trees: dict[Path, ast.Module]) -> list[Path]:
    """Return the small modules that exactly one other module imports."""
    modules = {".".join(path.with_suffix("").parts): path for path in texts}
    importers: dict[Path, set[Path]] = {path: set() for path in texts}
    for importer, tree in trees.items():
        for name in imported_names(tree):
            if name in modules and modules[name] != importer:
                importers[modules[name]].add(importer)
    small = {path for path, text in texts.items() if text.count("\n") < SMALL_MODULE_LINES}
    return sorted(path for path in small if len(importers[path]) == 1)


def imported_names(tree: ast.Module) -> Iterator[str]:
    """Yield the dotted name of each module that a module may import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def percent(number: int, of: list) -> str:
    """Return a share with its number."""
    return f"{100 * number / max(len(of), 1):.1f} % ({number})"


if __name__ == "__main__":
    sys.exit(main())
