"""A run whose model and data come from the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployments.recipes.scripted_model import make_scripted_model
from rlpipe.store.branches import Branches
from rlpipe.store.objects.files import Files
from tests.flows.live_run import LiveRun
from tests.hub import HubRepo, hub_server

RECIPE = """
num_rollout: 1
model: {source: {type: huggingface, hf_checkpoint: org/tiny}, dtype: float32}
data: {prompts: {type: file, paths: ["hf://datasets/org/rows/train.jsonl"], label_key: label}}
rollout: {rollout_batch_size: 2, n_samples_per_prompt: 2, rollout_max_response_len: 4}
reward: {function: {type: math}}
"""


@pytest.mark.integration
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_run_records_the_commits_and_continues_without_a_network(tmp_path: Path):
    recipe = tmp_path / "hub.yaml"
    recipe.write_text(RECIPE)
    make_scripted_model(str(tmp_path / "model"), script={"=": ["1", "2"]})
    model = HubRepo({path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()})
    rows = b'{"prompt": "1+1=", "label": "2"}\n{"prompt": "2-1=", "label": "1"}\n'
    repos = {"org/tiny": model, "org/rows": HubRepo({"train.jsonl": rows}, kind="dataset")}
    home = tmp_path / "home"
    commits = {name: repo.commit for name, repo in repos.items()}
    cache = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}
    with hub_server(repos) as hub:
        online = {**cache, "HF_ENDPOINT": hub.url}
        with LiveRun(home, "--recipe", str(recipe), environment=online, own_servers=True) as run:
            assert run.finish(540) == 0, run.output
        weights = f"GET /org/tiny/resolve/{commits['org/tiny']}/model.safetensors"
        assert hub.requests[weights] == 1, hub.requests
    config = Branches(Files(home / "store")).config("hub")
    assert config["model"]["source"]["hf_checkpoint"] == f"org/tiny@{commits['org/tiny']}"
    (path,) = config["data"]["prompts"]["paths"]
    assert path == f"hf://datasets/org/rows@{commits['org/rows']}/train.jsonl"
    # The server is gone; branches on the Hub may have moved meanwhile.
    offline = {**cache, "HF_ENDPOINT": "http://127.0.0.1:9"}
    words = ("--recipe", str(recipe), "num_rollout=2")
    with LiveRun(home, *words, environment=offline, own_servers=True) as run:
        assert run.finish(540) == 0, run.output
    assert "hub 2/2" in run.output
    # The engine that starts during the imports has the settings of the run, so it is kept.
    log = (home / "hub" / "logs" / "engine-0.log").read_text()
    assert log.count("server_args=") == 2, "one for each start of the run"
