"""Images of a store: written once, kept by garbage collection, checked by the audit."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from rlpipe.errors import ObjectCorrupt
from rlpipe.store.audit.verification import check_store
from rlpipe.store.gc import unreachable
from rlpipe.store.images import OUTPUT, Images, image_path
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.store.parquet.rows import samples_to_table, table_to_samples
from rlpipe.store.parquet.schema import SAMPLES, decode, encode
from rlpipe.types import DataState, Image, Plan, Stage
from tests.store.lineage import Run, collect, group, make_node


def add(files: Files, content: bytes) -> str:
    digest = hashlib.sha256(content).hexdigest()
    Images(files).add(digest, lambda: content)
    return digest


class RunWithImages(Run):
    """Every planned group has the image of its id."""

    def plan(self, iteration: int, before: DataState) -> Plan:
        plan = super().plan(iteration, before)
        groups = (
            one.model_copy(update={"images": ((add(self.files, one.group_id.encode()), 2, 4),)})
            for one in plan.groups
        )
        return plan.model_copy(update={"groups": tuple(groups)})


@pytest.fixture
def run(files: Files) -> RunWithImages:
    run = RunWithImages(files)
    run.start()
    for _ in range(2):
        run.iterate()
    return run


def test_an_image_is_written_once_and_read_by_its_digest(files: Files):
    digest = add(files, b"picture")
    Images(files).add(digest, lambda: pytest.fail("the image is in the store"))
    assert Images(files).read(digest) == b"picture"
    assert files.list() == [image_path(digest)]


def test_a_changed_image_is_refused(tmp_path):
    files = Files(tmp_path)
    digest = add(files, b"picture")
    path = tmp_path / image_path(digest)
    path.chmod(0o644)
    path.write_bytes(b"another")
    with pytest.raises(ObjectCorrupt):
        Images(files).read(digest)


def test_a_plan_without_images_has_the_bytes_of_earlier_plans(files: Files):
    plan = Run(files).plan(0, DataState())
    assert "images" not in plan.model_dump_json()


def test_rows_without_images_have_no_such_column_in_their_file():
    samples = group("run:00000000")
    assert b"images" not in encode(samples_to_table(samples, 0))
    images: list[Image] = [("a" * 64, 2, 4), ("b" * 64, 6, 6)]
    samples[1].images = images
    table = decode(encode(samples_to_table(samples, 0)), "rows")
    assert table.schema.names == SAMPLES.names
    assert [sample.images for sample in table_to_samples(table)] == [[], images]


def test_images_of_plans_and_evaluations_are_no_garbage(run: RunWithImages, files: Files):
    Run(files, "fork").start(parent="run/00000000").iterate()
    assert unreachable(files, grace_s=-60) == []
    weights = Nodes(files).get(Stage.TRAIN, newest(run).nodes[Stage.TRAIN]).digest
    held_out, garbage = add(files, b"held out"), add(files, b"of no plan")
    node = make_node(Stage.EVAL, {"weights": weights}, dataset="held")
    Nodes(files).commit(node.model_copy(update={"outputs": {OUTPUT: [held_out]}}))
    notes = [note.where for note in check_store(files).notes if "images/" in note.where]
    assert notes == [files.url(image_path(garbage))]
    assert collect(files, grace_s=-60) == [image_path(garbage)]
    assert files.exists(image_path(held_out))
    assert check_store(files).findings == []


def test_an_image_of_a_crashed_iteration_stays(run: RunWithImages, files: Files):
    run.iterate(stop_after=Stage.ROLLOUT)
    assert unreachable(files, grace_s=-60) == []
    assert [note for note in check_store(files).notes if "images/" in note.where] == []


def newest(run: Run):
    from rlpipe.store.branches import Branches

    commit = Branches(run.files).newest(run.branch)
    assert commit is not None
    return commit


def test_the_audit_reads_every_image(tmp_path: Path):
    files = Files(tmp_path)
    run = RunWithImages(files)
    run.start()
    run.iterate()
    assert check_store(files).findings == []
    first, second, *_ = files.list("images")
    changed = tmp_path / first
    changed.chmod(0o644)
    changed.write_bytes(b"?")
    files.delete(second)
    found = {Path(finding.where).name for finding in check_store(files).findings}
    assert found == {Path(first).name, Path(second).name}


def test_the_audit_names_an_image_of_no_plan_and_an_unknown_name(tmp_path: Path):
    files = Files(tmp_path)
    run = RunWithImages(files)
    run.start()
    run.iterate()
    left = add(files, b"of a killed driver")
    files.create("images/picture.png", b"?")
    report = check_store(files)
    assert [Path(finding.where).name for finding in report.findings] == ["picture.png"]
    assert [Path(note.where).name for note in report.notes] == [left]
