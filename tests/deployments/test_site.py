"""A site's file: the example is valid; errors name the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployments.site import Site, load_site
from rlpipe.errors import ConfigError


def site(place: Path, text: str) -> Site:
    file = place / "site.yaml"
    file.write_text(text)
    return load_site(file)


def test_the_example_is_a_site(repository: Path):
    example = load_site(repository / "deployments" / "site.example.yaml")
    assert {name: gpus.limit for name, gpus in example.sets.items()} == {"train": 1, "spare": 1}
    assert {f"{entry.flow}/{entry.name}" for entry in example.deployments} >= {
        "train/nightly",
        "evaluate/calculator",
    }


def test_the_default_site_has_one_set_of_gpus_with_limit_one():
    assert {name: (gpus.gpus, gpus.limit) for name, gpus in load_site(None).sets.items()} == {
        "train": (None, 1)
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pool: a\npols: b\n", r"site\.yaml:2: pols: "),
        ("gpu_sets: {default: {}}\n", "that queue has no limit"),
        (
            "deployments: [{flow: train, name: n, gpu_set: other}]\n",
            "unknown sets of GPUs: other; expected train",
        ),
        (
            "deployments:\n  - flow: train\n    name: n\n    schedules:\n"
            "      - cron: '* * * * *'\n        rrule: FREQ=DAILY\n",
            "5: .*one of",
        ),
        (
            "deployments: [{flow: train, name: n, schedules: [{active: false}]}]\n",
            "exactly one of cron",
        ),
        (
            "deployments: [{flow: train, name: n, schedules: [{interval_s: 0}]}]\n",
            "interval_s: .*greater than 0",
        ),
        (
            "deployments: [{flow: train, name: n, schedules: [{interval_s: 9, timezone: Mars}]}]\n",
            "Europe/Berlin",
        ),
        ("deployments: [{flow: sleep, name: n}]\n", "flow: .*'train'"),
    ],
)
def test_the_error_names_key_and_line_of_a_wrong_site(tmp_path: Path, text: str, message: str):
    with pytest.raises(ConfigError, match=message):
        site(tmp_path, text)


def test_the_error_names_a_missing_file(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        load_site(tmp_path / "nowhere.yaml")
