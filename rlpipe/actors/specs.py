"""Settings that drivers pass to the actors of a cluster.

Imports neither torch nor Ray, because flow processes use it.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlpipe.config.run import RunConfig


@dataclass(frozen=True)
class ClusterSpec:
    """Settings of all actors of a run."""

    config: RunConfig
    home: str
    model_dir: str
    store_root: str

    @property
    def branch(self) -> tuple[str, str]:
        """Store and run: equal for all specs of one run."""
        return self.store_root, self.config.run


@dataclass(frozen=True)
class GeneratorSpec:
    """Settings of a generator. An equal spec needs no second set-up."""

    config: RunConfig
    model_dir: str
    store_root: str
