"""Findings and notes of an audit, and reads that report an error instead of raising it.

Entry points: `Report`, `Finding`, `read_or_report`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from rlpipe.errors import ObjectCorrupt, ObjectMissing, StoreError
from rlpipe.store.objects.files import Files

Content = TypeVar("Content")


class Finding(NamedTuple):
    """One violation of a rule."""

    rule: str
    where: str
    problem: str


@dataclass
class Report:
    """The result of an audit."""

    findings: list[Finding] = field(default_factory=list)
    """Violations."""
    notes: list[Finding] = field(default_factory=list)
    """Observations that are no violations: leftovers of killed attempts, unchecked objects."""
    proof: object = None
    """What a held digest proves (`chain_check.Proof`); None without a digest, or if no commit has
    it."""

    def add_finding(self, rule: str, where: str, problem: str) -> None:
        """Add a violation."""
        self.findings.append(Finding(rule, where, problem))

    def add_note(self, rule: str, where: str, problem: str) -> None:
        """Add an observation."""
        self.notes.append(Finding(rule, where, problem))

    def merge(self, other: Report) -> None:
        """Add the content of another report."""
        self.findings += other.findings
        self.notes += other.notes
        self.proof = self.proof or other.proof

    def deduplicated(self) -> Report:
        """Return this report without repetitions."""
        return Report(
            list(dict.fromkeys(self.findings)), list(dict.fromkeys(self.notes)), self.proof
        )


def read_or_report(
    files: Files,
    findings: list[Finding],
    rule: str,
    where: str,
    read: Callable[[], Content],
    *,
    required: bool = True,
) -> Content | None:
    """Return the result of `read`; on an error add a finding and return None.

    `required`: a missing object is a finding too. Raises: StoreError if the store does not answer.
    """
    try:
        return read()
    except ObjectMissing as error:
        if required:
            findings.append(Finding(rule, where, str(error)))
    except ObjectCorrupt as error:
        findings.append(Finding(rule, where, str(error)))
    except StoreError as error:
        # The cause may be this object (a permission, a bad disk block) or the whole store.
        files.check_reachable()
        findings.append(Finding(rule, where, f"cannot be read: {error}"))
    return None


def format_ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text: `0 to 3, 7`."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(
        str(first) if first == last else f"{first} to {last}" for first, last in ranges
    )
