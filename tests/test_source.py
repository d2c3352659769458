"""The house rules that a machine can read: sizes, docstrings, import directions, tests that run."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from importlib.metadata import requires, version
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("rlpipe", "tasks", "flows", "deployments", "tools")
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CONTRACTS = {contract["id"]: contract for contract in PROJECT["tool"]["importlinter"]["contracts"]}


def rooms_of(contract: str, prefix: str = "") -> list[tuple[str, ...]]:
    """The layers of an import-linter contract, lowest first."""
    return [
        tuple(prefix + room.strip() for room in re.split("[|:]", entry))
        for entry in reversed(CONTRACTS[contract]["layers"])
    ]


LAYERS = rooms_of("layers", "rlpipe.") + [
    layer for layer in rooms_of("top-level") if layer != ("rlpipe",)
]
"""Lowest first. A module imports from its own room and from the layers below."""

SIBLINGS = {LAYERS.index(("rlpipe.slime", "rlpipe.config"))}
"""Layers whose rooms may import each other: a hook of a slime user needs slime's module names."""

HOMES = {
    "prefect": ("tasks", "flows", "deployments", "tools"),
    "ray": ("rlpipe.actors",),
    "sglang": ("rlpipe.engines.sglang",),
    "sglang_router": ("rlpipe.engines.sglang",),
    "megatron": ("rlpipe.engines.megatron",),
    "mbridge": ("rlpipe.engines.megatron",),
}
"""Third party → the only rooms that import it."""


def sources(*packages: str) -> list[Path]:
    return sorted(path for package in packages for path in (ROOT / package).rglob("*.py"))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


class Facts(NamedTuple):
    """What the rules read from a file. Trees are not kept: those of all files need gigabytes."""

    docstring: str
    statements: int
    """Number of statements of the module."""
    long_functions: tuple[str, ...]
    imports: tuple[tuple[int, str], ...]
    """(line, imported module) of every import, inside functions too. `from a import b` counts as
    `a.b`."""


@cache
def facts(path: Path) -> Facts:
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=name(path))
    long: list[str] = []
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                long.append(f"{name(path)}:{node.lineno} {node.name}: {lines} lines")
        elif isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(path)}:{node.lineno}: a relative import"
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return Facts(ast.get_docstring(tree) or "", len(tree.body), tuple(long), tuple(found))


def inside(what: str, rooms: tuple[str, ...]) -> bool:
    return any(what == room or what.startswith(f"{room}.") for room in rooms)


def layer(what: str) -> int | None:
    return next((index for index, rooms in enumerate(LAYERS) if inside(what, rooms)), None)


def test_every_file_says_what_it_is():
    silent = [name(path) for path in sources(*PACKAGES, "tests") if not facts(path).docstring]
    assert silent == []


def test_a_file_of_more_than_500_lines_says_why_in_its_docstring():
    long = [
        path
        for path in sources(*PACKAGES, "tests")
        if len(path.read_text(encoding="utf-8").splitlines()) > MAX_FILE_LINES
    ]
    assert [name(path) for path in long if "One file because" not in facts(path).docstring] == []


def test_no_function_is_longer_than_60_lines():
    too_long = [
        function for path in sources(*PACKAGES, "tests") for function in facts(path).long_functions
    ]
    assert too_long == []


def test_no_test_is_skipped_or_expected_to_fail():
    pattern = re.compile(r"\b(skipif|xfail|importorskip|unittest\.skip|pytest\.skip|mark\.skip)\b")
    found = [
        f"{name(path)}:{number}"
        for path in sources("tests")
        if path != Path(__file__)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if pattern.search(line)
    ]
    assert found == []


def test_every_test_file_mirrors_a_room_of_the_source():
    rooms = {
        path.relative_to(ROOT / "rlpipe").as_posix()
        for path in (ROOT / "rlpipe").rglob("*")
        if path.is_dir()
    }
    rooms |= {
        *PACKAGES,
        *(
            path.relative_to(ROOT).as_posix()
            for package in PACKAGES
            for path in (ROOT / package).rglob("*")
        ),
    }
    folders = {
        path.parent.relative_to(ROOT / "tests").as_posix()
        for path in sources("tests")
        if path.name.startswith("test_")
    }
    assert folders - rooms <= {".", "integration", "soak", "stores"}


def test_packages_export_nothing():
    """An `__init__.py` is a docstring."""
    loud = [
        name(path)
        for path in sources(*PACKAGES)
        if path.name == "__init__.py" and facts(path).statements > 1
    ]
    assert loud == []


def test_imports_go_down_the_layers():
    wrong = []
    for path in sources(*PACKAGES):
        mine = layer(module(path))
        for line, imported in facts(path).imports:
            other = layer(imported)
            if mine is None or other is None or other < mine or mine in SIBLINGS:
                continue
            if not any(
                inside(module(path), (room,)) and inside(imported, (room,)) for room in LAYERS[mine]
            ):
                wrong.append(f"{name(path)}:{line} imports {imported}")
    assert wrong == []


@pytest.mark.parametrize("package", sorted(HOMES))
def test_third_parties_are_imported_only_in_their_rooms(package):
    wrong = [
        f"{name(path)}:{line}"
        for path in sources(*PACKAGES)
        for line, imported in facts(path).imports
        if imported.partition(".")[0] == package and not inside(module(path), HOMES[package])
    ]
    assert wrong == []


def test_every_room_has_a_place_in_the_layers():
    library = ROOT / "rlpipe"
    rooms = {
        f"rlpipe.{path.stem}"
        for path in library.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    placed = {room for layer in LAYERS for room in layer}
    assert rooms - {"rlpipe.__init__"} <= placed


def test_pins_are_versions_of_everything_that_is_required():
    """No addresses and no local labels in constraints.txt, and each requirement of pyproject.toml
    is pinned there."""
    lines = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert [
        line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9._]+", line)
    ] == []
    pinned = {canonical(line.partition("==")[0]) for line in lines}
    extras = PROJECT["project"]["optional-dependencies"].values()
    required = [
        *PROJECT["project"]["dependencies"],
        *(entry for extra in extras for entry in extra),
    ]
    assert {canonical(re.split(r"[\[<>=!~; ]", entry)[0]) for entry in required} - pinned == set()


def test_what_sglang_declares_for_cuda_can_be_had_with_the_pins():
    """A CPU has SGLang without its requirements, so nothing else here would notice that a GPU
    machine cannot install it."""
    lines = [
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line and line[0] != "#"
    ]
    pinned = {canonical(name): version for name, version in lines}
    if version("sglang") != pinned["sglang"]:
        pytest.skip(f"SGLang {version('sglang')} declares something else")
    theirs = [Requirement(text) for text in requires("sglang") or []]
    declared = [one for one in theirs if one.marker is None or one.marker.evaluate({"extra": ""})]
    assert len(declared) > 50
    beyond = [
        Requirement("numpy<2.4"),
        Requirement("protobuf<7"),
    ]  # what mistral_common and nvidia-cutlass-dsl want of them
    known = [one for one in (*declared, *beyond) if canonical(one.name) in pinned]
    assert [
        str(one)
        for one in known
        if not one.specifier.contains(pinned[canonical(one.name)], prereleases=True)
    ] == []


def canonical(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()
