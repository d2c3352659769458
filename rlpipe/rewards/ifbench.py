"""Reward of IFBench (https://github.com/allenai/IFBench): 1 if all instructions are followed.

    reward.function: {type: python, path: "rlpipe.rewards.ifbench.score"}

The checks are IFBench's own, in its module `evaluation_lib`, which is not a package of an index:
clone the repository, install its requirements.txt, and add its folder to PYTHONPATH. slime's
`--rm-type ifbench` becomes this function. slime clones the repository during training; here the
checks before the start say that it is missing.

A row's metadata has `instruction_id_list`, `kwargs` (one object for each instruction, or one for
all) and `prompt_text`, as in slime.
"""

from __future__ import annotations

import importlib
from typing import Any

from rlpipe.errors import ConfigError, DataError
from rlpipe.types import Sample

MODULE = "evaluation_lib"


def _library() -> Any:
    """Return IFBench's module of checks. Raises: ConfigError if it cannot be imported."""
    try:
        return importlib.import_module(MODULE)
    except ImportError as error:
        raise ConfigError(
            "IFBench's checks are not installed",
            where="rlpipe.rewards.ifbench",
            found=f"{type(error).__name__}: {error}",
            do="git clone https://github.com/allenai/IFBench, pip install -r "
            "IFBench/requirements.txt, and add the folder to PYTHONPATH",
        ) from error


_LIBRARY = _library()


def score(sample: Sample) -> float:
    """Return 1 if the response follows all instructions of the row, else 0.

    Raises: DataError for a row without instructions.
    """
    names = [str(name).strip() for name in sample.metadata.get("instruction_id_list") or []]
    if not names:
        raise DataError(
            "the row has no instructions",
            where="metadata.instruction_id_list",
            found=sample.metadata.get("instruction_id_list"),
            expected="names of IFBench's instructions",
        )
    given = sample.metadata.get("kwargs") or {}
    each = [dict(given)] * len(names) if isinstance(given, dict) else [dict(one) for one in given]
    prompt = str(sample.metadata.get("prompt_text") or "")
    example = _LIBRARY.InputExample(
        key=int(sample.metadata.get("record_id") or 0),
        instruction_id_list=names,
        prompt=prompt,
        # IFBench's own data has null for arguments that an instruction does not take.
        kwargs=[{key: value for key, value in one.items() if value is not None} for one in each],
    )
    result = _LIBRARY.test_instruction_following_strict(example, {prompt: sample.response})
    return float(result.follow_all_instructions)
