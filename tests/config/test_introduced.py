"""Defaults that keys had at their introduction (rlpipe.config.introduced)."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import Field

from rlpipe.config import introduced
from rlpipe.config.base import Config, Tuning
from rlpipe.config.load import validate, validate_stored
from rlpipe.config.run import RunConfig
from rlpipe.errors import ConfigError

BASE: dict[str, Any] = {
    "run": "run",
    "num_rollout": 1,
    "model": {"source": {"type": "huggingface", "hf_checkpoint": "/models/m"}},
    "data": {"prompts": {"type": "file", "paths": ["a.jsonl"]}},
    "rollout": {"rollout_batch_size": 4, "n_samples_per_prompt": 2},
    "reward": {"function": {"type": "math"}},
}


def test_every_key_has_an_entry_in_the_table():
    """A failure names the remedy: run the command for a new key, or raise a contract version."""
    assert introduced.differences(RunConfig) == []


def test_only_these_keys_were_removed():
    """Add a key here when you remove it from its model. Its entry stays in the table."""
    assert introduced.removed(RunConfig) == []


def test_the_table_equals_the_output_of_the_command():
    assert introduced.extended(RunConfig, introduced.stored_table()) == introduced.stored_table()


def test_only_these_defaults_changed_since_their_introduction():
    """Add `Model.key` here after a change of a default. The key is part of the identity then."""
    changed = []
    for name, model in introduced.models_of(RunConfig).items():
        entry = introduced.read_table()[name]
        for key in entry.defaults.keys() & model.model_fields.keys():
            if not entry.leaves_out(
                key, introduced.default_of(model.model_fields[key], introduced.stored_table())
            ):
                changed.append(f"{name}.{key}")
    assert sorted(changed) == [
        "AdvantageConfig.score_proximal",
        "RunConfig.advantage",
        "RunConfig.train",
        "TrainConfig.max_tokens_per_gpu",
    ]


class Inner(Config):
    type: Literal["inner"]
    size: int = 1
    later: int | None = None


class Other(Config):
    type: Literal["other"]
    size: int = 2


class Section(Config):
    on: bool = False
    rate: float = 1.0
    timeout_s: float = Tuning(1.0)


class Whole(Config):
    name: str
    one: Inner | Other = Field(default=Other(type="other"), discriminator="type")
    many: tuple[Inner, ...] = ()
    free: dict[str, Any] = Field(default_factory=dict)
    section: Section = Section()
    maybe: Section | None = None


TABLE: dict[str, Any] = introduced.extended(Whole, {})


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch):
    """Replace the checked-in table."""

    def put(table: dict[str, Any]) -> None:
        monkeypatch.setattr(introduced, "stored_table", lambda: table)
        introduced.read_table.cache_clear()

    put(TABLE)
    yield put
    monkeypatch.undo()
    introduced.read_table.cache_clear()


def test_the_identity_has_required_keys_and_keys_off_their_introduced_default(use):
    assert Whole(name="a").identity() == {"name": "a"}
    inner = Inner(type="inner", size=3)
    whole = Whole(
        name="a",
        one=inner,
        many=(Inner(type="inner"), inner),
        free={"x": 0},
        section=Section(rate=2.0),
    )
    assert whole.identity() == {
        "name": "a",
        "one": {"type": "inner", "size": 3},
        "many": [{"type": "inner"}, {"type": "inner", "size": 3}],
        "free": {"x": 0},
        "section": {"rate": 2.0},
    }
    assert Whole(name="a", maybe=Section()).identity() == {"name": "a", "maybe": {}}
    assert Whole(name="a", section=Section(timeout_s=9.0)).identity() == {"name": "a"}
    assert Whole(name="a").non_tuning_values()["section"] == {"on": False, "rate": 1.0}


@pytest.mark.parametrize("free", [{"x": True}, {"x": 1.0}, {"x": "1"}, {"x": None}, {}])
def test_equal_python_values_of_other_json_types_stay_in_the_identity(use, free: dict[str, Any]):
    use(
        {
            **TABLE,
            "Whole": {
                **TABLE["Whole"],
                "defaults": {**TABLE["Whole"]["defaults"], "free": {"x": 1}},
            },
        }
    )
    assert Whole(name="a", free=free).identity() == {"name": "a", "free": free}
    assert Whole(name="a", free={"x": 1}).identity() == {"name": "a"}


def changed_entry(model: str, **defaults: Any) -> dict[str, Any]:
    """Return the table with other introduced defaults of a model."""
    return {**TABLE, model: {**TABLE[model], "defaults": {**TABLE[model]["defaults"], **defaults}}}


def test_a_changed_default_is_in_the_identity_and_the_introduced_one_is_not(use):
    use(changed_entry("Section", rate=0.5))
    assert Section().identity() == {"rate": 1.0}
    assert Section(rate=0.5).identity() == {}
    assert Whole(name="a").identity() == {"name": "a", "section": {"rate": 1.0}}


def test_a_stored_run_without_a_key_gets_the_introduced_default(use):
    use(changed_entry("Section", rate=0.5))
    assert introduced.upgraded(Whole, {"name": "a"}) == {"name": "a", "section": {"rate": 0.5}}
    assert introduced.upgraded(Whole, {"name": "a", "section": {}}) == {
        "name": "a",
        "section": {"rate": 0.5},
    }
    assert introduced.upgraded(Whole, {"name": "a", "section": {"rate": 1.0}}) == {
        "name": "a",
        "section": {"rate": 1.0},
    }
    use(changed_entry("Inner", size=7))
    stored = {
        "name": "a",
        "one": {"type": "inner"},
        "many": [{"type": "inner", "size": 1}, {"type": "inner"}],
    }
    sizes = [{"type": "inner", "size": 1}, {"type": "inner", "size": 7}]
    assert introduced.upgraded(Whole, stored) == {
        "name": "a",
        "one": {"type": "inner", "size": 7},
        "many": sizes,
    }


def test_a_removed_key_of_a_stored_run_is_ignored_at_its_default_and_else_refused(
    use,
):
    use(changed_entry("Section", gone=3))
    assert introduced.removed(Whole) == ["Section.gone"]
    assert introduced.upgraded(Whole, {"name": "a", "section": {"on": True, "gone": 3}}) == {
        "name": "a",
        "section": {"on": True},
    }
    with pytest.raises(
        ConfigError, match=r"(?s)section\.gone: .* was removed.*found: +4.*expected: +3"
    ):
        introduced.upgraded(Whole, {"name": "a", "section": {"gone": 4}})
    use({**TABLE, "Section": {**TABLE["Section"], "tuning": ["timeout_s", "slow"]}})
    assert introduced.upgraded(Whole, {"name": "a", "section": {"slow": 1}}) == {
        "name": "a",
        "section": {},
    }
    assert introduced.upgraded(Whole, {"name": "a", "section": {"typo": 1}})["section"] == {
        "typo": 1
    }


def test_the_command_adds_missing_entries_and_changes_nothing_else(use):
    without = {**TABLE, "Section": {"required": [], "defaults": {"rate": 0.5}, "tuning": []}}
    use(without)
    assert introduced.differences(Whole) == [
        f"Section.{key} has no entry in introduced.json: run `python -m rlpipe.config.introduced`"
        for key in ("on", "timeout_s")
    ]
    table = introduced.extended(Whole, without)
    assert table["Section"] == {
        "required": [],
        "defaults": {"rate": 0.5, "on": False},
        "tuning": ["timeout_s"],
    }
    assert {name: entry for name, entry in table.items() if name != "Section"} == {
        name: entry for name, entry in TABLE.items() if name != "Section"
    }


def test_a_new_section_with_other_defaults_than_its_keys_changes_no_identity(use):
    table = {
        name: entry for name, entry in changed_entry("Section", rate=0.5).items() if name != "Whole"
    }
    use(introduced.extended(Whole, table))
    assert Whole(name="a").identity() == {"name": "a"}


def test_the_error_of_a_model_without_an_entry_names_it(use):
    use({name: entry for name, entry in TABLE.items() if name != "Section"})
    with pytest.raises(LookupError, match=r"Section is not in introduced.json: run"):
        Section().identity()


def test_a_key_that_moves_between_identity_and_tuning_needs_a_contract(use):
    use(
        {
            **TABLE,
            "Section": {
                "required": [],
                "defaults": {"on": False, "rate": 1.0, "timeout_s": 1.0},
                "tuning": [],
            },
        }
    )
    assert introduced.differences(Whole) == [
        "Section.timeout_s is Tuning(...) and was not when it was introduced: raise the contract "
        "of its stages"
    ]


def test_a_stored_configuration_is_valid_without_changes():
    config = validate(BASE)
    assert validate_stored(config.model_dump(mode="json")) == config
    with pytest.raises(ConfigError, match="nonsense"):
        validate_stored({**config.model_dump(mode="json"), "nonsense": 1})
