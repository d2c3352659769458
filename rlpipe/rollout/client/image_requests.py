"""`ImageRequests`: the images of a prompt in a request to an engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlpipe.data.image_reader import ImageReader, StoredPixels
from rlpipe.store.objects.files import Files
from rlpipe.types import Image

Encode = Callable[[np.ndarray, np.ndarray], list[dict[str, Any]]]
SAME: dict[str, Any] = {"format": "processor_output", "modality": "IMAGE"}
"""An item with the images of an earlier prompt of the batch, `same_as`."""


class RequestImages(NamedTuple):
    """The images of one prompt."""

    data: str
    """SGLang's `image_data` of the prompt as JSON: a list."""
    token: int
    """The placeholder token."""


class ImageRequests:
    """Read the images of prompts for requests.

    `encode`: returns SGLang's `image_data` of pixels [patches, values] and grids [images, 3].
    """

    def __init__(
        self,
        pixels: StoredPixels,
        token: int,
        encode: Encode,
    ) -> None:
        self._pixels = pixels
        self._token = token
        self._encode = encode

    async def of(self, images: Sequence[Image]) -> RequestImages | None:
        """Return the images of a prompt; None without images. Raises: as `StoredPixels`."""
        if not images:
            return None
        return await asyncio.to_thread(self._of, list(images))

    def _of(self, images: list[Image]) -> RequestImages:
        self._pixels.add(images)
        pixels = np.concatenate([self._pixels[digest] for digest, _, _ in images])
        grids = np.array([(1, rows, columns) for _, rows, columns in images], np.int64)
        return RequestImages(json.dumps(self._encode(pixels, grids)), self._token)


def image_requests(
    files: Files, reader: ImageReader | None, encode: Encode
) -> ImageRequests | None:
    """Return the requests of a model; None for a model of text. `encode`: as `ImageRequests`."""
    if reader is None:
        return None
    return ImageRequests(StoredPixels(files, reader), reader.image_token, encode)


def image_data_of(images: Sequence[RequestImages]) -> str:
    """Return the `image_data` of a batch as JSON. Prompts with equal images share one copy."""
    first: dict[str, int] = {}
    entries = []
    for number, one in enumerate(images):
        position = first.setdefault(one.data, number)
        if position == number:
            entries.append(one.data)
        else:
            entries.append(json.dumps([SAME | {"same_as": position}]))
    return f"[{', '.join(entries)}]"
