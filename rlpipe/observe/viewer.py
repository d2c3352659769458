"""The page on which people read samples: self-contained HTML, no scripts, nothing fetched.

Each group is a prompt with its responses, each response with its reward (and its parts) and its
tokens, coloured by advantage or by how far the log-probs of engine and trainer are apart: two
buttons at the top choose. A token says all that is known of it when the mouse rests on it. Colours
are relative to the largest value on the page.

Not here: where samples come from (`rlpipe.lineage.token_rows`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby
from pathlib import Path

from rlpipe.observe.charts import number
from rlpipe.observe.summary import write_whole

LEVELS = 9
"""Shades of a colour."""


@dataclass(frozen=True)
class ShownSample:
    """One response. Lists of tokens have one entry each; None where nothing is known."""

    group: str
    index: int
    prompt: str
    texts: Sequence[str]
    ids: Sequence[int]
    label: str | None = None
    mask: Sequence[int] | None = None
    log_probs: Sequence[float] | None = None
    """Of the engine."""
    advantages: Sequence[float] | None = None
    differences: Sequence[float] | None = None
    """Engine minus trainer."""
    versions: Sequence[int] = ()
    """Weight version that sampled each token."""
    reward: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    status: str = "completed"
    fate: str = ""
    """What became of its group."""


def write_viewer(title: str, about: str, samples: Sequence[ShownSample], path: str | Path) -> Path:
    """Write the page (whole or not at all) and return its path."""
    return write_whole(Path(path), render(title, about, samples))


def render(title: str, about: str, samples: Sequence[ShownSample]) -> str:
    """The page as HTML."""
    folder = Path(__file__).parent
    style = "".join(
        (folder / name).read_text(encoding="utf-8") for name in ("report.css", "viewer.css")
    )
    scales = (
        _largest(sample.advantages for sample in samples),
        _largest(sample.differences for sample in samples),
    )
    groups = "\n".join(
        _group(group, list(found), scales)
        for group, found in groupby(samples, key=lambda sample: sample.group)
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)} · samples</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        f'<header><div class="eyebrow">rlpipe samples</div><h1>{escape(title)}</h1><p>{escape(about)}</p></header>\n'
        f"{_chooser(scales)}\n{groups or '<p>There are no samples.</p>'}\n"
        "<footer>Written by rlpipe from the records in the store.</footer>\n</main>\n</body>\n</html>\n"
    )


def _largest(columns: Iterable[Sequence[float] | None]) -> float:
    return max((abs(value) for column in columns if column for value in column), default=0.0)


def _chooser(scales: tuple[float, float]) -> str:
    """The buttons, and what their colours mean."""
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
    return f"<b>−{scale}</b>{swatches}<b>+{scale}</b>" if scale != "0" else "<b>0 everywhere</b>"


def _group(group: str, samples: list[ShownSample], scales: tuple[float, float]) -> str:
    first = samples[0]
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    mean = f"mean reward {number(sum(rewards) / len(rewards))}, " if rewards else ""
    label = (
        f'<p class="label">expected: <span>{escape(first.label)}</span></p>'
        if first.label is not None
        else ""
    )
    cards = "".join(_sample(sample, scales) for sample in samples)
    return (
        f'<section class="group"><h2>{escape(group)}</h2><p>{mean}{len(samples)} samples, {escape(first.fate)}</p>'
        f'<div class="prompt text">{escape(first.prompt)}</div>{label}{cards}</section>'
    )


def _sample(sample: ShownSample, scales: tuple[float, float]) -> str:
    """A card: reward and its parts beside the tokens."""
    reward = "–" if sample.reward is None else number(sample.reward)
    kind = "" if sample.reward is None else " right" if sample.reward > 0 else " wrong"
    parts = "".join(
        f"<div>{escape(name)} {number(value)}</div>" for name, value in sample.parts.items()
    )
    said = [f"{len(sample.ids)} tokens"]
    said += [sample.status] if sample.status != "completed" else []
    versions = sorted(set(sample.versions))
    said += (
        [f"weights {versions[0]}" + (f"…{versions[-1]}" if len(versions) > 1 else "")]
        if versions
        else []
    )
    error = f'<div class="wrong">{escape(sample.error)}</div>' if sample.error else ""
    tokens = "".join(_token(sample, place, scales) for place in range(len(sample.ids)))
    return (
        f'<article class="card sample"><div class="score"><b class="reward{kind}">{reward}</b>{parts}'
        f'<div>#{sample.index}</div><div>{", ".join(said)}</div>{error}</div><div class="text tokens">{tokens}</div></article>'
    )


def _token(sample: ShownSample, place: int, scales: tuple[float, float]) -> str:
    advantage = sample.advantages[place] if sample.advantages else None
    difference = sample.differences[place] if sample.differences else None
    classes = [*_shade("a", advantage, scales[0]), *_shade("d", difference, scales[1])]
    masked = sample.mask is not None and not sample.mask[place]
    if masked:
        classes.append("masked")
    about = [f"{sample.ids[place]}"]
    if sample.log_probs is not None:
        about.append(f"log-prob {number(sample.log_probs[place])}")
    about += [f"engine − trainer {number(difference)}"] if difference is not None else []
    about += [f"advantage {number(advantage)}"] if advantage is not None else []
    about += [f"weights {sample.versions[place]}"] if sample.versions else []
    about += ["not in the loss"] if masked else []
    kind = f' class="{" ".join(classes)}"' if classes else ""
    return (
        f'<i{kind} title="{escape(" · ".join(about))}">{escape(_visible(sample.texts[place]))}</i>'
    )


def _shade(name: str, value: float | None, largest: float) -> list[str]:
    """The class of a colour: `ap9` is the largest positive advantage. Nothing for what is too small
    to be seen."""
    level = round(abs(value) / largest * LEVELS) if value and largest else 0
    return [f"{name}{'p' if value and value > 0 else 'n'}{level}"] if level else []


def _visible(text: str) -> str:
    """With a sign where a line ends, so that such a token can be seen."""
    return text.replace("\n", "⏎\n")
