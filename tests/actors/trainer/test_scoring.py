"""Scores of a teacher's server, and speed of scoring (rlpipe.actors.trainer.scoring)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import numpy as np
import pytest

from rlpipe.actors.trainer import scoring
from rlpipe.actors.trainer.profiling import Work
from rlpipe.actors.trainer.rank_actors import train_metrics
from rlpipe.actors.trainer.scoring import scoring_metrics, with_teacher_server_scores
from rlpipe.actors.trainer.trainer_spec import TrainerSpec
from rlpipe.batch.columns import BatchSizes
from rlpipe.config.train import CriticConfig, LoraConfig, TeacherConfig
from rlpipe.errors import EngineRejected
from tests.actors.trainer.trained import configuration
from tests.engines.megatron.ranks import make_batch


class Teacher(BaseHTTPRequestHandler):
    """Answers as SGLang's /generate; a token's log-prob is minus its id.

    `short`: tokens missing at the end of the first answer.
    """

    requests: ClassVar[list[dict[str, Any]]] = []
    short = 0

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Teacher.requests.append(body)
        rows = [
            [[None, ids[0], None], *([-float(i), i, None] for i in ids[1:])]
            for ids in body["input_ids"]
        ]
        rows[0] = rows[0][: len(rows[0]) - Teacher.short]
        answer = json.dumps([{"meta_info": {"input_token_logprobs": row}} for row in rows]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    Teacher.requests = []
    Teacher.short = 0
    server = HTTPServer(("127.0.0.1", 0), Teacher)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def spec(tmp_path, **teacher: Any) -> TrainerSpec:
    config = configuration("/models/m", "run", advantage={"use_opd": True}, teacher=teacher)
    return TrainerSpec.of(config, model_dir="/models/m", store_root="/store", work_dir=tmp_path)


def test_whole_samples_are_sent_in_several_requests_and_scores_are_cut_to_the_responses(
    url, tmp_path, monkeypatch
):
    monkeypatch.setattr(scoring, "SEQUENCES_AT_ONCE", 10)
    batch = make_batch(24)
    log_probs = with_teacher_server_scores(
        batch, spec(tmp_path, opd_type="sglang", url=url)
    ).teacher_log_probs
    assert log_probs is not None
    starts = batch.offsets[:-1] + batch.prompt_lengths
    ends = batch.offsets[1:]
    expected = np.concatenate([-batch.tokens[a:b] for a, b in zip(starts, ends, strict=True)])
    assert np.array_equal(log_probs, expected.astype(np.float32))
    assert [len(body["input_ids"]) for body in Teacher.requests] == [10, 10, 4]
    assert all(body["sampling_params"]["max_new_tokens"] == 0 for body in Teacher.requests)


def test_an_answer_with_a_wrong_number_of_scores_is_an_error(url, tmp_path):
    Teacher.short = 1
    with pytest.raises(EngineRejected, match="cannot be read"):
        with_teacher_server_scores(make_batch(4), spec(tmp_path, opd_type="sglang", url=url))


class _Policy:
    """Models of a trainer that only allow scores of the policy."""

    def score(self, columns, *, max_tokens=None, model="policy"):
        assert model == "policy"
        return np.zeros(int(columns.response_lengths.sum()), np.float32)


def test_teacher_log_probs_of_the_samples_are_kept_without_a_request(tmp_path):
    batch = make_batch(2)
    of_samples = np.arange(int(batch.response_lengths.sum()), dtype=np.float32)
    columns = batch.with_columns(teacher_log_probs=of_samples)
    spec_of_samples = spec(tmp_path, opd_type="samples")
    policy: Any = _Policy()
    scored = columns.with_columns(
        **scoring.score_batch(policy, columns, spec_of_samples, proximal=True)
    )
    assert scored.teacher_log_probs is not None
    assert scored.teacher_log_probs.tolist() == of_samples.tolist()
    assert with_teacher_server_scores(scored, spec_of_samples) is scored


def test_a_teacher_on_the_trainer_needs_no_server(tmp_path):
    batch = make_batch(2)
    assert (
        with_teacher_server_scores(
            batch, spec(tmp_path, opd_type="megatron", opd_teacher_load="/models/t")
        )
        is batch
    )


MODEL = {
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 32,
}
SIZES = BatchSizes(np.array([3, 4]), np.array([5, 1]))
SECONDS = 2.0


def forward_flops(*, logits: bool = True) -> tuple[float, float]:
    """Return the FLOPs of the matrices and of attention of `MODEL` over `SIZES`, by a loop."""
    layer = 4 * 8 * 8 + 3 * 8 * 16
    matrices = attention = 0.0
    for prompt, response in ((3, 5), (4, 1)):
        for token in range(prompt + response):
            matrices += 2 * 2 * layer
            attention += 2 * (token + 1) * 4 * 8
        matrices += response * 2 * 8 * 32 * logits
    return matrices, attention


def spec_of(tmp_path: Path, **changes: Any) -> TrainerSpec:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    spec = TrainerSpec.of(
        configuration(str(tmp_path), "run"),
        model_dir=str(tmp_path),
        store_root=str(tmp_path / "store"),
        work_dir=tmp_path,
    )
    return replace(spec, world_size=2, **changes)


def rate(flops: float) -> Any:
    """Return the TFLOP/s of each of two ranks."""
    return pytest.approx(flops / SECONDS / 2 / 1e12)


def test_scoring_counts_the_passes_of_each_model_that_the_ranks_hold(tmp_path: Path):
    once = sum(forward_flops())
    values = sum(forward_flops(logits=False))
    work = Work(seconds=SECONDS)

    def tflops(spec: TrainerSpec, *, proximal: bool) -> float | None:
        return scoring_metrics(spec, SIZES, work, proximal=proximal).get("perf/scoring_tflops")

    spec = spec_of(tmp_path)
    assert tflops(spec, proximal=False) is None, "no model scores"
    assert tflops(spec, proximal=True) == rate(once)
    loss = spec.advantage.model_copy(update={"reference": True})
    assert tflops(replace(spec, advantage=loss), proximal=True) == rate(2 * once)
    critic = replace(spec, critic=CriticConfig())
    assert tflops(critic, proximal=True) == rate(once + values)
    assert tflops(replace(critic, critic_ranks=1), proximal=True) == rate(once)
    teacher = TeacherConfig(opd_type="megatron", opd_teacher_load=str(tmp_path))
    assert tflops(replace(spec, teacher=teacher), proximal=True) == rate(2 * once)
    unknown = teacher.model_copy(update={"opd_teacher_load": str(tmp_path / "absent")})
    assert tflops(replace(spec, teacher=unknown), proximal=True) is None


def test_optimizer_steps_count_forward_and_backward_passes(tmp_path: Path):
    matrices, attention = forward_flops()
    values = sum(forward_flops(logits=False))

    def tflops(spec: TrainerSpec, *, critic_only: bool = False) -> float | None:
        metrics = train_metrics(spec, SIZES, SECONDS, Work(), critic_only=critic_only)
        assert set(metrics) <= {"perf/train_tflops"}, "a CPU has no MFU and no GPU memory"
        return metrics.get("perf/train_tflops")

    spec = spec_of(tmp_path)
    assert tflops(spec) == rate(3 * (matrices + attention))
    critic = replace(spec, critic=CriticConfig())
    assert tflops(critic) == rate(3 * (matrices + attention + values))
    assert tflops(critic, critic_only=True) == rate(3 * values)
    assert tflops(replace(critic, critic_ranks=1), critic_only=True) is None
    adapters = spec.train.model_copy(update={"lora": LoraConfig()})
    assert tflops(replace(spec, train=adapters)) == rate(2 * matrices + 3 * attention)
