"""Reading short mathematical answers without a computer algebra system: notation, quantities,
lists.

    tidy(text)      one spelling for Unicode digits and signs, LaTeX spaces, `\\dfrac`, `$...$`, trailing punctuation
    quantity(text)  a number with its unit: `1,000`, `1 000`, `1e3`, `7 3/4`, `50\\%`, `5\\text{ cm}`, `1010_2`
    listed(text)    a tuple, interval, set or bare list, with every reading of its commas

Numbers are exact fractions. What is not well formed is not read at all: `10,00` and `1 0 0 0` are
no numbers, because a verifier that guesses pays a policy for guessing.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

LARGEST_EXPONENT = 1000
LONGEST_NUMBER = 1000
"""Characters. Longer digit strings are compared as text: Python refuses to read integers of more
than 4300 digits."""

_SIGNS = {
    "−": "-", "–": "-", "‐": "-", "‑": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "∕": "/",
    "⁄": "/", "π": r"\pi ", "∞": r"\infty ", "°": r"^\circ ", "√": r"\sqrt ", "±": r"\pm ", "∪": r"\cup ",
    "∩": r"\cap ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∅": r"\emptyset ", "∈": r"\in ", "ℝ": r"\mathbb{R}",
    "’": "'", "′": "'", "“": '"', "”": '"', "⟨": r"\langle ", "⟩": r"\rangle ", "θ": r"\theta ",
}  # fmt: skip
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_WRAPPERS = r"\\(?:text|textbf|textit|textrm|mbox|mathrm|mathbf|mathit|operatorname)\s*\{"
_NAMES = (
    "pi|theta|alpha|beta|gamma|delta|lambda|mu|phi|sigma|omega|infty|infinity|inf|sqrt|sin|cos|tan|cot|sec|csc|"
    "arcsin|arccos|arctan|log|ln|exp|mod|gcd|lcm|max|min|det"
)
_COMMANDS = re.compile(
    r"(?<![\\A-Za-z])(pi|theta|alpha|beta|gamma|lambda|phi|omega|infty|infinity|sqrt)(?![A-Za-z])"
)


def tidy(text: str) -> str:
    """The same answer in one spelling. LaTeX commands stay commands, and `\\text{...}` stays around
    words."""
    text = plain_letters(text.strip())
    text = re.sub(
        r"\\(?:left|right|big|Big|bigl|bigr|displaystyle|textstyle|limits)(?![A-Za-z])", "", text
    )
    text = re.sub(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", text)
    text = re.sub(r"\\!", "", text).replace("{,}", ",")
    text = re.sub(r"\\[,;: ]|~|\\q?quad(?![A-Za-z])", " ", text)
    text = re.sub(_WRAPPERS, r"\\text{", text)
    text = (
        re.sub(r"\*\*(?=\S)(.*?)(?<=\S)\*\*", r"\1", text)
        if text.startswith("**")
        else text.replace("**", "^")
    )
    text = _unwrapped(text)
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{", text)
    text = re.sub(r"(\\frac\{[^{}]*\})\s*(\d)", r"\1{\2}", text)
    text = re.sub(r"\\sqrt\s*(\w)", r"\\sqrt{\1}", text)
    text = _COMMANDS.sub(lambda found: "\\" + {"infinity": "infty"}.get(found[1], found[1]), text)
    text = re.sub(r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = re.sub(r"\^\s*(-?\d{2,})", r"^{\1}", text)
    return re.sub(r"\s+", " ", text).strip()


def plain_letters(text: str) -> str:
    """The text with digits, signs and blanks that only look different in ASCII or LaTeX."""
    return text if text.isascii() else "".join(map(_plain_letter, text))


def _plain_letter(letter: str) -> str:
    """ASCII for a letter that only looks different: digits of any script, full-width forms, spaces,
    signs."""
    if letter.isascii():
        return letter
    if letter in _SIGNS:
        return _SIGNS[letter]
    category = unicodedata.category(letter)
    if category == "Nd":
        return str(unicodedata.decimal(letter))
    if category == "Zs":
        return " "
    if category == "Cf":
        return ""
    if 0xFF01 <= ord(letter) <= 0xFF5E:
        return chr(ord(letter) - 0xFEE0)
    if letter.translate(_SUPERSCRIPTS) != letter:
        return "^{" + letter.translate(_SUPERSCRIPTS) + "}"
    if (
        category == "No"
        and (value := unicodedata.numeric(letter, None)) is not None
        and 0 < value < 1
    ):
        half = Fraction(value).limit_denominator(10)
        return f" {half.numerator}/{half.denominator}"
    return letter


def _unwrapped(text: str) -> str:
    """Without what encloses the whole: `$...$`, `\\(...\\)`, `\\[...\\]`, braces; and without
    punctuation at the end."""
    before = None
    while text != before:
        before = text
        text = text.strip()
        text = (
            re.sub(r"(?<!\\)[.,;:!](?:\s|$)*$", "", text) if not re.search(r"\d!$", text) else text
        )
        for left, right in (
            ("$$", "$$"),
            ("$", "$"),
            (r"\(", r"\)"),
            (r"\[", r"\]"),
            ("{", "}"),
            ("`", "`"),
        ):
            inner = text[len(left) : -len(right)]
            enclosed = (
                len(text) > len(left) + len(right)
                and text.startswith(left)
                and text.endswith(right)
            )
            if (
                enclosed
                and not text.endswith("\\" + right)
                and left not in inner
                and right not in inner
            ):
                text = inner
    return "" if set(text) <= set("$ ") else text


def words_of(text: str) -> str:
    """A tidy answer as lower-case words, to be compared as text: no `\\text{}`, no articles, single
    spaces."""
    bare = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text)
    bare = re.sub(r"\b(?:a|an|the)\s(?=\w{2})", "", bare.casefold())
    return re.sub(r"\s+", " ", bare.replace('"', "")).strip(" .")


def is_worded(text: str) -> bool:
    """True if a tidy answer is text and no formula: it has a word of four letters, and no operator
    or command."""
    bare = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text)
    if re.search(r"[\\^=+*/<>|_]", bare):
        return False
    words = [
        word for word in re.findall(r"[^\W\d_]+", bare) if not re.fullmatch(_NAMES, word.casefold())
    ]
    return any(len(word) >= 4 for word in words)


@dataclass(frozen=True)
class Quantity:
    """A number, and what stands after it."""

    value: Fraction
    text: str
    """The number alone, in LaTeX that math-verify reads."""
    decimals: int | None = None
    """Digits after the decimal point; None: written as an integer, a fraction or with an
    exponent."""
    unit: str = ""
    percent: bool = False

    def equals(self, label: Quantity) -> bool:
        """True if this answer is the label's number.

        Units decide only if both have one that is known: `5 cm` is not `5 m`, and it is `5`. A
        percentage may be meant by its number or by its value, so `50\\%` is `50` and `0.5`.
        Decimals are exact, but a number with six decimals or more is also what the other one rounds
        to (`0.333333` for 1/3).
        """
        if self.unit and label.unit and self.unit != label.unit:
            return False
        pairs = [(self.value, label.value)]
        if self.percent != label.percent:
            pairs.append(
                (
                    self.value / (100 if self.percent else 1),
                    label.value / (100 if label.percent else 1),
                )
            )
        return any(left == right or self._rounds_to(left, right, label) for left, right in pairs)

    def _rounds_to(self, left: Fraction, right: Fraction, label: Quantity) -> bool:
        places = [number.decimals for number in (self, label) if number.decimals is not None]
        inexact = any(
            number.decimals is None and number.value.denominator > 1 for number in (self, label)
        )
        if not places or (len(places) == 1 and not inexact) or min(places) < 6:
            return False
        return round(left, min(places)) == round(right, min(places))


_GROUPED = r"[1-9]\d{0,2}(?:,\d{3})+|[1-9]\d{0,2}(?: \d{3})+|[1-9]\d{0,2}(?:'\d{3})+"
_NUMBER = rf"(?:(?:{_GROUPED}|\d+)(?:\.\d*)?|\.\d+)"
_POWER = r"10\s*\^\s*(?:\{\s*([+-]?\d+)\s*\}|([+-]?\d))"
_TIMES = r"\s*(?:\\times|\\cdot|\*|x)\s*"
_SIGN = r"([+-]?)\s*"
_FORMS = (
    (
        "fraction",
        re.compile(
            rf"{_SIGN}\\frac\s*\{{\s*([+-]?\s*{_NUMBER})\s*\}}\s*\{{\s*([+-]?\s*{_NUMBER})\s*\}}"
        ),
    ),
    ("fraction", re.compile(rf"{_SIGN}({_NUMBER})\s*/\s*({_NUMBER})")),
    ("mixed", re.compile(rf"{_SIGN}(\d+)\s*\\frac\s*\{{\s*(\d+)\s*\}}\s*\{{\s*(\d+)\s*\}}")),
    ("mixed", re.compile(rf"{_SIGN}(\d+)(?: |\s*-\s*)(\d+)\s*/\s*(\d+)")),
    ("scientific", re.compile(rf"{_SIGN}({_NUMBER})[eE]([+-]?\d+)(?![\w.])")),
    ("scientific", re.compile(rf"{_SIGN}({_NUMBER}){_TIMES}{_POWER}")),
    ("scientific", re.compile(rf"{_SIGN}(){_POWER}")),
    ("plain", re.compile(rf"{_SIGN}({_NUMBER})")),
)


def quantity(text: str) -> Quantity | None:
    """The quantity that a tidy answer is, as a whole; None if it is something else."""
    if len(text) > LONGEST_NUMBER:
        return None
    text = re.sub(r"^([+-]?)\s*(?:\\?\$|[€£¥₹]|USD\s)\s*", r"\1", text)
    currency = "" if text[:1] != "$" else "dollar"
    for form, pattern in _FORMS:
        if (match := pattern.match(text)) is None:
            continue
        rest = text[match.end() :]
        unit = _unit(rest)
        number = _value(form, match) if unit is not None else None
        if number is not None and unit is not None:
            value, written, decimals = number
            percent = unit == "%"
            return Quantity(
                value, written, decimals, currency if percent or not unit else unit, percent
            )
    return None


def _value(form: str, match: re.Match[str]) -> tuple[Fraction, str, int | None] | None:
    """(value, LaTeX, decimals) of a match; None if it is no number after all, such as 1/0."""
    sign = -1 if match[1] == "-" else 1
    if form == "plain":
        value = sign * _fraction(match[2])
        whole, point, after = _ungrouped(match[2]).partition(".")
        written = f"{whole or 0}.{after}" if after else whole
        return value, f"{'-' if sign < 0 else ''}{written}", len(after) if point and after else None
    if form == "scientific":
        exponent = int(next(group for group in match.groups()[2:] if group is not None))
        if abs(exponent) > LARGEST_EXPONENT:
            return None
        value = sign * (_fraction(match[2]) if match[2] else 1) * Fraction(10) ** exponent
    elif form == "mixed":
        whole = int(match[2])
        above = int(match[3])
        below = int(match[4])
        if not 0 < above < below:
            return None
        value = sign * (whole + Fraction(above, below))
    else:
        above = _fraction(match[2])
        below = _fraction(match[3])
        if not below:
            return None
        value = sign * above / below
    return value, _latex(value), None


def _fraction(number: str) -> Fraction:
    bare = _ungrouped(number)
    return Fraction(bare + "0" if bare.endswith(".") else bare)


def _ungrouped(number: str) -> str:
    return re.sub(r"[, ']", "", number)


def _latex(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    return rf"{'-' if value < 0 else ''}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


_UNITS = {
    "degree": "deg degree degrees",
    "percent": "percent percentage pct",
    "mm": "mm millimeter millimeters millimetre millimetres",
    "cm": "cm centimeter centimeters centimetre centimetres",
    "m": "m meter meters metre metres",
    "km": "km kilometer kilometers kilometre kilometres",
    "in": "inch inches",
    "ft": "ft foot feet",
    "yd": "yd yard yards",
    "mi": "mi mile miles",
    "g": "g gm gram grams",
    "kg": "kg kilogram kilograms",
    "lb": "lb lbs pound pounds",
    "s": "s sec secs second seconds",
    "min": "minute minutes mins",
    "h": "h hr hrs hour hours",
    "day": "day days",
    "week": "week weeks",
    "month": "month months",
    "year": "year years",
    "ml": "ml milliliter milliliters",
    "l": "l liter liters litre litres",
    "dollar": "dollar dollars usd",
    "cent": "cent cents",
    "mph": "mph",
    "j": "j joule joules",
    "n": "newton newtons",
    "w": "watt watts",
    "rad": "rad radian radians",
}
_KNOWN: dict[str, str] = {
    spelling: unit for unit, spellings in _UNITS.items() for spelling in spellings.split()
}


def _unit(rest: str) -> str | None:
    """The unit after a number: "" if there is none or it is not one we know, None if this is no
    unit but a formula."""
    text = rest.strip()
    if not text:
        return ""
    if text in ("%", r"\%") or words_of(text) in ("percent", "percentage", "pct"):
        return "%"
    if base := re.fullmatch(r"_\s*\{?\s*(?:\\text\{)?\s*(\d+)\s*\}*", text):
        return f"base {base[1]}"
    if degrees := re.fullmatch(r"\^\s*\{?\s*\\circ\s*\}?\s*(?:\\text\{)?\s*([CFK]?)\s*\}?", text):
        return f"degree{degrees[1].lower()}"
    bare = words_of(re.sub(r"\\cdot|\^\s*\{?\s*(-?\d+)\s*\}?", r" ^\1 ", text))
    if not re.fullmatch(r"[a-z][a-z ./^\d-]*", bare):
        return None
    names = re.findall(r"[a-z]+", bare)
    spaced = rest.startswith(" ") or text.startswith(r"\text{")
    if not spaced or not (
        text.startswith(r"\text{")
        or all(n in _KNOWN or (len(n) >= 4 and n not in _NAMES.split("|")) for n in names)
    ):
        return None
    return _canonical(bare)


def _canonical(bare: str) -> str:
    """A unit in one spelling, such as `cm^2` for `square centimeters`; "" if a part of it is not
    known."""
    bare = re.sub(r"\bper\b", "/", bare)
    bare = re.sub(r"\b(?:square|sq)\.? ([a-z]+)", r"\1 ^2", bare)
    bare = re.sub(r"\b(?:cubic|cu)\.? ([a-z]+)", r"\1 ^3", bare)
    bare = re.sub(r"([a-z]+) squared\b", r"\1 ^2", bare)
    parts: list[str] = re.findall(r"[a-z]+|\^-?\d+|/", bare)
    names = [part for part in parts if part.isalpha()]
    if not names or any(name not in _KNOWN for name in names):
        return ""
    return "".join(_KNOWN.get(part, part) for part in parts)


@dataclass(frozen=True)
class Listed:
    """The items of a tuple, interval, set or list, and its brackets ("" for a bare list)."""

    opening: str
    closing: str
    readings: tuple[tuple[str, ...], ...]
    """The items, once for each way to read its commas: `(1,200,3)` has two or three."""

    @property
    def ordered(self) -> bool:
        return self.opening in ("(", "[")


_CONNECTED = re.compile(
    r"\s*(?:,\s*(?:\\text\{\s*(?:and|or)\s*\}|and\b|or\b)|\\text\{\s*(?:and|or)\s*\}|\b(?:and|or)\b|;)\s*"
)


def listed(text: str) -> Listed | None:
    """The list that a tidy answer is, of two items or more; None if it is something else."""
    opening = closing = ""
    inner = re.sub(r"^\\langle(.*)\\rangle$", r"(\1)", text)
    for left, right in ((r"\{", r"\}"), ("(", ")"), ("(", "]"), ("[", ")"), ("[", "]")):
        if inner.startswith(left) and inner.endswith(right) and _closes_last(inner, left, right):
            opening = left.lstrip("\\")
            closing = right.lstrip("\\")
            inner = inner[len(left) : -len(right)].strip()
            break
    parts = _split(
        _CONNECTED.sub(",", inner) if not opening or opening == "{" else inner.replace(";", ",")
    )
    if len(parts) < 2 or not all(part.strip() for part in parts):
        return None
    separate = tuple(part.strip() for part in parts)
    grouped = tuple(part.strip() for part in _grouped(parts))
    readings = [grouped]
    if separate != grouped and not any(re.fullmatch(r"0\d\d", part) for part in separate):
        readings.append(separate)
    readings = [reading for reading in readings if len(reading) > 1]
    return Listed(opening, closing, tuple(readings)) if readings else None


def _closes_last(text: str, left: str, right: str) -> bool:
    """True if the bracket that opens the text is closed by its last one."""
    depth = 0
    inner = text[len(left) : -len(right)]
    for letter in inner:
        depth += letter in "([{"
        depth -= letter in ")]}"
        if depth < 0:
            return False
    return depth == 0


def _split(text: str) -> list[str]:
    """The text at its commas outside brackets; blanks are kept."""
    parts = [""]
    depth = 0
    for letter in text:
        depth += letter in "([{"
        depth -= letter in ")]}"
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _grouped(parts: list[str]) -> list[str]:
    """Items where a comma without a blank before three digits separates thousands."""
    joined = parts[:1]
    for part in parts[1:]:
        thousands = re.fullmatch(r"\d{3}(?:\.\d+)?\s*", part)
        before = re.fullmatch(r"\s*[+-]?[1-9]\d{0,2}(?:,\d{3})*", joined[-1])
        if thousands and before:
            joined[-1] += f",{part}"
        else:
            joined.append(part)
    return joined
