"""A vocabulary that tensor parallelism does not divide is padded in the trainer only."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rlpipe.config.arguments.check import check_megatron
from rlpipe.config.train import TrainConfig
from rlpipe.engines.megatron.checkpoint.conversion.convert import to_hf, to_torch_dist
from rlpipe.engines.megatron.checkpoint.conversion.hf_files import different
from rlpipe.engines.megatron.checkpoint.conversion.parallel_loading import load_checkpoint_weights
from rlpipe.engines.megatron.model import vocab
from rlpipe.errors import ConfigError
from rlpipe.system.ports import free_port
from tests.engines.megatron import families, reference
from tests.engines.megatron.ranks import (
    _train,
    engine,
    make_batch,
    score_and_train,
    value_and_train,
)
from tests.engines.megatron.rollout_jobs import train_fanned
from tests.engines.megatron.train.test_logits import ARGS, POLICY
from tests.parameters import each

TRAIN: dict[str, Any] = {
    "max_tokens_per_gpu": 64,
    "loss": {"entropy_coef": 0.01},
    "optimizer": {"lr": 1e-3, "weight_decay": 0.1, "clip_grad": 0.5, "adam_eps": 1e-5},
}
TENSOR = {"parallel": {"tensor_model_parallel_size": 2}}
SEQUENCE = {"parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True}}
WIDE = {"megatron": {"make_vocab_size_divisible_by": 128}}
"""With it and TP 2 the second rank has padding alone."""
LAYOUTS = {
    "tensor": TENSOR,
    "sequence, distributed optimizer": SEQUENCE | {"use_distributed_optimizer": True},
    "a rank without tokens": TENSOR | WIDE,
}
TOKENS = 97


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Directories of models with an odd vocabulary, by family."""
    made = {}
    with pytest.MonkeyPatch.context() as patch:
        for family in ("qwen2", "llama3.2"):
            patch.setitem(
                families.FAMILIES, "odd", {**families.FAMILIES[family], "vocab_size": TOKENS}
            )
            made[family] = families.make("odd", tmp_path_factory.mktemp(family))
    return made


def padding(trained: Any) -> list[torch.Tensor]:
    """Return this rank's padding rows: of weights, and of an optimizer that is not sharded."""
    rank = torch.distributed.get_rank()
    model = trained.last_model
    found = []
    for parameter in {model.embedding.word_embeddings.weight, model._output_shard()}:
        first = max(0, TOKENS - rank * len(parameter))
        found.append(parameter[first:].detach().clone())
        for part in (
            trained.optimizer.chained_optimizers
            if hasattr(trained.optimizer, "chained_optimizers")
            else ()
        ):
            found += [
                value[first:]
                for value in part.optimizer.state.get(parameter, {}).values()
                if value.ndim
            ]
    return found


def trained_and_saved(
    rank: int,
    world_size: int,
    port: int,
    model_dir: str,
    train: dict[str, Any],
    directory: str,
    resumed: bool,
) -> dict[str, Any]:
    """Start or resume, train one iteration and save; return the export and the largest padding."""
    ours = engine(model_dir, TrainConfig.model_validate(train), rank, world_size, port)
    try:
        if resumed:
            ours.load_checkpoint(directory)
        else:
            ours.load_hf()
        before = {name: tensor.clone().numpy() for name, tensor in ours.named_hf_tensors()}
        _train(ours, [int(resumed)])
        ours.save_checkpoint(directory, 1 + resumed)
        after = {name: tensor.clone().numpy() for name, tensor in ours.named_hf_tensors()}
        rows = padding(ours.trained)
        return {
            "before": before,
            "after": after,
            "padding": max((float(row.abs().max()) for row in rows if row.numel()), default=None),
        }
    finally:
        ours.close()


def exported(
    rank: int,
    world_size: int,
    port: int,
    model_dir: str,
    train: dict[str, Any],
    checkpoint: str,
    directory: str,
) -> None:
    """Load the weights of a converted checkpoint and write them as a Hugging Face directory."""
    ours = engine(model_dir, TrainConfig.model_validate(train), rank, world_size, port)
    try:
        load_checkpoint_weights(ours.trained, Path(checkpoint))
        ours.save_hf(directory)
    finally:
        ours.close()


@pytest.mark.parametrize("shares", [(49, 48), (50, 47, 0), (97, 0)])
def test_ranks_with_few_or_no_columns_equal_one_rank(shares, monkeypatch):
    """Each rank runs alone; its collectives return the sums that the other ranks computed."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(12, 8, generator=generator)
    weight = torch.randn(TOKENS, 8, generator=generator)
    targets = torch.randint(0, TOKENS, (12,), generator=generator)
    wanted_weight = weight.clone().requires_grad_()
    wanted_hidden = hidden.clone().requires_grad_()
    everything = torch.log_softmax(wanted_hidden @ wanted_weight.T / 0.7, -1)
    wanted = everything.gather(1, targets[:, None])[:, 0]
    entropies = -(everything.exp() * everything).sum(-1)
    (wanted.sum() + entropies.sum()).backward()

    firsts = [sum(shares[:number]) for number in range(len(shares))]
    parts = [
        vocab._statistics(
            hidden @ weight[first : first + size].T, vocab._local_columns(targets, size, first), 0.7
        )
        for first, size in zip(firsts, shares, strict=True)
    ]
    highest = torch.stack([part[0] for part in parts]).amax(0)

    def reduced(value: torch.Tensor, _group: Any, operation: Any) -> torch.Tensor:
        if operation == torch.distributed.ReduceOp.MAX:
            return highest
        sums = torch.zeros_like(value)
        for (top, total, weighted, target), first, size in zip(parts, firsts, shares, strict=True):
            shrink = (top - highest).exp()
            here = vocab._local_columns(targets, size, first) >= 0
            rest = torch.where(here, target - highest, 0.0)
            sums += torch.stack(
                [shrink * total, shrink * (weighted + total * (top - highest)), rest]
            )
        return sums

    monkeypatch.setattr(vocab, "_all_reduced", reduced)
    of_hidden = torch.zeros_like(hidden)
    for first, size in zip(firsts, shares, strict=True):
        states = hidden.clone().requires_grad_()
        shard = weight[first : first + size].clone().requires_grad_()
        group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
        settings: dict[str, Any] = {
            "temperature": 0.7,
            "group": group,
            "entropy_gradient": True,
            "first": first,
        }
        log_probs, entropy = vocab.log_probs_and_entropy(states, shard, targets, **settings)
        assert torch.allclose(log_probs, wanted, atol=1e-5) and torch.allclose(
            entropy, entropies, atol=1e-5
        )
        (log_probs.sum() + entropy.sum()).backward()
        assert states.grad is not None and shard.grad is not None and wanted_weight.grad is not None
        assert torch.allclose(shard.grad, wanted_weight.grad[first : first + size], atol=1e-5)
        of_hidden += states.grad
    assert wanted_hidden.grad is not None and torch.allclose(
        of_hidden, wanted_hidden.grad, atol=1e-5
    )


def test_a_vocabulary_that_needs_no_padding_keeps_its_digest(models):
    digests = []
    for megatron in ({}, {"make_vocab_size_divisible_by": 32}):
        ours = engine(models["qwen3"], TrainConfig(megatron=megatron), 0, 1, free_port())
        ours.load_hf()
        bridge: Any = ours.trained.bridge
        assert (bridge.padded_vocab_size, bridge.make_vocab_size_divisible_by) == (96, None)
        digests.append(ours.state_digest())
        ours.close()
    assert digests[0] == digests[1]


def test_a_padding_multiple_below_one_is_refused(odd):
    check_megatron({"make_vocab_size_divisible_by": 64})
    with pytest.raises(ConfigError, match="make_vocab_size_divisible_by"):
        check_megatron({"make_vocab_size_divisible_by": "64"})
    with pytest.raises(ConfigError, match="make_vocab_size_divisible_by"):
        engine(
            odd["qwen2"],
            TrainConfig(megatron={"make_vocab_size_divisible_by": 0}),
            0,
            1,
            free_port(),
        )


def test_padding_on_one_rank_changes_no_result(odd, tmp_path: Path):
    train = TrainConfig.model_validate({"max_tokens_per_gpu": 64, **WIDE})
    ours = engine(odd["qwen2"], train, 0, 1, free_port())
    batch = make_batch(vocabulary=TOKENS)
    try:
        ours.load_hf()
        weight = ours.trained.last_model.output_layer.weight
        assert weight is not None and len(weight) == 128
        assert (
            np.abs(
                ours.score(batch) - reference.score(reference.load(odd["qwen2"]), batch, 0.8)
            ).max()
            < 1e-5
        )
        ours.save_hf(tmp_path / "same")
        assert not list(different(odd["qwen2"], tmp_path / "same"))
        rows = ours.trained.last_model.logits(torch.randn(5, 64))
        assert rows.shape == (5, 128) and rows.softmax(-1)[:, TOKENS:].max() == 0
    finally:
        ours.close()


@pytest.mark.integration
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", each(["qwen2", "llama3.2"], ["llama3.2"]))
def test_two_padded_ranks_equal_one_rank_and_transformers(odd, two_ranks, family: str, layout: str):
    alone = score_and_train(0, 1, free_port(), odd[family], TRAIN, 1)
    first, second = two_ranks.run(score_and_train, odd[family], TRAIN | LAYOUTS[layout], 1)
    assert first["digest"] == second["digest"]
    wanted = reference.score(reference.load(odd[family]), make_batch(), 0.8)
    assert np.abs(first["scores"] - wanted).max() < 1e-5
    for found, expected in zip(first["steps"], alone["steps"], strict=True):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)
    for name, weight in alone["after"].items():
        assert first["after"][name].shape == weight.shape
        assert np.abs(first["after"][name] - weight).max() < 2e-5, name


@pytest.mark.integration
def test_padding_does_not_change_a_loss_of_logits_or_a_critic(odd, two_ranks, tmp_path: Path):
    (tmp_path / "mine.py").write_text(POLICY)
    loss = {"type": "custom", "custom_loss_function_path": f"{tmp_path}/mine.py:policy_loss"}
    jobs: list[tuple[Any, dict[str, Any], Any]] = [
        (train_fanned, TRAIN | {"loss": loss}, ARGS),
        (value_and_train, TRAIN, {}),
    ]
    for job, train, more in jobs:
        alone = job(0, 1, free_port(), odd["qwen2"], train, more)
        for wide in ({}, WIDE):
            together = two_ranks.run(job, odd["qwen2"], train | TENSOR | wide, more)[0]
            for found, expected in zip(together["steps"], alone["steps"], strict=True):
                assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.long
@pytest.mark.integration
@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("family", ["qwen2", "llama3.2"])
def test_a_padded_checkpoint_loads_in_another_layout_and_back(
    odd, two_ranks, tmp_path: Path, family: str, distributed: bool
):
    train = TRAIN | {"use_distributed_optimizer": distributed}
    straight = trained_and_saved(
        0, 1, free_port(), odd[family], train, str(tmp_path / "alone"), resumed=False
    )
    straight = trained_and_saved(
        0, 1, free_port(), odd[family], train, str(tmp_path / "alone"), resumed=True
    )
    for name, steps in {"narrow": (2, 1), "wide": (1, 2)}.items():
        place = str(tmp_path / name)
        results = []
        for number, ranks in enumerate(steps):
            arguments = (odd[family], train | (TENSOR if ranks == 2 else {}), place, number == 1)
            if ranks == 2:
                results += [two_ranks.run(trained_and_saved, *arguments)]
            else:
                results += [[trained_and_saved(0, 1, free_port(), *arguments)]]
        first, second = results
        for key, weight in first[0]["after"].items():
            assert np.array_equal(second[0]["before"][key], weight), key
        for key, weight in straight["after"].items():
            assert np.abs(second[0]["after"][key] - weight).max() < 2e-5, key
        assert {rank["padding"] for result in results for rank in result} == {None, 0.0}


@pytest.mark.integration
def test_conversions_and_exports_have_equal_bits_and_no_padding(odd, two_ranks, tmp_path: Path):
    to_torch_dist(Path(odd["qwen2"]), tmp_path / "converted")
    two_ranks.run(
        exported,
        odd["qwen2"],
        TRAIN | TENSOR,
        str(tmp_path / "converted"),
        str(tmp_path / "exported"),
    )
    assert not list(different(odd["qwen2"], tmp_path / "exported"))
    two_ranks.run(
        trained_and_saved, odd["qwen2"], TRAIN | TENSOR | WIDE, str(tmp_path / "saved"), False
    )
    to_hf(tmp_path / "saved", tmp_path / "trained", origin=Path(odd["qwen2"]))
    found = load_file(tmp_path / "trained" / "model.safetensors")
    expected = load_file(f"{odd['qwen2']}/model.safetensors")
    assert {name: tensor.shape for name, tensor in found.items()} == {
        name: tensor.shape for name, tensor in expected.items()
    }
