"""Recipes for public models and data, and their smoke tests."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from deployments.recipes import smoke_files
from rlpipe.config.data import FilePrompts
from rlpipe.config.load import RECIPES, load_run
from rlpipe.config.model import HuggingFaceModel
from rlpipe.config.run import RunConfig
from rlpipe.config.smoke import SMOKE
from rlpipe.data.prompts import load_prompts
from rlpipe.preflight import check
from rlpipe.system.hub import file_reference, model_reference
from tests.flows.live_run import LiveRun

PUBLIC = ("gsm8k", "dapo_math", "search_r1", "retool", "distill")


def prompts(config: RunConfig) -> list[FilePrompts]:
    sources = [config.data.prompts, *(each.prompts for each in config.evaluation.datasets)]
    return [source for source in sources if isinstance(source, FilePrompts)]


def _tools(config: RunConfig) -> set[str]:
    return {tool.path for tool in config.rollout.tools}


@pytest.mark.parametrize("name", PUBLIC)
def test_a_smoke_test_exercises_the_functions_and_columns_of_its_recipe(name: str):
    real, smoke = load_run(name), load_run(name, [SMOKE])
    assert smoke.run == f"{name}-smoke"
    for kept in ("reward", "advantage"):
        assert getattr(smoke, kept) == getattr(real, kept)
    keys = ("apply_chat_template", "apply_chat_template_kwargs")
    assert all(getattr(smoke.data, key) == getattr(real.data, key) for key in keys)
    hooks = [config.rollout.hook_paths for config in (real, smoke)]
    assert [path for path in hooks[0] if path not in _tools(real)] == [
        path for path in hooks[1] if path not in _tools(smoke)
    ]
    # The sandbox needs bubblewrap, which a machine of a smoke test may not have.
    names = [[tool.name for tool in config.rollout.tools] for config in (real, smoke)]
    assert names[0] == names[1]
    keys = ("tool_call_format", "max_turns", "dynamic_sampling_filter_path")
    assert all(getattr(smoke.rollout, key) == getattr(real.rollout, key) for key in keys)
    assert smoke.train.loss == real.train.loss
    assert smoke.teacher.opd_type == real.teacher.opd_type
    # Everything but the paths of the files.
    assert [source.model_copy(update={"paths": ()}) for source in prompts(smoke)] == [
        source.model_copy(update={"paths": ()}) for source in prompts(real)
    ]


@pytest.mark.parametrize("name", PUBLIC)
def test_a_recipe_says_how_to_download_its_model_and_data(name: str):
    config = load_run(name)
    text = (RECIPES / f"{name}.yaml").read_text()
    commands = set(re.findall(r"hf download (?:--repo-type dataset )?([\w./-]+)", text))
    assert isinstance(config.model.source, HuggingFaceModel)
    models = [config.model.source.hf_checkpoint, config.teacher.opd_teacher_load]
    references = [model_reference(model) for model in models if model is not None]
    references += [file_reference(path) for source in prompts(config) for path in source.paths]
    assert {reference.repo for reference in references if reference is not None} == commands
    assert None not in references
    assert "Published" in text and "Not run here" in text


@pytest.mark.parametrize("name", PUBLIC)
def test_the_checks_before_a_start_accept_a_smoke_test(name: str, tmp_path: Path):
    check(load_run(name, [SMOKE]), tmp_path)


def test_the_committed_files_are_those_of_their_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    committed = smoke_files.FOLDER
    monkeypatch.setattr(smoke_files, "FOLDER", tmp_path)
    smoke_files.main()
    names = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()}
    assert names == {path.relative_to(committed) for path in committed.rglob("*") if path.is_file()}
    for name, rows in smoke_files.tables().items():
        assert len(rows) == 10
        if name.endswith(".jsonl"):
            assert (committed / name).read_text() == (tmp_path / name).read_text()
    weights = Path("teacher", "model.safetensors")
    assert (committed / weights).read_bytes() == (tmp_path / weights).read_bytes()
    source = load_run("search_r1", [SMOKE]).data.prompts
    assert isinstance(source, FilePrompts)
    written = source.model_copy(update={"paths": (str(tmp_path / "nq_hotpotqa.parquet"),)})
    assert [(row.prompt, row.metadata) for row in load_prompts(written)] == [
        (row.prompt, row.metadata) for row in load_prompts(source)
    ]


@pytest.mark.integration
@pytest.mark.long
@pytest.mark.parametrize("name", PUBLIC)
def test_a_smoke_test_runs_to_its_end(name: str, tmp_path: Path):
    with LiveRun(tmp_path / "home", name, "--smoke") as run:
        assert run.finish(540) == 0, run.output
    assert f"{name}-smoke 2/2" in run.output


@pytest.mark.integration
@pytest.mark.long
@pytest.mark.bubblewrap
def test_programs_of_a_run_are_called_in_a_sandbox(tmp_path: Path):
    tool = "[{path: rlpipe.rollout.sandbox.Python, name: code_interpreter}]"
    # A program may wait for a core longer than usual while other tests run.
    overrides = (f"rollout.tools={tool}", "rollout.tool_timeout_s=60")
    with LiveRun(tmp_path / "home", "retool", "--smoke", *overrides) as run:
        assert run.finish(540) == 0, run.output
    files = [*(tmp_path / "home").rglob("*.parquet")]
    responses = [row for file in files for row in _responses(file)]
    # The script of the stand-in prints 2 + 3.
    assert responses
    assert all("<tool_response>\n5\n</tool_response>" in text for text in responses)


def _responses(file: Path) -> list[str]:
    table = pq.read_table(file)
    return table["response"].to_pylist() if "response" in table.column_names else []
