"""Images of a batch and the positions of their tokens."""

from __future__ import annotations

import numpy as np
import pytest

from rlpipe.batch.images import BatchImages, placed
from rlpipe.errors import DataError

IMAGE = 7


def test_text_after_an_image_continues_at_its_longer_side():
    tokens = np.array([1, IMAGE, IMAGE, IMAGE, IMAGE, IMAGE, IMAGE, 2, 3])
    positions, is_image = placed(tokens, np.array([[1, 4, 6]]), image_token=IMAGE, merge=2)
    assert positions[0].tolist() == [0, 1, 1, 1, 1, 1, 1, 4, 5]
    assert positions[1].tolist() == [0, 1, 1, 1, 2, 2, 2, 4, 5]
    assert positions[2].tolist() == [0, 1, 2, 3, 1, 2, 3, 4, 5]
    assert is_image.tolist() == [0, 1, 1, 1, 1, 1, 1, 0, 0]


def test_a_sampled_placeholder_is_text():
    positions, is_image = placed(
        np.array([IMAGE, 2, IMAGE]), np.array([[1, 2, 2]]), image_token=IMAGE, merge=2
    )
    assert positions.tolist() == [[0, 1, 2]] * 3
    assert is_image.tolist() == [True, False, False]


@pytest.mark.parametrize("tokens", [[1, IMAGE, 2, IMAGE], [1, 2], [IMAGE]])
def test_an_image_without_its_tokens_is_refused(tokens):
    with pytest.raises(DataError, match="no placeholder tokens"):
        placed(np.array(tokens), np.array([[1, 2, 4]]), image_token=IMAGE, merge=2)


def test_selected_samples_keep_their_images():
    images = BatchImages(
        offsets=np.array([0, 2, 2, 3]),
        grids=np.array([[1, 2, 2], [1, 4, 2], [1, 2, 6]]),
        digests=("a", "b", "c"),
        pixels={},
    )
    chosen = images.select(np.array([2, 1, 0]))
    assert chosen.offsets.tolist() == [0, 1, 1, 3]
    assert chosen.digests == ("c", "a", "b")
    assert chosen.grids.tolist() == [[1, 2, 6], [1, 2, 2], [1, 4, 2]]
    assert images.select(np.array([], np.int64)).grids.shape == (0, 3)
