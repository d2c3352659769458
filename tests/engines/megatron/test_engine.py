"""One rank against plain transformers and torch."""

from __future__ import annotations

import inspect
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rlpipe.batch.columns import BatchColumns
from rlpipe.batch.packing import plan
from rlpipe.config.algorithms import LossConfig
from rlpipe.config.megatron_hooks import PARAMETERS, MegatronHooks
from rlpipe.config.train import TrainConfig
from rlpipe.engines.megatron.train import score as scoring
from rlpipe.engines.megatron.train.step import train_steps
from rlpipe.errors import ConfigError, DataError, TrainerError
from rlpipe.system.ports import free_port
from tests.engines.megatron import reference
from tests.engines.megatron.ranks import engine, make_batch, near

TEMPERATURE = 0.8
POLICY = TrainConfig.model_validate(
    {
        "max_tokens_per_gpu": 64,
        "loss": {
            "eps_clip": 0.1,
            "eps_clip_high": 0.15,
            "entropy_coef": 0.01,
            "kl_loss_coef": 0.05,
            "kl_loss_type": "k3",
        },
        "optimizer": {"lr": 1e-3, "weight_decay": 0.1, "clip_grad": 0.5, "adam_eps": 1e-5},
    }
)
PLAIN = TrainConfig.model_validate({"max_tokens_per_gpu": 64, "optimizer": {"lr": 1e-3}})


@pytest.fixture
def start(models):
    """Start engines of one rank; they are closed after the test."""
    opened = []

    def make(family: str = "qwen3", train: TrainConfig = PLAIN, *, load: bool = True, **overrides):
        ours = engine(models[family], train, 0, 1, free_port(), **overrides)
        opened.append(ours)
        if load:
            ours.load_hf()
        return ours

    yield make
    for ours in opened:
        ours.close()


def one_plan(ours, batch: BatchColumns, global_batch_size: int | None = None):
    return plan(
        batch.lengths,
        global_batch_size=global_batch_size,
        max_tokens=ours.max_tokens,
        data_parallel=1,
    )


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "qwen3_moe"])
def test_scores_equal_transformers(models, start, family):
    batch = make_batch()
    expected = reference.score(reference.load(models[family]), batch, TEMPERATURE)
    assert np.abs(start(family).score(batch) - expected).max() < 1e-5


def test_scores_do_not_depend_on_packing(start):
    ours = start()
    batch = make_batch()
    assert np.abs(ours.score(batch, max_tokens=8192) - ours.score(batch, max_tokens=1)).max() < 1e-5


def with_loss(train: TrainConfig, **loss) -> TrainConfig:
    return train.model_copy(update={"loss": train.loss.model_copy(update=loss)})


@pytest.mark.parametrize("tis", [{}, {"use_tis": True, "tis_clip": 1.5, "tis_clip_low": 0.5}])
def test_policy_training_equals_transformers_and_torch(models, start, tis):
    train = with_loss(POLICY, **tis)
    ours = start(train=train)
    batch = make_batch()
    theirs = reference.load(models["qwen3"])
    optimizer = reference.make_optimizer(theirs, train)
    scores = ours.score(batch)
    batch = batch.with_columns(
        proximal_log_probs=near(scores, 0.2, 1),
        reference_log_probs=near(scores, 0.3, 2),
        rollout_log_probs=near(scores, 0.6, 3),
    )
    packing = one_plan(ours, batch, 12)
    assert len(packing.steps) == 2
    assert len(packing.steps[0][0]) > 1, "several micro-batches, or this shows nothing"
    expected = reference.train(theirs, optimizer, batch, packing, train, TEMPERATURE)
    for found, wanted in zip(ours.train(batch, packing).steps, expected, strict=True):
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-4)
        assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)
        assert found["clipfrac"] > 0
        assert ("tis" in found) == bool(tis)
        assert found.get("tis_clipfrac", 0.5) > 0
    after = dict(theirs.named_parameters())
    for name, tensor in ours.named_hf_tensors():
        assert torch.allclose(tensor, after[name], rtol=1e-4, atol=2e-5), name


def test_tis_does_not_change_training_on_on_policy_data(start):
    results = []
    for use_tis in (False, True):
        ours = start(train=with_loss(PLAIN, use_tis=use_tis))
        batch = make_batch()
        scores = ours.score(batch)
        everything = np.ones_like(batch.loss_mask)
        batch = batch.with_columns(
            loss_mask=everything, rollout_log_probs=scores, proximal_log_probs=scores
        )
        results.append(ours.train(batch, one_plan(ours, batch)))
        ours.close()
    assert results[0].state_digest == results[1].state_digest
    assert results[1].steps[0]["tis"] == pytest.approx(1, rel=1e-6)
    assert results[1].steps[0]["tis_clipfrac"] == 0


def test_tis_changes_training_on_off_policy_data(start):
    digests = set()
    for loss in (
        {},
        {"use_tis": True},
        {"use_tis": True, "tis_clip": 1.1},
        {"use_tis": True, "tis_clip_low": 0.9},
    ):
        ours = start(train=with_loss(PLAIN, **loss))
        batch = make_batch()
        scores = ours.score(batch)
        batch = batch.with_columns(
            rollout_log_probs=near(scores, 0.5, 1), proximal_log_probs=scores
        )
        digests.add(ours.train(batch, one_plan(ours, batch)).state_digest)
        ours.close()
    assert len(digests) == 4


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "qwen3_moe"])
def test_export_is_bit_exact(models, start, family):
    expected = load_file(f"{models[family]}/model.safetensors")
    found = {name: tensor.clone() for name, tensor in start(family).named_hf_tensors()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_saved_hugging_face_directory_scores_like_the_engine(start, tmp_path):
    ours = start()
    batch = make_batch()
    ours.train(batch, one_plan(ours, batch))
    ours.save_hf(tmp_path)
    expected = reference.score(reference.load(str(tmp_path)), batch, TEMPERATURE)
    assert np.abs(ours.score(batch) - expected).max() < 1e-5


def test_training_is_repeatable_after_export_and_scoring(start):
    digests = []
    for meddle in (False, True):
        ours = start()
        batch = make_batch()
        before = ours.state_digest()
        if meddle:
            ours.keep_reference()
            ours.score(batch, model="reference")
            list(ours.named_hf_tensors())
            assert ours.state_digest() == before
        digests.append([before, ours.train(batch, one_plan(ours, batch)).state_digest])
        ours.close()
    assert digests[0] == digests[1]
    assert digests[0][0] != digests[0][1]


def test_the_reference_policy_is_not_trained(start):
    ours = start()
    batch = make_batch()
    before = ours.score(batch)
    ours.keep_reference()
    digest = ours.train(batch, one_plan(ours, batch)).state_digest
    assert np.abs(ours.score(batch) - before).max() > 1e-3
    assert np.array_equal(ours.score(batch, model="reference"), before)
    assert ours.state_digest() == digest


def test_policy_and_reference_score_one_packing_with_the_numbers_of_two(start, monkeypatch):
    ours = start()
    batch = make_batch()
    ours.keep_reference()
    digest = ours.train(batch, one_plan(ours, batch)).state_digest
    expected = [
        ours.score(batch, max_tokens=60),
        ours.score(batch, model="reference", max_tokens=60),
    ]
    packed = []
    pack = scoring.pack
    monkeypatch.setattr(scoring, "pack", lambda *a, **k: packed.append(a[1]) or pack(*a, **k))
    both = ours.score_with_reference(batch, max_tokens=60)
    assert [scores.tobytes() for scores in both] == [scores.tobytes() for scores in expected]
    assert sorted(sample for samples in packed for sample in samples) == list(range(len(batch)))
    assert ours.state_digest() == digest and not np.array_equal(*both)


def test_scoring_without_a_reference_is_refused(start):
    with pytest.raises(TrainerError, match="keep_reference"):
        start().score(make_batch(), model="reference")


def test_masked_tokens_have_no_effect(start):
    batch = make_batch()
    assert batch.advantages is not None
    other = batch.with_columns(
        advantages=batch.advantages + 100 * (batch.loss_mask == 0).astype(np.float32)
    )
    digests = []
    for columns in (batch, other):
        ours = start()
        digests.append(ours.train(columns, one_plan(ours, columns)).state_digest)
        ours.close()
    assert digests[0] == digests[1]


def test_supervised_training_learns_the_responses(start):
    train = TrainConfig.model_validate({"loss": {"type": "sft"}, "optimizer": {"lr": 3e-3}})
    ours = start(train=train)
    batch = make_batch().with_columns(advantages=None, rollout_log_probs=None)
    losses = [ours.train(batch, one_plan(ours, batch)).steps[0]["loss"] for _ in range(8)]
    assert losses[-1] < 0.5 * losses[0]


def test_a_token_mean_weighs_long_responses_more(start):
    batch = make_batch()
    losses = []
    for per_token in (False, True):
        train = TrainConfig.model_validate(
            {"loss": {"type": "sft", "calculate_per_token_loss": per_token}}
        )
        ours = start(train=train, rollout_temperature=1.0)
        scores = ours.score(batch)
        losses.append(ours.train(batch, one_plan(ours, batch)).steps[0]["loss"])
        ours.close()
    assert losses[1] == pytest.approx(-scores[batch.loss_mask > 0].mean(), rel=1e-4)
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize(
    "recompute",
    [
        {"recompute_granularity": "full"},
        {"recompute_granularity": "selective", "recompute_modules": ["mlp", "core_attn"]},
    ],
)
def test_recomputed_layers_train_like_stored_layers(start, recompute):
    digests = []
    batch = make_batch()
    for megatron in ({}, recompute):
        train = TrainConfig.model_validate(
            {"max_tokens_per_gpu": 64, "loss": {"type": "sft"}, "megatron": megatron}
        )
        ours = start(train=train)
        digests.append(ours.train(batch, one_plan(ours, batch)).state_digest)
        ours.close()
    assert digests[0] == digests[1]


def test_the_learning_rate_follows_the_schedule(start):
    schedule = {"lr": 1e-3, "lr_decay_style": "linear", "lr_warmup_steps": 2, "lr_decay_steps": 4}
    ours = start(train=TrainConfig.model_validate({"optimizer": schedule}))
    batch = make_batch(num_samples=4)
    rates = [ours.train(batch, one_plan(ours, batch)).steps[0]["lr"] for _ in range(5)]
    assert rates == pytest.approx([0, 0.5e-3, 1e-3, 0.5e-3, 0])


def test_bfloat16_trains_from_float32_main_weights(start, models):
    ours = start(dtype="bfloat16")
    batch = make_batch()
    expected = reference.score(reference.load(models["qwen3"]), batch, TEMPERATURE)
    assert np.abs(ours.score(batch) - expected).max() < 0.3
    steps = [ours.train(batch, one_plan(ours, batch)).steps[0] for _ in range(2)]
    assert all(np.isfinite(step["grad_norm"]) for step in steps)
    assert {tensor.dtype for _, tensor in ours.named_hf_tensors()} == {torch.bfloat16}


def test_a_batch_without_the_columns_its_loss_reads_is_refused_before_a_step(start):
    ours = start()
    batch = make_batch()
    before = ours.state_digest()
    with pytest.raises(DataError, match="no advantages"):
        ours.train(batch.with_columns(advantages=None), one_plan(ours, batch))
    with pytest.raises(DataError, match="no proximal_log_probs"):
        ours.train(batch, one_plan(ours, batch, 12))
    with pytest.raises(DataError, match="no proximal_log_probs, rollout_log_probs"):
        train_steps(
            ours.trained,
            batch.with_columns(rollout_log_probs=None),
            one_plan(ours, batch),
            LossConfig(use_tis=True, tis_batch_normalize=True),
            1.0,
        )
    with pytest.raises(DataError, match="another batch"):
        ours.train(batch, one_plan(ours, batch.select(range(5))))
    assert ours.state_digest() == before


def test_a_loss_that_is_not_finite_is_an_error(start):
    ours = start()
    batch = make_batch()
    broken = batch.with_columns(advantages=np.full_like(batch.advantages, np.nan))
    with pytest.raises(TrainerError, match="not finite"):
        ours.train(broken, one_plan(ours, broken))


def test_a_process_holds_one_engine_at_a_time(start):
    first = start()
    with pytest.raises(TrainerError, match="already"):
        start()
    first.close()
    first.close()
    with pytest.raises(TrainerError, match="closed"):
        first.score(make_batch())
    start().score(make_batch())


@pytest.mark.parametrize(
    ("megatron", "words"),
    [
        ({"recompute_granularit": "full"}, "recompute_granularity"),
        ({"lr": 1.0}, "train.optimizer.lr"),
        ({"tensor_model_parallel_size": 2}, "train.parallel"),
    ],
)
def test_errors_of_megatron_arguments_name_the_replacement(start, megatron, words):
    with pytest.raises(ConfigError, match=words):
        start(train=TrainConfig(megatron=megatron))


def test_megatron_arguments_reach_megatron(start):
    recompute = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    results = []
    batch = make_batch()
    for megatron in ({}, recompute):
        ours = start(train=TrainConfig(megatron=megatron))
        assert ours.trained.bridge.config.recompute_granularity == megatron.get(
            "recompute_granularity"
        )
        results.append(ours.train(batch, one_plan(ours, batch)).steps[0])
        ours.close()
    assert results[0]["grad_norm"] == pytest.approx(results[1]["grad_norm"], rel=1e-6)


def test_an_unsupported_model_type_is_named_in_the_error(start, models, tmp_path):
    (tmp_path / "config.json").write_text(
        '{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}'
    )
    with pytest.raises(ConfigError, match="gpt2"):
        engine(str(tmp_path), PLAIN, 0, 1, free_port())
    start().score(make_batch())


HOOKS = """
HEARD = []

def init(args):
    import torch
    HEARD.append(("init", args, torch.distributed.is_initialized()))

def log_prob(args, model, store_prefix):
    HEARD.append(("log_prob", store_prefix, next(model[0].parameters()).sum().item()))

def step(args, rollout_id, step_id, model, optimizer, opt_param_scheduler):
    zero = not any(parameter.main_grad.any() for parameter in model[0].parameters())
    HEARD.append(("step", rollout_id, step_id, zero, opt_param_scheduler.num_steps))
    for parameter in model[0].parameters():
        parameter.main_grad.add_(args)
"""


def test_hooks_are_called_like_in_slime_and_can_change_gradients(start, tmp_path):
    (tmp_path / "mine.py").write_text(HOOKS)
    names = ("init", "log_prob", "step")
    paths = {key: f"{tmp_path}/mine.py:{name}" for key, name in zip(PARAMETERS, names, strict=True)}
    norms = []
    batch = make_batch()
    for extra in (0.0, 0.5):
        hooks = MegatronHooks(TrainConfig.model_validate(paths), extra)
        heard = inspect.unwrap(hooks._hooks["custom_megatron_init_path"]).__globals__["HEARD"]
        heard.clear()
        ours = start(hooks=hooks)
        ours.keep_reference()
        with torch.no_grad():
            next(ours.trained.last_model.parameters()).add_(1.0)
        scores = ours.score(batch)
        ours.score(batch, model="reference")
        batch = batch.with_columns(proximal_log_probs=scores)
        norms.append(ours.train(batch, one_plan(ours, batch, 12), version=5).steps[0]["grad_norm"])
        assert heard[0] == ("init", extra, True)
        assert [(name, prefix) for name, prefix, _ in heard[1:3]] == [
            ("log_prob", ""),
            ("log_prob", "ref_"),
        ]
        assert heard[1][2] - heard[2][2] > 1, "the weights are those that are asked"
        assert heard[3:] == [("step", 5, 0, True, 0), ("step", 5, 1, True, 1)]
        ours.close()
    assert norms[1] > 2 * norms[0]


@pytest.mark.integration
def test_a_closed_engine_leaves_no_process_groups(models):
    """Each group would keep a thread that wakes 100 times a second."""
    before = gloo_threads()
    ours = engine(models["qwen3"], PLAIN, 0, 1, free_port())
    ours.load_hf()
    ours.score(make_batch())
    assert gloo_threads() > before
    ours.close()
    assert gloo_threads() <= before


def gloo_threads() -> int:
    return sum(
        name.read_text().startswith("gloo") for name in Path("/proc/self/task").glob("*/comm")
    )
