"""The adapters of a weight version as one file (adapter_file)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load, load_file

from flows.conversion_job import conversion_job, run_conversion
from rlpipe.engines.megatron.checkpoint.conversion.peft import to_peft
from rlpipe.system.ports import free_port
from tests.engines.megatron.lora_jobs import load_file as load_adapters
from tests.engines.megatron.lora_jobs import save_adapters

TRAIN = {"max_tokens_per_gpu": 64, "lora": {"rank": 4, "alpha": 8}, "optimizer": {"lr": 1e-2}}
LAYOUTS: list[dict[str, Any]] = [
    {"parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True}},
    {"parallel": {"pipeline_model_parallel_size": 2}},
]


@pytest.mark.integration
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_file_of_any_layout_has_the_adapters_of_the_checkpoint(
    models, two_ranks, tmp_path: Path, layout
):
    model = models["qwen3"]
    saved, other = two_ranks.run(save_adapters, model, TRAIN | layout, str(tmp_path / "saved"))
    assert other["file"] is None
    path = tmp_path / "adapters.safetensors"
    path.write_bytes(saved["file"])
    to_peft(tmp_path / "saved", tmp_path / "of checkpoint")
    report = to_peft(path, tmp_path / "of file", origin=Path(model), base=Path(model))
    written, expected = (
        load_file(tmp_path / name / "adapter_model.safetensors")
        for name in ("of file", "of checkpoint")
    )
    assert written.keys() == expected.keys()
    assert len(written) == len(load(saved["file"])) == report.tensors
    assert all(written[name].equal(expected[name]) for name in expected)

    # On one rank, and in the other layout of two.
    arguments = (model, TRAIN, saved["file"])
    (other_layout,) = [one for one in LAYOUTS if one != layout]
    for loaded in (
        load_adapters(0, 1, free_port(), *arguments),
        two_ranks.run(load_adapters, model, TRAIN | other_layout, saved["file"])[0],
    ):
        assert loaded["loaded by the optimizer"]
        assert np.abs(loaded["scores"] - saved["scores"]).max() < 1e-5
        assert loaded["merged"].keys() == saved["merged"].keys()
        for name, tensor in saved["merged"].items():
            assert np.array_equal(loaded["merged"][name], tensor), name


@pytest.mark.integration
def test_a_file_of_other_adapters_is_refused(models, tmp_path: Path):
    saved = save_adapters(0, 1, free_port(), models["qwen3"], TRAIN, str(tmp_path / "saved"))
    other = TRAIN | {"lora": {"rank": 4, "alpha": 16}}
    refused = load_adapters(0, 1, free_port(), models["qwen3"], other, saved["file"])
    assert "other adapters than the policy" in refused["error"]
    assert "alpha 8" in refused["error"]
    assert "alpha 16" in refused["error"]


@pytest.mark.integration
async def test_a_process_converts_a_file_like_its_checkpoint(models, tmp_path: Path):
    model = models["qwen3"]
    saved = save_adapters(0, 1, free_port(), model, TRAIN, str(tmp_path / "saved"))
    path = tmp_path / "adapters.safetensors"
    path.write_bytes(saved["file"])

    async def report_progress(_: dict[str, Any]) -> None: ...

    job = conversion_job(path, tmp_path / "of file", Path(model), {"base": model}, adapter=True)
    report = await run_conversion(job, report_progress)
    assert report["tensors"] == len(load(saved["file"]))
    source, output = tmp_path / "saved", tmp_path / "of checkpoint"
    assert conversion_job(source, output, None, {}, adapter=True) == {
        "to": "peft",
        "checkpoint": str(source),
        "output": str(output),
    }
    assert to_peft(source, output).tensors == len(load(saved["file"]))
    written, expected = (
        load_file(tmp_path / name / "adapter_model.safetensors")
        for name in ("of file", "of checkpoint")
    )
    assert written.keys() == expected.keys()
    assert all(written[name].equal(expected[name]) for name in expected)
