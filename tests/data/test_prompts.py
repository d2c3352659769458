"""Rows of prompt files, and refusal of bad rows."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlpipe.config.data import FilePrompts
from rlpipe.data.prompts import load_prompts
from rlpipe.errors import DataError


def source(*paths, **keys):
    return FilePrompts(type="file", paths=tuple(map(str, paths)), **keys)


def jsonl(path, *rows):
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return path


def test_rows_of_several_files_are_in_order(tmp_path):
    first = jsonl(
        tmp_path / "a.jsonl",
        {"q": "one", "a": "1", "metadata": {"level": 3}},
        "",
        {"q": "two", "a": 2},
    )
    second = tmp_path / "b.parquet"
    messages = [{"role": "user", "content": "three"}]
    pq.write_table(pa.table({"q": [messages], "a": ["3"], "metadata": ['{"level": 4}']}), second)
    rows = load_prompts(source(first, second, input_key="q", label_key="a"))
    assert [row.prompt for row in rows] == ["one", "two", messages]
    assert [row.label for row in rows] == ["1", "2", "3"]
    assert [row.metadata for row in rows] == [{"level": 3}, {}, {"level": 4}]
    assert [row.where for row in rows] == [f"{first}:1", f"{first}:3", f"{second}:row 0"]


def test_a_label_is_read_only_with_a_label_key(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", {"prompt": "one", "label": "1"})
    assert load_prompts(source(path))[0].label is None


def test_fsspec_urls_are_read(tmp_path):
    jsonl(tmp_path / "a.jsonl", {"prompt": "one"})
    assert load_prompts(source(f"file://{tmp_path}/a.jsonl"))[0].prompt == "one"


def test_the_number_of_a_task_is_a_prompt(tmp_path):
    jsonl(tmp_path / "tasks.jsonl", {"prompt": 0}, {"prompt": 12})
    rows = load_prompts(source(str(tmp_path / "tasks.jsonl")))
    assert [row.prompt for row in rows] == ["0", "12"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{not json", r"not JSON"),
        ("[1, 2]", r"not a JSON object"),
        ({"text": "x", "label": "1"}, r"no 'prompt'[\s\S]*columns 'label', 'text'[\s\S]*input_key"),
        ({"prompt": "x"}, r"no 'label'[\s\S]*label_key"),
        ({"prompt": None, "label": "1"}, r"no 'prompt'[\s\S]*null in column 'prompt'"),
        ({"prompt": "", "label": "1"}, r"not a prompt"),
        ({"prompt": 0.5, "label": "1"}, r"not a prompt[\s\S]*float 0.5"),
        ({"prompt": True, "label": "1"}, r"not a prompt[\s\S]*bool True"),
        ({"prompt": [], "label": "1"}, r"not a prompt"),
        ({"prompt": [{"content": "no role"}], "label": "1"}, r"not a prompt"),
        ({"prompt": "x", "label": True}, r"not a label[\s\S]*bool"),
        ({"prompt": "x", "label": "1", "metadata": "{"}, r"metadata is not JSON"),
        ({"prompt": "x", "label": "1", "metadata": [1]}, r"metadata is not an object"),
    ],
)
def test_a_bad_row_is_named_with_its_line(tmp_path, row, message):
    path = jsonl(tmp_path / "a.jsonl", {"prompt": "fine", "label": "1"}, row)
    key = "evaluation.datasets.1.prompts"
    with pytest.raises(DataError, match=message) as caught:
        load_prompts(source(path, label_key="label"), key=key)
    # The column that has the wrong value; a missing column is in the message.
    column = message.removeprefix("not a ").partition(" ")[0].partition("[")[0]
    has_value = column in ("prompt", "label", "metadata")
    assert caught.value.where == f"{path}:2" + (f", column '{column}'" if has_value else "")
    if "no '" in message:
        named = "input_key" if "no 'prompt'" in message else "label_key"
        assert f"set {key}.{named} to a column of this file" in str(caught.value.do)


def test_settings_of_rows_are_named_by_their_whole_key(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", {"question": [{"role": "user"}], "answer": "4"})
    keys = {"input_key": "question", "label_key": "answer"}
    for setting, column in (("label_pattern", "answer"), ("prompt_format", "question")):
        given = {"label_pattern": "#(.)"} if column == "answer" else {"prompt_format": "Q {prompt}"}
        with pytest.raises(DataError, match=rf"data\.prompts\.{setting}") as caught:
            load_prompts(source(path, **keys, **given))
        assert caught.value.where == f"{path}:1, column '{column}'"
    with pytest.raises(DataError, match=r"given twice") as caught:
        load_prompts(source(path, path, **keys))
    assert caught.value.where == "data.prompts.paths.1"
    with pytest.raises(DataError, match=r"\(evaluation\.datasets\.0\.prompts\.paths\)"):
        load_prompts(source(tmp_path / "none.jsonl"), key="evaluation.datasets.0.prompts")


def test_metadata_that_json_cannot_store_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": ["x"], "metadata": [{"raw": b"\x00"}]}), path)
    with pytest.raises(DataError, match="metadata cannot be written as JSON") as caught:
        load_prompts(source(path))
    assert caught.value.where == f"{path}:row 0, column 'metadata'"


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"none.jsonl: the prompt file cannot be read"):
        load_prompts(source(tmp_path / "none.jsonl"))


def test_an_unknown_url_scheme_is_named():
    with pytest.raises(DataError, match=r"s9://x/a.jsonl: the prompt file cannot be read"):
        load_prompts(source("s9://x/a.jsonl"))


def test_an_empty_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"empty"):
        load_prompts(source(jsonl(tmp_path / "a.jsonl", "", "")))
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"empty"):
        load_prompts(source(tmp_path / "a.parquet"))


def test_a_file_that_is_not_parquet_is_named(tmp_path):
    (tmp_path / "a.parquet").write_text("prompt\n")
    with pytest.raises(DataError, match=r"a.parquet: the file is not Parquet"):
        load_prompts(source(tmp_path / "a.parquet"))


@pytest.mark.parametrize(
    ("name", "do"),
    [("a.json", "jq -c .* > .*a.jsonl"), ("a.csv", "read_csv"), (".", "the path of a file")],
)
def test_another_file_type_is_refused_with_a_way_to_convert_it(tmp_path, name, do):
    with pytest.raises(DataError, match=r"\.jsonl or \.parquet") as caught:
        load_prompts(source(tmp_path / name))
    assert re.search(do, str(caught.value.do))


def test_the_command_for_a_csv_file_writes_its_rows(tmp_path, monkeypatch):
    (tmp_path / "a.csv").write_text("prompt,label\n1+1=,2\n")
    with pytest.raises(DataError) as caught:
        load_prompts(source(tmp_path / "a.csv"))
    program = re.search(r'python -c "(.*)"', str(caught.value.do))
    assert program
    subprocess.run([sys.executable, "-c", program[1]], check=True)
    (row,) = load_prompts(source(tmp_path / "a.parquet", label_key="label"))
    assert (row.prompt, row.label) == ("1+1=", "2")


def test_another_encoding_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_bytes('{"prompt": "é"}\n'.encode("latin-1"))
    with pytest.raises(DataError, match=r"a.jsonl:1: the line is not UTF-8[\s\S]*iconv"):
        load_prompts(source(tmp_path / "a.jsonl"))


def test_a_label_is_the_group_of_its_pattern(tmp_path: Path):
    path = tmp_path / "gsm8k.jsonl"
    path.write_text('{"question": "2 + 2?", "answer": "Two and two.\\n#### 4"}\n')
    keys = {"input_key": "question", "label_key": "answer"}
    source = FilePrompts(
        type="file",
        paths=(str(path),),
        **keys,
        label_pattern="#### (.*)",
        prompt_format="Q: {prompt}",
    )
    assert [(row.prompt, row.label) for row in load_prompts(source)] == [("Q: 2 + 2?", "4")]
    wrong = source.model_copy(update={"label_pattern": "= (.*)"})
    with pytest.raises(DataError, match="label_pattern does not match") as error:
        load_prompts(wrong)
    assert error.value.where == f"{path}:1, column 'answer'"


def test_a_prompt_format_is_for_strings(tmp_path: Path):
    path = tmp_path / "chat.jsonl"
    path.write_text('{"prompt": [{"role": "user", "content": "2 + 2?"}]}\n')
    source = FilePrompts(type="file", paths=(str(path),), prompt_format="{prompt} \\boxed{{}}")
    with pytest.raises(DataError, match="prompt_format is for strings"):
        load_prompts(source)


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("prompt_format", "{question}", "not a format of the prompt"),
        ("prompt_format", "the prompt", "has no {prompt}"),
        ("prompt_format", "{prompt} {", "not a format of the prompt"),
        ("label_pattern", "####", "no group"),
        ("label_pattern", "(", "not a regular expression"),
    ],
)
def test_wrong_formats_and_patterns_are_refused(key: str, value: str, problem: str):
    with pytest.raises(ValueError, match=problem):
        FilePrompts(type="file", paths=("a.jsonl",), label_key="label", **{key: value})
    with pytest.raises(ValueError, match="set label_key"):
        FilePrompts(type="file", paths=("a.jsonl",), label_pattern="(.*)")
