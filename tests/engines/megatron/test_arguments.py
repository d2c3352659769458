"""A Megatron-LM checkout on PYTHONPATH replaces the wheel and gets its own arguments."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlpipe.config.arguments import names
from rlpipe.config.train import TrainConfig
from rlpipe.engines.megatron.arguments import set_global_arguments
from rlpipe.errors import ConfigError

PROVIDER = """
def extra_args_provider(parser):
    parser.add_argument('--ours-rank', type=int, default=4)
    return parser
"""
GLOBALS = """
_ARGS = None
def set_args(args):
    global _ARGS
    _ARGS = args
def get_args():
    return _ARGS
"""
PROGRAM = """
import json, sys
from rlpipe.config.arguments.check import check_megatron
from rlpipe.config.train import TrainConfig
given = {"ours_rank": 16, "ours_field": 3, "recompute_granularity": "selective"}
check_megatron(given)
train = TrainConfig.model_validate({"megatron": given, "optimizer": {"lr": 0.5}})
from rlpipe.engines.megatron.arguments import set_global_arguments
set_global_arguments(train)
from rlpipe.engines.megatron.reproducibility import facts
from rlpipe.engines.megatron.model.build import split_arguments
from megatron.training.global_vars import get_args
args = get_args()
for_transformer, for_optimizer, for_ddp = split_arguments(train.megatron)
print(json.dumps({
    "from": facts("float32")["megatron_from"], "split": [for_transformer, for_optimizer, for_ddp],
    "args": [args.ours_rank, args.ours_field, args.lr, args.tensor_model_parallel_size],
}))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The wheel's source under another path, with one more field and an argument provider."""
    spec = importlib.util.find_spec("megatron")
    assert spec is not None and spec.submodule_search_locations is not None
    wheel = Path(next(iter(spec.submodule_search_locations))) / "core"
    core = tmp_path / "megatron" / "core"
    kinds = tmp_path / "megatron" / "core" / "transformer"
    kinds.mkdir(parents=True)
    for source, target in ((wheel, core), (wheel / "transformer", kinds)):
        for path in source.iterdir():
            if path.name not in ("transformer", "transformer_config.py", "__pycache__"):
                (target / path.name).symlink_to(path)
    text = (wheel / "transformer" / "transformer_config.py").read_text()
    mark = "class TransformerConfig(ModelParallelConfig):\n"
    assert mark in text
    own = text.replace(
        "@dataclass\n" + mark,
        "@dataclass\nclass Ours:\n    ours_field: int = 1\n\n\n@dataclass\n" + mark,
    )
    (kinds / "transformer_config.py").write_text(
        own.replace(mark, "class TransformerConfig(ModelParallelConfig, Ours):\n")
    )
    (tmp_path / "pretrain_gpt.py").write_text(PROVIDER)
    (tmp_path / "megatron" / "training").mkdir()
    (tmp_path / "megatron" / "training" / "global_vars.py").write_text(GLOBALS)
    return tmp_path


def run(folder: Path, repository: Path) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(folder), str(repository)])
    environment = {**os.environ, "PYTHONPATH": paths}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.integration
def test_a_checkout_replaces_the_wheel_and_gets_its_arguments(folder: Path, repository: Path):
    found = run(folder, repository)
    assert found.returncode == 0, found.stderr
    printed = json.loads(found.stdout.splitlines()[-1])
    assert printed["from"] == str(folder)
    assert printed["args"] == [16, 3, 0.5, 1]
    assert printed["split"] == [{"ours_field": 3, "recompute_granularity": "selective"}, {}, {}]


def test_a_provider_without_global_arguments_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    assert set_global_arguments(TrainConfig()) is None
    shutil.rmtree(folder / "megatron" / "training")
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    names.load.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"(?s)no global arguments.*megatron\.training"):
            set_global_arguments(TrainConfig())
    finally:
        names.load.cache_clear()
