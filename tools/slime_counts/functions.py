"""Count the custom functions and the tests of a checkout of slime that run here unchanged.

    python -m tools.slime_counts.functions CHECKOUT [functions|contracts|tests] [--without-source]

functions   the custom functions that its launch scripts, tests and example packages name
contracts   its test files for plugins; all tests of a file must pass
tests       its test modules for samples, rewards, hooks, data, agents and losses

`--without-source` hides slime's package, so that only the modules that rlpipe provides are there.
A missing package of others (`strands`, `wandb`, ...) is named; `PYTHONPATH` may have it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

FLAG = re.compile(r"--[a-z-]*(?:-path|-function)\s+(?P<path>[A-Za-z_][\w-]*(?:\.\w+)+)")
MORE = (
    "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std_with_fallback",
    "slime_plugins.rollout_buffer.rollout_buffer_example.generate_rollout",
    "slime.rollout.sglang_rollout.generate_rollout",
)
"""Functions that only slime's documents name."""
CONTRACTS = "tests/plugin_contracts/test_*.py"
TESTS = (
    "tests/test_sample.py",
    "tests/test_rm_*.py",
    "tests/test_rollout_sample_hooks.py",
    "tests/test_read_file_slicing.py",
    "tests/test_filter_long_prompt.py",
    "tests/test_fully_async_rollout.py",
    "tests/test_tau_bench_token_delta.py",
    "tests/test_agent/test_*.py",
    "tests/test_policy_loss.py",
    "tests/test_ppo_kl_metric.py",
)
_IMPORTS = """
import importlib, json, sys
from rlpipe.slime.modules import provide

folders, names = json.loads(sys.argv[1])
provide()
sys.path[:0] = folders
problems = {}
for path in names:
    module, _, name = path.rpartition(".")
    try:
        getattr(importlib.import_module(module), name)
    except Exception as error:
        problems[path] = f"{type(error).__name__}: {error}"
print(json.dumps(problems), file=sys.__stdout__)
"""
_PYTEST = """
import sys
from rlpipe.slime.modules import provide

provide()
import pytest

sys.exit(pytest.main(sys.argv[1:]))
"""


def main() -> int:
    """Print the counts. Exit code 1 if a function or a test fails."""
    parser = argparse.ArgumentParser(prog="python -m tools.slime_counts.functions")
    parser.add_argument("checkout", type=Path)
    parser.add_argument("kind", nargs="?", choices=("functions", "contracts", "tests"))
    parser.add_argument("--without-source", action="store_true")
    arguments = parser.parse_args()
    checkout = arguments.checkout.resolve()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        if arguments.without_source:
            checkout = _without_package(checkout, Path(folder))
        if arguments.kind in (None, "functions"):
            failed += _print_functions(checkout)
        if arguments.kind in (None, "contracts"):
            failed += _print_tests(checkout, (CONTRACTS,), Path(folder))
        if arguments.kind in (None, "tests"):
            failed += _print_tests(checkout, TESTS, Path(folder))
    return 1 if failed else 0


def _without_package(checkout: Path, scratch: Path) -> Path:
    """Return a copy of the checkout's folders whose package `slime` cannot be imported."""
    copy = scratch / "checkout"
    copy.mkdir()
    for entry in checkout.iterdir():
        if entry.name != "slime":
            (copy / entry.name).symlink_to(entry)
    # The tests read source files of the package, but it has no __init__.py.
    (copy / "slime").mkdir()
    for entry in (checkout / "slime").iterdir():
        if entry.name != "__init__.py":
            (copy / "slime" / entry.name).symlink_to(entry)
    return copy


def custom_functions(checkout: Path) -> list[str]:
    """Return the dotted paths of the checkout's custom functions."""
    found: set[str] = set(MORE)
    for folder in ("examples", "scripts", "tests", "slime_plugins"):
        for file in sorted((checkout / folder).rglob("*")):
            if file.suffix in (".sh", ".py"):
                found.update(match["path"] for match in FLAG.finditer(file.read_text()))
    return sorted(path for path in found if not path.startswith("plugin_contracts."))


def _print_functions(checkout: Path) -> int:
    names = custom_functions(checkout)
    folders = [str(checkout), *(str(entry) for entry in sorted((checkout / "examples").iterdir()))]
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTS, json.dumps([folders, names])],
        capture_output=True,
        text=True,
        check=True,
    )
    problems = json.loads(done.stdout.splitlines()[-1])
    for name in names:
        print(f"{name}: {problems.get(name, 'imported')}")
    print(f"{len(names) - len(problems)} of {len(names)} functions imported")
    return len(problems)


def _print_tests(checkout: Path, patterns: tuple[str, ...], scratch: Path) -> int:
    """Run test files, each in a process; return the number of files with a failed test."""
    files = [file for pattern in patterns for file in sorted(checkout.glob(pattern))]
    failed = 0
    for file in files:
        name = file.relative_to(checkout).as_posix()
        report = scratch / "report.xml"
        report.unlink(missing_ok=True)
        options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(checkout)]
        subprocess.run(
            [sys.executable, "-c", _PYTEST, *options, f"--junit-xml={report}", name],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": _python_path(checkout)},
            capture_output=True,
            check=False,
        )
        problems = list(_problems(report)) if report.is_file() else ["no report"]
        failed += bool(problems)
        print(f"{name}: {'; '.join(problems) or 'passed'}")
    print(f"{len(files) - failed} of {len(files)} test files passed")
    return failed


def _python_path(checkout: Path) -> str:
    return os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(checkout))))


def _problems(report: Path) -> Iterator[str]:
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        for kind in ("failure", "error"):
            for problem in case.iter(kind):
                lines = (problem.get("message") or "").splitlines() or [kind]
                if kind == "error":
                    lines = [line for line in (problem.text or "").splitlines() if line] or lines
                yield f"{case.get('name')}: {lines[-1]}"


if __name__ == "__main__":
    sys.exit(main())
