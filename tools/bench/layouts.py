"""`layouts`: the same batch on one GPU and on all GPUs, in each layout of ranks.

    tokens/s      optimizer step: tokens of the batch / seconds; the ratio is to one GPU
    MFU           of all GPUs
    memory        largest torch allocation of an optimizer step on a rank, GiB
    log-probs     mean difference from the first layout that fits, in nats, before the first step
    grad norm     of the first step; the baseline is that of the first layout that fits
    checkpoint    save of a trained state in one layout, load in another and in the first one again;
                  exported weights are compared after the first load, digests of the whole state
                  (weights, main weights, moments, schedule) after the second
    long          one long sample on all GPUs by context parallelism, activations recomputed; an 8
                  times shorter sample is compared with one GPU

Names of layouts: DP, TP, PP, CP, EP and their sizes; TP has sequence parallelism; "no distributed
optimizer" where each rank has all of Adam's state.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlpipe.batch.columns import BatchColumns
from rlpipe.errors import ResourceError
from rlpipe.observe.flops import peak_flops
from tools.bench.bench import Bench
from tools.bench.layout_ranks import Outcome, RankPool, Work, removed, size_bytes, train_and_score
from tools.bench.measures import Row
from tools.bench.shapes import Shape, trained_batch

PART = "layouts"
TIMEOUT_S = 300.0
LONG_TIMES_SHORT = 8
MOST_OF_AN_ERROR = 160
CPU_RANKS = 2
RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
"""Megatron's settings for the long sample: a layer's activations are computed again in the backward
pass. Without them 32k tokens of a 4B model and its Adam state do not fit on an H200."""
LONG = {True: 65_536, False: 256}
"""Tokens of the long sample: with GPUs, without."""


@dataclass(frozen=True)
class Layout:
    """Parallel sizes of a layout; data parallelism has the remaining GPUs."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    grouped: bool = False
    distributed: bool = True

    def fits(self, gpus: int, shape: Shape) -> bool:
        """Return True if this number of GPUs can have the layout of the model."""
        ranks = self.tp * self.pp * self.cp
        return (
            gpus % ranks == 0
            and gpus % (self.ep * self.pp) == 0
            and shape.num_kv_heads % self.tp == 0
            and shape.num_layers % self.pp == 0
            and bool(shape.num_experts) >= (self.ep > 1 or self.grouped)
            and (not shape.num_experts or self.tp == 1 or self.ep > 1)
        )

    def name(self, gpus: int) -> str:
        """Return the sizes that are not 1, data parallelism last."""
        sizes = {"TP": self.tp, "PP": self.pp, "CP": self.cp, "EP": self.ep}
        sizes["DP"] = gpus // (self.tp * self.pp * self.cp)
        words = [f"{name}{size}" for name, size in sizes.items() if size > 1]
        more = [
            *([] if not self.grouped else ["grouped"]),
            *([] if self.distributed else ["no distributed optimizer"]),
        ]
        return ", ".join(["×".join(words) or "one GPU", *more])

    def train(self) -> dict[str, Any]:
        """Return keys of `train`."""
        return {
            "parallel": {
                "tensor_model_parallel_size": self.tp,
                "sequence_parallel": self.tp > 1,
                "pipeline_model_parallel_size": self.pp,
                "context_parallel_size": self.cp,
                "expert_model_parallel_size": self.ep,
            },
            "use_distributed_optimizer": self.distributed,
        }


def layouts(gpus: int, shape: Shape) -> list[Layout]:
    """Return the layouts that are measured, without one GPU alone."""
    half = max(1, gpus // 2)
    dense = [
        Layout(distributed=False),
        Layout(),
        Layout(tp=2),
        Layout(tp=4),
        Layout(tp=4, pp=2),
        Layout(tp=2, pp=2),
        Layout(pp=2),
        Layout(tp=2, pp=2, cp=2),
        Layout(cp=2),
    ]
    experts = [
        Layout(ep=gpus, distributed=False),
        Layout(ep=gpus),
        Layout(ep=gpus, grouped=True),
        Layout(ep=half, grouped=True),
        Layout(tp=2, ep=half, grouped=True),
        Layout(grouped=True),
    ]
    found = experts if shape.num_experts else dense
    return list(dict.fromkeys(one for one in found if one.fits(gpus, shape)))


def measure(bench: Bench, show: Callable[[Sequence[Row]], None] | None = None) -> list[Row]:
    """Return the rows of `layouts`. `show` gets the rows of each layout as soon as it is measured.

    A layout that fails (out of memory, say) has a row with its error.
    """
    bench.ensure_model()
    gpus = torch.cuda.device_count() if bench.on_gpus else CPU_RANKS
    if gpus < 2:
        raise ResourceError(
            "too few GPUs for layouts", where="bench layouts", found=gpus, expected="2 or more"
        )
    say = bench.progress(PART)
    say(f"{gpus} {'GPUs' if bench.on_gpus else 'ranks on this CPU'}")
    with RankPool(1) as alone, RankPool(gpus) as pool:
        comparison = Comparison(bench, alone, pool, say, show or (lambda _: None))
        return [*comparison.layouts(), *comparison.checkpoint(), *comparison.long()]


class Comparison:
    """The measurements of one model on one number of GPUs."""

    def __init__(self, bench: Bench, alone: RankPool, pool: RankPool, say, show) -> None:
        self._bench = bench
        self._alone = alone
        self._pool = pool
        self._say = say
        self._show = show
        self._gpus = pool.number

    def layouts(self) -> list[Row]:
        """Return the rows of every layout."""
        batch = repeated_batch(self._bench.shape, self._gpus)
        first: Outcome | None = None
        single: Outcome | None = None
        rows: list[Row] = []
        for layout in [Layout(), *layouts(self._gpus, self._bench.shape)]:
            on_one = single is None and not rows
            pool = self._alone if on_one else self._pool
            name = layout.name(pool.number)
            try:
                outcome = self._measure(pool, layout, batch)
            except ResourceError as error:
                found = [failed(self._bench, name, error)]
            else:
                single = outcome if on_one else single
                first = first or outcome
                found = self._rows(name, pool.number, batch, outcome, single, first)
            if on_one:
                self._alone.stop()
            self._show(found)
            rows += found
        return rows

    def checkpoint(self) -> list[Row]:
        """Save in a layout of many ranks, load in another one, and in the first one again."""
        batch = trained_batch(self._bench.shape).select(range(2 * self._gpus))
        candidates = layouts(self._gpus, self._bench.shape)
        saver = next(one for one in candidates if one.distributed)
        other = next(one for one in candidates[::-1] if one.distributed and one != saver)
        home = self._bench.home / "checkpoints"
        first, second = removed(home / "first"), removed(home / "second")
        try:
            saved = self._measure(self._pool, saver, batch, passes=1, save=str(first))
            there = self._measure(
                self._pool, other, batch, passes=0, load=str(first), save=str(second)
            )
            again = self._measure(self._pool, saver, batch, passes=0, load=str(second))
        except ResourceError as error:
            rows = [failed(self._bench, "checkpoint", error)]
            self._show(rows)
            return rows
        finally:
            size = size_bytes(first) if first.exists() else 0
            removed(home)
        names = [one.name(self._gpus) for one in (saver, other)]
        rows = [
            self._row(
                "checkpoint: save", "s", saved.parts["save"], f"{names[0]}, {size / 1e9:.3g} GB"
            ),
            self._row("checkpoint: rate", "GB/s", size / 1e9 / saved.parts["save"], str(home)),
            self._row("checkpoint: load", "s", there.parts["load"], f"{names[0]} → {names[1]}"),
            self._row("checkpoint: load", "s", again.parts["load"], f"{names[1]} → {names[0]}"),
            self._row(
                "checkpoint: weights differ", "", float(saved.weights != there.weights), "0: equal"
            ),
            self._row(
                "checkpoint: state differs", "", float(saved.digest != again.digest), "0: bit-equal"
            ),
        ]
        self._show(rows)
        return rows

    def long(self) -> list[Row]:
        """Train one long sample by context parallelism; compare a shorter one with one GPU."""
        layout = Layout(cp=self._gpus)
        tokens = LONG[self._bench.on_gpus]
        model = long_context(self._bench.model_dir, tokens)
        rows: list[Row] = []
        try:
            batch = one_sample(self._bench.shape, tokens)
            limit = {"max_tokens_per_gpu": tokens // self._gpus, "megatron": RECOMPUTE}
            long = self._measure(self._pool, layout, batch, model=model, more=limit)
            name = f"{layout.name(self._gpus)}, one sample of {tokens:,} tokens"
            rows = self._rows(name, self._gpus, batch, long, None, long)[:3]
            self._show(rows)
            short = one_sample(self._bench.shape, tokens // LONG_TIMES_SHORT)
            more = {"max_tokens_per_gpu": len(short.tokens)}
            ours = self._measure(self._pool, layout, short, passes=1, model=model, more=more)
            one = self._measure(self._alone, Layout(), short, passes=1, model=model, more=more)
        except ResourceError as error:
            self._show([failure := failed(self._bench, "long sample", error)])
            return [*rows, failure]
        name = f"{layout.name(self._gpus)}, one sample of {len(short.tokens):,} tokens"
        compared = self._rows(name, self._gpus, short, ours, one, one)[-2:]
        self._show(compared)
        return [*rows, *compared]

    def _measure(
        self,
        pool: RankPool,
        layout: Layout,
        batch: BatchColumns,
        *,
        passes: int = 2,
        load: str | None = None,
        save: str | None = None,
        model: Path | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> Outcome:
        train = {**layout.train(), **(more or {})}
        if layout.grouped:
            given = self._bench.config.train.megatron
            train["megatron"] = {**given, "moe_grouped_gemm": True}
        work = Work(
            str(model or self._bench.model_dir),
            self._bench.config_of_shape,
            train,
            batch,
            passes,
            load,
            save,
        )
        outcomes: list[Outcome] = pool.run(train_and_score, work, timeout_s=TIMEOUT_S)
        parts = ", ".join(f"{name} {spent:.1f} s" for name, spent in outcomes[0].parts.items())
        self._say(f"{layout.name(pool.number)}: {parts}, step {outcomes[0].step_s:.2f} s")
        if len({one.digest for one in outcomes}) > 1:
            raise ResourceError("ranks disagree about their state", where="bench layouts")
        return largest(outcomes)

    def _rows(
        self,
        name: str,
        gpus: int,
        batch: BatchColumns,
        outcome: Outcome,
        single: Outcome | None,
        first: Outcome,
    ) -> list[Row]:
        tokens = len(batch.tokens)
        flops = self._bench.shape.forward_flops(batch.lengths, batch.response_lengths)
        base = () if single is None else (tokens / single.step_s,)
        rows = [
            Row(
                PART,
                name,
                "tokens/s",
                (tokens / outcome.step_s,),
                base,
                "one GPU",
                self._note(batch),
            )
        ]
        if self._bench.on_gpus and (peak := peak_flops(torch.cuda.get_device_name(0))):
            mfu = 300 * flops / outcome.step_s / (gpus * peak)
            rows.append(self._row(name, "% MFU", mfu))
        scored = () if single is None else (tokens / single.score_s,)
        apart = np.abs(outcome.scores - first.scores)
        norms = [one.steps[0]["grad_norm"] for one in (outcome, first)]
        return [
            *rows,
            self._row(name, "GiB", outcome.step_gib, f"scoring {outcome.score_gib:.3g}"),
            Row(
                PART, f"{name}: scoring", "tokens/s", (tokens / outcome.score_s,), scored, "one GPU"
            ),
            self._row(
                f"{name}: log-probs", "nats", float(apart.mean()), f"at most {apart.max():.2g}"
            ),
            Row(PART, f"{name}: grad norm", "", (norms[0],), (norms[1],), "first that fits"),
        ]

    def _row(self, what: str, unit: str, value: float, note: str = "") -> Row:
        return Row(PART, what, unit, (value,), note=note)

    def _note(self, batch: BatchColumns) -> str:
        return f"{self._bench.name}, {len(batch)} samples of {batch.lengths.max()} tokens"


def largest(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the outcome of rank 0 with the largest memory of all ranks."""
    return replace(
        outcomes[0],
        step_gib=max(one.step_gib for one in outcomes),
        score_gib=max(one.score_gib for one in outcomes),
    )


def failed(bench: Bench, name: str, error: ResourceError) -> Row:
    """Return the row of a layout that failed, with its error's last line that is not indented."""
    lines = [line for line in str(error).splitlines() if line.strip() and not line[0].isspace()]
    reason = lines[-1][:MOST_OF_AN_ERROR]
    return Row(PART, name, "", (), note=f"{bench.name}: failed: {reason}")


def repeated_batch(shape: Shape, gpus: int) -> BatchColumns:
    """Return a batch with a micro-batch for every GPU at least, of different tokens."""
    return trained_batch(replace(shape, micro_batches=max(gpus, shape.micro_batches)))


def one_sample(shape: Shape, tokens: int) -> BatchColumns:
    """Return a batch of one sample of this number of tokens, half of them its response."""
    random = np.random.default_rng(1)
    prompt = random.integers(0, shape.vocab_size, tokens // 2).tolist()
    response = random.integers(0, shape.vocab_size, tokens - tokens // 2).tolist()
    return BatchColumns.from_lists([prompt], [response], advantages=[[1.0] * len(response)])


def long_context(model_dir: Path, tokens: int) -> Path:
    """Return a directory of the same model whose context has at least this number of tokens."""
    config = json.loads((model_dir / "config.json").read_text())
    if config["max_position_embeddings"] >= tokens:
        return model_dir
    folder = model_dir.with_name(f"{model_dir.name}-{tokens}")
    removed(folder).mkdir()
    for path in model_dir.iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": tokens}))
    return folder
