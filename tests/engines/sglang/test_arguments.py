"""A configuration accepts the arguments of SGLang and its router, and passes them on unchanged."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rlpipe.config.arguments import names
from rlpipe.config.arguments.check import check
from rlpipe.config.arguments.names import accepts
from rlpipe.config.model import EngineConfig, ResourcesConfig
from rlpipe.engines.sglang.process import flags
from rlpipe.engines.sglang.router import Router
from rlpipe.engines.sglang.server import Server
from rlpipe.errors import ConfigError
from tests.live_engine import make_model

SAMPLES: list[Any] = [True, False, 7, 0.5, "text", [1, 2], {"a": 1}]
UNUSUAL = {
    "lora_paths": ["one=/a", "two=/b"],
    "cuda_graph_config": '{"decode": {"backend": "disabled"}}',
}
"""Options with their own syntax."""


def values(name: str, entry: dict[str, Any]) -> Iterator[Any]:
    """Yield values of an argument that differ from its default."""
    if name in UNUSUAL:
        yield UNUSUAL[name]
        return
    words = entry.get("choices") or [
        part.strip("'") for part in entry["type"].split(" | ") if "'" in part
    ]
    if words:
        samples: list[Any] = (
            [[words[0]], [words[-1]]] if entry.get("words") else [words[0], words[-1]]
        )
    elif entry.get("words"):
        samples = [[1, 2]]
    elif entry.get("reads"):
        samples = [7, "text", "8k", {"a": 1}, [{"a": 1}], '[{"a": 1}]']
    else:
        samples = SAMPLES
    for value in samples:
        if value != entry["default"] and accepts(entry["type"], value):
            yield value


def is_accepted(table: str, name: str, value: Any) -> bool:
    try:
        check(table, {name: value})
    except ConfigError:
        return False
    return True


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("arguments") / "model"
    make_model(directory, seed=0)
    return directory


def command_line(table: str, name: str, value: Any, model_dir: Path) -> list[str]:
    """Return the command line of a server or router with this argument. Raises: ConfigError."""
    log = model_dir.parent / "log"
    if table == "router":
        return Router(EngineConfig(router={name: value}), port=1, log_path=log).arguments()
    config = EngineConfig(sglang={name: value})
    settings: dict[str, Any] = {
        "dtype": "float32",
        "port": 1,
        "log_path": log,
        "seed": 1,
        "device": "cpu",
    }
    return Server(model_dir, config, ResourcesConfig(), **settings).arguments()


@pytest.mark.parametrize("table", ["sglang", "router"])
def test_a_configuration_and_an_engine_refuse_the_same_arguments(table, model_dir):
    differ = []
    refused = 0
    for name, entry in names.entries(table).items():
        for value in values(name, entry):
            try:
                command_line(table, name, value, model_dir)
                by_engine = True
            except ConfigError:
                by_engine = False
            refused += not by_engine
            if by_engine != is_accepted(table, name, value):
                differ.append((name, value))
    assert differ == []
    assert refused > 5


def parser(table: str) -> argparse.ArgumentParser:
    """Return the package's own parser."""
    made = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    if table == "router":
        from sglang_router.router_args import RouterArgs

        RouterArgs.add_cli_args(made)
    else:
        from rlpipe.engines.sglang import cpu_launch

        cpu_launch.install()
        from sglang.srt.server_args import ServerArgs

        ServerArgs.add_cli_args(made)
    return made


def plain(value: Any) -> Any:
    """Return a value as text, to compare parsed values with configured ones."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, str) and value.startswith("["):
        return plain(json.loads(value))
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    with suppress(ValueError):
        return str(float(str(value).replace("k", "000")))
    return str(value)


@pytest.mark.integration
@pytest.mark.parametrize("table", ["sglang", "router"])
def test_accepted_arguments_reach_the_package_unchanged(table, monkeypatch):
    """The package's own parser reads the command line.

    A list, a dict, a choice or a `false` must not fail minutes later."""
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    read = parser(table)
    wrong = []
    for name, entry in names.entries(table).items():
        for value in values(name, entry):
            if name in UNUSUAL or not is_accepted(table, name, value):
                continue
            line = flags(table, {name: value})
            try:
                found = getattr(
                    read.parse_args(["--model-path", "m", *line]), entry.get("field", name)
                )
            except (argparse.ArgumentError, SystemExit) as error:
                wrong.append((name, value, line, error))
                continue
            if plain(found) != plain(value):
                wrong.append((name, value, line, found))
    assert wrong == [], "\n".join(str(one) for one in wrong)
