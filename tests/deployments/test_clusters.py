"""Cluster files: named objects and called scripts exist."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.apply import python_path
from deployments.declarations import ROOT
from deployments.site import load_site


@pytest.fixture
def folder(repository: Path) -> Path:
    return repository / "deployments"


@pytest.fixture
def manifest(folder: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((folder / "kubernetes.yaml").read_text()))


def named(manifest: list[dict[str, Any]], kind: str) -> set[str]:
    return {one["metadata"]["name"] for one in manifest if one["kind"] == kind}


def found(value: Any, key: str) -> Iterator[Any]:
    """Return every value of this key at any depth."""
    if isinstance(value, dict):
        yield from (inner for name, inner in value.items() if name == key)
        yield from (inner for child in value.values() for inner in found(child, key))
    elif isinstance(value, list):
        yield from (inner for child in value for inner in found(child, key))


def containers(manifest: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        one
        for key in ("containers", "initContainers")
        for several in found(manifest, key)
        for one in several
    ]


def test_every_object_of_the_manifest_is_in_the_namespace_it_makes(manifest: list[dict[str, Any]]):
    assert named(manifest, "Namespace") == {"rlpipe"}
    assert {one["metadata"].get("namespace") for one in manifest if one["kind"] != "Namespace"} == {
        "rlpipe"
    }


def test_objects_that_pods_name_exist(manifest: list[dict[str, Any]]):
    configs = {one["name"] for key in ("configMapRef", "configMap") for one in found(manifest, key)}
    claims = {one["claimName"] for one in found(manifest, "persistentVolumeClaim")}
    services = set(found(manifest, "serviceName"))
    assert configs <= named(manifest, "ConfigMap")
    assert claims <= named(manifest, "PersistentVolumeClaim")
    assert services <= named(manifest, "Service")
    for pod in (one["spec"]["template"] for one in manifest if "template" in one.get("spec", {})):
        volumes = {one["name"] for several in found(pod, "volumes") for one in several} | {"data"}
        assert {one["name"] for several in found(pod, "volumeMounts") for one in several} <= volumes


def test_the_worker_shares_processes_and_files_with_the_head(manifest: list[dict[str, Any]]):
    """Ray's driver looks for its raylet among the processes, and for sockets and memory in the
    file system.
    """
    pods = [
        one["spec"]["template"]["spec"] for one in manifest if "template" in one.get("spec", {})
    ]
    (head,) = [
        pod for pod in pods if any("worker" in one.get("args", []) for one in pod["containers"])
    ]
    assert head["shareProcessNamespace"] is True
    shared = [
        {(one["name"], one["mountPath"]) for one in container["volumeMounts"]}
        for container in head["containers"]
    ]
    assert (
        all({("ray", "/tmp/ray"), ("memory", "/dev/shm")} <= mounts for mounts in shared)
        and len(shared) == 2
    )


def test_services_find_their_pods(manifest: list[dict[str, Any]]):
    labels = [
        one["spec"]["template"]["metadata"]["labels"]
        for one in manifest
        if "template" in one.get("spec", {})
    ]
    assert all(one["spec"]["selector"] in labels for one in manifest if one["kind"] == "Service")
    matched = [
        one["spec"]["selector"]["matchLabels"]
        for one in manifest
        if "template" in one.get("spec", {})
    ]
    assert matched == labels


def test_no_secret_is_written_in_the_manifest(manifest: list[dict[str, Any]], folder: Path):
    secrets = {one["name"] for key in ("secretRef", "secretKeyRef") for one in found(manifest, key)}
    made = set(re.findall(r"create secret generic (\w+)", (folder / "kubernetes.md").read_text()))
    assert secrets == made == {"store", "database"}
    assert named(manifest, "Secret") == set()
    values = [one.get("value", "") for several in found(manifest, "env") for one in several]
    database, pages = (value for value in values if "://" in value)
    assert database == "postgresql+asyncpg://prefect:$(PASSWORD)@postgres:5432/prefect"
    assert pages == "http://127.0.0.1:4200/api", "as the port-forward of the page"


def test_pythonpath_entries_stay_after_the_checkout(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", f"/opt/Megatron-LM:{ROOT}")
    assert python_path() == f"{ROOT}:/opt/Megatron-LM"
    (line,) = [
        line for line in (folder / "slurm.sbatch").read_text().splitlines() if "PYTHONPATH" in line
    ]
    for found, expected in (
        ({"PYTHONPATH": "/opt/Megatron-LM"}, "/root:/opt/Megatron-LM"),
        ({}, "/root"),
    ):
        script = f'set -u; root=/root; {line}; echo "$PYTHONPATH"'
        result = subprocess.run(
            ["/bin/bash", "-c", script], env=found, capture_output=True, text=True, check=True
        )
        assert result.stdout.strip() == expected


def test_started_modules_exist(manifest: list[dict[str, Any]], folder: Path):
    commands = [" ".join(one["args"]) for one in containers(manifest) if "args" in one]
    texts = [
        *commands,
        *(
            path.read_text()
            for name in ("*.md", "*.sbatch", "Containerfile")
            for path in folder.glob(name)
        ),
    ]
    modules = {
        module for text in texts for module in re.findall(r"-m ([a-z_]+(?:\.[a-z_0-9]+)+)", text)
    }
    assert "deployments.apply" in modules
    assert [module for module in sorted(modules) if importlib.util.find_spec(module) is None] == []


def test_the_site_of_the_manifest_is_a_site(manifest: list[dict[str, Any]], tmp_path: Path):
    (text,) = (one["data"]["site.yaml"] for one in manifest if one["metadata"]["name"] == "site")
    (tmp_path / "site.yaml").write_text(text)
    assert load_site(tmp_path / "site.yaml").overrides == (
        "store.root=s3://rl/runs",
        "resources.ray_address=ray-head:6379",
    )


def test_all_containers_of_the_project_use_one_image(manifest: list[dict[str, Any]], folder: Path):
    images = {one["image"] for one in containers(manifest)} - {"postgres:15"}
    assert len(images) == 1
    assert f"-t {images.pop()} " in (folder / "kubernetes.md").read_text()


def test_the_image_installs_packages_before_it_copies_the_sources(folder: Path):
    lines = (folder / "Containerfile").read_text().splitlines()
    instructions = [line for line in lines if re.match(r"(COPY|RUN|LABEL|ARG) ", line)]
    pins = instructions.index("COPY constraints.txt pyproject.toml ./")
    sources = instructions.index("COPY . .")
    assert sources - pins == 2, "one layer of packages, which a change of a source keeps"
    assert all(line.startswith(("ARG", "LABEL")) for line in instructions[sources + 2 :])


def test_the_image_has_no_file_that_is_made_in_a_checkout(repository: Path, folder: Path):
    ignored = (folder / "Containerfile.dockerignore").read_text().split()
    generated = [line for line in (repository / ".gitignore").read_text().split("\n")[1:] if line]
    names = {pattern.removeprefix("**/").rstrip("/") for pattern in ignored}
    assert {pattern.rstrip("/") for pattern in generated} - names == set()


def test_the_batch_script_is_bash_and_its_page_names_its_variables(folder: Path):
    script = folder / "slurm.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True)
    page = (folder / "slurm.md").read_text()
    assert all(variable in page for variable in ("RLPIPE_HOME", "RLPIPE_RAY_PORT"))


def test_links_of_the_pages_exist(folder: Path):
    for page in folder.glob("*.md"):
        names = re.findall(
            r"`((?:[\w.-]+/)*[\w-]+\.(?:md|sbatch|yaml)|Containerfile)`|\]\(([\w./-]+)\)",
            page.read_text(),
        )
        wanted = {one or other for one, other in names} - {"my_run.yaml", "my_site.yaml"}
        assert [
            name
            for name in sorted(wanted)
            if not ((folder / name).exists() or (folder.parent / name).exists())
        ] == []
