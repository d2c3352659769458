"""Rules that compare a response with its label. Each takes a sample and answers `{"reward": ...,
parts}`.

| rule | right is | reward |
|---|---|---|
| `dapo` | the text after the last `Answer:` in the last 300 characters is the label (`answers.same`) | 1 or -1; part `acc` |
| `deepscaler` | the last `\\boxed{}` after `</think>` (`###Response`) equals it (`math.equal`) | 1 or 0; `format` |
| `f1` | words in common, after the normalisation of SQuAD and HotpotQA | 0 to 1; `precision`, `recall` |
| `gpqa` | the letter that the response settles on is the label's | 1 or 0; `format` |
| `random` | by the sample's seed, group and index | 0 or 1 |

A row without a label is an error of that row, never a 0. Differs from slime: dapo's labels need not
be whole numbers; gpqa takes the last statement rather than the first, in either case, and only a
letter that stands alone (not the article of "the answer is a matter of").

Not here: math-verify alone (`math`), rewards that ask somebody (`remote`, `judge`).
"""

from __future__ import annotations

import random
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from rlpipe.config.data import MathReward, ReasoningGymReward, RowReward, RuleReward
from rlpipe.errors import DataError
from rlpipe.rewards.answers import after_thinking, boxed, plain, same
from rlpipe.types import Sample

Rule = Callable[[Sample], dict[str, float]]

LETTERS = string.ascii_uppercase[:10]
_EMPHASIS = re.compile(
    r"\*+|`+|\$+|\\[()\[\]]|\\(?:text|textbf|textit|mathrm|mathbf|mathit|mbox)(?=\s*\{)|[{}]"
)
_DENIED = r"(?!\)?\s+(?:is|are)\s+(?:not|wrong|incorrect|false)\b)"
_STATED = (
    r"(?:answer|(?:correct|right|best)\s+(?:option|choice))(?:\s+(?:is|would\s+be|should\s+be))?"
    r"\s*[:=>]?\s*(?:option\b|choice\b)?[(\[\"'\s]*"
)


def make_rule(config: RuleReward | RowReward | MathReward) -> Rule:
    """The function of a configuration. Raises: ConfigError if `by_row.default` is not a rule."""
    if isinstance(config, RowReward):
        return by_row(config)
    return of_kind(f"boxed_{config.type}" if config.boxed else config.type)


def of_kind(kind: str) -> Rule:
    """The rule of a name such as `dapo` or `boxed_f1`. Raises: DataError if there is none."""
    name = kind.removeprefix("boxed_")
    rule = _elsewhere(name) or RULES.get(name)
    if rule is None:
        known = ", ".join([*RULES, "math", "reasoning_gym"])
        raise DataError(
            "no such reward",
            where="metadata.rm_type",
            found=kind,
            expected=f"{known}, or one of them after boxed_",
        )
    return _boxed(rule) if name != kind else rule


def by_row(config: RowReward) -> Rule:
    """Each sample by the rule that its row names."""
    rules: dict[str, Rule] = {}

    def rule(sample: Sample) -> dict[str, float]:
        kind = sample.metadata.get("rm_type") or config.default
        if not isinstance(kind, str):
            do = "give every row a metadata.rm_type, or the run a default (--rm-type)"
            raise DataError(
                "the row does not say how it is scored", where="metadata.rm_type", found=kind, do=do
            )
        if kind.strip() not in rules:
            rules[kind.strip()] = of_kind(kind.strip())
        return rules[kind.strip()](sample)

    return rule


def dapo(sample: Sample) -> dict[str, float]:
    """DAPO's (arXiv 2503.14476). Raises: DataError without a label."""
    label = _label(sample)
    told = re.findall(r"(?i)answer\s*:\s*([^\n]+)", sample.response[-300:])
    right = bool(told) and same(told[-1], label)
    return {"reward": 1.0 if right else -1.0, "acc": float(right), "format": float(bool(told))}


def deepscaler(sample: Sample) -> dict[str, float]:
    """DeepScaleR's. Raises: DataError without a label."""
    label = _label(sample)
    solution = after_thinking(sample.response)
    answer = boxed(solution) if solution is not None else None
    if answer is None:
        return {"reward": 0.0, "format": 0.0}
    from rlpipe.rewards.math import equal

    return {"reward": float(equal(answer, label)), "format": 1.0}


def f1(sample: Sample) -> dict[str, float]:
    """Harmonic mean of precision and recall of the words; `yes`, `no` and `noanswer` only match
    themselves.

    Source: `normalize_answer` and `f1_score` of SQuAD's evaluate-v1.1.py; the three words are
    HotpotQA's addition.
    """
    answer = _words(sample.response)
    label = _words(_label(sample))
    special = {("yes",), ("no",), ("noanswer",)}
    if answer != label and {tuple(answer), tuple(label)} & special:
        return {"reward": 0.0, "precision": 0.0, "recall": 0.0}
    common = sum((Counter(answer) & Counter(label)).values())
    precision = common / max(1, len(answer))
    recall = common / max(1, len(label))
    return {
        "reward": 2 * precision * recall / (precision + recall) if common else 0.0,
        "precision": precision,
        "recall": recall,
    }


def gpqa(sample: Sample) -> dict[str, float]:
    """A multiple choice. The label is a letter, the number of a choice from 0, or its text (with
    `metadata.choices`).

    `metadata.valid_letters` and `metadata.correct_letter` win. A response that names no letter is
    right if it holds the right choice's text. Raises: DataError if it cannot be told which choice
    is right.
    """
    choices = _choices(sample.metadata)
    letters = [
        str(one).upper()
        for one in sample.metadata.get("valid_letters") or LETTERS[: len(choices) or len(LETTERS)]
    ]
    right = _right_letter(sample, choices, letters)
    text = after_thinking(sample.response) or sample.response
    told = _letter(text, letters)
    if told is not None:
        return {"reward": float(told == right), "format": 1.0}
    position = letters.index(right)
    target = _flat(choices[position]) if position < len(choices) else ""
    return {"reward": float(bool(target) and f" {target} " in f" {_flat(text)} "), "format": 0.0}


def by_chance(sample: Sample) -> dict[str, float]:
    """0 or 1, the same every time for the same sample: a baseline."""
    return {
        "reward": float(
            random.Random(f"{sample.seed}/{sample.group_id}/{sample.index}").getrandbits(1)
        )
    }


RULES: dict[str, Rule] = {
    "dapo": dapo,
    "deepscaler": deepscaler,
    "f1": f1,
    "gpqa": gpqa,
    "random": by_chance,
}


def _elsewhere(name: str) -> Rule | None:
    """Rules whose packages take a second to load."""
    if name == "math":
        from rlpipe.rewards.math import reward

        return reward
    if name == "reasoning_gym":
        from rlpipe.rewards.reasoning_gym import make_reward

        return make_reward(ReasoningGymReward(type="reasoning_gym"))
    return None


def _boxed(rule: Rule) -> Rule:
    def of_box(sample: Sample) -> dict[str, float]:
        answer = boxed(sample.response)
        return {**rule(replace(sample, response=answer or "")), "boxed": float(answer is not None)}

    return of_box


def _label(sample: Sample) -> str:
    if not sample.label or not plain(sample.label):
        raise DataError(
            "the row has no label to compare with", where="label", found=repr(sample.label)
        )
    return sample.label


def _words(text: str) -> list[str]:
    """Words as SQuAD's evaluation script counts them.

    Lower case; ASCII punctuation is deleted, not replaced by a space (`U.S.A.` is `usa`, `1,000` is
    `1000`); then the articles go. Other punctuation, such as a typographic apostrophe, stays:
    scores are those of the published script.
    """
    bare = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(?:a|an|the)\b", " ", bare).split()


def _flat(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()


def _choices(metadata: Mapping[str, Any]) -> list[str]:
    given = metadata.get("choices") or []
    return [str(one) for one in (given.values() if isinstance(given, dict) else given)]


def _right_letter(sample: Sample, choices: list[str], letters: list[str]) -> str:
    told = sample.metadata.get("correct_letter")
    label = (sample.label or "").strip()
    candidates = [str(told or "").strip().upper(), label.upper()]
    if label.isdigit() and int(label) < len(letters):
        candidates.append(letters[int(label)])
    candidates += [
        letter
        for letter, choice in zip(letters, choices, strict=False)
        if label and _flat(choice) == _flat(label)
    ]
    right = next((one for one in candidates if one in letters), None)
    if right is None:
        raise DataError(
            "it cannot be told which choice is right",
            where="label",
            found=repr(sample.label),
            expected=f"a letter of {''.join(letters)}, a choice's number from 0, or its text",
        )
    return right


def _letter(text: str, letters: list[str]) -> str | None:
    """The letter of the last box, else of the last statement, else the last letter that stands
    alone.

    A statement of the answer wins over a later mention of an option: "The answer is B. Option C is
    too heavy." is B.
    """
    if (box := boxed(text)) is not None:
        found = _last_of(
            rf"^\s*(?:option\b|choice\b)?[(\s]*{_any_of(letters)}(?:[).:,\s]|$)", _bare(box)
        )
        if found is not None:
            return found
    bare = _bare(text)
    any_of = _any_of(letters)
    upper = "|".join(map(re.escape, letters))
    patterns = (
        rf"{_STATED}{any_of}{_DENIED}",
        rf"(?:\b(?-i:({upper}))\)?|\(({upper})\))\s+is\s+(?:the\s+)?(?:correct|right|answer)",
        rf"\b(?:option|choice)\b[:(\s]*{any_of}{_DENIED}",
        rf"(?m:\b(?-i:({upper}))\b[).\s]*$|^[(\s]*({upper})[).\s]*$)",
    )
    return next(
        (found for pattern in patterns if (found := _last_of(pattern, bare)) is not None), None
    )


def _bare(text: str) -> str:
    """The text without emphasis and LaTeX around letters; full-width letters are plain ones."""
    return _EMPHASIS.sub("", unicodedata.normalize("NFKC", text))


def _any_of(letters: list[str]) -> str:
    """Pattern of a letter in either case that stands for a choice, not for a word.

    A lower-case `a` or `i` in a sentence is a word ("the answer is a matter of taste"): only
    punctuation or the end of the line after it make it a choice. `D-glucose` and `D's` are no
    choices either.
    """
    words = "|".join(re.escape(letter.lower()) for letter in letters if letter in "AI")
    others = "|".join(
        re.escape(letter)
        for one in letters
        for letter in (one, one.lower())
        if letter not in ("a", "i")
    )
    word = rf"|(?-i:{words})(?=\s*(?:[).,;:!?\]<]|(?m:$)))" if words else ""
    return rf"((?-i:{others})\b(?!['’]|-\w){word})"


def _last_of(pattern: str, text: str) -> str | None:
    """The upper-case letter of the last match; None if there is none."""
    found = None
    for match in re.finditer(pattern, text, re.IGNORECASE):
        found = match
    return next(group for group in found.groups() if group).upper() if found else None
