"""What slime stores with its weights (rlpipe.slime.saved_state)."""

from __future__ import annotations

import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlpipe.errors import ConfigError
from rlpipe.slime.command_line import read_flags
from rlpipe.slime.flag_keys import differences
from rlpipe.slime.saved_state import read_objects, stored_position
from tests.slime.test_flag_keys import keys, refused
from tests.slime.test_model_flags import slime_folder

STATE = {
    "sample_offset": 3,
    "epoch_id": 2,
    "sample_group_index": 43,
    "sample_index": 344,
    "metadata": {},
}
ARGS = {
    "rollout_seed": 42,
    "rollout_shuffle": True,
    "rollout_max_prompt_len": 99,
    "prompt_data": "/data/a.jsonl",
}


class Trap:
    """Object that writes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


def saved(folder: Path, args: dict[str, Any] = ARGS) -> Path:
    """Write the files that slime writes after iteration 20."""
    slime_folder(folder)
    (folder / "rollout").mkdir()
    torch.save(STATE, folder / "rollout" / "global_dataset_state_dict_20.pt")
    # As Megatron's common state: tensors and classes are among the arguments.
    content = {
        "args": Namespace(**args, params_dtype=torch.bfloat16, folder=Path("/x")),
        "optimizer": {"param_groups": [{"step": torch.tensor(3.0)}]},
    }
    torch.save(content, folder / "iter_0000020" / "common.pt")
    return folder


def words(folder: Path, more: str = "") -> str:
    return (
        f"--hf-checkpoint /data/Qwen3-4B --load {folder} --save {folder} --rollout-shuffle "
        f"--prompt-data /data/a.jsonl --rollout-max-context-len 100 {more}"
    )


def test_the_position_follows_the_iteration_in_load(tmp_path: Path):
    folder = saved(tmp_path / "run")
    file = folder / "rollout" / "global_dataset_state_dict_20.pt"
    position = {"epoch": 2, "offset": 3, "draws": 43, "file": str(file)}
    assert keys(words(folder))["data.slime_position"] == position
    (sentence,) = differences(read_flags(words(folder).split()))
    assert "prompts continue" in sentence
    for more in ("--finetune", "--start-rollout-id 7", "--data-source-path my.Source"):
        assert "data.slime_position" not in keys(words(folder, more))
    (sentence,) = differences(read_flags(words(folder, "--start-rollout-id 7").split()))
    assert "from the beginning" in sentence


@pytest.mark.parametrize(
    "more", ["--rollout-seed 7", "--rollout-max-prompt-len 50", "--rollout-max-context-len 50"]
)
def test_a_position_in_another_order_of_prompts_is_refused(tmp_path: Path, more: str):
    folder = saved(tmp_path / "run")
    error = refused(words(folder, more))
    assert str(folder) in str(error.where) and "was" in str(error.found)
    fresh = read_flags([*words(folder, more).split(), "data.slime_position=null"])
    assert any("from the beginning" in sentence for sentence in differences(fresh))


def test_another_path_of_the_prompts_is_noted(tmp_path: Path):
    folder = saved(tmp_path / "run", {**ARGS, "prompt_data": "/data/b.jsonl"})
    _, sentence = differences(read_flags(words(folder).split()))
    assert "/data/b.jsonl" in sentence and "/data/a.jsonl" in sentence


def test_files_of_slime_are_read_without_calling_what_they_name(tmp_path: Path):
    mark = tmp_path / "mark"
    torch.save({"epoch_id": 1, "metadata": Trap(mark)}, tmp_path / "state.pt")
    assert read_objects(tmp_path / "state.pt")["epoch_id"] == 1
    assert not mark.exists()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04"])
def test_a_damaged_file_of_slime_is_named(tmp_path: Path, content: bytes):
    (tmp_path / "state.pt").write_bytes(content)
    with pytest.raises(ConfigError) as found:
        read_objects(tmp_path / "state.pt")
    assert found.value.where == str(tmp_path / "state.pt")


@pytest.mark.parametrize("state", [{}, {"epoch_id": -1}, {"epoch_id": "one"}, [1]])
def test_a_position_without_numbers_is_refused(tmp_path: Path, state: Any):
    (tmp_path / "rollout").mkdir()
    torch.save(state, tmp_path / "rollout" / "global_dataset_state_dict_4.pt")
    with pytest.raises(ConfigError, match="not a position"):
        stored_position(tmp_path / "iter_0000004", 4)


def test_a_file_cannot_change_a_class(tmp_path: Path):
    # The class, then an attribute `planted` of it.
    content = b"cargparse\nNamespace\n(N}Vplanted\nVx\nstb."
    path = tmp_path / "common.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("common/data.pkl", content)
    assert read_objects(path).planted == "x"
    assert not hasattr(Namespace, "planted")
