"""Runs with simulated engines and ranks, and the fits of their costs (tools.bench.scale)."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlpipe.engines.sglang.admin import Engine
from rlpipe.errors import DataError, ResourceError
from rlpipe.rollout.client.generate_client import GenerateClient
from tools.bench import scale, scale_run
from tools.bench.simulated_server import TAIL, SimulatedServer, served

MODEL = {"architectures": ["Qwen3ForCausalLM"], "dtype": "bfloat16", "hidden_size": 8}


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A model directory that has only a configuration."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
    return tmp_path / "model"


def figures(engines: int, **parts: dict[str, float]) -> dict[str, Any]:
    """Return the figures of a run whose two iterations have these counts each."""

    def snapshot(moment: int, counted: int) -> dict[str, Any]:
        return {
            "time_s": float(moment),
            "cpu_s": {"generator": 0.3 * counted, "conductor": 0.1 * counted + 0.01 * moment},
            "rss_mib": dict.fromkeys(scale.MEMORY, 100.0 + engines),
            "parts": {
                name.replace("_", " "): {key: counted * value for key, value in counts.items()}
                for name, counts in parts.items()
            },
        }

    return {
        "engines": engines,
        "ranks": engines,
        "working_ranks": min(engines, 4),
        "check_interval_s": 4.0,
        "iterations": 2,
        "load_average": [1.0, 1.0, 1.0],
        "snapshots": [snapshot(0, 0), snapshot(0, 2), snapshot(10, 2)],
    }


def run_of(engines: int) -> dict[str, Any]:
    each = {"calls": 4.0, "requests": 4.0}
    return figures(
        engines,
        plan_and_draw={"calls": 2.0, "cpu_s": 0.01 + 0.001 * engines, "wall_s": 0.5, "requests": 2},
        **{
            "rank: open batch": {
                **each,
                "read_bytes": 8.0 * 2**20,
                "cpu_s": 0.4 * engines,
                "wall_s": 0.8,
            }
        },
        **{"ranks: rest": {"requests": 8.0}},
    )


def test_a_fit_has_the_least_relative_error_and_no_negative_term():
    engines = [2, 8, 32, 128]
    assert scale.fit(engines, [3 + 2 * n for n in engines]) == pytest.approx((3.0, 2.0))
    a, b = scale.fit(engines, [0.9, 1.1, 0.9, 1.0])
    assert a + b * 8 == pytest.approx(1.0, abs=0.1) and a >= 0 and b >= 0
    a, b = scale.fit(engines, [n**1.2 for n in engines])
    assert a == 0 and b > 0
    assert scale.fit(engines, [0.0] * 4) == (0.0, 0.0)
    assert scale.growth([8, 32], [5.0, 80.0]) == pytest.approx(2.0)
    assert scale.growth([8], [5.0]) is None and scale.growth([8, 32], [0.0, 1.0]) is None


def test_costs_are_of_one_iteration_and_of_one_rank():
    run = run_of(8)
    by_name = {part.name: part for part in scale.PARTS}
    assert scale.costs(by_name["plan and draw"], run) == pytest.approx(
        {"cpu_s": 0.018, "wall_s": 0.5, "requests": 2.0}
    )
    assert scale.costs(by_name["batch: read"], run) == pytest.approx(
        {"cpu_s": 0.8, "wall_s": 0.2, "requests": 1.0, "read_mib": 2.0}
    )
    # 0.3 of the process, of which 0.018 belong to another part.
    client = scale.costs(by_name["generation client"], run)
    assert client == pytest.approx({"cpu_s": 0.282})
    assert scale.costs(by_name["checkpoint record"], run) == {}
    # 0.01 CPU s a second with checks every 4 s.
    assert scale.check_cost(run) == pytest.approx(0.02)
    assert scale.check_cost({**run, "check_interval_s": 11.0}) is None


def test_the_table_marks_what_the_fit_says_and_files_have_all_fits(tmp_path: Path, capsys: Any):
    for engines in (2, 4, 8):
        (tmp_path / f"scale-{engines}.json").write_text(json.dumps(run_of(engines)))
    found = scale.write(tmp_path, [8, 2, 4])
    shown = scale.table(found)
    line = next(line for line in shown.splitlines() if line.startswith("| plan and draw"))
    cells = [cell.strip() for cell in line.split("|")[1:-1]]
    assert cells[:5] == ["plan and draw", "generator", "cpu_s", "0.01", "0.001"]
    assert cells[6:] == ["0.014", "0.042 *", "0.522 *"]
    kept = json.loads((tmp_path / "scale.json").read_text())
    assert len(kept["fits"]) == len(found)
    assert (tmp_path / "scale.png").read_bytes()[:4] == b"\x89PNG"
    rank_reads = next(one for one in found if one.part == "store requests of a rank")
    assert rank_reads.values == (6.0, 3.0, 3.0)
    with pytest.raises(DataError, match=r"scale-16\.json"):
        scale.write(tmp_path, [16])


def test_a_run_that_fails_is_an_error_with_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(ResourceError, match="a simulated run failed"):
        scale.one_run(tmp_path, 2, 3)


COUNTED = """
import sys
from concurrent.futures import ThreadPoolExecutor
from rlpipe.store.objects.files import Files
from tools.bench import probes

files = Files(sys.argv[1])

class Work:
    def read(self):
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(files.read, ["a", "a"]))

    @classmethod
    def listed(cls):
        return files.list("")

sys.modules["work"] = sys.modules["__main__"]
for _ in range(2):
    probes.install({"work:Work.read": "reads", "work:Work.listed": "lists"}, elsewhere="other")
files.create("a", b"12345")
Work().read()
Work.listed()
print(__import__("json").dumps(probes.totals()))
"""


def test_probes_count_calls_and_store_requests_for_the_innermost_part(tmp_path: Path):
    # In a process of its own: the functions stay wrapped.
    done = subprocess.run(
        [sys.executable, "-c", COUNTED, str(tmp_path / "store")],
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found["other"]["requests"] == 1
    assert (found["reads"]["calls"], found["reads"]["requests"]) == (1, 2)
    assert found["reads"]["read_bytes"] == 10
    assert (found["lists"]["listings"], found["lists"]["listed"]) == (1, 1)


async def test_a_simulated_server_samples_scores_and_takes_weights(model_dir: Path):
    server = SimulatedServer(str(model_dir), median=4, speed=5000.0, knee=64.0, push_s=0.0)
    async with server.serving() as url:
        async with GenerateClient(
            url, vocab_size=100, deadline_s=20.0, samples_per_request=8, max_connections=8
        ) as client:
            first = await client.generate([5, 6], {"max_new_tokens": 100}, n=3)
            again = await client.generate([5, 6], {"max_new_tokens": 100}, n=3)
        lengths = [len(one.response_ids) for one in first]
        assert lengths == [len(one.response_ids) for one in again]
        assert lengths == [server.length_of([5, 6], index) for index in range(3)]
        assert first[0].weight_versions == [(lengths[0], "default")]
        async with Engine(url, deadline_s=20.0) as engine:
            assert await engine.score([[1, 2, 3]]) == [[-1.0, -1.0]]
            await engine.open_update("abort", begin=True)
            sampling = asyncio.ensure_future(engine.require_spans())
            await engine.update_from_tensors([], weight_version="run@1@s", flush_cache=True)
            assert not sampling.done()
            closed = await engine.close_update("run@1@s", end=True, sample=True)
            await sampling
            assert closed.weight_version == await engine.weight_version() == "run@1@s"


def test_lengths_are_log_normal_with_the_given_median(model_dir: Path):
    server = SimulatedServer(str(model_dir), median=64, speed=1.0, knee=1.0, push_s=0.0)
    lengths = [server.length_of([prompt, prompt], 0) for prompt in range(4000)]
    assert np.median(lengths) == pytest.approx(64, rel=0.1)
    assert max(lengths) == TAIL * 64 and math.log(np.percentile(lengths, 98) / 64) > 1.5


def test_servers_of_several_processes_end_with_the_block(model_dir: Path):
    with served(3, model_dir, per_process=2, median=4) as (urls, processes):
        assert len(set(urls)) == 3 and len(processes) == 2
    assert all(process.returncode is not None for process in processes)


def test_a_simulated_rank_restores_the_state_of_its_checkpoint(tmp_path: Path):
    from tools.bench.simulated_trainer import SimulatedMegatron

    spec: Any = SimpleNamespace(train=SimpleNamespace(micro_batch_tokens=8))
    trained, restored = (SimulatedMegatron(spec, 0, 2) for _ in range(2))
    trained.change_state()
    assert trained.state_digest() != restored.state_digest()
    assert trained.save_checkpoint(tmp_path, 1) == tmp_path / "iter_0000001"
    restored.load_checkpoint(tmp_path)
    assert trained.state_digest() == restored.state_digest()


def test_prompts_differ(tmp_path: Path):
    lines = scale_run.write_prompts(tmp_path / "p.jsonl", 1200).read_text().splitlines()
    assert len(set(lines)) == 1200
    assert {len(json.loads(line)["prompt"]) for line in lines} == {scale_run.PROMPT_CHARACTERS}


@pytest.mark.integration
@pytest.mark.long
def test_a_run_of_simulated_engines_and_ranks_has_costs_in_all_parts(tmp_path: Path):
    command = [sys.executable, "-m", "tools.bench.scale_run", "--engines", "5"]
    command += ["--iterations", "6", "--median", "8", "--home", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    found = scale.write(tmp_path, [5])
    costs = {(one.part, one.measure): one.values[0] for one in found}
    spent = json.loads((tmp_path / "scale-5.json").read_text())["snapshots"][1]["cpu_s"]
    # The kernel counts processes in steps of 10 ms: a few iterations may cost less.
    missing = [
        part.name
        for part in scale.PARTS
        if (spent[part.process] if part.of_process else costs[part.name, "cpu_s"]) <= 0
    ]
    assert not missing
    assert costs["store requests of a rank", "requests"] == 3
