"""Rules that compare a response with its label. Each returns `{"reward": ..., parts}`.

| rule | correct answer | reward and parts |
|---|---|---|
| `dapo` | text after the last `Answer:` in 300 characters equals the label | 1 or -1; `acc` |
| `deepscaler` | last `\\boxed{}` after `</think>` (`###Response`) equals it | 1 or 0; `format` |
| `f1` | common words after SQuAD's and HotpotQA's normalisation | 0 to 1; `precision`, `recall` |
| `gpqa` | the chosen letter is the label's | 1 or 0; `format` |
| `random` | none: depends on the sample's seed, group and index | 0 or 1 |

A row without a label is an error of that row, never a 0. `dapo` compares by `answers.same`,
`deepscaler` by `math.equal`.

Differences from slime: dapo accepts labels that are not whole numbers. gpqa takes the last
statement instead of the first, in either case, and only a letter that stands alone (not the article
in "the answer is a matter of").

To add a rule, add its function to `RULES` and its name to `RuleReward` in `rlpipe.config.data`.
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
from rlpipe.rewards.answers import after_thinking, boxed, plain, same, text_label
from rlpipe.types import Sample

Rule = Callable[[Sample], dict[str, float]]
"""Sample → reward and parts. Raises: DataError without a label."""

LETTERS = string.ascii_uppercase[:10]
_EMPHASIS = re.compile(
    r"\*+|`+|\$+|\\[()\[\]]|\\(?:text|textbf|textit|mathrm|mathbf|mathit|mbox)(?=\s*\{)|[{}]"
)
_NOT_DENIED = r"(?!\)?\s+(?:is|are)\s+(?:not|wrong|incorrect|false)\b)"
_STATED = (
    r"(?:answer|(?:correct|right|best)\s+(?:option|choice))(?:\s+(?:is|would\s+be|should\s+be))?"
    r"\s*[:=>]?\s*(?:option\b|choice\b)?[(\[\"'\s]*"
)


def make_rule(config: RuleReward | RowReward | MathReward) -> Rule:
    """Return the rule of a configuration. Raises: DataError if there is no such rule."""
    if isinstance(config, RowReward):
        return by_row(config)
    return named_rule(f"boxed_{config.type}" if config.boxed else config.type)


def named_rule(kind: str) -> Rule:
    """Return the rule of a name such as `dapo` or `boxed_f1`. Raises: DataError if unknown."""
    name = kind.removeprefix("boxed_")
    rule = _package_rule(name) or RULES.get(name)
    if rule is None:
        known = ", ".join([*RULES, "math", "reasoning_gym"])
        raise DataError(
            "no such reward",
            where="metadata.rm_type",
            found=kind,
            expected=f"{known}, each also with the prefix boxed_",
        )
    return _boxed(rule) if name != kind else rule


def by_row(config: RowReward) -> Rule:
    """Return a rule that applies the rule named by each row's `metadata.rm_type`."""
    rules: dict[str, Rule] = {}

    def rule(sample: Sample) -> dict[str, float]:
        kind = sample.metadata.get("rm_type") or config.default
        if not isinstance(kind, str):
            raise DataError(
                "the row names no reward rule",
                where="metadata.rm_type",
                found=kind,
                do="give every row a metadata.rm_type, or the run a default (--rm-type)",
            )
        name = kind.strip()
        if name not in rules:
            rules[name] = named_rule(name)
        return rules[name](sample)

    return rule


def dapo(sample: Sample) -> dict[str, float]:
    """Return DAPO's reward (arXiv 2503.14476). Raises: DataError without a label."""
    label = _label(sample)
    answers = re.findall(r"(?i)answer\s*:\s*([^\n]+)", sample.response[-300:])
    correct = bool(answers) and same(answers[-1], label)
    return {
        "reward": 1.0 if correct else -1.0,
        "acc": float(correct),
        "format": float(bool(answers)),
    }


def deepscaler(sample: Sample) -> dict[str, float]:
    """Return DeepScaleR's reward. Raises: DataError without a label."""
    label = _label(sample)
    solution = after_thinking(sample.response)
    answer = boxed(solution) if solution is not None else None
    if answer is None:
        return {"reward": 0.0, "format": 0.0}
    from rlpipe.rewards.math import equal  # math_verify takes about a second to import

    return {"reward": float(equal(answer, label)), "format": 1.0}


def f1(sample: Sample) -> dict[str, float]:
    """Return the harmonic mean of precision and recall of the words.

    `yes`, `no` and `noanswer` match only themselves. Raises: DataError without a label.

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
    """Return 1 if the response chooses the correct option of a multiple choice, else 0.

    The label is a letter, the number of a choice from 0, or the text of a choice in
    `metadata.choices`. `metadata.valid_letters` and `metadata.correct_letter` have precedence. A
    response without a letter is correct if it contains the text of the correct choice.

    Raises: DataError if the correct choice is unknown.
    """
    choices = _choices(sample.metadata)
    default_letters = LETTERS[: len(choices) or len(LETTERS)]
    valid_letters = sample.metadata.get("valid_letters") or default_letters
    letters = [str(letter).upper() for letter in valid_letters]
    correct = _correct_letter(sample, choices, letters)
    text = after_thinking(sample.response) or sample.response
    chosen = _chosen_letter(text, letters)
    if chosen is not None:
        return {"reward": float(chosen == correct), "format": 1.0}
    position = letters.index(correct)
    target = _simplified(choices[position]) if position < len(choices) else ""
    contained = bool(target) and f" {target} " in f" {_simplified(text)} "
    return {"reward": float(contained), "format": 0.0}


def by_chance(sample: Sample) -> dict[str, float]:
    """Return 0 or 1, reproducible for each sample: a baseline."""
    generator = random.Random(f"{sample.seed}/{sample.group_id}/{sample.index}")
    return {"reward": float(generator.getrandbits(1))}


RULES: dict[str, Rule] = {
    "dapo": dapo,
    "deepscaler": deepscaler,
    "f1": f1,
    "gpqa": gpqa,
    "random": by_chance,
}
"""Name → rule; the names of `RuleReward.type`."""


def _package_rule(name: str) -> Rule | None:
    """Return the rule `math` or `reasoning_gym`, None for another name."""
    # Imported here: their packages take about a second to import.
    if name == "math":
        from rlpipe.rewards.math import reward

        return reward
    if name == "reasoning_gym":
        from rlpipe.rewards.reasoning_gym import make_reward

        return make_reward(ReasoningGymReward(type="reasoning_gym"))
    return None


def _boxed(rule: Rule) -> Rule:
    """Return the rule applied to the content of the last box; the part `boxed` is 1 with a box."""

    def boxed_rule(sample: Sample) -> dict[str, float]:
        answer = boxed(sample.response)
        return {**rule(replace(sample, response=answer or "")), "boxed": float(answer is not None)}

    return boxed_rule


def _label(sample: Sample) -> str:
    label = text_label(sample)
    if not plain(label):
        raise DataError(
            "the row has no label to compare the response with",
            where="label",
            found=repr(sample.label),
        )
    return label


def _words(text: str) -> list[str]:
    """Return the words as SQuAD's evaluation script counts them.

    The text is lower-cased, ASCII punctuation is deleted (`U.S.A.` is `usa`, `1,000` is `1000`),
    and then articles are deleted.
    """
    # Other punctuation, such as a typographic apostrophe, stays: the published script keeps it.
    bare = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(?:a|an|the)\b", " ", bare).split()


def _simplified(text: str) -> str:
    """Return the lower-case words and numbers of a text, separated by single spaces."""
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()


def _choices(metadata: Mapping[str, Any]) -> list[str]:
    choices = metadata.get("choices") or []
    texts = choices.values() if isinstance(choices, dict) else choices
    return [str(text) for text in texts]


def _correct_letter(sample: Sample, choices: list[str], letters: list[str]) -> str:
    """Return the letter of the correct choice. Raises: DataError if it is unknown."""
    letter_of_row = sample.metadata.get("correct_letter")
    label = text_label(sample).strip()
    candidates = [str(letter_of_row or "").strip().upper(), label.upper()]
    if label.isdigit() and int(label) < len(letters):
        candidates.append(letters[int(label)])
    candidates += [
        letter
        for letter, choice in zip(letters, choices, strict=False)
        if label and _simplified(choice) == _simplified(label)
    ]
    correct = next((letter for letter in candidates if letter in letters), None)
    if correct is None:
        raise DataError(
            "the label does not identify the correct choice",
            where="label",
            found=repr(sample.label),
            expected=f"a letter of {''.join(letters)}, a choice's number from 0, or its text",
        )
    return correct


def _chosen_letter(text: str, letters: list[str]) -> str | None:
    """Return the letter of the last box, the last statement, or the last letter that stands alone.

    None if the text has none of them.
    """
    any_of = _letter_pattern(letters)
    if (box := boxed(text)) is not None:
        in_box = rf"^\s*(?:option\b|choice\b)?[(\s]*{any_of}(?:[).:,\s]|$)"
        letter = _last_match(in_box, _unformatted(box))
        if letter is not None:
            return letter
    bare = _unformatted(text)
    upper = "|".join(map(re.escape, letters))
    # In this order, a statement of the answer has precedence over a later mention of an option:
    # "The answer is B. Option C is too heavy." is B.
    patterns = (
        rf"{_STATED}{any_of}{_NOT_DENIED}",
        rf"(?:\b(?-i:({upper}))\)?|\(({upper})\))\s+is\s+(?:the\s+)?(?:correct|right|answer)",
        rf"\b(?:option|choice)\b[:(\s]*{any_of}{_NOT_DENIED}",
        rf"(?m:\b(?-i:({upper}))\b[).\s]*$|^[(\s]*({upper})[).\s]*$)",
    )
    matches = (_last_match(pattern, bare) for pattern in patterns)
    return next((letter for letter in matches if letter is not None), None)


def _unformatted(text: str) -> str:
    """Return the text in ASCII letters, without emphasis and LaTeX around letters."""
    return _EMPHASIS.sub("", unicodedata.normalize("NFKC", text))


def _letter_pattern(letters: list[str]) -> str:
    """Return the pattern of a letter, in either case, that names a choice and is not a word."""
    # A lower-case `a` or `i` in a sentence is a word ("the answer is a matter of taste"). It names
    # a choice only before punctuation or at the end of a line. `D-glucose`, `D's`: no choices.
    words = "|".join(re.escape(letter.lower()) for letter in letters if letter in "AI")
    others = "|".join(
        re.escape(letter)
        for upper in letters
        for letter in (upper, upper.lower())
        if letter not in ("a", "i")
    )
    word = rf"|(?-i:{words})(?=\s*(?:[).,;:!?\]<]|(?m:$)))" if words else ""
    return rf"((?-i:{others})\b(?!['’]|-\w){word})"


def _last_match(pattern: str, text: str) -> str | None:
    """Return the upper-case letter of the last match, None without a match."""
    last = None
    for match in re.finditer(pattern, text, re.IGNORECASE):
        last = match
    return next(group for group in last.groups() if group).upper() if last else None
