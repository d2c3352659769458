"""One pass of micro-batches through Megatron's pipeline schedule, forward only or with gradients.

What is done with a micro-batch's log-probs (of a critic: values) is the caller's: `score` keeps
them, `step` makes a loss of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch

from rlpipe.engines.megatron import platform

# isort: split
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from rlpipe.engines.megatron.model.build import Scorer, Trained
from rlpipe.engines.megatron.model.layers import ValueModel
from rlpipe.engines.megatron.model.vocab import log_probs_and_entropy
from rlpipe.engines.megatron.train.batch import MicroBatch, Slice
from rlpipe.engines.megatron.train.routing import Around

Consumer = Callable[[MicroBatch, torch.Tensor, torch.Tensor], tuple[torch.Tensor, Any]]
"""(micro-batch, log-probs [n], entropy [n]) → (the loss to differentiate, a scalar; anything to
keep)."""
LogitsConsumer = Callable[[MicroBatch, torch.Tensor], tuple[torch.Tensor, Any]]
"""(micro-batch, logits [T, V / TP] float32 of every local token) → the same."""
ValueConsumer = Callable[[MicroBatch, torch.Tensor], tuple[torch.Tensor, Any]]
"""(micro-batch, values [n]) → the same."""


def this_slice(trained: Scorer) -> Slice:
    """What of a packed sequence this rank holds."""
    config = trained.bridge.config
    return Slice(
        cp_size=parallel_state.get_context_parallel_world_size(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        sequence_parts=config.tensor_model_parallel_size if config.sequence_parallel else 1,
    )


def run_passes(
    trained: Scorer,
    micro_batches: Iterable[MicroBatch],
    consume: Consumer,
    *,
    num_micro_batches: int,
    temperature: float,
    forward_only: bool,
    entropy_gradient: bool = False,
    around: Around | None = None,
) -> list[Any]:
    """What `consume` kept of every micro-batch, on the last pipeline stage; elsewhere an empty
    list. Collective.

    With gradients, they are summed over micro-batches and all data and context parallel ranks:
    losses carry their weights. `around`: each forward pass runs within it.
    """

    def of_hidden_states(
        micro: MicroBatch, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, Any]:
        group: Any = parallel_state.get_tensor_model_parallel_group()
        log_probs, entropy = log_probs_and_entropy(
            trained.model.output_rows(hidden_states, micro.rows),
            trained.model.output_weight(),
            micro.targets,
            temperature=temperature,
            group=group,
            entropy_gradient=entropy_gradient,
            first=trained.model.first_token,
        )
        return consume(micro, log_probs, entropy)

    return _run(
        trained,
        micro_batches,
        of_hidden_states,
        num_micro_batches=num_micro_batches,
        forward_only=forward_only,
        around=around,
    )


def run_logits_passes(
    trained: Scorer,
    micro_batches: Iterable[MicroBatch],
    consume: LogitsConsumer,
    *,
    num_micro_batches: int,
    around: Around | None = None,
) -> list[Any]:
    """As `run_passes` with gradients, of whole logits: T × V / TP float32 in memory at once, and
    what `consume` keeps of them."""

    def of_hidden_states(
        micro: MicroBatch, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, Any]:
        every = torch.arange(micro.length, device=micro.rows.device)
        rows = trained.model.output_rows(hidden_states, every)
        return consume(micro, trained.model.logits(rows))

    return _run(
        trained,
        micro_batches,
        of_hidden_states,
        num_micro_batches=num_micro_batches,
        forward_only=False,
        around=around,
    )


def run_value_passes(
    critic: Trained,
    micro_batches: Iterable[MicroBatch],
    consume: ValueConsumer,
    *,
    num_micro_batches: int,
    forward_only: bool,
) -> list[Any]:
    """As `run_passes`, of a critic."""
    model = critic.model
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
    trained: Scorer,
    micro_batches: Iterable[MicroBatch],
    of_hidden_states: Callable[[MicroBatch, torch.Tensor], tuple[torch.Tensor, Any]],
    *,
    num_micro_batches: int,
    forward_only: bool,
    around: Around | None = None,
) -> list[Any]:
    config = trained.bridge.config
    config.finalize_model_grads_func = _finalize_without_division
    config.no_sync_func = (
        None if forward_only else trained.ddp.no_sync
    )  # `overlap_grad_reduce` sums at the last micro-batch

    def forward_step(iterator, ddp):
        micro = next(iterator)
        with around(micro) if around else nullcontext():
            hidden = ddp(micro.tokens, micro.positions, None, packed_seq_params=micro.layout)

        def loss_function(hidden_states):
            loss, kept = of_hidden_states(micro, hidden_states)
            return loss, torch.zeros((), dtype=torch.int, device=platform.device()), kept

        return hidden, loss_function

    with torch.set_grad_enabled(not forward_only):
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(micro_batches),
            model=trained.ddp,
            num_microbatches=num_micro_batches,
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
        )


def _finalize_without_division(models, _num_tokens, **keywords) -> None:
    """Megatron would divide by the number of tokens; our losses are weighted already."""
    finalize_model_grads(models, None, **keywords)
