"""Image files of prompts, each stored once under its content.

    images/<sha256>     the bytes of a file

Plans, rows and evaluations name images by their digest. A fork shares the images of its origin.

Entry points: `Images`, `image_path`.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from rlpipe.store.objects.files import Files
from rlpipe.types import Node, Plan, Stage

FOLDER = "images"
IMAGE_NAME = re.compile(r"images/([0-9a-f]{64})")
OUTPUT = "images"
"""Output of an evaluation node: the digests of its images. Its prompts have no plan."""


def image_path(digest: str) -> str:
    """Return the path of an image."""
    return f"{FOLDER}/{digest}"


def images_of_plan(plan: Plan) -> set[str]:
    """Return the digests of the images of a plan's prompts."""
    return {image[0] for group in plan.groups for image in group.images}


def images_of_node(node: Node) -> set[str]:
    """Return the digests of the images of an evaluation; empty for other nodes."""
    named = node.outputs.get(OUTPUT) if node.stage is Stage.EVAL else None
    return {one for one in named if isinstance(one, str)} if isinstance(named, list) else set()


class Images:
    """The images of a store."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._present: set[str] = set()

    def add(self, digest: str, read: Callable[[], bytes]) -> None:
        """Store the file of a digest, which `read` returns. A stored file is not sent again."""
        if digest in self._present:
            return
        if not self._files.exists(image_path(digest)):
            self._files.create(image_path(digest), read())
        self._present.add(digest)

    def read(self, digest: str) -> bytes:
        """Return the file of a digest. Raises: ObjectMissing, ObjectCorrupt."""
        return self._files.read(image_path(digest), sha256=digest)
