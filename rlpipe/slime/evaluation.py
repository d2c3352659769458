"""Held-out sets of slime's flags: `--eval-prompt-data name path ...` with the `--eval-*` settings,
or `--eval-config file.yaml`.

The flag may be repeated or take several pairs. In the file, `eval.datasets` is a list, or a mapping
by name; what a set does not say is `eval.defaults`, then the `--eval-*` flags, then the run's own.

Not here: what an evaluation does (`rlpipe.actors.generator`, `flows.evaluate`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlpipe.config.problems import nearest
from rlpipe.config.text import parse, read
from rlpipe.errors import ConfigError
from rlpipe.slime.reward import reward_function

PROMPTS = {
    "path": "paths",
    "prompt_key": "input_key",
    "input_key": "input_key",
    "label_key": "label_key",
    "metadata_key": "metadata_key",
    "tool_key": "tool_key",
}
SAMPLING = (
    "n_samples_per_eval_prompt",
    "temperature",
    "top_p",
    "top_k",
    "max_response_len",
    "max_prompt_len",
    "max_context_len",
    "min_new_tokens",
    "stop",
    "stop_token_ids",
    "metadata_overrides",
    "custom_generate_function_path",
    "skip_special_tokens",
)
REWARD = ("rm_type", "rm_url", "custom_rm_path", "reward_key")
ELSEWHERE = {
    "repetition_penalty": "it would not be the distribution that is trained",
}
FLAGS = {
    "n_samples_per_eval_prompt": "n_samples_per_eval_prompt",
    **{f"eval_{name}": name for name in SAMPLING[1:8]},
    "eval_input_key": "input_key",
    "eval_label_key": "label_key",
    "eval_tool_key": "tool_key",
    "eval_reward_key": "reward_key",
}
"""Flag → key of a held-out set."""


def datasets(values: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """`evaluation.datasets` of the flags; None if they name none. Raises: ConfigError."""
    pairs = values.get("eval_prompt_data")
    path = values.get("eval_config")
    if pairs and path:
        raise ConfigError(
            "both name the held-out sets",
            where="--eval-config",
            found="--eval-prompt-data too",
            do="give one",
        )
    common = {key: values[flag] for flag, key in FLAGS.items() if values.get(flag) is not None}
    common = {
        **{
            key: values[key]
            for key in ("input_key", "label_key", "tool_key")
            if values.get(key) is not None
        },
        **common,
    }
    if path:
        return [_dataset({**common, **one}, values, path) for one in _of_file(path)]
    if not pairs:
        return None
    if len(pairs) % 2:
        raise ConfigError(
            "not pairs of a name and a path",
            where="--eval-prompt-data",
            found=" ".join(pairs),
            expected="name path [name path ...]",
        )
    named = zip(pairs[::2], pairs[1::2], strict=True)
    return [
        _dataset({**common, "name": name, "path": file}, values, "--eval-prompt-data")
        for name, file in named
    ]


def _of_file(path: str) -> list[dict[str, Any]]:
    content, _ = parse(read(Path(path), "the file", "--eval-config"), path)
    section = content.get("eval", content) if isinstance(content, dict) else None
    sets = section.get("datasets") if isinstance(section, dict) else None
    if isinstance(sets, dict):
        sets = [{"name": name, **(one or {})} for name, one in sets.items()]
    if (
        not isinstance(section, dict)
        or not isinstance(sets, list)
        or not all(isinstance(one, dict) for one in sets)
    ):
        raise ConfigError(
            "no held-out sets in the file",
            where=path,
            expected="eval: {defaults: {...}, datasets: [{name, path}]}",
        )
    defaults = section.get("defaults") or {}
    return [
        {**defaults, **{key: value for key, value in one.items() if value is not None}}
        for one in sets
    ]


def _dataset(one: Mapping[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
    known = ("name", *PROMPTS, *SAMPLING, *REWARD)
    for key in one:
        if key not in known:
            expected = ELSEWHERE.get(key) or ", ".join(nearest(key, known) or known)
            raise ConfigError(
                "unknown key of a held-out set",
                where=f"{where}: {one.get('name')}.{key}",
                expected=expected,
            )
    if not one.get("name") or not one.get("path"):
        raise ConfigError("a held-out set has a name and a path", where=where, found=dict(one))
    prompts: dict[str, Any] = {"type": "file", "input_key": "input", "tool_key": "tools"}
    prompts |= {PROMPTS[key]: value for key, value in one.items() if key in PROMPTS}
    prompts["paths"] = [one["path"]]
    dataset = {
        "name": one["name"],
        "prompts": prompts,
        **{key: one[key] for key in SAMPLING if key in one},
    }
    if any(one.get(key) is not None for key in REWARD):
        run = {key: values.get(key) for key in REWARD if values.get(key) is not None}
        own = {key: one[key] for key in REWARD if key in one}
        if "rm_type" in own:
            run.pop("custom_rm_path", None)
        dataset["reward"] = {
            "function": reward_function({**run, **own}, where=f"{where}: {one['name']}.rm_type")
        }
    return dataset
