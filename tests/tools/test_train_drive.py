"""Start and end of a run of the train command: imports, exit codes (tools.train.drive)."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import flows.train
from rlpipe.actors import client
from rlpipe.actors.ray import local_ray
from rlpipe.config.load import load_run
from rlpipe.errors import EngineUnavailable
from tests.tools.test_train import RECIPE
from tools import local_prefect, train


class Flow:
    """Replaces the train flow and its server; records calls and ends as the test says."""

    def __init__(self) -> None:
        self.ends: Any = None
        self.log: list[Any] = []

    async def __call__(self, *arguments: Any) -> Any:
        self.log.append(arguments)
        if isinstance(self.ends, BaseException):
            raise self.ends
        return self.ends

    def begin(self, *_: Any, namespace: str, then: Any) -> None:
        self.log.append((namespace, then.func, then.args[0].run))

    async def drain(self) -> None:
        self.log.append("drained")

    @contextmanager
    def server(self, _: Path, meanwhile: Callable[[], None]) -> Iterator[str]:
        meanwhile()
        try:
            yield ""
        finally:
            self.log.append("server ended")


@pytest.fixture
def flow(monkeypatch: pytest.MonkeyPatch) -> Flow:
    made = Flow()
    monkeypatch.setattr(flows.train, "train", made)
    monkeypatch.setattr(local_prefect, "local_prefect", made.server)
    monkeypatch.setattr(local_prefect, "drain", made.drain)
    monkeypatch.setattr(local_ray, "begin_connecting", made.begin)
    return made


def test_packages_of_ray_and_prefect_are_imported_before_two_threads_need_them(
    monkeypatch: pytest.MonkeyPatch,
):
    imported: list[str] = []
    monkeypatch.setattr(train, "import_module", imported.append)
    train.import_clients()
    assert {"pydantic.v1", "starlette.datastructures"} < set(imported)


@pytest.mark.parametrize(
    ("ends", "code", "printed"),
    [
        (
            {
                "run": "mine",
                "iterations": 3,
                "accuracy_before": 0.25,
                "accuracy_after": 0.5,
                "held_out_measure": "mean reward",
            },
            0,
            "mine: mean reward 0.250 → 0.500\nmine: see ",
        ),
        ({"run": "mine", "iterations": 0, "accuracy_before": None}, 0, "mine: see "),
        (
            EngineUnavailable("no answer", where="engine/0"),
            1,
            "EngineUnavailable: engine/0: no answer\n",
        ),
        (KeyboardInterrupt(), 130, "\nstopped; the same command continues"),
    ],
)
def test_the_exit_code_tells_the_end_of_the_run(
    flow: Flow,
    ends: Any,
    code: int,
    printed: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    flow.ends = ends
    (tmp_path / "small.yaml").write_text(RECIPE.format(place=tmp_path))
    config = load_run(str(tmp_path / "small.yaml"), [], "mine")
    words = {"recipe": "r", "overrides": ["seed=1"], "run": "mine"}
    assert train.drive(argparse.Namespace(**words, takeover=False, quiet=False), config) == code
    output = capsys.readouterr()
    assert (output.err if code else output.out).startswith(printed)
    assert (output.out if code else output.err) == ""
    began = [("rlpipe-mine", client.begin_cluster, "mine")] * 2
    assert flow.log == [*began, ("r", ["seed=1"], "mine", False), "drained", "server ended"]
