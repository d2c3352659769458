"""Images of a batch and the positions of their tokens."""

from __future__ import annotations

import numpy as np
import pytest

from rlpipe.batch.build import fix_batch
from rlpipe.batch.columns import BatchColumns
from rlpipe.batch.files import StoredBatch, write_batch
from rlpipe.batch.images import BatchImages, batch_images, placed
from rlpipe.errors import DataError
from rlpipe.rewards.reward_rows import RewardRow
from rlpipe.store.objects.files import Files
from rlpipe.types import Image, Node, Sample, Stage, Status
from tests.rows import rows_of

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


FIRST: Image = ("a" * 64, 2, 4)
SECOND: Image = ("b" * 64, 6, 6)


def sample(group: int, *images: Image) -> Sample:
    return Sample(
        group_id=f"run:{group:08d}",
        prompt_ids=[1, IMAGE, 2],
        images=list(images),
        response_ids=[3, IMAGE, 4][: group + 1],
        rollout_log_probs=[-0.5, -0.25, -0.125][: group + 1],
        status=Status.COMPLETED,
    )


def chosen(*samples: Sample):
    rewards = [RewardRow(one.group_id, one.index, 1.0) for one in samples]
    groups = [one.group_id for one in samples]
    return fix_batch(rows_of(samples), rewards, accepted=groups, scored=True, version=0)


def test_the_images_of_rows_reach_the_batch_and_its_file(tmp_path):
    rows = chosen(sample(0, FIRST, SECOND), sample(1), sample(2, FIRST))
    part = rows.columns(np.array([0, 2])).images
    assert part is not None and part.references() == [[FIRST, SECOND], [FIRST]]
    assert part.grids.tolist() == [[1, 2, 4], [1, 6, 6], [1, 2, 4]]
    batch = rows.batch()
    files = Files(tmp_path)
    written = write_batch(files, "d" * 64, batch, batch.columns, [[2], [0, 1]])
    node = Node(stage=Stage.ADVANTAGE, digest="d" * 64, files=written.files)
    stored = StoredBatch(files, node)
    whole, some = stored.columns().images, stored.columns(np.array([1, 2])).images
    assert whole is not None and whole.references() == [[FIRST, SECOND], [], [FIRST]]
    assert some is not None and some.references() == [[], [FIRST]]


def test_a_batch_of_text_has_no_images(tmp_path):
    rows = chosen(sample(0), sample(1))
    assert rows.columns(np.array([0])).images is None
    batch = rows.batch()
    written = write_batch(Files(tmp_path), "d" * 64, batch, batch.columns)
    assert b"images" not in Files(tmp_path).read(written.files[0].path)
    assert batch_images([[], []]) is None


def test_a_response_is_cut_before_a_token():
    batch = BatchColumns.from_lists(
        [[1, IMAGE], [2], [IMAGE, 3]],
        [[4, 5], [6, IMAGE, 7], [IMAGE]],
        proximal_log_probs=[[0.1, 0.2], [0.3, 0.4, 0.5], [0.6]],
    )
    cut = batch.cut_before(IMAGE)
    assert cut.tokens.tolist() == [1, IMAGE, 4, 5, 2, 6, IMAGE, 3]
    assert cut.response_lengths.tolist() == [2, 1, 0]
    assert cut.proximal_log_probs is not None
    assert np.allclose(cut.proximal_log_probs, [0.1, 0.2, 0.3])
