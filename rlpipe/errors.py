"""Every error rlpipe raises on purpose.

    RlpipeError
    ├── ConfigError      (ValueError)    a configuration key, flag or hook path is wrong
    ├── DataError        (ValueError)    a prompt file, a row or a dataset is wrong
    ├── StoreError                       the object store said no
    │   ├── ObjectMissing  (LookupError)   a named object is not there
    │   ├── ObjectCorrupt                  its bytes are not the recorded ones
    │   ├── ObjectConflict                 someone else wrote other content under the same name
    │   └── StoreFull                      no space left, or a quota is reached
    ├── EngineError                      an inference server or the router
    │   ├── EngineUnavailable              it does not answer
    │   └── EngineRejected                 it answered with an error
    ├── TrainerError                     the training ranks
    ├── ActorLost                        an actor's process is gone
    ├── SyncError                        weights did not arrive as they were sent
    ├── RewardError                      a verifier failed
    ├── HookError                        a function of the user failed, or gave back something else than it should
    ├── ResourceError                    a port, a disk, memory: the machine has not what is needed
    ├── Superseded                       what a stage was given is not what counts any more
    ├── Mismatch                         two things that must be equal are not: a replayed state, an engine's weights
    ├── GateClosed                       a figure is out of its bounds, and nobody lets the run go on
    ├── Fenced                           another driver owns this branch now
    └── DeadlineExceeded (TimeoutError)  something did not finish in its time

An error says *where* it happened (a dotted config key, a URI, `stage/actor/sample`), what was
*found*, what was
*expected* and what to *do*. All of them survive pickling, because they cross process boundaries.
"""

from __future__ import annotations


class RlpipeError(Exception):
    """Base of the tree: a problem, and optionally where / found / expected / what to do."""

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
    """The object store said no."""


class ObjectMissing(StoreError, LookupError):
    """A named object is not there."""


class ObjectCorrupt(StoreError):
    """An object's bytes are not the ones recorded when it was written."""


class ObjectConflict(StoreError):
    """Someone else wrote other content under the same name first."""


class StoreFull(StoreError):
    """No space left on the device, or a quota is reached."""


class EngineError(RlpipeError):
    """An inference server or the router failed."""


class EngineUnavailable(EngineError):
    """It does not answer: not started, dead or hung."""


class EngineRejected(EngineError):
    """It answered, with an error."""


class TrainerError(RlpipeError):
    """A training rank failed, or the ranks do not agree."""


class ActorLost(RlpipeError):
    """An actor's process is gone: killed, crashed, out of memory, or its place was taken away."""


class SyncError(RlpipeError):
    """The engine's weights are not the trainer's."""


class RewardError(RlpipeError):
    """A verifier raised, timed out or returned something that is not a reward."""


class HookError(RlpipeError):
    """A function of the user raised, was too late, or gave back something else than it should."""


class ResourceError(RlpipeError):
    """The machine has not what is needed: a port, disk, memory."""


class Mismatch(RlpipeError):
    """Two things that must be equal are not, and trying again cannot make them so."""


class Superseded(RlpipeError):
    """What a stage was given is not what counts any more: the stage before has to run again."""


class GateClosed(RlpipeError):
    """A figure is out of its bounds, and nobody has said that the run shall go on."""


class Fenced(RlpipeError):
    """Another driver owns this branch now; what we hold must not be written."""


class DeadlineExceeded(RlpipeError, TimeoutError):
    """Something did not finish in the time it was given; `where` says who."""
