"""Routing replay: passes use the experts of the scoring pass or of the engines."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlpipe.actors.trainer.scoring import score_batch
from rlpipe.actors.trainer.trainer_spec import TrainerSpec
from rlpipe.batch.build import Batch
from rlpipe.batch.columns import BatchColumns
from rlpipe.batch.files import read_batch, write_batch
from rlpipe.batch.packing import plan
from rlpipe.config.train import TrainConfig
from rlpipe.engines.megatron.train.routing import layers_with_experts_only
from rlpipe.errors import ConfigError, DataError
from rlpipe.store.nodes import input_digest
from rlpipe.store.objects.files import Files
from rlpipe.store.routed_experts import NOT_ROUTED
from rlpipe.system.ports import free_port
from rlpipe.types import Node, Stage
from tests.actors.trainer.trained import configuration
from tests.engines.megatron.ranks import engine, make_batch, near
from tests.engines.megatron.routing_jobs import disturb, record_and_replay, refusal, routers
from tests.parameters import each

LAYERS = 2
TOP_K = 2
EXPERTS = 4
TRAIN = {"max_tokens_per_gpu": 64, "optimizer": {"lr": 1e-3, "adam_eps": 1e-5}}
PARTS = {
    "tensor_model_parallel_size": 2,
    "expert_tensor_parallel_size": 2,
    "sequence_parallel": True,
}
LAYOUTS = {
    "expert parallel": {"parallel": {"expert_model_parallel_size": 2}},
    "tensor and sequence parallel": {"parallel": PARTS},
    "pipeline parallel": {"parallel": {"pipeline_model_parallel_size": 2}},
    "context parallel": {"parallel": {"context_parallel_size": 2}},
}
RECOMPUTED = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


@pytest.fixture
def start(models):
    opened = []

    def make(*, family: str = "qwen3_moe", **train):
        ours = engine(
            models[family],
            TrainConfig.model_validate({**TRAIN, "use_routing_replay": True, **train}),
            0,
            1,
            free_port(),
        )
        opened.append(ours)
        ours.load_hf()
        return ours

    yield make
    for ours in opened:
        ours.close()


def one_plan(ours, batch: BatchColumns):
    return plan(batch.lengths, global_batch_size=None, max_tokens=ours.max_tokens, data_parallel=1)


def watched(ours) -> list[list[np.ndarray]]:
    """Return [router][call][token, expert]: the routing from now on."""
    seen: list[list[np.ndarray]] = [[] for _ in routers(ours)]
    for calls, router in zip(seen, routers(ours), strict=True):
        router.register_forward_hook(
            lambda _module, _inputs, output, calls=calls: calls.append(output[1].numpy())
        )
    return seen


def as_map(experts: np.ndarray) -> np.ndarray:
    """[tokens, EXPERTS] bool of [tokens, TOP_K]."""
    found = np.zeros((len(experts), EXPERTS), bool)
    np.put_along_axis(found, experts.astype(int), True, 1)
    return found


def test_recorded_experts_equal_transformers(models, start):
    batch = make_batch(num_samples=1)
    _, experts = start().score_and_route(batch)
    theirs = AutoModelForCausalLM.from_pretrained(models["qwen3_moe"], dtype=torch.float32)
    with torch.no_grad():
        logits = theirs(
            torch.from_numpy(batch.tokens.astype(np.int64))[None], output_router_logits=True
        ).router_logits
    wanted = torch.stack([layer.topk(TOP_K, -1).indices for layer in logits], 1).reshape(
        len(batch.tokens), -1
    )
    assert experts.dtype == np.uint16
    assert experts.tolist() == wanted.tolist()


@pytest.mark.parametrize("megatron", [{}, RECOMPUTED])
def test_steps_use_the_recorded_experts_with_disturbed_routers(start, megatron):
    ours = start(megatron=megatron)
    batch = make_batch()
    scores, experts = ours.score_and_route(batch)
    disturb(ours)
    _, others = ours.score_and_route(batch)
    assert (others != experts).mean() > 0.5
    batch = batch.with_columns(proximal_log_probs=scores, routed_experts=experts)
    packing = one_plan(ours, batch)
    seen = watched(ours)
    ours.train(batch, packing)
    micros = [micro for step in packing.steps for micro in step[0]]
    assert len(micros) > 1
    for layer, calls in enumerate(seen):
        of_layer = experts.reshape(-1, LAYERS, TOP_K)[:, layer]
        wanted = [
            as_map(
                np.concatenate([of_layer[batch.offsets[i] : batch.offsets[i + 1]] for i in micro])
            )
            for micro in micros
        ]
        times = 2 if megatron else 1
        assert len(calls) == times * len(micros), "a recomputed layer routes twice"
        for n, found in enumerate(calls):
            assert np.array_equal(found, wanted[n // times])


def test_replaying_the_routers_own_choice_changes_no_bit(start):
    digests = set()
    for replay, megatron in ((False, {}), (True, {}), (True, RECOMPUTED)):
        ours = start(use_routing_replay=replay, megatron=megatron)
        batch = make_batch()
        if replay:
            scores, experts = ours.score_and_route(batch)
            batch = batch.with_columns(routed_experts=experts)
        else:
            scores = ours.score(batch)
        batch = batch.with_columns(
            proximal_log_probs=scores, loss_mask=np.ones_like(batch.loss_mask)
        )
        result = ours.train(batch, one_plan(ours, batch))
        assert result.steps[0]["ratio"] == pytest.approx(1, abs=1e-6)
        assert abs(result.steps[0]["ppo_kl"]) < 1e-6
        digests.add(result.state_digest)
        ours.close()
    assert len(digests) == 1


def test_replay_changes_the_second_step(start):
    digests = set()
    for replay in (False, True):
        ours = start(use_routing_replay=replay, optimizer={"lr": 0.1})
        batch = make_batch()
        scores, experts = ours.score_and_route(batch) if replay else (ours.score(batch), None)
        batch = batch.with_columns(proximal_log_probs=scores, routed_experts=experts)
        packing = plan(batch.lengths, global_batch_size=12, max_tokens=64, data_parallel=1)
        digests.add(ours.train(batch, packing).state_digest)
        ours.close()
    assert len(digests) == 2


def test_experts_pass_through_the_store(models, start, tmp_path):
    ours = start()
    batch = make_batch()
    config = configuration(models["qwen3_moe"], "run", train={**TRAIN, "use_routing_replay": True})
    spec = TrainerSpec.of(
        config, model_dir=models["qwen3_moe"], store_root=str(tmp_path), work_dir=tmp_path
    )
    columns = batch.with_columns(**score_batch(ours, batch, spec, proximal=True))
    files = Files(tmp_path)
    keys = range(len(batch))
    fixed = Batch(
        columns, tuple(f"g{i:02d}" for i in keys), tuple(keys), np.zeros(len(batch)), {}, None
    )
    (record,) = write_batch(files, "d" * 64, fixed, columns).files
    back = read_batch(
        files,
        Node(
            stage=Stage.ADVANTAGE, digest=input_digest(Stage.ADVANTAGE, {}, {}, {}), files=(record,)
        ),
    )
    assert back.routed_experts is not None
    assert np.array_equal(back.routed_experts, ours.score_and_route(batch)[1])
    disturb(ours)
    seen = watched(ours)
    ours.train(back, plan(back.lengths, global_batch_size=None, max_tokens=8192, data_parallel=1))
    for layer, (found,) in enumerate(seen):
        assert np.array_equal(
            found, as_map(back.routed_experts.reshape(-1, LAYERS, TOP_K)[:, layer])
        )


def of_engines(batch: BatchColumns, seed: int = 5) -> np.ndarray:
    """Return experts in the form of an engine, for all tokens but the last of each sample."""
    draws = np.random.default_rng(seed).random((len(batch.tokens), LAYERS, EXPERTS))
    experts = (
        np.argsort(draws, axis=-1)[..., :TOP_K].astype(np.uint16).reshape(len(batch.tokens), -1)
    )
    experts[batch.offsets[1:] - 1] = NOT_ROUTED
    return experts


def test_scoring_and_training_use_the_engines_experts(models, start, tmp_path):
    replay = {"use_rollout_routing_replay": True, "use_routing_replay": False}
    ours = start(**replay)
    batch = make_batch()
    named = of_engines(batch)
    config = configuration(
        models["qwen3_moe"], "run", train={**TRAIN, **replay}, advantage={"reference": True}
    )
    spec = TrainerSpec.of(
        config, model_dir=models["qwen3_moe"], store_root=str(tmp_path), work_dir=tmp_path
    )
    ours.keep_reference()
    seen = watched(ours)
    columns = batch.with_columns(
        **score_batch(ours, batch.with_columns(routed_experts=named), spec, proximal=True)
    )
    assert columns.routed_experts is not None and np.array_equal(columns.routed_experts, named)
    ours.train(
        columns, plan(batch.lengths, global_batch_size=None, max_tokens=8192, data_parallel=1)
    )
    read = named[:, 0] != NOT_ROUTED
    wanted = np.where(read[:, None], named, np.tile(np.arange(TOP_K), LAYERS)).reshape(
        -1, LAYERS, TOP_K
    )
    half = len(seen[0]) - 1
    for layer, calls in enumerate(seen):
        by_pass = [calls[: half // 2], calls[half // 2 : half], calls[half:]]
        proximal, reference, trained = (np.concatenate(part) for part in by_pass)
        samples = [i for micro in one_plan(ours, batch).steps[0][0] for i in micro]
        order = np.concatenate([np.arange(batch.offsets[i], batch.offsets[i + 1]) for i in samples])
        assert np.array_equal(proximal, as_map(wanted[order, layer]))
        assert np.array_equal(trained, as_map(wanted[:, layer]))
        assert not np.array_equal(reference, proximal), "the reference routes for itself"


def test_replayed_scores_equal_recorded_scores_for_any_last_token(
    start,
):
    ours = start(use_rollout_routing_replay=True)
    batch = make_batch()
    scores, experts = ours.score_and_route(batch)
    experts[batch.offsets[1:] - 1] = NOT_ROUTED
    again = ours.score(batch.with_columns(routed_experts=experts), replay=True)
    assert np.array_equal(again, scores)
    other = ours.score(batch.with_columns(routed_experts=of_engines(batch)), replay=True)
    assert np.abs(other - scores).max() > 0.01
    assert np.array_equal(ours.score(batch), scores), "no pass after it is bound by them"
    held = [router.router_replay.replay_backward_list for router in routers(ours)]
    assert held == [[]] * LAYERS, "nothing is kept of a pass"


def test_layers_without_experts_are_dropped_and_unrecorded_layers_are_refused(start):
    ours = start(use_rollout_routing_replay=True)
    batch = make_batch()
    named = of_engines(batch)
    assert np.array_equal(ours.routing_of_engines(batch.with_columns(routed_experts=named)), named)
    config = replace(ours.trained.bridge.config, num_layers=3, moe_layer_freq=[0, 1, 1])
    with_dense = np.concatenate([np.zeros((len(named), TOP_K), np.uint16), named], axis=1)
    assert np.array_equal(layers_with_experts_only(config, with_dense), named)
    with pytest.raises(DataError, match="experts of another model"):
        layers_with_experts_only(config, named)
    with pytest.raises(DataError, match=r"(?s)did not record.*moe_runner_backend"):
        layers_with_experts_only(config, np.roll(with_dense, TOP_K, axis=1))


def test_a_batch_without_the_models_experts_is_refused(start):
    ours = start()
    batch = make_batch()
    batch = batch.with_columns(proximal_log_probs=near(ours.score(batch), 0.1, 0))
    with pytest.raises(DataError, match="no recorded experts"):
        ours.train(batch, one_plan(ours, batch))
    for experts in (
        np.zeros((len(batch.tokens), 3), np.uint16),
        np.full((len(batch.tokens), 4), 4, np.uint16),
    ):
        with pytest.raises(DataError, match="experts of another model"):
            ours.train(batch.with_columns(routed_experts=experts), one_plan(ours, batch))


def test_a_model_or_a_router_that_cannot_replay_is_refused(start):
    with pytest.raises(ConfigError, match=r"train\.use_routing_replay: the model has no experts"):
        start(family="qwen3")
    with pytest.raises(
        ConfigError, match=r"train\.use_rollout_routing_replay: the model has no experts"
    ):
        start(family="qwen3", use_rollout_routing_replay=True)
    with pytest.raises(ConfigError, match="moe_expert_capacity_factor"):
        start(megatron={"moe_expert_capacity_factor": 1.0})


@pytest.fixture(scope="module")
def alone(models):
    return record_and_replay(0, 1, free_port(), models["qwen3_moe"], TRAIN)


@pytest.mark.integration
@pytest.mark.parametrize("layout", each(LAYOUTS, ["expert parallel", "context parallel"]))
def test_two_ranks_record_and_replay_the_same_as_one_rank(models, alone, two_ranks, layout):
    first, second = two_ranks.run(record_and_replay, models["qwen3_moe"], TRAIN | LAYOUTS[layout])
    assert (alone["others"] != alone["experts"]).mean() > 0.5
    for found in (first, second):
        for name in ("experts", "again", "others"):
            assert np.array_equal(found[name], alone[name]), name
        assert np.array_equal(found["experts"], found["again"])
        assert set(found["free"]) == {None}
    assert first["steps"] == second["steps"]
    assert first["digest"] == second["digest"]
    np.testing.assert_allclose(first["replayed"], alone["replayed"], atol=1e-4)
    for found, expected in zip(first["steps"], alone["steps"], strict=True):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.integration
def test_a_layout_without_the_sum_of_expert_gradients_is_refused(models, two_ranks):
    parts = {**PARTS, "expert_tensor_parallel_size": 1}
    for why in two_ranks.run(refusal, models["qwen3_moe"], TRAIN | {"parallel": parts}):
        assert "would not sum the experts' gradients" in why
