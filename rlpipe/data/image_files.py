"""Images of prompt rows: paths, URLs, base64 or bytes, and the places of images in a prompt.

A prompt has `<image>` in its text, or chat messages with parts of type `image`, once for each image
of the row. A part may have its image (`image`, `image_url`, or `url`); the others follow the column
that `data.multimodal_keys` names, which has one image or a list. A relative path counts from the
folder of the prompt file, else as the path of a prompt file.

Entry points: `ImageFile`, `take_images`, `with_parts`, `image_size`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from typing import Any

import fsspec
from PIL import Image, ImageOps

from rlpipe.data.prompt_files import excerpt
from rlpipe.errors import DataError
from rlpipe.system.plain_files import open_plain
from rlpipe.system.project import in_project
from rlpipe.types import Message, Prompt

PLACEHOLDER = "<image>"
"""The place of an image in a text, as in slime."""
SETTING = "data.multimodal_keys.image"
MAX_BYTES = 256 * 1024**2
"""Limit for the file of an image."""
_EXPECTED = "a path, a URL, base64, or bytes of an image"
_DATA_URI = re.compile(r"data:[^,]*;base64,", re.IGNORECASE)
_MAGIC = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"BM", b"RIFF", b"II*\0", b"MM\0*")


@dataclass(frozen=True, slots=True)
class ImageFile:
    """An image of a row. Files on disk are read again when they are needed."""

    sha256: str
    """Of the file."""
    width: int
    """Pixels."""
    height: int
    """Pixels."""
    content: bytes | None
    """None: read `path`."""
    path: str = ""
    where: str = ""
    """Name of the row in errors."""

    def read(self) -> bytes:
        """Return the file. Raises: DataError if it has changed since the rows were checked."""
        if self.content is not None:
            return self.content
        content = _read(self.path, self.where)
        if hashlib.sha256(content).hexdigest() != self.sha256:
            raise DataError(
                "the file of an image has changed since the run started",
                where=self.where,
                found=self.path,
                do="restore the file, or start a new run",
            )
        return content


def take_images(
    prompt: Prompt | None, column: Any, where: str, *, folder: str
) -> tuple[Prompt | None, tuple[ImageFile, ...]]:
    """Return the prompt without contents of images, and the images in the order of their places.

    `column`: value of the row's column; None: no images there. `folder`: of the prompt file.
    Raises: DataError for a missing file, a file that is no image, and another number of images than
    places.
    """
    values = [] if column is None else column if isinstance(column, list | tuple) else [column]
    left = iter(values)
    found: list[Any] = []
    if isinstance(prompt, list):
        prompt = [_without_contents(message, left, found) for message in prompt]
    elif prompt is not None:
        found += _next_of(left, prompt.count(PLACEHOLDER))
    unused = len(list(left))
    missing = found.count(None)
    if unused or missing:
        raise DataError(
            "the prompt and the row have different numbers of images",
            where=where,
            found=f"{len(found)} places in the prompt, {len(values)} images in the column",
            expected=f"one {PLACEHOLDER}, or one message part of type image, for each image",
            do=f"correct the row, or the column ({SETTING})",
        )
    images = (
        _image_file(value, f"{where}, image {number}", folder) for number, value in enumerate(found)
    )
    return prompt, tuple(images)


def with_parts(messages: list[Message]) -> list[Message]:
    """Return messages with an image part in place of each `<image>` of their texts."""
    return [
        {**message, "content": _parts(message["content"])}
        if isinstance(message.get("content"), str) and PLACEHOLDER in message["content"]
        else message
        for message in messages
    ]


def image_size(content: bytes, where: str) -> tuple[int, int]:
    """Return width and height of an image in pixels. Raises: DataError if it is no image."""
    try:
        with Image.open(io.BytesIO(content)) as image:
            image.verify()
        with Image.open(io.BytesIO(content)) as image:
            return upright(image).size
    # Pillow raises SyntaxError and others for damaged files of some formats.
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(
            "this is not an image that can be read",
            where=where,
            found=f"{len(content)} bytes {excerpt(content[:16])} ({error})",
            expected=_EXPECTED,
        ) from error


def upright(image: Image.Image) -> Image.Image:
    """Return the image rotated as its EXIF data says, as transformers reads it."""
    return ImageOps.exif_transpose(image) or image


def _parts(text: str) -> list[dict[str, str]]:
    pieces = re.split(f"({re.escape(PLACEHOLDER)})", text)
    return [
        {"type": "image"} if piece == PLACEHOLDER else {"type": "text", "text": piece}
        for piece in pieces
        if piece
    ]


def _next_of(values: Iterator[Any], count: int) -> list[Any]:
    """Return the next values; None where there is none."""
    return [next(values, None) for _ in range(count)]


def _without_contents(message: Message, left: Iterator[Any], found: list[Any]) -> Message:
    """Return a message whose image parts have no content. The contents are appended to `found`."""
    content = message.get("content")
    if isinstance(content, str):
        found += _next_of(left, content.count(PLACEHOLDER))
    if not isinstance(content, list):
        return message
    parts = []
    for part in content:
        if isinstance(part, dict) and part.get("type") in ("image", "image_url"):
            own = part.get("image") or part.get("image_url") or part.get("url")
            own = own.get("url") if isinstance(own, dict) and "url" in own else own
            found.append(next(left, None) if own is None else own)
            part = {"type": "image"}
        elif isinstance(part, dict):
            # Parquet gives every part the keys of all parts.
            part = {name: value for name, value in part.items() if value is not None}
        parts.append(part)
    return {**message, "content": parts}


def _image_file(value: Any, where: str, folder: str) -> ImageFile:
    """Return the image of a value, checked. Raises: DataError."""
    if isinstance(value, dict) and ("bytes" in value or "path" in value):
        value = value.get("bytes") or value.get("path")
    make = partial(_checked, where=where)
    if isinstance(value, bytes):
        return make(value)
    if not isinstance(value, str) or not value:
        raise DataError("not an image", where=where, found=excerpt(value), expected=_EXPECTED)
    if match := _DATA_URI.match(value):
        return make(_decoded(value[match.end() :], where))
    if (content := _base64(value)) is not None:
        return make(content)
    path = _path(value, folder)
    return make(_read(path, where), path=path)


def _checked(content: bytes, *, where: str, path: str = "") -> ImageFile:
    width, height = image_size(content, where)
    digest = hashlib.sha256(content).hexdigest()
    return ImageFile(digest, width, height, None if path else content, path, where)


def _decoded(text: str, where: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise DataError(
            "the image is not base64", where=where, found=f"{excerpt(text)} ({error})"
        ) from error


def _base64(text: str) -> bytes | None:
    """Return the content of base64 that begins like an image; None for any other text."""
    try:
        begins = base64.b64decode(text[:8], validate=True).startswith(_MAGIC)
        return base64.b64decode(text, validate=True) if begins else None
    except (binascii.Error, ValueError):
        return None


def _path(value: str, folder: str) -> str:
    if "://" in value or PurePath(value).is_absolute():
        return value.removeprefix("file://")
    path = f"{folder}/{value}" if folder else value
    return path if "://" in path or os.path.exists(path) else in_project(value)  # noqa: PTH110


def _read(path: str, where: str) -> bytes:
    try:
        with fsspec.open(path, "rb") if "://" in path else open_plain(path) as stream:
            content: bytes = stream.read(MAX_BYTES + 1)  # pyright: ignore[reportAttributeAccessIssue]
    # fsspec raises TypeError for a protocol that needs more than a URL, ImportError without its
    # package.
    except (OSError, ValueError, TypeError, ImportError) as error:
        raise DataError(
            "the file of an image cannot be read",
            where=where,
            found=f"{path[:200]} ({type(error).__name__}: {error})"[:400],
            expected=_EXPECTED,
            do="correct the path; a relative path counts from the folder of the prompt file",
        ) from error
    if len(content) > MAX_BYTES:
        raise DataError("the file of an image is too large", where=where, found=path)
    return content
