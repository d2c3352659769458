"""Load a user function by its path, and compute the digest of its source."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlpipe.config.hooks import hook_digest, load_hook
from rlpipe.errors import ConfigError


def write(path, text):
    path.write_text(text)
    return str(path)


def test_a_function_of_a_file_is_found_by_its_name(tmp_path):
    path = write(tmp_path / "mine.py", "def one(): return 1\ndef two(): return 2\n")
    assert load_hook(f"{path}:two")() == 2


def test_a_file_with_one_public_function_needs_no_name(tmp_path):
    path = write(
        tmp_path / "mine.py",
        "from json import dumps\ndef _helper(): pass\ndef reward(sample): return 3\n",
    )
    assert load_hook(path)(None) == 3


def test_a_file_with_two_public_functions_needs_a_name_in_the_path(tmp_path):
    path = write(tmp_path / "mine.py", "def one(): return 1\ndef two(): return 2\n")
    words = r"2 public functions: one, two[\s\S]*mine.py:NAME with one of these"
    with pytest.raises(ConfigError, match=words):
        load_hook(path)


def test_a_dotted_name_is_imported():
    assert load_hook("json.dumps")({}) == "{}"


def test_a_relative_path_counts_from_the_working_directory(tmp_path, monkeypatch):
    write(tmp_path / "mine.py", "def reward(sample): return 4\n")
    monkeypatch.chdir(tmp_path)
    assert load_hook("mine.py:reward")(None) == 4


def test_a_changed_file_is_loaded_again_and_an_unchanged_file_once(tmp_path):
    path = write(tmp_path / "mine.py", "def reward(): return 1\n")
    first = load_hook(path)
    assert load_hook(path) is first
    write(tmp_path / "mine.py", "def reward(): return 2\n")
    assert load_hook(path)() == 2


def test_a_dataclass_in_a_hook_file_works(tmp_path):
    text = "from __future__ import annotations\nfrom dataclasses import dataclass\n"
    text += "@dataclass\nclass A:\n    x: int\ndef f(): return A(5).x\n"
    assert load_hook(write(tmp_path / "mine.py", text))() == 5


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("{dir}/mone.py:reward", "cannot read the file of the function[\\s\\S]*mine.py"),
        ("{dir}/mine.py:rewrad", "no 'rewrad'[\\s\\S]*nearest: reward"),
        ("{dir}/mine.py:absent", "of its names; reward[\\s\\S]*write .*mine.py:reward"),
        ("{dir}/mine.py:NUMBER", "names no function"),
        (
            "{dir}/broken.py:reward",
            r"cannot import the file[\s\S]*SyntaxError.*/broken.py:1: def[\s\S]*correct this",
        ),
        (
            "{dir}/lonely.py:reward",
            r"cannot import the file[\s\S]*lonely.py:1[\s\S]*install no_such_package for /",
        ),
        ("{dir}/empty.py", "0 public functions: none"),
        ("json.dumsp", "no 'dumsp'[\\s\\S]*nearest: dump, dumps"),
        (
            "no_such_package.reward",
            "cannot import the (file|module)[\\s\\S]*no_such_package",
        ),
        ("reward", "not the path of a function"),
        ("", "not the path of a function"),
        ("two words.reward", "not the path of a function"),
    ],
)
def test_a_wrong_path_is_refused_with_the_reason(tmp_path, path, words):
    write(tmp_path / "mine.py", "NUMBER = 1\ndef reward(): return 1\n")
    write(tmp_path / "broken.py", "def reward(:\n")
    write(tmp_path / "lonely.py", "import no_such_package\n")
    write(tmp_path / "empty.py", "")
    with pytest.raises(ConfigError, match=words):
        load_hook(path.format(dir=tmp_path))


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("1 / 0", r"ZeroDivisionError: division by zero \(.*mine\.py:2\)"),
        (
            "import sys; sys.exit(0)",
            r"the file ends Python: SystemExit: 0 \(.*mine\.py:2\)[\s\S]*__main__",
        ),
        ("raise BaseException('odd')", "BaseException: odd"),
        ("raise ValueError('x' * 10**6)", "1000000 characters"),
    ],
)
def test_every_exception_of_an_import_is_an_error_with_its_line(tmp_path, code, words):
    path = write(tmp_path / "mine.py", f"def reward(): return 1\n{code}\n")
    for _ in range(2):
        with pytest.raises(ConfigError, match=words):
            load_hook(path)


def test_the_digest_is_the_sha256_of_the_source_file(tmp_path):
    path = write(tmp_path / "mine.py", "def reward(): return 1\n")
    expected = hashlib.sha256(b"def reward(): return 1\n").hexdigest()
    assert hook_digest(path) == hook_digest(f"{path}:reward") == expected
    assert len(hook_digest("json.dumps")) == 64


@pytest.mark.parametrize(
    "path", ["rlpipe.rollout.filters.reward_nonzero_std", "rlpipe.rollout.tools.calculator"]
)
def test_the_digest_of_a_function_of_rlpipe_depends_on_its_path_only(path):
    assert hook_digest(path) == hashlib.sha256(f"rlpipe:{path}".encode()).hexdigest()


def test_a_module_of_rlpipe_that_does_not_exist_has_no_digest():
    with pytest.raises(ConfigError, match=r"no module 'rlpipe\.nothing'"):
        hook_digest("rlpipe.nothing.filter")


@pytest.mark.parametrize(
    "path",
    [
        "{dir}/none.py:reward",
        "no_such_package.reward",
        "no_such_package.inner.reward",
        "sys.exit",
        "plain",
    ],
)
def test_a_hook_without_source_has_no_digest(tmp_path, path):
    with pytest.raises(ConfigError):
        hook_digest(path.format(dir=tmp_path))


def test_hooks_import_without_torch():
    code = (
        "import sys, rlpipe.config.hooks\n"
        "assert not {'torch', 'ray', 'prefect', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_module_written_for_slime_is_imported_by_its_dotted_name(tmp_path):
    package = tmp_path / "examples" / "search"
    package.mkdir(parents=True)
    (package / "generate.py").write_text(
        "from slime.utils.types import Sample\n\ndef reward(args, sample):\n    return Sample\n"
    )
    program = (
        "from rlpipe.config.hooks import load_hook\n"
        "print(load_hook('examples.search.generate.reward')(None, None).__module__)"
    )
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": paths},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "rlpipe.slime.sample", done.stderr


def test_a_print_of_a_file_is_marked_with_its_name(tmp_path: Path, capsys):
    (tmp_path / "mine.py").write_text(
        "def score(sample):\n"
        "    print('a', 1)\n"
        "    print('b', end='')\n"
        "    print('c')\n"
        "    with open(sample, 'w') as log:\n"
        "        print('d', file=log)\n"
    )
    load_hook(f"{tmp_path}/mine.py")(tmp_path / "log")
    assert capsys.readouterr().out == "mine.py: a 1\nmine.py: bc\n"
    assert (tmp_path / "log").read_text() == "d\n"
