"""Continue the prompts of slime's run: read its position and arguments from its checkpoint.

    prompt_position(values)    slime's position in the prompts (`--load`)
    other_prompts(values)      prompt files, if slime's run had others

The files are torch's archives of pickled objects. They are read without torch. No class or function
that a file names is called: each becomes an `_Inert`.
"""

from __future__ import annotations

import pickle
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import IO, Any

from rlpipe.errors import ConfigError
from rlpipe.slime.args import FLAGS
from rlpipe.slime.model_flags import Keys, Values, continued_folder, iterations_done

ORDER = ("rollout_seed", "rollout_shuffle", "rollout_max_prompt_len")
"""Flags that decide the order of prompts."""


class _Inert:
    """Stand-in for any object other than a number, text or container. It accepts every call."""

    def __new__(cls, *_arguments: Any, **_keywords: Any) -> _Inert:
        return super().__new__(cls)

    def __call__(self, *_arguments: Any, **_keywords: Any) -> _Inert:
        return self

    def __setstate__(self, _state: Any) -> None:
        """Ignore the state."""

    def __setitem__(self, _key: Any, _value: Any) -> None:
        """Ignore an entry of a mapping."""

    def append(self, _value: Any) -> None:
        """Ignore an entry of a list."""


class _SafeUnpickler(pickle.Unpickler):
    """Unpickler that imports nothing. Only argparse's Namespace keeps its content."""

    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__(stream)
        # One class for each file, because a pickle can set attributes of a class that it names.
        self._namespace = type("Namespace", (Namespace,), {})

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        is_namespace = (module_name, global_name) == ("argparse", "Namespace")
        return self._namespace if is_namespace else _Inert

    def persistent_load(self, _pid: Any) -> Any:
        return _Inert()


def prompt_position(values: Values) -> Keys:
    """Return the key of slime's position in the prompts; {} if the run begins with all prompts.

    The position is that after slime's last iteration, or after the one before --start-rollout-id.
    Raises: ConfigError if prompts have another order than in slime's run.
    """
    if "prompt_data" not in values or iterations_done(values) == 0:
        return {}
    folder = continued_folder(values)
    position = folder and stored_position(folder, iterations_done(values) - 1)
    if not folder or not position:
        return {}
    changed = {
        name: pair for name, pair in _changed_prompts(folder, values).items() if name in ORDER
    }
    if changed:
        options = ", ".join(
            f"{FLAGS[name].option} was {old}, now {new}" for name, (old, new) in changed.items()
        )
        raise ConfigError(
            "slime's position in the prompts belongs to another order of prompts",
            where=f"--load {values['load']}",
            found=options,
            expected="the values of slime's run",
            do="give the former values; or begin with all prompts: data.slime_position=null",
        )
    return {"data.slime_position": position}


def other_prompts(values: Values) -> tuple[str, str] | None:
    """Return the prompt files of slime's run and of this one; None if their paths are equal."""
    folder = continued_folder(values)
    return _changed_prompts(folder, values).get("prompt_data") if folder else None


def read_objects(path: Path) -> Any:
    """Return the object in a file of `torch.save`, with every tensor and class inert.

    Raises: ConfigError if the file cannot be read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            (name,) = (each for each in archive.namelist() if each.endswith("/data.pkl"))
            with archive.open(name) as stream:
                return _SafeUnpickler(stream).load()
    # A damaged pickle can raise nearly anything.
    except Exception as error:
        raise ConfigError(
            "a file of slime cannot be read",
            where=str(path),
            found=f"{type(error).__name__}: {error}",
            expected="a file of torch.save",
        ) from error


def stored_position(folder: Path, iteration: int) -> dict[str, Any] | None:
    """Return the position in the prompts after an iteration.

    `folder`: a checkpoint such as iter_0000099. slime writes positions into the folder `rollout` of
    the same parent. None: there is no such file. Raises: ConfigError if the file is damaged.
    """
    file = folder.absolute().parent / "rollout" / f"global_dataset_state_dict_{iteration}.pt"
    if not file.is_file():
        return None
    state = read_objects(file)
    entries = state if isinstance(state, dict) else {}
    position = {
        "epoch": entries.get("epoch_id", 0),
        "offset": entries.get("sample_offset", 0),
        "draws": entries.get("sample_group_index"),
    }
    if entries.keys() & {"epoch_id", "sample_offset"} and all(
        value is None or (isinstance(value, int) and value >= 0) for value in position.values()
    ):
        return {**position, "file": str(file)}
    raise ConfigError(
        "not a position of slime in its prompts",
        where=str(file),
        found=sorted(map(str, entries)) or type(state).__name__,
        expected="sample_offset and epoch_id",
    )


def _changed_prompts(folder: Path, values: Values) -> dict[str, tuple[Any, Any]]:
    """Return flag → (stored value, value here) of flags that choose prompts and their order.

    `values`: the flags of the command line. A flag that the checkpoint does not have is left out.
    Raises: ConfigError if the checkpoint's arguments are damaged.
    """
    path = folder / "common.pt"
    common = read_objects(path) if path.is_file() else {}
    stored = vars(common.get("args")) if isinstance(common.get("args"), Namespace) else {}
    here = {name: values.get(name, FLAGS[name].default) for name in ORDER}
    if here["rollout_max_prompt_len"] is None and values.get("rollout_max_context_len"):
        here["rollout_max_prompt_len"] = values["rollout_max_context_len"] - 1
    paths = values.get("prompt_data") or []
    here["prompt_data"] = paths[0] if len(paths) == 1 else paths or None
    return {
        name: (stored[name], value)
        for name, value in here.items()
        if name in stored and not isinstance(stored[name], _Inert) and stored[name] != value
    }
