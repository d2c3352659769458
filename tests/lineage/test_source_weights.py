"""Weights of a run that come from files of their own (rlpipe.lineage.source_weights)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlpipe.config.run import RunConfig
from rlpipe.errors import ConfigError
from rlpipe.lineage.source_weights import (
    WeightSource,
    check_shapes,
    decisive_digests,
    prompts_record,
    source_record,
    weight_sources,
)
from rlpipe.lineage.stage_inputs import init_inputs

BASE: dict[str, Any] = {
    "run": "run",
    "num_rollout": 1,
    "model": {"source": {"type": "huggingface", "hf_checkpoint": "/model"}},
    "data": {"prompts": {"type": "file", "paths": ["/prompts.jsonl"]}},
    "rollout": {"rollout_batch_size": 1, "n_samples_per_prompt": 2},
    "reward": {"function": {"type": "math"}},
}


def configured(**sections: Any) -> RunConfig:
    return RunConfig.model_validate({**BASE, **sections})


def policy(**keys: Any) -> dict[str, Any]:
    return {"source": {**BASE["model"]["source"], "megatron_checkpoint": "/slime", **keys}}


def checkpoint(folder: Path, iteration: int) -> Path:
    found = folder / f"iter_{iteration:07d}"
    found.mkdir(parents=True)
    (found / ".metadata").write_text(f"metadata {iteration}")
    (found / "__0_0.distcp").write_bytes(bytes([iteration]))
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return folder


def test_only_models_that_the_run_uses_are_sources():
    assert weight_sources(configured()) == {}
    unused = configured(reference={"ref_load": "/ref"})
    assert weight_sources(unused) == {}
    used = configured(
        model=policy(megatron_checkpoint_step=7),
        advantage={"reference": True, "use_opd": True},
        reference={"ref_load": "/ref", "ref_ckpt_step": 3},
        teacher={"opd_type": "megatron", "opd_teacher_load": "/teacher"},
    )
    assert weight_sources(used) == {
        "policy": WeightSource("model.source.megatron_checkpoint", "/slime", 7),
        "reference": WeightSource("reference.ref_load", "/ref", 3),
        "teacher": WeightSource("teacher.opd_teacher_load", "/teacher"),
    }
    ppo = configured(
        advantage={"advantage_estimator": "ppo"},
        critic={"hf_checkpoint": "/reward", "megatron_checkpoint": "/critic"},
    )
    critic = WeightSource("critic.megatron_checkpoint", "/critic", None, "/reward")
    assert weight_sources(ppo) == {"critic": critic}


def adapter(folder: Path, weights: bytes) -> str:
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return str(folder)


def test_the_content_of_first_adapters_decides_the_first_weights(tmp_path: Path):
    folders = {
        "first": adapter(tmp_path / "first", b"1"),
        "copy": adapter(tmp_path / "copy", b"1"),
        "other": adapter(tmp_path / "other", b"2"),
    }
    # Notes of people are no part of the adapters.
    (tmp_path / "copy" / "README.md").write_text("trained on sums")
    inputs = {}
    for name, path in folders.items():
        config = configured(model={**BASE["model"], "adapter": path}, train={"lora": {"rank": 4}})
        sources = weight_sources(config)
        assert sources == {"adapter": WeightSource("model.adapter", path)}
        records = {"adapter": source_record(sources["adapter"], tmp_path)}
        assert records["adapter"]["path"] == path
        digests = decisive_digests(config, records)
        inputs[name] = init_inputs(config, "model", None, sources=digests).digest
    assert inputs["first"] == inputs["copy"] != inputs["other"]
    plain = configured(train={"lora": {"rank": 4}})
    assert init_inputs(plain, "model", None).digest not in inputs.values()


def test_slimes_position_in_the_prompts_is_recorded_with_its_file(tmp_path: Path):
    assert prompts_record(configured(), tmp_path) == {}
    file = tmp_path / "global_dataset_state_dict_4.pt"
    position = {"epoch": 2, "offset": 3, "file": str(file)}
    config = configured(data={**BASE["data"], "slime_position": position})
    lost = prompts_record(config, tmp_path)["prompts"]
    assert lost == {"path": str(file), "epoch": 2, "offset": 3, "sha256": None}
    digests = []
    for content in (b"1", b"22"):
        file.write_bytes(content)
        digests.append(prompts_record(config, tmp_path)["prompts"]["sha256"])
    assert None not in digests and digests[0] != digests[1]
    # Another file with the same position gives the same prompts.
    assert decisive_digests(config, {}) == {"prompts": "epoch 2, offset 3"}


def test_a_record_has_the_digest_of_the_iteration_alone(tmp_path: Path):
    folder = checkpoint(checkpoint(tmp_path / "slime", 4), 9)
    newest = source_record(WeightSource("key", str(folder)), tmp_path)
    assert (newest["path"], newest["iteration"]) == (str(folder / "iter_0000009"), 9)
    older = source_record(WeightSource("key", str(folder), 4), tmp_path)
    assert older["sha256"] != newest["sha256"]
    (folder / "other.txt").touch()
    assert source_record(WeightSource("key", str(folder)), tmp_path) == newest
    copy = checkpoint(tmp_path / "copy", 9)
    copied = source_record(WeightSource("key", str(copy)), tmp_path)
    assert copied["sha256"] == newest["sha256"]
    (copy / "iter_0000009" / "__0_0.distcp").write_bytes(b"other")
    changed = source_record(WeightSource("key", str(copy)), tmp_path)
    assert changed["sha256"] != newest["sha256"]
    with pytest.raises(ConfigError) as caught:
        source_record(WeightSource("key", str(folder), 5), tmp_path)
    assert caught.value.where == "key"


def test_optimizer_state_and_reference_are_part_of_the_identity_of_first_weights():
    records = {role: {"sha256": role[0] * 64} for role in ("policy", "reference", "teacher")}
    continued = configured(model=policy(megatron_optimizer=True), advantage={"reference": True})
    digests = decisive_digests(continued, records)
    assert digests == {"optimizer": "p" * 64, "reference": "r" * 64}
    # The converted weights have a fingerprint of their own.
    assert decisive_digests(configured(model=policy()), {"policy": records["policy"]}) == {}
    plain = init_inputs(continued, "model", None)
    assert init_inputs(continued, "model", None, sources={}).digest == plain.digest
    assert init_inputs(continued, "model", None, sources=digests).digest != plain.digest


def test_a_reference_of_another_architecture_is_refused(tmp_path: Path):
    sizes = {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2}
    for name, content in {
        "policy": sizes,
        "same": sizes,
        "deeper": sizes | {"num_hidden_layers": 3},
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(content))
    check_shapes(tmp_path / "same", tmp_path / "policy", "reference.ref_load")
    with pytest.raises(ConfigError, match="num_hidden_layers 3"):
        check_shapes(tmp_path / "deeper", tmp_path / "policy", "reference.ref_load")


@pytest.mark.parametrize(
    "sections",
    [
        {"model": {"source": {**BASE["model"]["source"], "megatron_optimizer": True}}},
        {"model": {**policy(megatron_optimizer=True), "start_from": {"branch": "other"}}},
        {"checkpoint": {"save_hf": "/models/newest"}},
    ],
)
def test_settings_that_cannot_work_are_refused(sections: dict[str, Any]):
    with pytest.raises(ValueError, match=r"megatron_optimizer|rollout_id"):
        configured(**sections)


def test_first_weights_of_a_reward_model_are_not_those_of_a_policy():
    """Both may be of one model directory in one store, and the head makes another state."""
    data = {"type": "file", "paths": ["a"], "label_key": "chosen", "rejected_key": "rejected"}
    pairs = {
        "data": {"prompts": data},
        "rollout": {"type": "dataset", "rollout_batch_size": 2},
        "reward": {"function": {"type": "none"}},
    }
    digests = {
        init_inputs(configured(**pairs, **sections), "model", None).digest
        for sections in (
            {
                "advantage": {"advantage_estimator": "none", "reference": True},
                "train": {"loss": {"type": "dpo"}},
            },
            {
                "advantage": {"advantage_estimator": "none"},
                "train": {"loss": {"type": "reward_model"}},
            },
        )
    }
    assert len(digests) == 2
