"""Which uploads of checkpoints a run takes for its own (tasks.uploads)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rlpipe.actors.checkpoints import Upload
from rlpipe.inputs import checkpoint_inputs
from tasks.uploads import pending


class Ranks:
    """The first still has an upload of a run, the second has none."""

    def __init__(self, run: str) -> None:
        self.upload = Upload(f"checkpoints/{run}/iter_0000001/a", checkpoint_inputs("w"), {"version": 1})

    async def call(self, method: str, *, deadline_s: float) -> list[Any]:
        return [(self.upload, True), None]


@pytest.mark.parametrize(("run", "own"), [("run", True), ("run2", False), ("other", False)])
async def test_an_upload_that_another_run_left_in_the_ranks_is_not_recorded(run: str, own: bool):
    ranks = Ranks(run)
    config = SimpleNamespace(run="run", checkpoint=SimpleNamespace(timeout_s=1.0))
    it: Any = SimpleNamespace(config=config, cluster=SimpleNamespace(trainer=ranks))
    assert await pending(it) == ((ranks.upload, True) if own else None)
