"""Choose the samples of a run that fit on one page of the sample viewer.

Entry points: `write_run_samples`, `write_samples`, `sample_sets`.

A run may have 2,000 iterations of 256 samples. The page takes the newest and the first rollout and
evaluation, then those in the middle of the largest gaps, until `MAX_SAMPLES` or `MAX_TOKENS` is
reached. Of a set it takes whole groups: first those whose prompt is on the page already, so that
two iterations can be compared, and those whose rewards differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from rlpipe.lineage.rollouts import find, iterations, sample_rows, unfinished
from rlpipe.lineage.shown_images import shown_images
from rlpipe.lineage.token_rows import (
    Decode,
    evaluation_rows,
    prompt_text,
    shown_evaluation,
    shown_rollout,
    tokenizer_of,
)
from rlpipe.observe.pages import REPORT_PAGE, REPORT_TITLE, SAMPLES_PAGE, SAMPLES_TITLE
from rlpipe.observe.viewer import END_TOKENS, ShownSet, write_viewer
from rlpipe.store.objects.files import Files
from rlpipe.types import Node

MAX_SETS = 24
"""Rollouts, and evaluations, on a page."""
MAX_SAMPLES = 4096
MAX_TOKENS = 300_000
"""Bounds of a page: it has at most about 15 MB."""
SAMPLES_OF_SET = 128
"""Samples of one iteration, at most, on a page of several."""


class Source(NamedTuple):
    """An iteration, or an evaluation of one held-out set after `iteration` iterations."""

    iteration: int
    dataset: str | None = None

    @property
    def name(self) -> str:
        """Name of the set on the page."""
        if self.dataset is None:
            return f"iteration {self.iteration}"
        return f"{self.dataset} after {self.iteration} iterations"

    @property
    def order(self) -> tuple[int, bool, str]:
        """Position on the page: the weights after k iterations sample iteration k afterwards."""
        return self.iteration, self.dataset is None, self.dataset or ""


@dataclass
class _Page:
    """The samples that are on the page so far."""

    sets: dict[Source, ShownSet] = field(default_factory=dict)
    prompts: set[str] = field(default_factory=set)
    num_samples: int = 0
    num_tokens: int = 0

    @property
    def full(self) -> bool:
        return self.num_samples >= MAX_SAMPLES or self.num_tokens >= MAX_TOKENS

    def add(self, source: Source, shown: ShownSet) -> None:
        self.sets[source] = shown
        self.prompts |= {sample.prompt for sample in shown.samples}
        self.num_samples += len(shown.samples)
        self.num_tokens += sum(min(len(sample.ids), 2 * END_TOKENS) for sample in shown.samples)


def write_samples(
    files: Files,
    run: str,
    path: Path,
    decode: Decode | None,
    *,
    only: Sequence[int] | None = None,
    evaluations: Mapping[tuple[int, str], Node] | None = None,
    most: int | None = None,
    links: Mapping[str, str] | None = None,
) -> Path:
    """Write the page of samples and return its path. Parameters and errors: as `sample_sets`."""
    sets, about = sample_sets(files, run, decode, only=only, evaluations=evaluations, most=most)
    if decode is None:
        about += " Without a tokenizer, tokens are numbers."
    digests = (digest for one in sets for sample in one.samples for digest in sample.images)
    pictures = shown_images(files, digests)
    return write_viewer(run, about, sets, path, links=links, pictures=pictures)


def write_run_samples(
    files: Files,
    run: str,
    directory: Path,
    evaluations: Mapping[tuple[int, str], Node],
    links: Mapping[str, str],
) -> Path:
    """Write the samples of a run into its folder, where the report links to them.

    `links`: other pages of the run. Raises: ObjectMissing, ObjectCorrupt.
    """
    others = {title: address for title, address in links.items() if title != SAMPLES_TITLE}
    return write_samples(
        files,
        run,
        directory / SAMPLES_PAGE,
        tokenizer_of(files, run, directory.parent),
        evaluations=evaluations,
        links={REPORT_TITLE: REPORT_PAGE} | others,
    )


def sample_sets(
    files: Files,
    run: str,
    decode: Decode | None,
    *,
    only: Sequence[int] | None = None,
    evaluations: Mapping[tuple[int, str], Node] | None = None,
    most: int | None = None,
) -> tuple[list[ShownSet], str]:
    """Return the sets of a page in order of iteration, and a sentence about what is left out.

    `only` restricts the rollouts to these iterations. `evaluations`: (weight version, held-out set)
    → node. `most`: samples of a set. Raises: ObjectMissing, ObjectCorrupt.
    """
    stored = iterations(files, run) if only is None else only
    rollouts = spread([Source(k) for k in stored])[:MAX_SETS]
    nodes = {Source(version, name): node for (version, name), node in (evaluations or {}).items()}
    held_out = spread(sorted(nodes))[:MAX_SETS]
    page = _Page()
    # A single iteration has the page for itself.
    most = most or (MAX_SAMPLES if len(rollouts) + len(held_out) == 1 else SAMPLES_OF_SET)
    for source in _alternating(rollouts, held_out):
        if page.full:
            break
        shown = _set(files, run, source, nodes.get(source), decode, page.prompts, most)
        if shown is not None:
            page.add(source, shown)
    sets = [page.sets[source] for source in sorted(page.sets, key=lambda source: source.order)]
    return sets, _about(run, page.sets, len(stored), len(nodes))


def spread(sources: Sequence[Source]) -> list[Source]:
    """Return the sources with the newest first, then the oldest, then the middle of the gaps."""
    if len(sources) < 3:
        return list(sources)[::-1]
    chosen = [len(sources) - 1, 0]
    gaps = [(0, len(sources) - 1)]
    while gaps:
        halves = []
        for low, high in gaps:
            middle = (low + high) // 2
            if low < middle < high:
                chosen.append(middle)
                halves += [(low, middle), (middle, high)]
        gaps = halves
    return [sources[position] for position in chosen]


def choose_groups(rows: pa.Table, known: set[str], most: int) -> list[str]:
    """Return the ids of the groups of a set to show: at least one, else at most `most` samples.

    `rows`: samples with `group_id`, `prompt` and `reward`. `known`: prompts on the page so far.
    """
    rewards: dict[str, list[float | None]] = {}
    prompts: dict[str, str] = {}
    columns = (rows[name].to_pylist() for name in ("group_id", "prompt", "reward"))
    for group, prompt, reward in zip(*columns, strict=True):
        rewards.setdefault(group, []).append(reward)
        prompts[group] = prompt_text(prompt)
    preferred = sorted(
        rewards, key=lambda group: (prompts[group] not in known, len(set(rewards[group])) == 1)
    )
    chosen: list[str] = []
    count = 0
    for group in preferred:
        count += len(rewards[group])
        if chosen and count > most:
            break
        chosen.append(group)
    return chosen


def _set(
    files: Files,
    run: str,
    source: Source,
    node: Node | None,
    decode: Decode | None,
    known: set[str],
    most: int,
) -> ShownSet | None:
    """Read one set; None if the iteration has no stored rollout."""
    stored = None
    if node is None:
        k = source.iteration
        stored = find(files, run, k) or unfinished(files, run).get(k)
    if node is not None:
        rows = evaluation_rows(files, node)
    elif stored is not None:
        rows = sample_rows(files, stored)
    else:
        return None
    groups = set(choose_groups(rows, known, most))
    chosen = rows.filter(pa.array([group in groups for group in rows["group_id"].to_pylist()]))
    samples = (
        shown_evaluation(chosen, decode)
        if stored is None
        else shown_rollout(files, stored, chosen, decode)
    )
    return ShownSet(source.name, samples, rows.num_rows)


def _alternating(first: Sequence[Source], second: Sequence[Source]) -> list[Source]:
    """Return the sources of both, in turns."""
    both = []
    for number in range(max(len(first), len(second))):
        both += [*first[number : number + 1], *second[number : number + 1]]
    return both


def _about(
    run: str, shown: Mapping[Source, ShownSet], num_rollouts: int, num_evaluations: int
) -> str:
    num_shown = sum(source.dataset is None for source in shown)
    parts = [_counted(num_shown, num_rollouts, "iteration")]
    if num_evaluations:
        parts.append(_counted(len(shown) - num_shown, num_evaluations, "evaluation"))
    counts = f"{' and '.join(parts)}."
    complete = all(len(one.samples) == one.total for one in shown.values())
    if len(shown) == num_rollouts + num_evaluations and complete:
        return counts
    return (
        f"{counts} This page has some groups of each. All samples of iteration K: "
        f"rlpipe rollouts {run} --iterations K --out page.html"
    )


def _counted(shown: int, stored: int, noun: str) -> str:
    plural = noun if stored == 1 else f"{noun}s"
    return f"{shown:,} of {stored:,} {plural}" if shown < stored else f"{stored:,} {plural}"
