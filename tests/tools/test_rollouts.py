"""Print and export stored rollouts (tools.rollouts, rlpipe.lineage.rollouts)."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rlpipe.batch.files import write_rewards
from rlpipe.lineage.rollouts import find, sample_rows
from rlpipe.lineage.stage_inputs import Inputs
from rlpipe.rewards.reward_rows import RewardRow
from rlpipe.store.nodes import Nodes
from rlpipe.store.notes import write_note
from rlpipe.store.objects.files import Files
from rlpipe.store.parquet.rows import samples_to_table
from rlpipe.store.parquet.shards import data_folder, write_table
from rlpipe.types import Stage
from tests.store.lineage import Run, group
from tools import rollouts

Tool = Callable[..., int]

MESSAGES = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 1 ="}]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with a run of three trained iterations, and a run that only sampled iteration 0."""
    files = Files(tmp_path / "store")
    trained = Run(files).start()
    for _ in range(3):
        trained.iterate()
    files.create("branches/run/epochs/00000001/00000014.json", b"{}")
    Run(files, "begun").start()
    samples = [*group("sampled:0"), *group("sampled:1")]
    for sample in samples:
        sample.prompt = MESSAGES
        sample.label = "2" if sample.group_id == "sampled:0" else None
    inputs = Inputs(Stage.ROLLOUT, {}, {"run": "sampled"})
    record = write_table(
        files, data_folder(Stage.ROLLOUT, inputs.digest), "rows", samples_to_table(samples, 0)
    )
    outputs = {"accepted": ["sampled:0"], "dropped": {"sampled:1": "all_equal"}}
    made = Nodes(files).commit(inputs.node(files=(record,), outputs=outputs))
    judged = Inputs(Stage.REWARD, {"rollout": made.digest}, {})
    output = [
        RewardRow("sampled:0", 0, 0.5, {"format": 1.0}),
        RewardRow("sampled:0", 1, None, {}, "late"),
    ]
    Nodes(files).commit(judged.node(files=(write_rewards(files, judged.digest, output),)))
    write_note(files, "sampled", 0, {Stage.ROLLOUT: made.digest, Stage.REWARD: judged.digest})
    return tmp_path


@pytest.fixture
def tool(home: Path, monkeypatch: pytest.MonkeyPatch) -> Tool:
    def call(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["tools.rollouts", "--home", str(home), *words])
        monkeypatch.setenv("RLPIPE_HOME", str(home))
        return rollouts.main()

    return call


def test_rows_have_rewards_advantages_and_drop_reasons(home: Path):
    files = Files(home / "store")
    stored = find(files, "run", 1)
    assert stored is not None
    rows = sample_rows(files, stored).to_pylist()
    assert {row["iteration"] for row in rows} == {1}
    trained = {row["group_id"] for row in rows if row["advantages"] == [0.0, 0.0, 0.0]}
    assert trained
    assert all((row["advantages"] is None) == (row["group_id"] not in trained) for row in rows)
    assert all(row["reward"] == 1.0 for row in rows if row["group_id"] in trained)


def test_the_newest_rollout_is_printed_a_line_a_sample(
    tool: Tool, capsys: pytest.CaptureFixture[str]
):
    assert tool("--run", "sampled") == 0
    printed = capsys.readouterr()
    header, first, second, dropped, _ = printed.out.splitlines()
    assert "rollouts sampled --out samples.html" in printed.err
    assert header.split() == list(rollouts.HEADER)
    cells = "0 sampled:0 0 completed 3 0.500 - - 1 + 1 = 2 abc"
    assert first.split() == cells.split()
    assert second.split()[5] == "-"
    assert dropped.split()[-7:] == ["all_equal", "1", "+", "1", "=", "-", "abc"]


def test_whole_rows_of_chosen_iterations_are_exported(tool: Tool, home: Path):
    assert tool("--run", "run", "--iterations", "1:", "--out", f"{home}/new/rows.parquet") == 0
    table = pq.read_table(home / "new" / "rows.parquet")
    assert sorted(set(table["iteration"].to_pylist())) == [1, 2]
    assert tool("--run", "sampled", "--iterations", ":", "--out", f"{home}/rows.jsonl") == 0
    rows = [json.loads(line) for line in (home / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 4
    assert rows[0]["prompt"] == MESSAGES
    assert (rows[0]["reward"], rows[0]["reward_parts"], rows[0]["accepted"]) == (
        0.5,
        {"format": 1.0},
        True,
    )
    assert (rows[1]["reward"], rows[1]["error"], rows[2]["drop_reason"]) == (
        None,
        "late",
        "all_equal",
    )


@pytest.mark.parametrize(("run", "totals"), [("run", [6, 8, 8]), ("sampled", [4])])
def test_samples_of_chosen_iterations_are_a_page(
    tool: Tool, home: Path, run: str, totals: list[int]
):
    page = home / "new" / "rows.html"
    assert tool("--run", run, "--iterations", ":", "--out", str(page)) == 0
    data = json.loads(page.read_text().split('id="data">')[1].split("</script>")[0])
    names = [f"iteration {k}" for k in range(len(data["sets"]))]
    assert [one["name"] for one in data["sets"]] == names
    assert [one["total"] for one in data["sets"]] == totals


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (("--run", "absent"), "--home or --store"),
        (("--run", "begun"), "wait for its first rollout"),
        (("run@1",), "write run, and --iterations 1"),
        (("--run", "run", "--iterations", "7"), "iterations 0 to 2"),
        (("--run", "run", "--iterations", "a:b"), "A:B, A:, :B, : or one number"),
        (("--run", "run", "--out", "rows.csv"), ".jsonl, .parquet or .html"),
    ],
)
def test_wrong_input_is_refused(
    tool: Tool, words: tuple[str, ...], output: str, capsys: pytest.CaptureFixture[str]
):
    assert tool(*words) == 2
    assert output in capsys.readouterr().err


def test_samples_of_a_run_whose_first_reward_failed_are_printed(
    tool: Tool, home: Path, capsys: pytest.CaptureFixture[str]
):
    Run(Files(home / "store"), "failed").start().iterate(stop_after=Stage.ROLLOUT)
    assert tool("failed") == 0
    printed = capsys.readouterr()
    lines = [line.split() for line in printed.out.splitlines()[1:]]
    assert {(line[0], line[5]) for line in lines} == {("0", "-")}
    assert {line[1] for line in lines} == {f"failed:0000000{n}" for n in range(3)}
    assert "iteration 0 is not finished; its samples follow" in printed.err
    assert tool("failed", "--out", str(home / "rows.html")) == 0
    assert "failed:00000000" in (home / "rows.html").read_text()


def test_samples_of_a_later_iteration_that_failed_are_printed_by_its_number(
    tool: Tool, home: Path, capsys: pytest.CaptureFixture[str]
):
    Run(Files(home / "store")).iterate(stop_after=Stage.REWARD)
    assert tool("run") == 0
    printed = capsys.readouterr()
    assert {line.split()[0] for line in printed.out.splitlines()[1:]} == {"2"}
    assert "iteration 3 is not finished; its samples: --iterations 3" in printed.err
    assert tool("run", "--iterations", "3") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert {line[0] for line in lines} == {"3"}
    assert "1.000" in {line[5] for line in lines}
