"""Write the HTML page of samples: `write_viewer`.

A set holds the samples of one iteration or of one evaluation. The page shows a set at a time and
moves between sets; filters by reward, status, outcome, length and text; compares the responses to
one prompt in two sets; and colours tokens by advantage or by the log-prob difference of engine and
trainer. It opens with the groups whose rewards differ: only they have a training signal.
`viewer.js` draws the page from the data that this module embeds as JSON.

The page is one file of bounded size: a long response keeps its first and last tokens.
`rlpipe.lineage.sample_sets` chooses the samples and `rlpipe.lineage.token_rows` reads them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from rlpipe.observe.pages import asset, html_page, navigation, write_whole

END_TOKENS = 512
"""Tokens that are shown of each end of a longer response."""
NO_SCRIPT = (
    "<noscript><p>This page needs JavaScript. It loads nothing from anywhere.</p></noscript>"
)


PromptKey = tuple[str, tuple[str, ...]]
"""Text of a prompt, and digests of its images."""


@dataclass(frozen=True)
class ShownSample:
    """One response. Token columns have one entry per token, or are None if not recorded."""

    group: str
    index: int
    prompt: str
    texts: Sequence[str]
    ids: Sequence[int]
    label: str | None = None
    mask: Sequence[int] | None = None
    log_probs: Sequence[float] | None = None
    """Rollout log-probs, of the engine."""
    advantages: Sequence[float] | None = None
    differences: Sequence[float] | None = None
    """Rollout log-probs minus the trainer's log-probs."""
    versions: Sequence[int] = ()
    """Weight version that sampled each token."""
    reward: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    status: str = "completed"
    fate: str = ""
    """Outcome of its group: trained, dropped with a reason, buffered or evaluated."""
    images: tuple[str, ...] = ()
    """Digests of the images of its prompt."""


@dataclass(frozen=True)
class ShownSet:
    """Samples of one iteration, or of one evaluation. Samples of a group are adjacent."""

    name: str
    """Such as `iteration 12`."""
    samples: Sequence[ShownSample]
    total: int
    """Number of samples that are stored; the page may show fewer."""


def write_viewer(
    title: str,
    about: str,
    sets: Sequence[ShownSet],
    path: str | Path,
    *,
    links: Mapping[str, str] | None = None,
    pictures: Mapping[str, str] | None = None,
) -> Path:
    """Write the page atomically and return its path.

    `links`: title → address of other pages. `pictures`: digest of an image → data URI.
    """
    return write_whole(Path(path), render(title, about, sets, links=links, pictures=pictures))


def render(
    title: str,
    about: str,
    sets: Sequence[ShownSet],
    *,
    links: Mapping[str, str] | None = None,
    pictures: Mapping[str, str] | None = None,
) -> str:
    """Return the page as HTML. Arguments as `write_viewer`."""
    header = (
        f'<header><div class="eyebrow">rlpipe samples</div><h1>{escape(title)}</h1>'
        f"<p>{escape(about)}</p>{navigation(links or {})}</header>"
    )
    page = _page(sets, pictures or {})
    data = json.dumps(page, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # "<" is the only character that could end or change the script element.
    embedded = data.replace("<", "\\u003c")
    body = (
        f'{header}\n{NO_SCRIPT}<div id="viewer"></div>\n'
        f'<script type="application/json" id="data">{embedded}</script>\n'
        f"<script>\n{asset('viewer.js')}</script>"
    )
    return html_page(f"{title} · samples", body, styles=("report.css", "viewer.css"))


def _page(sets: Sequence[ShownSet], pictures: Mapping[str, str]) -> dict[str, Any]:
    """Return the data of the page: sets of groups of samples, and each prompt and picture once."""
    prompts: dict[PromptKey, int] = {}
    samples = [sample for one in sets for sample in one.samples]
    return {
        "sets": [
            {
                "name": one.name,
                "total": one.total,
                "groups": [
                    _group(group, list(members), prompts)
                    for group, members in groupby(one.samples, key=lambda sample: sample.group)
                ],
            }
            for one in sets
        ],
        "first": _opening(sets),
        # After the groups, which number the prompts.
        "prompts": [text for text, _ in prompts],
        "pictures": dict(pictures),
        "images": [list(images) for _, images in prompts] if pictures else [],
        "largest": {
            "advantage": _largest(sample.advantages for sample in samples),
            "difference": _largest(sample.differences for sample in samples),
        },
    }


def _opening(sets: Sequence[ShownSet]) -> int:
    """Return the number of the newest set with a group whose rewards differ, else of the newest."""
    differing = [number for number, one in enumerate(sets) if _differs(one.samples)]
    return (differing or [max(0, len(sets) - 1)])[-1]


def _differs(samples: Sequence[ShownSample]) -> bool:
    groups = groupby(samples, key=lambda sample: sample.group)
    return any(len({sample.reward for sample in members}) > 1 for _, members in groups)


def _largest(columns: Iterable[Sequence[float] | None]) -> float:
    values = (abs(value) for column in columns if column for value in column)
    return _short(max((value for value in values if math.isfinite(value)), default=0.0)) or 0.0


def _group(group: str, samples: list[ShownSample], prompts: dict[PromptKey, int]) -> dict[str, Any]:
    first = samples[0]
    number = prompts.setdefault((first.prompt, first.images), len(prompts))
    entry = {
        "id": group,
        "prompt": number,
        "fate": first.fate,
        "samples": [_sample(sample) for sample in samples],
    }
    return entry | ({"label": first.label} if first.label is not None else {})


def _sample(sample: ShownSample) -> dict[str, Any]:
    """Return a response without the keys that have no value."""
    num_tokens = len(sample.ids)
    cut = num_tokens > 2 * END_TOKENS
    entry: dict[str, Any] = {
        "index": sample.index,
        "reward": _short(sample.reward),
        "status": sample.status,
        "tokens": num_tokens,
        "texts": _ends(sample.texts),
        "ids": _ends(sample.ids),
        "cut": num_tokens - 2 * END_TOKENS if cut else 0,
        "parts": {name: _short(value) for name, value in sample.parts.items()},
        "error": sample.error,
        "versions": _run_lengths(_ends(sample.versions)),
    }
    for name, column in (
        ("logProbs", sample.log_probs),
        ("advantages", sample.advantages),
        ("differences", sample.differences),
    ):
        if column:
            entry[name] = _constant_or_list([_short(value) for value in _ends(column)])
    if sample.mask is not None:
        entry["masked"] = [position for position, loss in enumerate(_ends(sample.mask)) if not loss]
    return {name: value for name, value in entry.items() if value not in (None, [], {}, 0)} | {
        "index": sample.index,
        "reward": entry["reward"],
        "tokens": num_tokens,
    }


def _ends(column: Sequence[Any]) -> list[Any]:
    """Return the entries of the shown tokens: all, or those of both ends."""
    if len(column) <= 2 * END_TOKENS:
        return list(column)
    return [*column[:END_TOKENS], *column[-END_TOKENS:]]


def _constant_or_list(values: list[float | None]) -> float | list[float | None] | None:
    """Return the value that all tokens share, such as GRPO's advantage, else the list."""
    return values[0] if len(set(values)) == 1 else values


def _run_lengths(values: Sequence[int]) -> list[list[int]]:
    """Return `[count, value]` of each run of equal values."""
    return [[len(list(run)), value] for value, run in groupby(values)]


def _short(value: float | None) -> float | None:
    """Return a number with four digits. JSON has no NaN or infinity: None."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.4g}")
