"""Data sources and buffer filters of users (rlpipe.data.user_source)."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from rlpipe.data.user_source import BufferFilter, CustomSource
from rlpipe.types import Sample

SOURCE = """
from rlpipe.slime.sample import Sample

class Source:
    calls = []

    def __init__(self, args):
        self.position = 0

    def get_samples(self, number):
        self.position += number
        return [[Sample(prompt=f"p{self.position - number + k}")] for k in range(number)]

    def save(self, rollout_id):
        self.calls.append(("save", rollout_id))

    def load(self, rollout_id):
        self.calls.append(("load", rollout_id))
        self.position = 100 * (rollout_id + 1)

def keep(args, rollout_id, buffer, num_samples):
    assert rollout_id == args.start_rollout_id + 3
    return []
"""


def prompts(source: CustomSource, number: int, drawn: int, iteration: int) -> list[object]:
    return [row.prompt for row in source.draw(number, drawn=drawn, iteration=iteration)]


def source(folder: Path, done: int) -> CustomSource:
    (folder / "mine.py").write_text(SOURCE)
    return CustomSource(f"{folder / 'mine.py'}:Source", Namespace(start_rollout_id=done))


def test_a_source_is_loaded_once_with_the_last_iteration_of_slime(tmp_path: Path):
    continued = source(tmp_path, 7)
    assert prompts(continued, 2, 0, 0) == ["p700", "p701"]
    assert prompts(continued, 1, 2, 1) == ["p702"]
    assert continued.user.calls == [("load", 6), ("save", 7), ("save", 8)]
    # A new process restores the position of the branch.
    assert prompts(source(tmp_path, 7), 1, 3, 2) == ["p900"]


def test_a_source_of_a_new_run_is_not_loaded(tmp_path: Path):
    new = source(tmp_path, 0)
    assert prompts(new, 1, 0, 0) == ["p0"]
    assert new.user.calls == [("save", 0)]


def test_a_buffer_filter_gets_slimes_number_of_the_iteration(tmp_path: Path):
    source(tmp_path, 0)
    chooser = BufferFilter(f"{tmp_path / 'mine.py'}:keep", Namespace(start_rollout_id=7))
    group = [Sample(group_id="g", index=0, prompt="p", prompt_ids=[])]
    assert chooser.choose(3, [group], 1) == ([], ["g"])
