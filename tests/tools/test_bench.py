"""The benchmark: what it computes, that its two sides do the same work, and that its parts run
(tools.bench)."""

from __future__ import annotations

import asyncio
import time
from datetime import datetime

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlpipe.batch.columns import BatchColumns
from rlpipe.data.tokenizer import load_tokenizer
from rlpipe.errors import DataError
from rlpipe.observe.trace import Event, works
from tests.live_engine import Live, live_engine
from tools.bench import sampling, storing, training
from tools.bench.bench import Bench, open_bench
from tools.bench.hf_side import padded
from tools.bench.iterations import compared, covered, shares
from tools.bench.measures import Row, alternate, table
from tools.bench.serving import Serving
from tools.bench.shapes import SHAPES, hf_config, random_text, tokenizer, trained_batch
from tools.bench.utilisation import Watch, idle

TINY = SHAPES["tiny"]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """The tiny model."""
    opened = open_bench(
        tmp_path_factory.mktemp("b"),
        "tiny",
        ["rollout.rollout_batch_size=2"],
        seconds=60,
        repeats=1,
    )
    opened.ensure_model()
    return opened


@pytest.mark.parametrize(
    ("name", "millions"),
    [("tiny", 0.66), ("0.6b", 596), ("4b", 4022), ("tiny-moe", 1.1), ("moe", 4050)],
)
def test_a_shape_has_the_parameters_of_its_name(name, millions):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config(SHAPES[name]))
    counted = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim > 1)
    assert SHAPES[name].parameters == counted
    assert counted / 1e6 == pytest.approx(millions, rel=0.01)


def test_flops_are_two_a_parameter_and_token_and_the_attention():
    lengths = np.array([4, 2])
    responses = np.array([3, 1])
    dense = 2 * 6 * TINY.layer_parameters + 2 * 4 * 512 * 128
    attention = 3 * 4 * 2 * (2 * 32) * (4**2 + 2**2) / 2
    assert TINY.forward_flops(lengths, responses) == dense + attention


def test_a_prompt_of_n_characters_has_n_tokens_and_every_id_is_text(tmp_path):
    tokenizer(512).save_pretrained(tmp_path)
    made = load_tokenizer(str(tmp_path))
    text = random_text(np.random.default_rng(0), 50)
    assert len(made.encode(text, add_special_tokens=False)) == 50
    assert made.decode(made.encode(text)) == text
    assert made.decode([511, 0], skip_special_tokens=True) == "<511> "
    assert made.eos_token_id is None


def test_a_trained_batch_has_the_shape_s_tokens():
    batch = trained_batch(TINY)
    assert len(batch.tokens) == TINY.micro_batches * TINY.micro_batch_tokens
    ragged = trained_batch(TINY, ragged=True)
    assert len(set(ragged.lengths)) > 5 and ragged.lengths.max() <= TINY.trained_tokens
    assert len(ragged.tokens) <= len(batch.tokens)


def test_padding_loses_and_doubles_no_token():
    batch = BatchColumns.from_lists(
        [[1, 2], [3], [4, 5]],
        [[6, 7, 8], [9], [10, 11]],
        advantages=[[1.0, 2.0, 3.0], [4.0], [5.0, 6.0]],
    )
    found = {}
    for micro in padded(batch, 10, torch.device("cpu")):
        assert micro.ids.numel() <= 10
        targets = micro.ids[:, micro.first + 1 :]
        counted = micro.weight > 0
        assert torch.equal(
            micro.weight[counted] * 3, 1 / counted.sum(1).repeat_interleave(counted.sum(1))
        )
        found |= dict(
            zip(targets[counted].tolist(), micro.advantages[counted].tolist(), strict=True)
        )
    assert found == {6: 1.0, 7: 2.0, 8: 3.0, 9: 4.0, 10: 5.0, 11: 6.0}


def test_a_row_shows_medians_and_the_ratio_of_each_pair():
    row = Row("train", "step", "tokens/s", (1000.0, 3000.0, 2000.0), (500.0, 1000.0, 1000.0), "hf")
    assert row.ratios == (2.0, 3.0, 2.0)
    assert row.cells()[2:5] == (
        "2,000 tokens/s [1,000, 3,000]",
        "1,000 tokens/s [500, 1,000] (hf)",
        "2 [2, 3]",
    )
    assert row.as_json()["median"] == {"ours": 2000.0, "baseline": 1000.0, "ratios": 2.0}
    assert (
        len({len(line) for line in table([row, Row("store", "size", "B", (4.0,))]).splitlines()})
        == 1
    )


def test_sides_take_turns_and_stop_in_time():
    lines = []
    order = []
    sides = {name: (lambda name=name: order.append(name) or len(order)) for name in "ab"}
    found = alternate(sides, repeats=3, until_s=time.monotonic() + 60, say=lines.append)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert found == {"a": [1, 4, 5], "b": [2, 3, 6]}
    assert alternate(sides, repeats=3, until_s=0.0, say=lines.append) == {"a": [7], "b": [8]}


def test_time_is_shared_out_by_what_the_trace_says():
    def work(stage: str, k: int, begin: float, end: float) -> list[Event]:
        return [Event(begin, k, stage, "begin", 1), Event(end, k, stage, "end", 1)]

    events = []
    for k in range(5):
        events += work("rollout", k, 10 * k + 1, 10 * k + 5) + work(
            "reward", k, 10 * k + 5, 10 * k + 6
        )
        events += work("train", k, 10 * k + 6, 10 * k + 9) + work(
            "checkpoint", k, 10 * k + 9.5, 10 * k + 10
        )
    events += [*work("eval", 2, 20.1, 20.6), Event(52, 5, "rollout", "begin", 1)]
    found = shares(works(events))
    assert found.iterations == (1, 3), "not the first, the last and one with an evaluation"
    assert found.seconds == (10, 10) and found.by_stage["rollout"] == (4, 4)
    assert found.in_no_stage == pytest.approx(0.15), (
        "one second before the rollout, half a one before the checkpoint"
    )
    assert found.off_gpus == pytest.approx(0.3)
    with pytest.raises(DataError, match="too few iterations"):
        shares(works(events), skipped=4)


SEEN = [(second, gpu, 90 * (gpu == 1 and second != 3)) for second in range(8) for gpu in (0, 1)]


def test_gpus_that_the_run_does_not_use_and_its_warm_up_do_not_count_as_idle(tmp_path):
    lines = [
        f"2026/01/01 00:00:{second:02}.500, {gpu}, {busy}, {100 * second}"
        for second, gpu, busy in SEEN
    ]
    (tmp_path / "gpus.csv").write_text("\n".join([*lines, "[N/A], 0, [N/A]", "2026/01/01 00:0"]))
    watch = Watch(tmp_path / "gpus.csv")
    watch.read()
    assert len(watch.moments) == len(SEEN)
    begin = datetime(2026, 1, 1, 0, 0, 2).timestamp()
    seen = watch.within(begin, begin + 3)
    assert {moment.gpu for moment in seen} == {"1"} and max(moment.mib for moment in seen) == 400
    assert idle(seen) == pytest.approx(1 / 3)
    assert watch.within(0, 1) == []


def test_a_second_run_is_the_baseline_of_each_row_that_both_have():
    ours = [Row("iteration", "train", "s", (1.0, 2.0)), Row("iteration", "new", "s", (3.0,))]
    other = [Row("iteration", "train", "s", (2.0, 4.0)), Row("iteration", "old", "s", (5.0,))]
    found = {row.what: row for row in compared(ours, other, "a=1 b=2")}
    assert found["train"].ratios == (0.5, 0.5) and found["train"].against == "a=1 b=2"
    assert (found["new"].ours, found["new"].baseline) == ((3.0,), ())
    assert (found["old"].ours, found["old"].baseline) == ((), (5.0,))


def test_iterations_that_overlap_are_one_stretch():
    events = []
    for k in range(5):
        for stage, begin, end in (
            ("rollout", 5 * k, 5 * k + 9),
            ("train", 5 * k + 9, 5 * k + 11),
            ("checkpoint", 5 * k + 11, 5 * k + 12),
        ):
            events += [Event(begin, k, stage, "begin", k), Event(end, k, stage, "end", k)]
    found = shares(works(events))
    assert found.seconds == () and found.per_iteration_s == 5
    assert found.in_no_stage == 0


def test_a_moment_in_two_intervals_is_covered_once():
    assert covered([(1, 3), (2, 4), (6, 9), (0, 1.5)], (1, 8)) == 5


def test_a_store_is_measured_and_left_as_it_was(bench):
    rows = {row.what: row for row in storing.measure(bench)}
    assert len(rows["write"].ratios) == len(rows["read"].ratios) == 1
    assert 1 < rows["size"].ours[0] < 40
    assert not [path for path in (bench.home / "store").rglob("*") if path.is_file()]


@pytest.mark.long
@pytest.mark.integration
def test_both_sides_of_train_take_the_same_optimizer_steps(bench):
    batch = trained_batch(TINY, ragged=True)
    sides = [
        training.Side(str(name), training.Task(str(bench.model_dir), bench.config, batch, name))
        for name in (None, "hf-no-recompute")
    ]
    for side in sides:
        side.start()
    for side in sides:
        side.warm()
    ours, theirs = ([side.measure() for _ in range(2)] for side in sides)
    for side in sides:
        side.stop()
    assert [turn.grad_norm for turn in ours] == pytest.approx(
        [turn.grad_norm for turn in theirs], rel=1e-3
    )
    rows = {
        row.what: row
        for row in training.compared(bench, batch, ours, theirs, "hf-no-recompute", True)
    }
    assert rows["optimizer step"].ours[0] == pytest.approx(len(batch.tokens) / ours[0].step_s)


@pytest.mark.long
@pytest.mark.integration
def test_a_rollout_s_baseline_samples_every_token_that_was_asked_for(bench, request):
    live: Live = live_engine(request.config)
    up = Serving(live.router.url, (live.server.url,))
    lines = list[str]()
    (ours,), (straight,) = asyncio.run(sampling.compare(bench, up, lines.append))
    assert straight.tokens == 2 * 4 * TINY.response_tokens
    assert 0 < ours.tokens <= straight.tokens, (
        "this engine's model ends responses, which only the baseline ignores"
    )
    shards = (bench.home / "rollout" / "plans").glob("*/groups/*.parquet")
    kept = [sum(map(len, pq.read_table(shard)["response_ids"].to_pylist())) for shard in shards]
    assert len(kept) == 2 and ours.tokens in kept, "one of the round that is not counted"
