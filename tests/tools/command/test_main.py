"""The command `rlpipe`: verbs, help, completion, and its speed (tools.command)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import BashComplete
from click.testing import CliRunner, Result

from tools import audit
from tools.bench.__main__ import PARTS
from tools.bench.shapes import SHAPES
from tools.bench.training import BASELINES
from tools.command import bench_options, completion, parsers
from tools.command.main import COMPLETION_VARIABLE, application, options, run
from tools.command.shared_options import COMMAND
from tools.command.verbs import VERBS

HEAVY = ("torch", "ray", "prefect", "sglang", "transformers", "megatron", "pyarrow", "duckdb")


def rlpipe(*words: str) -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(application(), words, prog_name=COMMAND)


def test_the_command_alone_lists_every_verb_with_its_task():
    listed = rlpipe()
    assert listed.exit_code == 0
    for verb in VERBS.values():
        assert verb.name in listed.stdout and verb.task.split()[0] in listed.stdout
    assert rlpipe("--help").stdout == listed.stdout


def test_the_help_of_a_verb_with_kinds_has_the_task_first():
    first, *rest = rlpipe("convert", "--help").stdout.splitlines()
    assert first == "Convert checkpoints." and any("hf2dist" in line for line in rest)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("trian", "x.yaml"), "Did you mean 'train'?"),
        (("convert", "hf2dst"), "Did you mean 'hf2dist'?"),
        (("--verson",), "No such option"),
    ],
)
def test_a_misspelt_verb_names_the_nearest_one(words: tuple[str, ...], message: str):
    wrong = rlpipe(*words)
    assert wrong.exit_code == 2
    assert message in wrong.stderr


def test_help_and_configuration_import_nothing_heavy():
    helps = [[*name.split(), "--help"] for name, verb in VERBS.items() if verb.parser]
    calls = [
        [],
        ["--version"],
        ["trian"],
        ["completion", "bash"],
        ["config", "spell_backward"],
        *helps,
    ]
    program = f"""
import sys
from rlpipe.__main__ import main
for words in {calls}:
    sys.argv = ["rlpipe", *words]
    try:
        main()
    except SystemExit as end:
        assert (end.code or 0) == (2 if words == ["trian"] else 0), (words, end.code)
    heavy = [name for name in {HEAVY} if name in sys.modules]
    assert heavy == [], (words, heavy)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for verb in VERBS.values():
        assert f"usage: rlpipe {verb.name}" in done.stdout


def test_every_verb_has_a_module_with_a_main_function_and_a_parser_of_its_name():
    for verb in VERBS.values():
        file = Path(*verb.module.split(".")).with_suffix(".py")
        assert "def main() -> int:" in file.read_text(encoding="utf-8"), verb.name
        if verb.parser:
            parser = getattr(parsers, verb.parser)()
            assert parser.description
            assert verb.name in parser.prog


def test_the_choices_of_options_are_those_of_the_modules():
    assert list(parsers.AUDITS) == sorted(audit.COMMANDS)
    assert list(bench_options.SHAPES) == list(SHAPES)
    assert list(bench_options.BASELINES) == list(BASELINES)
    assert list(bench_options.PARTS) == list(PARTS)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_has_a_completion_script(
    shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["rlpipe completion", shell])
    assert completion.main() == 0
    assert f"{COMPLETION_VARIABLE}={shell}_complete" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("tr", "plain,train"),
        ("convert hf", "plain,hf2dist"),
        ("fork --take", "plain,--takeover"),
        ("train spell_backward_s", "plain,spell_backward_sft"),
        ("train my_", "file,my_"),
    ],
)
def test_completion_offers_verbs_options_recipes_and_files(line: str, completed: str):
    shell = BashComplete(application(), {}, COMMAND, COMPLETION_VARIABLE)
    *words, incomplete = line.split()
    offered = [shell.format_completion(item) for item in shell.get_completions(words, incomplete)]
    assert completed in offered


def test_the_command_completes_a_line_of_bash():
    words = {"COMP_WORDS": "rlpipe tr", "COMP_CWORD": "1", COMPLETION_VARIABLE: "bash_complete"}
    command = [sys.executable, "-m", "rlpipe"]
    offered = subprocess.run(command, env=os.environ | words, capture_output=True, check=True)
    assert offered.stdout.split() == [b"plain,train"]


def test_a_completion_has_the_options_of_the_verb():
    assert "--public-key" in options(VERBS["audit"])
    assert "audit" in application().commands


def test_a_run_is_a_word_or_an_option_but_not_both(capsys: pytest.CaptureFixture[str]):
    assert parsers.report().parse_args(["my_run"]).run == "my_run"
    assert parsers.report().parse_args(["--run", "my_run"]).run == "my_run"
    for words in ([], ["one", "--run", "two"]):
        with pytest.raises(SystemExit):
            parsers.report().parse_args(words)
    assert "RUN" in capsys.readouterr().err


def test_ctrl_c_ends_a_verb_with_code_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def interrupted() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr("tools.flags.main", interrupted)
    with pytest.raises(SystemExit) as caught:
        run(VERBS["flags"], ("lr",))
    assert caught.value.code == 130
    assert sys.argv == ["rlpipe flags", "lr"]
    assert capsys.readouterr().err == "\nstopped\n"


def test_a_path_that_cannot_be_written_ends_a_verb_with_code_2_and_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "missing" / "rows.jsonl"
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr("tools.flags.main", lambda: path.open("w"))
    with pytest.raises(SystemExit) as caught:
        run(VERBS["flags"], ())
    assert caught.value.code == 2
    assert f"rlpipe flags: {path}: No such file or directory" in capsys.readouterr().err
