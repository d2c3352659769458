"""Arguments of a Megatron-LM checkout, read from its source (rlpipe.config.arguments.checkout)."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlpipe.config.arguments import names
from rlpipe.config.arguments.check import check_megatron
from rlpipe.config.arguments.checkout import CLASSES, PROVIDER, arguments, checkout, options
from rlpipe.config.arguments.names import OBJECT
from rlpipe.errors import ConfigError
from rlpipe.slime.command_line import read_flags

FIELDS = """
from dataclasses import dataclass, field

@dataclass
class ModelParallelConfig:
    depth: int = 2
    _hidden: int = 0

@dataclass
class {kind}({base}):
    '''About it.'''
    rate: "float" = 0.5
    mode: Optional[Literal['a', 'b']] = field(default='a', metadata={{}})
    parts: Union[int, list[int], None] = None
    call: Callable = print
    own: bool | None = True
"""
PROVIDER_SOURCE = """
import torch_that_is_not_there

def more(parser):
    parser.add_argument("--kept-name", "--old-name", dest="kept", type=float, default=0.1)

def unrelated(parser):
    parser.add_argument("--unrelated", type=int)

def extra_args_provider(parser):
    group = parser.add_argument_group(title="ours")
    group.add_argument("--ours-rank", type=int, default=4, help="…")
    group.add_argument("--ours-kind", choices=["x", "y"], default="x")
    group.add_argument("--ours-on", action="store_true")
    group.add_argument("--ours-list", nargs="+", type=int)
    more(parser)
    return parser
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A checkout with an argument provider, first on the path."""
    core = tmp_path / "megatron" / "core"
    for kind, files in CLASSES.items():
        for file in files:
            (core / file).parent.mkdir(parents=True, exist_ok=True)
            base = "ModelParallelConfig" if file == files[-1] and len(files) > 1 else "object"
            (core / file).write_text(
                FIELDS.format(kind=kind if file == files[-1] else "Unused", base=base)
            )
    (core / "__init__.py").touch()
    (tmp_path / "pretrain_gpt.py").write_text(PROVIDER_SOURCE)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    names.load.cache_clear()
    yield tmp_path
    names.load.cache_clear()


def test_the_parsed_source_of_the_wheel_equals_its_stored_table():
    spec = importlib.util.find_spec("megatron")
    assert spec is not None and spec.submodule_search_locations is not None
    parsed = arguments(Path(next(iter(spec.submodule_search_locations))).parent)
    for kind, stored in names.load("megatron")["receivers"].items():
        assert {name: entry["type"] for name, entry in parsed[kind].items()} == {
            n: entry["type"] for n, entry in stored.items()
        }
        known = {name for name, entry in parsed[kind].items() if entry["default"] is not None}
        assert {name: parsed[kind][name]["default"] for name in known} == {
            name: stored[name]["default"] for name in known
        }


def test_a_folder_before_the_wheel_is_a_checkout_and_the_wheel_is_not(folder: Path):
    assert checkout() == folder
    sys.path.remove(str(folder))
    assert checkout() is None


def test_fields_of_a_class_and_its_bases_are_read_with_types_and_defaults(folder: Path):
    parsed = arguments(folder)["TransformerConfig"]
    assert parsed == {
        "depth": {"type": "int", "default": 2},
        "rate": {"type": OBJECT, "default": 0.5},
        "mode": {"type": "'a' | 'b' | None", "default": "a"},
        "parts": {"type": "int | list | None", "default": None},
        "call": {"type": OBJECT, "default": None},
        "own": {"type": "bool | None", "default": True},
    }


def test_options_of_the_provider_are_read_without_importing_it():
    assert options(ast.parse(PROVIDER_SOURCE)) == {
        "kept_name": {"type": "float", "default": 0.1},
        "ours_rank": {"type": "int", "default": 4},
        "ours_kind": {"type": "'x' | 'y'", "default": "x"},
        "ours_on": {"type": "bool", "default": False},
        "ours_list": {"type": "list | None", "default": None},
    }
    assert options(ast.parse("def other(parser): ...")) == {}


def test_arguments_of_a_checkout_are_checked_as_flags_and_as_keys(folder: Path):
    given = read_flags(["--ours-rank", "8", "--ours-on", "--depth", "3", "--ours-list", "1", "2"])
    assert given.megatron == {"ours_rank": 8, "ours_on": True, "depth": 3, "ours_list": [1, 2]}
    check_megatron(given.megatron)
    with pytest.raises(ConfigError, match=r"(?s)ours_rank.*Megatron-LM at "):
        check_megatron({"ours_rank": "many"})
    with pytest.raises(ConfigError, match="no argument of this name"):
        check_megatron({"recompute_granularity": "full"})
    assert PROVIDER in names.load("megatron")["receivers"]


def test_a_checkout_of_something_else_is_refused(folder: Path):
    (folder / "megatron/core/optimizer/optimizer_config.py").write_text("class Other: ...")
    with pytest.raises(ConfigError, match="no class OptimizerConfig"):
        names.load("megatron")
