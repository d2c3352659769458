"""Files that GitHub reads: workflow, issue forms, citation."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml"))


def loaded(path: Path) -> Any:
    # BaseLoader: YAML 1.1 would read the key `on` as true.
    return yaml.load(path.read_text(encoding="utf-8"), yaml.BaseLoader)


@pytest.fixture
def workflow() -> dict[str, Any]:
    return loaded(ROOT / ".github" / "workflows" / "ci.yml")


def test_the_workflow_runs_targets_of_the_makefile(workflow: dict[str, Any]):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    runs = [step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"]]
    used = {target for run in runs for target in re.findall(r"\bmake ([a-z-]+)", run)}
    assert used == {"setup", "check", "test", "test-all"}
    assert used <= targets


def test_the_workflow_tests_the_oldest_python_that_the_project_allows(workflow: dict[str, Any]):
    versions = workflow["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert PROJECT["requires-python"] == f">={versions[0]}"
    assert workflow["permissions"] == {"contents": "read"}
    assert {"push", "pull_request", "schedule"} <= set(workflow["on"])


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_every_issue_form_has_fields_with_their_own_ids(form: Path):
    values = loaded(form)
    assert {"name", "description", "body"} <= set(values)
    ids = [field["id"] for field in values["body"]]
    assert ids and len(set(ids)) == len(ids)
    assert all(field["attributes"]["label"] for field in values["body"])


def test_the_citation_has_the_version_and_the_licence_of_the_project():
    citation = loaded(ROOT / "CITATION.cff")
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    assert {"cff-version", "title", "message", "authors"} <= set(citation)
