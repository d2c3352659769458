"""The environment of the recipe `guess_digit`: find a digit with the answers `+` and `-`."""

from __future__ import annotations

import random
from typing import Any

PREFIX = "Guess the digit: "
"""The first observation; one token of the recipe's model."""


class GuessDigit:
    """One game. The digit is decided by the seed.

    The reward of a guess is 1 if it is the digit. A wrong digit costs nothing and shows if the
    digit is higher (`+`) or lower (`-`). Another text ends the game.
    """

    def reset(self, *, seed: int, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Choose the digit. Return the first observation."""
        self._digit = random.Random(seed).randrange(10)
        return PREFIX, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Judge one guess."""
        if len(action) != 1 or action not in "0123456789":
            return "", 0.0, True, False, {"reward_parts": {"digits": 0.0}}
        guess = int(action)
        found = guess == self._digit
        answer = "" if found else "+" if guess < self._digit else "-"
        return answer, float(found), found, False, {"reward_parts": {"digits": 1.0}}
