"""`shown_images`: images of prompts as data URIs, for pages without other files.

A large picture is shrunk. A page has a bounded number of bytes of pictures; those beyond the bound,
and pictures that the store does not have any more, are left out.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable

from PIL import Image

from rlpipe.errors import StoreError
from rlpipe.store.images import Images
from rlpipe.store.objects.files import Files

SIDE = 384
"""Pixels of the longer side of a shrunk picture, at most."""
WHOLE_BYTES = 32 * 2**10
"""A file up to this size is shown as it is."""
PAGE_BYTES = 8 * 2**20
"""Bytes of all pictures of a page."""
KINDS = {"PNG": "png", "JPEG": "jpeg", "GIF": "gif", "WEBP": "webp"}
"""Formats of Pillow that browsers show."""


def shown_images(files: Files, digests: Iterable[str]) -> dict[str, str]:
    """Return digest → data URI, in this order until the page is full."""
    images = Images(files)
    shown: dict[str, str] = {}
    left = PAGE_BYTES
    for digest in dict.fromkeys(digests):
        try:
            uri = data_uri(images.read(digest))
        except (StoreError, OSError, ValueError):
            continue
        left -= len(uri)
        if left < 0:
            break
        shown[digest] = uri
    return shown


def data_uri(content: bytes) -> str:
    """Return an image file as a data URI, shrunk if it is large.

    Raises: OSError, ValueError if it is no image.
    """
    with Image.open(io.BytesIO(content)) as image:
        kind = KINDS.get(image.format or "")
        if kind is None or len(content) > WHOLE_BYTES:
            kind = "jpeg"
            shrunk = image.convert("RGB")
            shrunk.thumbnail((SIDE, SIDE))
            file = io.BytesIO()
            shrunk.save(file, "JPEG", quality=80)
            content = file.getvalue()
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
