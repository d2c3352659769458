"""Read short mathematical answers without a computer algebra system.

    tidy(text)      one spelling for Unicode digits and signs, LaTeX spaces, `\\dfrac`, `$...$` and
                    punctuation at the end
    quantity(text)  a number with its unit: `1,000`, `1 000`, `1e3`, `7 3/4`, `50\\%`,
                    `5\\text{ cm}`, `1010_2`
    listed(text)    a tuple, interval, set or bare list, with every reading of its commas

Numbers are exact fractions. Malformed text is not read: `10,00` and `1 0 0 0` are no numbers. A
verifier that guesses would reward a policy for guessing.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

MAX_EXPONENT = 1000
MAX_NUMBER_LENGTH = 1000
"""Characters. Longer digit strings are compared as text: Python refuses integers above 4300
digits."""

_SIGNS = {
    "−": "-",
    "–": "-",
    "‐": "-",
    "‑": "-",
    "×": r"\times ",
    "·": r"\cdot ",
    "⋅": r"\cdot ",
    "÷": "/",
    "∕": "/",
    "⁄": "/",
    "π": r"\pi ",
    "∞": r"\infty ",
    "°": r"^\circ ",
    "√": r"\sqrt ",
    "±": r"\pm ",
    "∪": r"\cup ",
    "∩": r"\cap ",
    "≤": r"\le ",
    "≥": r"\ge ",
    "≠": r"\ne ",
    "∅": r"\emptyset ",
    "∈": r"\in ",
    "ℝ": r"\mathbb{R}",
    "’": "'",
    "′": "'",
    "“": '"',
    "”": '"',
    "⟨": r"\langle ",
    "⟩": r"\rangle ",
    "θ": r"\theta ",
}
"""Unicode signs and their ASCII or LaTeX spelling."""
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_WRAPPERS = r"\\(?:text|textbf|textit|textrm|mbox|mathrm|mathbf|mathit|operatorname)\s*\{"
_NAMES = (
    "pi|theta|alpha|beta|gamma|delta|lambda|mu|phi|sigma|omega|infty|infinity|inf|sqrt|sin|cos|tan|"
    "cot|sec|csc|arcsin|arccos|arctan|log|ln|exp|mod|gcd|lcm|max|min|det"
)
"""Names of constants and functions, which are no words."""
_COMMANDS = re.compile(
    r"(?<![\\A-Za-z])(pi|theta|alpha|beta|gamma|lambda|phi|omega|infty|infinity|sqrt)(?![A-Za-z])"
)


def tidy(text: str) -> str:
    """Return the answer in one spelling.

    LaTeX commands stay commands, and `\\text{...}` stays around words.
    """
    text = plain_letters(text.strip())
    text = re.sub(
        r"\\(?:left|right|big|Big|bigl|bigr|displaystyle|textstyle|limits)(?![A-Za-z])", "", text
    )
    text = re.sub(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", text)
    text = re.sub(r"\\!", "", text).replace("{,}", ",")
    text = re.sub(r"\\[,;: ]|~|\\q?quad(?![A-Za-z])", " ", text)
    text = re.sub(_WRAPPERS, r"\\text{", text)
    # `**` is Markdown emphasis at the start of an answer, otherwise Python's power.
    if text.startswith("**"):
        text = re.sub(r"\*\*(?=\S)(.*?)(?<=\S)\*\*", r"\1", text)
    else:
        text = text.replace("**", "^")
    text = _unwrapped(text)
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{", text)
    text = re.sub(r"(\\frac\{[^{}]*\})\s*(\d)", r"\1{\2}", text)
    text = re.sub(r"\\sqrt\s*(\w)", r"\\sqrt{\1}", text)
    text = _COMMANDS.sub(lambda match: "\\" + {"infinity": "infty"}.get(match[1], match[1]), text)
    text = re.sub(r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = re.sub(r"\^\s*(-?\d{2,})", r"^{\1}", text)
    return re.sub(r"\s+", " ", text).strip()


def plain_letters(text: str) -> str:
    """Return the text with Unicode digits, signs and blanks replaced by ASCII or LaTeX."""
    return text if text.isascii() else "".join(map(_plain_letter, text))


def _plain_letter(letter: str) -> str:
    """Return ASCII or LaTeX for a digit of any script, a full-width form, a blank or a sign."""
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
        fraction = Fraction(value).limit_denominator(10)
        return f" {fraction.numerator}/{fraction.denominator}"
    return letter


_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("{", "}"), ("`", "`"))


def _unwrapped(text: str) -> str:
    """Return the text without delimiters around the whole and without punctuation at its end."""
    before = None
    while text != before:
        before = text
        text = text.strip()
        # `5!` is a factorial.
        if not re.search(r"\d!$", text):
            text = re.sub(r"(?<!\\)[.,;:!](?:\s|$)*$", "", text)
        for left, right in _DELIMITERS:
            inner = text[len(left) : -len(right)]
            enclosed = (
                len(text) > len(left) + len(right)
                and text.startswith(left)
                and text.endswith(right)
                and not text.endswith("\\" + right)
            )
            if enclosed and left not in inner and right not in inner:
                text = inner
    return "" if set(text) <= set("$ ") else text


def words_of(text: str) -> str:
    """Return a tidy answer as lower-case words for comparison as text.

    The result has no `\\text{}`, no articles and single spaces.
    """
    bare = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text)
    bare = re.sub(r"\b(?:a|an|the)\s(?=\w{2})", "", bare.casefold())
    return re.sub(r"\s+", " ", bare.replace('"', "")).strip(" .")


def is_worded(text: str) -> bool:
    """True if a tidy answer is text and no formula.

    A text has a word of four letters or more, and no operator or command.
    """
    bare = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text)
    if re.search(r"[\\^=+*/<>|_]", bare):
        return False
    words = [
        word for word in re.findall(r"[^\W\d_]+", bare) if not re.fullmatch(_NAMES, word.casefold())
    ]
    return any(len(word) >= 4 for word in words)


@dataclass(frozen=True)
class Quantity:
    """A number with its unit."""

    value: Fraction
    text: str
    """The number without unit, in LaTeX for math-verify."""
    decimals: int | None = None
    """Digits after the decimal point. None for an integer, a fraction or an exponent."""
    unit: str = ""
    percent: bool = False

    def equals(self, label: Quantity) -> bool:
        """True if this answer equals the label.

        Units count only if both are known: `5 cm` equals `5` and not `5 m`. `50\\%` equals `50` and
        `0.5`. Decimals are exact, except that a number with six decimals or more also equals a
        number that rounds to it (`0.333333` for 1/3).
        """
        if self.unit and label.unit and self.unit != label.unit:
            return False
        pairs = [(self.value, label.value)]
        if self.percent != label.percent:
            own_value = self.value / (100 if self.percent else 1)
            label_value = label.value / (100 if label.percent else 1)
            pairs.append((own_value, label_value))
        return any(left == right or self._rounds_to(left, right, label) for left, right in pairs)

    def _rounds_to(self, left: Fraction, right: Fraction, label: Quantity) -> bool:
        decimals = [number.decimals for number in (self, label) if number.decimals is not None]
        has_fraction = any(
            number.decimals is None and number.value.denominator > 1 for number in (self, label)
        )
        if not decimals or (len(decimals) == 1 and not has_fraction) or min(decimals) < 6:
            return False
        return round(left, min(decimals)) == round(right, min(decimals))


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
    """Return the quantity of a tidy answer; None if the answer is not one quantity."""
    if len(text) > MAX_NUMBER_LENGTH:
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
            value, latex, decimals = number
            percent = unit == "%"
            named_unit = currency if percent or not unit else unit
            return Quantity(value, latex, decimals, named_unit, percent)
    return None


def _value(form: str, match: re.Match[str]) -> tuple[Fraction, str, int | None] | None:
    """Return (value, LaTeX, decimals) of a match; None if it is no number, such as 1/0."""
    sign = -1 if match[1] == "-" else 1
    if form == "plain":
        value = sign * _fraction(match[2])
        whole, point, decimals = _ungrouped(match[2]).partition(".")
        latex = f"{whole or 0}.{decimals}" if decimals else whole
        num_decimals = len(decimals) if point and decimals else None
        return value, f"{'-' if sign < 0 else ''}{latex}", num_decimals
    if form == "scientific":
        exponent = int(next(group for group in match.groups()[2:] if group is not None))
        if abs(exponent) > MAX_EXPONENT:
            return None
        value = sign * (_fraction(match[2]) if match[2] else 1) * Fraction(10) ** exponent
    elif form == "mixed":
        whole = int(match[2])
        numerator = int(match[3])
        denominator = int(match[4])
        if not 0 < numerator < denominator:
            return None
        value = sign * (whole + Fraction(numerator, denominator))
    else:
        dividend = _fraction(match[2])
        divisor = _fraction(match[3])
        if not divisor:
            return None
        value = sign * dividend / divisor
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
_UNIT_OF_SPELLING: dict[str, str] = {
    spelling: unit for unit, spellings in _UNITS.items() for spelling in spellings.split()
}


def _unit(rest: str) -> str | None:
    """Return the unit after a number.

    "" for no unit or an unknown one; None if the text is a formula.
    """
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
    if text.startswith(r"\text{"):
        return _canonical_unit(bare)
    # Without \text{} only a blank and known units or long words make a unit; `2x` is a formula.
    formula_names = _NAMES.split("|")
    are_words = all(
        name in _UNIT_OF_SPELLING or (len(name) >= 4 and name not in formula_names)
        for name in names
    )
    return _canonical_unit(bare) if rest.startswith(" ") and are_words else None


def _canonical_unit(bare: str) -> str:
    """Return a unit in one spelling, such as `cm^2` for `square centimeters`; "" if unknown."""
    bare = re.sub(r"\bper\b", "/", bare)
    bare = re.sub(r"\b(?:square|sq)\.? ([a-z]+)", r"\1 ^2", bare)
    bare = re.sub(r"\b(?:cubic|cu)\.? ([a-z]+)", r"\1 ^3", bare)
    bare = re.sub(r"([a-z]+) squared\b", r"\1 ^2", bare)
    parts: list[str] = re.findall(r"[a-z]+|\^-?\d+|/", bare)
    names = [part for part in parts if part.isalpha()]
    if not names or any(name not in _UNIT_OF_SPELLING for name in names):
        return ""
    return "".join(_UNIT_OF_SPELLING.get(part, part) for part in parts)


@dataclass(frozen=True)
class Listed:
    """The items of a tuple, interval, set or list, and its brackets ("" for a bare list)."""

    opening: str
    closing: str
    readings: tuple[tuple[str, ...], ...]
    """The items, once for each reading of the commas: `(1,200,3)` has two or three."""

    @property
    def ordered(self) -> bool:
        return self.opening in ("(", "[")


_CONNECTIVE = re.compile(
    r"\s*(?:,\s*(?:\\text\{\s*(?:and|or)\s*\}|and\b|or\b)"
    r"|\\text\{\s*(?:and|or)\s*\}|\b(?:and|or)\b|;)\s*"
)


def listed(text: str) -> Listed | None:
    """Return the list of a tidy answer; None if the answer has fewer than two items."""
    opening = closing = ""
    inner = re.sub(r"^\\langle(.*)\\rangle$", r"(\1)", text)
    for left, right in ((r"\{", r"\}"), ("(", ")"), ("(", "]"), ("[", ")"), ("[", "]")):
        if inner.startswith(left) and inner.endswith(right) and _closes_last(inner, left, right):
            opening = left.lstrip("\\")
            closing = right.lstrip("\\")
            inner = inner[len(left) : -len(right)].strip()
            break
    # Only sets and bare lists are written with `and` or `or`.
    if not opening or opening == "{":
        parts = _split(_CONNECTIVE.sub(",", inner))
    else:
        parts = _split(inner.replace(";", ","))
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
    """True if the last bracket of the text closes its first one."""
    depth = 0
    inner = text[len(left) : -len(right)]
    for letter in inner:
        depth += letter in "([{"
        depth -= letter in ")]}"
        if depth < 0:
            return False
    return depth == 0


def _split(text: str) -> list[str]:
    """Split the text at commas outside brackets; blanks are kept."""
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
    """Join items that a comma before exactly three digits separates: `1,200` is one number."""
    joined = parts[:1]
    for part in parts[1:]:
        thousands = re.fullmatch(r"\d{3}(?:\.\d+)?\s*", part)
        before = re.fullmatch(r"\s*[+-]?[1-9]\d{0,2}(?:,\d{3})*", joined[-1])
        if thousands and before:
            joined[-1] += f",{part}"
        else:
            joined.append(part)
    return joined
