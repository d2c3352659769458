"""Images of prompt rows: every form of an image, and the errors of bad rows."""

from __future__ import annotations

import base64
import hashlib
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from rlpipe.config.data import FilePrompts
from rlpipe.data.image_files import with_parts
from rlpipe.data.prompts import load_prompts
from rlpipe.errors import DataError


def png(width: int = 6, height: int = 4, colour: str = "red") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(file, "PNG")
    return file.getvalue()


PNG = png()
TEXT = base64.b64encode(PNG).decode()


def load(path: Path, **options: Any):
    source = FilePrompts(type="file", paths=(str(path),))
    return load_prompts(source, image_key="images", **options)


def rows_of(folder: Path, *rows: dict[str, Any], **options: Any):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load(path, **options)


@pytest.mark.parametrize("value", ["a.png", "{folder}/a.png", "file://{folder}/a.png", TEXT])
@pytest.mark.parametrize("streaming", [False, True])
def test_an_image_is_a_path_or_base64(tmp_path, value, streaming):
    (tmp_path / "a.png").write_bytes(PNG)
    value = value.format(folder=tmp_path)
    rows = rows_of(tmp_path, {"prompt": "<image>count", "images": [value]}, streaming=streaming)
    (image,) = rows[0].images
    assert (image.width, image.height) == (6, 4)
    assert image.sha256 == hashlib.sha256(PNG).hexdigest()
    assert image.read() == PNG
    assert rows[0].prompt == "<image>count"


def test_parquet_has_bytes_or_the_structure_of_hugging_face(tmp_path):
    path = tmp_path / "rows.parquet"
    other = png(colour="blue")
    table = {
        "prompt": ["<image>a", "<image><image>b"],
        "images": [[{"bytes": PNG, "path": None}], [{"bytes": PNG, "path": "x"}, {"bytes": other}]],
    }
    pq.write_table(pa.table(table), path)
    assert [len(row.images) for row in load(path)] == [1, 2]
    assert load(path)[1].images[1].read() == other
    pq.write_table(pa.table({"prompt": ["<image>a"], "images": [PNG]}), path)
    assert load(path)[0].images[0].read() == PNG


def test_parts_of_messages_have_their_images_or_take_those_of_the_column(tmp_path):
    uri = f"data:image/png;base64,{TEXT}"
    own = [
        {"type": "image_url", "image_url": {"url": uri}},
        {"type": "image", "image": TEXT},
        {"type": "text", "text": "same?"},
    ]
    messages = [{"role": "system", "content": "see <image>"}, {"role": "user", "content": own}]
    other = png(8, 8)
    column = base64.b64encode(other).decode()
    (row,) = rows_of(tmp_path, {"prompt": messages, "images": column})
    assert [image.read() for image in row.images] == [other, PNG, PNG]
    assert isinstance(row.prompt, list)
    assert row.prompt[1]["content"] == [{"type": "image"}, {"type": "image"}, own[2]]
    assert with_parts(row.prompt)[0]["content"] == [
        {"type": "text", "text": "see "},
        {"type": "image"},
    ]


def test_a_row_may_have_no_image(tmp_path):
    assert [row.images for row in rows_of(tmp_path, {"prompt": "text"})] == [()]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "<image>", "images": ["gone.png"]}, "cannot be read.*\n.*gone.png"),
        ({"prompt": "<image>", "images": ["rows.jsonl"]}, "not an image"),
        ({"prompt": "<image>", "images": [TEXT[:60]]}, "not an image"),
        ({"prompt": "<image>", "images": ["data:image/png;base64,?"]}, "not base64"),
        ({"prompt": "<image>", "images": [7]}, "not an image"),
        ({"prompt": "<image>", "images": []}, "different numbers of images"),
        ({"prompt": "<image><image>", "images": [TEXT]}, "2 places in the prompt, 1 images"),
        ({"prompt": "no place", "images": [TEXT]}, "0 places in the prompt, 1 images"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "different numbers"),
    ],
)
def test_a_bad_row_is_an_error_that_names_it(tmp_path, row, problem):
    with pytest.raises(DataError, match=problem) as error:
        rows_of(tmp_path, {"prompt": "good"}, row)
    assert "rows.jsonl:2, column 'images'" in str(error.value)


def test_a_file_that_changes_after_the_check_is_an_error(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(PNG)
    (row,) = rows_of(tmp_path, {"prompt": "<image>", "images": ["a.png"]})
    path.write_bytes(png(colour="blue"))
    with pytest.raises(DataError, match="has changed since the run started"):
        row.images[0].read()


def test_an_image_is_read_as_its_camera_held_it(tmp_path):
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    Image.new("RGB", (6, 4)).save(file, "JPEG", exif=exif)
    content = base64.b64encode(file.getvalue()).decode()
    (row,) = rows_of(tmp_path, {"prompt": "<image>", "images": [content]})
    assert (row.images[0].width, row.images[0].height) == (4, 6)
