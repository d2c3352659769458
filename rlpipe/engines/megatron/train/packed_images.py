"""`packed_images`: the images of a packed micro-batch, and the positions of its tokens."""

from __future__ import annotations

import numpy as np
import torch

from rlpipe.batch.columns import BatchColumns
from rlpipe.batch.images import placed
from rlpipe.engines.megatron import platform
from rlpipe.engines.megatron.model.attention import Rotations
from rlpipe.engines.megatron.model.vision import ImageInputs, ImageLayout


def packed_images(
    batch: BatchColumns,
    samples: np.ndarray,
    layout: ImageLayout | None,
    starts: np.ndarray,
    padded: np.ndarray,
    local: np.ndarray,
    local_of: np.ndarray,
) -> tuple[ImageInputs | None, Rotations | None]:
    """Return the images of a micro-batch on this rank, and the positions of its tokens.

    `layout`: None for a model of text, which has neither. `starts`: first packed token of each
    sample. `padded`: tokens of each segment. `local`: the packed tokens of this rank. `local_of`:
    each packed token's number on this rank, or -1. Raises: DataError, as `batch.images.placed`.
    """
    if layout is None:
        return None, None
    device = platform.device()
    ends = np.cumsum(padded)
    positions = np.tile(np.arange(ends[-1]) - np.repeat(ends - padded, padded), (3, 1))
    is_image = np.zeros(ends[-1], bool)
    pixels: list[np.ndarray] = []
    grids: list[np.ndarray] = []
    for sample, start in zip(samples, starts, strict=False):
        images = batch.images
        if images is None or not len(images.digests[here := images.of_sample(sample)]):
            continue
        tokens = batch.tokens[batch.offsets[sample] : batch.offsets[sample + 1]]
        packed = slice(start, start + len(tokens))
        positions[:, packed], is_image[packed] = placed(
            tokens, images.grids[here], image_token=layout.image_token, merge=layout.merge
        )
        pixels += [images.pixels[digest] for digest in images.digests[here]]
        grids += [*images.grids[here]]

    def moved(array: np.ndarray) -> torch.Tensor:
        return platform.to_device(torch.from_numpy(array), device)

    rotations = Rotations(moved(positions[:, local]), moved(np.asarray(layout.axes)))
    if not pixels:
        return None, rotations
    tokens = np.flatnonzero(is_image)
    here = local_of[tokens] >= 0
    inputs = ImageInputs(
        pixels=moved(np.concatenate(pixels)),
        grids=torch.from_numpy(np.stack(grids)),
        tokens=moved(local_of[tokens[here]]),
        features=moved(np.flatnonzero(here)),
    )
    return inputs, rotations
