"""Convert `--sglang-config`, slime's file of engine groups.

    engine_layout(values)        keys of the engines
    layout_difference(values)    a sentence on what differs from slime; None without the flag

    sglang:
      - name: actor
        server_groups:
          - {worker_type: regular, num_gpus: 4, num_gpus_per_engine: 2}
          - {worker_type: placeholder, num_gpus: 2}

slime gives each group its own engine size and worker type. Here all engines are equal: they have
the largest size of the groups that divides the number of GPUs, and each of them does prefill and
decode. Arguments that differ between groups are left out. This changes the speed, not the
distribution that is sampled. GPUs of placeholders stay free. Engines of a second model with frozen
weights are refused, because functions would miss them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from rlpipe.config.base import Config
from rlpipe.config.text import parse, read
from rlpipe.errors import ConfigError

OPTION = "--sglang-config"
Values = Mapping[str, Any]


class _Group(Config):
    """Engines of one size."""

    worker_type: Literal["regular", "prefill", "decode", "placeholder"]
    num_gpus: int = Field(ge=1)
    num_gpus_per_engine: int | None = Field(default=None, ge=1)
    overrides: dict[str, Any] = Field(default_factory=dict)

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of SGLang, without those that connect prefill with decode."""
        return {
            name: value
            for name, value in self.overrides.items()
            if name != "model_path" and not name.startswith("disaggregation_")
        }


class _Model(Config):
    """Groups that serve one model."""

    name: str
    model_path: str | None = None
    update_weights: bool | None = None
    num_gpus_per_engine: int | None = Field(default=None, ge=1)
    server_groups: tuple[_Group, ...] = Field(min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _groups_have_their_former_name(cls, values: Any) -> Any:
        if isinstance(values, dict) and "engine_groups" in values:
            values = dict(values)
            values.setdefault("server_groups", values.pop("engine_groups"))
        return values

    def is_policy(self, directory: str | None) -> bool:
        """True if the engines of the model get the trained weights."""
        if self.update_weights is not None:
            return self.update_weights
        paths = {self.model_path, *(group.overrides.get("model_path") for group in self.groups)}
        return paths <= {None, directory}

    @property
    def groups(self) -> list[_Group]:
        """The groups with engines."""
        return [group for group in self.server_groups if group.worker_type != "placeholder"]


class _File(Config):
    sglang: tuple[_Model, ...] = Field(min_length=1)


def engine_layout(values: Values) -> dict[str, Any]:
    """Return dotted key → value of the engines; {} without the flag.

    Raises: ConfigError for a file that slime refuses, a frozen model, or sizes of which none
    divides the number of GPUs.
    """
    path = values.get("sglang_config")
    if not path:
        return {}
    policy = _policy(path, values)
    groups = policy.groups
    num_gpus = sum(group.num_gpus for group in groups)
    reserved = sum(group.num_gpus for group in policy.server_groups)
    expected = _rollout_gpus(values)
    if expected not in (None, reserved):
        raise ConfigError(
            "the groups use another number of GPUs than the engines have",
            where=f"{OPTION}: {path}",
            found=reserved,
            expected=f"{expected} (--rollout-num-gpus, or the trainer's with --colocate)",
        )
    sizes = _sizes(policy, values)
    fitting = [size for size in sizes if num_gpus % size == 0]
    if not fitting:
        raise ConfigError(
            "no engine size of the groups divides the number of GPUs",
            where=f"{OPTION}: {path}",
            found=f"{num_gpus} GPUs, engines of {' and '.join(map(str, sorted(sizes)))}",
            do="all engines of a run have the same size; choose one for all groups",
        )
    return {
        "resources.rollout_num_gpus": num_gpus,
        "resources.rollout_num_gpus_per_engine": max(fitting),
        **{f"engine.sglang.{name}": value for name, value in _common(groups).items()},
    }


def layout_difference(values: Values) -> str | None:
    """Return a sentence on the engines, which are equal here; None without the flag."""
    layout = engine_layout(values)
    if not layout:
        return None
    size = layout["resources.rollout_num_gpus_per_engine"]
    number = layout["resources.rollout_num_gpus"] // size
    groups = _policy(values["sglang_config"], values).groups
    given = dict.fromkeys(name for group in groups for name in group.arguments)
    left_out = [name for name in given if name not in _common(groups)]
    return (
        f"{OPTION}: {number} equal engines of {size} GPUs, each for prefill and decode; slime's "
        "groups differ in size or work. Samples have the same distribution"
        + (f". Not set, because they differ: {', '.join(left_out)}" if left_out else "")
    )


def _policy(path: str, values: Values) -> _Model:
    """Return the model of the file that is trained. Raises: ConfigError."""
    content, _ = parse(read(Path(path), "the file", OPTION), path)
    try:
        models = _File.model_validate(content).sglang
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(
            "not a file of engine groups",
            where=f"{OPTION}: {path}: {'.'.join(map(str, first['loc']))}",
            found=first.get("input"),
            expected=first["msg"],
        ) from error
    trained = [model for model in models if model.is_policy(values.get("hf_checkpoint"))]
    frozen = [model.name for model in models if model not in trained]
    if frozen:
        raise ConfigError(
            "engines of a frozen model are not started",
            where=f"{OPTION}: {path}: sglang",
            found=", ".join(frozen),
            expected="the trained model alone",
            do="start a server of the frozen model, and give functions its address in "
            "--custom-config-path",
        )
    if len(trained) > 1 or not trained[0].groups:
        raise ConfigError(
            "not the engines of one trained model",
            where=f"{OPTION}: {path}: sglang",
            found=", ".join(model.name for model in trained),
            expected="one model, with a group that is no placeholder",
        )
    return trained[0]


def _common(groups: list[_Group]) -> dict[str, Any]:
    """Return the arguments that all groups have with the same value."""
    return {
        name: value
        for name, value in groups[0].arguments.items()
        if all(group.arguments.get(name) == value for group in groups)
    }


def _sizes(policy: _Model, values: Values) -> set[int]:
    """Return the GPUs per engine of the groups."""
    of_run = policy.num_gpus_per_engine or values.get("rollout_num_gpus_per_engine", 1)
    return {group.num_gpus_per_engine or of_run for group in policy.groups}


def _rollout_gpus(values: Values) -> int | None:
    """Return the GPUs that slime gives to engines; None if the flags do not tell."""
    if values.get("rollout_num_gpus") is not None or not values.get("colocate"):
        return values.get("rollout_num_gpus")
    return values.get("actor_num_nodes", 1) * values.get("actor_num_gpus_per_node", 8)
