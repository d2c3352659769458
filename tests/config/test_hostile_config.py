"""Mistakes of users are refused at once with one message that names location and found value.

Every case runs the command line of `tools.train`, which must exit with code 2 before any server
starts. The expected words are those that a reader needs to find the mistake; the rest of a message
may change. One file because every case uses the same recipe and command.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlpipe.config.load import home
from tests.model_files import write_model
from tools import train

RECIPE = """\
num_rollout: 3
model:
  source: {{type: huggingface, hf_checkpoint: {folder}/model}}
data:
  prompts: {{type: file, paths: [{folder}/train.jsonl], label_key: answer}}
rollout:
  {{rollout_batch_size: 1, n_samples_per_prompt: 2}}
reward:
  function: {{type: math}}
"""
ROW = b'{"prompt": "1 + 1 =", "answer": "2"}\n'
AT_ONCE_S = 20
"""Longer than any refusal on a busy machine. Opening a FIFO would wait for ever."""
Words = tuple[str, ...]
Change = Callable[[Path], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a valid recipe, prompts and model."""
    write_model(tmp_path / "model", vocab_size=100, hidden_size=8)
    (tmp_path / "train.jsonl").write_bytes(ROW)
    (tmp_path / "small.yaml").write_text(RECIPE.format(folder=tmp_path))
    return tmp_path


@pytest.fixture
def refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., str]]:
    """Run a command line that `main` must refuse, and return its message."""

    def late(*_: object) -> None:
        raise AssertionError(f"not refused within {AT_ONCE_S} s")

    def run(*arguments: str, recipe: str | Path = folder / "small.yaml") -> str:
        monkeypatch.setattr(train, "drive", lambda *_: 0)
        monkeypatch.setattr(
            sys, "argv", ["tools.train", "--quiet", "--recipe", str(recipe), *arguments]
        )
        assert train.main() == 2
        output = capsys.readouterr()
        assert output.out == ""
        return output.err

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(AT_ONCE_S)
    yield run
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def require(message: str, words: Words) -> None:
    """Check that the message is one error with each of these words."""
    assert message.startswith(("ConfigError: ", "DataError: ", "ResourceError: ", "StoreError: "))
    assert [word for word in words if word not in message] == [], message
    assert len(message) < 5000


def test_the_unchanged_recipe_is_valid(monkeypatch: pytest.MonkeyPatch, folder: Path):
    monkeypatch.setattr(train, "drive", lambda *_: 0)
    monkeypatch.setattr(sys, "argv", ["tools.train", "--recipe", str(folder / "small.yaml")])
    assert train.main() == 0
    # The times of waits, which the next start shows; nothing of a run.
    assert [path.name for path in home().iterdir()] == [".waits.json"]


OVERRIDES: Mapping[str, Words] = {
    # Texts where numbers and switches belong.
    "num_rollout=true": ("num_rollout", "found:    true", "whole number"),
    "num_rollout=1e3": ("num_rollout", "1000.0", "whole number"),
    "num_rollout='5'": ("num_rollout", "'5'", "whole number"),
    "num_rollout=5.5": ("num_rollout", "5.5", "whole number"),
    "num_rollout=1_000": ("num_rollout", "'1_000'", "whole number"),
    "num_rollout=1,000": ("num_rollout", "'1,000'", "whole number"),
    "num_rollout=": ("num_rollout", "null", "whole number"),
    "num_rollout=2026-11-23": ("num_rollout", "2026-11-23", "whole number"),
    "num_rollout=-1": ("num_rollout", "-1", "0"),
    "num_rollout=100000000000": ("num_rollout", "100000000000", "99999999"),
    "seed=1.0": ("seed", "1.0", "whole number"),
    "resources.colocate=yes": ("resources.colocate", "'yes'", "true or false"),
    "resources.colocate=on": ("resources.colocate", "'on'", "true or false"),
    "resources.colocate=1": ("resources.colocate", "1", "true or false"),
    "deterministic=off": ("deterministic", "'off'", "true or false"),
    "train.optimizer.lr='1e-5'": ("train.optimizer.lr", "'1e-5'", "a finite number"),
    "train.optimizer.lr=1e-5f": ("train.optimizer.lr", "'1e-5f'", "a finite number"),
    "train.optimizer.lr=1,5": ("train.optimizer.lr", "'1,5'", "a finite number"),
    "train.optimizer.lr=true": ("train.optimizer.lr", "found:    true", "a finite number"),
    "train.optimizer.lr=1e308": ("train.optimizer.lr", "1e+308"),
    "train.optimizer.lr=1e5": ("train.optimizer.lr", "100000", "10"),
    "train.optimizer.lr=-1e-6": ("train.optimizer.lr", "-1e-06"),
    "train.optimizer.adam_beta2=1": ("train.optimizer.adam_beta2", "1"),
    "train.optimizer.weight_decay=1e300": ("train.optimizer.weight_decay", "1e+300"),
    "train.optimizer.clip_grad=inf": ("train.optimizer.clip_grad", "'inf'"),
    "train.loss.entropy_coef=nan": ("train.loss.entropy_coef", "'nan'"),
    "train.loss.eps_clip=None": ("train.loss.eps_clip", "'None'", "a finite number"),
    "train.loss.kl_loss_coef=1e200": ("train.loss.kl_loss_coef", "1e+200"),
    # Sampling.
    "rollout.rollout_temperature=inf": ("rollout.rollout_temperature", "inf"),
    "rollout.rollout_temperature=.inf": ("rollout.rollout_temperature", "inf"),
    "rollout.rollout_temperature=0": ("rollout.rollout_temperature", "0"),
    "rollout.rollout_temperature=1e-30": ("rollout.rollout_temperature", "1e-30"),
    "rollout.rollout_temperature=1e9": ("rollout.rollout_temperature", "1000000000"),
    "rollout.rollout_top_k=-7": ("rollout.rollout_top_k", "-7", "-1"),
    "rollout.rollout_top_k=0": ("rollout.rollout_top_k", "0", "-1"),
    "rollout.rollout_top_p=1.5": ("rollout.rollout_top_p", "1.5"),
    "rollout.rollout_top_p=95": ("rollout.rollout_top_p", "95"),
    "rollout.rollout_stop=['']": ("rollout.rollout_stop", "empty"),
    "rollout.rollout_stop=STOP": ("rollout.rollout_stop", "'STOP'", "list"),
    "rollout.rollout_stop_token_ids=[-1]": ("rollout.rollout_stop_token_ids", "-1"),
    "rollout.rollout_stop_token_ids=[true]": ("rollout.rollout_stop_token_ids", "found:    true"),
    "rollout.rollout_stop_token_ids=[99, 100]": ("rollout.rollout_stop_token_ids", "100", "99"),
    "rollout.rollout_stop_token_ids=[4294967297]": ("rollout.rollout_stop_token_ids", "4294967297"),
    "rollout.rollout_max_context_len=0": ("rollout.rollout_max_context_len", "0"),
    "rollout.rollout_max_response_len=1e3": ("rollout.rollout_max_response_len", "1000.0"),
    "rollout.rollout_max_response_len=99999999999": (
        "rollout.rollout_max_response_len",
        "99999999999",
    ),
    "rollout.rollout_batch_size=1000000000": ("rollout.rollout_batch_size", "1000000000"),
    "rollout.n_samples_per_prompt=0": ("rollout.n_samples_per_prompt", "0"),
    "data.rollout_max_prompt_len=-5": ("data.rollout_max_prompt_len", "-5"),
    "data.num_data_workers=1000000": ("data.num_data_workers", "1000000"),
    "reward.workers=99999": ("reward.workers", "99999"),
    "reward.on_error=true": ("reward.on_error", "found:    true"),
    "reward.timeout_s=1e300": ("reward.timeout_s", "1e+300"),
    "train.timeout_s=1000000000": ("train.timeout_s", "1e+09", "seconds"),
    "async_buffer_size=1000000000": ("async_buffer_size", "1000000000", "10000"),
    "async_buffer_size=.5": ("async_buffer_size", "0.5"),
    "gates.bounds=[{metric: train/grad_norm, at_most: nan}]": ("gates.bounds.0.at_most", "nan"),
    "gates.bounds=[{metric: train/grad_norm, at_most: .nan}]": ("gates.bounds.0.at_most", "nan"),
    "gates.bounds=[{metric: train/grad_norm}]": ("gates.bounds", "at_most"),
    "gates.bounds={metric: train/grad_norm, at_most: 1}": ("gates.bounds", "list"),
    # Layouts and machines.
    "resources.actor_num_gpus_per_node=0": ("resources.actor_num_gpus_per_node", "0"),
    "resources.rollout_num_gpus=3 resources.rollout_num_gpus_per_engine=2": (
        "rollout_num_gpus",
        "3",
        "2",
    ),
    "resources.rollout_num_gpus=10000000000": ("resources.rollout_num_gpus", "10000000000"),
    "resources.actor_num_gpus_per_node=3 train.parallel.tensor_model_parallel_size=2": (
        "actor_num_gpus_per_node",
        "3",
        "2",
    ),
    "rollout.rollout_batch_size=3 train.global_batch_size=4": ("train.global_batch_size", "6", "4"),
    "resources.threads_per_process=100000": ("resources.threads_per_process", "100000"),
    "resources.external_engines=[localhost]": ("resources.external_engines", "localhost", "port"),
    "observe.prometheus_port=70000": ("observe.prometheus_port", "70000", "65535"),
    "observe.profile_ranks=[-1]": ("observe.profile_ranks", "-1"),
    # Names.
    "run=store": ("run", "store"),
    "run=models": ("run", "models"),
    "run=Models": ("run", "Models"),
    "run=STORE": ("run", "STORE"),
    "run=.up": ("run", ".up"),
    "run=..": ("run", ".."),
    "run=a/b": ("run", "a/b"),
    "run='a '": ("run", "'a '"),
    'run="a\\nb"': ("run", "'a\\nb'"),
    'run="a\\u202eb"': ("run", "a\\u202eb"),
    "run=''": ("run", "''"),
    "run=" + "a" * 101: ("run", "100"),
    "run=12": ("run", "12", "quotes"),
    "run=null": ("run", "null", "text"),
    "run=лекция": ("run", "\\u043b"),
    "resources.cluster=../elsewhere": ("resources.cluster", "../elsewhere"),
    "resources.cluster=store": ("resources.cluster", "store"),
    "fork_from={branch: ../../x}": ("fork_from.branch", "../../x"),
    "fork_from={branch: nowhere}": ("fork_from.branch", "nowhere"),
    "fork_from={branch: nowhere, iteration: -1}": ("fork_from.iteration", "-1"),
    "model.start_from={branch: nowhere}": ("model.start_from.branch", "nowhere"),
    "debug.load_debug_rollout_data=nowhere": ("debug.load_debug_rollout_data", "nowhere"),
    "warm_start=../../etc/passwd": ("warm_start", "../../etc/passwd", "YAML"),
    "warm_start=nowhere": ("warm_start", "nowhere"),
    "warm_start={folder}/loop.yaml": ("loop.yaml", "warm"),
    # Where things are kept.
    "store.root=''": ("store.root", "empty"),
    "store.root='  '": ("store.root", "'  '"),
    "store.root=ftp://host/x": ("store.root", "ftp://host/x", "s3://"),
    "store.root=file://rel": ("store.root", "file://rel", "file:///"),
    "store.root=s3://": ("store.root", "s3://", "bucket"),
    "store.root=gs://bucket/x": ("store.root", "gs://bucket/x", "s3://"),
    "store.root=/dev/null": ("store.root", "/dev/null"),
    "store.root=/proc/store": ("store.root", "/proc"),
    "store.root={folder}/train.jsonl": ("store.root", "train.jsonl"),
    "store.root={folder}/train.jsonl/x": ("store.root", "train.jsonl"),
    "store.root=~no-user-of-this-name/x": ("store.root", "~no-user-of-this-name"),
    # The grammar of overrides.
    "a..b=1": ("a..b=1", "dotted.key=value"),
    "=1": ("=1", "dotted.key=value"),
    "x": ("x", "dotted.key=value"),
    ".run=1": (".run=1", "dotted.key=value"),
    "rollout=": ("rollout", "null", "keys"),
    "rollout.rollout_stop=[a": ("rollout.rollout_stop", "YAML"),
    "rollout.rollout_stop='a": ("rollout.rollout_stop", "YAML"),
    "train.optimizer=1": ("train.optimizer", "1", "keys"),
    "num_rollout.x=1": ("num_rollout", "3"),
    "evaluation.datasets.0.name=x": ("evaluation.datasets", "x"),
    "data.prompts.paths.7=x": ("data.prompts.paths", "7"),
    "rollout.rollout_batchsize=1": ("rollout.rollout_batchsize", "rollout_batch_size"),
    "train.lr=1e-5": ("train.lr", "train.optimizer.lr"),
    "Rollout.rollout_batch_size=1": ("Rollout", "lower case"),
    "reward.function={type: maths}": ("reward.function.type", "maths", "math"),
    "reward.function=math": ("reward.function", "math", "type"),
    "reward.function={type: python, path: ''}": ("reward.function.path", "empty"),
    "reward.function={type: python, path: /dev/zero}": ("/dev/zero",),
    "reward.function={type: python, path: '{folder}/pipe.py'}": ("pipe.py", "FIFO"),
    "data.prompts.paths={folder}/train.jsonl": ("data.prompts.paths", "list"),
    "data.prompts.paths=[]": ("data.prompts.paths", "at least 1"),
    "data.prompts.paths=['']": ("data.prompts.paths", "empty"),
    "data.prompts.paths=['{folder}']": ("{folder}", "a name ending in .jsonl"),
    "data.prompts.paths=['{folder}/folder.jsonl']": ("folder.jsonl", "directory"),
    "data.prompts.paths=['{folder}/pipe.jsonl']": ("pipe.jsonl", "FIFO"),
    "data.prompts.paths=['{folder}/zero.jsonl']": ("zero.jsonl", "device"),
    "data.prompts.paths=['{folder}/train.json']": ("train.json", ".jsonl"),
    "data.prompts.paths=['{folder}/train.jsonl', '{folder}/train.jsonl']": ("train.jsonl", "twice"),
    "data.prompts.paths=['{folder}/train.jsonl', '{folder}/model/../train.jsonl']": (
        "model/../train.jsonl",
        "twice",
    ),
    "data.prompts.paths=['{folder}/train.jsonl', '{folder}/link.jsonl']": ("link.jsonl", "twice"),
    "data.prompts.paths=['{folder}/train.jsonl@[0:1]', '{folder}/train.jsonl@[:]']": (
        "train.jsonl@[:]",
        "twice",
    ),
    "data.prompts.paths=['{folder}/train.jsonl@[5:]']": ("train.jsonl@[5:]", "1 rows"),
    "data.prompts.paths=['{folder}/train.jsonl@[0-3]']": ("@[0-3]", "@[a:b]"),
    "data.prompts.paths=['nosuch://x/a.jsonl']": ("nosuch://x/a.jsonl",),
    "data.prompts.label_key=anser": ("anser", "answer"),
    "critic.hf_checkpoint={folder}/nowhere advantage.advantage_estimator=ppo": (
        "critic.hf_checkpoint",
        "nowhere",
    ),
    "model.source.hf_checkpoint=''": ("model.source.hf_checkpoint", "empty"),
    "model.source.hf_checkpoint=Qwen/Qwen3-4B": ("model.source.hf_checkpoint", "Qwen/Qwen3-4B"),
    "model.source.hf_checkpoint=~no-user-of-this-name/x": (
        "model.source.hf_checkpoint",
        "~no-user-of-this-name",
    ),
    "model.dtype=bf16": ("model.dtype", "'bf16'", "bfloat16"),
}


@pytest.fixture
def special_files(folder: Path) -> None:
    """Create the files that some of the overrides name."""
    os.mkfifo(folder / "pipe.jsonl")
    os.mkfifo(folder / "pipe.py")
    (folder / "zero.jsonl").symlink_to("/dev/zero")
    (folder / "link.jsonl").symlink_to(folder / "train.jsonl")
    (folder / "folder.jsonl").mkdir()
    (folder / "loop.yaml").write_text(
        f"warm_start: {folder}/loop.yaml\n" + RECIPE.format(folder=folder)
    )


@pytest.mark.usefixtures("special_files")
@pytest.mark.parametrize("override", OVERRIDES)
def test_a_mistake_in_an_override_is_refused(
    refused: Callable[..., str], folder: Path, override: str
):
    arguments = override.replace("{folder}", str(folder))
    several = any(f" {section}." in arguments for section in ("resources", "train", "advantage"))
    words = tuple(word.replace("{folder}", str(folder)) for word in OVERRIDES[override])
    require(refused(*(arguments.split(" ") if several else [arguments])), words)


def _with(text: str) -> Callable[[bytes], bytes]:
    return lambda recipe: recipe + text.encode()


RECIPES: Mapping[str, tuple[Callable[[bytes], bytes], Words]] = {
    "a key twice": (_with("num_rollout: 4\n"), ("small.yaml:", "num_rollout", "twice")),
    "a tab as indentation": (_with("train:\n\toptimizer: {lr: 1}\n"), ("small.yaml:", "spaces")),
    "two documents": (_with("---\nrun: other\n"), ("small.yaml:10", "a single document")),
    "a merge key": (
        _with("train:\n  <<: {timeout_s: 5}\n"),
        ("<<", "small.yaml:11", "write the keys out"),
    ),
    "an anchor in itself": (_with("train: &a {megatron: *a}\n"), ("small.yaml:",)),
    "a date": (_with("seed: 2026-11-23\n"), ("seed", "2026-11-23", "small.yaml:")),
    "UTF-16": (lambda recipe: recipe.decode().encode("utf-16"), ("small.yaml", "UTF-16", "UTF-8")),
    "Latin-1": (lambda recipe: recipe + "# größe\n".encode("latin-1"), ("small.yaml", "UTF-8")),
    "a list": (lambda _: b"- num_rollout: 3\n", ("small.yaml", "list")),
    "a text": (lambda _: b"num_rollout\n", ("small.yaml", "a text", "key: value")),
    "nothing": (lambda _: b"", ("small.yaml", "nothing", "key: value")),
    "JSON with a comma too many": (lambda _: b'{"num_rollout": 3,, "run": "x"}', ("small.yaml:1",)),
    "a comment of 50 MB": (
        lambda recipe: recipe + b"#" * 50_000_000,
        ("small.yaml", "50000", "1048576"),
    ),
    "values of 50 MB": (
        lambda recipe: recipe + b"x: [" + b"1," * 25_000_000 + b"]",
        ("small.yaml", "5000", "1048576"),
    ),
    "a colon without a space": (_with("seed:3\n"), ("small.yaml:",)),
    "an unknown section": (
        _with("trian: {optimizer: {lr: 1e-5}}\n"),
        ("trian", "train", "small.yaml:"),
    ),
    "a key in the wrong section": (
        _with("rollout_max_response_len: 5\n"),
        ("rollout.rollout_max_response_len", "small.yaml:"),
    ),
    "a number as a key": (_with("1: 2\n"), ("small.yaml:", "1")),
    "a binary": (_with("seed: !!binary aGVsbG8=\n"), ("small.yaml:", "binary")),
    "a NUL": (_with("warm_start: a\0b\n"), ("small.yaml",)),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_mistake_in_a_recipe_is_refused_with_its_line(
    refused: Callable[..., str], folder: Path, name: str
):
    change, words = RECIPES[name]
    recipe = folder / "small.yaml"
    recipe.write_bytes(change(recipe.read_bytes()))
    require(refused(), words)


def test_windows_newlines_and_a_byte_order_mark_change_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, row in (("small.yaml", None), ("train.jsonl", ROW)):
        content = (folder / name).read_bytes() if row is None else row * 2
        (folder / name).write_bytes(b"\xef\xbb\xbf" + content.replace(b"\n", b"\r\n"))
    for streaming in ("true", "false"):
        monkeypatch.setattr(train, "drive", lambda *_: 0)
        monkeypatch.setattr(
            sys,
            "argv",
            [
                "tools.train",
                "--recipe",
                str(folder / "small.yaml"),
                f"data.streaming_data={streaming}",
            ],
        )
        assert train.main() == 0


@pytest.mark.parametrize(
    ("kind", "words"), [("FIFO", ("FIFO",)), ("folder", ("directory",)), ("device", ("device",))]
)
def test_a_recipe_that_is_not_a_regular_file_is_refused(
    refused: Callable[..., str], folder: Path, kind: str, words: Words
):
    path = folder / "other.yaml"
    {
        "FIFO": lambda: os.mkfifo(path),
        "folder": path.mkdir,
        "device": lambda: path.symlink_to("/dev/zero"),
    }[kind]()
    require(refused(recipe=path), ("other.yaml", *words))
    require(refused(f"preset={path}"), ("other.yaml",))


ROWS: Mapping[str, tuple[bytes, Words]] = {
    "a key twice": (
        b'{"prompt": "a", "answer": "1", "answer": "2"}',
        ("train.jsonl:1", "'answer'", "twice"),
    ),
    "a key twice inside": (
        b'{"prompt": "a", "answer": "1", "metadata": {"k": 1, "k": 2}}',
        ("train.jsonl:1", "'k'", "twice"),
    ),
    "a comma too many": (ROW + b'{"prompt": "a", "answer": "1",}', ("train.jsonl:2", "JSON")),
    "single quotes": (b"{'prompt': 'a', 'answer': '1'}", ("train.jsonl:1", "JSON")),
    "NaN": (b'{"prompt": "a", "answer": NaN}', ("train.jsonl:1", "nan")),
    "a null": (b'{"prompt": null, "answer": "1"}', ("train.jsonl:1", "'prompt'")),
    "an empty prompt": (b'{"prompt": "", "answer": "1"}', ("train.jsonl:1", "empty")),
    "a number as a prompt": (b'{"prompt": 0.5, "answer": "1"}', ("train.jsonl:1", "float")),
    "a list of texts as a prompt": (b'{"prompt": ["a"], "answer": "1"}', ("train.jsonl:1", "list")),
    "a message without a role": (
        b'{"prompt": [{"content": "a"}], "answer": "1"}',
        ("train.jsonl:1", "role"),
    ),
    "a missing label": (ROW * 4 + b'{"prompt": "a"}', ("train.jsonl:5", "'answer'", "label_key")),
    "a list as a label": (b'{"prompt": "a", "answer": [["1"]]}', ("train.jsonl:1", "list")),
    "true as a label": (b'{"prompt": "a", "answer": true}', ("train.jsonl:1", "bool")),
    "a JSON array": (b"[\n" + ROW.strip() + b"\n]\n", ("train.jsonl:1", "array", "line")),
    "an array a line": (b'["a", "1"]\n', ("train.jsonl:1", "object")),
    "two objects a line": (ROW.strip() + ROW, ("train.jsonl:1", "Extra data")),
    "nothing": (b"", ("train.jsonl", "empty")),
    "blank lines": (b"\n \n\n", ("train.jsonl", "empty")),
    "gzip": (gzip.compress(ROW * 100)[:40], ("train.jsonl", "gzip")),
    "Parquet": (b"PAR1" + b"\0" * 60, ("train.jsonl", "Parquet")),
    "UTF-16": (ROW.decode().encode("utf-16"), ("train.jsonl", "UTF-16")),
    "a git-lfs pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
        ("train.jsonl", "git-lfs"),
    ),
    "CSV": (b"prompt,answer\n1+1,2\n", ("train.jsonl:1", "prompt,answer")),
    "half a character": (b'{"prompt": "\\ud83d", "answer": "1"}', ("train.jsonl:1",)),
    "metadata that is a list": (
        b'{"prompt": "a", "answer": "1", "metadata": [1]}',
        ("train.jsonl:1", "metadata", "[1]"),
    ),
    "a line cut off": (ROW + ROW[:20], ("train.jsonl:2", "JSON")),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_mistake_in_a_prompt_file_is_refused_with_its_line(
    refused: Callable[..., str], folder: Path, name: str
):
    content, words = ROWS[name]
    (folder / "train.jsonl").write_bytes(content)
    require(refused(), words)


def test_a_line_of_a_gigabyte_is_refused_without_parsing_it(
    refused: Callable[..., str], folder: Path
):
    with (folder / "train.jsonl").open("wb") as file:
        file.write(b'{"prompt": "')
        file.truncate(
            2**26 + 100
        )  # NULs; a gigabyte would take the machine's memory from other tests
    require(refused(), ("train.jsonl:1", "67108964 bytes", "67108864"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (ROW, ("train.parquet", "jsonl")),
        (b"", ("train.parquet",)),
        (b"PAR1", ("train.parquet", "Parquet")),
        (gzip.compress(ROW), ("train.parquet", "gzip")),
    ],
    ids=["JSON lines", "nothing", "cut off", "gzip"],
)
def test_a_broken_parquet_file_is_refused(
    refused: Callable[..., str], folder: Path, content: bytes, words: Words
):
    (folder / "train.parquet").write_bytes(content)
    require(refused(f"data.prompts.paths=[{folder}/train.parquet]"), words)


def test_a_parquet_file_with_a_null_is_refused_with_its_row(
    refused: Callable[..., str], folder: Path
):
    pq.write_table(
        pa.table({"prompt": ["a", None], "answer": ["1", "2"]}), folder / "train.parquet"
    )
    require(
        refused(f"data.prompts.paths=[{folder}/train.parquet]"), ("train.parquet:row 1", "'prompt'")
    )


def _index(folder: Path, *names: str) -> None:
    weights = {"weight_map": {f"layer{n}": name for n, name in enumerate(names)}}
    (folder / "model" / "model.safetensors.index.json").write_text(json.dumps(weights))


def _replace(name: str, content: bytes | None) -> Change:
    """Return a function that writes a file of the model, or removes it."""

    def change(folder: Path) -> None:
        (folder / "model" / name).unlink(missing_ok=True)
        if content is not None:
            (folder / "model" / name).write_bytes(content)

    return change


def _fifo(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / "model" / name).unlink()
        os.mkfifo(folder / "model" / name)

    return change


def _loop(folder: Path) -> None:
    shutil.rmtree(folder / "model")
    (folder / "model").symlink_to(folder / "model")


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1000000\n"
CUT = json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
MODELS: Mapping[str, tuple[Change, Words]] = {
    "no tokenizer": (_replace("tokenizer.json", None), ("model.source.hf_checkpoint", "tokenizer")),
    "a tokenizer that is a FIFO": (_fifo("tokenizer.json"), ("tokenizer.json", "FIFO")),
    "a tokenizer that is a git-lfs pointer": (
        _replace("tokenizer.json", LFS),
        ("tokenizer.json", "git-lfs"),
    ),
    "a tokenizer that is cut off": (
        _replace("tokenizer.json", b'{"model": {'),
        ("tokenizer.json", "JSON"),
    ),
    "no weights": (
        _replace("model.safetensors", None),
        ("model.source.hf_checkpoint", "safetensors"),
    ),
    "weights of PyTorch": (
        lambda folder: (folder / "model" / "model.safetensors").rename(
            folder / "model" / "pytorch_model.bin"
        ),
        ("pytorch_model.bin", "safetensors"),
    ),
    "weights that are a git-lfs pointer": (
        _replace("model.safetensors", LFS),
        ("model.safetensors", "git-lfs"),
    ),
    "weights that are cut off": (
        _replace("model.safetensors", len(CUT).to_bytes(8, "little") + CUT + b"\0" * 9),
        ("model.safetensors", "cut off"),
    ),
    "weights that are empty": (
        _replace("model.safetensors", b""),
        ("model.safetensors", "0 bytes"),
    ),
    "weights that are a FIFO": (_fifo("model.safetensors"), ("model.safetensors", "FIFO")),
    "a missing shard": (
        lambda folder: _index(folder, "model.safetensors", "lost.safetensors"),
        ("lost.safetensors",),
    ),
    "a shard elsewhere": (
        lambda folder: _index(folder, "../other.safetensors"),
        ("index", "../other.safetensors"),
    ),
    "an index of nothing": (
        _replace("model.safetensors.index.json", b"{}"),
        ("index.json", "weight_map"),
    ),
    "an index in HTML": (
        _replace("model.safetensors.index.json", b"<html>Not found"),
        ("index.json", "JSON"),
    ),
    "config.json is a list": (_replace("config.json", b"[]"), ("config.json", "list")),
    "config.json is HTML": (_replace("config.json", b"<html>"), ("config.json", "JSON")),
    "config.json is a FIFO": (_fifo("config.json"), ("config.json", "FIFO")),
    "config.json is a folder": (
        lambda folder: (
            (folder / "model" / "config.json").unlink(),
            (folder / "model" / "config.json").mkdir(),
        ),
        ("config.json", "directory"),
    ),
    "no config.json": (_replace("config.json", None), ("no config.json",)),
    "a size that is a text": (
        _replace("config.json", b'{"hidden_size": "8"}'),
        ("hidden_size", "8"),
    ),
    "a folder that is a link to itself": (_loop, ("model.source.hf_checkpoint", "model")),
    "a file": (
        lambda folder: (shutil.rmtree(folder / "model"), (folder / "model").write_text("x")),
        ("no directory",),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_broken_model_directory_is_refused_with_the_file(
    refused: Callable[..., str], folder: Path, name: str
):
    change, words = MODELS[name]
    change(folder)
    require(refused(), words)


HOMES: Mapping[str, Words] = {
    "{folder}/train.jsonl": ("--home", "train.jsonl"),
    "{folder}/train.jsonl/x": ("--home", "train.jsonl"),
    "/dev/null": ("--home", "/dev/null"),
    "/proc/home": ("--home", "/proc"),
    "{folder}/broken": ("--home", "broken"),
    "~no-user-of-this-name/x": ("--home", "~no-user-of-this-name"),
    "/" + "a" * 300: ("--home", "aaa"),
}


@pytest.mark.parametrize("home_path", HOMES)
@pytest.mark.parametrize("by", ["--home", "RLPIPE_HOME"])
def test_an_impossible_home_is_refused(
    refused: Callable[..., str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    home_path: str,
    by: str,
):
    (folder / "broken").symlink_to(folder / "nowhere")
    given = home_path.replace("{folder}", str(folder))
    monkeypatch.setenv("RLPIPE_HOME", str(folder / "home") if by == "--home" else given)
    require(refused(*(["--home", given] if by == "--home" else [])), HOMES[home_path])


def test_an_empty_home_is_refused(refused: Callable[..., str]):
    require(refused("--home", ""), ("--home", "''"))


def test_a_folder_of_the_run_that_is_a_file_is_refused(refused: Callable[..., str], folder: Path):
    (folder / "home").mkdir()
    (folder / "home" / "small").write_text("x")
    require(refused(), ("run=small", "home/small"))


def test_a_port_in_use_is_refused(refused: Callable[..., str]):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        require(refused(f"observe.prometheus_port={port}"), ("observe.prometheus_port", str(port)))


def test_the_recipe_of_a_warm_start_is_checked_too(refused: Callable[..., str], folder: Path):
    (folder / "warm.yaml").write_text(
        RECIPE.format(folder=folder).replace("train.jsonl", "none.jsonl")
    )
    require(refused(f"warm_start={folder}/warm.yaml"), ("none.jsonl",))
    (folder / "warm.yaml").write_text(RECIPE.format(folder=folder) + "trian: 1\n")
    require(refused(f"warm_start={folder}/warm.yaml"), ("trian", "warm.yaml:", "warm_start"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run=store"], ("run", "store")),
        (["num_rollout=true"], ("num_rollout", "found:    true")),
        (["store.root=/dev/null"], ("store.root", "/dev/null")),
        (["--home", "{folder}/train.jsonl"], ("--home", "train.jsonl")),
        (["warm_start=../../etc/passwd"], ("warm_start", "../../etc/passwd")),
    ],
)
def test_the_command_itself_ends_with_2_and_one_message(
    folder: Path, arguments: list[str], words: Words
):
    given = [argument.replace("{folder}", str(folder)) for argument in arguments]
    command = [sys.executable, "-m", "tools.train", "--recipe", str(folder / "small.yaml"), *given]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    require(ended.stderr, words)
