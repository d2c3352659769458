"""Routing replay of a mixture of experts: which experts a scoring pass or an engine chose, and
passes that take the same ones.

An expert that flips between the two passes makes the probability ratio jump. Indices are of every
token, prompts included, of every layer with experts and in the router's order; the weights of the
chosen experts are computed anew and have gradients.

    Recording                      ┐
    engines → layers_with_experts  ┴→ [S, layers × k] uint16, the same on every rank → Replaying

A rank sees the layers of its pipeline stage and its context and sequence parallel part of the
tokens. A recomputed layer routes again during the backward pass: Megatron's `RouterReplay` hands it
the indices of its micro-batch, first in, first out.

Not here: what engines answer (`rlpipe.store.routed_experts`); a critic's and a teacher's routing,
which is free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import torch

from rlpipe.engines.megatron import platform
from rlpipe.errors import ConfigError, DataError
from rlpipe.store.routed_experts import NOT_ROUTED

# isort: split
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from rlpipe.engines.megatron.model.build import Scorer
from rlpipe.engines.megatron.train.batch import MicroBatch

Around = Callable[[MicroBatch], AbstractContextManager[None]]
"""What a micro-batch's forward pass runs within."""
REFUSED = ("moe_router_fusion", "moe_expert_capacity_factor")
"""Settings under which experts are not chosen token by token, or not by the function that can be
replayed."""


def check_routing(config: TransformerConfig, where: str = "train.use_routing_replay") -> None:
    """Raises: ConfigError if there is nothing to replay, or it cannot be."""
    if not config.num_moe_experts:
        raise ConfigError(
            "the model has no experts to route to", where=where, found=True, do="leave it out"
        )
    for name in REFUSED:
        if value := getattr(config, name):
            raise ConfigError(
                "routing cannot be replayed with this",
                where=f"train.megatron.{name}",
                found=value,
                expected="unset",
            )


def release_routers() -> None:
    """Megatron keeps the replays of all routers that were ever made in this process: let go of
    them."""
    RouterReplay.clear_global_router_replay_instances()


class _Routers:
    """The routers of this rank's stage, each with its place among all layers that have experts."""

    def __init__(self, scorer: Scorer) -> None:
        config = scorer.bridge.config
        layers = _layers_with_experts(config)
        self.layers = len(layers)
        self.top_k = config.moe_router_topk
        self.here: list[tuple[int, RouterReplay]] = []
        for module in scorer.model.modules():
            if isinstance(module, TopKRouter):
                replay = module.router_replay
                number = module.layer_number
                assert replay is not None and number is not None, (
                    "built without moe_enable_routing_replay"
                )
                self.here.append((layers.index(number), replay))
        self._sequence_parallel = config.sequence_parallel

    def tokens(self, micro: MicroBatch) -> np.ndarray:
        """Of each token that a router of this rank sees, its place among the batch's [S]; -1 is
        padding."""
        if not self._sequence_parallel:
            return micro.sources
        parts = parallel_state.get_tensor_model_parallel_world_size()
        return np.split(micro.sources, parts)[parallel_state.get_tensor_model_parallel_rank()]

    @property
    def speaks(self) -> bool:
        """Is this the only rank of those that see the same tokens in the same layers?"""
        return self._sequence_parallel or parallel_state.get_tensor_model_parallel_rank() == 0

    def act(self, action: RouterReplayAction | None) -> None:
        for _, replay in self.here:
            replay.router_replay_action = action

    def forget(self) -> None:
        self.act(None)
        self.let_go()

    def let_go(self) -> None:
        """Of the indices of all micro-batches."""
        for _, replay in self.here:
            replay.clear_indices()


def _layers_with_experts(config: TransformerConfig) -> list[int]:
    """Their numbers in the whole model, from 1."""
    every = config.moe_layer_freq
    pattern = (
        [i % every == 0 for i in range(config.num_layers)] if isinstance(every, int) else every
    )
    return [i + 1 for i, has_experts in enumerate(pattern) if has_experts]


def layers_with_experts_only(config: TransformerConfig, experts: np.ndarray) -> np.ndarray:
    """[S, layers with experts × k], from an engine's [S, all layers × k].

    Raises: DataError if they are of another model; if an engine left a layer out, as one does whose
    kernel routes by itself: all experts of a token are the first one then.
    """
    k = config.moe_router_topk
    layers = _layers_with_experts(config)
    where = "batch.rollout_routed_experts"
    if experts.shape[1] != config.num_layers * k:
        expected = f"{config.num_layers} layers × {k}"
        raise DataError(
            "the engines' experts are not this model's",
            where=where,
            found=experts.shape[1],
            expected=expected,
        )
    found = experts.reshape(-1, config.num_layers, k)
    if len(layers) < config.num_layers:
        found = found[:, [number - 1 for number in layers]]
    silent = ~found.any(-1)
    if (silent if k > 1 else silent.all(0)).any():
        raise DataError(
            "the engines did not notice to which experts a layer routed",
            where=where,
            found=f"only the first expert, {k} times, for {int(silent.sum())} of {silent.size} tokens × layers",
            expected=f"{k} different experts",
            do="start them with another engine.sglang.moe_runner_backend (triton), or set train.use_routing_replay instead",
        )
    return found.reshape(len(experts), -1)


class Recording:
    """Notes the experts of every micro-batch that is run `around` it."""

    def __init__(self, scorer: Scorer) -> None:
        self._routers = _Routers(scorer)
        self._kept: list[tuple[np.ndarray, list[torch.Tensor]]] = []

    @contextmanager
    def around(self, micro: MicroBatch) -> Iterator[None]:
        self._routers.act(RouterReplayAction.RECORD)
        try:
            yield
            self._kept.append(
                (
                    self._routers.tokens(micro),
                    [_recorded(replay) for _, replay in self._routers.here],
                )
            )
        finally:
            self._routers.forget()

    def column(self, num_tokens: int) -> np.ndarray:
        """[S, layers × k] uint16 on every rank. Collective."""
        routers = self._routers
        result = np.zeros((num_tokens, routers.layers, routers.top_k), np.uint16)
        local = {place: n for n, (place, _) in enumerate(routers.here)}
        for layer in range(routers.layers):
            found = torch.zeros(
                num_tokens, routers.top_k, dtype=torch.int32, device=platform.device()
            )
            if layer in local and routers.speaks:
                for tokens, indices in self._kept:
                    real = np.flatnonzero(tokens >= 0)
                    found[torch.from_numpy(tokens[real])] = indices[local[layer]][
                        torch.from_numpy(real)
                    ].to(found)
            torch.distributed.all_reduce(found)
            result[:, layer] = found.cpu().numpy()
        return result.reshape(num_tokens, -1)


def _recorded(replay: RouterReplay) -> torch.Tensor:
    indices = replay.get_recorded_indices()
    assert indices is not None, "a layer of this stage did not route"
    return indices.to("cpu", torch.int32)


def _routes_again(config: TransformerConfig) -> bool:
    """Does a backward pass route once more, to compute a layer again?"""
    whole = config.recompute_granularity == "full"
    return whole or (
        config.recompute_granularity == "selective" and "moe" in (config.recompute_modules or ())
    )


class Replaying:
    """Has every micro-batch that is run `around` it routed as `experts` say. `close` it after the
    pass.

    Padding, and what no engine read (`NOT_ROUTED`), goes to the first k experts; no log-prob that
    is trained depends on it. Raises: DataError if `experts` are not this model's.
    """

    def __init__(self, scorer: Scorer, experts: np.ndarray) -> None:
        self._routers = _Routers(scorer)
        layers = self._routers.layers
        top_k = self._routers.top_k
        number = scorer.bridge.config.num_moe_experts
        self._free = experts[:, 0] == NOT_ROUTED
        largest = int(experts.max(axis=1)[~self._free].max(initial=0))
        if experts.shape[1] != layers * top_k or largest >= number:
            raise DataError(
                "the recorded experts are not this model's",
                where="batch.routed_experts",
                found=f"{experts.shape[1]} a token, the largest {largest}",
                expected=f"{layers} layers × {top_k} of {number} experts",
            )
        self._experts = experts.reshape(-1, layers, top_k)
        self._here = [place for place, _ in self._routers.here]
        self._padding = np.arange(top_k, dtype=np.uint16)
        self._routes_again = _routes_again(scorer.bridge.config)

    @contextmanager
    def around(self, micro: MicroBatch) -> Iterator[None]:
        tokens = self._routers.tokens(micro)
        chosen = self._experts[np.maximum(tokens, 0)][:, self._here]
        chosen[(tokens < 0) | self._free[tokens]] = self._padding
        layers = (
            torch.from_numpy(chosen.transpose(1, 0, 2).astype(np.int32))
            .to(platform.device())
            .long()
        )
        for (_, replay), indices in zip(self._routers.here, layers, strict=True):
            replay.set_target_indices(indices)
        self._routers.act(RouterReplayAction.REPLAY_FORWARD)
        try:
            yield
        finally:
            self._routers.act(RouterReplayAction.REPLAY_BACKWARD)
            if not (self._routes_again and torch.is_grad_enabled()):
                self._routers.let_go()

    def close(self) -> None:
        """Routers choose for themselves again."""
        self._routers.forget()
