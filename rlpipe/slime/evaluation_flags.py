"""Convert slime's flags of held-out sets: `--eval-prompt-data` with `--eval-*`, or `--eval-config`.

`--eval-prompt-data name path ...` may be repeated or have several pairs. In the file of
`--eval-config`, `eval.datasets` is a list or a mapping by name. A key that a set does not have
comes from `eval.defaults`, then from the `--eval-*` flags, then from the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlpipe.config.similar_keys import nearest
from rlpipe.config.text import parse, read
from rlpipe.errors import ConfigError
from rlpipe.slime.reward_flags import reward_function

PROMPT_KEYS = {
    "path": "paths",
    "prompt_key": "input_key",
    "input_key": "input_key",
    "label_key": "label_key",
    "metadata_key": "metadata_key",
    "tool_key": "tool_key",
}
"""slime's key of a held-out set → key of its prompts."""
SAMPLING_KEYS = (
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
REWARD_KEYS = ("rm_type", "rm_url", "custom_rm_path", "reward_key")
UNSUPPORTED = {
    "repetition_penalty": "no such key: it would change the distribution that is trained",
}
FLAGS = {
    "n_samples_per_eval_prompt": "n_samples_per_eval_prompt",
    **{f"eval_{name}": name for name in SAMPLING_KEYS[1:8]},
    "eval_input_key": "input_key",
    "eval_label_key": "label_key",
    "eval_tool_key": "tool_key",
    "eval_reward_key": "reward_key",
}
"""Flag → key of a held-out set."""


def datasets(values: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return `evaluation.datasets` of the flags; None if they name none. Raises: ConfigError."""
    pairs = values.get("eval_prompt_data")
    path = values.get("eval_config")
    if pairs and path:
        raise ConfigError(
            "two flags name the held-out sets",
            where="--eval-config",
            found="--eval-prompt-data too",
            do="give one of them",
        )
    shared_keys = ("input_key", "label_key", "tool_key")
    common = {key: values[key] for key in shared_keys if values.get(key) is not None}
    common |= {key: values[flag] for flag, key in FLAGS.items() if values.get(flag) is not None}
    if path:
        return [_dataset({**common, **entry}, values, path) for entry in _read_file(path)]
    if not pairs:
        return None
    if len(pairs) == 1:
        pairs = ["aime", *pairs]  # slime's name for a path without a name
    if len(pairs) % 2:
        raise ConfigError(
            "not pairs of a name and a path",
            where="--eval-prompt-data",
            found=" ".join(pairs),
            expected="name path [name path ...]",
        )
    return [
        _dataset({**common, "name": name, "path": file}, values, "--eval-prompt-data")
        for name, file in zip(pairs[::2], pairs[1::2], strict=True)
    ]


def _read_file(path: str) -> list[dict[str, Any]]:
    """Return the held-out sets of a file, with `eval.defaults` filled in."""
    content, _ = parse(read(Path(path), "the file", "--eval-config"), path)
    section = content.get("eval", content) if isinstance(content, dict) else None
    entries = section.get("datasets") if isinstance(section, dict) else None
    if isinstance(entries, dict):
        entries = [{"name": name, **(entry or {})} for name, entry in entries.items()]
    if (
        not isinstance(section, dict)
        or not isinstance(entries, list)
        or not all(isinstance(entry, dict) for entry in entries)
    ):
        raise ConfigError(
            "the file has no held-out sets",
            where=path,
            expected="eval: {defaults: {...}, datasets: [{name, path}]}",
        )
    defaults = section.get("defaults") or {}
    return [
        {**defaults, **{key: value for key, value in entry.items() if value is not None}}
        for entry in entries
    ]


def _dataset(entry: Mapping[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return one held-out set as the configuration has it."""
    known = ("name", *PROMPT_KEYS, *SAMPLING_KEYS, *REWARD_KEYS)
    for key in entry:
        if key not in known:
            raise ConfigError(
                "unknown key of a held-out set",
                where=f"{where}: {entry.get('name')}.{key}",
                expected=UNSUPPORTED.get(key) or ", ".join(nearest(key, known) or known),
            )
    if not entry.get("name") or not entry.get("path"):
        raise ConfigError("a held-out set needs name and path", where=where, found=dict(entry))
    prompts: dict[str, Any] = {"type": "file", "input_key": "input", "tool_key": "tools"}
    prompts |= {PROMPT_KEYS[key]: value for key, value in entry.items() if key in PROMPT_KEYS}
    prompts["paths"] = [entry["path"]]
    dataset = {
        "name": entry["name"],
        "prompts": prompts,
        **{key: entry[key] for key in SAMPLING_KEYS if key in entry},
    }
    if any(entry.get(key) is not None for key in REWARD_KEYS):
        of_run = {key: values[key] for key in REWARD_KEYS if values.get(key) is not None}
        of_set = {key: entry[key] for key in REWARD_KEYS if key in entry}
        if "rm_type" in of_set:
            of_run.pop("custom_rm_path", None)
        function = reward_function({**of_run, **of_set}, where=f"{where}: {entry['name']}.rm_type")
        dataset["reward"] = {"function": function}
    return dataset
