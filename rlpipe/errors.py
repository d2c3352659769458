"""All errors that rlpipe raises on purpose.

    RlpipeError
    ├── ConfigError      (ValueError)    a configuration key, flag or hook path is wrong
    ├── DataError        (ValueError)    a prompt file, a row or a dataset is wrong
    ├── StoreError                       an operation of the object store failed
    │   ├── ObjectMissing  (LookupError)   an object does not exist
    │   ├── ObjectCorrupt                  an object's bytes differ from the recorded ones
    │   ├── ObjectConflict                 another process wrote other content under the name
    │   └── StoreFull                      no space left, or a quota is reached
    ├── EngineError                      an inference server or the router
    │   ├── EngineUnavailable              the server does not answer
    │   └── EngineRejected                 the server answered with an error
    ├── TrainerError                     the training ranks
    ├── ActorLost                        an actor's process is gone
    ├── SyncError                        engines did not get the weights
    ├── RewardError                      a verifier failed
    ├── HookError                        a user function failed, or returned a wrong value
    ├── ResourceError                    a port, disk space or memory is missing
    ├── Superseded                       the input of a stage is outdated
    ├── Mismatch                         two values differ that must be equal, as a replayed state
    ├── GateClosed                       a metric is out of bounds, and the run was not continued
    ├── Fenced                           another driver owns the branch now
    └── DeadlineExceeded (TimeoutError)  an operation exceeded its deadline

A message gives the problem, *where* it happened (a dotted config key, a URI,
`stage/actor/sample`), what was *found* and *expected*, and what to *do*. Errors can be pickled:
they cross process boundaries.
"""

from __future__ import annotations

import re


class RlpipeError(Exception):
    """Base of all errors: a problem, and optionally where, found, expected and what to do."""

    def __init__(
        self,
        problem: str,
        *,
        where: str | None = None,
        found: object = None,
        expected: object = None,
        do: str | None = None,
    ) -> None:
        self.problem = problem
        self.where = where
        self.found = found
        self.expected = expected
        self.do = do
        super().__init__(problem)

    @property
    def kind(self) -> str:
        """Name of the error in front of its text in a terminal."""
        return type(self).__name__

    def __str__(self) -> str:
        text = f"{self.where}: {self.problem}" if self.where else self.problem
        for label, value in (("found", self.found), ("expected", self.expected), ("do", self.do)):
            if value is not None:
                text += f"\n  {label + ':':<10}{value}"
        return "\n".join([text, *(f"  ({note})" for note in getattr(self, "__notes__", ()))])

    def __reduce__(self):
        details = {
            "where": self.where,
            "found": self.found,
            "expected": self.expected,
            "do": self.do,
        }
        return _rebuild, (type(self), self.problem, details, list(getattr(self, "__notes__", ())))


def one_line(message: str) -> str:
    """Return the text of an error with its fields (found, expected, do) in one line."""
    return re.sub(r"\n +(found|expected|do): +", r"; \1 ", message)


def _rebuild(kind: type[RlpipeError], problem: str, details: dict, notes: list[str]) -> RlpipeError:
    error = kind(problem, **details)
    for note in notes:
        error.add_note(note)
    return error


class ConfigError(RlpipeError, ValueError):
    """A configuration key, flag or hook path is wrong."""


class DataError(RlpipeError, ValueError):
    """A prompt file, a row or a dataset is wrong."""


class StoreError(RlpipeError):
    """An operation of the object store failed."""


class ObjectMissing(StoreError, LookupError):
    """An object does not exist."""


class ObjectCorrupt(StoreError):
    """An object's bytes differ from those recorded when it was written."""


class ObjectConflict(StoreError):
    """Another process wrote other content under the same name first."""


class StoreFull(StoreError):
    """The device has no space left, or a quota is reached."""


class EngineError(RlpipeError):
    """An inference server or the router failed."""


class EngineUnavailable(EngineError):
    """The server does not answer: not started, dead or hung."""


class EngineRejected(EngineError):
    """The server answered with an error, or with an unreadable answer."""


class TrainerError(RlpipeError):
    """A training rank failed, or the ranks do not agree."""


class ActorLost(RlpipeError):
    """An actor's process is gone: killed, crashed, out of memory, or its resources were removed."""


class SyncError(RlpipeError):
    """An engine did not get the trainer's weights."""


class RewardError(RlpipeError):
    """A verifier raised, timed out or returned something that is not a reward."""


class HookError(RlpipeError):
    """A user function raised, exceeded its deadline, or returned a wrong value."""


class ResourceError(RlpipeError):
    """The machine lacks a resource: a port, disk space or memory."""


class Mismatch(RlpipeError):
    """Two values that must be equal differ, and a retry cannot change that."""


class Superseded(RlpipeError):
    """The input of a stage is outdated: the previous stage must run again."""


class GateClosed(RlpipeError):
    """A metric is out of bounds, and the run was not continued."""


class Fenced(RlpipeError):
    """Another driver owns this branch now. This process must not write to it."""

    @property
    def kind(self) -> str:
        """Return a word that needs no knowledge of fencing."""
        return "InUse"


class DeadlineExceeded(RlpipeError, TimeoutError):
    """An operation exceeded its deadline. `where` names the operation."""
