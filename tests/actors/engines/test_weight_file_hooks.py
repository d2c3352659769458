"""User functions around weight files, through the pusher and the sync (weight_file_hooks)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlpipe.actors.engines.files_sync import FilesSync
from rlpipe.actors.engines.fleet import Receivers
from rlpipe.actors.trainer.pushing import Pusher
from rlpipe.config.run import RunConfig
from rlpipe.errors import SyncError
from rlpipe.slime.args import slime_args
from tests.actors.engines.through_files import Kept, weights
from tests.live_engine import make_model

URL = "http://127.0.0.1:9"
HOOKS = """
import json
from pathlib import Path

def publish(args, version_dir, rollout_engines):
    files = sorted(path.name for path in Path(version_dir).iterdir())
    note("publish", args.update_weight_transport, version_dir, files, rollout_engines)

def refresh(source_dir, target_version):
    note("refresh", source_dir, target_version)

def fails(source_dir, target_version):
    raise OSError("the volume is not mounted")

def note(*what):
    with open(Path(__file__).with_name("calls.jsonl"), "a") as file:
        file.write(json.dumps(what) + "\\n")
"""


class Ranks:
    """As a trainer group of two ranks with real pushers."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        model = make_model(folder / "model", seed=41)
        tensors = {
            name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"
        }
        engine: Any = SimpleNamespace(named_hf_tensors=lambda: iter(tensors.items()))
        spec: Any = SimpleNamespace(
            model_dir=str(folder / "model"),
            store_root=str(folder / "store"),
            work_dir=str(folder / "work"),
            engine_quantization=None,
            engine_tensor_parallel_size=1,
            train=config.train,
            hook_args=slime_args(config),
        )
        self.pushers = [Pusher(engine, spec, rank=rank, world_size=2) for rank in range(2)]

    async def call(self, method: str, *, deadline_s: float, held: str = "", **others: Any) -> list:
        if method == "remembers":
            return [pusher.remembered for pusher in self.pushers]
        return [pusher.write(**others) for pusher in self.pushers]


@asynccontextmanager
async def nothing() -> AsyncIterator[None]:
    yield


async def push(folder: Path, pre_read: str) -> list[list[Any]]:
    """Push to an engine that does not answer; return the calls of the functions."""
    hooks = folder / "mine.py"
    hooks.write_text(HOOKS)
    config = RunConfig.model_validate(
        {
            "run": "pushed",
            "num_rollout": 1,
            "model": {"source": {"type": "made", "maker": "maker.py:make"}},
            "data": {"prompts": {"type": "reasoning_gym", "task": "spell_backward", "size": 8}},
            "reward": {"function": {"type": "math"}},
            "rollout": {"rollout_batch_size": 2, "n_samples_per_prompt": 2},
            "sync": {
                "transport": "delta",
                "timeout_s": 20.0,
                "update_weight_buffer_size": 100_000,
                "custom_update_weight_post_write_path": f"{hooks}:publish",
                "custom_pull_weights_pre_read_path": f"{hooks}:{pre_read}",
            },
        }
    )
    spec: Any = SimpleNamespace(
        config=config, store_root=str(folder / "store"), home=str(folder / "home")
    )
    group = Ranks(config, folder)

    @asynccontextmanager
    async def trainer() -> AsyncIterator[Any]:
        yield group

    async def begin_push(urls: Sequence[str]) -> list[str]:
        return list(urls)

    async def end_push(unknown: Mapping[str, str]) -> None:
        assert not unknown

    to = Receivers(lambda: [URL], begin_push, end_push, idle=True)
    engines = cast("Any", [Kept(URL)])
    files = FilesSync(spec, "cluster")
    with pytest.raises(SyncError) as caught:
        await files.send(weights(3), to, engines, trainer=trainer, loading=nothing)
    calls = (folder / "calls.jsonl").read_text().splitlines()
    return [*map(json.loads, calls), [str(caught.value)]]


async def test_every_writer_publishes_its_files_and_every_machine_refreshes(tmp_path: Path):
    *calls, (error,) = await push(tmp_path, "refresh")
    assert URL in error
    published, (refreshed,) = calls[:-1], calls[-1:]
    folder = published[0][2]
    assert Path(folder).name.startswith("weight_v000003-")
    assert [call[:3] for call in published] == [["publish", "disk", folder]] * 3
    assert [call[4] for call in published] == [[URL]] * 3
    # The first rank has written its files, then both ranks theirs, then the record is there.
    first, both, all_files = (set(call[3]) for call in published)
    assert first < both < all_files
    assert "version.json" in all_files - both
    assert refreshed == ["refresh", str(Path(folder).parent), 3]


async def test_a_function_that_raises_is_named_in_the_error_of_the_push(tmp_path: Path):
    *_, (error,) = await push(tmp_path, "fails")
    assert "sync.custom_pull_weights_pre_read_path" in error
    assert "OSError: the volume is not mounted" in error
