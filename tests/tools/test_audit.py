"""The audit command: output, exit codes and the page of samples (tools.audit)."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rlpipe.errors import StoreError
from rlpipe.store.audit.anomalies import Anomaly
from rlpipe.store.branches import Branches, commit_name
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.store.objects.local import LocalBackend
from rlpipe.store.run_file import RunFile, write_run
from rlpipe.types import Sample, Stage
from tests.lineage.test_provenance import SteppingRun
from tests.store import lineage
from tools import audit

Tool = Callable[..., int]


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tool:
    """Run the command over a store with a run of two iterations."""
    run = SteppingRun(Files(tmp_path / "store")).start()
    run.iterate()
    run.iterate()

    def call(command: str, *words: str, run: str = "run") -> int:
        monkeypatch.setattr(
            sys,
            "argv",
            ["tools.audit", command, "--store", str(tmp_path / "store"), "--run", run, *words],
        )
        return audit.main()

    return call


def test_a_flipped_byte_is_named_with_exit_code_1(
    tool: Tool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert tool("verify") == 0
    assert "run: nothing is wrong" in capsys.readouterr().out
    files = Files(tmp_path / "store")
    node = Nodes(files).get(Stage.REWARD, Branches(files).read("run", 0).nodes[Stage.REWARD])
    path = tmp_path / "store" / node.files[0].path
    data = bytearray(path.read_bytes())
    data[9] ^= 1
    path.write_bytes(bytes(data))
    assert tool("verify") == 1
    assert node.files[0].path in capsys.readouterr().out


def test_lineage_forward_and_queries_are_printed(
    tool: Tool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert tool("lineage", "--out", f"{tmp_path}/rows.parquet", run="run@0") == 0
    assert json.loads(capsys.readouterr().out)["weights"]["version"] == 1
    assert set(pq.read_table(tmp_path / "rows.parquet")["iteration"].to_pylist()) == {0}
    assert tool("forward", "--prompt", "run:00000001") == 0
    printed = capsys.readouterr().out.splitlines()
    assert (
        printed[0].endswith("reward 1.0  step 3, weights 1")
        and printed[-1] == "in the weights of: run@1"
    )
    assert tool("sql", "SELECT count(*) AS n FROM samples WHERE trained") == 0
    assert capsys.readouterr().out == '{"n": 8}\n'
    assert tool("unusual") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "no_signal" in line]
    assert len(lines) == 1 and "2 iterations, 0 to 1" in lines[0]


def test_anomalies_of_one_kind_are_one_line():
    anomalies = [Anomaly("reward_errors", "run", k, 0.5, "at most 2%") for k in range(30)]
    anomalies.append(Anomaly("grad_norm", "run", 7, 9.0, "1 ± 0.1 over the 10 iterations before"))
    first, second = audit.anomaly_lines(anomalies)
    assert " ".join(first.split()) == (
        "run reward_errors 30 iterations, 0 to 29 50.0% usual: at most 2%"
    )
    assert "iteration 7 " in second and "usual: 1 ± 0.1" in second
    changing = [Anomaly("grad_norm", "run", k, float(k), f"about {k}") for k in (3, 5)]
    [line] = audit.anomaly_lines(changing)
    assert (
        "2 iterations, 3 to 5" in line and " 3 to 5 " in line and "about 3 (of the first)" in line
    )


def test_lineage_prints_the_mean_reward_with_four_digits(
    tool: Tool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    traced = audit.provenance.backward

    def backward(*arguments: object) -> dict:
        found = traced(*arguments)  # type: ignore[arg-type]
        found["branches"][0]["reward"] = 0.17316666666666667
        return found

    monkeypatch.setattr(audit.provenance, "backward", backward)
    assert tool("lineage") == 0
    assert '"reward": 0.1732,' in capsys.readouterr().out


def test_without_a_run_every_store_of_the_home_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    home = tmp_path / "home"
    stores = [home / "store", tmp_path / "shared"]
    for number, store in enumerate(stores):
        SteppingRun(Files(store), f"run{number}").start().iterate()
        write_run(home, f"run{number}", RunFile(store=str(store), config={}))
    monkeypatch.setattr(sys, "argv", ["tools.audit", "verify", "--home", str(home)])
    assert audit.main() == 0
    printed = [line for line in capsys.readouterr().out.splitlines() if line]
    assert printed == [f"{Files(store).root}: nothing is wrong" for store in stores]
    (stores[1] / f"branches/{commit_name('run1', 0)}.json").write_text("{}")
    assert audit.main() == 1


@pytest.mark.parametrize(
    "words",
    [
        ("audit", "verify", "--run", "run"),
        ("audit", "unusual", "run"),
        ("audit", "lineage", "--run", "run@1"),
        ("audit", "forward", "--run", "run", "--prompt", "run:00000001"),
        ("audit", "sql", "--run", "run", "SELECT count(*) FROM samples, metrics, commits"),
        ("rollouts", "--run", "run"),
        ("gc", "--keep-checkpoints", "1"),
    ],
)
def test_an_audit_needs_no_permission_to_write(
    tool: Tool, tmp_path: Path, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    def refuse(_self: object, path: str, *_rest: object) -> bool:
        raise StoreError("file system operation failed", where=path, found="Read-only file system")

    for name in ("create", "create_from", "delete"):
        monkeypatch.setattr(LocalBackend, name, refuse)
    monkeypatch.setattr(
        sys, "argv", [f"tools.{words[0]}", "--store", str(tmp_path / "store"), *words[1:]]
    )
    assert importlib.import_module(f"tools.{words[0]}").main() == 0


def test_the_page_shows_every_token_and_escapes_sampled_text(tool: Tool, tmp_path: Path):
    assert tool("view", "--out", f"{tmp_path}/page.html", "--samples", "3", run="run@0") == 0
    page = (tmp_path / "page.html").read_text()
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    (shown,) = data["sets"]
    assert (shown["name"], [len(group["samples"]) for group in shown["groups"]]) == (
        "iteration 0",
        [2],
    ), "whole groups only"
    assert shown["total"] > 2
    assert "prompt of run:00000000" in data["prompts"]
    assert shown["groups"][0]["samples"][0]["logProbs"] == [-0.5, -0.25, -0.125]


@pytest.mark.parametrize(
    ("words", "run", "printed"),
    [
        (("verify",), "absent", "the run does not exist"),
        (("verify",), "run@x", "not the name of a commit"),
        (("verify", "run2"), "run", "two runs given"),
        (("sql",), "run", "no query given"),
        (("sql", "nonsense"), "run", "DuckDB refused the query"),
        (("sql", "SELECT rewards FROM samples"), "run", "samples: branch, iteration, "),
        (("sql", "SELECT rewards FROM samples"), "run", "samples, metrics, commits, texts, batch"),
        (("sql", "SELECT * FROM sample"), "run", "samples, metrics, commits, texts, batch"),
        (("sql", "run2", "SELECT 1"), "run", "two runs given"),
        (("forward",), "run", "no prompt given"),
        (("view",), "run@7", "no rollout of this iteration"),
        (("lineage",), "run@7", "run@K with K from 0 to 1"),
    ],
)
def test_wrong_input_gives_exit_code_2(
    tool: Tool, words: tuple[str, ...], run: str, printed: str, capsys: pytest.CaptureFixture[str]
):
    assert tool(*words, run=run) == 2
    assert printed in capsys.readouterr().err


@pytest.mark.parametrize("words", [("run", "SELECT 1 AS n"), ("SELECT 1 AS n", "run")])
def test_run_and_query_are_taken_in_any_order(
    words: tuple[str, ...],
    tool: Tool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    store = str(tmp_path / "store")
    monkeypatch.setattr(sys, "argv", ["tools.audit", "sql", "--store", store, *words])
    assert audit.main() == 0
    assert capsys.readouterr().out == '{"n": 1}\n'
    monkeypatch.setattr(sys, "argv", ["tools.audit", "sql", "--store", store, "run"])
    assert audit.main() == 2
    assert 'audit sql RUN "SELECT ..."' in capsys.readouterr().err


def test_samples_of_other_runs_are_listed_as_such(
    tool: Tool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    of_run = lineage.sample

    def with_prompts_of_run(group_id: str, index: int) -> Sample:
        prompt = of_run(group_id.replace("other", "run"), index).prompt
        return replace(of_run(group_id, index), prompt=prompt)

    monkeypatch.setattr(lineage, "sample", with_prompts_of_run)
    SteppingRun(Files(tmp_path / "store"), "other").start().iterate()
    assert tool("forward", "--prompt", "run:00000001") == 0
    printed = capsys.readouterr().out.splitlines()
    title = printed.index("samples of other runs in this store, not of run:")
    assert all(line.startswith("run/") for line in printed[:title]) and title > 0
    assert all(line.startswith("other/") for line in printed[title + 1 : -1])


def test_the_error_of_an_unknown_run_names_the_nearest_run(
    tool: Tool, capsys: pytest.CaptureFixture[str]
):
    assert tool("verify", run="run2") == 2
    assert (
        "the run does not exist" in (printed := capsys.readouterr().err)
        and "did you mean run?" in printed
    )
