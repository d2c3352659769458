"""The samples that fit on one page of the viewer (rlpipe.lineage.sample_sets)."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from rlpipe.config.load import validate_stored
from rlpipe.lineage import sample_sets
from rlpipe.lineage.history import HistoryReader
from rlpipe.lineage.sample_sets import Source, choose_groups, spread, write_run_samples
from rlpipe.store.branches import Branches
from rlpipe.store.objects.files import Files
from tests.stores.unpacked import unpack


def test_the_newest_the_oldest_and_the_middles_come_first():
    sources = [Source(k) for k in range(9)]
    assert [source.iteration for source in spread(sources)] == [8, 0, 4, 2, 6, 1, 3, 5, 7]
    assert [source.iteration for source in spread(sources[:2])] == [1, 0]
    assert spread([]) == []
    assert len(set(spread([Source(k) for k in range(2000)]))) == 2000


def rows(groups: dict[str, tuple[float | None, ...]]) -> pa.Table:
    flat = [(name, reward) for name, rewards in groups.items() for reward in rewards]
    return pa.table(
        {
            "group_id": [name for name, _ in flat],
            "prompt": [f'"prompt {name}"' for name, _ in flat],
            "reward": pa.array([reward for _, reward in flat], pa.float64()),
        }
    )


def test_groups_with_known_prompts_and_then_with_different_rewards_are_chosen():
    table = rows({"a": (1, 1), "b": (0, 1), "c": (0, 0), "d": (0, 1)})
    assert choose_groups(table, set(), 4) == ["b", "d"]
    assert choose_groups(table, {"prompt c"}, 4) == ["c", "b"]
    assert choose_groups(table, set(), 1) == ["b"], "one whole group at least"
    assert choose_groups(table, set(), 100) == ["b", "d", "a", "c"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack("first_release", tmp_path_factory.mktemp("store"))


def page_of(store: Path, directory: Path) -> tuple[Files, dict]:
    files = Files(store)
    config = validate_stored(Branches(files).get("first").config)
    reader = HistoryReader(files, config, directory)
    reader.read()
    return files, reader.evaluation_nodes


def test_iterations_and_evaluations_are_in_order_and_groups_are_whole(store: Path, tmp_path: Path):
    files, evaluations = page_of(store, tmp_path)
    assert evaluations
    sets, about = sample_sets.sample_sets(files, "first", None, evaluations=evaluations)
    names = [one.name for one in sets]
    first = [name for name in names if name.startswith("iteration")]
    assert first == sorted(first) and len(names) == len(first) + len(evaluations)
    assert names.index("iteration 0") > 0, "the evaluation before training is before iteration 0"
    assert all(len(one.samples) == one.total for one in sets)
    assert f"{len(first)} iterations and {len(evaluations)} evaluations." == about


def test_a_full_page_says_what_it_leaves_out(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    files, evaluations = page_of(store, tmp_path)
    monkeypatch.setattr(sample_sets, "MAX_SAMPLES", 1)
    sets, about = sample_sets.sample_sets(files, "first", None, evaluations=evaluations)
    assert len(sets) == 1, "the newest iteration fills the page"
    assert about.startswith("1 of ") and "0 of " in about
    assert about.endswith("rlpipe rollouts first --iterations K --out page.html")


def test_the_page_in_the_folder_of_a_run_links_to_its_report(store: Path, tmp_path: Path):
    files, evaluations = page_of(store, tmp_path)
    links = {"Samples": "samples.html", "Prefect run": "http://host/1"}
    page = write_run_samples(files, "first", tmp_path, evaluations, links)
    text = page.read_text()
    assert page.name == "samples.html"
    assert 'href="report.html"' in text and 'href="http://host/1"' in text
    assert 'href="samples.html"' not in text
