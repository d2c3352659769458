"""Passes of micro-batches through Megatron's pipeline schedule, forward only or with gradients.

`run_passes` gives the caller log-probs and entropy, `run_logits_passes` whole logits, and
`run_value_passes` a critic's values. The caller's `consume` makes a loss of them or returns them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from itertools import tee
from typing import Any

import torch

from rlpipe.engines.megatron import platform

# isort: split
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from rlpipe.engines.megatron.model.build import ScoringModel, TrainedModel
from rlpipe.engines.megatron.model.prediction import PredictionLoss
from rlpipe.engines.megatron.model.value_model import ValueModel
from rlpipe.engines.megatron.model.vocab import log_probs_and_entropy
from rlpipe.engines.megatron.train.batch import MicroBatch, Slice
from rlpipe.engines.megatron.train.routing import ForwardContext

Consumer = Callable[[MicroBatch, torch.Tensor, torch.Tensor], tuple[torch.Tensor, Any]]
"""(micro-batch, log-probs [n], entropy [n]) → (scalar loss to differentiate, output to return)."""
LogitsConsumer = Callable[[MicroBatch, torch.Tensor], tuple[torch.Tensor, Any]]
"""(micro-batch, logits [T, V / TP] float32 of every local token) → as `Consumer`."""
ValueConsumer = Callable[[MicroBatch, torch.Tensor], tuple[torch.Tensor, Any]]
"""(micro-batch, values [n]) → as `Consumer`."""


def set_training(scorer: ScoringModel, mode: bool) -> None:
    """Set the model's chunks to training or to evaluation."""
    for chunk in scorer.chunks:
        chunk.train(mode)


def scheduled(
    scorer: ScoringModel, micro_batches: Sequence[tuple[int, ...]]
) -> Sequence[tuple[int, ...]]:
    """Return the samples of the micro-batches to run, in a number that Megatron's schedule takes.

    With virtual pipelining the schedule takes whole groups of micro-batches, by default as many as
    there are pipeline stages. Micro-batches without samples fill the last group: each is one token
    of padding, whose loss is 0.
    """
    if len(scorer.chunks) == 1:
        return micro_batches
    group = scorer.bridge.config.microbatch_group_size_per_vp_stage
    return [*micro_batches, *[()] * (-len(micro_batches) % group)]


def packing_slice(scorer: ScoringModel) -> Slice:
    """Return the part of a packed sequence that this rank holds."""
    config = scorer.bridge.config
    return Slice(
        cp_size=parallel_state.get_context_parallel_world_size(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        sequence_parts=config.tensor_model_parallel_size if config.sequence_parallel else 1,
        images=getattr(scorer.bridge, "image_layout", None),
    )


def run_passes(
    scorer: ScoringModel,
    micro_batches: Iterable[MicroBatch],
    consume: Consumer,
    *,
    num_micro_batches: int,
    temperature: float,
    forward_only: bool,
    entropy_gradient: bool = False,
    forward_context: ForwardContext | None = None,
    prediction: PredictionLoss | None = None,
) -> list[Any]:
    """Return the outputs of `consume` for every micro-batch. Collective.

    Stages before the last return an empty list. Gradients are summed over micro-batches and all
    data and context parallel ranks: losses carry their weights. `forward_context`: around each
    forward pass. `prediction`: a loss to add; its value follows those of an output tensor.
    """

    model = scorer.last_model

    def of_hidden_states(
        micro: MicroBatch, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, Any]:
        if prediction is None:
            return of_model(micro, hidden_states)
        own, *further = hidden_states.chunk(1 + len(prediction.counts))
        loss, output = of_model(micro, own)
        more = prediction(model, micro, further)
        return loss + prediction.scale * more, torch.cat([output, more.detach()[None]])

    def of_model(micro: MicroBatch, hidden_states: torch.Tensor) -> tuple[torch.Tensor, Any]:
        group: Any = parallel_state.get_tensor_model_parallel_group()
        log_probs, entropy = log_probs_and_entropy(
            model.output_rows(hidden_states, micro.rows),
            model.output_weight(),
            micro.targets,
            temperature=temperature,
            group=group,
            entropy_gradient=entropy_gradient,
            first=model.first_token,
        )
        return consume(micro, log_probs, entropy)

    return _run(
        scorer,
        micro_batches,
        of_hidden_states,
        num_micro_batches=num_micro_batches,
        forward_only=forward_only,
        forward_context=forward_context,
    )


def run_logits_passes(
    trained: TrainedModel,
    micro_batches: Iterable[MicroBatch],
    consume: LogitsConsumer,
    *,
    num_micro_batches: int,
    forward_context: ForwardContext | None = None,
) -> list[Any]:
    """Run `run_passes` with gradients over whole logits.

    T × V / TP float32 are in memory at once, and the tensors that `consume` keeps of them.
    """

    model = trained.last_model

    def of_hidden_states(
        micro: MicroBatch, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, Any]:
        if model.predicts_further():
            hidden_states = hidden_states.chunk(1 + trained.bridge.config.mtp_num_layers)[0]
        all_rows = torch.arange(micro.length, device=micro.rows.device)
        rows = model.output_rows(hidden_states, all_rows)
        return consume(micro, model.logits(rows))

    return _run(
        trained,
        micro_batches,
        of_hidden_states,
        num_micro_batches=num_micro_batches,
        forward_only=False,
        forward_context=forward_context,
    )


def run_value_passes(
    critic: TrainedModel,
    micro_batches: Iterable[MicroBatch],
    consume: ValueConsumer,
    *,
    num_micro_batches: int,
    forward_only: bool,
) -> list[Any]:
    """Run `run_passes` over a critic's values."""
    model = critic.last_model
    assert isinstance(model, ValueModel)

    def of_hidden_states(
        micro: MicroBatch, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, Any]:
        return consume(micro, model.values(hidden_states, micro.rows))

    return _run(
        critic,
        micro_batches,
        of_hidden_states,
        num_micro_batches=num_micro_batches,
        forward_only=forward_only,
    )


def _run(
    scorer: ScoringModel,
    micro_batches: Iterable[MicroBatch],
    of_hidden_states: Callable[[MicroBatch, torch.Tensor], tuple[torch.Tensor, Any]],
    *,
    num_micro_batches: int,
    forward_only: bool,
    forward_context: ForwardContext | None = None,
) -> list[Any]:
    config = scorer.bridge.config
    chunks = scorer.chunks
    is_interleaved = len(chunks) > 1
    config.finalize_model_grads_func = _finalize_without_division
    # With `overlap_grad_reduce` the schedule needs this to reduce at the last micro-batch only.
    no_sync = [] if forward_only else [chunk.no_sync for chunk in chunks]
    config.no_sync_func = no_sync if is_interleaved else next(iter(no_sync), None)

    def forward_step(iterator, chunk):
        micro = next(iterator)
        with forward_context(micro, chunks.index(chunk)) if forward_context else nullcontext():
            hidden = chunk(
                micro.tokens,
                micro.positions,
                None,
                packed_seq_params=micro.layout,
                **({} if micro.images is None else {"images": micro.images}),
            )

        def loss_function(hidden_states):
            loss, output = of_hidden_states(micro, hidden_states)
            # The second value is Megatron's number of tokens, which `_finalize_without_division`
            # ignores.
            return loss, torch.zeros((), dtype=torch.int, device=platform.device()), output

        return hidden, loss_function

    # Megatron chooses its schedule by this number. A teacher or critic with fewer layers than the
    # policy can have fewer chunks.
    parallel_state.set_virtual_pipeline_model_parallel_world_size(
        len(chunks) if is_interleaved else None
    )
    # Each chunk reads all micro-batches.
    iterators = tee(micro_batches, len(chunks))
    with torch.set_grad_enabled(not forward_only):
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[*iterators] if is_interleaved else iterators[0],
            model=chunks if is_interleaved else chunks[0],
            num_microbatches=num_micro_batches,
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
        )


def _finalize_without_division(models, _num_tokens, **keywords) -> None:
    """Finalize gradients without Megatron's division by the number of tokens.

    Our losses carry their weights already.
    """
    finalize_model_grads(models, None, **keywords)
