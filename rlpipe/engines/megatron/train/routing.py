"""Routing replay of a mixture of experts.

`RoutingRecorder` records the experts that a scoring pass chose. `layers_with_experts_only` takes
the experts that the engines recorded. `RoutingReplay` makes later passes use the same experts.
Without replay, an expert that flips between two passes makes the probability ratio jump.

    RoutingRecorder                     ┐
    engines → layers_with_experts_only  ┴→ [S, layers × k] uint16, equal on every rank →
    RoutingReplay

The indices cover every token, prompts included, and every layer with experts, in the router's
order. The weights of the chosen experts are computed again and have gradients. A rank sees the
layers of its pipeline stage and its context and sequence parallel part of the tokens. Critic and
teacher always route freely.

Legend: S tokens of the batch, k experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import torch

from rlpipe.batch.columns import BatchColumns
from rlpipe.config.train import TrainConfig
from rlpipe.engines.megatron import platform
from rlpipe.errors import ConfigError, DataError
from rlpipe.store.routed_experts import NOT_ROUTED

# isort: split
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from rlpipe.engines.megatron.model.build import ScoringModel
from rlpipe.engines.megatron.train.batch import MicroBatch

ForwardContext = Callable[[MicroBatch, int], AbstractContextManager[None]]
"""Makes the context manager around a micro-batch's forward pass of one chunk, by its number."""
# With these settings experts are not chosen token by token, or by a function without replay.
NOT_REPLAYABLE = ("moe_router_fusion", "moe_expert_capacity_factor")


def check_routing(config: TransformerConfig, train: TrainConfig) -> None:
    """Raises: ConfigError if `train` asks for routing replay that this model does not support."""
    if not train.replays_routing:
        return
    if not config.num_moe_experts:
        key = (
            "use_rollout_routing_replay"
            if train.use_rollout_routing_replay
            else "use_routing_replay"
        )
        raise ConfigError(
            "the model has no experts, so routing cannot be replayed",
            where=f"train.{key}",
            found=True,
            do="remove the key",
        )
    for name in NOT_REPLAYABLE:
        if value := getattr(config, name):
            raise ConfigError(
                "routing cannot be replayed with this argument",
                where=f"train.megatron.{name}",
                found=value,
                expected="unset",
            )


class _Routers:
    """The routers of this rank's pipeline stage, by chunk."""

    def __init__(self, scorer: ScoringModel) -> None:
        config = scorer.bridge.config
        layers = _layers_with_experts(config)
        self.num_layers = len(layers)
        self.top_k = config.moe_router_topk
        self.chunks: list[list[tuple[int, RouterReplay]]] = [[] for _ in scorer.models]
        """(index among all layers with experts, the router's replay) of each chunk's routers"""
        for routers, model in zip(self.chunks, scorer.models, strict=True):
            for module in model.modules():
                if isinstance(module, TopKRouter):
                    replay = module.router_replay
                    number = module.layer_number
                    if number is not None and number > config.num_layers:
                        # Engines report no experts of layers for multi-token prediction.
                        continue
                    assert replay is not None and number is not None, (
                        "built without moe_enable_routing_replay"
                    )
                    routers.append((layers.index(number), replay))
        self._sequence_parallel = config.sequence_parallel

    def token_index(self, micro: MicroBatch) -> np.ndarray:
        """Return the index into the batch's [S] of each token of these routers; -1 is padding."""
        if not self._sequence_parallel:
            return micro.sources
        parts = parallel_state.get_tensor_model_parallel_world_size()
        return np.split(micro.sources, parts)[parallel_state.get_tensor_model_parallel_rank()]

    @property
    def is_sender(self) -> bool:
        """True on exactly one of the ranks that see the same tokens in the same layers."""
        return self._sequence_parallel or parallel_state.get_tensor_model_parallel_rank() == 0

    def set_action(self, chunk: int, action: RouterReplayAction | None) -> None:
        for _, replay in self.chunks[chunk]:
            replay.router_replay_action = action

    def clear_indices(self, chunk: int) -> None:
        """Drop the indices of all micro-batches."""
        for _, replay in self.chunks[chunk]:
            replay.clear_indices()

    def reset(self, chunk: int) -> None:
        self.set_action(chunk, None)
        self.clear_indices(chunk)


def _layers_with_experts(config: TransformerConfig) -> list[int]:
    """Return the numbers of the layers with experts in the whole model, from 1."""
    frequency = config.moe_layer_freq
    pattern = (
        [i % frequency == 0 for i in range(config.num_layers)]
        if isinstance(frequency, int)
        else frequency
    )
    return [i + 1 for i, has_experts in enumerate(pattern) if has_experts]


def layers_with_experts_only(config: TransformerConfig, experts: np.ndarray) -> np.ndarray:
    """Return [S, layers with experts × k], from an engine's [S, all layers × k].

    Raises: DataError if the experts are of another model, or an engine did not record a layer.
    """
    k = config.moe_router_topk
    layers = _layers_with_experts(config)
    where = "batch.rollout_routed_experts"
    if experts.shape[1] != config.num_layers * k:
        raise DataError(
            "the engines recorded experts of another model",
            where=where,
            found=f"{experts.shape[1]} a token",
            expected=f"{config.num_layers} layers × {k}",
        )
    by_layer = experts.reshape(-1, config.num_layers, k)
    if len(layers) < config.num_layers:
        by_layer = by_layer[:, [number - 1 for number in layers]]
    # Engine kernels with built-in routing record nothing: all k entries of the layer stay 0. With
    # k = 1 a single 0 is expert 0, so only a layer without any other expert counts.
    unrecorded = ~by_layer.any(-1)
    if (unrecorded if k > 1 else unrecorded.all(0)).any():
        raise DataError(
            "the engines did not record the experts of a layer",
            where=where,
            found=f"only expert 0, {k} times, for {int(unrecorded.sum())} of {unrecorded.size} "
            "tokens × layers",
            expected=f"{k} different experts",
            do="set another engine.sglang.moe_runner_backend (triton), or use "
            "train.use_routing_replay instead",
        )
    return by_layer.reshape(len(experts), -1)


class RoutingRecorder:
    """Records the experts of every micro-batch that runs in its `forward_context`."""

    def __init__(self, scorer: ScoringModel) -> None:
        self._routers = _Routers(scorer)
        self._recorded: dict[int, list[tuple[np.ndarray, torch.Tensor]]] = {}
        """Layer → (index into the batch's tokens, experts) of every micro-batch"""

    @contextmanager
    def forward_context(self, micro: MicroBatch, chunk: int) -> Iterator[None]:
        routers = self._routers
        routers.set_action(chunk, RouterReplayAction.RECORD)
        try:
            yield
            tokens = routers.token_index(micro)
            for layer, replay in routers.chunks[chunk]:
                self._recorded.setdefault(layer, []).append((tokens, _recorded_indices(replay)))
        finally:
            routers.reset(chunk)

    def column(self, batch: BatchColumns) -> np.ndarray:
        """Return [S, layers × k] uint16 of the whole batch on every rank. Collective."""
        routers = self._routers
        num_tokens = batch.sizes.num_tokens
        index_of_batch = batch.token_index()
        result = np.zeros((num_tokens, routers.num_layers, routers.top_k), np.uint16)
        for layer in range(routers.num_layers):
            # One layer at a time bounds the device memory of the collective.
            summed = torch.zeros(
                num_tokens, routers.top_k, dtype=torch.int32, device=platform.device()
            )
            if routers.is_sender:
                for token_index, indices in self._recorded.get(layer, ()):
                    real = np.flatnonzero(token_index >= 0)
                    summed[torch.from_numpy(index_of_batch[token_index[real]])] = indices[
                        torch.from_numpy(real)
                    ].to(summed)
            torch.distributed.all_reduce(summed)
            result[:, layer] = summed.cpu().numpy()
        return result.reshape(num_tokens, -1)


def _recorded_indices(replay: RouterReplay) -> torch.Tensor:
    indices = replay.get_recorded_indices()
    assert indices is not None, "a layer of this stage did not route"
    return indices.to("cpu", torch.int32)


def _backward_routes_again(config: TransformerConfig) -> bool:
    """True if the backward pass recomputes layers with experts."""
    full = config.recompute_granularity == "full"
    return full or (
        config.recompute_granularity == "selective" and "moe" in (config.recompute_modules or ())
    )


class RoutingReplay:
    """Routes every micro-batch in its `forward_context` by `experts`. Call `close` after the pass.

    Padding tokens and tokens that no engine read (`NOT_ROUTED`) go to the first k experts. No
    trained log-prob depends on them. Raises: DataError if `experts` are of another model.
    """

    def __init__(self, scorer: ScoringModel, experts: np.ndarray) -> None:
        self._routers = _Routers(scorer)
        layers = self._routers.num_layers
        top_k = self._routers.top_k
        num_experts = scorer.bridge.config.num_moe_experts
        self._not_routed = experts[:, 0] == NOT_ROUTED
        largest = int(experts.max(axis=1)[~self._not_routed].max(initial=0))
        if experts.shape[1] != layers * top_k or largest >= num_experts:
            raise DataError(
                "the batch recorded experts of another model",
                where="batch.routed_experts",
                found=f"{experts.shape[1]} a token, the largest {largest}",
                expected=f"{layers} layers × {top_k} of {num_experts} experts",
            )
        self._experts = experts.reshape(-1, layers, top_k)
        self._padding = np.arange(top_k, dtype=np.uint16)
        self._backward_routes_again = _backward_routes_again(scorer.bridge.config)

    @contextmanager
    def forward_context(self, micro: MicroBatch, chunk: int) -> Iterator[None]:
        routers = self._routers.chunks[chunk]
        tokens = self._routers.token_index(micro)
        chosen = self._experts[np.maximum(tokens, 0)][:, [layer for layer, _ in routers]]
        chosen[(tokens < 0) | self._not_routed[tokens]] = self._padding
        layers = (
            torch.from_numpy(chosen.transpose(1, 0, 2).astype(np.int32))
            .to(platform.device())
            .long()
        )
        for (_, replay), indices in zip(routers, layers, strict=True):
            replay.set_target_indices(indices)
        self._routers.set_action(chunk, RouterReplayAction.REPLAY_FORWARD)
        try:
            yield
        finally:
            # A recomputed layer routes again during the backward pass. Megatron's RouterReplay then
            # hands out the indices of the micro-batches, first in, first out.
            self._routers.set_action(chunk, RouterReplayAction.REPLAY_BACKWARD)
            if not (self._backward_routes_again and torch.is_grad_enabled()):
                self._routers.clear_indices(chunk)

    def close(self) -> None:
        """Let the routers choose experts again."""
        for chunk in range(len(self._routers.chunks)):
            self._routers.reset(chunk)
