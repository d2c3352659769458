"""Overrides of a Prefect server: deployments that are declared again keep them
(deployments.apply)."""

from __future__ import annotations

from pathlib import Path

import pytest
from prefect.client.orchestration import get_client
from prefect.variables import Variable

from deployments import apply, declarations


def site_parameters(*deployments: str) -> list[list[str]]:
    """Return the parameter `site` of deployments of the current Prefect server."""
    with get_client(sync_client=True) as client:
        return [client.read_deployment_by_name(name).parameters["site"] for name in deployments]


@pytest.mark.integration
def test_a_site_declared_after_make_up_keeps_its_store_and_ray_cluster(
    tmp_path: Path,
    prefect_server: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    # Each deployment is several requests; test_apply.py declares all recipes.
    monkeypatch.setattr(declarations, "recipes", lambda: ["spell_backward"])
    mine = tmp_path / "mine.yaml"
    mine.write_text("overrides: [num_rollout=3]")

    def declare(*arguments: str) -> str:
        command = ["apply", "--home", str(tmp_path), "--site", str(mine), *arguments]
        monkeypatch.setattr("sys.argv", command)
        assert apply.main() == 0
        return capsys.readouterr().out

    servers = ["store.root=s3://rlpipe/runs", "resources.ray_address=127.0.0.1:6379"]
    names = ("train/train", "train/spell_backward", "evaluate/evaluate")
    declare("--server-overrides", *servers)
    assert site_parameters(*names) == [[*servers, "num_rollout=3"]] * 3
    mine.write_text("overrides: [num_rollout=4]")
    assert f"overrides of this Prefect server: {', '.join(servers)}" in declare()
    assert site_parameters(*names) == [[*servers, "num_rollout=4"]] * 3
    Variable.set("rlpipe_server_overrides", "num_rollout=3", overwrite=True)
    monkeypatch.setattr("sys.argv", ["apply", "--home", str(tmp_path)])
    assert apply.main() == 2
    assert "expected: a JSON list of dotted.key=value" in capsys.readouterr().err
    # `make up` without Ray and S3.
    declare("--server-overrides")
    assert site_parameters(*names) == [["num_rollout=4"]] * 3
