"""The defaults that keys were introduced with (rlpipe.config.introduced): complete, never changed,
and what they are for."""

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


def test_every_key_has_the_default_that_it_was_introduced_with():
    """A failure says what to do: run the command for a new key, raise a contract for one that
    changed its part."""
    assert introduced.differences(RunConfig) == []


def test_only_these_keys_were_removed():
    """Add a key here when you remove it from its model. Its entry stays in the table."""
    assert introduced.removed(RunConfig) == []


def test_the_table_is_as_the_command_writes_it():
    assert introduced.extended(RunConfig, introduced.stored_table()) == introduced.stored_table()


def test_a_default_of_today_is_the_one_that_was_introduced_but_for_these():
    """Add `Model.key` here when you change a default: the entry stays, and the key is part of the
    identity from then on."""
    changed = []
    for name, model in introduced.models_of(RunConfig).items():
        entry = introduced.read_table()[name]
        for key in entry.defaults.keys() & model.model_fields.keys():
            if not entry.leaves_out(
                key, introduced.default_of(model.model_fields[key], introduced.stored_table())
            ):
                changed.append(f"{name}.{key}")
    assert sorted(changed) == []


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
    """Put a table in place of the checked-in one."""

    def put(table: dict[str, Any]) -> None:
        monkeypatch.setattr(introduced, "stored_table", lambda: table)
        introduced.read_table.cache_clear()

    put(TABLE)
    yield put
    monkeypatch.undo()
    introduced.read_table.cache_clear()


def test_the_identity_has_required_keys_and_those_that_are_off_their_introduced_default(use):
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
    assert Whole(name="a").decisive()["section"] == {"on": False, "rate": 1.0}


@pytest.mark.parametrize("free", [{"x": True}, {"x": 1.0}, {"x": "1"}, {"x": None}, {}])
def test_values_that_python_takes_for_equal_are_not_left_out_as_equal(use, free: dict[str, Any]):
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
    """The table with other introduced defaults of a model."""
    return {**TABLE, model: {**TABLE[model], "defaults": {**TABLE[model]["defaults"], **defaults}}}


def test_a_default_that_was_changed_is_written_and_the_introduced_one_is_not(use):
    use(changed_entry("Section", rate=0.5))
    assert Section().identity() == {"rate": 1.0}
    assert Section(rate=0.5).identity() == {}
    assert Whole(name="a").identity() == {"name": "a", "section": {"rate": 1.0}}


def test_a_stored_run_without_a_key_has_the_default_that_the_key_was_introduced_with(use):
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


def test_a_key_that_was_removed_is_left_out_of_stored_runs_and_refused_by_name_where_it_mattered(
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


def test_the_command_adds_what_is_missing_and_changes_nothing_else(use):
    without = {**TABLE, "Section": {"required": [], "defaults": {"rate": 0.5}, "tuning": []}}
    use(without)
    assert introduced.differences(Whole) == [
        "Section.on has no entry in introduced.json: run `python -m rlpipe.config.introduced`",
        "Section.timeout_s has no entry in introduced.json: run `python -m rlpipe.config.introduced`",
    ]
    made = introduced.extended(Whole, without)
    assert made["Section"] == {
        "required": [],
        "defaults": {"rate": 0.5, "on": False},
        "tuning": ["timeout_s"],
    }
    assert {name: one for name, one in made.items() if name != "Section"} == {
        name: one for name, one in TABLE.items() if name != "Section"
    }


def test_a_new_section_whose_default_is_off_its_keys_introduced_defaults_changes_no_identity(use):
    table = {
        name: one for name, one in changed_entry("Section", rate=0.5).items() if name != "Whole"
    }
    use(introduced.extended(Whole, table))
    assert Whole(name="a").identity() == {"name": "a"}


def test_a_model_without_an_entry_is_named(use):
    use({name: one for name, one in TABLE.items() if name != "Section"})
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
        "Section.timeout_s is Tuning(...) and was not when it was introduced: raise the contract of its stages"
    ]


def test_a_stored_configuration_is_valid_as_it_is():
    config = validate(BASE)
    assert validate_stored(config.model_dump(mode="json")) == config
    with pytest.raises(ConfigError, match="nonsense"):
        validate_stored({**config.model_dump(mode="json"), "nonsense": 1})
