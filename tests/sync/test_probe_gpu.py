"""The probe finds faults planted into pushes to a real engine in bf16.

`-m gpu -s` prints the figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from rlpipe.config.train import TrainConfig
from rlpipe.sync.probe import BOUNDS, Agreement, Probe, compare
from rlpipe.sync.transports.base import Push
from rlpipe.sync.transports.tensor import TensorTransport
from rlpipe.system.ports import free_port
from tests.engines.megatron.ranks import engine as megatron_engine
from tests.gpus import visible_gpus
from tests.sync.gpu import engine_on
from tests.sync.planted import FAULTS, Policy, Update, Weights, probe_of, train_policy
from tests.sync.setups import transport_setup

pytestmark = pytest.mark.gpu
STEPS = 1000
HEALTHY_ROUNDS = 3


@dataclass
class Pushed:
    """A trainer's side, and an engine that weights are pushed into."""

    policy: Policy
    probes: list[Probe]
    """One for each update of the policy."""
    url: str
    transport: TensorTransport
    number: int = 0

    def push(self, weights: Weights, probe: Probe) -> Agreement:
        """Push weights in bf16 and compare the engine with the trainer."""
        self.number += 1
        tensors = {
            name: tensor.bfloat16() for name, tensor in weights.items() if name != "lm_head.weight"
        }
        self.transport.send(tensors.items(), Push(f"b@{self.number}@x", [self.url]))
        return Agreement(**compare(probe, [self.url], 120.0, at_once=True)[0])


@pytest.fixture(scope="module")
def pushed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pushed]:
    folder = tmp_path_factory.mktemp("probe")
    policy = train_policy(folder / "model", "cuda:0", STEPS)
    model_dir = str(policy.model_dir)
    trainer = megatron_engine(model_dir, TrainConfig(), 0, 1, free_port(), dtype="bfloat16")
    versions: dict[int, str] = {}

    def probe(update: Update) -> Probe:
        def score(weights: Weights, together: bool) -> np.ndarray:
            directory = versions.get(id(weights))
            if directory is None:
                directory = versions[id(weights)] = str(folder / f"version-{len(versions)}")
                policy.model(weights, "cpu", torch.float32).save_pretrained(directory)
            trainer.load_hf(directory)
            return trainer.score(
                update.samples, temperature=1.0, max_tokens=None if together else 1
            )

        return probe_of(update, score)

    probes = [probe(update) for update in policy.updates]
    trainer.close()
    with engine_on(visible_gpus()[0], policy.model_dir, folder / "engine.log") as server:
        transport = TensorTransport(
            transport_setup(model_dir, buffer_size_bytes=2**20, timeout_s=120.0)
        )
        yield Pushed(policy, probes, server.url, transport)


def test_pushes_without_fault_pass(pushed: Pushed) -> None:
    for _ in range(HEALTHY_ROUNDS):
        for update, probe in zip(pushed.policy.updates, pushed.probes, strict=True):
            agreement = pushed.push(update.after, probe)
            print(f"p {np.exp(probe.log_probs).mean():.3f} {agreement}")
            assert agreement.fault(BOUNDS["bfloat16"]) is None


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_push_is_found(pushed: Pushed, fault: str) -> None:
    agreement = pushed.push(FAULTS[fault](pushed.policy), pushed.probes[-1])
    print(f"{fault}: {agreement}")
    assert agreement.fault(BOUNDS["bfloat16"]) is not None


def test_an_engine_that_is_always_one_version_behind_is_found_within_a_few_pushes(
    pushed: Pushed,
) -> None:
    found = []
    for update, probe in zip(pushed.policy.updates, pushed.probes, strict=True):
        agreement = pushed.push(update.before, probe)
        print(f"one version behind: {agreement}")
        found.append(agreement.fault(BOUNDS["bfloat16"]) is not None)
    assert any(found), f"in none of {len(found)} pushes"
