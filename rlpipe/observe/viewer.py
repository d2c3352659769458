"""Write the HTML page of samples: `write_viewer`.

A group is a prompt with its responses. A response has its reward, reward parts and tokens. Radio
buttons colour the tokens by advantage or by the log-prob difference of engine and trainer; colours
are relative to the largest value on the page. The tooltip of a token has all its values.
`rlpipe.lineage.token_rows` reads the samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby
from pathlib import Path

from rlpipe.observe.charts import number
from rlpipe.observe.pages import html_page, write_whole

LEVELS = 9
"""Number of shades of a colour."""


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
    """Outcome of its group: trained, dropped with a reason, or buffered."""


def write_viewer(title: str, about: str, samples: Sequence[ShownSample], path: str | Path) -> Path:
    """Write the page atomically and return its path."""
    return write_whole(Path(path), render(title, about, samples))


def render(title: str, about: str, samples: Sequence[ShownSample]) -> str:
    """Return the page as HTML."""
    scales = (
        _largest(sample.advantages for sample in samples),
        _largest(sample.differences for sample in samples),
    )
    groups = "\n".join(
        _group(group, list(members), scales)
        for group, members in groupby(samples, key=lambda sample: sample.group)
    )
    header = (
        f'<header><div class="eyebrow">rlpipe samples</div><h1>{escape(title)}</h1>'
        f"<p>{escape(about)}</p></header>"
    )
    body = f"{header}\n{_colour_chooser(scales)}\n{groups or '<p>There are no samples.</p>'}"
    return html_page(f"{title} · samples", body, styles=("report.css", "viewer.css"))


def _largest(columns: Iterable[Sequence[float] | None]) -> float:
    return max((abs(value) for column in columns if column for value in column), default=0.0)


def _colour_chooser(scales: tuple[float, float]) -> str:
    """Return the radio buttons and the legends of their colours."""
    # CSS alone shows and hides the colours, so the page needs no script.
    advantage, difference = (number(scale) for scale in scales)
    return (
        '<div class="chooser" role="radiogroup" aria-label="colour tokens by">'
        '<label><input type="radio" name="by" id="by-advantage" checked>advantage</label>'
        '<label><input type="radio" name="by" id="by-difference">log-prob, engine − trainer</label>'
        '<label><input type="radio" name="by" id="by-nothing">plain</label>'
        f'<span class="legend of-advantage">{_legend(advantage)}</span>'
        f'<span class="legend of-difference">{_legend(difference)}</span></div>'
    )


def _legend(scale: str) -> str:
    swatches = "".join(f'<i class="an{level} dn{level}"></i>' for level in range(LEVELS, 0, -2))
    swatches += "".join(f'<i class="ap{level} dp{level}"></i>' for level in range(1, LEVELS + 1, 2))
    # A column of zeros has no colours to explain.
    return f"<b>−{scale}</b>{swatches}<b>+{scale}</b>" if scale != "0" else "<b>0 everywhere</b>"


def _group(group: str, samples: list[ShownSample], scales: tuple[float, float]) -> str:
    first = samples[0]
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    mean = f"mean reward {number(sum(rewards) / len(rewards))}, " if rewards else ""
    label = ""
    if first.label is not None:
        label = f'<p class="label">expected: <span>{escape(first.label)}</span></p>'
    cards = "".join(_sample(sample, scales) for sample in samples)
    return (
        f'<section class="group"><h2>{escape(group)}</h2>'
        f"<p>{mean}{len(samples)} samples, {escape(first.fate)}</p>"
        f'<div class="prompt text">{escape(first.prompt)}</div>{label}{cards}</section>'
    )


def _sample(sample: ShownSample, scales: tuple[float, float]) -> str:
    """Return the card of a response: reward, parts and tokens."""
    reward = "–" if sample.reward is None else number(sample.reward)
    kind = "" if sample.reward is None else " right" if sample.reward > 0 else " wrong"
    parts = "".join(
        f"<div>{escape(name)} {number(value)}</div>" for name, value in sample.parts.items()
    )
    facts = [f"{len(sample.ids)} tokens"]
    if sample.status != "completed":
        facts.append(sample.status)
    versions = sorted(set(sample.versions))
    if versions:
        last = f"…{versions[-1]}" if len(versions) > 1 else ""
        facts.append(f"weights {versions[0]}{last}")
    error = f'<div class="wrong">{escape(sample.error)}</div>' if sample.error else ""
    tokens = "".join(_token(sample, position, scales) for position in range(len(sample.ids)))
    return (
        '<article class="card sample"><div class="score">'
        f'<b class="reward{kind}">{reward}</b>{parts}'
        f"<div>#{sample.index}</div><div>{', '.join(facts)}</div>{error}</div>"
        f'<div class="text tokens">{tokens}</div></article>'
    )


def _token(sample: ShownSample, position: int, scales: tuple[float, float]) -> str:
    advantage = sample.advantages[position] if sample.advantages else None
    difference = sample.differences[position] if sample.differences else None
    classes = [*_shade("a", advantage, scales[0]), *_shade("d", difference, scales[1])]
    masked = sample.mask is not None and not sample.mask[position]
    if masked:
        classes.append("masked")
    facts = [f"{sample.ids[position]}"]
    if sample.log_probs is not None:
        facts.append(f"log-prob {number(sample.log_probs[position])}")
    if difference is not None:
        facts.append(f"engine − trainer {number(difference)}")
    if advantage is not None:
        facts.append(f"advantage {number(advantage)}")
    if sample.versions:
        facts.append(f"weights {sample.versions[position]}")
    if masked:
        facts.append("not in the loss")
    kind = f' class="{" ".join(classes)}"' if classes else ""
    # A visible sign for line ends: a token of only a line end would be invisible.
    text = sample.texts[position].replace("\n", "⏎\n")
    return f'<i{kind} title="{escape(" · ".join(facts))}">{escape(text)}</i>'


def _shade(name: str, value: float | None, largest: float) -> list[str]:
    """Return the CSS class of a value's colour, such as `ap9` for the largest positive advantage.

    Empty for a value that rounds to no shade.
    """
    if not value or not largest:
        return []
    level = round(abs(value) / largest * LEVELS)
    return [f"{name}{'p' if value > 0 else 'n'}{level}"] if level else []
