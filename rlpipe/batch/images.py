"""The images of a batch: references in the order of the samples, and the pixels by digest.

Sample i owns the images `offsets[i]` to `offsets[i + 1]`. In its tokens, each image is a run of
placeholder tokens, one for every merged patch. An image of a grid (t, h, w) has t · h · w patches
and t · h · w / merge² tokens. `placed` finds these runs and the positions of all tokens.

Legend: N samples, I images, L tokens of one sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlpipe.errors import DataError
from rlpipe.types import Image


@dataclass(slots=True, frozen=True, eq=False)
class BatchImages:
    """References to images, and their pixels."""

    offsets: np.ndarray
    """[N + 1] int64, from 0 to I."""
    grids: np.ndarray
    """[I, 3] int64: patches in time, height and width."""
    digests: tuple[str, ...]
    """SHA-256 of each image's file."""
    pixels: Mapping[str, np.ndarray]
    """Digest → [t · h · w, values of a patch] float32, as transformers' image processor returns
    them. May load an image at its first use."""

    def select(self, samples: np.ndarray) -> BatchImages:
        """Return the images of these samples, in this order."""
        chosen = [np.arange(self.offsets[i], self.offsets[i + 1]) for i in samples]
        index = np.concatenate([np.zeros(0, np.int64), *chosen])
        return BatchImages(
            offsets=np.cumsum([0, *(len(each) for each in chosen)], dtype=np.int64),
            grids=self.grids[index],
            digests=tuple(self.digests[i] for i in index),
            pixels=self.pixels,
        )

    def references(self) -> list[list[Image]]:
        """Return the references to the images of each sample."""
        every = [
            (digest, int(rows), int(columns))
            for digest, (_, rows, columns) in zip(self.digests, self.grids.tolist(), strict=True)
        ]
        return [every[self.of_sample(sample)] for sample in range(len(self.offsets) - 1)]

    def of_sample(self, sample: int) -> slice:
        """Return the images of a sample, as a slice of `grids` and `digests`."""
        return slice(int(self.offsets[sample]), int(self.offsets[sample + 1]))


def batch_images(images: Sequence[Sequence[Image]]) -> BatchImages | None:
    """Return the images of samples, without pixels; None if no sample has any."""
    if not any(images):
        return None
    every = [image for row in images for image in row]
    return BatchImages(
        offsets=np.cumsum([0, *map(len, images)], dtype=np.int64),
        grids=np.array([(1, rows, columns) for _, rows, columns in every], np.int64),
        digests=tuple(digest for digest, _, _ in every),
        pixels={},
    )


def placed(
    tokens: np.ndarray, grids: np.ndarray, *, image_token: int, merge: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return positions [3, L] int64 (time, height, width), and a mask [L] of the images' tokens.

    Text has three equal positions. An image that starts at position p has the positions (p + t,
    p + row, p + column) of its merged patches, and the text after it continues at p + max(rows,
    columns), as transformers' `get_rope_index`. Further placeholder tokens are text: a policy may
    sample them. `grids`: [images, 3], of this sample. Raises: DataError if an image has no tokens.
    """
    positions = np.empty((3, len(tokens)), np.int64)
    is_image = np.zeros(len(tokens), bool)
    token = position = 0
    for number, (time, height, width) in enumerate(grids.tolist()):
        rows = height // merge
        columns = width // merge
        count = time * rows * columns
        found = np.flatnonzero(tokens[token:] == image_token)
        start = token + int(found[0]) if len(found) else len(tokens)
        if not (tokens[start : start + count] == image_token).all() or start + count > len(tokens):
            raise DataError(
                "an image has no placeholder tokens",
                where=f"image {number} of a sample",
                found=f"{len(found)} of token {image_token} after token {token}",
                expected=f"{count} in a row, for {time} × {height} × {width} patches",
            )
        positions[:, token:start] = position + np.arange(start - token)
        position += start - token
        steps = np.indices((time, rows, columns)).reshape(3, -1)
        positions[:, start : start + count] = position + steps
        is_image[start : start + count] = True
        position += max(rows, columns)
        token = start + count
    positions[:, token:] = position + np.arange(len(tokens) - token)
    return positions, is_image
