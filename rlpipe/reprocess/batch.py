"""A stored batch with other rewards, or under another estimator: what models said of its tokens
stays, advantages are new.

Log-probs, values and routed experts are those of the node that scored the batch first, with the
weights of then. So the batch is made of groups that were in that one: a group that a new filter let
in has no log-probs, and is left out as `unscored`.

Not here: scoring with a model (`actors.trainer.scoring`), which training on the result does anew;
nodes and digests (`reprocess`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlpipe.batch.build import Batch, fix_batch, with_advantages
from rlpipe.batch.files import batch_columns, read_rewards, read_samples
from rlpipe.batch.packing import BatchColumns
from rlpipe.config.run import RunConfig
from rlpipe.errors import DataError
from rlpipe.slime.args import slime_args
from rlpipe.store.objects.files import Files
from rlpipe.store.parquet.shards import read_rows
from rlpipe.types import Node

UNSCORED = "unscored"
"""Why a group is left out whose tokens no model scored."""
STORED = ("proximal_log_probs", "reference_log_probs", "teacher_log_probs", "values")


def reestimated(
    files: Files, config: RunConfig, *, scored: Node, rollout: Node, reward: Node, version: int
) -> tuple[Batch, BatchColumns] | str:
    """The batch of a rollout's accepted groups under these rewards and its columns with advantages;
    or why there is none.

    `scored`: the advantage node whose columns of models are taken; `version`: the weight version
    that was trained. Raises: DataError if a function of the user answers what it must not;
    ObjectMissing, ObjectCorrupt.
    """
    table = read_rows(files, scored.files)
    stored = batch_columns(table)
    if names := lacking(config, stored):
        return f"the stored batch has no {', '.join(names)}: training from the result scores it"
    keys = list(zip(table["group_id"].to_pylist(), table["index"].to_pylist(), strict=True))
    known = {group_id for group_id, _ in keys}
    try:
        batch = fix_batch(
            read_samples(files, rollout),
            read_rewards(files, reward),
            accepted=[group_id for group_id in rollout.outputs["accepted"] if group_id in known],
            scored=True,
            version=version,
            max_staleness=config.async_buffer_size,
            mask_stale=config.rollout.mask_offpolicy_in_partial_rollout,
        )
    except DataError as error:
        return f"{error.problem}: {error.found}"
    unscored = dict.fromkeys(
        (group_id for group_id in rollout.outputs["accepted"] if group_id not in known), UNSCORED
    )
    batch = replace(batch, dropped={**batch.dropped, **unscored})
    return batch, with_advantages(
        batch, _with_stored(batch, stored, keys), config.advantage, slime_args(config)
    )


def lacking(config: RunConfig, stored: BatchColumns) -> list[str]:
    """Columns of models that the configuration's estimator reads and the stored batch has not."""
    needed: set[str] = set()
    if config.uses_critic:
        needed.add("values")
    if config.advantage.kl_coef:
        needed |= {"proximal_log_probs", "reference_log_probs"}
    if config.advantage.use_opd:
        needed |= {"proximal_log_probs", "teacher_log_probs"}
    return [name for name in STORED if name in needed and getattr(stored, name) is None]


def _with_stored(batch: Batch, stored: BatchColumns, keys: list[tuple[str, int]]) -> BatchColumns:
    """The batch's columns with what models said of the same samples. Raises: DataError if they are
    others."""
    place = {key: row for row, key in enumerate(keys)}
    rows = list(zip(batch.group_ids, batch.indices, strict=True))
    if missing := [key for key in rows if key not in place]:
        raise DataError(
            "a sample of a scored group is not in its batch",
            where="/".join(map(str, missing[0])),
            found="no row",
        )
    same = stored.select([place[key] for key in rows])
    if not np.array_equal(same.tokens, batch.columns.tokens) or not np.array_equal(
        same.offsets, batch.columns.offsets
    ):
        raise DataError(
            "a stored batch has other tokens than its samples", where=f"advantage of {rows[0][0]}"
        )
    taken = {name: getattr(same, name) for name in (*STORED, "routed_experts")}
    return batch.columns.with_columns(**taken)
