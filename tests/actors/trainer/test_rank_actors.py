"""Uploads and pushes of a trainer rank (rlpipe.actors.trainer.rank, rank_actors)."""

from __future__ import annotations

import json
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from rlpipe.actors.trainer.checkpoints import BackgroundUpload, Upload
from rlpipe.actors.trainer.profiling import Work
from rlpipe.actors.trainer.rank_actors import TrainerRank
from rlpipe.actors.trainer.scoring import never_scores
from rlpipe.actors.trainer.trainer_spec import TrainerSpec
from rlpipe.batch.build import Batch, fix_batch
from rlpipe.batch.files import StoredBatch, read_rewards, write_batch
from rlpipe.batch.rows import RolloutRows
from rlpipe.config.train import CriticConfig, SyncConfig, TeacherConfig
from rlpipe.engines.megatron.results import TrainResult
from rlpipe.errors import (
    ConfigError,
    DeadlineExceeded,
    ObjectConflict,
    ObjectMissing,
    StoreError,
    StoreFull,
)
from rlpipe.lineage.stage_inputs import Inputs, checkpoint_inputs
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.types import FileRecord, Stage
from tests.actors.trainer.test_scoring import MODEL
from tests.actors.trainer.trained import configuration, sampled_rows
from tests.live_engine import live_engine

RECORD = FileRecord(path="checkpoints/p/.metadata", size_bytes=1, sha256="0" * 64)


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainerRank:
    """A rank without a model, with 0.05 s for uploads."""
    monkeypatch.chdir(".")  # restores the directory that the rank changes
    rank = TrainerRank(0, 1, str(tmp_path))
    config = configuration(str(tmp_path), "run", checkpoint={"timeout_s": 0.05})
    made: Any = rank
    made._spec = TrainerSpec.of(
        config, model_dir=str(tmp_path), store_root=str(tmp_path / "store"), work_dir=tmp_path
    )
    made._engine = SimpleNamespace(save_checkpoint=lambda *_: tmp_path)
    return rank


def upload_to(prefix: str) -> Upload:
    return Upload(prefix, checkpoint_inputs("state"), {"version": 1})


def sampled_batch(files: Files, version: int) -> tuple[str, str, Batch]:
    """Store sampled rows; return the digests of rollout and rewards, and the fixed batch."""
    rollout, reward = sampled_rows(files, 3)
    nodes = Nodes(files)
    rollout_node = nodes.get(Stage.ROLLOUT, rollout)
    batch = fix_batch(
        RolloutRows.of_node(files, rollout_node),
        read_rewards(files, nodes.get(Stage.REWARD, reward)),
        accepted=rollout_node.outputs["accepted"],
        scored=True,
        version=version,
        max_staleness=1,
    ).batch()
    return rollout, reward, batch


def uploading(rank: TrainerRank, prefix: str = "p") -> list[Future[list[FileRecord]]]:
    """Give the rank an upload that runs; return a future for each start of the upload."""
    begun: list[Future[list[FileRecord]]] = []

    def begin() -> Future[list[FileRecord]]:
        begun.append(Future())
        return begun[-1]

    rank._upload = BackgroundUpload(upload_to(prefix), begin)
    return begun


def test_an_upload_that_does_not_end_is_an_error_and_may_still_succeed(rank: TrainerRank):
    (upload,) = uploading(rank)
    assert rank.upload() == (upload_to("p"), False)
    with pytest.raises(
        DeadlineExceeded, match=r"trainer/0: the upload of a checkpoint does not end"
    ):
        rank.uploaded("p")
    upload.set_result([RECORD])
    assert rank.upload() == (upload_to("p"), True)
    assert rank.uploaded("p") == [RECORD]


def test_an_upload_is_kept_until_it_is_recorded(rank: TrainerRank):
    (upload,) = uploading(rank)
    assert rank.uploading() == "p"
    upload.set_result([RECORD])
    assert [rank.uploaded("p"), rank.uploaded("p")] == [[RECORD], [RECORD]]
    rank.forget_upload("q")
    assert rank.upload() == (upload_to("p"), True)
    rank.forget_upload("p")
    assert rank.upload() is None and rank.uploading() is None and rank.uploaded("p") is None


def test_saving_a_checkpoint_has_a_deadline_for_the_upload_before(rank: TrainerRank):
    uploading(rank)
    rank.held = "state"
    with pytest.raises(DeadlineExceeded, match="p still on its way"):
        rank.save(held="state", version=1, upload=upload_to("q"))


@pytest.mark.parametrize("error", [StoreError("away"), StoreFull("no room")])
def test_an_upload_that_failed_for_an_unreachable_or_full_store_raises_once_and_is_started_again(
    rank: TrainerRank, error: StoreError
):
    begun = uploading(rank)
    begun[0].set_exception(error)
    assert rank.upload() == (upload_to("p"), True)
    with pytest.raises(StoreError, match=error.problem):
        rank.uploaded("p")
    assert len(begun) == 1, "the next call starts it"
    assert rank.upload() == (upload_to("p"), False)
    begun[1].set_result([RECORD])
    assert rank.uploaded("p") == [RECORD] and len(begun) == 2


def test_an_upload_with_a_permanent_error_raises_and_is_forgotten(rank: TrainerRank):
    for error in (
        ObjectConflict("other content"),
        FileNotFoundError("the local checkpoint is gone"),
    ):
        uploading(rank)[0].set_exception(error)
        with pytest.raises(type(error)):
            rank.uploaded("p")
        assert rank.upload() is None and rank.uploaded("p") is None


@pytest.mark.integration
@pytest.mark.parametrize("transport", ["tensor", "distributed", "shared"])
def test_a_checked_push_sends_all_weights_twice_over_each_transport(
    rank: TrainerRank, request: pytest.FixtureRequest, transport: str
):
    live = live_engine(request.config)
    made = cast("Any", rank)
    made._spec = replace(made._spec, model_dir=str(live.model_dir))
    made._engine = SimpleNamespace(
        named_hf_tensors=lambda: iter(live.model.state_dict().items()), close=lambda: None
    )
    rank.held = "state"
    url = live.server.url
    shared_ranks = {url: [0]} if transport == "shared" else {}
    sync = SyncConfig.model_validate(
        {"transport": "tensor" if transport == "shared" else transport}
    )
    sent = [
        rank.push(
            held="state",
            engines=[url],
            stamp=f"b@{int(checked)}@{transport}",
            sync=sync.model_copy(update={"check_weight_update_equal": checked}),
            shared_ranks=shared_ranks,
        )
        for checked in (False, True)
    ]
    assert sent[1]["bytes"] == 2 * sent[0]["bytes"], "all of it is sent twice"
    assert [answer["unknown"] for answer in sent] == [{}, {}]
    rank.close()


def test_a_broadcast_to_engines_on_the_gpus_of_the_trainer_is_refused(rank: TrainerRank):
    cast("Any", rank)._engine = SimpleNamespace(named_hf_tensors=dict, close=lambda: None)
    rank.held = "state"
    with pytest.raises(ConfigError, match="share the trainer's GPUs"):
        rank.push(
            held="state",
            engines=["u"],
            stamp="b",
            sync=SyncConfig(transport="distributed"),
            shared_ranks={"u": [0]},
        )


@pytest.mark.parametrize("version", [3, 4])
def test_metrics_of_a_step_with_its_own_log_probs_exclude_tokens_of_older_weights(
    rank: TrainerRank, tmp_path: Path, version: int
):
    files = rank._files = Files(tmp_path / "store")
    nodes = rank._nodes = Nodes(files)
    rollout, reward, batch = sampled_batch(files, version)
    inputs = Inputs(Stage.ADVANTAGE, {"rollout": rollout, "reward": reward, "before": "weights"})
    metrics = {"rollout/staleness/max": float(version - 3)}
    node = nodes.commit(
        inputs.node(
            files=write_batch(files, inputs.digest, batch, batch.columns).files,
            outputs={"metrics": metrics},
        )
    )
    assert batch.columns.rollout_log_probs is not None
    own = batch.columns.rollout_log_probs + np.float32(0.25)
    result = TrainResult([], "digest", own)
    stored = StoredBatch(files, node)
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    cast("Any", rank)._engine = SimpleNamespace(
        rows_of_all=lambda _, values: values, from_rank_0=lambda make: make()
    )
    found = rank._metrics_of(node, stored, batch.columns, result, version, Work())
    assert found["rollout/mismatch_kl"] == pytest.approx(-0.25, abs=1e-6)
    current = found.get("rollout/logprob_abs_diff/mean")
    assert current == (pytest.approx(0.25, abs=1e-6) if version == 3 else None)
    assert rank._own_proximal == (node.digest, own)
    assert rank._metrics_of(node, stored, batch.columns, TrainResult(), version, Work()) == {}
    assert rank._own_proximal is None
    timed = replace(result, seconds=2.0)
    speed = rank._metrics_of(node, stored, batch.columns, timed, version, Work())
    assert speed.keys() - found.keys() == {"perf/train_tflops"}


def test_a_replayed_step_keeps_its_log_probs_and_has_no_metrics(rank: TrainerRank, tmp_path: Path):
    rollout, reward, batch = sampled_batch(Files(tmp_path / "store"), 3)
    node = Inputs(Stage.ADVANTAGE, {"rollout": rollout, "reward": reward}).node()
    own = np.zeros(3, np.float32)
    rank.busy = "restore"
    unread = cast("Any", None)
    result = TrainResult([], "digest", own)
    assert rank._metrics_of(node, unread, batch.columns, result, 3, Work()) == {}
    assert rank._own_proximal == (node.digest, own)


def test_ranks_other_than_0_read_no_rows_if_no_batch_is_ever_scored(rank: TrainerRank):
    spec = rank._spec
    assert spec is not None and spec.train.global_batch_size == 4
    unread: dict[str, Any] = {"rollout": "none", "reward": "none"}
    rank.rank = 1
    rank.held = "state"
    rank._files = Files(spec.store_root)
    cast("Any", rank)._engine = SimpleNamespace(from_rank_0=lambda make: make())
    with pytest.raises(ObjectMissing):  # a batch may have several optimizer steps
        rank.advantage(key="key", before="state", version=3, **unread)
    never = spec.train.model_copy(update={"global_batch_size": None})
    rank._spec = replace(spec, train=never)
    assert rank.advantage(key="key", before="state", version=3, **unread) is None
    needing = [
        {"score_proximal": True},
        {"train": never.model_copy(update={"use_routing_replay": True})},
        {"advantage": spec.advantage.model_copy(update={"reference": True})},
        {"teacher": TeacherConfig(opd_type="megatron", opd_teacher_load="t")},
        {"critic": CriticConfig()},
    ]
    assert not any(never_scores(replace(rank._spec, **changed)) for changed in needing)
    assert never_scores(replace(spec, score_proximal=False))


def test_the_probe_of_a_push_reads_the_file_of_the_trained_batch_only_if_it_is_not_held(
    rank: TrainerRank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    files = Files(tmp_path / "store")
    rank._files = files
    rank._nodes = Nodes(files)
    _, _, batch = sampled_batch(files, 3)
    node = Inputs(Stage.ADVANTAGE, {"rollout": "r", "reward": "w", "before": "b"}).node(
        files=write_batch(files, "batch", batch, batch.columns).files, outputs={}
    )
    rank._nodes.commit(node)
    made: Any = rank
    made._engine = SimpleNamespace(
        score=lambda columns, **_: np.zeros(len(columns.response_index()), np.float32),
        max_tokens=100,
    )
    stored = StoredBatch(files, node)
    rank._metrics_of(node, stored, batch.columns, TrainResult([{}], "s"), 3, Work())
    opened: list[str] = []
    monkeypatch.setattr(
        "rlpipe.actors.trainer.rank_actors.StoredBatch",
        lambda files, node: opened.append(node.digest) or StoredBatch(files, node),
    )
    rank.held = "state"
    rank.probe(held="state", batch=node.digest, samples=2)
    assert opened == []
    rank.probe(held="state", batch=node.digest, samples=2)
    assert opened == [node.digest]


def test_a_batch_of_several_optimizer_steps_is_scored_first(rank: TrainerRank, tmp_path: Path):
    _, _, batch = sampled_batch(Files(tmp_path / "store"), 3)
    spec = rank._spec
    assert spec is not None and spec.train.global_batch_size == 4 and len(batch.columns) == 8
    assert rank._scores(batch.columns.sizes)
    rank._spec = replace(spec, train=spec.train.model_copy(update={"global_batch_size": 8}))
    assert not rank._scores(batch.columns.sizes)
    rank._spec = replace(rank._spec, score_proximal=True)
    assert rank._scores(batch.columns.sizes)
    rank._spec = replace(spec, score_proximal=False)
    assert not rank._scores(batch.columns.sizes)
